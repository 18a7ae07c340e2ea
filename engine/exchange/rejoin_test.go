package exchange

import (
	"errors"
	"maps"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/trace"
	"fserver/engine/wire"
)

var errGone = errors.New("gone")

// succeed puts a new process in the place of server i.
func (p *pair) succeed(i int) {
	p.ended()
	s, err := NewServer(1, p.buffers, new(trace.Counters), inline)
	require.NoError(p.t, err)
	p.t.Cleanup(func() { s.Over(); require.NoError(p.t, s.Close()); require.NoError(p.t, s.Free()) })
	p.servers[i], p.sf[i] = s, newFabric()
	p.to[i], p.from[i] = &wireConn{room: 1000, lend: p.to[i].lend, of: p.wf}, &wireConn{room: 1000, of: p.sf[i]}
	s.Up(0, 0, p.sf[i], p.from[i])
	p.w.Up(i, 10+i, p.wf, p.to[i])
}

// drain lets the operations on a path end.
func drain(c *wireConn, done func(uint64, error)) {
	for i := range c.ops {
		done(c.ops[i].User, errGone)
	}
	c.ops, c.dead = nil, errGone
}

// TestKeysOfTheLost checks that no key that a lost server had stays valid, once
// the other server has no use for it either.
func TestKeysOfTheLost(t *testing.T) {
	p := newPair(t, 2)
	x := bytesOf(t, 1, 8, 5)
	both := bytesOf(t, 0, 16, 0) // one allocation, a half for each server
	a, b := both, both
	a.Span.Len, a.Dims, b.Span.Len, b.Dims = 8, []int64{8}, 8, []int64{8}
	b.Span.Addr += 8
	id, err := p.pushPull([]Tensor{x}, []Tensor{a, b})
	require.NoError(t, err)
	require.NoError(t, p.settle())
	old := maps.Clone(p.wf.keys)
	require.Len(t, old, 1)
	request := p.take(0)[0]

	p.w.Lose(1, errGone)
	require.Equal(t, StateFailing, p.state(id))
	require.Equal(t, old, p.wf.keys, "server 0 may still write with it")
	next, err := p.pushPull([]Tensor{bytesOf(t, 2, 8, 6)}, []Tensor{a, b})
	require.NoError(t, err)
	require.NoError(t, p.settle())
	require.Equal(t, StateFailed, p.state(next))
	require.ErrorIs(t, p.w.Result(next), errGone)
	require.Subset(t, p.wf.keys, old)
	require.Len(t, p.wf.keys, 2, "and one that server 1 never had")

	require.NoError(t, p.respond(0, request, bytesOf(t, 0, 8, 7)))
	require.NoError(t, p.settle())
	require.Equal(t, StateFailed, p.state(id))
	for k := range old {
		require.NotContains(t, p.wf.keys, k)
	}
	require.Equal(t, byte(7), a.Span.Bytes()[0])
	require.Nil(t, p.take(0), "what cannot complete is sent to nobody")

	p.succeed(1)
	id, err = p.pushPull([]Tensor{x}, []Tensor{a, b})
	require.NoError(t, err)
	require.NoError(t, p.settle())
	for i := range p.servers {
		require.NoError(t, p.respond(i, p.take(i)[0], bytesOf(t, 0, 8, byte(9+i))))
	}
	require.NoError(t, p.settle())
	require.Equal(t, StateDone, p.state(id))
	require.Equal(t, []byte{9, 10}, []byte{a.Span.Bytes()[0], b.Span.Bytes()[0]})
}

// TestKeyOfTwoTickets: push_pulls with one key between them fail when the lost server writes to neither any more.
func TestKeyOfTwoTickets(t *testing.T) {
	p := newPair(t, 1)
	a := bytesOf(t, 0, 16, 0) // one allocation
	b := a
	a.Span.Len, a.Dims, b.Span.Len, b.Dims, b.Key = 8, []int64{8}, 8, []int64{8}, 1
	b.Span.Addr += 8
	var ids []uint64
	for i, pull := range []Tensor{a, b} {
		id, err := p.pushPull([]Tensor{bytesOf(t, uint64(2+i), 8, 5)}, []Tensor{pull})
		require.NoError(t, err)
		ids = append(ids, id)
	}
	require.NoError(t, p.settle())
	require.Len(t, p.wf.keys, 1)
	p.w.Lose(0, errGone)
	for _, id := range ids {
		state, _ := p.w.State(id)
		require.Equal(t, StateFailing, state)
	}
	require.True(t, p.ended())
	for _, id := range ids {
		require.Equal(t, StateFailed, p.state(id))
	}
	require.Empty(t, p.wf.keys)
}

