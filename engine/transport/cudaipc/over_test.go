package cudaipc

import (
	"bytes"
	"context"
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/gpu/fakegpu"
	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/link/over"
	"fserver/engine/transport/transporttest"
)

// These tests are about the two layers, this one and the Fabric that stages.

// TestPeerThatStages: a peer that has staging alone, as one without a GPU or with BYTEPS_ENABLE_IPC=0, takes keys of this
// package, and we take its.
func TestPeerThatStages(t *testing.T) {
	g := fakegpu.New()
	t.Cleanup(func() { g.Empty(t) })
	var ends [2]transport.Fabric
	for i := range ends {
		var err error
		ends[i], err = opens(g, overCMA, i == 0, true)(transporttest.Options{Listen: true, Gate: transporttest.Gate{Hello: "a"}})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, ends[i].Close()) })
	}
	src, one, other := onGPU(t, g, 3<<20, 5), onGPU(t, g, 3<<20, 1), onGPU(t, g, 3<<20, 1)
	var conns [2]transport.Conn
	var keys [2]transport.Key
	var frames [2]int
	poll := func() {
		for i, f := range ends {
			var ev [16]transport.Event
			n, err := f.Poll(ev[:])
			require.NoError(t, err)
			for _, e := range ev[:n] {
				require.NotEqual(t, transport.EvDown, e.Kind)
				if e.Kind == transport.EvAccept {
					conns[i] = e.Conn
				} else if e.Kind == transport.EvFrame {
					frames[i]++
				}
			}
		}
	}
	var err error
	conns[0], err = ends[0].Connect(context.Background(), ends[1].Addr())
	require.NoError(t, err)
	for conns[1] == nil {
		poll()
	}
	for i, dst := range []mem.Region{one, other} {
		keys[i], err = ends[i].Register(dst)
		require.NoError(t, err)
	}
	for i := range conns {
		n, err := conns[i].Post(append(write(keys[1-i], src, transport.Point{}), text("behind", false)))
		require.NoError(t, err)
		require.Equal(t, 2, n)
	}
	for frames != [2]int{1, 1} {
		poll()
	}
	holds(t, g, one, 5)
	holds(t, g, other, 5)
	require.Equal(t, "cma", conns[0].Peer().Via)
}

// one is a Conn that takes an operation in every second call, and no second one with it.
type one struct {
	transport.Conn
	calls int
}

func (c *one) Post(ops []transport.Op) (int, error) {
	if c.calls++; c.calls%2 == 0 || len(ops) == 0 {
		return 0, nil
	}
	return c.Conn.Post(ops[:1])
}

// TestPairsStayTogether: a loan and its number, and the parts of a large frame, arrive together, whatever passes and however
// little the Fabrics below take at a time, also while a staged write waits.
func TestPairsStayTogether(t *testing.T) {
	for _, maps := range []int{-1, 0, 2} { // behind how many loans a write to be mapped makes both introduce themselves; -1: before
		for _, little := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d, little %v", maps, little), func(t *testing.T) { pairs(t, maps, little) })
		}
	}
}

