package transporttest

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/transport"
)

var connectCases = []testCase{
	{"Names", testNames},
	{"Reaches", testReaches},
	{"Hello", testHello},
	{"GateTrips", testGateTrips},
	{"GateLargestMessage", testGateLargestMessage},
	{"GateMessageTooLarge", testGateMessageTooLarge},
	{"GateOfListenerRefuses", testGateOfListenerRefuses},
	{"GateOfDialerRefuses", testGateOfDialerRefuses},
	{"ConnectNeedsNoPollOfTheDialer", testConnectNeedsNoPoll},
	{"ConnectFromFabricThatTakesNone", testConnectFromQuiet},
	{"ConnectToItself", testConnectToItself},
	{"ConnectToNobody", testConnectToNobody},
	{"ConnectToForeignAddress", testConnectToForeignAddress},
	{"ConnectWithContextOver", testConnectContextOver},
	{"ConnectEndsWithContext", testConnectEndsWithContext},
	{"ConnectEndsWithHandshakeLimit", testHandshakeLimit},
	{"PendingLimit", testPendingLimit},
	{"TwoConnsBetweenTwoFabrics", testTwoConns},
	{"FortyPeers", testFortyPeers},
	{"Mesh", testMesh},
}

func testNames(w *world) {
	a := w.open("a")
	require.NotEmpty(w, a.f.Name())
	kind, rest, ok := strings.Cut(string(a.f.Addr()), ":")
	require.True(w, ok && kind != "" && rest != "", "address %q is not TRANSPORT:PLACE", a.f.Addr())
	quiet := w.openWith(Options{Gate: Gate{}})
	require.Empty(w, quiet.f.Addr())
	require.NotEqual(w, a.f.Addr(), w.open("b").f.Addr())
}

func testReaches(w *world) {
	a, b := w.open("a"), w.open("b")
	require.True(w, a.f.Reaches(b.f.Addr()))
	require.True(w, b.f.Reaches(a.f.Addr()))
	for _, addr := range foreign(a) {
		require.False(w, a.f.Reaches(addr), "%q", addr)
	}
}

// foreign is addresses that no Fabric of n's transport can have.
func foreign(n *node) []transport.Addr {
	kind, _, _ := strings.Cut(string(n.f.Addr()), ":")
	return []transport.Addr{"", ":", "nosuchtransport:1", transport.Addr(kind), transport.Addr(kind + ":"),
		transport.Addr("x" + string(n.f.Addr()))}
}

func testHello(w *world) {
	a, b := w.connect(w.open("alice"), w.open("bob"))
	require.Equal(w, "bob", string(a.c.Hello()))
	require.Equal(w, "alice", string(b.c.Hello()))
	require.NotEmpty(w, a.c.Remote())
	require.NotEmpty(w, b.c.Remote())
}

func testGateTrips(w *world) {
	for trips := 1; trips <= 4; trips++ {
		a := w.openWith(Options{Gate: Gate{Hello: "a", Trips: trips}, Listen: true})
		b := w.openWith(Options{Gate: Gate{Hello: "b", Trips: trips}, Listen: true})
		la, lb := w.connect(a, b)
		require.Equal(w, "b", string(la.c.Hello()))
		require.Equal(w, "a", string(lb.c.Hello()))
		w.echo(la, lb)
	}
}

// echo sends a frame each way and checks that both arrive.
func (w *world) echo(a, b *link) {
	w.Helper()
	na, nb := len(a.frames), len(b.frames)
	a.post(frame([]byte("there")))
	b.post(frame([]byte("and back")))
	w.until("a frame arrives each way", func() bool { return len(a.frames) > na && len(b.frames) > nb })
	require.Equal(w, "there", string(b.frames[nb]))
	require.Equal(w, "and back", string(a.frames[na]))
}

func testGateLargestMessage(w *world) {
	big := strings.Repeat("h", transport.MaxHandshake-1)
	a, b := w.connect(w.open(big), w.open(big))
	require.Equal(w, big, string(a.c.Hello()))
	require.Equal(w, big, string(b.c.Hello()))
}

func testGateMessageTooLarge(w *world) {
	a, b, big := w.open("a"), w.open("b"), w.open(strings.Repeat("h", transport.MaxHandshake))
	w.refused(context.Background(), big, b.f.Addr())
	w.refused(context.Background(), a, big.f.Addr())
	require.Empty(w, b.fresh)
	w.echo(w.connect(a, b))
}

