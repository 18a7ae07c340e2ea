package cudaipc

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/gpu/fakegpu"
	"fserver/engine/mem"
	"fserver/engine/transport"
)

// TestMappingFails: what cannot be mapped is staged.
func TestMappingFails(t *testing.T) {
	for _, call := range []string{"ImportIPC", "ExportIPC"} {
		g := fakegpu.New()
		a, b := pairOf(t, g, overCMA)
		src, dst := onGPU(t, g, 3<<20, 5), onGPU(t, g, 3<<20, 1)
		g.Fail(call, 1)
		k := b.Key(t, dst)
		a.Post(t, write(k, src, transport.Point{}))
		until(t, a, b, func() bool { return len(b.Writes) == 1 && len(a.Done) == 1 })
		require.NoError(t, a.Done[0])
		require.Equal(t, uint64(3<<20), b.Writes[0].Len)
		require.Equal(t, []uint64{k.ID, 0}, []uint64{b.Writes[0].Key, b.Writes[0].Off})
		holds(t, g, dst, 5)
		require.NotEqual(t, "cudaipc", a.C.Peer().Via)
	}
}

// TestNobodyMapsUnseen: a side writes nothing by mapping before the other knows whom to
// wait for at the end of a key.
func TestNobodyMapsUnseen(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overCMA)
	src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 8192, 1)
	there := b.Key(t, mem.Region{Addr: dst.Addr, Len: 4096, Dev: dst.Dev})
	back := a.Key(t, mem.Region{Addr: dst.Addr + 4096, Len: 4096, Dev: dst.Dev})
	point, open := heldUp(t, g, b.F)
	a.Post(t, write(there, src, transport.Point{}))
	from, to := ours(b), ours(a)
	for ; to.shown < introduction; a.Poll(t) { // and then it sees nothing of b's
	}
	for ; from.shown < introduction; b.Poll(t) {
	}
	b.Post(t, write(back, src, point))
	require.Nil(t, to.theirs)
	require.Zero(t, from.sender.seg.begun.Load())
	until(t, a, b, func() bool { return from.sender.seg.begun.Load() == 1 })
	require.NotNil(t, to.theirs)
	open()
	until(t, a, b, func() bool { return len(a.Writes) == 1 && len(b.Writes) == 1 && len(b.Done) == 1 })
	holds(t, g, dst, 5)
	b.Free(t, there)
	a.Free(t, back)
}

// miser is a Conn that lends nothing.
type miser struct{ transport.Conn }

func (miser) Lends(mem.Span) bool { return false }

// TestNothingToLend: a side that cannot introduce itself, as too much is lent to the peer
// already, writes by another way.
func TestNothingToLend(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overCMA)
	src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1)
	k := b.Key(t, dst)
	ours(a).Conn, ours(a).asked = miser{ours(a).Conn}, time.Time{} // so that it waits for answerLimit
	a.Post(t, write(k, src, transport.Point{}))
	until(t, a, b, func() bool { return len(b.Writes) == 1 && len(a.Done) == 1 })
	holds(t, g, dst, 5)
	require.Equal(t, "cma", a.C.Peer().Via)
}

// TestLoanBesideIntroduction: a loan does not come into the middle of the introduction, where the peer would take it for one of that.
func TestLoanBesideIntroduction(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overCMA)
	shared, err := mem.NewShared(4096)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, mem.FreeShared(shared.ID())) })
	loan := transport.Op{Kind: transport.OpLend, Src: []mem.Span{shared.Region().Span()}}
	require.True(t, a.C.Lends(loan.Src[0]))
	c := ours(a)
	c.shown = 1
	a.F.Lock()
	c.Wake() // so that the next Poll notices
	a.F.Mu.Unlock()
	a.Poll(t)
	n, err := a.C.Post([]transport.Op{loan})
	require.NoError(t, err)
	require.Zero(t, n)
	c.shown = introduction
	a.Post(t, []transport.Op{loan})
	until(t, a, b, func() bool { return len(a.Done) == 1 })
	require.NoError(t, a.Done[0])
}

// view is a GPU as one process sees it: with a number of that process, and the number of the
// GPU whose memory it reaches there.
type view struct {
	*fakegpu.GPU
	ordinal int
	near    int
	asked   []int
}

