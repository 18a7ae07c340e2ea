package cudaipc

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"math/bits"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"fserver/cshim/cuda"
	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/cudaipc/fakegpu"
	"fserver/engine/transport/transporttest"
)

// A side is one end of a Conn, and what it has seen.
type side struct {
	f      *Fabric
	c      transport.Conn
	done   []error
	writes []transport.Event
	down   error
}

// post hands operations over that are taken.
func (s *side) post(t *testing.T, ops []transport.Op) {
	n, err := s.c.Post(ops)
	require.NoError(t, err)
	require.Len(t, ops, n)
}

// key registers memory.
func (s *side) key(t *testing.T, r mem.Region) transport.Key {
	k, err := s.f.Register(r)
	require.NoError(t, err)
	return k
}

func (s *side) poll(t *testing.T) {
	var ev [16]transport.Event
	n, err := s.f.Poll(ev[:])
	require.NoError(t, err)
	for _, e := range ev[:n] {
		switch e.Kind {
		case transport.EvAccept:
			s.c = e.Conn
		case transport.EvDone:
			s.done = append(s.done, e.Err)
		case transport.EvWritten:
			s.writes = append(s.writes, e)
		case transport.EvLent:
			require.NoError(t, e.View.Drop())
		case transport.EvDown:
			s.down = e.Err
		}
	}
}

// pairOf is a Conn between two Fabrics over one GPU.
func pairOf(t *testing.T, g *fakegpu.GPU, under below, share bool) (a, b *side) {
	t.Cleanup(func() { g.Empty(t) })
	open := func(name string) *side {
		in, err := under(transporttest.Options{Listen: true, Gate: transporttest.Gate{Hello: name}})
		require.NoError(t, err)
		f, err := Wrap(in, Options{Device: g, Share: share})
		require.NoError(t, err)
		rand.Read(f.secret[:])
		t.Cleanup(func() { require.NoError(t, f.Close()) })
		return &side{f: f}
	}
	a, b = open("a"), open("b")
	c, err := a.f.Connect(context.Background(), b.f.Addr())
	require.NoError(t, err)
	a.c = c
	until(t, a, b, func() bool { return b.c != nil })
	return a, b
}

func until(t *testing.T, a, b *side, met func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !met(); {
		require.True(t, time.Now().Before(end), "did not happen")
		a.poll(t)
		b.poll(t)
	}
}

func onGPU(t *testing.T, g *fakegpu.GPU, n uint64, fill byte) mem.Region {
	m := fakegpu.Memory{G: g}
	r, err := m.Alloc(n)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Free(r)) })
	require.NoError(t, m.Store(r.Span(), bytes.Repeat([]byte{fill}, int(n))))
	return r
}

func write(k transport.Key, src mem.Region, after transport.Point) []transport.Op {
	return []transport.Op{{Kind: transport.OpWrite, Imm: 9, Key: k, Src: []mem.Span{src.Span()}, Dev: src.Dev, After: after}}
}

func holds(t *testing.T, g *fakegpu.GPU, r mem.Region, fill byte) {
	t.Helper()
	b := make([]byte, r.Len)
	require.NoError(t, fakegpu.Memory{G: g}.Load(b, r.Span()))
	require.Equal(t, bytes.Repeat([]byte{fill}, int(r.Len)), b)
}

// slow is a Device whose driver takes its time.
type slow struct {
	Device
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
	a, b := pairOf(t, g, overCMA, true)
	src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1)
	k := b.key(t, dst)
	a.post(t, write(k, src, transport.Point{}))
	until(t, a, b, func() bool { return len(b.writes) == 1 && len(a.done) == 1 })

	d := slow{a.f.o.Device, make(chan struct{}), make(chan struct{})}
	a.f.o.Device = d
	posted := make(chan error)
	go func() {
		_, err := a.c.Post(write(k, src, transport.Point{}))
		posted <- err
	}()
	<-d.in
	var ev [1]transport.Event
	n, err := a.f.Poll(ev[:])
	require.NoError(t, err)
	require.Zero(t, n)
	close(d.out)
	require.NoError(t, <-posted)
	a.f.o.Device = d.Device
	until(t, a, b, func() bool { return len(b.writes) == 2 && len(a.done) == 2 })
	holds(t, g, dst, 5)
	require.NoError(t, b.f.Deregister(k))
}

// TestMappingFails: what cannot be mapped is staged.
func TestMappingFails(t *testing.T) {
	for _, call := range []string{"ImportIPC", "ExportIPC"} {
		g := fakegpu.New()
		a, b := pairOf(t, g, overCMA, true)
		src, dst := onGPU(t, g, 3<<20, 5), onGPU(t, g, 3<<20, 1)
		g.Fail(call, 1)
		k := b.key(t, dst)
		n, err := a.c.Post(write(k, src, transport.Point{}))
		require.NoError(t, err)
		require.Equal(t, 1, n)
		until(t, a, b, func() bool { return len(b.writes) == 1 && len(a.done) == 1 })
		require.NoError(t, a.done[0])
		require.Equal(t, uint64(3<<20), b.writes[0].Len)
		require.Equal(t, []uint64{k.ID, 0}, []uint64{b.writes[0].Key, b.writes[0].Off})
		holds(t, g, dst, 5)
		require.NotEqual(t, "cudaipc", a.c.(transport.Teller).Via())
	}
}

// TestDeviceFails: the Conn ends with the reason, and at the peer not in good order.
func TestDeviceFails(t *testing.T) {
	for _, share := range []bool{true, false} {
		g := fakegpu.New()
		a, b := pairOf(t, g, overCMA, share)
		src, dst := onGPU(t, g, 1<<20, 5), onGPU(t, g, 1<<20, 1)
		k := b.key(t, dst)
		g.Fail("Enqueue", 1)
		a.post(t, write(k, src, transport.Point{}))
		until(t, a, b, func() bool { return a.down != nil && b.down != nil })
		require.ErrorContains(t, a.down, "injected failure")
		require.NotErrorIs(t, b.down, io.EOF)
		require.Len(t, a.done, 1)
		require.Error(t, a.done[0])
		if !share {
			holds(t, g, dst, 1)
		}
	}
}

