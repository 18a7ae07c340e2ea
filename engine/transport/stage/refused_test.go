package stage

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/gpu/fakegpu"
	"fserver/engine/transport"
	"fserver/engine/transport/transporttest/overtest"
)

// TestLastFrames: a Conn that takes the pieces of a write no more, because the peer has closed it in good order, gives all
// frames of the peer before it ends.
func TestLastFrames(t *testing.T) {
	const frames = 300
	for name, under := range map[string]overtest.Below{"tcp": overTCP, "cma": overCMA, "cma/staged": overStaged} {
		t.Run(name, func(t *testing.T) {
			g := fakegpu.New()
			a, b := pairOf(t, g, under)
			src, dst := onGPU(t, g, 8<<20, 5), onGPU(t, g, 8<<20, 1)
			k := b.Key(t, dst)
			point, open := heldUp(t, g, a.F)
			a.Post(t, write(k, src, point))
			until(t, a, a, func() bool { return ours(a).sender.staged == buffers })
			var ops []transport.Op
			for i := range frames {
				ops = append(ops, text(fmt.Sprint("answer ", i), false))
			}
			for part := range slices.Chunk(ops, 60) { // in few packets: all of them arrive before the end
				b.Done = nil
				b.Post(t, part)
				until(t, b, b, func() bool { return len(b.Done) == len(part) })
			}
			require.NoError(t, b.F.Close())
			a.Post(t, []transport.Op{text("late", true)}) // tcp: a reset is the answer, so that the next send fails
			open()
			<-staged(g, ours(a))
			a.F.Arm() // the next Poll looks whether the peer is there
			until(t, a, a, func() bool { return a.Down != nil })
			require.ErrorIs(t, a.Down, io.EOF)
			require.Len(t, a.Frames, frames)
			for i, f := range a.Frames {
				require.Equal(t, fmt.Sprint("answer ", i), f)
			}
			until(t, a, a, func() bool { return len(a.Done) == 2 })
			require.Equal(t, a.Down, a.Done[1])
		})
	}
}

// staged is closed when the GPU has made all copies of c to its buffers.
func staged(g *fakegpu.GPU, c *Conn) <-chan struct{} {
	over := make(chan struct{})
	g.Put(c.sender.stream, func() { close(over) })
	return over
}

// TestPoolAfterFailure: the buffers of a Conn whose copies could not be enqueued go to the next one.
func TestPoolAfterFailure(t *testing.T) {
	for name, events := range map[string]bool{"words": false, "events": true} {
		t.Run(name, func(t *testing.T) {
			g := fakegpu.New()
			t.Cleanup(func() { g.Empty(t) })
			open := wraps(overTCP, Options{Device: g, Events: events})
			a, b := overtest.Open(t, "a", open), overtest.Open(t, "b", open)
			src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1)
			k := b.Key(t, dst)
			for range 5 {
				connect(t, a, b)
				a.Done, a.Down, b.Down = nil, nil, nil
				g.Fail("Enqueue", 1)
				a.Post(t, write(k, src, transport.Point{}))
				until(t, a, b, func() bool { a.Look(); return a.Down != nil && b.Down != nil && len(a.Done) == 1 })
				require.ErrorContains(t, a.Done[0], "injected failure")
				a.C.Close()
				b.C.Close()
				until(t, a, b, func() bool { return len(a.F.Conns)+len(b.F.Conns) == 0 })
				require.Empty(t, a.F.broken)
				require.Len(t, a.F.pools, 1)
			}
			connect(t, a, b)
			a.Done, b.Writes = nil, nil
			a.Post(t, write(k, src, transport.Point{}))
			until(t, a, b, func() bool { return len(b.Writes) == 1 && len(a.Done) == 1 })
			holds(t, g, dst, 5)
		})
	}
}

// refusing is a Conn that takes no write.
type refusing struct{ transport.Conn }

var errWrong = errors.New("injected refusal")

func (c refusing) Post(ops []transport.Op) (int, error) {
	for i := range ops {
		if ops[i].Kind == transport.OpWrite && len(ops[i].Src) > 0 {
			return 0, errWrong
		}
	}
	return c.Conn.Post(ops)
}

// TestWrongInItself: a piece that is refused by a Conn that goes on ends its Conn all the same, behind the frames that have
// arrived.
func TestWrongInItself(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overTCP)
	src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1)
	k := b.Key(t, dst)
	ours(a).Conn = refusing{ours(a).Conn}
	b.Post(t, []transport.Op{text("before", false)})
	for ours(b).Unsent() {
		b.Poll(t)
	}
	a.Post(t, write(k, src, transport.Point{}))
	until(t, a, b, func() bool { return a.Down != nil && b.Down != nil && len(a.Done) == 1 })
	require.ErrorIs(t, a.Down, errWrong)
	require.ErrorIs(t, a.Done[0], errWrong)
	require.Equal(t, []string{"before"}, a.Frames)
	require.NotErrorIs(t, b.Down, io.EOF)
	require.Empty(t, b.Writes)
}
