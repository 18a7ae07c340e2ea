package stage

import (
	"bytes"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/gpu/fakegpu"
	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/transporttest"
)

// text is a frame.
func text(s string, passes bool) transport.Op {
	return transport.Op{Kind: transport.OpFrame, Frame: []byte(s), Passes: passes}
}

// subset is those of list that start so.
func subset(list []string, prefix string) []string {
	return slices.DeleteFunc(slices.Clone(list), func(s string) bool { return !strings.HasPrefix(s, prefix) })
}

// polls gives both sides time to do what they should not.
func polls(t *testing.T, a, b *side) {
	for range 300 {
		a.poll(t)
		b.poll(t)
	}
}

// TestPasses: a frame or loan that passes arrives while a write before it waits for a point;
// others do not. Each sort keeps its order, and memory of the host its place before both.
func TestPasses(t *testing.T) {
	for _, c := range []struct {
		name  string
		under below
		warm  bool
	}{
		{"over cma", overCMA, true},
		{"over tcp", overTCP, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := fakegpu.New()
			a, b := pairOf(t, g, c.under)
			src, dst, second := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1), onGPU(t, g, 4096, 1)
			host := bytes.Repeat([]byte{7}, 4096)
			k := b.key(t, dst)
			if c.warm {
				a.post(t, write(k, src, transport.Point{}))
				until(t, a, b, func() bool { return len(b.writes) == 1 })
				require.NoError(t, fakegpu.Memory{G: g}.Store(dst.Span(), make([]byte, 4096)))
			}
			point, open := heldUp(t, g, a.f)
			shared, err := mem.NewShared(4096)
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, mem.FreeShared(shared.ID())) })
			loan := transport.Op{Kind: transport.OpLend, Src: []mem.Span{shared.Region().Span()}}
			lends := a.c.Lends(loan.Src[0])
			post := func(number uint32, passes bool) {
				a.post(t, []transport.Op{text(fmt.Sprintf("%v %d", passes, number), passes)})
				if lends {
					loan.Loan, loan.Passes = number, passes
					a.post(t, []transport.Op{loan})
				}
			}
			post(0, true)
			post(0, false)
			n, err := a.c.Post(write(k, src, point))
			require.NoError(t, err)
			require.Equal(t, 1, n)
			var waits, goes []string
			for i := range 20 {
				post(uint32(i+1), false)
				n, err := a.c.Post([]transport.Op{{Kind: transport.OpWrite, Key: b.key(t, second), Src: []mem.Span{mem.Of(host)}}})
				require.NoError(t, err)
				require.Equal(t, 1, n)
				post(uint32(i+1), true)
				waits, goes = append(waits, fmt.Sprintf("false %d", i)), append(goes, fmt.Sprintf("true %d", i))
				if i == 0 { // the write of host memory is there
					until(t, a, b, func() bool { return slices.Contains(b.frames, "true 1") })
					holds(t, g, second, 7)
				}
			}
			waits, goes = append(waits, "false 20"), append(goes, "true 20")
			until(t, a, b, func() bool { return len(subset(b.frames, "true")) == 21 })
			polls(t, a, b)
			require.Equal(t, goes, subset(b.frames, "true"))
			require.Equal(t, waits[:1], subset(b.frames, "false"))
			loans := len(subset(b.frames, "loan"))
			open()
			until(t, a, b, func() bool {
				return len(subset(b.frames, "false")) == 21 && (!lends || len(subset(b.frames, "loan")) == 2*21)
			})
			holds(t, g, dst, 5)
			require.Equal(t, waits, subset(b.frames, "false"))
			if lends {
				require.Equal(t, 1+1+20, loans)
				require.Len(t, subset(b.frames, "loan"), 2*21)
				var rest []string // each loan before the frame behind it
				for i := 1; i <= 20; i++ {
					rest = append(rest, fmt.Sprintf("false %d", i), fmt.Sprintf("loan %d", i))
				}
				require.Equal(t, rest, b.frames[len(b.frames)-40:])
			}
			until(t, a, b, func() bool { return len(a.done) == len(b.frames)+21+map[bool]int{true: 1}[c.warm] })
			runtime.KeepAlive(host)
		})
	}
}

// TestPassesBehindLanding: a frame that passes waits all the same for what is copied from a
// shadow, as that may be memory of the host; the copy waits for nobody.
func TestPassesBehindLanding(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overTCP)
	dst := onGPU(t, g, 4096, 1)
	k := b.key(t, dst)
	gate := make(chan struct{})
	g.Put(b.f.in.stream, func() { <-gate })
	src := bytes.Repeat([]byte{5}, 4096)
	a.post(t, []transport.Op{{Kind: transport.OpWrite, Key: k, Src: []mem.Span{mem.Of(src)}}, text("passes", true), text("waits", false)})
	until(t, a, b, func() bool { return b.f.in.next == 1 })
	polls(t, a, b)
	require.Empty(t, b.frames)
	close(gate)
	until(t, a, b, func() bool { return len(b.frames) == 2 })
	holds(t, g, dst, 5)
	runtime.KeepAlive(src)
}