// TestDeviceFailsToLand: a Conn whose writes do not get from the host to a GPU that works
// no more ends, and so does who waits for them.
func TestDeviceFailsToLand(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overTCP, false)
	src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1)
	k := b.key(t, dst)
	gate := make(chan struct{})
	g.Put(b.f.in.stream, func() { <-gate })
	a.post(t, write(k, src, transport.Point{}))
	until(t, a, b, func() bool { return b.f.in.next == 1 })
	g.Fail("Idle", 1)
	b.f.scan = time.Time{}
	b.f.FD() // looks at the device
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
	a, b := pairOf(t, g, overTCP, false)
	src, dst := []byte{5, 5, 5}, onGPU(t, g, 4096, 1)
	k := b.key(t, dst)
	g.Fail("Enqueue", 1)
	a.post(t, []transport.Op{{Kind: transport.OpWrite, Key: k, Src: []mem.Span{mem.Of(src)}}})
	until(t, a, b, func() bool { return a.down != nil && b.down != nil })
	require.EqualError(t, b.down, "cudaipc: "+b.c.Remote()+": copy 3 bytes to gpu 0: Enqueue: cuda: injected failure")
	require.NotErrorIs(t, a.down, io.EOF)
	require.NoError(t, b.f.Deregister(k)) // waits for the copy, which was enqueued
	runtime.KeepAlive(src)
}

// TestOutOfMemory: without memory for staging, or a descriptor, the call says so, and
// what to do; the Conn ends with that, and the next one takes the write.
func TestOutOfMemory(t *testing.T) {
	const remedy = "out of memory (send fewer or smaller tensors at once, or raise ulimit -l and the memory limit of the container)"
	g := fakegpu.New()
	a, b := pairOf(t, g, overTCP, false)
	src, dst := onGPU(t, g, 1000, 5), onGPU(t, g, 1000, 1)
	k := b.key(t, dst)
	var oom *cuda.Error
	var files unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &files))
	limit := func(n uint64) {
		require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: n, Max: files.Max}))
	}
	for _, c := range []struct {
		fail func()
		as   any
		says string
	}{
		{func() { g.Fail("Pin", 1) }, &oom, "injected failure: " + remedy},
		{func() { g.Fail("NewStream", 1) }, nil, "NewStream: cuda: injected failure"},
		{func() { limit(0) }, new(unix.Errno), "too many open files (each takes a descriptor: ulimit -n)"},
	} {
		c.fail()
		n, err := a.c.Post(write(k, src, transport.Point{}))
		limit(files.Cur)
		require.ErrorContains(t, err, c.says)
		if c.as != nil {
			require.ErrorAs(t, err, c.as)
		}
		require.Zero(t, n)
		until(t, a, b, func() bool { return a.down != nil && b.down != nil })
		require.Equal(t, err, a.down)
		require.NotErrorIs(t, b.down, io.EOF)
		_, again := a.c.Post(write(k, src, transport.Point{}))
		require.Equal(t, err, again)
		a.down, b.down, b.c = nil, nil, nil
		a.c, err = a.f.Connect(context.Background(), b.f.Addr())
		require.NoError(t, err)
		until(t, a, b, func() bool { return b.c != nil })
	}
	n, err := a.c.Post(write(k, src, transport.Point{}))
	require.NoError(t, err)
	require.Equal(t, 1, n)
	until(t, a, b, func() bool { return len(b.writes) == 1 && len(a.done) == 1 })
	holds(t, g, dst, 5)

	l := new(lane)
	for _, provide := range []func() error{
		func() error { return l.provide(a.f) },
		func() error { return l.extend(a.f, 1<<20) },
	} {
		g.Fail("Pin", 1)
		require.ErrorContains(t, provide(), remedy)
		require.NoError(t, provide())
	}
	l.close(a.f)
	require.ErrorContains(t, scarce(unix.ENOMEM), "container")
	require.Equal(t, io.EOF, scarce(io.EOF))
}

// counting is a Fabric that counts its keys.
type counting struct {
	transport.Fabric
	transport.Sleeper
	keys int
}

func (c *counting) Register(r mem.Region) (transport.Key, error) {
	c.keys++
	return c.Fabric.Register(r)
}

func (c *counting) Deregister(k transport.Key) error {
	c.keys--
	return c.Fabric.Deregister(k)
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
		counts := &counting{Fabric: in, Sleeper: in.(transport.Sleeper)}
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
		a, b := pairOf(t, g, overTCP, false)
		src, warm, dst := onGPU(t, g, 3<<20, 5), onGPU(t, g, 3<<20, 1), onGPU(t, g, 3<<20, 1)
		for i, to := range []mem.Region{warm, dst} {
			k := b.key(t, to)
			g.Fail("Pin", i) // with warm, all but the shadow of dst has been pinned
			a.post(t, write(k, src, transport.Point{}))
			until(t, a, b, func() bool { return len(b.writes) == i+1 && len(a.done) == i+1 })
			holds(t, g, to, 5)
			require.Equal(t, i == 0, b.f.regions[k.ID].pinned)
			require.NoError(t, b.f.Deregister(k))
		}
	})
	for name, share := range map[string]bool{"to stage": false, "to be written to": true} {
		t.Run(name, func(t *testing.T) {
			g := fakegpu.New()
			a, b := pairOf(t, g, overCMA, share)
			src, dst := onGPU(t, g, 3<<20, 5), onGPU(t, g, 3<<20, 1)
			k := b.key(t, dst)
			a.f.mu.Lock()
			require.NoError(t, a.f.conns[a.c.(lendingConn).inner].equip())
			a.f.mu.Unlock()
			g.Fail("Pin", 1)
			a.post(t, write(k, src, transport.Point{}))
			until(t, a, b, func() bool { return a.down != nil && b.down != nil && len(a.done) == 1 })
			require.Error(t, a.done[0])
			who, told := a.down, b.down
			if share {
				who, told = b.down, a.down
			}
			require.ErrorContains(t, who, remedy)
			require.NotErrorIs(t, told, io.EOF)
			holds(t, g, dst, 1)
			a.done, a.down, b.down, b.c = nil, nil, nil, nil
			var err error
			a.c, err = a.f.Connect(context.Background(), b.f.Addr())
			require.NoError(t, err)
			until(t, a, b, func() bool { return b.c != nil })
			a.post(t, write(k, src, transport.Point{}))
			until(t, a, b, func() bool { return len(b.writes) == 1 && len(a.done) == 1 })
			holds(t, g, dst, 5)
		})
	}
}

