package exchange

import (
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/mem"
	"fserver/engine/trace"
	"fserver/engine/wire"
)

func TestBroadcastAndPullByServer(t *testing.T) {
	p := newPair(t, 3)
	x := bytesOf(t, 9, 100, 1)
	out := []Tensor{bytesOf(t, 0, 10, 0), bytesOf(t, 1, 20, 0), bytesOf(t, 0, 10, 0), bytesOf(t, 1, 20, 0), bytesOf(t, 0, 10, 0), bytesOf(t, 1, 20, 0)}
	id, err := p.pushPull([]Tensor{x}, out)
	require.NoError(t, err)
	require.NoError(t, p.settle())
	for i := range p.servers {
		r := p.take(i)[0]
		require.Equal(t, x.Span.Bytes(), r.Push()[0].Span.Bytes())
		require.Equal(t, 2, r.Pulls())
		require.NoError(t, p.respond(i, r, bytesOf(t, 0, 10, byte(10+i)), bytesOf(t, 0, 20, byte(20+i))))
		require.Equal(t, StateOpen, p.state(id))
		require.NoError(t, p.settle())
	}
	require.Equal(t, StateDone, p.state(id))
	require.NoError(t, p.w.Result(id))
	for i := range out {
		require.Equal(t, byte(10+10*(i%2)+i/2), out[i].Span.Bytes()[0])
	}
	s, err := p.w.Stamps(id)
	require.NoError(t, err)
	for i, v := range s {
		require.NotZero(t, v, "stamp %d", i)
	}
}

// TestFailsAtOnce: a ticket that has ended is another call's at once. The owner lets go of
// it first, which the race detector sees.
func TestFailsAtOnce(t *testing.T) {
	p := newPair(t, 1)
	x := bytesOf(t, 1, 8, 0)
	var over atomic.Bool
	done := make(chan struct{})
	go func() {
		defer close(done)
		for !over.Load() {
			p.w.Drain()
		}
	}()
	defer func() { over.Store(true); <-done }()
	for range 2000 {
		id, err := p.pushPull([]Tensor{x, x}, nil) // of the same key
		require.NoError(t, err)
		for p.state(id) != StateFailed {
			runtime.Gosched()
		}
		require.ErrorContains(t, p.w.Result(id), "same key")
	}
}

// TestBackPressure lets one operation through at a time.
func TestBackPressure(t *testing.T) {
	p := newPair(t, 1)
	p.to[0].room, p.from[0].room = 1, 1
	var ids []uint64
	for k := range uint64(5) {
		id, err := p.pushPull([]Tensor{bytesOf(t, 2*k, 50, byte(k)), bytesOf(t, 2*k+1, 60, byte(k))}, []Tensor{bytesOf(t, 0, 5, 0), bytesOf(t, 1, 5, 0)})
		require.NoError(t, err)
		ids = append(ids, id)
	}
	for k := range uint64(5) {
		require.NoError(t, p.settle())
		r := p.take(0)[0]
		require.Equal(t, 2*k, r.Push()[0].Key)
		require.Equal(t, byte(k), r.Push()[1].Span.Bytes()[59])
		require.NoError(t, p.respond(0, r, bytesOf(t, 0, 5, 1), bytesOf(t, 0, 5, 2)))
	}
	require.NoError(t, p.settle())
	for _, id := range ids {
		require.Equal(t, StateDone, p.state(id))
	}
}

// TestBeyondTwoGiB counts in 64 bits. The memory is mapped and never touched.
func TestBeyondTwoGiB(t *testing.T) {
	p := newPair(t, 1)
	p.copies = false
	const n = 5<<30 + 3
	x, out := bytesOf(t, 1, n, 0), bytesOf(t, 1, n, 0)
	id, err := p.pushPull([]Tensor{x}, []Tensor{out})
	require.NoError(t, err)
	require.NoError(t, p.settle())
	r := p.take(0)[0]
	require.EqualValues(t, n, r.Push()[0].Span.Len)
	require.EqualValues(t, n, r.Push()[0].Rows)
	require.EqualValues(t, n, r.PullBytes(0))
	require.NoError(t, p.respond(0, r, x))
	require.NoError(t, p.settle())
	require.Equal(t, StateDone, p.state(id))
	require.EqualValues(t, n, p.w.counters.BytesOut.Load())
}