// TestExpect has push_pulls wait for a server that was lost and is about to be up again. They end
// when it is lost once more.
func TestExpect(t *testing.T) {
	p := newPair(t, 2)
	push := func(want int) uint64 {
		id, err := p.pushPull([]Tensor{bytesOf(t, 1, 8, 5)}, nil)
		require.NoError(t, err)
		require.NoError(t, p.settle())
		require.Equal(t, want, p.state(id))
		return id
	}
	p.w.Expect(1) // it is up
	p.w.Lose(1, errGone)
	push(StateFailed)
	p.w.Expect(1)
	first := push(StateOpen)
	again := errors.New("gone again")
	p.w.Lose(1, again)
	require.Equal(t, StateFailing, p.state(first))
	require.NoError(t, p.respond(0, p.take(0)[0]))
	require.NoError(t, p.settle())
	require.ErrorIs(t, p.w.Result(first), again)
	push(StateFailed)

	p.w.Expect(1)
	second := push(StateOpen)
	p.succeed(1)
	require.NoError(t, p.settle())
	for i := range p.servers {
		require.NoError(t, p.respond(i, p.take(i)[0]))
	}
	require.NoError(t, p.settle())
	require.Equal(t, StateDone, p.state(second))
}

// TestLeftInOrder: what is registered after a server has left does not wait for its Conn. After a loss
// it does.
func TestLeftInOrder(t *testing.T) {
	p := newPair(t, 2)
	x, y := bytesOf(t, 1, 8, 5), bytesOf(t, 0, 8, 0)
	one := func() uint64 {
		id, err := p.pushPull([]Tensor{x}, []Tensor{bytesOf(t, 0, 8, 0), y})
		require.NoError(t, err)
		require.NoError(t, p.settle())
		return id
	}
	first := one()
	for i := range p.servers {
		require.NoError(t, p.respond(i, p.take(i)[0], bytesOf(t, 0, 8, byte(7+i))))
	}
	require.NoError(t, p.settle())
	require.Equal(t, StateDone, p.state(first))

	p.w.Left(1, errGone)
	require.Empty(t, p.w.servers[1].ring.calm)
	require.Equal(t, StateFailed, p.state(one()))
	p.w.Lose(0, errGone)
	require.Len(t, p.w.servers[0].ring.calm, 1)
	p.w.Closed(p.to[0])
	p.w.Closed(p.to[1])
}

// TestKeysOfManyTickets loses one server after the other while many push_pulls are open, each
// with an allocation of its own and one that all share.
func TestKeysOfManyTickets(t *testing.T) {
	const many = Window - 10
	p := newPair(t, 2)
	shared := bytesOf(t, 0, 8, 0)
	ids := make([]uint64, many)
	for i := range ids {
		id, err := p.pushPull(nil, []Tensor{bytesOf(t, 0, 8, 0), shared})
		require.NoError(t, err)
		ids[i] = id
	}
	for p.to[0].room, p.to[1].room = 1<<20, 1<<20; ; {
		p.w.Drain()
		if p.w.servers[0].waiting()+p.w.servers[1].waiting() == 0 {
			break
		}
		require.NoError(t, p.settle())
	}
	require.Len(t, p.wf.keys, many+1)
	for i := range p.servers {
		drain(p.to[i], p.w.Done)
		p.w.Lose(i, errGone)
	}
	p.w.Drain()
	for _, id := range ids {
		require.Equal(t, StateFailed, p.state(id))
	}
	require.Empty(t, p.wf.keys)
	for _, ring := range p.w.keys.rings {
		require.Empty(t, ring.all)
	}
}