// TestBetweenPieces: a write that goes between the pieces of another is one of its own.
func TestBetweenPieces(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overTCP, false)
	src, dst := onGPU(t, g, 8<<20, 5), onGPU(t, g, 8<<20, 1)
	host, err := mem.Map(4096)
	require.NoError(t, err)
	hostDst, err := mem.Map(4096)
	require.NoError(t, err)
	k := b.key(t, dst)
	hostKey := b.key(t, hostDst)
	ops := write(k, src, transport.Point{})
	a.post(t, ops)
	conn := b.f.conns[b.c.(*Conn).inner]
	until(t, a, b, func() bool { return conn.pieces.n > 0 })
	a.post(t, write(hostKey, host, transport.Point{}))
	until(t, a, b, func() bool { return len(b.writes) == 2 && len(a.done) == 2 })
	for _, w := range b.writes {
		require.Zero(t, w.Off)
		require.Equal(t, map[uint64]uint64{k.ID: dst.Len, hostKey.ID: hostDst.Len}[w.Key], w.Len)
	}
	holds(t, g, dst, 5)
	require.NoError(t, errors.Join(b.f.Deregister(hostKey), mem.Unmap(host), mem.Unmap(hostDst)))
}

// TestHeldBack: nothing is read before the stream has passed the point, host memory
// included, and frames go ahead.
func TestHeldBack(t *testing.T) {
	for _, share := range []bool{true, false} {
		g := fakegpu.New()
		a, b := pairOf(t, g, overCMA, share)
		stream, err := g.NewStream()
		require.NoError(t, err)
		e, err := g.NewEvent()
		require.NoError(t, err)
		host, err := mem.Map(4096)
		require.NoError(t, err)
		gpu, dst, hostDst := onGPU(t, g, 4096, 1), onGPU(t, g, 4096, 0), onGPU(t, g, 4096, 0)
		gate := make(chan struct{})
		g.Put(stream, func() {
			<-gate
			m := fakegpu.Memory{G: g}
			_ = m.Store(gpu.Span(), bytes.Repeat([]byte{7}, 4096))
			copy(host.Span().Bytes(), bytes.Repeat([]byte{8}, 4096))
		})
		require.NoError(t, g.Record(e, stream))
		point := transport.Point{Dev: mem.GPU(0), Event: uint64(e)}
		k1 := b.key(t, dst)
		k2 := b.key(t, hostDst)
		n, err := a.c.Post(append(write(k1, gpu, point), write(k2, host, point)...))
		require.NoError(t, err)
		require.Equal(t, 2, n)
		for range 1000 {
			a.poll(t)
			b.poll(t)
		}
		require.Empty(t, b.writes)
		require.Empty(t, a.done)
		close(gate)
		until(t, a, b, func() bool { return len(b.writes) == 2 && len(a.done) == 2 })
		holds(t, g, dst, 7)
		holds(t, g, hostDst, 8)
		require.NoError(t, g.FreeStream(stream))
		require.NoError(t, errors.Join(g.FreeEvent(e), mem.Unmap(host)))
	}
}

// heldUp is a point that a GPU has not passed before the func is called. What f has
// behind it is over before memory from before this call is freed.
func heldUp(t *testing.T, g *fakegpu.GPU, f *Fabric) (transport.Point, func()) {
	stream, err := g.NewStream()
	require.NoError(t, err)
	e, err := g.NewEvent()
	require.NoError(t, err)
	gate := make(chan struct{})
	open := sync.OnceFunc(func() { close(gate) })
	g.Put(stream, func() { <-gate })
	require.NoError(t, g.Record(e, stream))
	t.Cleanup(func() {
		open()
		require.NoError(t, errors.Join(f.Close(), g.FreeStream(stream), g.FreeEvent(e)))
	})
	return transport.Point{Dev: mem.GPU(0), Event: uint64(e)}, open
}

// underWay is two sides of which a has begun a write of 4 KiB to a key of b's, whose copy
// waits until open is called. s is a's segment.
func underWay(t *testing.T, g *fakegpu.GPU) (a, b *side, dst mem.Region, k transport.Key, s *segment, open func()) {
	a, b = pairOf(t, g, overCMA, true)
	src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1)
	point, open := heldUp(t, g, a.f)
	k = b.key(t, dst)
	a.post(t, write(k, src, point))
	s = a.f.conns[a.c.(lendingConn).inner].lane.seg
	until(t, a, b, func() bool { return s.begun.Load() == 1 })
	return a, b, dst, k, s, open
}