// TestSecondTensorUnderAKey sends the second one's bytes, from its address.
func TestSecondTensorUnderAKey(t *testing.T) {
	p := newPair(t, 1)
	for v := range byte(4) {
		id, err := p.pushPull([]Tensor{bytesOf(t, 1, 8, v)}, []Tensor{bytesOf(t, 2, 8, 0)})
		require.NoError(t, err)
		require.NoError(t, p.settle())
		r := p.take(0)[0]
		require.Equal(t, v, r.Push()[0].Span.Bytes()[7])
		require.NoError(t, p.respond(0, r, bytesOf(t, 2, 8, v)))
		require.NoError(t, p.settle())
		require.Equal(t, StateDone, p.state(id))
	}
}

// TestGrownBufferStays keeps the memory of a tensor that is still looked at
// when its key's buffer grows, and gives it back afterwards. It was handed out twice: a thread
// that has not looked at the second tensor yet loses nothing when another releases the first.
func TestGrownBufferStays(t *testing.T) {
	p := newPair(t, 1)
	var old Received
	for fill := range byte(2) {
		p.push(fill, 4096)
		r := p.take(0)[0]
		old = r.Push()[0]
		require.NoError(t, p.respond(0, r))
		require.NoError(t, p.settle())
	}
	p.push(2, 40960)
	r := p.take(0)[0]
	require.NotEqual(t, old.Buffer, r.Push()[0].Buffer)
	require.Equal(t, old.Slot, r.Push()[0].Slot)
	require.Equal(t, byte(1), old.Span.Bytes()[4095], "still mapped")
	require.Equal(t, 2, p.buffers.Len())
	require.NoError(t, p.buffers.Release(old.Buffer, 1))
	require.Equal(t, byte(1), old.Span.Bytes()[4095], "still mapped")
	require.Error(t, p.buffers.Release(old.Buffer, 0))
	require.ErrorContains(t, p.buffers.Release(old.Buffer, 2), "is released 2 times, but 1 of its tensors are handed out")
	require.NoError(t, p.buffers.Release(old.Buffer, 1))
	require.Equal(t, 1, p.buffers.Len())
	require.Error(t, p.buffers.Release(old.Buffer, 1))
	require.Error(t, p.buffers.Release(12345, 1))
}

// TestBusyBufferStays: memory of a key that may still be written to is kept when a larger
// buffer takes its place, and is no other key's.
func TestBusyBufferStays(t *testing.T) {
	p := newPair(t, 1)
	push := func(n uint64) uint64 {
		p.push(1, n)
		r := p.take(0)[0]
		buffer := r.Push()[0].Buffer
		require.NoError(t, p.buffers.Release(buffer, 1))
		require.NoError(t, p.respond(0, r))
		require.NoError(t, p.settle())
		return buffer
	}
	first := push(100)
	p.sf[0].busy = true
	require.NotEqual(t, first, push(10000))
	require.Equal(t, 2, p.buffers.Len())
	p.servers[0].Over()
	require.NoError(t, p.servers[0].Close())
	require.Zero(t, p.buffers.Len())
}

func TestRegisteredBuffer(t *testing.T) {
	p := newPair(t, 1)
	own := bytesOf(t, 0, 128, 0)
	region := mem.Region{Addr: own.Span.Addr + 64, Len: 64, Dev: mem.CPU}
	require.NoError(t, p.servers[0].Fix([]Own{{0, 5, region}}))
	require.ErrorContains(t, p.servers[0].Fix([]Own{{0, 6, region}, {3, 5, region}}), "slice 1, key 5 of worker 3: this server has no such worker")
	require.ErrorContains(t, p.servers[0].Fix([]Own{{0, 6, region}, {0, 5, region}}), "has memory already")
	require.ErrorContains(t, p.servers[0].Fix([]Own{{0, 6, region}, {0, 6, region}}), "has memory already")
	require.NotContains(t, p.servers[0].fixed, fixedKey{0, 6}) // none of those that were refused
	id, err := p.pushPull([]Tensor{bytesOf(t, 5, 64, 9)}, nil)
	require.NoError(t, err)
	require.NoError(t, p.settle())
	r := p.take(0)[0]
	require.Equal(t, mem.Span{Addr: region.Addr, Len: 64}, r.Push()[0].Span)
	require.Zero(t, r.Push()[0].Buffer)
	require.Equal(t, byte(9), own.Span.Bytes()[64])
	require.Equal(t, byte(0), own.Span.Bytes()[63])
	require.NoError(t, p.respond(0, r))
	require.NoError(t, p.settle())
	require.Equal(t, StateDone, p.state(id))
	require.ErrorContains(t, p.servers[0].Fix([]Own{{0, 5, region}}), "pushed already")

	// One that does not fit is an error of that push_pull alone.
	id, err = p.pushPull([]Tensor{bytesOf(t, 5, 65, 9)}, nil)
	require.NoError(t, err)
	next, err := p.pushPull([]Tensor{bytesOf(t, 6, 8, 9)}, nil)
	require.NoError(t, err)
	require.NoError(t, p.settle())
	require.Equal(t, StateFailed, p.state(id))
	require.ErrorContains(t, p.w.Result(id), "65 bytes for key 5")
	require.NoError(t, p.respond(0, p.take(0)[0]))
	require.NoError(t, p.settle())
	require.Equal(t, StateDone, p.state(next))
}

