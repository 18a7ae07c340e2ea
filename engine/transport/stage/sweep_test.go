package stage

import (
	"bytes"
	"context"
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

// TestEachCallFails has each call of the driver in turn fail, from the opening of two
// Fabrics to their end. Nobody hangs, what a side is told of is right, a Conn that ends
// is followed by one that works, and nothing is left.
func TestEachCallFails(t *testing.T) {
	if testing.Short() {
		t.Skip("go test -race runs it")
	}
	for _, c := range []sweep{
		{name: "words", under: overTCP},
		{name: "events", under: overTCP, events: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			calls := map[string]int{}
			for n := 0; ; n++ {
				g := fakegpu.New()
				before := holding(t)
				whole := c.run(t, g, n)
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
		})
	}
}

// holding is what this process holds: descriptors, and shared memory that is mapped.
func holding(t *testing.T) string {
	fds, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	maps, err := os.ReadFile("/proc/self/maps")
	require.NoError(t, err)
	return fmt.Sprintf("%d descriptors, %d mappings", len(fds), strings.Count(string(maps), "memfd:"))
}

type sweep struct {
	name   string
	under  below
	events bool
}

// run has two sides write to each other, twice if the Conn ends, while call n of the
// driver fails. False: a Fabric could not be opened.
func (c *sweep) run(t *testing.T, g *fakegpu.GPU, n int) bool {
	var undo []func() error
	later := func(f func() error) { undo = append(undo, f) }
	defer func() {
		for i := len(undo) - 1; i >= 0; i-- {
			require.NoError(t, undo[i]())
		}
	}()
	gpu := func(n uint64, fill byte) mem.Region {
		m := fakegpu.Memory{G: g}
		r, err := m.Alloc(n)
		require.NoError(t, err)
		later(func() error { return m.Free(r) })
		require.NoError(t, m.Store(r.Span(), bytes.Repeat([]byte{fill}, int(n))))
		return r
	}
	host := func(fill byte) mem.Region {
		r, err := mem.Map(4096)
		require.NoError(t, err)
		later(func() error { return mem.Unmap(r) })
		copy(r.Span().Bytes(), bytes.Repeat([]byte{fill}, 4096))
		return r
	}
	stream, err := g.NewStream()
	require.NoError(t, err)
	later(func() error { return g.FreeStream(stream) })
	event, err := g.NewEvent()
	require.NoError(t, err)
	later(func() error { return g.FreeEvent(event) })
	point := transport.Point{Dev: mem.GPU(0), Event: uint64(event)}
	const large = 1<<20 + 1
	from := []mem.Region{gpu(large, 5), host(6), gpu(4096, 7), gpu(4096, 8)}
	to := []mem.Region{gpu(large, 1), gpu(4096, 1), host(1), gpu(4096, 1)} // the last one at a

	g.FailAt(n)
	open := func(name string) *side {
		in, err := c.under(transporttest.Options{Listen: true, Gate: transporttest.Gate{Hello: name}})
		require.NoError(t, err)
		f, err := Wrap(in, Options{Device: g, Events: c.events})
		if err != nil {
			require.NotEmpty(t, g.Failed(), err)
			require.NoError(t, in.Close())
			return nil
		}
		later(f.Close)
		return &side{f: f}
	}
	a := open("a")
	if a == nil {
		return false
	}
	b := open("b")
	if b == nil {
		return false
	}
	keys := make([]transport.Key, len(to))
	for i, r := range to {
		f := b.f
		if i == 3 {
			f = a.f
		}
		keys[i], err = f.Register(r)
		require.NoError(t, err)
		later(func() error { f.Deregister(keys[i]); return nil })
	}
	for range 2 {
		a, b = &side{f: a.f}, &side{f: b.f}
		a.c, err = a.f.Connect(context.Background(), b.f.Addr())
		require.NoError(t, err)
		until(t, a, b, func() bool { return b.c != nil })
		gate := make(chan struct{})
		g.Put(stream, func() { <-gate })
		err = g.Record(event, stream)
		close(gate)
		if err != nil { // that is the application's
			require.NoError(t, g.Record(event, stream))
		}
		took := [2]int{}
		for i, r := range from {
			s, op := a, write(keys[i], r, transport.Point{})
			op[0].Loan = uint32(i)
			if i == 0 {
				op[0].After = point
			}
			if i == 3 {
				s = b
			}
			k, err := s.try(op)
			require.True(t, k == 1 || err != nil) // or the mark saw the end
			took[i/3] += k
		}
		whole := func() bool { return len(a.writes) == 1 && len(b.writes) == 3 && len(a.done) == 3 && len(b.done) == 1 }
		ended := func() bool {
			return a.down != nil && b.down != nil && took == [2]int{len(a.done), len(b.done)}
		}
		until(t, a, b, func() bool { return whole() || ended() })
		for _, w := range append(a.writes, b.writes...) {
			i := w.Number
			require.Equal(t, []uint64{keys[i].ID, 0, to[i].Len}, []uint64{w.Key, w.Off, w.Len})
			holds(t, g, to[i], byte(5+i))
		}
		if whole() {
			return true
		}
		require.NotEmpty(t, g.Failed())
	}
	t.Fatalf("call %d, %s: the second Conn has ended too: %v, %v", n, g.Failed(), a.down, b.down)
	return false
}
