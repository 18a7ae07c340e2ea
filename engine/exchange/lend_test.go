package exchange

import (
	"bytes"
	"errors"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/mem"
	"fserver/engine/trace"
	"fserver/engine/wire"
)

var tally mem.Tally // of all views of the tests

// show maps shared memory as a peer would.
func show(s mem.Span) (mem.Span, *mem.View) {
	m := mem.SharedAt(s)
	v, err := mem.NewView(m.FD(), m.Region().Len, &tally)
	if err != nil {
		panic(err)
	}
	return mem.Span{Addr: v.Region().Addr + (s.Addr - m.Region().Addr), Len: s.Len}, v
}

// sharedOf is a tensor in shared memory.
func sharedOf(t *testing.T, key, n uint64, fill byte) Tensor {
	m, err := mem.NewShared(n)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, mem.FreeShared(m.ID())) })
	x := Tensor{Span: mem.Span{Addr: m.Region().Addr, Len: n}, Dev: mem.CPU, Key: key, Base: m.Region(), Dims: []int64{int64(n)}}
	copy(x.Span.Bytes(), bytes.Repeat([]byte{fill}, int(n)))
	return x
}

// views is how many views are mapped.
func views(t *testing.T) int {
	b, err := os.ReadFile("/proc/self/maps")
	require.NoError(t, err)
	n := 0
	for _, l := range bytes.Split(b, []byte("\n")) {
		if bytes.Contains(l, []byte("memfd:fserver-shared")) && bytes.Contains(l, []byte(" r--s ")) {
			n++
		}
	}
	return n
}

func lending(t *testing.T, servers int) *pair {
	p := newPair(t, servers)
	for _, c := range p.to {
		c.lend = true
	}
	return p
}

// TestLoan pushes shared tensors, alone and among others: no bytes and no
// buffer for them, and none of them before the answer in the way of the next.
func TestLoan(t *testing.T) {
	p := lending(t, 1)
	x, out := sharedOf(t, 1, 5000, 7), bytesOf(t, 1, 8, 0)
	middle := x
	middle.Span, middle.Dims = mem.Span{Addr: x.Span.Addr + 100, Len: 50}, []int64{50}
	own, empty := bytesOf(t, 3, 20, 9), bytesOf(t, 4, 0, 0)
	middle.Key = 2
	for range 3 {
		id, err := p.pushPull([]Tensor{own, x, empty, middle}, []Tensor{out})
		require.NoError(t, err)
		require.NoError(t, p.settle())
		r := p.take(0)[0]
		got := r.Push()
		require.Equal(t, []bool{false, true, false, true}, []bool{got[0].Lent, got[1].Lent, got[2].Lent, got[3].Lent})
		require.Equal(t, own.Span.Bytes(), got[0].Span.Bytes())
		require.Equal(t, x.Span.Bytes(), got[1].Span.Bytes())
		require.Equal(t, middle.Span.Bytes(), got[3].Span.Bytes())
		require.Equal(t, StateOpen, p.state(id), "the memory is still lent")
		a, b := got[1].Buffer, got[3].Buffer
		require.NoError(t, p.respond(0, r, bytesOf(t, 0, 8, 1)))
		require.NoError(t, p.settle())
		require.Equal(t, StateDone, p.state(id))
		require.Equal(t, 2, views(t), "somebody looks")
		require.NoError(t, errors.Join(p.buffers.Release(a, 1), p.buffers.Release(b, 1)))
		require.Zero(t, views(t))
	}
	require.Equal(t, 1, p.buffers.Len(), "that of the tensor that is not shared")
	require.EqualValues(t, 60, p.w.counters.BytesOut.Load())
	require.EqualValues(t, 6, p.w.counters.Loans.Load())
}

// TestLoansOfOneKey are all there before the first is answered, beside one that
// is written and holds the credit.
func TestLoansOfOneKey(t *testing.T) {
	p := lending(t, 1)
	first, err := p.pushPull([]Tensor{sharedOf(t, 1, 10, 1)}, nil)
	require.NoError(t, err)
	require.NoError(t, p.settle())
	_, err = p.pushPull([]Tensor{bytesOf(t, 1, 10, 2)}, nil)
	require.NoError(t, err)
	_, err = p.pushPull([]Tensor{sharedOf(t, 1, 10, 3)}, nil)
	require.NoError(t, err)
	last, err := p.pushPull([]Tensor{bytesOf(t, 1, 10, 4)}, nil)
	require.NoError(t, err)
	require.NoError(t, p.settle())
	require.Equal(t, StateOpen, p.state(first))
	answer := func(fill byte, lent bool) *Request {
		r := p.take(0)[0]
		require.Equal(t, lent, r.Push()[0].Lent)
		require.Equal(t, fill, r.Push()[0].Span.Bytes()[9])
		if lent {
			require.NoError(t, p.buffers.Release(r.Push()[0].Buffer, 1))
		}
		return r
	}
	one, two, three := answer(1, true), answer(2, false), answer(3, true)
	require.NoError(t, errors.Join(p.respond(0, three), p.respond(0, one)))
	require.NoError(t, p.settle())
	require.Nil(t, p.take(0), "the last one waits for the buffer")
	require.NoError(t, p.respond(0, two))
	require.NoError(t, p.settle())
	require.NoError(t, p.respond(0, answer(4, false)))
	require.NoError(t, p.settle())
	require.Equal(t, StateDone, p.state(last))
	require.Zero(t, views(t))
}

