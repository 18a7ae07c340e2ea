package stage

import (
	"bytes"
	"errors"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/gpu/fakegpu"
	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/transporttest"
	"fserver/engine/transport/transporttest/overtest"
)

func TestPasses(t *testing.T) {
	for _, c := range []struct {
		name  string
		under overtest.Below
		warm  bool
	}{
		{"over cma", overCMA, true},
		{"over tcp", overTCP, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := fakegpu.New()
			a, b := pairOf(t, g, c.under)
			overtest.Passes(t, g, a, b, c.warm)
		})
	}
}

// TestPassesNotItsOwn: a frame that passes waits for writes of its own User, and for no others.
func TestPassesNotItsOwn(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overTCP)
	src, dst, held := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1), onGPU(t, g, 4096, 1)
	k, other := b.Key(t, dst), b.Key(t, held)
	frame := func(s string, user uint64) transport.Op {
		op := text(s, true)
		op.User = user
		return op
	}
	writes := func(k transport.Key, at transport.Point, user uint64) transport.Op {
		op := overtest.Write(k, src, at)[0]
		op.User = user
		return op
	}
	ops := []transport.Op{writes(k, transport.Point{}, 7), frame("behind 7", 7)}
	n, err := a.C.Post(ops)
	require.NoError(t, err)
	require.Len(t, ops, n)
	until(t, a, b, func() bool { return len(b.Frames) == 1 })
	holds(t, g, dst, 5)
	point, open := overtest.HeldUp(t, g, a.F)
	ops = []transport.Op{writes(other, point, 8), frame("behind 8", 8), frame("behind 9", 9)}
	n, err = a.C.Post(ops)
	require.NoError(t, err)
	require.Len(t, ops, n)
	until(t, a, b, func() bool { return len(b.Frames) == 2 })
	polls(t, a, b)
	require.Equal(t, []string{"behind 7", "behind 9"}, b.Frames)
	open()
	until(t, a, b, func() bool { return len(b.Frames) == 3 })
	holds(t, g, held, 5)
}

// TestPassesBehindLanding: a frame that passes waits all the same for what is copied from a
// shadow, as that may be memory of the host; the copy waits for nobody.
func TestPassesBehindLanding(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overTCP)
	dst := onGPU(t, g, 4096, 1)
	k := b.Key(t, dst)
	gate := make(chan struct{})
	g.Put(b.F.in.stream, func() { <-gate })
	src := bytes.Repeat([]byte{5}, 4096)
	a.Post(t, []transport.Op{{Kind: transport.OpWrite, Key: k, Src: []mem.Span{mem.Of(src)}}, text("passes", true), text("waits", false)})
	until(t, a, b, func() bool { return b.F.in.next == 1 })
	polls(t, a, b)
	require.Empty(t, b.Frames)
	close(gate)
	until(t, a, b, func() bool { return len(b.Frames) == 2 })
	holds(t, g, dst, 5)
	runtime.KeepAlive(src)
}

// TestFullQueue: however many copies from shadows wait, no Poll waits for the queue of the driver, and other Conns go on.
func TestFullQueue(t *testing.T) {
	const writes = 600
	g := fakegpu.New()
	g.Depth = 1020
	a, b := pairOf(t, g, overTCP)
	dst := onGPU(t, g, 4096, 1)
	k := b.Key(t, dst)
	gate := make(chan struct{})
	open := sync.OnceFunc(func() { close(gate) })
	t.Cleanup(open)
	g.Put(b.F.in.stream, func() { <-gate })
	src := bytes.Repeat([]byte{5}, 4096)
	over := make(chan struct{})
	go func() {
		defer close(over)
		for n := 0; n < writes; {
			k, err := a.Try([]transport.Op{{Kind: transport.OpWrite, Key: k, Src: []mem.Span{mem.Of(src)}}})
			require.NoError(t, err)
			n += k
			a.Poll(t)
			b.Poll(t)
		}
		until(t, a, b, func() bool { return b.F.in.next == writes })
		connect(t, a, b)
		a.Post(t, []transport.Op{text("host", false)})
		until(t, a, b, func() bool { return len(b.Frames) == 1 })
	}()
	select {
	case <-over:
	case <-time.After(10 * time.Second):
		t.Fatal("a Poll waits for the queue of the driver")
	}
	require.Empty(t, b.Writes)
	open()
	until(t, a, b, func() bool { return len(b.Writes) == writes })
	holds(t, g, dst, 5)
	runtime.KeepAlive(src)
}

