package exchange

import (
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/mem"
	"fserver/engine/wire"
)

// unicast pushes to one server, and pulls from it.
func (p *pair) unicast(server int, push, pull []Tensor) (uint64, error) {
	p.ended()
	t, err := p.w.Begin()
	require.NoError(p.t, err)
	for _, x := range push {
		require.NoError(p.t, t.AddPush(x))
	}
	for _, x := range pull {
		require.NoError(p.t, t.AddPull(x))
	}
	t.To(server)
	id := t.ID()
	return id, p.w.Submit(t)
}

// asked is unicast to server 0 with tensors of 8 bytes.
func (p *pair) asked(keys ...uint64) uint64 {
	var push []Tensor
	for _, k := range keys {
		push = append(push, bytesOf(p.t, k, 8, byte(k)))
	}
	id, err := p.unicast(0, push, nil)
	require.NoError(p.t, err)
	require.NoError(p.t, p.settle())
	return id
}

// took gives the next unicast of server i, or nil.
func (p *pair) took(i int) *Request {
	b, err := p.servers[i].Unicasts()
	require.NoError(p.t, err)
	if b == nil {
		return nil
	}
	require.Len(p.t, b, 1)
	p.servers[i].Deliver()
	return b[0]
}

// answered has server 0 answer r.
func (p *pair) answered(r *Request, tensors ...Tensor) {
	require.NoError(p.t, p.respond(0, r, tensors...))
	require.NoError(p.t, p.settle())
}

// elsewhere is memory of the CPU that stands for that of another device.
type elsewhere struct {
	CPU
	made int
}

func (e *elsewhere) Alloc(n uint64) (mem.Region, error) {
	e.made++
	return e.CPU.Alloc(n)
}

// TestUnicastFromTheCPU: a server with a GPU receives its tensors on the CPU, and those of all others on the GPU.
func TestUnicastFromTheCPU(t *testing.T) {
	p := newPair(t, 1)
	e := &elsewhere{}
	p.servers[0].memory = e
	id := p.asked(7, 9)
	require.Zero(t, e.made)
	p.answered(p.took(0))
	require.Equal(t, StateDone, p.state(id))
	p.answer(p.push(8, 8), 8)
	require.Equal(t, 1, e.made)
}

// TestUnicast: one server alone has it, and the others' batches are as without it.
func TestUnicast(t *testing.T) {
	p := newPair(t, 3)
	out := []Tensor{bytesOf(t, 0, 8, 0), bytesOf(t, 1, 16, 0)}
	id, err := p.unicast(1, []Tensor{bytesOf(t, 7, 8, 5)}, out)
	require.NoError(t, err)
	all, err := p.pushPull([]Tensor{bytesOf(t, 8, 8, 6)}, nil)
	require.NoError(t, err)
	require.NoError(t, p.settle())
	require.Nil(t, p.took(0))
	require.Nil(t, p.took(2))
	for i := range 3 {
		r := p.take(i)[0]
		require.EqualValues(t, 8, r.Push()[0].Key)
		require.Nil(t, p.take(i))
		require.NoError(t, p.respond(i, r))
	}
	require.NoError(t, p.settle())
	require.Equal(t, StateDone, p.state(all))
	require.Equal(t, StateOpen, p.state(id))
	r := p.took(1)
	require.EqualValues(t, 7, r.Push()[0].Key)
	require.Equal(t, byte(5), r.Push()[0].Span.Bytes()[7])
	require.Equal(t, 2, r.Pulls())
	require.NoError(t, p.respond(1, r, bytesOf(t, 0, 8, 9), bytesOf(t, 1, 16, 10)))
	require.NoError(t, p.settle())
	require.Equal(t, StateDone, p.state(id))
	require.Equal(t, byte(9), out[0].Span.Bytes()[7])
	require.Equal(t, byte(10), out[1].Span.Bytes()[15])
}

// TestUnicastOrder: those that wait are passed by those with other keys, and by no others.
func TestUnicastOrder(t *testing.T) {
	p := newPair(t, 1)
	next := func(key uint64) *Request {
		t.Helper()
		r := p.took(0)
		require.NotNil(t, r)
		require.EqualValues(t, key, r.Push()[0].Key)
		return r
	}
	p.asked(1)
	p.asked(1, 2) // waits for key 1
	p.asked(2)    // behind it
	p.asked(2, 3) // behind that
	p.asked(4)
	other := p.asked(3)
	first := next(1)
	p.answered(next(4))
	require.Nil(t, p.took(0))
	waits, err := p.w.Waits(other)
	require.NoError(t, err)
	require.NotZero(t, waits.Behind)
	p.answered(first)
	p.answered(next(1))
	p.answered(next(2))
	p.answered(next(2))
	p.answered(next(3))
	require.Equal(t, StateDone, p.state(other))
	require.Zero(t, p.w.servers[0].waiting())
}