func TestArguments(t *testing.T) {
	p := newPair(t, 2)
	x := bytesOf(t, 1, 8, 0)
	deep := x
	deep.Dims = make([]int64, wire.MaxDims+1)
	negative := x
	negative.Dims = []int64{-1}
	vast := x
	vast.Dims = []int64{wire.MaxSize + 1}
	outside := x
	outside.Span.Len = 1 << 20
	var shape *ShapeError
	for _, c := range []struct {
		push, pull []Tensor
		text       string
	}{
		{nil, nil, "no tensors at all"},
		{[]Tensor{x}, []Tensor{x}, "1 pull tensors for 2 servers"},
		{[]Tensor{deep}, nil, "65 dimensions"},
		{[]Tensor{negative}, nil, "dimension -1"},
		{[]Tensor{vast}, nil, "dimension 4611686018427387905 (dimensions are 0 to 2^62)"},
		{[]Tensor{outside}, nil, "not inside its allocation"},
		{make([]Tensor, wire.MaxTensors+1), nil, "more than 4096 push tensors"},
	} {
		_, err := p.pushPull(c.push, c.pull)
		require.ErrorAs(t, err, &shape)
		require.ErrorContains(t, err, c.text)
	}
	id, err := p.pushPull([]Tensor{x, x}, nil)
	require.NoError(t, err)
	require.NoError(t, p.settle())
	require.Equal(t, StateFailed, p.state(id))
	require.ErrorContains(t, p.w.Result(id), "push tensors 0 and 1 have the same key 1")
}

func TestRespondErrors(t *testing.T) {
	p := newPair(t, 1)
	id, err := p.pushPull([]Tensor{bytesOf(t, 1, 8, 0)}, []Tensor{bytesOf(t, 1, 16, 0)})
	require.NoError(t, err)
	require.NoError(t, p.settle())
	r := p.take(0)[0]
	h := r.Handler()
	require.ErrorContains(t, p.respond(0, r), "0 tensors, want 1")
	require.ErrorContains(t, p.respond(0, r, bytesOf(t, 0, 15, 0)), "15 bytes, want 16")
	require.NoError(t, p.respond(0, r, bytesOf(t, 0, 16, 0)))
	require.ErrorContains(t, p.respond(0, r, bytesOf(t, 0, 16, 0)), "no such request")
	require.NoError(t, p.settle())
	require.Equal(t, StateDone, p.state(id))
	bad, err := p.servers[0].Begin()
	require.NoError(t, err)
	require.ErrorContains(t, p.servers[0].Respond(h, bad), "no such request", "answered, and its place is free")
}

// TestAnswerOfAnotherType asks under one key for a type, for another and for any.
func TestAnswerOfAnotherType(t *testing.T) {
	p := newPair(t, 1)
	of := func(dtype uint8) Tensor {
		x := bytesOf(t, 1, 16, 0)
		x.DType = dtype
		return x
	}
	for _, c := range []struct {
		want  uint8
		wrong []uint8
		right uint8
	}{
		{6, []uint8{3, 0}, 6},
		{3, []uint8{6}, 3},
		{6, []uint8{3}, wire.AnyType},
		{wire.AnyType, nil, 3},
		{wire.AnyType, nil, wire.AnyType},
	} {
		id, err := p.pushPull(nil, []Tensor{of(5), of(c.want)})
		require.NoError(t, err)
		require.NoError(t, p.settle())
		r := p.take(0)[0]
		for _, wrong := range c.wrong {
			var types *TypeError
			err := p.respond(0, r, of(5), of(wrong))
			require.ErrorAs(t, err, &types)
			require.Equal(t, [2]uint8{wrong, c.want}, [2]uint8{types.Got, types.Want})
			require.EqualError(t, err, fmt.Sprintf("exchange: respond to worker 0: tensor 1 is of type %d, want %d as in the pull tensor of the request", wrong, c.want))
		}
		require.NoError(t, p.respond(0, r, of(5), of(c.right)))
		require.NoError(t, p.settle())
		require.Equal(t, StateDone, p.state(id))
	}
}