func TestLongWait(t *testing.T) {
	const stall = 100 * time.Millisecond
	g := fakegpu.New()
	a, b := pairOf(t, g, func(o transporttest.Options) (transport.Fabric, error) {
		o.Limits.Stall = stall
		return overCMA(o)
	})
	overtest.LongWait(t, g, a, b, stall)
}

// mixed is a Conn from one Fabric with a hello to another, each with a GPU if its hello says
// so.
func mixed(t *testing.T, g *fakegpu.GPU, under overtest.Below, from, to string) (a, b *side) {
	t.Cleanup(func() { g.Empty(t) })
	open := func(hello string) *side {
		o := Options{HasGPU: func(hello []byte) bool { return string(hello) == "gpu" }}
		if hello == "gpu" {
			o.Device = g
		}
		return overtest.Open(t, hello, wraps(under, o))
	}
	a, b = open(from), open(to)
	connect(t, a, b)
	return a, b
}

// TestNodeWithoutGPU: it writes to GPU memory of a peer, and is written to from there. Only
// its Conns to such peers are ours.
func TestNodeWithoutGPU(t *testing.T) {
	for _, c := range []struct {
		name     string
		under    overtest.Below
		from, to string
	}{
		{"it dials, tcp", overTCP, "cpu", "gpu"},
		{"it is dialed, tcp", overTCP, "gpu", "cpu"},
		{"it dials, cma", overCMA, "cpu", "gpu"},
		{"it is dialed, cma", overCMA, "gpu", "cpu"},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := fakegpu.New()
			cpu, gpu := mixed(t, g, c.under, c.from, c.to)
			if c.from == "gpu" {
				cpu, gpu = gpu, cpu
			}
			require.NotNil(t, ours(cpu))
			there, from := onGPU(t, g, 3<<20, 1), onGPU(t, g, 3<<20, 6)
			src, err := mem.Map(3 << 20)
			require.NoError(t, err)
			here, err := mem.Map(3 << 20)
			require.NoError(t, err)
			copy(src.Span().Bytes(), bytes.Repeat([]byte{5}, 3<<20))
			to, back := gpu.Key(t, there), cpu.Key(t, here)
			require.Empty(t, back.Blob)
			for i := range 3 {
				cpu.Post(t, write(to, src, transport.Point{}))
				gpu.Post(t, write(back, from, transport.Point{}))
				until(t, cpu, gpu, func() bool { return len(cpu.Writes) == i+1 && len(gpu.Writes) == i+1 })
				require.Equal(t, bytes.Repeat([]byte{6}, 3<<20), here.Span().Bytes())
				holds(t, g, there, 5)
				clear(here.Span().Bytes())
				require.NoError(t, fakegpu.Memory{G: g}.Store(there.Span(), make([]byte, there.Len)))
			}
			for i, f := range []string{"", "\xff", "frame", strings.Repeat("\xff", transport.MaxFrame)} {
				cpu.Post(t, []transport.Op{text(f, i%2 == 0)})
				gpu.Post(t, []transport.Op{text(f, i%2 == 1)})
				until(t, cpu, gpu, func() bool { return len(cpu.Frames) == i+1 && len(gpu.Frames) == i+1 })
				require.True(t, cpu.Frames[i] == f && gpu.Frames[i] == f)
			}
			_, err = cpu.C.Post(write(to, src, transport.Point{Dev: mem.GPU(0), Event: 1}))
			require.ErrorContains(t, err, "only writes of GPU memory may")
			gpu.Free(t, to)
			cpu.Free(t, back)
			gpu.C.Close()
			until(t, cpu, gpu, func() bool { return cpu.Down != nil })
			cpu.C.Close()
			until(t, cpu, gpu, func() bool { return cpu.F.Tracked.Load() == 0 && len(gpu.F.Conns) == 0 })
			require.NoError(t, errors.Join(mem.Unmap(src), mem.Unmap(here)))
		})
	}
}

