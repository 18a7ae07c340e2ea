package stage

import (
	"bytes"
	"context"
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
	"fserver/engine/transport/transporttest"
)

// TestDeviceFails: the Conn ends with the reason, and at the peer not in good order.
func TestDeviceFails(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overCMA)
	src, dst := onGPU(t, g, 1<<20, 5), onGPU(t, g, 1<<20, 1)
	k := b.key(t, dst)
	g.Fail("Enqueue", 1)
	a.post(t, write(k, src, transport.Point{}))
	until(t, a, b, func() bool { return a.down != nil && b.down != nil })
	require.ErrorContains(t, a.down, "injected failure")
	require.NotErrorIs(t, b.down, io.EOF)
	until(t, a, b, func() bool { return len(a.done) == 1 })
	require.Error(t, a.done[0])
	holds(t, g, dst, 1)
}

// TestDeviceFailsToLand: a Conn whose writes do not get from the host to a GPU that works
// no more ends, and so does who waits for them.
func TestDeviceFailsToLand(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overTCP)
	src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1)
	k := b.key(t, dst)
	gate := make(chan struct{})
	g.Put(b.f.in.stream, func() { <-gate })
	a.post(t, write(k, src, transport.Point{}))
	until(t, a, b, func() bool { return b.f.in.next == 1 })
	g.Fail("Idle", 1)
	b.f.scan = time.Time{}
	b.f.Arm() // looks at the device
	until(t, a, b, func() bool { return a.down != nil && b.down != nil })
	require.ErrorContains(t, b.down, "injected failure")
	require.NotErrorIs(t, a.down, io.EOF)
	require.Empty(t, b.writes)
	require.False(t, b.f.in.waiting())
	require.True(t, b.f.in.reached(b.f.regions[k.ID].copied))
	close(gate) // the fake goes on after all
	for idle := false; !idle; {
		var err error
		idle, err = g.Idle(b.f.in.stream)
		require.NoError(t, err)
	}
}

// TestDeviceRefusesToLand: the Conn ends, and its error says once whose it is.
func TestDeviceRefusesToLand(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overTCP)
	src, dst := []byte{5, 5, 5}, onGPU(t, g, 4096, 1)
	k := b.key(t, dst)
	g.Fail("Enqueue", 1)
	a.post(t, []transport.Op{{Kind: transport.OpWrite, Key: k, Src: []mem.Span{mem.Of(src)}}})
	until(t, a, b, func() bool { return a.down != nil && b.down != nil })
	require.EqualError(t, b.down, "stage: "+b.c.Peer().Remote+": copy 3 bytes to gpu 0: Enqueue: cuda: injected failure")
	require.NotErrorIs(t, a.down, io.EOF)
	b.free(t, k) // waits for the copy, which was enqueued
	runtime.KeepAlive(src)
}