// TestRecall takes push_pulls back that one server has and another has not
// answered: one that is delivered, one that is complete, one whose write is on its
// way, one that is not sent.
func TestRecall(t *testing.T) {
	p := newPair(t, 2)
	var ids [4]uint64
	for i := range ids {
		x := bytesOf(t, uint64(i), 8, byte(i))
		warm, err := p.pushPull([]Tensor{x}, nil)
		require.NoError(t, err)
		require.NoError(t, p.settle())
		for j := range p.servers {
			require.NoError(t, p.respond(j, p.take(j)[0]))
		}
		require.NoError(t, p.settle())
		require.Equal(t, StateDone, p.state(warm))
	}
	var request *Request
	for i := range ids {
		if i == 3 {
			p.to[0].room = 0
		}
		var err error
		ids[i], err = p.pushPull([]Tensor{bytesOf(t, uint64(i), 8, byte(10+i))}, nil)
		require.NoError(t, err)
		if i == 2 {
			p.to[0].held = ids[2]
		}
		require.NoError(t, p.settle())
		if i == 0 {
			request = p.take(0)[0]
		}
	}
	p.w.Lose(1, errGone)
	p.to[0].room = 1000
	require.NoError(t, p.settle())
	require.Equal(t, StateFailing, p.state(ids[0]), "it is delivered")
	require.Equal(t, StateFailing, p.state(ids[1]), "its Recall waits behind the next")
	require.Equal(t, StateFailing, p.state(ids[2]), "its write is still to come")
	require.Equal(t, StateFailing, p.state(ids[3]), "it was half sent, and is behind that")
	p.to[0].held = 0
	require.NoError(t, p.settle())
	require.Equal(t, StateFailed, p.state(ids[1]))
	require.Equal(t, StateFailed, p.state(ids[2]))
	require.Equal(t, StateFailed, p.state(ids[3]))
	require.Nil(t, p.take(0))
	require.NoError(t, p.respond(0, request))
	require.NoError(t, p.settle())
	require.Equal(t, StateFailed, p.state(ids[0]))

	p.succeed(1)
	id, err := p.pushPull([]Tensor{bytesOf(t, 2, 8, 30)}, nil)
	require.NoError(t, err)
	require.NoError(t, p.settle())
	for j := range p.servers {
		r := p.take(j)[0]
		require.Equal(t, byte(30), r.Push()[0].Span.Bytes()[0])
		require.NoError(t, p.respond(j, r))
	}
	require.NoError(t, p.settle())
	require.Equal(t, StateDone, p.state(id))
	require.Error(t, p.w.Frame(0, wire.Append(nil, wire.TypeRecalled, &wire.Seqs{id})))
	require.NoError(t, p.servers[0].Frame(0, wire.Append(nil, wire.TypeRecall, &wire.Seqs{id, 0})), "it has been answered")
}

// TestSentAgain loses a server at each point of a push_pull's way, and has what
// was not answered sent to its successor in the order of the calls.
func TestSentAgain(t *testing.T) {
	for room := range 3 { // operations of the second push_pull that get out
		p := newPair(t, 1)
		p.w.Patient = true
		out := []Tensor{bytesOf(t, 0, 8, 0), bytesOf(t, 0, 8, 0), bytesOf(t, 0, 8, 0)}
		out[2].Alloc = 0 // not cached
		var ids [3]uint64
		for i := range 3 { // so that all keys have their buffers
			_, err := p.pushPull([]Tensor{bytesOf(t, uint64(i), 8, 0)}, out[i:i+1])
			require.NoError(t, err)
			require.NoError(t, p.settle())
			require.NoError(t, p.respond(0, p.take(0)[0], bytesOf(t, 0, 8, 0)))
			require.NoError(t, p.settle())
		}
		for i := range 3 {
			if i == 1 {
				p.to[0].room = 0
			}
			var err error
			ids[i], err = p.pushPull([]Tensor{bytesOf(t, uint64(i), 8, byte(i))}, out[i:i+1])
			require.NoError(t, err)
			if i == 0 {
				require.NoError(t, p.settle())
			}
		}
		p.to[0].room = room
		p.w.Drain()
		p.to[0].dead = errGone // found by Post
		p.w.Drain()
		p.w.Lose(0, errGone) // what its Conn says, if Post was not called
		drain(p.to[0], p.w.Done)
		for _, id := range ids {
			require.Equal(t, StateOpen, p.state(id))
		}
		p.succeed(0)
		require.NoError(t, p.settle())
		for i := range 3 {
			r := p.take(0)[0]
			require.EqualValues(t, i, r.Push()[0].Key)
			require.NoError(t, p.respond(0, r, bytesOf(t, 0, 8, byte(10+i))))
			require.NoError(t, p.settle())
			require.Equal(t, StateDone, p.state(ids[i]))
			require.Equal(t, byte(10+i), out[i].Span.Bytes()[0])
		}
		require.Len(t, p.wf.keys, 2, "those that are cached")
	}
}