// TestDeregisterBesideOthers: a key goes while a copy to another one waits behind a
// kernel, and not before a copy to itself is over, also if the peer takes back what it
// has begun after that.
func TestDeregisterBesideOthers(t *testing.T) {
	g := fakegpu.New()
	a, b, dst, k, s, open := underWay(t, g)
	require.NoError(t, b.f.Deregister(b.key(t, onGPU(t, g, 4096, 1))))
	require.Zero(t, s.done.Load())

	s.records[2].key = k.ID
	s.begun.Store(2)
	w, ok := b.f.conns[b.c.(lendingConn).inner].writer()
	require.True(t, ok)
	s.begun.Store(1)
	require.False(t, w.over(k.ID))
	open()
	until(t, a, b, func() bool { return len(b.writes) == 1 && len(a.done) == 1 })
	require.True(t, w.over(k.ID))
	s.begun.Store(math.MaxUint64)
	w.begun = math.MaxUint64
	require.False(t, w.over(k.ID))
	s.begun.Store(1)
	require.NoError(t, errors.Join(w.view.Drop(), b.f.Deregister(k)))
	holds(t, g, dst, 5)
}

// TestFailsHalfWay: where the driver takes the copies of a write and then fails, neither
// side lets go of the memory before they are over.
func TestFailsHalfWay(t *testing.T) {
	for name, share := range map[string]bool{"mapped": true, "staged": false} {
		t.Run(name, func(t *testing.T) {
			g := fakegpu.New()
			a, b := pairOf(t, g, overCMA, share)
			src, warm, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1), onGPU(t, g, 4096, 1)
			a.post(t, write(b.key(t, warm), src, transport.Point{})) // both sides know each other
			until(t, a, b, func() bool { return len(b.writes) == 1 && len(a.done) == 1 })
			point, open := heldUp(t, g, a.f)
			k := b.key(t, dst)
			g.Fail("Enqueue", 1)
			a.post(t, write(k, src, point))
			until(t, a, b, func() bool { return b.down != nil })
			gone := make(chan error, 1)
			go func() { gone <- b.f.Deregister(k) }()
			time.Sleep(2 * lastWrites)
			a.f.scan = time.Time{}
			a.f.FD() // looks at the device
			a.poll(t)
			require.Len(t, a.done, 1)
			require.Equal(t, share, len(gone) == 0)
			open()
			until(t, a, b, func() bool {
				a.f.scan = time.Time{}
				a.f.FD()
				return len(a.done) == 2 && a.down != nil
			})
			require.ErrorContains(t, a.done[1], "injected failure")
			require.NoError(t, <-gone)
			if share {
				holds(t, g, dst, 5)
			}
		})
	}
}

// ghost is a Conn of a process that has ended.
type ghost struct{ transport.Conn }

func (ghost) Dead() (dead, known bool) { return true, true }

// TestDeregisterBehindAConn: a copy of a peer that lives is waited for when their Conn
// has ended too, and that of one that has died is not.
func TestDeregisterBehindAConn(t *testing.T) {
	for name, dead := range map[string]bool{"lives": false, "dead": true} {
		t.Run(name, func(t *testing.T) {
			g := fakegpu.New()
			_, b, dst, k, s, open := underWay(t, g)
			if c := b.f.conns[b.c.(lendingConn).inner]; dead {
				c.inner = ghost{c.inner}
			}
			require.NoError(t, b.c.Close())
			gone := make(chan error, 1)
			go func() { gone <- b.f.Deregister(k) }()
			if dead {
				require.NoError(t, <-gone)
				require.Zero(t, s.done.Load())
				open()
				return
			}
			time.Sleep(3 * lastWrites)
			require.Empty(t, gone)
			open()
			require.NoError(t, <-gone)
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
	a.f.FD() // looks at the device
	for end := time.Now().Add(settleLimit); len(b.f.conns) > 0 && time.Now().Before(end); {
		b.poll(t)
	}
	require.Error(t, b.down)
	require.Empty(t, b.f.conns)
	require.NoError(t, b.f.Deregister(k))
	open() // the fake goes on after all
}

// TestStuckPeer: copies that do not end, of a peer that lives, hold up who ends the keys
// behind their Conn once, and wake a sleeper now and then.
func TestStuckPeer(t *testing.T) {
	twice(t)
	g := fakegpu.New()
	a, b := pairOf(t, g, overCMA, true)
	src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 3*4096, 1)
	point, open := heldUp(t, g, a.f)
	var keys []transport.Key
	for i := range uintptr(3) {
		keys = append(keys, b.key(t, mem.Region{Addr: dst.Addr + i*4096, Len: 4096, Dev: dst.Dev}))
		a.post(t, write(keys[i], src, point))
	}
	s := a.f.conns[a.c.(lendingConn).inner].lane.seg
	until(t, a, b, func() bool { return s.begun.Load() == 3 })
	require.NoError(t, b.c.Close())
	b.poll(t)

	wakes := 0
	for end := time.Now().Add(500 * time.Millisecond); time.Now().Before(end); wakes++ {
		_, err := unix.Poll([]unix.PollFd{{Fd: int32(b.f.FD()), Events: unix.POLLIN}}, 1000)
		require.True(t, err == nil || errors.Is(err, unix.EINTR))
		b.poll(t)
	}
	require.LessOrEqual(t, wakes, 100)

	began := time.Now()
	for _, k := range keys {
		require.ErrorContains(t, b.f.Deregister(k), "a copy to this memory has not finished within 5s")
	}
	require.Less(t, time.Since(began), 2*settleLimit)
	require.Len(t, b.f.conns, 1)
	open()
	until(t, a, b, func() bool { return len(b.f.conns) == 0 })
}

// TestNobodyMapsUnseen: a side writes nothing by mapping before the other knows whom to
// wait for at the end of a key.
func TestNobodyMapsUnseen(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overCMA, true)
	src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 8192, 1)
	there := b.key(t, mem.Region{Addr: dst.Addr, Len: 4096, Dev: dst.Dev})
	back := a.key(t, mem.Region{Addr: dst.Addr + 4096, Len: 4096, Dev: dst.Dev})
	point, open := heldUp(t, g, b.f)
	a.post(t, write(there, src, transport.Point{}))
	from, to := b.f.conns[b.c.(lendingConn).inner], a.f.conns[a.c.(lendingConn).inner]
	for from.shown < introduction {
		b.poll(t)
	}
	b.post(t, write(back, src, point))
	require.Nil(t, to.theirs)
	require.Zero(t, from.lane.seg.begun.Load())
	until(t, a, b, func() bool { return from.lane.seg.begun.Load() == 1 })
	require.NotNil(t, to.theirs)
	open()
	until(t, a, b, func() bool { return len(a.writes) == 1 && len(b.writes) == 1 && len(b.done) == 1 })
	holds(t, g, dst, 5)
	require.NoError(t, errors.Join(b.f.Deregister(there), a.f.Deregister(back)))
}

