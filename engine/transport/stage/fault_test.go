package stage

import (
	"bytes"
	"errors"
	"io"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"fserver/cshim/cuda"
	"fserver/engine/gpu"
	"fserver/engine/gpu/fakegpu"
	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/faults"
	"fserver/engine/transport/transporttest"
	"fserver/engine/transport/transporttest/overtest"
)

// TestDeviceFails: nothing has landed.
func TestDeviceFails(t *testing.T) {
	for name, under := range map[string]func(testing.TB, *fakegpu.GPU) overtest.Below{
		"cma":      func(testing.TB, *fakegpu.GPU) overtest.Below { return overCMA },
		"tcp":      func(testing.TB, *fakegpu.GPU) overtest.Below { return overTCP },
		"inproc":   func(testing.TB, *fakegpu.GPU) overtest.Below { return overProc() },
		"one NIC":  overNIC,
		"two NICs": overNICs,
		"faults":   func(testing.TB, *fakegpu.GPU) overtest.Below { return worse(overProc(), faults.NIC(1)) },
	} {
		t.Run(name, func(t *testing.T) {
			g := fakegpu.New()
			a, b := pairOf(t, g, under(t, g))
			holds(t, g, overtest.DeviceFails(t, g, a, b), 1)
		})
	}
}

// TestDeviceFailsToLand: a Conn whose writes do not get from the host to a GPU that works
// no more ends, and so does who waits for them.
func TestDeviceFailsToLand(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overTCP)
	src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1)
	k := b.Key(t, dst)
	gate := make(chan struct{})
	g.Put(b.F.in.stream, func() { <-gate })
	a.Post(t, write(k, src, transport.Point{}))
	until(t, a, b, func() bool { return b.F.in.next == 1 })
	g.Fail("Idle", 1)
	b.Look()
	until(t, a, b, func() bool { return a.Down != nil && b.Down != nil })
	require.ErrorContains(t, b.Down, "injected failure")
	require.NotErrorIs(t, a.Down, io.EOF)
	require.Empty(t, b.Writes)
	require.False(t, b.F.in.waiting())
	require.True(t, b.F.in.reached(b.F.regions[k.ID].copied))
	close(gate) // the fake goes on after all
	for idle := false; !idle; {
		var err error
		idle, err = g.Idle(b.F.in.stream)
		require.NoError(t, err)
	}
}

// TestDeviceRefusesToLand: the Conn ends, and its error says once whose it is.
func TestDeviceRefusesToLand(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overTCP)
	src, dst := []byte{5, 5, 5}, onGPU(t, g, 4096, 1)
	k := b.Key(t, dst)
	g.Fail("Enqueue", 1)
	a.Post(t, []transport.Op{{Kind: transport.OpWrite, Key: k, Src: []mem.Span{mem.Of(src)}}})
	until(t, a, b, func() bool { return a.Down != nil && b.Down != nil })
	require.EqualError(t, b.Down, "stage: "+b.C.Peer().Remote+": copy 3 bytes to gpu 0: Enqueue: cuda: injected failure")
	require.NotErrorIs(t, a.Down, io.EOF)
	b.Free(t, k) // waits for the copy, which was enqueued
	runtime.KeepAlive(src)
}

// TestDeviceRefusesAtTheEnd: a frame that has come before the end of its Conn is given if its write gets to the GPU, and
// else not.
func TestDeviceRefusesAtTheEnd(t *testing.T) {
	for name, c := range map[string]struct {
		fail   func(g *fakegpu.GPU, b *side)
		landed int
	}{
		"to enqueue":            {func(g *fakegpu.GPU, _ *side) { g.Fail("Enqueue", 1) }, 0},
		"to enqueue the second": {func(g *fakegpu.GPU, _ *side) { g.FailAt(3) }, 1}, // Pin and Enqueue come first
		"at all":                {func(_ *fakegpu.GPU, b *side) { b.F.in.fail(b.F, errors.New("injected failure")) }, 0},
		"at all after the first": {func(_ *fakegpu.GPU, b *side) {
			b.F.in.word.Here.Store(1)
			b.F.in.fail(b.F, errors.New("injected failure"))
		}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			g := fakegpu.New()
			a, b := pairOf(t, g, overTCP)
			src, dst := []byte{5, 5, 5}, onGPU(t, g, 4096, 1)
			k := b.Key(t, dst)
			_, end := g.Block(t, "Pin")
			for range 2 {
				a.Post(t, []transport.Op{{Kind: transport.OpWrite, Key: k, Src: []mem.Span{mem.Of(src)}}})
			}
			until(t, a, b, func() bool { return ours(b).Held.Len() == 2 })
			a.C.Close()
			until(t, a, b, func() bool { return ours(b).Err != nil })
			require.NoError(t, b.Down)
			c.fail(g, b)
			end()
			until(t, a, b, func() bool { return b.Down != nil })
			require.ErrorContains(t, b.Down, "injected failure")
			require.NotErrorIs(t, b.Down, io.EOF)
			require.Len(t, b.Writes, c.landed)
			b.Free(t, k) // waits for the copies that were enqueued
			runtime.KeepAlive(src)
		})
	}
}