// TestLoanToSome lends to one server and writes to the others: one cannot be
// lent to, one refuses, one has registered a buffer.
func TestLoanToSome(t *testing.T) {
	p := lending(t, 4)
	p.to[1].lend = false
	p.servers[2].RefuseLoans(true)
	own := bytesOf(t, 0, 64, 0)
	require.NoError(t, p.servers[3].Fix([]Own{{0, 5, own.Base}}))
	for v := range byte(3) {
		id, err := p.pushPull([]Tensor{sharedOf(t, 5, 64, v)}, nil)
		require.NoError(t, err)
		require.NoError(t, p.settle())
		for i := range p.servers {
			r := p.take(i)[0]
			require.Equal(t, i == 0, r.Push()[0].Lent, "server %d", i)
			require.Equal(t, v, r.Push()[0].Span.Bytes()[63])
			if i == 0 {
				require.NoError(t, p.buffers.Release(r.Push()[0].Buffer, 1))
			}
			require.NoError(t, p.respond(i, r))
		}
		require.Equal(t, v, own.Span.Bytes()[63])
		require.NoError(t, p.settle())
		require.Equal(t, StateDone, p.state(id))
	}
	id, err := p.pushPull([]Tensor{sharedOf(t, 5, 65, 9)}, nil)
	require.NoError(t, err)
	require.NoError(t, p.settle())
	require.ErrorContains(t, p.w.Result(id), "65 bytes for key 5")
}

// TestLoanAndLostWorker: requests that were handed out, that wait, and loans
// without a request all let go of the memory, but for who looks.
func TestLoanAndLostWorker(t *testing.T) {
	p := lending(t, 1)
	for range 2 {
		_, err := p.pushPull([]Tensor{sharedOf(t, 1, 10, 1)}, nil)
		require.NoError(t, err)
	}
	require.NoError(t, p.settle())
	seen := p.take(0)[0].Push()[0]
	span, view := show(sharedOf(t, 2, 10, 2).Span)
	require.NoError(t, p.servers[0].Lent(0, 3, span, view))
	require.Equal(t, 3, views(t))
	p.servers[0].Lose(0, errors.New("gone"))
	p.w.Lose(0, errors.New("gone"))
	require.Equal(t, 1, views(t))
	require.Equal(t, byte(1), seen.Span.Bytes()[9])
	require.NoError(t, p.buffers.Release(seen.Buffer, 1))
	require.Zero(t, views(t))
	require.Zero(t, p.buffers.Len())
}

// TestRecalledLoan: what is taken back before it was delivered is let go of at
// once, and what was delivered with the answer.
func TestRecalledLoan(t *testing.T) {
	p := lending(t, 2)
	var ids [2]uint64
	for i := range ids {
		var err error
		ids[i], err = p.pushPull([]Tensor{sharedOf(t, 1, 10, byte(i))}, nil)
		require.NoError(t, err)
		require.NoError(t, p.settle())
	}
	delivered := p.take(0)[0]
	require.Equal(t, 4, views(t))
	p.w.Lose(1, errGone)
	p.servers[1].Lose(0, errGone)
	require.NoError(t, p.settle())
	require.Equal(t, StateFailing, p.state(ids[0]))
	require.Equal(t, StateFailed, p.state(ids[1]))
	require.Equal(t, 1, views(t))
	require.NoError(t, p.buffers.Release(delivered.Push()[0].Buffer, 1))
	require.NoError(t, p.respond(0, delivered))
	require.NoError(t, p.settle())
	require.Equal(t, StateFailed, p.state(ids[0]))
	require.Zero(t, views(t))
}

// TestLoanAndClose: a server that is closed lets go of all.
func TestLoanAndClose(t *testing.T) {
	p := lending(t, 1)
	for range 3 {
		_, err := p.pushPull([]Tensor{sharedOf(t, 1, 10, 1)}, nil)
		require.NoError(t, err)
	}
	require.NoError(t, p.settle())
	seen := p.take(0)[0].Push()[0].Buffer
	require.NoError(t, p.servers[0].Close())
	require.Equal(t, 1, views(t))
	require.NoError(t, p.buffers.Release(seen, 1))
	require.Zero(t, views(t))
}