func pairs(t *testing.T, when int, little bool) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overCMA)
	src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1)
	maps := write(b.Key(t, dst), src, transport.Point{})
	if when < 0 {
		a.Post(t, maps)
		until(t, a, b, func() bool { return len(b.Writes) == 1 && len(a.Done) == 1 })
	}
	g.Alone = true
	k := b.Key(t, onGPU(t, g, 4096, 1))
	shared, err := mem.NewShared(4096)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, mem.FreeShared(shared.ID())) })
	point, open := heldUp(t, g, a.F)
	ops := write(k, src, point)
	large := bytes.Repeat([]byte{escape}, transport.MaxFrame)
	want := map[bool][]string{} // by whether it passes
	for i := range 12 {
		if i == when {
			ops = append(ops, maps...)
		}
		passes := i%2 == 0
		name := fmt.Sprint("frame ", i)
		loan := transport.Op{Kind: transport.OpLend, Loan: uint32(i), Passes: passes, Src: []mem.Span{shared.Region().Span()}}
		require.True(t, a.C.Lends(loan.Src[0]))
		ops = append(ops, loan, text(name, passes))
		want[passes] = append(want[passes], fmt.Sprint("loan ", i), name)
		switch {
		case i == 8:
			ops = append(ops, write(k, src, transport.Point{})...)
		case i%4 == 1:
			ops = append(ops, message(large))
			want[false] = append(want[false], string(large))
		}
	}
	c := ours(a)
	under := c.Conn
	if little {
		c.Conn = &one{Conn: under}
	}
	polls := 0
	until(t, a, b, func() bool {
		n, err := a.C.Post(ops)
		require.NoError(t, err, "%v", ours(b).Err)
		if ops = ops[n:]; len(ops) == 0 {
			polls++
		}
		if polls == 1000 {
			open()
		}
		return len(b.Frames) == len(want[true])+len(want[false])
	})
	for _, list := range want {
		require.True(t, slices.Equal(list, slices.DeleteFunc(slices.Clone(b.Frames), func(s string) bool { return !slices.Contains(list, s) })))
	}
	require.Equal(t, [2]error{}, [2]error{a.Down, b.Down})
	c.Conn = under
}

// TestUserOfAnOperation: the two bits of the layers are refused, and any other User comes back.
func TestUserOfAnOperation(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overCMA)
	src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1)
	k := b.Key(t, dst)
	for range 2 { // before and after a write was mapped
		for _, op := range append([]transport.Op{text("frame", false), text("passes", true)}, write(k, src, transport.Point{})...) {
			for _, user := range []uint64{1 << 62, 1 << 63, 3 << 62} {
				op.User = user
				n, err := a.C.Post([]transport.Op{op})
				require.Zero(t, n)
				require.ErrorContains(t, err, "want less than 2^62")
			}
			op.User = 1<<62 - 1
			n, err := a.C.Post([]transport.Op{op})
			require.NoError(t, err)
			require.Equal(t, 1, n)
			for done := false; !done; b.Poll(t) {
				var ev [4]transport.Event
				n, err := a.F.Poll(ev[:])
				require.NoError(t, err)
				for _, e := range ev[:n] {
					require.Equal(t, transport.EvDone, e.Kind)
					require.Equal(t, op.User, e.User)
					done = true
				}
			}
		}
	}
	require.True(t, ours(a).mapped)
}

// TestDriverWaitsInPoll: while a Poll of the Fabric below waits in the driver, whoever needs no GPU goes on.
func TestDriverWaitsInPoll(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overCMA)
	dst, spare := onGPU(t, g, 4096, 1), onGPU(t, g, 4096, 1)
	host := bytes.Repeat([]byte{5}, 4096)
	k := b.Key(t, dst)
	in, end := g.Block(t, "Enqueue")
	a.Post(t, []transport.Op{{Kind: transport.OpWrite, Key: k, Src: []mem.Span{mem.Of(host)}}})
	over := make(chan struct{})
	go func() {
		defer close(over)
		until(t, a, b, func() bool {
			b.F.Arm() // so that the next Poll looks at all
			return len(b.Writes) == 1
		})
	}()
	<-in
	b.Aside(t, spare, a.F.Addr())
	end()
	<-over
	holds(t, g, dst, 5)
	b.Free(t, k)
	runtime.KeepAlive(host)
}

// TestCalmPollsTick: Polls that find nothing look at the clock now and then.
func TestCalmPollsTick(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overCMA)
	k := b.Key(t, onGPU(t, g, 4096, 1))
	a.Post(t, write(k, onGPU(t, g, 4096, 5), transport.Point{}))
	until(t, a, b, func() bool { return len(b.Writes) == 1 && len(a.Done) == 1 })
	b.Free(t, k)
	until(t, a, b, a.F.Calm.Load)
	c := ours(a)
	require.Len(t, c.ways, 1)
	a.F.Looked = time.Time{}
	for range over.TickPolls {
		a.Poll(t)
	}
	require.Empty(t, c.ways)
}
