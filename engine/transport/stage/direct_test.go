package stage

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"fserver/cshim/verbs/fakeverbs"
	"fserver/engine/gpu/fakegpu"
	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/rails"
	"fserver/engine/transport/transporttest"
	"fserver/engine/transport/transporttest/overtest"
	"fserver/engine/transport/verbs"
)

// overNIC opens Fabrics whose NIC takes memory of g by itself, unless g says otherwise. The GPU sees what it has written
// after a read only.
func overNIC(tb testing.TB, g *fakegpu.GPU) overtest.Below {
	lib, err := fakeverbs.Library()
	if err != nil {
		tb.Skip(err)
	}
	fakeverbs.Reset()
	tb.Cleanup(fakeverbs.Reset)
	fakeverbs.Set("cqe", 1<<15)
	fakeverbs.Set("late", 1)
	g.NIC.Ordering = 0
	opened := 0
	return func(o transporttest.Options) (transport.Fabric, error) {
		in := verbs.Options{Library: lib, Device: [...]string{"fake0", "fake1"}[opened%2], GPU: g, GPUDirect: verbs.ByDMABuf}
		opened++
		in.Gate, in.Limits = o.Gate, o.Limits
		if o.Listen {
			in.Listen = "127.0.0.1:0"
		}
		return verbs.Open(in)
	}
}

// overNICs joins two of them by rails.
func overNICs(tb testing.TB, g *fakegpu.GPU) overtest.Below {
	one := overNIC(tb, g)
	return func(o transporttest.Options) (transport.Fabric, error) {
		var members []transport.Fabric
		for range 2 {
			f, err := one(o)
			if err != nil {
				return nil, err
			}
			members = append(members, f)
		}
		return rails.New(members, rails.Options{})
	}
}

// overSockets joins two Fabrics of tcp by rails. They take no memory of a GPU.
func overSockets(testing.TB, *fakegpu.GPU) overtest.Below {
	return func(o transporttest.Options) (transport.Fabric, error) {
		a, err := overTCP(o)
		if err != nil {
			return nil, err
		}
		b, err := overTCP(o)
		if err != nil {
			return nil, err
		}
		return rails.New([]transport.Fabric{a, b}, rails.Options{})
	}
}

// refused has the NIC refuse the next memory of a GPU.
func refused() { fakeverbs.Fail("ibv_reg_dmabuf_mr", unix.EINVAL, 0, 1) }

// TestStagedOverRails: the key of a shadow has what the keys of the members need.
func TestStagedOverRails(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overSockets(t, g))
	src, dst := onGPU(t, g, 2<<20, 5), onGPU(t, g, 2<<20, 1)
	k := b.Key(t, dst)
	a.Post(t, write(k, src, transport.Point{}))
	until(t, a, b, func() bool { return len(b.Writes) == 1 && len(a.Done) == 1 })
	holds(t, g, dst, 5)
	b.Free(t, k)
}

// TestDirect: GPU memory travels without a copy where the NIC takes both ends, through host memory at the end that it does
// not take, and the frame behind a write comes when the GPU has it.
func TestDirect(t *testing.T) {
	for name, under := range map[string]func(testing.TB, *fakegpu.GPU) overtest.Below{"one NIC": overNIC, "two NICs": overNICs} {
		for _, direct := range [][2]bool{{true, true}, {true, false}, {false, true}, {false, false}} {
			g := fakegpu.New()
			a, b := pairOf(t, g, under(t, g))
			require.Equal(t, mem.GPU(0), a.F.Caps().GPU)
			src, dst := onGPU(t, g, 2<<20, 5), onGPU(t, g, 2<<20, 1)
			if direct[0] {
				a.Key(t, src)
			}
			if !direct[1] {
				refused()
			}
			k := b.Key(t, dst)
			require.Equal(t, !direct[1], ofShadow(k))
			a.Post(t, write(k, src, transport.Point{}))
			until(t, a, b, func() bool { return len(b.Writes) == 1 && len(a.Done) == 1 })
			require.NoError(t, a.Done[0])
			holds(t, g, dst, 5)
			require.Equal(t, direct[0], ours(a).sender.staged == 0, "%s %v", name, direct)
			require.Equal(t, direct[1], b.F.in.next == 0, "%s %v", name, direct)
			b.Free(t, k)
		}
	}
}

