package cudaipc

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/gpu/fakegpu"
	"fserver/engine/transport"
)

// TestWaitingKernel: while a kernel waits for a message, the loss of a peer and the end of
// keys keep nobody from the GPU, which the message may have to pass.
func TestWaitingKernel(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overCMA)
	src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1)
	own, theirs := a.key(t, dst), b.key(t, dst)
	a.post(t, write(theirs, src, transport.Point{}))
	until(t, a, b, func() bool { return len(b.writes) == 1 && len(a.done) == 1 })
	for _, s := range []*side{a, b} {
		s.f.calls.Later.Hold()
	}
	end := g.Kernel(t)
	a.free(t, own)
	b.free(t, theirs)
	b.c.Close()
	until(t, a, b, func() bool { return a.down != nil })
	a.c.Close()
	until(t, a, b, func() bool { return len(a.f.conns) == 0 })
	require.True(t, a.f.calls.Later.Wait(time.Second) && b.f.calls.Later.Wait(time.Second))
	require.Zero(t, g.Reclaims())
	stream, err := g.NewStream()
	require.NoError(t, err)
	require.NoError(t, g.FreeStream(stream))
	end()
	for _, s := range []*side{a, b} {
		s.f.calls.Later.Release(0)
	}
}