// TestUnicastsThatWait: those behind overtakeMost that wait are not looked at, and all go in the end.
func TestUnicastsThatWait(t *testing.T) {
	p := newPair(t, 1)
	for range 1 + overtakeMost {
		p.asked(1)
	}
	last := p.asked(2)
	require.NoError(t, p.settle())
	first := p.took(0)
	require.Nil(t, p.took(0), "65 are before it, 64 of which wait")
	p.answered(first)
	for range overtakeMost - 1 {
		r := p.took(0)
		require.EqualValues(t, 1, r.Push()[0].Key)
		if p.state(last) == StateOpen {
			other, err := p.servers[0].Unicasts()
			require.NoError(t, err)
			if other != nil && other[0].Push()[0].Key == 2 {
				p.answered(p.took(0))
			}
		}
		p.answered(r)
	}
	require.Equal(t, StateDone, p.state(last))
	p.answered(p.took(0))
	require.Nil(t, p.took(0))
}

// TestUnicastAndBatch: the credit of a key is one, whoever pushes it.
func TestUnicastAndBatch(t *testing.T) {
	p := newPair(t, 1)
	p.asked(1)
	_, err := p.pushPull([]Tensor{bytesOf(t, 1, 8, 2)}, nil)
	require.NoError(t, err)
	require.NoError(t, p.settle())
	r := p.took(0)
	require.Nil(t, p.take(0))
	p.answered(r)
	batch := p.take(0)
	p.asked(1)
	require.Nil(t, p.took(0))
	p.answered(batch[0])
	p.answered(p.took(0))
}

// TestUnicastArguments: a server that there is not, and tensors that do not fit.
func TestUnicastArguments(t *testing.T) {
	p := newPair(t, 2)
	for _, i := range []int{-2, -1, 2, 1 << 30} {
		_, err := p.unicast(i, []Tensor{bytesOf(t, 1, 8, 0)}, nil)
		require.ErrorContains(t, err, "exchange: push_pull with server")
		require.ErrorContains(t, err, "there are 2 (give 0 to 1)")
	}
	_, err := p.unicast(0, nil, nil)
	require.ErrorContains(t, err, "no tensors at all")
	same := []Tensor{bytesOf(t, 1, 8, 0), bytesOf(t, 1, 8, 0)}
	id, err := p.unicast(1, same, nil)
	require.NoError(t, err)
	require.NoError(t, p.settle())
	require.ErrorContains(t, p.w.Result(id), "have the same key 1")
	// An odd number of pull tensors is one server's.
	id, err = p.unicast(1, nil, []Tensor{bytesOf(t, 3, 8, 0)})
	require.NoError(t, err)
	require.NoError(t, p.settle())
	waits, err := p.w.Waits(id)
	require.NoError(t, err)
	require.Equal(t, Pending{11, 3, true, 0}, waits)
	require.NoError(t, p.respond(1, p.took(1), bytesOf(t, 3, 8, 0)))
	require.NoError(t, p.settle())
	require.Equal(t, StateDone, p.state(id))
}

// TestUnicastOnAChannel: a plan is of one or the other.
func TestUnicastOnAChannel(t *testing.T) {
	p := newPair(t, 1)
	b := wire.Append(nil, wire.TypePlan, &wire.Plan{Number: 1, Channel: "a", Unicast: true})
	require.ErrorContains(t, p.servers[0].Frame(0, b), `plan 1 of unicasts on channel "a"`)
}

// TestUnicastRefused: a Need that is refused ends that unicast alone, wherever it stands in the queue.
func TestUnicastRefused(t *testing.T) {
	p := newPair(t, 1)
	fixed := bytesOf(t, 0, 8, 0)
	require.NoError(t, p.servers[0].Fix([]Own{{Rank: 0, Key: 5, Region: fixed.Base}}))
	p.asked(1)
	waits := p.asked(1)
	big, err := p.unicast(0, []Tensor{bytesOf(t, 5, 4096, 0)}, nil)
	require.NoError(t, err)
	passed, err := p.unicast(0, []Tensor{bytesOf(t, 1, 8, 0), bytesOf(t, 5, 4096, 0), bytesOf(t, 6, 8, 0)}, nil)
	require.NoError(t, err)
	require.NoError(t, p.settle())
	require.ErrorContains(t, p.w.Result(big), "exceeds its buffer")
	require.Equal(t, StateOpen, p.state(waits))
	p.answered(p.took(0))
	p.answered(p.took(0))
	require.Equal(t, StateDone, p.state(waits))
	require.ErrorContains(t, p.w.Result(passed), "exceeds its buffer")
	require.NotContains(t, p.w.servers[0].keys, uint64(5))
	require.NotContains(t, p.w.servers[0].keys, uint64(6))
}

