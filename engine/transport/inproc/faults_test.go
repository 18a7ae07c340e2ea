package inproc_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

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
	net := inproc.New(1)
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
	_, err := open(t, inproc.New(1), "a").Register(mem.Region{Addr: 4096, Len: 1, Dev: mem.GPU(0)})
	require.ErrorContains(t, err, "gpu 0: want host memory")
}

// run is what two Fabrics say to each other under chaos.
func run(t *testing.T, seed uint64) string {
	net := inproc.New(seed)
	net.SetFaults(inproc.Chaos)
	a, b := open(t, net, "a"), open(t, net, "b")
	from, _ := connect(t, a, b)
	_, write := region(t, b, 1000)
	var log bytes.Buffer
	for i := range uint32(200) {
		k, err := from.Post([]transport.Op{write, frame(fmt.Sprint(i))})
		fmt.Fprintln(&log, "post", i, k, err)
		for _, f := range []*inproc.Fabric{a, b} {
			for _, e := range poll(t, f) {
				fmt.Fprintln(&log, f.Name(), e.Kind, e.User, string(e.Data), e.Err)
			}
		}
	}
	return log.String()
}

func TestSeedDecidesTheRun(t *testing.T) {
	require.Equal(t, run(t, 1), run(t, 1))
	require.NotEqual(t, run(t, 1), run(t, 2))
}

func TestDelay(t *testing.T) {
	const delay, count = 5, 50
	net := inproc.New(1)
	a, b := open(t, net, "a"), open(t, net, "b")
	from, _ := connect(t, a, b)
	net.SetFaults(inproc.Faults{Delay: delay})
	longest := 0
	for range count {
		post(t, from, frame("x"))
		polls := 1
		for len(poll(t, b)) == 0 {
			polls++
		}
		longest = max(longest, polls)
		only(t, a, transport.EvDone)
	}
	require.Equal(t, delay+1, longest)
}

// TestReorder has writes land before and after the writes around them, and before the frame
// before them. A frame comes after all writes before it.
func TestReorder(t *testing.T) {
	const count = 10
	net := inproc.New(1)
	a, b := open(t, net, "a"), open(t, net, "b")
	net.SetFaults(inproc.Faults{Delay: 3, Reorder: true})
	from, _ := connect(t, a, b)
	var dst [count]mem.Region
	for i := range dst {
		r, write := region(t, b, 1)
		dst[i] = r
		write.Src[0].Bytes()[0] = 1
		post(t, from, frame(string(rune('0'+i))), write)
	}
	landed := func(i int) bool { return dst[i].Span().Bytes()[0] == 1 }
	var frames string
	overtaken, unordered := false, false
	for end := 0; end < 100; end++ {
		for _, e := range poll(t, b) {
			frames += string(e.Data)
			for i := range len(frames) - 1 {
				require.True(t, landed(i), "frame %d has come before write %d", len(frames)-1, i)
			}
		}
		for i := range count {
			overtaken = overtaken || landed(i) && len(frames) <= i
			unordered = unordered || i > 0 && landed(i) && !landed(i-1)
		}
	}
	require.Equal(t, "0123456789", frames)
	require.True(t, overtaken, "no write has overtaken the frame before it")
	require.True(t, unordered, "no write has overtaken another")
}

func TestPressure(t *testing.T) {
	net := inproc.New(1)
	a, b := open(t, net, "a"), open(t, net, "b")
	from, _ := connect(t, a, b)
	net.SetFaults(inproc.Faults{Pressure: 0.5})
	took := [3]int{}
	for range 40 {
		k, err := from.Post([]transport.Op{frame("x"), frame("y")})
		require.NoError(t, err)
		took[k]++
		poll(t, a)
		poll(t, b)
	}
	require.NotContains(t, took, 0, "posts that took 0, 1 and 2 of 2 ops: %v", took)
}

func TestDepth(t *testing.T) {
	net := inproc.New(1)
	b := open(t, net, "b")
	a, err := net.Open(inproc.Options{Gate: transporttest.Gate{}, Depth: 3})
	require.NoError(t, err)
	defer a.Close()
	from, _ := connect(t, a, b)
	k, err := from.Post([]transport.Op{frame("1"), frame("2"), frame("3"), frame("4")})
	require.NoError(t, err)
	require.Equal(t, 3, k)
}

func TestStage(t *testing.T) {
	net := inproc.New(1)
	a, b := open(t, net, "a"), open(t, net, "b")
	from, _ := connect(t, a, b)
	dst, write := region(t, b, 100)
	post(t, from, write)
	require.Empty(t, poll(t, a), "a plain write has ended before the peer has it")
	require.Empty(t, poll(t, b))
	only(t, a, transport.EvDone)

	net.SetFaults(inproc.Faults{Stage: 1})
	src := write.Src[0].Bytes()
	copy(src, "staged")
	post(t, from, write)
	only(t, a, transport.EvDone)
	clear(src)
	require.Empty(t, poll(t, b))
	require.Equal(t, "staged", string(dst.Span().Bytes()[:6]))
}