func testGateOfListenerRefuses(w *world) {
	a := w.open("a")
	b := w.openWith(Options{Gate: Gate{Refuse: "wrong cluster id 7"}, Listen: true})
	for range 3 {
		err := w.refused(context.Background(), a, b.f.Addr())
		require.ErrorContains(w, err, "wrong cluster id 7")
	}
	require.Empty(w, b.links, "the listener heard of a connection that it refused")
	w.echo(w.connect(a, w.open("c")))
}

func testGateOfDialerRefuses(w *world) {
	a := w.openWith(Options{Gate: Gate{Hello: "a", Trips: 2, Refuse: "not you"}, Listen: true})
	b := w.openWith(Options{Gate: Gate{Hello: "b", Trips: 2}, Listen: true})
	err := w.refused(context.Background(), a, b.f.Addr())
	require.ErrorContains(w, err, "not you")
	c := w.openWith(Options{Gate: Gate{Hello: "c", Trips: 2}})
	w.echo(w.connect(c, b))
	require.Len(w, b.links, 1, "the listener heard of a connection that its dialer refused")
}

func testConnectNeedsNoPoll(w *world) {
	a, b := w.open("a"), w.open("b")
	a.asleep = true
	d := a.dial(context.Background(), b.f.Addr())
	w.until("connect", d.over)
	require.NoError(w, d.got.err)
}

func testConnectFromQuiet(w *world) {
	a, b := w.openWith(Options{Gate: Gate{Hello: "quiet"}}), w.open("b")
	require.True(w, a.f.Reaches(b.f.Addr()))
	la, lb := w.connect(a, b)
	require.Equal(w, "quiet", string(lb.c.Hello()))
	w.echo(la, lb)
}

func testConnectToItself(w *world) {
	n := w.open("self")
	require.True(w, n.f.Reaches(n.f.Addr()))
	a, b := w.connect(n, n)
	require.NotSame(w, a, b)
	w.echo(a, b)
	w.transfer(a, b)
}

// transfer writes a few bytes each way and checks them.
func (w *world) transfer(a, b *link) {
	w.Helper()
	for _, p := range [][2]*link{{a, b}, {b, a}} {
		from, to := p[0], p[1]
		dst, k := to.n.target(1000), len(to.writes)
		from.post(dst.write(0, 7, w.source(1, 1000)))
		w.until("a write arrives", func() bool { return len(to.writes) > k })
		require.Equal(w, written{7, 1000}, to.writes[k])
		w.holds("target", dst.Span(), 1)
	}
	w.until("the writes end", func() bool { return a.idle() && b.idle() })
	require.Zero(w, a.failed()+b.failed())
}

func testConnectToNobody(w *world) {
	a, gone := w.open("a"), w.open("gone")
	addr := gone.f.Addr()
	gone.close()
	ctx, stop := context.WithTimeout(context.Background(), 500*time.Millisecond)
	defer stop()
	w.refused(ctx, a, addr)
	w.echo(w.connect(a, w.open("b")))
}

func testConnectToForeignAddress(w *world) {
	a := w.open("a")
	for _, addr := range foreign(a) {
		w.refused(context.Background(), a, addr)
	}
}

func testConnectContextOver(w *world) {
	ctx, stop := context.WithCancel(context.Background())
	stop()
	err := w.refused(ctx, w.open("a"), w.open("b").f.Addr())
	require.ErrorIs(w, err, context.Canceled)
}

// mute opens a Fabric that never answers in the Gate.
func (w *world) mute(lim transport.Limits) *node {
	return w.openWith(Options{Gate: Gate{Mute: true}, Limits: lim, Listen: true})
}

func testConnectEndsWithContext(w *world) {
	a, b := w.open("a"), w.mute(transport.Limits{})
	ctx, stop := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer stop()
	require.ErrorIs(w, w.refused(ctx, a, b.f.Addr()), context.DeadlineExceeded)

	ctx, cancel := context.WithCancel(context.Background())
	d := a.dial(ctx, b.f.Addr())
	w.turns(100)
	require.False(w, d.over())
	cancel()
	w.until("connect ends with its context", d.over)
	require.ErrorIs(w, d.got.err, context.Canceled)
	require.Empty(w, b.links)
}

func testHandshakeLimit(w *world) {
	short := transport.Limits{Handshake: 100 * time.Millisecond}
	patient, hasty := w.open("a"), w.openWith(Options{Gate: Gate{}, Limits: short})
	// The listener's limit ends the connection of a patient dialer, and the
	// dialer's own limit ends its Connect to a patient listener.
	w.refused(context.Background(), patient, w.mute(short).f.Addr())
	w.refused(context.Background(), hasty, w.mute(transport.Limits{}).f.Addr())
}

