package transporttest

import (
	"context"
	"strings"
	"sync/atomic"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/transport"
)

var gateCases = []testCase{
	{"Hello", testHello},
	{"GateTrips", testGateTrips},
	{"GateLargestMessage", testGateLargestMessage},
	{"GateMessageTooLarge", testGateMessageTooLarge},
	{"GateOfListenerRefuses", testGateOfListenerRefuses},
	{"GateOfDialerRefuses", testGateOfDialerRefuses},
	{"ConnectEndsWithHandshakeLimit", testHandshakeLimit},
	{"PendingLimit", testPendingLimit},
}

func testHello(w *world) {
	a, b := w.connect(w.open("alice"), w.open("bob"))
	require.Equal(w, "bob", string(a.c.Peer().Hello))
	require.Equal(w, "alice", string(b.c.Peer().Hello))
	require.NotEmpty(w, a.c.Peer().Remote)
	require.NotEmpty(w, b.c.Peer().Remote)
}

func testGateTrips(w *world) {
	for trips := 1; trips <= 4; trips++ {
		a := w.openWith(Options{Gate: Gate{Hello: "a", Trips: trips}, Listen: true})
		b := w.openWith(Options{Gate: Gate{Hello: "b", Trips: trips}, Listen: true})
		la, lb := w.connect(a, b)
		require.Equal(w, "b", string(la.c.Peer().Hello))
		require.Equal(w, "a", string(lb.c.Peer().Hello))
		w.echo(la, lb)
	}
}

func testGateLargestMessage(w *world) {
	big := strings.Repeat("h", transport.MaxHandshake-1)
	a, b := w.connect(w.open(big), w.open(big))
	require.Equal(w, big, string(a.c.Peer().Hello))
	require.Equal(w, big, string(b.c.Peer().Hello))
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
	b := w.openWith(Options{Gate: Gate{Refuse: "wrong cluster id 7", Only: "a"}, Listen: true})
	for range 3 {
		err := w.refused(context.Background(), a, b.f.Addr())
		require.ErrorContains(w, err, "wrong cluster id 7")
	}
	require.Empty(w, b.links, "the listener heard of a connection that it refused")
	w.echo(w.connect(w.open("c"), b))
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

// mute opens a Fabric that never answers in the Gate.
func (w *world) mute(lim transport.Limits) *node {
	return w.openWith(Options{Gate: Gate{Mute: true}, Limits: lim, Listen: true})
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
