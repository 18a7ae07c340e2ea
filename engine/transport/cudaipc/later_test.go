package cudaipc

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/transport"
	"fserver/engine/transport/cudaipc/fakegpu"
)

// TestLater: who holds is left alone up to a limit, and what is put off is done once, in
// its order.
func TestLater(t *testing.T) {
	var l Later
	var did []int
	put := func(number int, bytes uint64) { l.Do(bytes, func() { did = append(did, number) }) }
	l.Hold()
	l.Hold()
	require.False(t, l.Force(), "there is nothing")
	put(0, putOffMost)
	put(1, 0)
	l.Release()
	l.Wait(time.Millisecond)
	require.True(t, l.Held())
	require.Empty(t, did)

	put(2, 1) // the first, and then there is room
	l.Wait(time.Second)
	require.Equal(t, []int{0}, did)

	require.True(t, l.Force())
	l.Wait(time.Second)
	require.Equal(t, []int{0, 1, 2}, did)

	put(3, 1) // a Force is for what there was
	l.Wait(time.Millisecond)
	require.Len(t, did, 3)
	l.Release()
	l.Wait(time.Second)
	require.Equal(t, []int{0, 1, 2, 3}, did)
	require.False(t, l.Held())

	put(4, 1)
	l.Wait(time.Second)
	require.Len(t, did, 5)
}

// TestWaitingKernel: while a kernel waits for a message, the loss of a peer and the end of
// keys keep nobody from the GPU, which the message may have to pass.
func TestWaitingKernel(t *testing.T) {
	for _, share := range []bool{true, false} {
		under := overCMA
		if !share {
			under = overTCP
		}
		g := fakegpu.New()
		a, b := pairOf(t, g, under, share)
		src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1)
		own, theirs := a.key(t, dst), b.key(t, dst)
		a.post(t, write(theirs, src, transport.Point{}))
		until(t, a, b, func() bool { return len(b.writes) == 1 && len(a.done) == 1 })
		for _, s := range []*side{a, b} {
			s.f.o.Later.Hold()
		}
		end := g.Kernel(t)
		require.NoError(t, a.f.Deregister(own))
		require.NoError(t, b.f.Deregister(theirs))
		require.NoError(t, b.c.Close())
		until(t, a, b, func() bool { return a.down != nil })
		require.NoError(t, a.c.Close())
		until(t, a, b, func() bool { return len(a.f.conns) == 0 })
		require.Zero(t, g.Reclaims())
		stream, err := g.NewStream()
		require.NoError(t, err)
		require.NoError(t, g.FreeStream(stream))
		end()
		for _, s := range []*side{a, b} {
			s.f.o.Later.Release()
		}
	}
}