// TestDeregisterBesideClose: who waits for a copy to the GPU does not look at memory that
// Close has given back.
func TestDeregisterBesideClose(t *testing.T) {
	g := fakegpu.New()
	g.Delay = 5 * time.Millisecond
	a, b := pairOf(t, g, overTCP, false)
	src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1)
	k := b.key(t, dst)
	a.post(t, write(k, src, transport.Point{}))
	until(t, a, b, func() bool { return b.f.in.next == 1 })
	gone := make(chan error)
	go func() { gone <- b.f.Deregister(k) }()
	require.NoError(t, b.f.Close())
	<-gone // an error if Close was first
}

// late is a Fabric whose Connect returns when its user has closed it.
type late struct {
	transport.Fabric
	transport.Sleeper
	close func() error
}

func (l late) Connect(ctx context.Context, to transport.Addr) (transport.Conn, error) {
	c, err := l.Fabric.Connect(ctx, to)
	return c, errors.Join(err, l.close())
}

// TestConnectBesideClose: nothing comes out of a Fabric that is closed.
func TestConnectBesideClose(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overTCP, false)
	a.f.inner = late{a.f.inner, a.f.sleep, a.f.Close}
	_, err := a.f.Connect(context.Background(), b.f.Addr())
	require.ErrorIs(t, err, transport.ErrClosed)
	require.Len(t, a.f.conns, 1)
}

// full is a Conn that takes nothing.
type full struct{ transport.Conn }

func (full) Post([]transport.Op) (int, error) { return 0, nil }

// TestSleeperIsWoken: a peer that sleeps hears of a write also if it could not be called
// at once.
func TestSleeperIsWoken(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overCMA, true)
	src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1)
	k := b.key(t, dst)
	ops := write(k, src, transport.Point{})
	a.post(t, ops)
	until(t, a, b, func() bool { return len(b.writes) == 1 && len(a.done) == 1 })
	fd := []unix.PollFd{{Fd: int32(b.f.FD()), Events: unix.POLLIN}}
	for n := 1; n > 0; b.f.FD() { // what else there was to tell
		b.poll(t)
		n, _ = unix.Poll(fd, 10)
	}
	c := a.f.conns[a.c.(lendingConn).inner]
	below := c.inner
	c.inner = full{below}
	a.post(t, ops)
	c.inner = below
	for end := time.Now().Add(20 * time.Second); len(a.done) < 2; a.poll(t) {
		require.True(t, time.Now().Before(end))
	}
	n, err := unix.Poll(fd, 20_000)
	require.NoError(t, err)
	require.Equal(t, 1, n)
	until(t, a, b, func() bool { return len(b.writes) == 2 })
}

// miser is a Lender that lends nothing.
type miser struct{}

func (miser) Lends(mem.Span) bool { return false }

// TestNothingToLend: a side that cannot introduce itself, as too much is lent to the peer
// already, writes by another way.
func TestNothingToLend(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overCMA, true)
	src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1)
	k := b.key(t, dst)
	a.f.conns[a.c.(lendingConn).inner].lender = miser{}
	a.post(t, write(k, src, transport.Point{}))
	until(t, a, b, func() bool { return len(b.writes) == 1 && len(a.done) == 1 })
	holds(t, g, dst, 5)
	require.Equal(t, "cma", a.c.(transport.Teller).Via())
}

// TestLoanBesideIntroduction: a loan that waited for a stream does not come into the
// middle of the introduction, where the peer would take it for one of that.
func TestLoanBesideIntroduction(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overCMA, true)
	shared, err := mem.NewShared(4096)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, mem.FreeShared(shared.ID())) })
	point, open := heldUp(t, g, a.f)
	loan := transport.Op{Kind: transport.OpLend, Src: []mem.Span{shared.Region().Span()}, After: point}
	require.True(t, a.c.(transport.Lender).Lends(loan.Src[0]))
	n, err := a.c.Post([]transport.Op{loan})
	require.NoError(t, err)
	require.Equal(t, 1, n)
	c := a.f.conns[a.c.(lendingConn).inner]
	c.shown = 1
	open()
	for passed := false; !passed; {
		passed, err = g.Passed(cuda.Event(point.Event))
		require.NoError(t, err)
	}
	a.poll(t)
	require.Zero(t, c.open)
	c.shown = introduction
	until(t, a, b, func() bool { return len(a.done) == 1 })
	require.NoError(t, a.done[0])
}

// view is a GPU as one process sees it: with a number of that process, and the GPUs whose
// memory it reaches there.
type view struct {
	*fakegpu.GPU
	ordinal int
	uuid    cuda.UUID
	near    cuda.UUID
	asked   []cuda.UUID
}

func (v *view) Ordinal() int    { return v.ordinal }
func (v *view) UUID() cuda.UUID { return v.uuid }

func (v *view) Reach(u cuda.UUID) error {
	if v.asked = append(v.asked, u); u != v.near {
		return errors.New("no way")
	}
	return nil
}