// stuckGate is the gate of a dialer that sends its hello and then says nothing
// more. heard is set when the answer has come.
type stuckGate struct{ heard *atomic.Bool }

func (g stuckGate) Open(bool) transport.Handshake { return g }
func (g stuckGate) Hello() []byte                 { return nil }

func (g stuckGate) Next(in []byte) ([]byte, bool, error) {
	if in == nil {
		return []byte{gateHello}, false, nil
	}
	g.heard.Store(true)
	return nil, false, nil
}

func testPendingLimit(w *world) {
	twice := Gate{Trips: 2}
	a := w.openWith(Options{Gate: twice})
	b := w.openWith(Options{Gate: twice, Listen: true, Limits: transport.Limits{Pending: 1}})
	stuck := stuckGate{new(atomic.Bool)}
	holder := w.openWith(Options{Gate: stuck})
	ctx, cancel := context.WithCancel(context.Background())
	d := holder.dial(ctx, b.f.Addr())
	w.until("the one place is taken", stuck.heard.Load)

	brief, stop := context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer stop()
	w.refused(brief, a, b.f.Addr())
	cancel()
	w.until("the stuck connect ends", d.over)
	require.ErrorIs(w, d.got.err, context.Canceled)

	for end := time.Now().Add(patience); ; {
		d := a.dial(context.Background(), b.f.Addr())
		w.until("connect returns", d.over)
		if d.got.err == nil {
			break
		}
		require.True(w, time.Now().Before(end), "the place is never free again: %v", d.got.err)
	}
}

func testTwoConns(w *world) {
	a, b := w.open("a"), w.open("b")
	la1, lb1 := w.connect(a, b)
	la2, lb2 := w.connect(a, b)
	lb3, la3 := w.connect(b, a)
	for i, p := range [][2]*link{{la1, lb1}, {la2, lb2}, {la3, lb3}} {
		p[0].post(frame(fmt.Appendf(nil, "conn %d", i)))
		w.until("the frame arrives", func() bool { return len(p[1].frames) > 0 })
		require.Equal(w, fmt.Sprintf("conn %d", i), string(p[1].frames[0]))
	}
	la1.close()
	w.until("the peer hears", func() bool { return lb1.isDown })
	w.echo(la2, lb2)
	w.echo(la3, lb3)
	require.False(w, la2.isDown || lb2.isDown || la3.isDown || lb3.isDown)
}

func testFortyPeers(w *world) {
	const peers, frames, size = 40, 10, 5000
	s := w.open("server")
	all := s.target(peers * size)
	var from, to []*link
	for i := range peers {
		a, b := w.connect(w.openWith(Options{Gate: Gate{Hello: fmt.Sprint("peer ", i)}}), s)
		require.Equal(w, fmt.Sprint("peer ", i), string(b.c.Hello()))
		from, to = append(from, a), append(to, b)
	}
	for i, l := range from {
		l.post(all.write(uint64(i*size), uint32(i), w.source(uint64(i), size)))
		for j := range frames {
			l.post(frame(fmt.Appendf(nil, "%d/%d", i, j)))
		}
	}
	w.until("all that 40 peers sent arrives", func() bool {
		for i := range peers {
			if len(to[i].frames) < frames || len(to[i].writes) < 1 || !from[i].idle() {
				return false
			}
		}
		return true
	})
	for i := range peers {
		require.Equal(w, []written{{uint32(i), size}}, to[i].writes)
		w.holds("target", part(all.Span(), uint64(i*size), size), uint64(i))
		for j, f := range to[i].frames {
			require.Equal(w, fmt.Sprintf("%d/%d", i, j), string(f))
		}
	}
	s.close()
	w.until("all peers hear of the end", func() bool {
		return !slices.ContainsFunc(from, func(l *link) bool { return !l.isDown })
	})
	for _, l := range from {
		require.ErrorIs(w, l.down, io.EOF)
	}
}

func testMesh(w *world) {
	nodes := []*node{w.open("0"), w.open("1"), w.open("2"), w.open("3")}
	for i, a := range nodes {
		for _, b := range nodes[:i] {
			la, lb := w.connect(a, b)
			w.echo(la, lb)
			w.transfer(la, lb)
		}
	}
}