// TestLongWait: a stream of the application's that waits for longer than a peer may leave
// bytes unseen ends no Conn, however much is posted behind it.
func TestLongWait(t *testing.T) {
	const stall = 100 * time.Millisecond
	g := fakegpu.New()
	a, b := pairOf(t, g, func(o transporttest.Options) (transport.Fabric, error) {
		o.Limits.Stall = stall
		return overCMA(o)
	})
	src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1)
	k := b.key(t, dst)
	a.post(t, write(k, src, transport.Point{}))
	until(t, a, b, func() bool { return len(b.writes) == 1 })
	point, open := heldUp(t, g, a.f)
	ops := write(k, src, point)
	posted := 1
	for end := time.Now().Add(4 * stall); time.Now().Before(end); {
		n, err := a.try(ops)
		require.NoError(t, err)
		posted += n
		a.poll(t)
		b.poll(t)
	}
	require.Greater(t, posted, 100)
	require.Len(t, b.writes, 1)
	require.Equal(t, []error{nil, nil}, []error{a.down, b.down})
	open()
	until(t, a, b, func() bool { return len(b.writes) == posted && len(a.done) == posted })
}

// mixed is a Conn from one Fabric with a hello to another, each with a GPU if its hello says
// so.
func mixed(t *testing.T, g *fakegpu.GPU, under below, from, to string) (a, b *side) {
	t.Cleanup(func() { g.Empty(t) })
	open := func(hello string) *side {
		in, err := under(transporttest.Options{Listen: true, Gate: transporttest.Gate{Hello: hello}})
		require.NoError(t, err)
		o := Options{HasGPU: func(hello []byte) bool { return string(hello) == "gpu" }}
		if hello == "gpu" {
			o.Device = g
		}
		f, err := Wrap(in, o)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, f.Close()) })
		return &side{f: f}
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
		under    below
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
			require.NotNil(t, cpu.below())
			there, from := onGPU(t, g, 3<<20, 1), onGPU(t, g, 3<<20, 6)
			src, err := mem.Map(3 << 20)
			require.NoError(t, err)
			here, err := mem.Map(3 << 20)
			require.NoError(t, err)
			copy(src.Span().Bytes(), bytes.Repeat([]byte{5}, 3<<20))
			to, back := gpu.key(t, there), cpu.key(t, here)
			require.Empty(t, back.Blob)
			for i := range 3 {
				cpu.post(t, write(to, src, transport.Point{}))
				gpu.post(t, write(back, from, transport.Point{}))
				until(t, cpu, gpu, func() bool { return len(cpu.writes) == i+1 && len(gpu.writes) == i+1 })
				require.Equal(t, bytes.Repeat([]byte{6}, 3<<20), here.Span().Bytes())
				holds(t, g, there, 5)
				clear(here.Span().Bytes())
				require.NoError(t, fakegpu.Memory{G: g}.Store(there.Span(), make([]byte, there.Len)))
			}
			for i, f := range []string{"", "\xff", "frame", strings.Repeat("\xff", transport.MaxFrame)} {
				cpu.post(t, []transport.Op{text(f, i%2 == 0)})
				gpu.post(t, []transport.Op{text(f, i%2 == 1)})
				until(t, cpu, gpu, func() bool { return len(cpu.frames) == i+1 && len(gpu.frames) == i+1 })
				require.True(t, cpu.frames[i] == f && gpu.frames[i] == f)
			}
			_, err = cpu.c.Post(write(to, src, transport.Point{Dev: mem.GPU(0), Event: 1}))
			require.ErrorContains(t, err, "only writes of GPU memory may")
			gpu.free(t, to)
			cpu.free(t, back)
			gpu.c.Close()
			until(t, cpu, gpu, func() bool { return cpu.down != nil })
			cpu.c.Close()
			until(t, cpu, gpu, func() bool { return cpu.f.tracked.Load() == 0 && len(gpu.f.conns) == 0 })
			require.NoError(t, errors.Join(mem.Unmap(src), mem.Unmap(here)))
		})
	}
}

// TestNobodyHasAGPU: the Conns are those of the Fabric below.
func TestNobodyHasAGPU(t *testing.T) {
	a, b := mixed(t, fakegpu.New(), overTCP, "cpu", "cpu")
	require.Nil(t, a.below())
	require.Nil(t, b.below())
	host, err := mem.Map(4096)
	require.NoError(t, err)
	k := b.key(t, host)
	require.NoError(t, b.f.Bind(k, b.c))
	a.post(t, append(write(k, host, transport.Point{}), text("\xff", false)))
	until(t, a, b, func() bool { return len(b.writes) == 1 && len(b.frames) == 1 })
	require.Equal(t, "\xff", b.frames[0])
	require.Zero(t, a.f.tracked.Load()+b.f.tracked.Load())
	_, err = a.f.Register(mem.Region{Addr: host.Addr, Len: 1, Dev: mem.GPU(0)})
	require.ErrorContains(t, err, "this node uses")

	// A peer with a GPU joins them.
	g := fakegpu.New()
	in, err := overTCP(transporttest.Options{Gate: transporttest.Gate{Hello: "gpu"}})
	require.NoError(t, err)
	f, err := Wrap(in, Options{Device: g})
	require.NoError(t, err)
	c := &side{f: f}
	old := b.c
	b.c = nil
	connect(t, c, b)
	require.NotNil(t, b.below())
	dst := onGPU(t, g, 4096, 1)
	b.post(t, write(c.key(t, dst), host, transport.Point{}))
	until(t, c, b, func() bool { return len(c.writes) == 1 })
	holds(t, g, dst, 0)
	b.c = old
	b.post(t, []transport.Op{text("still", false)})
	until(t, a, b, func() bool { return len(a.frames) == 1 })
	require.NoError(t, f.Close())
	require.NoError(t, mem.Unmap(host))
}
