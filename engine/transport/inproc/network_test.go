package inproc_test

import (
	"bytes"
	"context"
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/inproc"
	"fserver/engine/transport/transporttest"
)

// open makes a Fabric that listens and is closed with the test.
func open(t *testing.T, net *inproc.Network, name string) *inproc.Fabric {
	t.Helper()
	f, err := net.Open(inproc.Options{Name: name, Listen: true, Gate: transporttest.Gate{Hello: name}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, f.Close()) })
	return f
}

// connect opens a Conn from a to b and takes b's EvAccept.
func connect(t *testing.T, a, b *inproc.Fabric) (from, to transport.Conn) {
	t.Helper()
	from, err := a.Connect(t.Context(), b.Addr())
	require.NoError(t, err)
	for to == nil {
		for _, e := range poll(t, b) {
			if e.Kind == transport.EvAccept {
				to = e.Conn
			}
		}
	}
	return from, to
}

// poll polls once.
func poll(t *testing.T, f *inproc.Fabric) []transport.Event {
	t.Helper()
	var ev [64]transport.Event
	k, err := f.Poll(ev[:])
	require.NoError(t, err)
	for i := range ev[:k] {
		ev[i].Data = bytes.Clone(ev[i].Data)
	}
	return ev[:k]
}

// only polls once and checks that exactly one event of that kind comes.
func only(t *testing.T, f *inproc.Fabric, kind transport.EventKind) transport.Event {
	t.Helper()
	ev := poll(t, f)
	require.Len(t, ev, 1)
	require.Equal(t, kind, ev[0].Kind)
	return ev[0]
}

// post posts ops, all of which must be taken.
func post(t *testing.T, c transport.Conn, ops ...transport.Op) {
	t.Helper()
	k, err := c.Post(ops)
	require.NoError(t, err)
	require.Equal(t, len(ops), k)
}

func frame(s string) transport.Op {
	return transport.Op{Kind: transport.OpFrame, Frame: []byte(s)}
}

// region is memory of n bytes that f has registered, and a write to all of it.
func region(t *testing.T, f *inproc.Fabric, n uint64) (mem.Region, transport.Op) {
	t.Helper()
	r, err := mem.Map(2 * n)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, mem.Unmap(r)) })
	dst, src := mem.Region{Addr: r.Addr, Len: n, Dev: mem.CPU}, mem.Span{Addr: r.Addr + uintptr(n), Len: n}
	k, err := f.Register(dst)
	require.NoError(t, err)
	return dst, transport.Op{Kind: transport.OpWrite, Key: k, Src: []mem.Span{src}}
}

func TestNames(t *testing.T) {
	net := inproc.New()
	f := open(t, net, "a")
	require.Equal(t, "inproc/a", f.Name())
	require.Equal(t, transport.Addr("inproc:a"), f.Addr())
	_, err := net.Open(inproc.Options{Name: "a", Gate: transporttest.Gate{}})
	require.ErrorContains(t, err, `inproc: open fabric "a"`)
	require.NoError(t, f.Close())
	open(t, net, "a")
	net.Kill("a")
	open(t, net, "a")
	require.Equal(t, "inproc/fabric-5", open(t, net, "").Name())
	_, err = net.Open(inproc.Options{Name: "b"})
	require.ErrorContains(t, err, "Gate is nil")
}

func TestRegisterOfDeviceMemory(t *testing.T) {
	_, err := open(t, inproc.New(), "a").Register(mem.Region{Addr: 4096, Len: 1, Dev: mem.GPU(0)})
	require.ErrorContains(t, err, "gpu 0: want host memory")
}

func TestDepth(t *testing.T) {
	net := inproc.New()
	b := open(t, net, "b")
	a, err := net.Open(inproc.Options{Gate: transporttest.Gate{}, Depth: 3})
	require.NoError(t, err)
	defer a.Close()
	from, _ := connect(t, a, b)
	k, err := from.Post([]transport.Op{frame("1"), frame("2"), frame("3"), frame("4")})
	require.NoError(t, err)
	require.Equal(t, 3, k)
}