// TestOutOfMemory: without memory for staging, the call says so, and
// what to do; the Conn ends with that, and the next one takes the write.
func TestOutOfMemory(t *testing.T) {
	const remedy = "out of memory (send fewer or smaller tensors at once, or raise ulimit -l and the memory limit of the container)"
	g := fakegpu.New()
	a, b := pairOf(t, g, overTCP)
	src, dst := onGPU(t, g, 1000, 5), onGPU(t, g, 1000, 1)
	k := b.key(t, dst)
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
		a.post(t, write(k, src, transport.Point{}))
		until(t, a, b, func() bool { return a.down != nil && b.down != nil })
		require.ErrorContains(t, a.down, c.says)
		if c.as != nil {
			require.ErrorAs(t, a.down, c.as)
		}
		require.Equal(t, []error{a.down}, a.done)
		require.NotErrorIs(t, b.down, io.EOF)
		_, err := a.c.Post(write(k, src, transport.Point{}))
		require.Equal(t, a.down, err)
		a.done, a.down, b.down, b.c = nil, nil, nil, nil
		a.c, err = a.f.Connect(context.Background(), b.f.Addr())
		require.NoError(t, err)
		until(t, a, b, func() bool { return b.c != nil })
	}
	a.post(t, write(k, src, transport.Point{}))
	until(t, a, b, func() bool { return len(b.writes) == 1 && len(a.done) == 1 })
	holds(t, g, dst, 5)

	g.Fail("Pin", 1)
	_, err := a.f.calls.Map(4096)
	require.ErrorContains(t, err, remedy)
	p, err := a.f.calls.Map(4096)
	require.NoError(t, err)
	a.f.calls.Unmap(p.Region)
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
			k := b.key(t, to)
			g.Fail("Pin", i) // with warm, all but the shadow of dst has been pinned
			a.post(t, write(k, src, transport.Point{}))
			until(t, a, b, func() bool { return len(b.writes) == i+1 && len(a.done) == i+1 })
			holds(t, g, to, 5)
			require.Equal(t, i == 0, b.f.regions[k.ID].pinned)
			b.free(t, k)
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
	k := b.key(t, dst)
	hostKey := b.key(t, hostDst)
	a.post(t, write(k, src, transport.Point{}))
	until(t, a, b, func() bool { return b.f.in.next > 0 })
	a.post(t, write(hostKey, host, transport.Point{}))
	until(t, a, b, func() bool { return len(b.writes) == 2 && len(a.done) == 2 })
	for _, w := range b.writes {
		require.Zero(t, w.Off)
		require.Equal(t, map[uint64]uint64{k.ID: dst.Len, hostKey.ID: hostDst.Len}[w.Key], w.Len)
	}
	holds(t, g, dst, 5)
	b.free(t, hostKey)
	require.NoError(t, errors.Join(mem.Unmap(host), mem.Unmap(hostDst)))
}

// TestHeldBack: nothing is read before the stream has passed the point, and host memory has none.
func TestHeldBack(t *testing.T) {
	for _, under := range []below{overCMA, overTCP} {
		g := fakegpu.New()
		a, b := pairOf(t, g, under)
		stream, err := g.NewStream()
		require.NoError(t, err)
		e, err := g.NewEvent()
		require.NoError(t, err)
		host, err := mem.Map(4096)
		require.NoError(t, err)
		gpu, dst := onGPU(t, g, 4096, 1), onGPU(t, g, 4096, 0)
		gate := make(chan struct{})
		g.Put(stream, func() {
			<-gate
			m := fakegpu.Memory{G: g}
			_ = m.Store(gpu.Span(), bytes.Repeat([]byte{7}, 4096))
		})
		require.NoError(t, g.Record(e, stream))
		point := transport.Point{Dev: mem.GPU(0), Event: uint64(e)}
		k := b.key(t, dst)
		for _, op := range []transport.Op{write(k, host, point)[0], {Kind: transport.OpFrame, After: point}, {Kind: transport.OpLend, After: point}} {
			n, err := a.c.Post([]transport.Op{op})
			require.Zero(t, n)
			require.ErrorContains(t, err, "only writes of GPU memory may")
		}
		a.post(t, write(k, gpu, point))
		for range 1000 {
			a.poll(t)
			b.poll(t)
		}
		require.Empty(t, b.writes)
		require.Empty(t, a.done)
		close(gate)
		until(t, a, b, func() bool { return len(b.writes) == 1 && len(a.done) == 1 })
		holds(t, g, dst, 7)
		require.NoError(t, g.FreeStream(stream))
		require.NoError(t, errors.Join(g.FreeEvent(e), mem.Unmap(host)))
	}
}

// TestFailsHalfWay: where the driver takes the copies of a write and then fails, neither
// side lets go of the memory before they are over.
func TestFailsHalfWay(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overCMA)
	src, warm, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1), onGPU(t, g, 4096, 1)
	a.post(t, write(b.key(t, warm), src, transport.Point{})) // both sides know each other
	until(t, a, b, func() bool { return len(b.writes) == 1 && len(a.done) == 1 })
	point, open := heldUp(t, g, a.f)
	k := b.key(t, dst)
	g.Fail("Enqueue", 1)
	a.post(t, write(k, src, point))
	until(t, a, b, func() bool { return b.down != nil })
	b.f.Deregister(k)
	until(t, b, b, func() bool { return len(b.freed) == 1 })
	a.f.scan = time.Time{}
	a.f.Arm() // looks at the device
	a.poll(t)
	require.Len(t, a.done, 1)
	require.Len(t, b.freed, 1) // nothing was written there
	open()
	until(t, a, b, func() bool {
		a.f.scan = time.Time{}
		a.f.Arm()
		return len(a.done) == 2 && a.down != nil
	})
	require.ErrorContains(t, a.done[1], "injected failure")
}