// TestUnicastOfTheLost: the loss of one server ends, or delays, what goes to it, and nothing else.
func TestUnicastOfTheLost(t *testing.T) {
	p := newPair(t, 2)
	mine := p.asked(1)
	others, err := p.unicast(1, []Tensor{bytesOf(t, 1, 8, 0)}, nil)
	require.NoError(t, err)
	require.NoError(t, p.settle())
	p.w.Lose(1, errGone)
	require.ErrorIs(t, p.w.Result(others), errGone)
	late, err := p.unicast(1, []Tensor{bytesOf(t, 2, 8, 0)}, nil)
	require.NoError(t, err)
	require.NoError(t, p.settle())
	require.ErrorIs(t, p.w.Result(late), errGone)
	more := p.asked(2)
	p.answered(p.took(0))
	p.answered(p.took(0))
	require.Equal(t, StateDone, p.state(mine))
	require.Equal(t, StateDone, p.state(more))
}

// TestUnicastsAgain: a successor is sent what the lost server has not answered, in the order of each key. A
// unicast that makes servers die is given up after some of them, though others are before it.
func TestUnicastsAgain(t *testing.T) {
	p := newPair(t, 1)
	p.w.Patient = true
	ids := []uint64{p.asked(1), p.asked(1), p.asked(2)}
	require.NoError(t, p.settle())
	for range maxSends - 1 {
		p.w.Lose(0, errGone)
		drain(p.to[0], p.w.Done)
		p.succeed(0)
		require.NoError(t, p.settle())
	}
	require.Equal(t, StateOpen, p.state(ids[0]))
	r := p.took(0)
	require.EqualValues(t, 1, r.Push()[0].Key)
	p.answered(r)
	p.answered(p.took(0)) // 2, which was sent before the second push of 1
	p.answered(p.took(0))
	for _, id := range ids {
		require.Equal(t, StateDone, p.state(id))
	}

	p.answered(func() *Request { p.asked(4); return p.took(0) }()) // so that key 4 has a buffer
	p.asked(3)
	waits := p.asked(3)
	p.to[0].room = 1 // the write of the next gets out, and its frame does not
	deadly, err := p.unicast(0, []Tensor{bytesOf(t, 4, 8, 4)}, nil)
	require.NoError(t, err)
	p.w.Drain()
	require.Same(t, p.w.ticket(deadly), p.w.servers[0].turn)
	p.w.ticket(deadly).legs[0].sends = maxSends - 1
	p.w.Lose(0, errGone)
	drain(p.to[0], p.w.Done)
	p.ended()
	require.ErrorIs(t, p.w.Result(deadly), errGone)
	p.succeed(0)
	require.NoError(t, p.settle())
	p.answered(p.took(0))
	p.answered(p.took(0))
	require.Equal(t, StateDone, p.state(waits))
	require.Nil(t, p.took(0))
}

// TestUnicastsOfWorkersThatLeft: they are given, and then it is said that no more come.
func TestUnicastsOfWorkersThatLeft(t *testing.T) {
	p := newPair(t, 1)
	p.asked(1)
	s := p.servers[0]
	require.True(t, s.HasUnicasts())
	s.Left(0, nil)
	p.answered(p.took(0))
	require.True(t, s.HasUnicasts())
	_, err := s.Unicasts()
	require.ErrorIs(t, err, ErrLeft)
}

// TestUnicastsBehindStreams: one whose stream is not there yet holds up only its keys.
func TestUnicastsBehindStreams(t *testing.T) {
	p, d := withDevice(t, 2)
	tk, err := p.w.Begin()
	require.NoError(t, err)
	require.NoError(t, tk.AddPush(bytesOf(t, 1, 8, 1)))
	tk.To(0)
	tk.After(7)
	require.NoError(t, p.w.Submit(tk))
	p.asked(1)
	p.asked(2)
	require.True(t, p.w.Held())
	r := p.took(0)
	require.EqualValues(t, 2, r.Push()[0].Key)
	require.Nil(t, p.took(0))
	p.answered(r)
	d.pass()
	require.NoError(t, p.settle())
	p.answered(p.took(0))
	p.answered(p.took(0))
	require.False(t, p.w.Held())
	require.Zero(t, d.live)
	require.Equal(t, [][2]bool{{false, true}}, d.made)

	p.copies = false
	f := newFabric()
	f.points, p.to[1].of = true, f
	p.meet(1, f)
	for i, form := range [][2]bool{{false, true}, {true, false}} { // that which its server's Fabric takes
		tk, err := p.w.Begin()
		require.NoError(t, err)
		require.NoError(t, tk.AddPush(onDevice(t, 3, 8)))
		tk.To(i)
		tk.After(7)
		require.NoError(t, p.w.Submit(tk))
		require.Equal(t, form, d.made[1+i])
	}
}