// TestWrite lands at once, and ends when its turn has come: behind a frame, when that is read.
func TestWrite(t *testing.T) {
	net := inproc.New()
	a, b := open(t, net, "a"), open(t, net, "b")
	from, _ := connect(t, a, b)
	dst, write := region(t, b, 6)
	copy(write.Src[0].Bytes(), "landed")
	post(t, from, write)
	require.Equal(t, "landed", string(dst.Span().Bytes()))
	only(t, a, transport.EvDone)
	post(t, from, frame("x"), write)
	require.Empty(t, poll(t, a))
	only(t, b, transport.EvFrame)
	require.Len(t, poll(t, a), 2)

	post(t, from, frame("x"))
	net.Hold("a", "b")
	k, err := from.Post([]transport.Op{write})
	require.NoError(t, err)
	require.Zero(t, k, "nothing lands")
	net.Heal()
	post(t, from, write)
}

func TestCut(t *testing.T) {
	net := inproc.New()
	a, b, c := open(t, net, "a"), open(t, net, "b"), open(t, net, "c")
	ab, _ := connect(t, a, b)
	connect(t, b, a)
	ac, _ := connect(t, a, c)
	net.Cut("b", "a")
	for _, f := range []*inproc.Fabric{a, b} {
		ev := poll(t, f)
		require.Len(t, ev, 2)
		for _, e := range ev {
			require.Equal(t, transport.EvDown, e.Kind)
			require.NotErrorIs(t, e.Err, io.EOF)
		}
	}
	_, err := ab.Post([]transport.Op{frame("x")})
	require.Error(t, err)
	_, err = a.Connect(t.Context(), b.Addr())
	require.ErrorContains(t, err, "cut")
	post(t, ac, frame("x"))
	only(t, c, transport.EvFrame)
	net.Heal()
	connect(t, a, b)
}

func TestHold(t *testing.T) {
	net := inproc.New()
	a, b := open(t, net, "a"), open(t, net, "b")
	from, _ := connect(t, a, b)
	net.Hold("a", "b")
	post(t, from, frame("x"))
	from.Close()
	require.Empty(t, poll(t, b))
	ctx, stop := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer stop()
	_, err := a.Connect(ctx, b.Addr())
	require.ErrorIs(t, err, context.DeadlineExceeded)
	net.Heal()
	ev := poll(t, b)
	require.Len(t, ev, 2)
	require.Equal(t, transport.EvFrame, ev[0].Kind)
	require.Equal(t, transport.EvDown, ev[1].Kind)
}

// TestStallWakesSleeper owes a frame to a silent peer and sleeps.
func TestStallWakesSleeper(t *testing.T) {
	net := inproc.New()
	b := open(t, net, "b")
	a, err := net.Open(inproc.Options{Name: "a", Gate: transporttest.Gate{},
		Limits: transport.Limits{Stall: 20 * time.Millisecond}})
	require.NoError(t, err)
	defer a.Close()
	from, _ := connect(t, a, b)
	net.Hold("a", "b")
	post(t, from, frame("x"))
	for down := false; !down; {
		which, err := transporttest.Woken(10*time.Second, a)
		require.NoError(t, err)
		require.NotEmpty(t, which, "the sleeper is not woken")
		for _, e := range poll(t, a) {
			if e.Kind == transport.EvDown {
				require.ErrorContains(t, e.Err, "Limits.Stall")
				down = true
			}
		}
	}
}

func TestKill(t *testing.T) {
	net := inproc.New()
	a, b := open(t, net, "a"), open(t, net, "b")
	from, to := connect(t, a, b)
	post(t, to, frame("never read"))
	post(t, from, frame("never read"))
	net.Kill("b")
	net.Kill("b")
	net.Kill("nobody")
	ev := poll(t, a)
	require.Len(t, ev, 2)
	require.Error(t, ev[0].Err)
	require.Equal(t, transport.EvDown, ev[1].Kind)
	require.NotErrorIs(t, ev[1].Err, io.EOF)
	_, err := b.Poll(make([]transport.Event, 1))
	require.ErrorContains(t, err, "killed")
	_, err = to.Post([]transport.Op{frame("x")})
	require.ErrorContains(t, err, "killed")
	_, err = b.Connect(t.Context(), a.Addr())
	require.ErrorContains(t, err, "killed")
	again := open(t, net, "b")
	connect(t, a, again)
}