// TestStagedSource: the NIC reads staged sources where they are: each piece is one request, and not one for each 8 KiB
// that is copied. The next Conn has the same buffers.
func TestStagedSource(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overNIC(t, g))
	nic := a.F.Fabric.(*verbs.Fabric)
	dst := onGPU(t, g, 2<<20, 1)
	refused()
	k := b.Key(t, dst)
	for fill := range byte(2) {
		src := onGPU(t, g, 2<<20, fill)
		before := nic.Counts().Requests
		a.Post(t, write(k, src, transport.Point{}))
		until(t, a, b, func() bool { return len(b.Writes) == 1 && len(a.Done) == 1 })
		holds(t, g, dst, fill)
		require.LessOrEqual(t, nic.Counts().Requests-before, (2<<20)/pieceOf(2<<20)+8)
		a.C.Close()
		b.C.Close()
		until(t, a, b, func() bool { return len(a.F.pools) == 1 })
		a.Done, b.Writes, b.C = nil, nil, nil
		connect(t, a, b)
	}
	b.Free(t, k)
}

// TestDirectPoint: a source that the NIC reads is not read before its stream has passed the point. A frame
// waits for it; host memory and frames that pass do not.
func TestDirectPoint(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overNIC(t, g))
	src, dst := onGPU(t, g, 4096, 1), onGPU(t, g, 4096, 0)
	a.Key(t, src)
	k := b.Key(t, dst)
	point, open := heldUp(t, g, a.F)
	a.Post(t, write(k, src, point))
	a.Post(t, []transport.Op{{Kind: transport.OpFrame, Frame: []byte("behind")}, {Kind: transport.OpFrame, Frame: []byte("passes"), Passes: true}})
	until(t, a, b, func() bool { return len(b.Frames) == 1 })
	require.Equal(t, "passes", b.Frames[0])
	require.True(t, a.C.Unsent())
	for range 100 {
		a.Poll(t)
		b.Poll(t)
	}
	require.Empty(t, b.Writes)
	holds(t, g, dst, 0)
	m := fakegpu.Memory{G: g}
	require.NoError(t, m.Store(src.Span(), slices.Repeat([]byte{7}, 4096)))
	open()
	until(t, a, b, func() bool { return len(b.Writes) == 1 && len(b.Frames) == 2 })
	holds(t, g, dst, 7)
}

// TestDirectRefused: memory that the NIC refuses is staged, and a NIC that has failed is an error.
func TestDirectRefused(t *testing.T) {
	g := fakegpu.New()
	a, _ := pairOf(t, g, overNIC(t, g))
	r := onGPU(t, g, 4096, 1)
	g.Fail("ExportDMABuf", 1)
	k := a.Key(t, r)
	require.True(t, ofShadow(k))
	require.False(t, a.F.direct.has(r.Span()))
	a.Free(t, k)
	k = a.Key(t, r)
	require.False(t, ofShadow(k))
	require.True(t, a.F.direct.has(r.Span()))
	again := a.Key(t, r)
	a.Free(t, k)
	require.True(t, a.F.direct.has(r.Span()), "another key has it")
	a.Free(t, again)
	require.Empty(t, a.F.direct.list)
	fakeverbs.Vanish(0)
	_, err := a.F.Register(r)
	require.ErrorAs(t, err, new(*transport.DeviceError))
	fakeverbs.Reset()
}