func (v *view) Ordinal() int { return v.ordinal }

func (v *view) Reach(ordinal int) error {
	if v.asked = append(v.asked, ordinal); ordinal != v.near {
		return errors.New("no way")
	}
	return nil
}

// TestNumbersOfGPUs: what numbers two processes have for their GPUs changes nothing.
// Memory of this process is reached by the GPU's number there, that of another by handles.
func TestNumbersOfGPUs(t *testing.T) {
	for _, c := range []struct {
		name    string
		a, b    int // numbers of the GPUs, each in its process
		own     bool
		near    int
		imports int
		via     string
	}{
		{name: "both, each sees one", imports: 1, via: "cudaipc"},
		{name: "both, in the same order", b: 1, imports: 1, via: "cudaipc"},
		{name: "both, each in its order", a: 1, b: 1, imports: 1, via: "cudaipc"},
		{name: "one process", b: 1, own: true, near: 1, via: "cudaipc"},
		{name: "one process, the other order", a: 1, own: true, near: 0, via: "cudaipc"},
		{name: "one process, out of reach", b: 1, own: true, near: 2, via: "cma"},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := fakegpu.New()
			va, vb := &view{GPU: g, ordinal: c.a, near: c.near}, &view{GPU: g, ordinal: c.b}
			a, b := pairWith(t, g, va, vb)
			if c.own {
				b.F.own = a.F.own
			}
			src, dst := onGPU(t, g, 3<<20, 5), onGPU(t, g, 3<<20, 1)
			src.Dev, dst.Dev = mem.GPU(c.a), mem.GPU(c.b)
			k := b.Key(t, dst)
			a.Post(t, write(k, src, transport.Point{}))
			until(t, a, b, func() bool { return len(b.Writes) == 1 && len(a.Done) == 1 })
			require.NoError(t, a.Done[0])
			holds(t, g, dst, 5)
			require.Equal(t, c.imports, g.Imports())
			require.Contains(t, a.C.Peer().Via, c.via)
			if c.own {
				require.Equal(t, []int{c.b}, va.asked)
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
	a, b := pairOf(t, g, overCMA)
	src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 1<<20, 1)
	send := func(k transport.Key) {
		a.Done, b.Writes = nil, nil
		a.Post(t, write(k, src, transport.Point{}))
		until(t, a, b, func() bool { return len(b.Writes) == 1 && len(a.Done) == 1 })
	}
	for i := range uint64(20) {
		k := b.Key(t, mem.Region{Addr: dst.Addr + uintptr(i)*4096, Len: 8192, Dev: dst.Dev})
		send(k)
		require.Equal(t, 1, g.Imports())
		if i > 0 {
			b.Free(t, k)
		}
	}
	k := b.Key(t, dst)
	send(k)
	require.Equal(t, "cudaipc", a.C.Peer().Via)
	conn := ours(a)
	require.Len(t, conn.ways, 21) // those of keys that are gone are swept with time
	a.F.Mu.Lock()
	conn.sweep()
	require.Len(t, conn.ways, 2)
	a.F.Mu.Unlock()
	require.Equal(t, 1, g.Imports())

	for _, r := range b.F.regions {
		b.Free(t, r.key)
	}
	for range 2 {
		a.F.Looked = time.Time{}
		a.F.Arm()
		a.Poll(t)
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
	a, b := pairOf(t, g, overCMA)
	src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1)
	conn := ours(a)
	send := func(k transport.Key) {
		a.Done, b.Writes = nil, nil
		a.Post(t, write(k, src, transport.Point{}))
		until(t, a, b, func() bool { return len(b.Writes) == 1 && len(a.Done) == 1 })
		holds(t, g, dst, 5)
	}
	sweep := func() {
		a.F.Looked = time.Time{}
		a.F.Arm()
		a.Poll(t)
	}
	k := b.Key(t, dst)
	send(k)
	at := conn.maps[0].at
	a.F.Calls.Later.Hold()
	b.Free(t, k)
	sweep()
	sweep()
	require.NotNil(t, conn.maps[0].chore) // it is counted
	k = b.Key(t, dst)
	send(k)
	require.Len(t, conn.maps, 1)
	require.Equal(t, at, conn.maps[0].at)
	require.Nil(t, conn.maps[0].chore)

	a.F.Calls.Later.Release(0)
	b.Free(t, k)
	now, began := make(chan struct{}), make(chan struct{})
	a.F.Calls.Dev = lateToClose{g, began, now}
	sweep()
	sweep()
	<-began
	k = b.Key(t, dst)
	send(k)
	require.Empty(t, conn.ways)
	require.Equal(t, 1, g.Imports())
	close(now)
	require.True(t, a.F.Calls.Later.Wait(20*time.Second))
	require.Zero(t, g.Imports())
	a.F.Calls.Dev = g
	send(k)
	require.Len(t, conn.ways, 1)
	require.Equal(t, 1, g.Imports())
}

// TestAddressIsTaken: what lies where something else of the peer's is still mapped from goes
// by the host until that is not there.
func TestAddressIsTaken(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overCMA)
	src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1)
	k := b.Key(t, dst)
	send := func() {
		a.Done, b.Writes = nil, nil
		a.Post(t, write(k, src, transport.Point{}))
		until(t, a, b, func() bool { return len(b.Writes) == 1 && len(a.Done) == 1 })
		holds(t, g, dst, 5)
	}
	g.Fail(fakegpu.Mapped, 1)
	send()
	send()
	require.Zero(t, g.Imports())
	a.F.Looked = time.Time{}
	a.F.Arm() // ticks
	a.Poll(t)
	send()
	require.Equal(t, 1, g.Imports())
}