func TestCloseDeliversOrForgets(t *testing.T) {
	for _, forget := range []float64{0, 1} {
		net := inproc.New(1)
		net.SetFaults(inproc.Faults{Forget: forget})
		a, b := open(t, net, "a"), open(t, net, "b")
		from, _ := connect(t, a, b)
		post(t, from, frame("last words"))
		require.NoError(t, from.Close())
		ev := poll(t, b)
		if forget == 0 {
			require.Equal(t, "last words", string(ev[0].Data))
			ev = ev[1:]
		}
		require.Len(t, ev, 1)
		require.ErrorIs(t, ev[0].Err, io.EOF)
	}
}

func TestFailOp(t *testing.T) {
	net := inproc.New(1)
	a, b := open(t, net, "a"), open(t, net, "b")
	from, _ := connect(t, a, b)
	broken := errors.New("broken")
	require.NoError(t, net.FailOp("a", 3, broken))
	k, err := from.Post([]transport.Op{frame("1"), frame("2"), frame("3"), frame("4")})
	require.NoError(t, err)
	require.Equal(t, 3, k)
	ev := poll(t, a)
	require.Len(t, ev, 4)
	require.NoError(t, ev[0].Err)
	require.NoError(t, ev[1].Err)
	require.Equal(t, broken, ev[2].Err)
	require.Equal(t, transport.EvDown, ev[3].Kind)
	require.ErrorIs(t, ev[3].Err, broken)
	require.ErrorIs(t, only(t, b, transport.EvDown).Err, broken)
	_, err = from.Post([]transport.Op{frame("4")})
	require.ErrorIs(t, err, broken)
	require.ErrorContains(t, net.FailOp("nobody", 1, broken), `"nobody"`)
}

func TestRefuse(t *testing.T) {
	net := inproc.New(1)
	a, b := open(t, net, "a"), open(t, net, "b")
	full := errors.New("full")
	net.Refuse("b", full)
	_, err := a.Connect(t.Context(), b.Addr())
	require.ErrorIs(t, err, full)
	require.ErrorContains(t, err, `inproc: connect a to "inproc:b"`)
	net.Refuse("b", nil)
	connect(t, a, b)
}

func TestCut(t *testing.T) {
	net := inproc.New(1)
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

func TestPartition(t *testing.T) {
	net := inproc.New(1)
	var f []*inproc.Fabric
	for _, name := range []string{"a", "b", "c", "d"} {
		f = append(f, open(t, net, name))
	}
	inside, _ := connect(t, f[0], f[1])
	outside, _ := connect(t, f[2], f[3])
	across, _ := connect(t, f[0], f[3])
	net.Partition("a", "b")
	post(t, inside, frame("x"))
	post(t, outside, frame("x"))
	_, err := across.Post([]transport.Op{frame("x")})
	require.Error(t, err)
	_, err = f[2].Connect(t.Context(), f[1].Addr())
	require.Error(t, err)
	net.Heal()
	connect(t, f[2], f[1])
}

func TestHold(t *testing.T) {
	net := inproc.New(1)
	a, b := open(t, net, "a"), open(t, net, "b")
	from, _ := connect(t, a, b)
	net.Hold("a", "b")
	post(t, from, frame("x"))
	require.NoError(t, from.Close())
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
	net := inproc.New(1)
	b := open(t, net, "b")
	a, err := net.Open(inproc.Options{Name: "a", Gate: transporttest.Gate{},
		Limits: transport.Limits{Stall: 20 * time.Millisecond}})
	require.NoError(t, err)
	defer a.Close()
	from, _ := connect(t, a, b)
	net.Hold("a", "b")
	post(t, from, frame("x"))
	for down := false; !down; {
		fds := []unix.PollFd{{Fd: int32(a.FD()), Events: unix.POLLIN}}
		k, err := unix.Poll(fds, 10000)
		if err == unix.EINTR {
			continue
		}
		require.NoError(t, err)
		require.Equal(t, 1, k, "the sleeper is not woken")
		for _, e := range poll(t, a) {
			if e.Kind == transport.EvDown {
				require.ErrorContains(t, e.Err, "Limits.Stall")
				down = true
			}
		}
	}
}

func TestKill(t *testing.T) {
	net := inproc.New(1)
	a, b := open(t, net, "a"), open(t, net, "b")
	from, to := connect(t, a, b)
	_, write := region(t, b, 8)
	post(t, to, frame("never read"))
	post(t, from, write)
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