// TestDeregisterBesideClose: who looks for the end of a copy to the GPU does not look at memory that
// Close has given back.
func TestDeregisterBesideClose(t *testing.T) {
	g := fakegpu.New()
	g.Delay = 5 * time.Millisecond
	a, b := pairOf(t, g, overTCP)
	src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1)
	k := b.key(t, dst)
	a.post(t, write(k, src, transport.Point{}))
	until(t, a, b, func() bool { return b.f.in.next == 1 })
	gone := make(chan struct{})
	go func() { defer close(gone); b.f.Deregister(k) }()
	require.NoError(t, b.f.Close())
	<-gone
}

// late is a Fabric whose Connect returns when its user has closed it.
type late struct {
	transport.Fabric
	close func() error
}

func (l late) Connect(ctx context.Context, to transport.Addr) (transport.Conn, error) {
	c, err := l.Fabric.Connect(ctx, to)
	return c, errors.Join(err, l.close())
}

// TestConnectBesideClose: nothing comes out of a Fabric that is closed.
func TestConnectBesideClose(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overTCP)
	a.f.Fabric = late{a.f.Fabric, a.f.Close}
	_, err := a.f.Connect(context.Background(), b.f.Addr())
	require.ErrorIs(t, err, transport.ErrClosed)
	require.Len(t, a.f.conns, 1)
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
	k := b.key(t, dst)
	src := bytes.Repeat([]byte{5}, 4096)
	fd := []unix.PollFd{{Fd: int32(b.f.FD()), Events: unix.POLLIN}}
	for n := 1; n > 0; { // what else there was to tell
		b.poll(t)
		which, err := transporttest.Woken(10*time.Millisecond, b.f)
		require.NoError(t, err)
		n = len(which)
	}
	c := a.below()
	c.Conn = narrow{c.Conn}
	n, err := a.c.Post([]transport.Op{{Kind: transport.OpWrite, Key: k, Src: []mem.Span{mem.Of(src)}}})
	require.NoError(t, err)
	require.Equal(t, 1, n)
	require.True(t, a.c.Unsent())
	for end := time.Now().Add(20 * time.Second); len(a.done) < 1 || c.listed; a.poll(t) {
		require.True(t, time.Now().Before(end))
	}
	require.False(t, a.c.Unsent())
	n, err = transporttest.Sleep(fd, 20*time.Second)
	require.NoError(t, err)
	require.Equal(t, 1, n)
	until(t, a, b, func() bool { return b.f.in.next == 1 && !b.f.in.waiting() })
	holds(t, g, dst, 5)
	c.Conn = c.Conn.(narrow).Conn
	runtime.KeepAlive(src)
}

// TestAllocatesNothing: staging does not, when all is set up.
func TestAllocatesNothing(t *testing.T) {
	if transporttest.RaceEnabled {
		t.Skip("the race detector allocates")
	}
	for _, under := range []below{overCMA, overTCP} {
		g := fakegpu.New()
		g.Instant = true
		a, b := pairOf(t, g, under)
		src, dst := onGPU(t, g, 100000, 5), onGPU(t, g, 100000, 1)
		k := b.key(t, dst)
		ops := write(k, src, transport.Point{})
		ops = append(ops, markOf(&ops[0]))
		var ev [16]transport.Event
		round := func() {
			if n, err := a.c.Post(ops); n != 2 || err != nil {
				t.Fatalf("post: %d, %v", n, err)
			}
			for done, written := 0, 0; done+written < 3; {
				for _, s := range [...]*side{a, b} {
					n, err := s.f.Poll(ev[:])
					if err != nil {
						t.Fatal(err)
					}
					for i := range ev[:n] {
						switch ev[i].Kind {
						case transport.EvDone:
							done++
						case transport.EvFrame:
							written++
						}
					}
				}
			}
		}
		for range 1000 {
			round()
		}
		require.Zero(t, testing.AllocsPerRun(1000, round))
	}
}
