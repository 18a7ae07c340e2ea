package overtest

import (
	"bytes"
	"context"
	"errors"
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/gpu/fakegpu"
	"fserver/engine/mem"
	"fserver/engine/transport"
)

// HeldBack: nothing is read before the stream has passed the point, and host memory has none.
func HeldBack[F Fabric](t *testing.T, g *fakegpu.GPU, a, b *Side[F]) {
	stream, err := g.NewStream()
	require.NoError(t, err)
	e, err := g.NewEvent()
	require.NoError(t, err)
	host, err := mem.Map(4096)
	require.NoError(t, err)
	gpu, dst := OnGPU(t, g, 4096, 1), OnGPU(t, g, 4096, 0)
	gate := make(chan struct{})
	g.Put(stream, func() {
		<-gate
		m := fakegpu.Memory{G: g}
		_ = m.Store(gpu.Span(), bytes.Repeat([]byte{7}, 4096))
	})
	require.NoError(t, g.Record(e, stream))
	point := transport.Point{Dev: mem.GPU(0), Event: uint64(e)}
	k := b.Key(t, dst)
	for _, op := range []transport.Op{Write(k, host, point)[0], {Kind: transport.OpFrame, After: point}, {Kind: transport.OpLend, After: point}} {
		n, err := a.C.Post([]transport.Op{op})
		require.Zero(t, n)
		require.ErrorContains(t, err, "only writes of GPU memory may")
	}
	a.Post(t, Write(k, gpu, point))
	for range 1000 {
		a.Poll(t)
		b.Poll(t)
	}
	require.Empty(t, b.Writes)
	require.Empty(t, a.Done)
	close(gate)
	Until(t, a, b, func() bool { return len(b.Writes) == 1 && len(a.Done) == 1 })
	Holds(t, g, dst, 7)
	require.NoError(t, g.FreeStream(stream))
	require.NoError(t, errors.Join(g.FreeEvent(e), mem.Unmap(host)))
}

// DeviceFails: the Conn ends with the reason, and at the peer not in good order. It returns the memory that was written to.
func DeviceFails[F Fabric](t *testing.T, g *fakegpu.GPU, a, b *Side[F]) mem.Region {
	src, dst := OnGPU(t, g, 1<<20, 5), OnGPU(t, g, 1<<20, 1)
	k := b.Key(t, dst)
	g.Fail("Enqueue", 1)
	a.Post(t, Write(k, src, transport.Point{}))
	Until(t, a, b, func() bool { return a.Down != nil && b.Down != nil })
	require.ErrorContains(t, a.Down, "injected failure")
	require.NotErrorIs(t, b.Down, io.EOF)
	Until(t, a, b, func() bool { return len(a.Done) == 1 })
	require.Error(t, a.Done[0])
	return dst
}

// FailsHalfWay: where the driver takes the copies of a write and then fails, neither
// side lets go of the memory before they are over. If they write to the memory of b, its key has not ended after some time, reached.
// If reached is 0, they do not.
func FailsHalfWay[F Fabric](t *testing.T, g *fakegpu.GPU, a, b *Side[F], reached time.Duration) {
	src, warm, dst := OnGPU(t, g, 4096, 5), OnGPU(t, g, 4096, 1), OnGPU(t, g, 4096, 1)
	a.Post(t, Write(b.Key(t, warm), src, transport.Point{})) // both sides know each other
	Until(t, a, b, func() bool { return len(b.Writes) == 1 && len(a.Done) == 1 })
	point, open := HeldUp(t, g, a.F)
	k := b.Key(t, dst)
	g.Fail("Enqueue", 1)
	a.Post(t, Write(k, src, point))
	Until(t, a, b, func() bool { return b.Down != nil })
	b.F.Deregister(k)
	if reached == 0 {
		Until(t, b, b, func() bool { return len(b.Freed) == 1 })
	}
	time.Sleep(reached)
	b.Poll(t)
	b.Poll(t)
	a.Look()
	a.Poll(t)
	require.Len(t, a.Done, 1)
	require.Equal(t, reached == 0, len(b.Freed) == 1)
	open()
	Until(t, a, b, func() bool {
		a.Look()
		return len(a.Done) == 2 && a.Down != nil && len(b.Freed) == 1
	})
	require.ErrorContains(t, a.Done[1], "injected failure")
	if reached > 0 {
		Holds(t, g, dst, 5)
	}
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

// ConnectBesideClose: nothing comes out of a Fabric that is closed.
func ConnectBesideClose[F Fabric](t *testing.T, a, b *Side[F]) {
	a.F.It().Fabric = late{a.F.It().Fabric, a.F.Close}
	_, err := a.F.Connect(context.Background(), b.F.Addr())
	require.ErrorIs(t, err, transport.ErrClosed)
	require.Len(t, a.F.It().Conns, 1)
}

// Allocations is how many there are for a write from a to b and a frame behind it, when all is set up.
func Allocations[F Fabric](t *testing.T, a, b *Side[F], ops []transport.Op) float64 {
	ops = append(ops, markOf(&ops[0]))
	var ev [16]transport.Event
	round := func() {
		if n, err := a.C.Post(ops); n != 2 || err != nil {
			t.Fatalf("post: %d, %v", n, err)
		}
		end := time.Now().Add(20 * time.Second)
		for seen := 0; seen < 3; {
			for _, s := range [...]*Side[F]{a, b} {
				n, err := s.F.Poll(ev[:])
				if err != nil || time.Now().After(end) {
					t.Fatal(err)
				}
				for i := range ev[:n] {
					if ev[i].Kind == transport.EvDone || ev[i].Kind == transport.EvFrame {
						seen++
					}
				}
			}
		}
	}
	for range 1000 {
		round()
	}
	return testing.AllocsPerRun(1000, round)
}

// WaitingKernel: while a kernel waits for a message, the loss of a peer and the end of
// keys keep nobody from the GPU, which the message may have to pass.
func WaitingKernel[F Fabric](t *testing.T, g *fakegpu.GPU, a, b *Side[F]) {
	src, dst := OnGPU(t, g, 4096, 5), OnGPU(t, g, 4096, 1)
	own, theirs := a.Key(t, dst), b.Key(t, dst)
	a.Post(t, Write(theirs, src, transport.Point{}))
	Until(t, a, b, func() bool { return len(b.Writes) == 1 && len(a.Done) == 1 })
	for _, s := range []*Side[F]{a, b} {
		s.F.It().Calls.Later.Hold()
	}
	end := g.Kernel(t)
	a.Free(t, own)
	b.Free(t, theirs)
	b.C.Close()
	Until(t, a, b, func() bool { return a.Down != nil })
	a.C.Close()
	Until(t, a, b, func() bool { return len(a.F.It().Conns) == 0 })
	require.True(t, a.F.It().Calls.Later.Wait(20*time.Second) && b.F.It().Calls.Later.Wait(20*time.Second))
	require.Zero(t, g.Reclaims())
	stream, err := g.NewStream()
	require.NoError(t, err)
	require.NoError(t, g.FreeStream(stream))
	end()
	for _, s := range []*Side[F]{a, b} {
		s.F.It().Calls.Later.Release(0)
	}
}