// TestManyTickets leaves some under way for ever and goes on around them.
func TestManyTickets(t *testing.T) {
	p := newPair(t, 1)
	held, err := p.pushPull([]Tensor{bytesOf(t, 99, 8, 0)}, nil)
	require.NoError(t, err)
	require.NoError(t, p.settle())
	p.take(0)
	x := bytesOf(t, 1, 8, 0)
	var id uint64
	for range 3 * Window {
		id, err = p.pushPull([]Tensor{x}, nil)
		require.NoError(t, err)
		require.NotEqual(t, held%Window, id%Window)
		require.NoError(t, p.settle())
		require.NoError(t, p.respond(0, p.take(0)[0]))
		require.NoError(t, p.settle())
	}
	require.Equal(t, StateDone, p.state(id))
	require.Equal(t, StateOpen, p.state(held))
	require.ErrorIs(t, p.w.Result(id-Window-2), ErrNoTicket)

	// All places taken: an error, not a hang and not a lost ticket.
	for range Window - 1 {
		_, err := p.w.Begin()
		require.NoError(t, err)
	}
	_, err = p.w.Begin()
	require.ErrorIs(t, err, ErrFull)
}

// TestTemporaryRegistration drops what is registered for one call only.
func TestRegistrations(t *testing.T) {
	p := newPair(t, 1)
	do := func(out Tensor) {
		_, err := p.pushPull(nil, []Tensor{out})
		require.NoError(t, err)
		require.NoError(t, p.settle())
		require.NoError(t, p.respond(0, p.take(0)[0], bytesOf(t, 0, out.Span.Len, 3)))
		require.NoError(t, p.settle())
		require.Equal(t, byte(3), out.Span.Bytes()[0])
	}
	once := bytesOf(t, 1, 8, 0)
	once.Alloc = 0
	do(once)
	require.Empty(t, p.wf.keys)
	kept := bytesOf(t, 1, 8, 0)
	do(kept)
	do(kept)
	require.Len(t, p.wf.keys, 1)
	resized := kept
	resized.Base.Len--
	resized.Span.Len = 7
	do(resized)
	require.Len(t, p.wf.keys, 1)
	p.w.Forget(kept.Alloc)
	require.NoError(t, p.settle())
	require.Empty(t, p.wf.keys)
}

// TestPeerDown ends what waits for a peer in every state of it.
func TestPeerDown(t *testing.T) {
	gone := errors.New("gone")
	for _, stage := range []string{"not sent", "waiting for a buffer", "sent", "partly sent", "delivered"} {
		t.Run(stage, func(t *testing.T) {
			p := newPair(t, 1)
			switch stage {
			case "not sent":
				p.to[0].room = 0
			case "partly sent":
				_, err := p.pushPull([]Tensor{bytesOf(t, 1, 8, 0), bytesOf(t, 2, 8, 0)}, nil)
				require.NoError(t, err)
				require.NoError(t, p.settle())
				require.NoError(t, p.respond(0, p.take(0)[0]))
				require.NoError(t, p.settle())
				p.to[0].room = 1
			}
			id, err := p.pushPull([]Tensor{bytesOf(t, 1, 8, 0), bytesOf(t, 2, 8, 0)}, []Tensor{bytesOf(t, 3, 8, 0)})
			require.NoError(t, err)
			behind, err := p.pushPull([]Tensor{bytesOf(t, 1, 8, 0)}, nil)
			require.NoError(t, err)
			var r *Request
			switch stage {
			case "sent", "delivered":
				require.NoError(t, p.settle())
				if stage == "delivered" {
					r = p.take(0)[0]
				}
			default:
				p.w.Drain()
			}
			for _, o := range p.to[0].ops {
				p.w.Done(o.User, gone)
			}
			p.to[0].dead = gone
			p.w.Down(0, gone)
			p.w.Down(0, errors.New("again"))
			p.servers[0].Down(0, gone)
			state, _ := p.w.State(id)
			require.Equal(t, StateFailing, state, "the server may still write its answer")
			require.Equal(t, StateFailed, p.state(id))
			require.Equal(t, StateFailed, p.state(behind))
			require.ErrorIs(t, p.w.Result(id), gone)
			_, err = p.servers[0].Batch(1)
			require.ErrorIs(t, err, gone)
			if r != nil {
				require.ErrorIs(t, p.respond(0, r, bytesOf(t, 0, 8, 0)), gone)
			}
			id, err = p.pushPull([]Tensor{bytesOf(t, 1, 8, 0)}, nil)
			require.NoError(t, err)
			p.w.Drain()
			require.Equal(t, StateFailed, p.state(id))
		})
	}
}