// TestDirectScarce: if the NIC can lock no more memory, that of idle buffers is given up first, then the caller hears of it,
// and the memory is staged only if the caller has nothing to give up either. The Conn says why, and so does one warning.
func TestDirectScarce(t *testing.T) {
	g := fakegpu.New()
	t.Cleanup(func() { g.Empty(t) })
	var told []error
	open := wraps(overNIC(t, g), Options{Device: g, Refused: func(why error) { told = append(told, why) }})
	a, b := overtest.Open(t, "a", open), overtest.Open(t, "b", open)
	connect(t, a, b)
	src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1)
	short := func(times int) { fakeverbs.Fail("ibv_reg_dmabuf_mr", unix.ENOMEM, 0, times) }

	short(1)
	_, err := a.F.Register(src)
	require.ErrorIs(t, err, unix.ENOMEM)
	require.Empty(t, a.F.regions, "it is not staged")
	require.Empty(t, a.C.Peer().Why)
	require.Empty(t, told)

	k := b.Key(t, dst)
	a.Post(t, write(k, src, transport.Point{})) // staged, so that a Conn has buffers
	until(t, a, b, func() bool { return len(b.Writes) == 1 && len(a.Done) == 1 })
	a.C.Close()
	b.C.Close()
	until(t, a, b, func() bool { return len(a.F.pools) == 1 })
	require.True(t, a.F.pools[0].known)
	short(1)
	direct := a.Key(t, src)
	require.False(t, ofShadow(direct))
	require.False(t, a.F.pools[0].known)
	a.Free(t, direct)

	b.C = nil
	connect(t, a, b)
	src.Scarce = true
	short(1)
	shadow := a.Key(t, src)
	require.True(t, ofShadow(shadow))
	refused()
	a.Free(t, a.Key(t, onGPU(t, g, 4096, 1)))
	require.Regexp(t, "^some tensors of gpu 0 go through host memory: verbs: register 4096 bytes at .* of gpu 0 for GPUDirect: by dma-buf: .*invalid argument; by nvidia-peermem: ", a.C.Peer().Why)
	require.Len(t, told, 1)
	require.ErrorIs(t, told[0], unix.ENOMEM)
	require.Empty(t, b.C.Peer().Why)
	a.Free(t, shadow)
	b.Free(t, k)
}

// TestDirectGone: a source whose key goes before its point has passed ends the Conn. No CPU looks at it.
func TestDirectGone(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overNIC(t, g))
	src, dst := onGPU(t, g, 4096, 1), onGPU(t, g, 4096, 0)
	own, k := a.Key(t, src), b.Key(t, dst)
	point, open := heldUp(t, g, a.F)
	a.Post(t, write(k, src, point))
	until(t, a, b, func() bool { return ours(a).Line.At(ours(a).Line.First).Is.way == wayHeld })
	a.Free(t, own)
	open()
	until(t, a, b, func() bool { return a.Down != nil && b.Down != nil })
	require.ErrorContains(t, a.Down, "which are not registered, or no longer")
	require.Empty(t, b.Writes)
}

// TestContractDirect: the suite with memory of a GPU that the NIC takes, and sources that it does not: they are staged.
func TestContractDirect(t *testing.T) {
	variant(t)
	transporttest.Run(t, func(tb testing.TB) transporttest.Bed {
		g := fakegpu.New()
		b := bed(tb, g, overNIC(tb, g), Options{Device: g}, true)
		b.Alone = true // the NIC
		return b
	})
}

// TestDirectAllocatesNothing, also with a point.
func TestDirectAllocatesNothing(t *testing.T) {
	if transporttest.RaceEnabled {
		t.Skip("the race detector allocates")
	}
	g := fakegpu.New()
	g.Instant = true
	a, b := pairOf(t, g, overNIC(t, g))
	src, dst := onGPU(t, g, 100000, 5), onGPU(t, g, 100000, 1)
	a.Key(t, src)
	k := b.Key(t, dst)
	e, err := g.NewEvent()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, g.FreeEvent(e)) })
	for _, after := range []transport.Point{{}, {Dev: mem.GPU(0), Event: uint64(e)}} {
		require.Zero(t, overtest.Allocations(t, a, b, write(k, src, after)))
		require.Zero(t, ours(a).sender.staged)
	}
	require.NotZero(t, fakeverbs.Count("reads"))
}