// TestNobodyHasAGPU: the Conns are those of the Fabric below.
func TestNobodyHasAGPU(t *testing.T) {
	a, b := mixed(t, fakegpu.New(), overTCP, "cpu", "cpu")
	require.Nil(t, ours(a))
	require.Nil(t, ours(b))
	host, err := mem.Map(4096)
	require.NoError(t, err)
	k := b.Key(t, host)
	require.NoError(t, b.F.Bind(k, b.C))
	a.Post(t, append(write(k, host, transport.Point{}), text("\xff", false)))
	until(t, a, b, func() bool { return len(b.Writes) == 1 && len(b.Frames) == 1 })
	require.Equal(t, "\xff", b.Frames[0])
	require.Zero(t, a.F.Tracked.Load()+b.F.Tracked.Load())
	_, err = a.F.Register(mem.Region{Addr: host.Addr, Len: 1, Dev: mem.GPU(0)})
	require.ErrorContains(t, err, "this node uses")

	// A peer with a GPU joins them.
	g := fakegpu.New()
	in, err := overTCP(transporttest.Options{Gate: transporttest.Gate{Hello: "gpu"}})
	require.NoError(t, err)
	f, err := Wrap(in, Options{Device: g})
	require.NoError(t, err)
	c := &side{F: f}
	old := b.C
	b.C = nil
	connect(t, c, b)
	require.NotNil(t, ours(b))
	dst := onGPU(t, g, 4096, 1)
	b.Post(t, write(c.Key(t, dst), host, transport.Point{}))
	until(t, c, b, func() bool { return len(c.Writes) == 1 })
	holds(t, g, dst, 0)
	b.C = old
	b.Post(t, []transport.Op{text("still", false)})
	until(t, a, b, func() bool { return len(a.Frames) == 1 })
	require.NoError(t, f.Close())
	require.NoError(t, mem.Unmap(host))
}

// posts notes how many operations of each Post a Conn takes, and takes no more than most of them.
type posts struct {
	transport.Conn
	most  int
	taken []int
}

func (c *posts) Post(ops []transport.Op) (int, error) {
	n, err := c.Conn.Post(ops[:min(len(ops), c.most)])
	if n > 0 {
		c.taken = append(c.taken, n)
	}
	return n, err
}

// TestTogether: the last piece of a write, the word of what to lift, and the frame behind go to inner at once, for a
// transport to make one packet of them. If it takes only some, the others follow.
func TestTogether(t *testing.T) {
	for _, c := range []struct {
		name  string
		most  int
		bytes uint64
		frame string
		want  []int
	}{
		{"one piece", 3, 4096, "frame", []int{3}},
		{"two pieces", 3, pieceLeast + 1, "frame", []int{2, 3}},
		{"a frame like ours", 3, 4096, "\xff", []int{2, 2}},
		{"without the frame", 2, 4096, "frame", []int{2, 1}},
		{"one by one", 1, 4096, "frame", []int{1, 1, 1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := fakegpu.New()
			a, b := pairOf(t, g, overTCP)
			src, dst := onGPU(t, g, c.bytes, 5), onGPU(t, g, c.bytes, 1)
			k := b.Key(t, dst)
			a.Post(t, write(k, src, transport.Point{})) // makes the stream
			until(t, a, b, func() bool { return len(b.Writes) == 1 && len(a.Done) == 1 })
			in := &posts{Conn: ours(a).Conn, most: c.most}
			ours(a).Conn = in
			point, open := heldUp(t, g, a.F)                          // else a piece may be ready before the frame is posted
			ops := append(write(k, src, point), text(c.frame, false)) // and no mark between them
			n, err := a.C.Post(ops)
			require.NoError(t, err)
			require.Len(t, ops, n)
			open()
			until(t, a, b, func() bool { return len(b.Frames) == 1 && len(a.Done) == 3 })
			ours(a).Conn = in.Conn
			require.Equal(t, c.want, in.taken)
			require.Equal(t, c.frame, b.Frames[0])
			holds(t, g, dst, 5)
		})
	}
}