// TestOutOfMemory: without memory for staging, the call says so, and
// what to do; the Conn ends with that, and the next one takes the write.
func TestOutOfMemory(t *testing.T) {
	const remedy = "out of memory (send fewer or smaller tensors at once, or raise ulimit -l and the memory limit of the container)"
	g := fakegpu.New()
	a, b := pairOf(t, g, overTCP)
	src, dst := onGPU(t, g, 1000, 5), onGPU(t, g, 1000, 1)
	k := b.Key(t, dst)
	var oom *cuda.Error
	for _, c := range []struct {
		fail func()
		as   any
		says string
	}{
		{func() { g.Fail("Pin", 1) }, &oom, "injected failure: " + remedy},
		{func() { g.Fail("NewStream", 1) }, nil, "NewStream: cuda: injected failure"},
	} {
		c.fail()
		a.Post(t, write(k, src, transport.Point{}))
		until(t, a, b, func() bool { return a.Down != nil && b.Down != nil })
		require.ErrorContains(t, a.Down, c.says)
		if c.as != nil {
			require.ErrorAs(t, a.Down, c.as)
		}
		require.Equal(t, []error{a.Down}, a.Done)
		require.NotErrorIs(t, b.Down, io.EOF)
		_, err := a.C.Post(write(k, src, transport.Point{}))
		require.Equal(t, a.Down, err)
		a.Done, a.Down, b.Down, b.C = nil, nil, nil, nil
		connect(t, a, b)
	}
	a.Post(t, write(k, src, transport.Point{}))
	until(t, a, b, func() bool { return len(b.Writes) == 1 && len(a.Done) == 1 })
	holds(t, g, dst, 5)

	g.Fail("Pin", 1)
	_, err := a.F.Calls.Map(4096)
	require.ErrorContains(t, err, remedy)
	p, err := a.F.Calls.Map(4096)
	require.NoError(t, err)
	a.F.Calls.Unmap(p.Region)
	require.ErrorContains(t, gpu.Scarce(unix.ENOMEM), "container")
	require.Equal(t, io.EOF, gpu.Scarce(io.EOF))
}

// counting is a Fabric that counts its keys.
type counting struct {
	transport.Fabric
	keys int
}

func (c *counting) Register(r mem.Region) (transport.Key, error) {
	c.keys++
	return c.Fabric.Register(r)
}

func (c *counting) Deregister(k transport.Key) {
	c.keys--
	c.Fabric.Deregister(k)
}

// TestNothingPinned: wherever there is no pinned memory, who needs it says so and what to
// do, both sides end, nothing is kept, and the next Conn takes the write. What only
// lands goes by way of memory that is not pinned.
func TestNothingPinned(t *testing.T) {
	const remedy = "raise ulimit -l and the memory limit of the container"
	t.Run("to open", func(t *testing.T) {
		g := fakegpu.New()
		in, err := overTCP(transporttest.Options{Listen: true, Gate: transporttest.Gate{Hello: "a"}})
		require.NoError(t, err)
		g.Fail("Pin", 1)
		counts := &counting{Fabric: in}
		_, err = Wrap(counts, Options{Device: g})
		require.ErrorContains(t, err, remedy)
		require.Zero(t, counts.keys)
		g.Empty(t)
		f, err := Wrap(in, Options{Device: g})
		require.NoError(t, err)
		require.NoError(t, f.Close())
		g.Empty(t)
	})
	t.Run("to land", func(t *testing.T) {
		g := fakegpu.New()
		a, b := pairOf(t, g, overTCP)
		src, warm, dst := onGPU(t, g, 3<<20, 5), onGPU(t, g, 3<<20, 1), onGPU(t, g, 3<<20, 1)
		for i, to := range []mem.Region{warm, dst} {
			k := b.Key(t, to)
			g.Fail("Pin", i) // with warm, all but the shadow of dst has been pinned
			a.Post(t, write(k, src, transport.Point{}))
			until(t, a, b, func() bool { return len(b.Writes) == i+1 && len(a.Done) == i+1 })
			holds(t, g, to, 5)
			require.Equal(t, i == 0, b.F.regions[k.ID].pinned)
			b.Free(t, k)
		}
	})
}