// TestNumbersOfGPUs: what numbers two processes have for their GPUs changes nothing.
// Memory of this process is reached by the GPU's UUID, that of another by handles.
func TestNumbersOfGPUs(t *testing.T) {
	x, y := cuda.UUID{7}, cuda.UUID{8}
	for _, c := range []struct {
		name    string
		a, b    int // numbers of x and of y
		own     bool
		near    cuda.UUID
		imports int
		via     string
	}{
		{name: "both, each sees one", imports: 1, via: "cudaipc"},
		{name: "both, in the same order", b: 1, imports: 1, via: "cudaipc"},
		{name: "both, each in its order", a: 1, b: 1, imports: 1, via: "cudaipc"},
		{name: "one process", b: 1, own: true, near: y, via: "cudaipc"},
		{name: "one process, the other order", a: 1, own: true, near: y, via: "cudaipc"},
		{name: "one process, out of reach", b: 1, own: true, via: "cma"},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := fakegpu.New()
			a, b := pairOf(t, g, overCMA, true)
			va := &view{GPU: g, ordinal: c.a, uuid: x, near: c.near}
			a.f.dev, a.f.o.Device = va, va
			vb := &view{GPU: g, ordinal: c.b, uuid: y}
			b.f.dev, b.f.o.Device = vb, vb
			if c.own {
				b.f.secret = a.f.secret
			}
			src, dst := onGPU(t, g, 3<<20, 5), onGPU(t, g, 3<<20, 1)
			src.Dev, dst.Dev = mem.GPU(c.a), mem.GPU(c.b)
			k := b.key(t, dst)
			a.post(t, write(k, src, transport.Point{}))
			until(t, a, b, func() bool { return len(b.writes) == 1 && len(a.done) == 1 })
			require.NoError(t, a.done[0])
			holds(t, g, dst, 5)
			require.Equal(t, c.imports, g.Imports())
			require.Contains(t, a.c.(transport.Teller).Via(), c.via)
			if c.own {
				require.Equal(t, []cuda.UUID{y}, va.asked)
			} else {
				require.Empty(t, va.asked)
			}
		})
	}
}

// TestMappingsEnd: a mapping is made once, lives on while a key of its allocation
// does, and is closed when there has been none for a while, or when other memory
// comes to lie there.
func TestMappingsEnd(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overCMA, true)
	src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 1<<20, 1)
	send := func(k transport.Key) {
		a.done, b.writes = nil, nil
		a.post(t, write(k, src, transport.Point{}))
		until(t, a, b, func() bool { return len(b.writes) == 1 && len(a.done) == 1 })
	}
	for i := range uint64(20) {
		k := b.key(t, mem.Region{Addr: dst.Addr + uintptr(i)*4096, Len: 8192, Dev: dst.Dev})
		send(k)
		require.Equal(t, 1, g.Imports())
		if i > 0 {
			require.NoError(t, b.f.Deregister(k))
		}
	}
	k := b.key(t, dst)
	send(k)
	require.Equal(t, "cudaipc", a.c.(transport.Teller).Via())
	conn := a.f.conns[a.c.(lendingConn).inner]
	require.Len(t, conn.ways, 21) // those of keys that are gone are swept with time
	a.f.mu.Lock()
	conn.sweep()
	require.Len(t, conn.ways, 2)
	a.f.mu.Unlock()
	require.Equal(t, 1, g.Imports())

	for id, r := range b.f.regions {
		if id == r.last.ID {
			require.NoError(t, b.f.Deregister(r.last))
		}
	}
	for range 2 {
		a.f.scan = time.Time{}
		a.f.FD()
		a.poll(t)
	}
	until(t, a, b, func() bool { return g.Imports() == 0 })
	require.Empty(t, conn.ways)
}

// lateToClose closes mappings when it is told to.
type lateToClose struct {
	*fakegpu.GPU
	began, now chan struct{}
}

func (d lateToClose) CloseIPC(base uint64) error {
	close(d.began)
	<-d.now
	return d.GPU.CloseIPC(base)
}

// TestMappingsEndLater: a mapping without a use stays while kernels may wait for messages,
// for its next use; and nobody waits for a driver that waits for its GPU before it closes one; the same memory
// goes by the host meanwhile.
func TestMappingsEndLater(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overCMA, true)
	src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1)
	conn := a.f.conns[a.c.(lendingConn).inner]
	send := func(k transport.Key) {
		a.done, b.writes = nil, nil
		a.post(t, write(k, src, transport.Point{}))
		until(t, a, b, func() bool { return len(b.writes) == 1 && len(a.done) == 1 })
		holds(t, g, dst, 5)
	}
	sweep := func() {
		a.f.scan = time.Time{}
		a.f.FD()
		a.poll(t)
	}
	k := b.key(t, dst)
	send(k)
	at := conn.maps[0].at
	a.f.o.Later.Hold()
	require.NoError(t, b.f.Deregister(k))
	sweep()
	sweep()
	require.NotNil(t, conn.maps[0].chore) // it is counted
	k = b.key(t, dst)
	send(k)
	require.Len(t, conn.maps, 1)
	require.Equal(t, at, conn.maps[0].at)
	require.Nil(t, conn.maps[0].chore)

	a.f.o.Later.Release()
	require.NoError(t, b.f.Deregister(k))
	now, began := make(chan struct{}), make(chan struct{})
	a.f.o.Device = lateToClose{g, began, now}
	sweep()
	sweep()
	<-began
	k = b.key(t, dst)
	send(k)
	require.Empty(t, conn.ways)
	require.Equal(t, 1, g.Imports())
	close(now)
	require.True(t, a.f.o.Later.Wait(time.Second))
	require.Zero(t, g.Imports())
	a.f.o.Device = g
	send(k)
	require.Len(t, conn.ways, 1)
	require.Equal(t, 1, g.Imports())
}

