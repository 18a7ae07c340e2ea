package transporttest

import (
	"context"
	"strings"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/transport"
)

var connectCases = []testCase{
	{"Names", testNames},
	{"Reaches", testReaches},
	{"ConnectNeedsNoPollOfTheDialer", testConnectNeedsNoPoll},
	{"ConnectFromFabricThatTakesNone", testConnectFromQuiet},
	{"ConnectToItself", testConnectToItself},
	{"ConnectToNobody", testConnectToNobody},
	{"ConnectToForeignAddress", testConnectToForeignAddress},
	{"ConnectWithContextOver", testConnectContextOver},
	{"ConnectEndsWithContext", testConnectEndsWithContext},
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
	require.NoError(w, a.f.Reaches(b.f.Addr()))
	require.NoError(w, b.f.Reaches(a.f.Addr()))
	for _, addr := range foreign(a) {
		require.Error(w, a.f.Reaches(addr), "%q", addr)
	}
}

// foreign is addresses that no Fabric of n's transport can have.
func foreign(n *node) []transport.Addr {
	kind, _, _ := strings.Cut(string(n.f.Addr()), ":")
	return []transport.Addr{"", ":", "nosuchtransport:1", transport.Addr(kind), transport.Addr(kind + ":"),
		transport.Addr("x" + string(n.f.Addr()))}
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
	require.NoError(w, a.f.Reaches(b.f.Addr()))
	la, lb := w.connect(a, b)
	require.Equal(w, "quiet", string(lb.c.Peer().Hello))
	w.echo(la, lb)
}

func testConnectToItself(w *world) {
	n := w.open("self")
	require.NoError(w, n.f.Reaches(n.f.Addr()))
	a, b := w.connect(n, n)
	require.NotSame(w, a, b)
	w.echo(a, b)
	w.transfer(a, b)
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