// TestDownAfterLose ends what has waited.
func TestDownAfterLose(t *testing.T) {
	p := newPair(t, 1)
	p.w.Patient = true
	var ids [2]uint64
	var out [2]Tensor
	for i := range ids {
		var err error
		out[i] = bytesOf(t, 0, 8, 0)
		ids[i], err = p.pushPull([]Tensor{bytesOf(t, 1, 8, 5)}, out[i:i+1])
		require.NoError(t, err)
		require.NoError(t, p.settle())
		p.w.Lose(0, errGone)
		require.Equal(t, StateOpen, p.state(ids[i]))
	}
	p.w.Down(0, errGone)
	p.w.Down(0, errors.New("again"))
	late, err := p.pushPull([]Tensor{bytesOf(t, 1, 8, 5)}, nil)
	require.NoError(t, err)
	p.w.Drain()
	for _, id := range append(ids[:], late) {
		require.Equal(t, StateFailed, p.state(id))
		require.ErrorIs(t, p.w.Result(id), errGone)
	}
	require.Len(t, p.wf.keys, 1, "that which nobody was told")
	p.w.Forget(out[1].Alloc)
	require.Empty(t, p.wf.keys)
}

// TestLateAnswer answers a request whose worker was lost after the answer was
// submitted, and has a successor before it is taken.
func TestLateAnswer(t *testing.T) {
	p := newPair(t, 1)
	s := p.servers[0]
	_, err := p.pushPull([]Tensor{bytesOf(t, 1, 8, 5)}, []Tensor{bytesOf(t, 0, 8, 0)})
	require.NoError(t, err)
	require.NoError(t, p.settle())
	r := p.take(0)[0]
	seen := r.Push()[0]
	handler := r.Handler()
	require.NoError(t, p.respond(0, r, bytesOf(t, 0, 8, 6)))
	s.Lose(0, errGone)
	require.True(t, s.Ready(1))
	_, err = s.Batch(1)
	require.ErrorIs(t, err, errGone)
	require.Empty(t, p.sf[0].keys, "the worker cannot write any more")
	s.Up(0, 0, p.sf[0], p.from[0])
	require.False(t, s.Ready(1))
	s.Drain()
	require.Empty(t, p.from[0].ops)
	_, _, err = s.requests.claim(handler, &Ticket{})
	require.Error(t, err)
	p.ended()
	require.Equal(t, 1, p.buffers.Len(), "the application looks at it")
	require.Equal(t, byte(5), seen.Span.Bytes()[0])
	require.NoError(t, p.buffers.Release(seen.Buffer, 1))
	require.Zero(t, p.buffers.Len())
}

