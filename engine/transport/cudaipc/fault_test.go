package cudaipc

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math"
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

// slow is a Device whose driver takes its time.
type slow struct {
	gpu.Device
	in, out chan struct{}
}

func (s slow) Enqueue(st cuda.Stream, e cuda.Event, copies []cuda.Copy, flag, value uint64) error {
	s.in <- struct{}{}
	<-s.out
	return s.Device.Enqueue(st, e, copies, flag, value)
}

// TestPollBesidePost: who polls does not wait for a Post that is in the driver.
func TestPollBesidePost(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overCMA)
	src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1)
	k := b.key(t, dst)
	a.post(t, write(k, src, transport.Point{}))
	until(t, a, b, func() bool { return len(b.writes) == 1 && len(a.done) == 1 })

	d := slow{a.f.calls.Dev, make(chan struct{}), make(chan struct{})}
	a.f.calls.Dev = d
	posted := make(chan error)
	go func() {
		_, err := a.try(write(k, src, transport.Point{}))
		posted <- err
	}()
	<-d.in
	var ev [1]transport.Event
	n, err := a.f.Poll(ev[:])
	require.NoError(t, err)
	require.Zero(t, n)
	close(d.out)
	require.NoError(t, <-posted)
	a.f.calls.Dev = d.Device
	until(t, a, b, func() bool { return len(b.writes) == 2 && len(a.done) == 2 })
	holds(t, g, dst, 5)
	b.free(t, k)
}

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
}

// TestNotEquipped: without a descriptor or pinned memory for its segment a side says so, and what to do; the Conn ends with
// that at both sides, and the next one takes the write.
func TestNotEquipped(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overCMA)
	src, dst := onGPU(t, g, 1000, 5), onGPU(t, g, 1000, 1)
	k := b.key(t, dst)
	var files unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &files))
	limit := func(n uint64) {
		require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: n, Max: files.Max}))
	}
	for _, c := range []struct {
		theirs bool // it is the peer who fails, when it has heard of us
		fail   func()
		says   string
	}{
		{false, func() { g.Fail("Pin", 1) }, "raise ulimit -l and the memory limit of the container"},
		{true, func() { g.Fail("Pin", 1) }, "raise ulimit -l and the memory limit of the container"},
		{false, func() { g.Fail("NewStream", 1) }, "NewStream: cuda: injected failure"},
		{false, func() { limit(0) }, "too many open files (each takes a descriptor: ulimit -n)"},
	} {
		who, told := a, b
		if c.theirs {
			who, told = b, a
			conn := a.below()
			a.f.mu.Lock()
			conn.equip()
			a.f.mu.Unlock()
			until(t, a, b, func() bool { return !conn.waits })
		}
		c.fail()
		a.post(t, write(k, src, transport.Point{}))
		until(t, a, b, func() bool { return a.down != nil && b.down != nil && len(a.done) == 1 })
		limit(files.Cur)
		require.ErrorContains(t, who.down, c.says)
		require.Error(t, a.done[0])
		require.NotErrorIs(t, told.down, io.EOF)
		_, err := a.c.Post(write(k, src, transport.Point{}))
		require.Equal(t, a.down, err)
		a.done, a.down, b.down, b.c = nil, nil, nil, nil
		connect(t, a, b)
	}
	a.post(t, write(k, src, transport.Point{}))
	until(t, a, b, func() bool { return len(b.writes) == 1 && len(a.done) == 1 })
	holds(t, g, dst, 5)
}

