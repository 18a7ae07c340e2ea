package cudaipc

import (
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
	"fserver/engine/transport/link/over"
	"fserver/engine/transport/transporttest"
	"fserver/engine/transport/transporttest/overtest"
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
	k := b.Key(t, dst)
	a.Post(t, write(k, src, transport.Point{}))
	until(t, a, b, func() bool { return len(b.Writes) == 1 && len(a.Done) == 1 })

	d := slow{a.F.Calls.Dev, make(chan struct{}), make(chan struct{})}
	a.F.Calls.Dev = d
	posted := make(chan error)
	go func() {
		_, err := a.Try(write(k, src, transport.Point{}))
		posted <- err
	}()
	<-d.in
	var ev [1]transport.Event
	n, err := a.F.Poll(ev[:])
	require.NoError(t, err)
	require.Zero(t, n)
	close(d.out)
	require.NoError(t, <-posted)
	a.F.Calls.Dev = d.Device
	until(t, a, b, func() bool { return len(b.Writes) == 2 && len(a.Done) == 2 })
	holds(t, g, dst, 5)
	b.Free(t, k)
}

func TestDeviceFails(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overCMA)
	overtest.DeviceFails(t, g, a, b)
}

// TestNotEquipped: without a descriptor or pinned memory for its segment a side says so, and what to do; the Conn ends with
// that at both sides, and the next one takes the write.
func TestNotEquipped(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overCMA)
	src, dst := onGPU(t, g, 1000, 5), onGPU(t, g, 1000, 1)
	k := b.Key(t, dst)
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
			conn := ours(a)
			a.F.Mu.Lock()
			conn.equip()
			a.F.Mu.Unlock()
			until(t, a, b, func() bool { return !conn.Waits })
		}
		c.fail()
		a.Post(t, write(k, src, transport.Point{}))
		until(t, a, b, func() bool { return a.Down != nil && b.Down != nil && len(a.Done) == 1 })
		limit(files.Cur)
		require.ErrorContains(t, who.Down, c.says)
		require.Error(t, a.Done[0])
		require.NotErrorIs(t, told.Down, io.EOF)
		_, err := a.C.Post(write(k, src, transport.Point{}))
		require.Equal(t, a.Down, err)
		a.Done, a.Down, b.Down, b.C = nil, nil, nil, nil
		connect(t, a, b)
	}
	a.Post(t, write(k, src, transport.Point{}))
	until(t, a, b, func() bool { return len(b.Writes) == 1 && len(a.Done) == 1 })
	holds(t, g, dst, 5)
}

func TestHeldBack(t *testing.T) {
	for _, alone := range []bool{false, true} {
		g := fakegpu.New()
		g.Alone = alone
		a, b := pairOf(t, g, overCMA)
		overtest.HeldBack(t, g, a, b)
	}
}

// TestDeregisterBesideOthers: a key goes while a copy to another one waits behind a
// kernel, and not before a copy to itself is over, also if the peer takes back what it
// has begun after that.
func TestDeregisterBesideOthers(t *testing.T) {
	g := fakegpu.New()
	a, b, dst, k, s, open := underWay(t, g)
	b.Free(t, b.Key(t, onGPU(t, g, 4096, 1)))
	require.Zero(t, s.done.Load())

	s.keys[2] = k.ID
	s.begun.Store(2)
	w := writer{ours(b), 2}
	s.begun.Store(1)
	require.False(t, w.over(k.ID))
	open()
	until(t, a, b, func() bool { return len(b.Writes) == 1 && len(a.Done) == 1 })
	require.True(t, w.over(k.ID))
	s.begun.Store(math.MaxUint64)
	w.begun = math.MaxUint64
	require.False(t, w.over(k.ID))
	s.begun.Store(1)
	b.Free(t, k)
	holds(t, g, dst, 5)
}

func TestFailsHalfWay(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overCMA)
	overtest.FailsHalfWay(t, g, a, b, 2*lastWrites)
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
			if c := ours(b); dead {
				c.Conn = ghost{c.Conn}
			}
			b.C.Close()
			b.F.Deregister(k)
			if dead {
				until(t, b, b, func() bool { return len(b.Freed) == 1 })
				require.Zero(t, s.done.Load())
				open()
				return
			}
			for end := time.Now().Add(3 * lastWrites); time.Now().Before(end); {
				b.Poll(t)
			}
			require.Empty(t, b.Freed)
			open()
			until(t, b, b, func() bool { return len(b.Freed) == 1 })
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
	a.Look()
	a.Poll(t) // looks at the device
	for end := time.Now().Add(over.SettleLimit); b.Down == nil && time.Now().Before(end); {
		b.Poll(t)
	}
	require.Error(t, b.Down)
	b.C.Close()
	for end := time.Now().Add(over.SettleLimit); len(b.F.Conns) > 0 && time.Now().Before(end); {
		b.Poll(t)
	}
	require.Empty(t, b.F.Conns)
	b.Free(t, k)
	open() // the fake goes on after all
}

// TestStuckPeer: copies that do not end, of a peer that lives, hold up the end of the keys and of their
// Conn, and wake a sleeper now and then.
func TestStuckPeer(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overCMA)
	src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 3*4096, 1)
	point, open := heldUp(t, g, a.F)
	var keys []transport.Key
	for i := range uintptr(3) {
		keys = append(keys, b.Key(t, mem.Region{Addr: dst.Addr + i*4096, Len: 4096, Dev: dst.Dev}))
		a.Post(t, write(keys[i], src, point))
	}
	s := segmentOf(t, a, b)
	until(t, a, b, func() bool { return s.begun.Load() == 3 })
	b.C.Close()
	for _, k := range keys {
		b.F.Deregister(k)
	}
	b.Poll(t)

	wakes := 0
	for end := time.Now().Add(500 * time.Millisecond); time.Now().Before(end); wakes++ {
		_, err := transporttest.Woken(time.Second, b.F)
		require.NoError(t, err)
		b.Poll(t)
	}
	require.LessOrEqual(t, wakes, 100)

	require.Empty(t, b.Freed)
	require.Len(t, b.F.Conns, 1)
	open()
	until(t, a, b, func() bool { return len(b.F.Conns) == 0 && len(b.Freed) == len(keys) })
}

func TestConnectBesideClose(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overCMA)
	overtest.ConnectBesideClose(t, a, b)
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
		allocs := overtest.Allocations(t, a, b, write(b.Key(t, dst), src, transport.Point{}))
		require.Equal(t, !alone, a.C.Peer().Via == "cudaipc")
		require.Zero(t, allocs, "mapped: %v", !alone)
	}
}