// TestBreaches are frames and writes that no honest peer sends: each is an
// error, and none touches the state of others.
func TestBreaches(t *testing.T) {
	p := newPair(t, 1)
	s, w := p.servers[0], p.w
	id, err := p.pushPull([]Tensor{bytesOf(t, 1, 8, 0)}, []Tensor{bytesOf(t, 1, 8, 0)})
	require.NoError(t, err)
	require.NoError(t, p.settle())

	plan := wire.Append(nil, wire.TypePlan, &wire.Plan{Number: wire.MaxPlans})
	for what, frame := range map[string][]byte{
		"empty":             {},
		"a worker's":        wire.AppendResponse(nil, &wire.Response{}),
		"plan number":       plan,
		"unknown plan":      wire.AppendRequest(nil, &wire.Request{Seq: 9, Plan: 77}),
		"counts":            wire.AppendRequest(nil, &wire.Request{Seq: 9, Plan: 0}),
		"more than granted": wire.AppendRequest(nil, &wire.Request{Seq: 9, Plan: 0, Push: []wire.Pushed{{Rows: 1, Bytes: 1 << 40}}, Pull: []wire.Target{{}}}),
		"larger, untaken":   wire.Append(nil, wire.TypeNeed, &wire.Needs{{Key: 1, Bytes: 5000}}),
		"cut short":         wire.Append(nil, wire.TypeNeed, &wire.Needs{{Key: 1, Bytes: 1}})[:5],
	} {
		require.Error(t, s.Frame(0, frame), what)
	}
	for what, frame := range map[string][]byte{
		"empty":            {},
		"a server's":       wire.Append(nil, wire.TypeNeed, &wire.Needs{}),
		"unknown ticket":   wire.AppendResponse(nil, &wire.Response{Seq: id + 1}),
		"unasked buffers":  wire.Append(nil, wire.TypeBuffers, &wire.Buffers{}),
		"garbage response": {byte(wire.TypeResponse), 1, 2},
	} {
		require.Error(t, w.Frame(0, frame), what)
	}

	// An absurd need is refused to the one who asks.
	require.NoError(t, s.Frame(0, wire.Append(nil, wire.TypeNeed, &wire.Needs{{Key: 3, Bytes: 1 << 60}})))
	s.Drain()
	last := p.from[0].ops[len(p.from[0].ops)-1]
	v, err := wire.Parse[wire.Buffers](last.Frame, wire.TypeBuffers)
	require.NoError(t, err)
	require.Contains(t, v.Reason, "is too large")
	p.from[0].ops = nil

	require.NoError(t, p.respond(0, p.take(0)[0], bytesOf(t, 0, 8, 1)))
	require.NoError(t, p.settle())
	require.Equal(t, StateDone, p.state(id))
	require.Error(t, w.Frame(0, wire.AppendResponse(nil, &wire.Response{Seq: id})), "a second answer")
}

func TestLeft(t *testing.T) {
	p := newPair(t, 1)
	_, err := p.pushPull([]Tensor{bytesOf(t, 1, 8, 5)}, nil)
	require.NoError(t, err)
	require.NoError(t, p.settle())
	p.servers[0].Left(0, errGone)
	require.Len(t, p.take(0), 1, "what was sent before the goodbye is served")
	require.True(t, p.servers[0].Ready(1))
	_, err = p.servers[0].Batch(1)
	require.ErrorIs(t, err, ErrLeft)
}

func TestNewTable(t *testing.T) {
	w, err := NewWorker(1, new(trace.Counters), inline)
	require.NoError(t, err)
	require.EqualValues(t, (Window+1)*8, w.Words().Len)
	w.Shut(errors.New("over"))
	_, err = w.Begin()
	require.ErrorContains(t, err, "over")
	_, ok := w.State(0)
	require.False(t, ok)
	require.ErrorIs(t, w.Result(0), ErrNoTicket)
	require.NoError(t, w.Free())
}