// TestAddressIsTaken: what lies where something else of the peer's is still mapped from goes
// by the host until that is not there.
func TestAddressIsTaken(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overCMA, true)
	src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1)
	k := b.key(t, dst)
	send := func() {
		a.done, b.writes = nil, nil
		a.post(t, write(k, src, transport.Point{}))
		until(t, a, b, func() bool { return len(b.writes) == 1 && len(a.done) == 1 })
		holds(t, g, dst, 5)
	}
	g.Fail(fakegpu.Mapped, 1)
	send()
	send()
	require.Zero(t, g.Imports())
	a.f.scan = time.Time{}
	a.f.FD() // ticks
	a.poll(t)
	send()
	require.Equal(t, 1, g.Imports())
}

// TestWaysEnd: keys that are gone are forgotten, also where nothing of the peer's could
// be mapped, or needs to be.
func TestWaysEnd(t *testing.T) {
	for _, own := range []bool{false, true} {
		g := fakegpu.New()
		a, b := pairOf(t, g, overCMA, true)
		if own {
			b.f.secret = a.f.secret
		}
		src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1)
		g.Fail("ImportIPC", 20)
		for range 20 {
			a.done, b.writes = nil, nil
			k := b.key(t, dst)
			a.post(t, write(k, src, transport.Point{}))
			until(t, a, b, func() bool { return len(b.writes) == 1 && len(a.done) == 1 })
			require.NoError(t, b.f.Deregister(k))
		}
		require.Zero(t, g.Imports())
		c := a.f.conns[a.c.(lendingConn).inner]
		require.NotEmpty(t, c.ways)
		a.f.scan = time.Time{}
		a.f.FD() // ticks
		until(t, a, b, func() bool { return len(c.ways) == 0 })
	}
}

// TestSharedPieces: regions that have some pieces in common are mapped side by side, as
// copies to the first may be under way when the second is first written to.
func TestSharedPieces(t *testing.T) {
	g := fakegpu.New()
	g.Pieces = true
	a, b := pairOf(t, g, overCMA, true)
	const piece = 64 << 10
	src, dst := onGPU(t, g, 2*piece, 5), onGPU(t, g, 3*piece, 1)
	point, open := heldUp(t, g, a.f)
	var k transport.Key
	for i := range uintptr(2) {
		k = b.key(t, mem.Region{Addr: dst.Addr + i*piece, Len: 2 * piece, Dev: dst.Dev})
		a.post(t, write(k, src, point))
		until(t, a, b, func() bool { return g.Imports() == int(i)+1 })
	}
	c := a.f.conns[a.c.(lendingConn).inner]
	until(t, a, b, func() bool { return c.lane.seg.begun.Load() == 2 })
	require.Len(t, c.maps, 2)
	open()
	until(t, a, b, func() bool { return len(b.writes) == 2 && len(a.done) == 2 })
	holds(t, g, dst, 5)

	a.f.o.Later.Hold() // so the second mapping is put off, which is in nobody's way
	require.NoError(t, b.f.Deregister(k))
	until(t, a, b, func() bool {
		a.f.scan = time.Time{}
		a.f.FD()
		return c.maps[1].chore != nil
	})
	k = b.key(t, mem.Region{Addr: dst.Addr + 2*piece, Len: piece, Dev: dst.Dev})
	a.post(t, write(k, mem.Region{Addr: src.Addr, Len: piece, Dev: src.Dev}, transport.Point{}))
	until(t, a, b, func() bool { return len(b.writes) == 3 && len(a.done) == 3 })
	require.Equal(t, 3, g.Imports())
	a.f.o.Later.Release()
}

// TestDescriptorsEnd: memory that cannot be shared wholly keeps no descriptor.
func TestDescriptorsEnd(t *testing.T) {
	g := fakegpu.New()
	g.Pieces = true
	_, b := pairOf(t, g, overCMA, true)
	dst := onGPU(t, g, 4*64<<10, 1)
	for call := range 8 { // Describe, and a pair of calls for each piece
		g.FailAt(call + 1)
		k := b.key(t, dst)
		require.NotEmpty(t, g.Failed())
		require.Empty(t, b.f.regions[k.ID].fds)
		require.NoError(t, b.f.Deregister(k))
	}
	k := b.key(t, dst)
	require.Len(t, b.f.regions[k.ID].fds, 4)
}

// TestBlob refuses what is no description of a key.
func TestBlob(t *testing.T) {
	v := remote{reach: reachIPC, last: transport.Key{ID: 3, Token: 4}, n: 10, proof: string(make([]byte, 16)),
		uuid: string(make([]byte, 16)), addr: 100, base: 90, size: 50, slot: 7, handle: string(make([]byte, 64))}
	k := transport.Key{ID: 3, Token: 4, Blob: v.encode()}
	var r remote
	require.True(t, r.decode(k))
	require.Equal(t, v, r)
	for i := range k.Blob {
		require.False(t, r.decode(transport.Key{ID: 3, Token: 4, Blob: k.Blob[:i]}), "%d bytes", i)
	}
	require.False(t, r.decode(transport.Key{ID: 3, Token: 5, Blob: k.Blob}))
	v.base = 101
	require.False(t, r.decode(transport.Key{ID: 3, Token: 4, Blob: v.encode()}))
	v.base, v.slot = 90, maxRegions
	require.False(t, r.decode(transport.Key{ID: 3, Token: 4, Blob: v.encode()}))

	v.slot, v.reach, v.handle, v.fdsAndPieces = 7, reachFDs, "", pieces(32, 18)
	require.True(t, r.decode(transport.Key{ID: 3, Token: 4, Blob: v.encode()}))
	require.Equal(t, v, r)
	for _, lens := range [][]uint64{{32}, {32, 19}, {1 << 63, 1 << 63, 50}} {
		v.fdsAndPieces = pieces(lens...)
		require.False(t, r.decode(transport.Key{ID: 3, Token: 4, Blob: v.encode()}), "%v of %d bytes", lens, v.size)
	}
}