// TestHeldBack: nothing is read before the stream has passed the point, and host memory has none.
func TestHeldBack(t *testing.T) {
	for _, alone := range []bool{false, true} {
		g := fakegpu.New()
		g.Alone = alone
		a, b := pairOf(t, g, overCMA)
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

// TestDeregisterBesideOthers: a key goes while a copy to another one waits behind a
// kernel, and not before a copy to itself is over, also if the peer takes back what it
// has begun after that.
func TestDeregisterBesideOthers(t *testing.T) {
	g := fakegpu.New()
	a, b, dst, k, s, open := underWay(t, g)
	b.free(t, b.key(t, onGPU(t, g, 4096, 1)))
	require.Zero(t, s.done.Load())

	s.keys[2] = k.ID
	s.begun.Store(2)
	w := writer{b.below(), 2}
	s.begun.Store(1)
	require.False(t, w.over(k.ID))
	open()
	until(t, a, b, func() bool { return len(b.writes) == 1 && len(a.done) == 1 })
	require.True(t, w.over(k.ID))
	s.begun.Store(math.MaxUint64)
	w.begun = math.MaxUint64
	require.False(t, w.over(k.ID))
	s.begun.Store(1)
	b.free(t, k)
	holds(t, g, dst, 5)
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
	time.Sleep(2 * lastWrites)
	b.poll(t)
	b.poll(t)
	a.f.scan = time.Time{}
	a.f.Arm() // looks at the device
	a.poll(t)
	require.Len(t, a.done, 1)
	require.Empty(t, b.freed)
	open()
	until(t, a, b, func() bool {
		a.f.scan = time.Time{}
		a.f.Arm()
		return len(a.done) == 2 && a.down != nil
	})
	require.ErrorContains(t, a.done[1], "injected failure")
	until(t, a, b, func() bool { return len(b.freed) == 1 })
	holds(t, g, dst, 5)
}

// ghost is a Conn of a process that has ended.
type ghost struct{ transport.Conn }

func (g ghost) Peer() transport.Peer {
	p := g.Conn.Peer()
	p.Dead = func() bool { return true }
	return p
}

// TestDeregisterBehindAConn: a copy of a peer that lives is waited for when their Conn
// has ended too, and that of one that has died is not.
func TestDeregisterBehindAConn(t *testing.T) {
	for name, dead := range map[string]bool{"lives": false, "dead": true} {
		t.Run(name, func(t *testing.T) {
			g := fakegpu.New()
			_, b, dst, k, s, open := underWay(t, g)
			if c := b.below(); dead {
				c.Conn = ghost{c.Conn}
			}
			b.c.Close()
			b.f.Deregister(k)
			if dead {
				until(t, b, b, func() bool { return len(b.freed) == 1 })
				require.Zero(t, s.done.Load())
				open()
				return
			}
			for end := time.Now().Add(3 * lastWrites); time.Now().Before(end); {
				b.poll(t)
			}
			require.Empty(t, b.freed)
			open()
			until(t, b, b, func() bool { return len(b.freed) == 1 })
			holds(t, g, dst, 5)
		})
	}
}

// TestDeregisterBehindADevice: a peer that lives and whose GPU works no more is not waited
// for.
func TestDeregisterBehindADevice(t *testing.T) {
	g := fakegpu.New()
	a, b, _, k, _, open := underWay(t, g)
	g.Fail("Idle", 1)
	a.f.scan = time.Time{}
	a.f.Arm()
	a.poll(t) // looks at the device
	for end := time.Now().Add(settleLimit); b.down == nil && time.Now().Before(end); {
		b.poll(t)
	}
	require.Error(t, b.down)
	b.c.Close()
	for end := time.Now().Add(settleLimit); len(b.f.conns) > 0 && time.Now().Before(end); {
		b.poll(t)
	}
	require.Empty(t, b.f.conns)
	b.free(t, k)
	open() // the fake goes on after all
}

// TestStuckPeer: copies that do not end, of a peer that lives, hold up the end of the keys and of their
// Conn, and wake a sleeper now and then.
func TestStuckPeer(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overCMA)
	src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 3*4096, 1)
	point, open := heldUp(t, g, a.f)
	var keys []transport.Key
	for i := range uintptr(3) {
		keys = append(keys, b.key(t, mem.Region{Addr: dst.Addr + i*4096, Len: 4096, Dev: dst.Dev}))
		a.post(t, write(keys[i], src, point))
	}
	s := a.segment(t, b)
	until(t, a, b, func() bool { return s.begun.Load() == 3 })
	b.c.Close()
	for _, k := range keys {
		b.f.Deregister(k)
	}
	b.poll(t)

	wakes := 0
	for end := time.Now().Add(500 * time.Millisecond); time.Now().Before(end); wakes++ {
		_, err := transporttest.Woken(time.Second, b.f)
		require.NoError(t, err)
		b.poll(t)
	}
	require.LessOrEqual(t, wakes, 100)

	require.Empty(t, b.freed)
	require.Len(t, b.f.conns, 1)
	open()
	until(t, a, b, func() bool { return len(b.f.conns) == 0 && len(b.freed) == len(keys) })
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
	a, b := pairOf(t, g, overCMA)
	a.f.Fabric = late{a.f.Fabric, a.f.Close}
	_, err := a.f.Connect(context.Background(), b.f.Addr())
	require.ErrorIs(t, err, transport.ErrClosed)
	require.Len(t, a.f.conns, 1)
}

// TestAllocatesNothing: neither of the ways of GPU memory does, when all is set up.
func TestAllocatesNothing(t *testing.T) {
	if transporttest.RaceEnabled {
		t.Skip("the race detector allocates")
	}
	for _, alone := range []bool{false, true} {
		g := fakegpu.New()
		g.Instant, g.Alone = true, alone
		a, b := pairOf(t, g, overCMA)
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
		require.Equal(t, !alone, a.c.Peer().Via == "cudaipc")
		require.Zero(t, testing.AllocsPerRun(1000, round), "mapped: %v", !alone)
	}
}