// TestBetweenPieces: a write that goes between the pieces of another is one of its own.
func TestBetweenPieces(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overTCP)
	src, dst := onGPU(t, g, 8<<20, 5), onGPU(t, g, 8<<20, 1)
	host, err := mem.Map(4096)
	require.NoError(t, err)
	hostDst, err := mem.Map(4096)
	require.NoError(t, err)
	k := b.Key(t, dst)
	hostKey := b.Key(t, hostDst)
	a.Post(t, write(k, src, transport.Point{}))
	until(t, a, b, func() bool { return b.F.in.next > 0 })
	a.Post(t, write(hostKey, host, transport.Point{}))
	until(t, a, b, func() bool { return len(b.Writes) == 2 && len(a.Done) == 2 })
	for _, w := range b.Writes {
		require.Zero(t, w.Off)
		require.Equal(t, map[uint64]uint64{k.ID: dst.Len, hostKey.ID: hostDst.Len}[w.Key], w.Len)
	}
	holds(t, g, dst, 5)
	b.Free(t, hostKey)
	require.NoError(t, errors.Join(mem.Unmap(host), mem.Unmap(hostDst)))
}

func TestHeldBack(t *testing.T) {
	for _, under := range []overtest.Below{overCMA, overTCP} {
		g := fakegpu.New()
		a, b := pairOf(t, g, under)
		overtest.HeldBack(t, g, a, b)
	}
}

func TestFailsHalfWay(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overCMA)
	overtest.FailsHalfWay(t, g, a, b, 0)
}

// TestDeregisterBesideClose: who looks for the end of a copy to the GPU does not look at memory that
// Close has given back.
func TestDeregisterBesideClose(t *testing.T) {
	g := fakegpu.New()
	g.Delay = 5 * time.Millisecond
	a, b := pairOf(t, g, overTCP)
	src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1)
	k := b.Key(t, dst)
	a.Post(t, write(k, src, transport.Point{}))
	until(t, a, b, func() bool { return b.F.in.next == 1 })
	gone := make(chan struct{})
	go func() { defer close(gone); b.F.Deregister(k) }()
	require.NoError(t, b.F.Close())
	<-gone
}

func TestConnectBesideClose(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overTCP)
	overtest.ConnectBesideClose(t, a, b)
}

// narrow is a Conn that takes one operation at a time.
type narrow struct{ transport.Conn }

func (c narrow) Post(ops []transport.Op) (int, error) { return c.Conn.Post(ops[:1]) }

// TestLiftLater: a peer that sleeps hears of a write also if what it has to lift could not be
// sent right behind it.
func TestLiftLater(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overTCP)
	dst := onGPU(t, g, 4096, 1)
	k := b.Key(t, dst)
	src := bytes.Repeat([]byte{5}, 4096)
	fd := []unix.PollFd{{Fd: int32(b.F.FD()), Events: unix.POLLIN}}
	for n := 1; n > 0; { // what else there was to tell
		b.Poll(t)
		which, err := transporttest.Woken(10*time.Millisecond, b.F)
		require.NoError(t, err)
		n = len(which)
	}
	c := ours(a)
	c.Conn = narrow{c.Conn}
	n, err := a.C.Post([]transport.Op{{Kind: transport.OpWrite, Key: k, Src: []mem.Span{mem.Of(src)}}})
	require.NoError(t, err)
	require.Equal(t, 1, n)
	require.True(t, a.C.Unsent())
	for end := time.Now().Add(20 * time.Second); len(a.Done) < 1 || a.C.Unsent(); a.Poll(t) {
		require.True(t, time.Now().Before(end))
	}
	require.False(t, a.C.Unsent())
	n, err = transporttest.Sleep(fd, 20*time.Second)
	require.NoError(t, err)
	require.Equal(t, 1, n)
	until(t, a, b, func() bool { return b.F.in.next == 1 && !b.F.in.waiting() })
	holds(t, g, dst, 5)
	c.Conn = c.Conn.(narrow).Conn
	runtime.KeepAlive(src)
}

// TestAllocatesNothing: staging does not, when all is set up.
func TestAllocatesNothing(t *testing.T) {
	if transporttest.RaceEnabled {
		t.Skip("the race detector allocates")
	}
	for _, under := range []overtest.Below{overCMA, overTCP} {
		g := fakegpu.New()
		g.Instant = true
		a, b := pairOf(t, g, under)
		src, dst := onGPU(t, g, 100000, 5), onGPU(t, g, 100000, 1)
		require.Zero(t, overtest.Allocations(t, a, b, write(b.Key(t, dst), src, transport.Point{})))
	}
}