// TestForgedKey: who has seen a key of ours cannot make another that is taken for
// one of this process, whose addresses are used as they are.
func TestForgedKey(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overCMA, true)
	at, err := g.Alloc(1 << 20)
	require.NoError(t, err)
	k := a.key(t, mem.Region{Addr: uintptr(at), Len: 4096, Dev: a.f.name()})
	var r remote
	require.True(t, r.decode(k))
	require.Equal(t, uint8(reachIPC), r.reach)
	require.Equal(t, r.proof, a.f.prove(&r))
	require.NotEqual(t, r.proof, b.f.prove(&r), "of another process")
	for _, forge := range []func(){
		func() { r.addr += 8 },
		func() { r.n += 8 },
		func() { r.base, r.size = r.base-8, r.size+8 },
		func() { r.last.Token++ },
		func() { r.slot++ },
	} {
		forge()
		require.NotEqual(t, r.proof, a.f.prove(&r))
		require.True(t, r.decode(k))
	}
	require.NoError(t, a.f.Deregister(k))
	require.NoError(t, g.Free(at))
}

// TestShortAllocation: a key that says more of an allocation than there is of it is
// not mapped, so that nothing is copied behind its end.
func TestShortAllocation(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overCMA, true)
	src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1)
	k := b.key(t, dst)
	var r remote
	require.True(t, r.decode(k))
	for _, more := range []uint64{1, 0} {
		v := r
		v.size += more
		m := &mapping{id: v.id, base: v.base, size: v.size, reach: v.reach}
		err := m.open(g, &v, func() bool { return true })
		if more > 0 {
			require.ErrorIs(t, err, errOther)
		} else {
			require.NoError(t, err)
		}
		a.f.unmap(m)
	}
	a.done, b.writes = nil, nil
	r.size, r.n = 1<<20, 1<<20
	k.Blob = r.encode()
	a.post(t, write(k, src, transport.Point{}))
	until(t, a, b, func() bool { return len(b.writes) == 1 && len(a.done) == 1 })
	holds(t, g, dst, 5) // by way of the host
	until(t, a, b, func() bool { return g.Imports() == 0 })
}

// pieces describes pieces of mapped memory.
func pieces(lens ...uint64) string {
	var b []byte
	for i, n := range lens {
		b = binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint32(b, uint32(i)), n)
	}
	return string(b)
}

// FuzzBlob reads random descriptions of keys. What is taken lies inside its
// allocation, all of which can be mapped, and says the same when it is sent again.
func FuzzBlob(f *testing.F) {
	v := remote{reach: reachIPC, last: transport.Key{ID: 3, Token: 4}, n: 10, proof: string(make([]byte, 16)),
		uuid: string(make([]byte, 16)), addr: 100, base: 90, size: 50, slot: 7, handle: string(make([]byte, 64))}
	f.Add(v.encode())
	v.reach, v.handle, v.fdsAndPieces = reachFDs, "", pieces(32, 18)
	f.Add(v.encode())
	v.size = 60
	f.Add(v.encode())
	v.addr, v.n = 1<<64-8, 16
	f.Add(v.encode())
	for v.reach = range uint8(reachIPC) {
		f.Add(v.encode())
	}
	f.Add(string(make([]byte, blobShort)))
	f.Add("")
	f.Fuzz(func(t *testing.T, b string) {
		k := transport.Key{Blob: b}
		if len(b) >= blobShort { // a fuzzer cannot guess the key
			k.ID, k.Token = u64(b, 2), u64(b, 10)
		}
		var r, again remote
		if !r.decode(k) {
			return
		}
		require.Equal(t, transport.Key{ID: k.ID, Token: k.Token}, r.last)
		require.True(t, again.decode(transport.Key{ID: k.ID, Token: k.Token, Blob: r.encode()}))
		require.Equal(t, r, again)
		require.False(t, again.decode(transport.Key{ID: k.ID, Token: k.Token + 1, Blob: b}))
		if r.reach <= reachStaged {
			return
		}
		require.Less(t, r.slot, uint32(maxRegions))
		_, err := (mem.Region{Len: r.size}).Slice(r.addr-r.base, r.n)
		require.NoError(t, err)
		if r.reach == reachIPC {
			require.Len(t, r.handle, 64)
			return
		}
		require.LessOrEqual(t, len(r.fdsAndPieces), pieceMost*pieceLen)
		var size, carry uint64
		for p := r.fdsAndPieces; p != ""; p = p[pieceLen:] {
			size, carry = bits.Add64(size, u64(p, 4), 0)
			require.Zero(t, carry)
		}
		require.Equal(t, r.size, size)
	})
}

// TestAllocatesNothing: neither of the ways of GPU memory does, when all is set up.
func TestAllocatesNothing(t *testing.T) {
	if transporttest.RaceEnabled {
		t.Skip("the race detector allocates")
	}
	for _, share := range []bool{true, false} {
		g := fakegpu.New()
		g.Instant = true
		a, b := pairOf(t, g, overCMA, share)
		src, dst := onGPU(t, g, 100000, 5), onGPU(t, g, 100000, 1)
		k := b.key(t, dst)
		ops := write(k, src, transport.Point{})
		var ev [16]transport.Event
		round := func() {
			if n, err := a.c.Post(ops); n != 1 || err != nil {
				t.Fatalf("post: %d, %v", n, err)
			}
			for done, written := 0, 0; done+written < 2; {
				for _, s := range [...]*side{a, b} {
					n, err := s.f.Poll(ev[:])
					if err != nil {
						t.Fatal(err)
					}
					for i := range ev[:n] {
						switch ev[i].Kind {
						case transport.EvDone:
							done++
						case transport.EvWritten:
							written++
						}
					}
				}
			}
		}
		for range 1000 {
			round()
		}
		require.Equal(t, share, a.c.(transport.Teller).Via() == "cudaipc")
		require.Zero(t, testing.AllocsPerRun(1000, round), "mapped: %v", share)
	}
}