// TestWaysEnd: keys that are gone are forgotten, also where nothing of the peer's could
// be mapped, or needs to be.
func TestWaysEnd(t *testing.T) {
	for _, own := range []bool{false, true} {
		g := fakegpu.New()
		a, b := pairOf(t, g, overCMA)
		if own {
			b.F.own = a.F.own
		}
		src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1)
		g.Fail("ImportIPC", 20)
		for range 20 {
			a.Done, b.Writes = nil, nil
			k := b.Key(t, dst)
			a.Post(t, write(k, src, transport.Point{}))
			until(t, a, b, func() bool { return len(b.Writes) == 1 && len(a.Done) == 1 })
			b.Free(t, k)
		}
		require.Zero(t, g.Imports())
		c := ours(a)
		require.NotEmpty(t, c.ways)
		a.F.Looked = time.Time{}
		a.F.Arm() // ticks
		until(t, a, b, func() bool { return len(c.ways) == 0 })
	}
}

// TestSharedPieces: regions that have some pieces in common are mapped side by side, as
// copies to the first may be under way when the second is first written to.
func TestSharedPieces(t *testing.T) {
	g := fakegpu.New()
	g.Pieces = true
	a, b := pairOf(t, g, overCMA)
	const piece = 64 << 10
	src, dst := onGPU(t, g, 2*piece, 5), onGPU(t, g, 3*piece, 1)
	point, open := heldUp(t, g, a.F)
	var k transport.Key
	for i := range uintptr(2) {
		k = b.Key(t, mem.Region{Addr: dst.Addr + i*piece, Len: 2 * piece, Dev: dst.Dev})
		a.Post(t, write(k, src, point))
		until(t, a, b, func() bool { return g.Imports() == int(i)+1 })
	}
	c := ours(a)
	until(t, a, b, func() bool { return c.sender.seg.begun.Load() == 2 })
	require.Len(t, c.maps, 2)
	open()
	until(t, a, b, func() bool { return len(b.Writes) == 2 && len(a.Done) == 2 })
	holds(t, g, dst, 5)

	a.F.Calls.Later.Hold() // so the second mapping is put off, which is in nobody's way
	b.Free(t, k)
	until(t, a, b, func() bool {
		a.F.Looked = time.Time{}
		a.F.Arm()
		a.Poll(t)
		return c.maps[1].chore != nil
	})
	k = b.Key(t, mem.Region{Addr: dst.Addr + 2*piece, Len: piece, Dev: dst.Dev})
	a.Post(t, write(k, mem.Region{Addr: src.Addr, Len: piece, Dev: src.Dev}, transport.Point{}))
	until(t, a, b, func() bool { return len(b.Writes) == 3 && len(a.Done) == 3 })
	require.Equal(t, 3, g.Imports())
	a.F.Calls.Later.Release(0)
}
