package overtest

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/gpu/fakegpu"
	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/transporttest"
)

// EachCallFails has each call of the driver in turn fail, from the opening of two
// Fabrics to their end. Nobody hangs, what a side is told of is right, a Conn that ends
// is followed by one that works, and nothing is left.
func EachCallFails[F Fabric](t *testing.T, newGPU func() *fakegpu.GPU, open func(*fakegpu.GPU, transporttest.Options) (F, error)) {
	calls := map[string]int{}
	for n := 0; ; n++ {
		g := newGPU()
		before := holding(t)
		s := sweep[F]{t: t, g: g, n: n}
		whole := s.run(func(o transporttest.Options) (F, error) { return open(g, o) })
		g.Empty(t)
		if n == 0 { // the first Fabric opens what the process keeps
			require.True(t, whole)
			continue
		}
		require.Equal(t, before, holding(t), "call %d: %s", n, g.Failed())
		if g.Failed() == "" {
			break
		}
		calls[g.Failed()]++
	}
	t.Log(calls)
}

// holding is what this process holds: descriptors, and shared memory that is mapped.
func holding(t *testing.T) string {
	fds, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	maps, err := os.ReadFile("/proc/self/maps")
	require.NoError(t, err)
	return fmt.Sprintf("%d descriptors, %d mappings", len(fds), strings.Count(string(maps), "memfd:"))
}

// A sweep has two sides write to each other, while call n of the driver fails.
type sweep[F Fabric] struct {
	t    *testing.T
	g    *fakegpu.GPU
	n    int
	undo []func() error
}

func (s *sweep[F]) end() {
	for i := len(s.undo) - 1; i >= 0; i-- {
		require.NoError(s.t, s.undo[i]())
	}
}

func (s *sweep[F]) later(undo func() error) { s.undo = append(s.undo, undo) }

func (s *sweep[F]) gpu(n uint64, fill byte) mem.Region {
	m := fakegpu.Memory{G: s.g}
	r, err := m.Alloc(n)
	require.NoError(s.t, err)
	s.later(func() error { return m.Free(r) })
	require.NoError(s.t, m.Store(r.Span(), bytes.Repeat([]byte{fill}, int(n))))
	return r
}

func (s *sweep[F]) host(fill byte) mem.Region {
	r, err := mem.Map(4096)
	require.NoError(s.t, err)
	s.later(func() error { return mem.Unmap(r) })
	copy(r.Span().Bytes(), bytes.Repeat([]byte{fill}, 4096))
	return r
}

// side opens a Fabric; nil: that is what has failed.
func (s *sweep[F]) side(name string, open func(transporttest.Options) (F, error)) *Side[F] {
	f, err := open(transporttest.Options{Listen: true, Gate: transporttest.Gate{Hello: name}})
	if err != nil {
		require.NotEmpty(s.t, s.g.Failed(), err)
		return nil
	}
	s.later(f.Close)
	return &Side[F]{F: f}
}

// run has the sides write, twice if the Conn ends. False: a Fabric could not be opened.
func (s *sweep[F]) run(open func(transporttest.Options) (F, error)) bool {
	defer s.end()
	t, g := s.t, s.g
	stream, err := g.NewStream()
	require.NoError(t, err)
	s.later(func() error { return g.FreeStream(stream) })
	event, err := g.NewEvent()
	require.NoError(t, err)
	s.later(func() error { return g.FreeEvent(event) })
	const large = 1<<20 + 1
	from := []mem.Region{s.gpu(large, 5), s.host(6), s.gpu(4096, 7), s.gpu(4096, 8)}
	to := []mem.Region{s.gpu(large, 1), s.gpu(4096, 1), s.host(1), s.gpu(4096, 1)} // the last one at a

	g.FailAt(s.n)
	a := s.side("a", open)
	if a == nil {
		return false
	}
	b := s.side("b", open)
	if b == nil {
		return false
	}
	keys := make([]transport.Key, len(to))
	for i, r := range to {
		f := b.F
		if i == 3 {
			f = a.F
		}
		keys[i], err = f.Register(r)
		require.NoError(t, err)
		s.later(func() error { f.Deregister(keys[i]); return nil })
	}
	for range 2 {
		a, b = &Side[F]{F: a.F}, &Side[F]{F: b.F}
		Connect(t, a, b)
		gate := make(chan struct{})
		g.Put(stream, func() { <-gate })
		err = g.Record(event, stream)
		close(gate)
		if err != nil { // that is the application's
			require.NoError(t, g.Record(event, stream))
		}
		if s.write(a, b, keys, from, to, transport.Point{Dev: mem.GPU(0), Event: uint64(event)}) {
			return true
		}
		require.NotEmpty(t, g.Failed())
	}
	t.Fatalf("call %d, %s: the second Conn has ended too: %v, %v", s.n, g.Failed(), a.Down, b.Down)
	return false
}

// write writes all, the first one behind a point. It reports whether all has arrived; else the Conn has ended.
func (s *sweep[F]) write(a, b *Side[F], keys []transport.Key, from, to []mem.Region, point transport.Point) bool {
	t, took := s.t, [2]int{}
	for i, r := range from {
		s, op := a, Write(keys[i], r, transport.Point{})
		op[0].Loan = uint32(i)
		if i == 0 {
			op[0].After = point
		}
		if i == 3 {
			s = b
		}
		k, err := s.Try(op)
		require.True(t, k == 1 || err != nil) // or the mark saw the end
		took[i/3] += k
	}
	whole := func() bool { return len(a.Writes) == 1 && len(b.Writes) == 3 && len(a.Done) == 3 && len(b.Done) == 1 }
	ended := func() bool {
		return a.Down != nil && b.Down != nil && took == [2]int{len(a.Done), len(b.Done)}
	}
	Until(t, a, b, func() bool {
		if s.g.Failed() != "" { // the Fabrics look at the device once a second
			a.Look()
			b.Look()
		}
		return whole() || ended()
	})
	for _, w := range append(a.Writes, b.Writes...) {
		i := w.Number
		require.Equal(t, []uint64{keys[i].ID, 0, to[i].Len}, []uint64{w.Key, w.Off, w.Len})
		Holds(t, s.g, to[i], byte(5+i))
	}
	return whole()
}