// TestBrokenLoans: what is lent is what the request says, and nothing else.
func TestBrokenLoans(t *testing.T) {
	x := sharedOf(t, 1, 16, 1)
	for what, c := range map[string]struct {
		imm  uint32
		lent []wire.Pushed
		come int
		want string
	}{
		"none came":       {9, []wire.Pushed{{Rows: 16, Bytes: 16, Lent: true}}, 0, "but did not lend the tensor"},
		"too many":        {9, []wire.Pushed{{Rows: 16, Bytes: 16, Lent: true}}, 2, "lent a tensor that push_pull 9"},
		"of another":      {8, []wire.Pushed{{Rows: 16, Bytes: 16, Lent: true}}, 1, "did not lend the tensor"},
		"of another size": {9, []wire.Pushed{{Rows: 17, Bytes: 17, Lent: true}}, 1, "loan of 17 bytes for push_pull 9, but lent 16 bytes"},
		"none named":      {9, []wire.Pushed{{Rows: 0, Bytes: 0}}, 1, "lent a tensor that push_pull 9"},
	} {
		buffers := NewBuffers()
		s, err := NewServer(1, buffers, new(trace.Counters), inline)
		require.NoError(t, err)
		s.Up(0, 0, newFabric(), &wireConn{room: 10})
		require.NoError(t, s.Frame(0, wire.Append(nil, wire.TypePlan, &wire.Plan{Push: []wire.PlanTensor{{Key: 1, NDim: 1}}})))
		for range c.come {
			span, view := show(x.Span)
			require.NoError(t, s.Lent(0, c.imm, span, view))
		}
		require.ErrorContains(t, s.Frame(0, wire.AppendRequest(nil, &wire.Request{Seq: 9, Push: c.lent})), c.want, what)
		require.NoError(t, s.Close())
		require.NoError(t, s.Free())
		require.Zero(t, buffers.Len(), what)
		require.Zero(t, views(t), what)
	}

	p := lending(t, 1)
	require.NoError(t, p.servers[0].Fix([]Own{{0, 1, bytesOf(t, 0, 16, 0).Base}}))
	require.NoError(t, p.servers[0].Frame(0, wire.Append(nil, wire.TypePlan, &wire.Plan{Push: []wire.PlanTensor{{Key: 1, NDim: 1}}})))
	span, view := show(x.Span)
	require.NoError(t, p.servers[0].Lent(0, 9, span, view))
	require.ErrorContains(t, p.servers[0].Frame(0, wire.AppendRequest(nil, &wire.Request{Seq: 9, Push: []wire.Pushed{{Rows: 16, Bytes: 16, Lent: true}}})), "a registered buffer")
	p.servers[0].Lose(0, errors.New("gone"))
	span, view = show(x.Span)
	require.ErrorContains(t, p.servers[0].Lent(0, 9, span, view), "more than an Up")
	require.Zero(t, views(t))
	span, view = show(x.Span)
	p.servers[0].Up(0, 0, newFabric(), &wireConn{room: 10})
	var last error
	for i := 0; i <= maxLoans; i++ {
		view.Hold()
		last = p.servers[0].Lent(0, 9, span, view)
	}
	require.ErrorContains(t, last, "more than 8192 tensors")
	require.NoError(t, view.Drop())
	require.NoError(t, p.servers[0].Close())
	require.Zero(t, views(t))
}

// TestLoanIsMadeAgain: to a lost server's successor, which is asked anew. One
// that cannot be lent to is written to.
func TestLoanIsMadeAgain(t *testing.T) {
	for _, lends := range []bool{true, false} {
		p := lending(t, 1)
		p.w.Patient = true
		id, err := p.pushPull([]Tensor{sharedOf(t, 1, 10, 4)}, nil)
		require.NoError(t, err)
		require.NoError(t, p.settle())
		first := p.take(0)[0].Push()[0]
		require.True(t, first.Lent)
		require.NoError(t, p.buffers.Release(first.Buffer, 1))
		drain(p.to[0], p.w.Done)
		p.w.Lose(0, errGone)
		require.NoError(t, p.servers[0].Close())
		p.to[0].lend = lends
		p.succeed(0)
		require.NoError(t, p.settle())
		r := p.take(0)[0]
		require.Equal(t, lends, r.Push()[0].Lent)
		require.Equal(t, byte(4), r.Push()[0].Span.Bytes()[9])
		if lends {
			require.NoError(t, p.buffers.Release(r.Push()[0].Buffer, 1))
		}
		require.NoError(t, p.respond(0, r))
		require.NoError(t, p.settle())
		require.Equal(t, StateDone, p.state(id))
	}
}