// TestUntaken: the receive buffers of requests that nobody has taken go with their
// worker, or with the server; one that a batch has given stays until its Release.
func TestUntaken(t *testing.T) {
	p := newPair(t, 1)
	s, push := p.servers[0], func(key uint64) {
		_, err := p.pushPull([]Tensor{bytesOf(t, key, 8, 5)}, nil)
		require.NoError(t, err)
		require.NoError(t, p.settle())
	}
	for _, taken := range []bool{false, true, false} {
		push(1)
		push(2)
		push(1) // waits for the credit
		require.Equal(t, 2, p.buffers.Len())
		want, seen := 0, uint64(0)
		if taken {
			want, seen = 1, p.take(0)[0].Push()[0].Buffer
		}
		s.Lose(0, errGone)
		p.w.Lose(0, errGone)
		p.ended()
		require.Equal(t, want, p.buffers.Len())
		if taken {
			require.NoError(t, p.buffers.Release(seen, 1))
			require.Zero(t, p.buffers.Len())
		}
		s.Up(0, 0, p.sf[0], p.from[0])
		p.w.Up(0, 10, p.wf, p.to[0])
	}

	s.Attach("c")
	on, err := p.w.Begin()
	require.NoError(t, err)
	require.NoError(t, on.AddPush(bytesOf(t, 3, 8, 5)))
	on.Through("c")
	require.NoError(t, p.w.Submit(on))
	push(1)
	require.Equal(t, 2, p.buffers.Len())
	s.Over()
	require.NoError(t, s.Close())
	require.Zero(t, p.buffers.Len())
}

// TestFixedMemory of the application's own stays in use.
func TestFixedMemory(t *testing.T) {
	p := newPair(t, 1)
	mine := bytesOf(t, 0, 8, 0)
	require.NoError(t, p.servers[0].Fix([]Own{{0, 1, mine.Base}}))
	for i := range 3 {
		_, err := p.pushPull([]Tensor{bytesOf(t, 1, 8, byte(5+i))}, nil)
		require.NoError(t, err)
		require.NoError(t, p.settle())
		require.Equal(t, byte(5+i), mine.Span.Bytes()[0])
		require.Len(t, p.sf[0].keys, 1)
		p.servers[0].Lose(0, errGone)
		p.w.Lose(0, errGone)
		require.Empty(t, p.sf[0].keys)
		p.servers[0].Up(0, 0, p.sf[0], p.from[0])
		p.w.Up(0, 10, p.wf, p.to[0])
	}
	require.Zero(t, p.buffers.Len())
}

// TestBackOverAnotherFabric: a push_pull is sent again over another Fabric when the lost Conn has ended. The last
// writes of that would come on top of the answer.
func TestBackOverAnotherFabric(t *testing.T) {
	p := newPair(t, 1)
	aside := make(chan struct{}, 1)
	p.w.Patient, p.w.Aside = true, func(f func()) {
		go func() {
			f()
			aside <- struct{}{}
		}()
	}
	y := bytesOf(t, 0, 8, 0)
	id, err := p.pushPull(nil, []Tensor{y})
	require.NoError(t, err)
	require.NoError(t, p.settle())
	lost := p.to[0]
	p.w.Lose(0, errGone)
	p.servers[0].Lose(0, errGone)
	other := newFabric()
	p.wf, p.to[0], p.from[0] = other, &wireConn{room: 1000, of: other}, &wireConn{room: 1000, of: p.sf[0]}
	p.servers[0].Up(0, 0, p.sf[0], p.from[0])
	p.meet(0, other)
	p.w.Drain()
	select {
	case <-aside:
		t.Fatal("it was registered while the lost Conn could write")
	case <-time.After(20 * time.Millisecond):
	}
	require.Empty(t, other.keys)
	p.w.Closed(lost)
	<-aside
	require.NoError(t, p.settle())
	require.NoError(t, p.respond(0, p.take(0)[0], bytesOf(t, 0, 8, 7)))
	require.NoError(t, p.settle())
	require.Equal(t, StateDone, p.state(id))
	require.EqualValues(t, 7, y.Span.Bytes()[0])
}

// TestTakenBackWhereAWriteFails: a Conn may tell the end of an operation before its own. The other server is told not to
// deliver the push_pull all the same: it would pair it with a later one of another worker.
func TestTakenBackWhereAWriteFails(t *testing.T) {
	p := newPair(t, 2)
	id, err := p.pushPull([]Tensor{bytesOf(t, 1, 8, 5)}, nil)
	require.NoError(t, err)
	require.NoError(t, p.settle())
	p.w.ticket(id).ops++ // a write to server 0 that is not wholly sent
	p.w.Done(id, errGone)
	p.w.Lose(0, errGone)
	require.NoError(t, p.settle())
	require.Nil(t, p.take(1))
	require.Equal(t, StateFailed, p.state(id))
	require.ErrorIs(t, p.w.Result(id), errGone)
}
