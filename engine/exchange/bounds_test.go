package exchange

import (
	"errors"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/trace"
	"fserver/engine/transport"
	"fserver/engine/wire"
)

// many is so many tensors without bytes, of the dimensions given.
func many(t *testing.T, n int, dims ...int64) []Tensor {
	x := bytesOf(t, 0, 0, 0)
	all := make([]Tensor, n)
	for i := range all {
		all[i] = x
		all[i].Key, all[i].Dims = uint64(i), dims
	}
	return all
}

// TestPlanTooLarge is refused at once, and leaves nothing.
func TestPlanTooLarge(t *testing.T) {
	p := newPair(t, 2)
	huge := append([]int64{0}, slices.Repeat([]int64{wire.MaxSize}, wire.MaxDims-1)...)
	_, err := p.pushPull(many(t, wire.MaxTensors, huge...), nil)
	var shape *ShapeError
	require.ErrorAs(t, err, &shape)
	require.ErrorContains(t, err, "the description of 4096 push and 0 pull tensors takes 23")
	require.ErrorContains(t, err, "a frame has at most 1048576")
	require.Empty(t, p.w.plans)

	// The largest that is taken makes a frame, and the next one not.
	most := (transport.MaxFrame - 32) / (10 + 9*(wire.MaxDims-1))
	_, err = p.pushPull(many(t, most+1, huge...), nil)
	require.ErrorAs(t, err, &shape)
	id, err := p.pushPull(many(t, most, huge...), many(t, 2))
	require.NoError(t, err)
	p.w.Drain()
	require.LessOrEqual(t, len(p.to[0].ops[0].Frame), transport.MaxFrame)
	require.Greater(t, len(p.to[0].ops[0].Frame), transport.MaxFrame-1024)
	require.NoError(t, p.settle())
	for i := range p.servers {
		require.NoError(t, p.respond(i, p.take(i)[0], many(t, 1)...))
	}
	require.NoError(t, p.settle())
	require.Equal(t, StateDone, p.state(id))
}

// TestKeysTooLarge: pull tensors whose keys need more than a frame are refused, when they
// are registered for the first server or for one that has come back, and let go of.
func TestKeysTooLarge(t *testing.T) {
	p := newPair(t, 1)
	p.w.Patient = true
	x := bytesOf(t, 0, 8, 0)
	x.Alloc = 0
	pulls := slices.Repeat([]Tensor{x}, 1000)
	p.wf.blob = strings.Repeat("b", 4096)
	_, err := p.pushPull(nil, pulls)
	var shape *ShapeError
	require.ErrorAs(t, err, &shape)
	require.ErrorContains(t, err, "the keys of 1000 pull tensors take 4096000 bytes")
	require.Empty(t, p.wf.keys)

	p.wf.blob = ""
	id, err := p.pushPull(nil, pulls)
	require.NoError(t, err)
	require.NoError(t, p.settle())
	p.wf.blob = strings.Repeat("b", 4096)
	drain(p.to[0], p.w.Done)
	p.w.Lose(0, errGone)
	p.succeed(0)
	require.NoError(t, p.settle())
	p.shapeFails(id, "the keys of 1000 pull tensors take 4096000 bytes")
	require.Empty(t, p.wf.keys)
	p.answer(p.push(1, 8), 1)
}

// TestBuffersTooLarge: receive buffers whose keys need more than a frame are refused.
func TestBuffersTooLarge(t *testing.T) {
	p := newPair(t, 1)
	p.sf[0].blob = strings.Repeat("b", 4096)
	p.answer(p.push(1, 4096), 1)
	p.shapeFails(p.push(1, slices.Repeat([]uint64{5000}, 300)...), "300 receive buffers need 12")
	require.Len(t, p.sf[0].keys, 1)
	p.answer(p.push(2, 4096), 2)
}

// TestLargestRequest: with all keys as large as they may be, a request is a frame.
func TestLargestRequest(t *testing.T) {
	q := &wire.Request{Seq: math.MaxUint64, Plan: wire.MaxPlans - 1}
	for range wire.MaxTensors {
		q.Push = append(q.Push, wire.Pushed{Rows: wire.MaxSize, Bytes: wire.MaxSize})
		q.Pull = append(q.Pull, wire.Target{Bytes: wire.MaxSize, Changed: true, Region: wire.Key{ID: 1, Token: 1, Blob: strings.Repeat("b", maxBlobs/wire.MaxTensors)}, Off: math.MaxUint64})
	}
	require.LessOrEqual(t, len(wire.AppendRequest(nil, q)), transport.MaxFrame)
	all := make([]uint64, wire.MaxRecalls)
	require.LessOrEqual(t, len(wire.Append(nil, wire.TypeRecall, (*wire.Seqs)(&all))), transport.MaxFrame)
	needs := slices.Repeat([]wire.Need{{Key: 1, Bytes: wire.MaxSize}}, wire.MaxTensors)
	require.LessOrEqual(t, len(wire.Append(nil, wire.TypeNeed, (*wire.Needs)(&needs))), transport.MaxFrame)
}

// TestNoRequestIsFreedTwice has a worker send requests again and again under one number, take
// them back more than once, be refused, break the protocol and be lost in between. Each request
// is freed once.
func TestNoRequestIsFreedTwice(t *testing.T) {
	p := newPair(t, 1)
	s := p.servers[0]
	s.elements = Elements{4}
	lost := errors.New("the worker is gone")
	plan := wire.Append(nil, wire.TypePlan, &wire.Plan{Push: []wire.PlanTensor{{Key: 1, NDim: 1}}})
	need := wire.Append(nil, wire.TypeNeed, &wire.Needs{{Key: 1, Bytes: 8}})
	request := func(bytes uint64) []byte {
		return wire.AppendRequest(nil, &wire.Request{Seq: 5, Push: []wire.Pushed{{Rows: 2, Bytes: bytes}}})
	}
	recall := wire.Append(nil, wire.TypeRecall, &wire.Seqs{5, 5, 6})
	for _, frames := range [][][]byte{
		{request(8), request(8), recall, recall},
		{request(8), request(1 << 40)},                 // more than was granted
		{request(7), recall, request(7)},               // refused
		{recall, request(8), recall, request(8)},       // one stays
		{request(8), {byte(wire.TypeRequest)}, recall}, // a frame that breaks off
		{request(8), wire.Append(nil, wire.TypeRegroup, &wire.Regroup{Runs: 1, Back: true}), recall},
	} {
		p.from[0].room = 0 // the worker takes nothing
		for _, b := range append([][]byte{plan, need}, frames...) {
			if s.Frame(0, b) != nil {
				break
			}
			s.Drain()
		}
		s.Lose(0, lost)
		require.Len(t, s.requests.free, len(s.requests.all))
		seen := map[*Request]bool{}
		for _, r := range s.requests.free {
			require.False(t, seen[r], "a request was freed twice")
			seen[r] = true
		}
		p.from[0] = &wireConn{room: 1000}
		s.Up(0, 0, p.sf[0], p.from[0])
	}
}

// TestRecallsAreBounded: a worker that reads nothing, and sends requests and takes them back again and again, breaks the protocol.
func TestRecallsAreBounded(t *testing.T) {
	p := newPair(t, 1)
	s := p.servers[0]
	s.elements = Elements{4}
	require.NoError(t, s.Frame(0, wire.Append(nil, wire.TypePlan, &wire.Plan{Push: []wire.PlanTensor{{Key: 1, NDim: 1}}})))
	require.NoError(t, s.Frame(0, wire.Append(nil, wire.TypeNeed, &wire.Needs{{Key: 1, Bytes: 8}})))
	s.Drain()
	p.from[0].room = 0 // the worker reads nothing
	request := wire.AppendRequest(nil, &wire.Request{Seq: 5, Push: []wire.Pushed{{Rows: 2, Bytes: 8}}})
	recall := wire.Append(nil, wire.TypeRecall, &wire.Seqs{5})
	var err error
	taken := 0
	for ; err == nil && taken <= 2*Window; taken++ {
		if err = s.Frame(0, request); err == nil {
			require.NoError(t, s.Frame(0, recall))
		}
	}
	require.ErrorContains(t, err, "more than 4096 requests that are not answered yet")
	require.LessOrEqual(t, taken, Window+2)
	require.LessOrEqual(t, len(s.clients[0].recalled), Window)
}

// TestPlansOfChannelsHaveTheirNumbers makes more plans of both kinds than are known at a time.
func TestPlansOfChannelsHaveTheirNumbers(t *testing.T) {
	p := newPair(t, 1)
	for i := range uint64(2 * planShare) {
		p.through("", i, 8, 1)
		p.through("a", wire.MaxPlans+i, 8, 1)
		p.w.Drain()
		batch, channel := p.w.numbers[ofBatches], p.w.numbers[ofChannels]
		at := i % planShare
		require.Equal(t, i+1 >= planShare, batch[(at+1)%planShare] != nil)
		require.Equal(t, at, batch[at].number)
		require.Empty(t, batch[at].on)
		require.Equal(t, planShare+at, channel[at].number)
		require.Equal(t, "a", channel[at].on)
	}
}

// TestBeforeUp: a worker that the server has not answered yet breaks the protocol with any frame.
func TestBeforeUp(t *testing.T) {
	s, err := NewServer(2, NewBuffers(), new(trace.Counters), inline)
	require.NoError(t, err)
	t.Cleanup(func() { s.Over(); require.NoError(t, s.Close()); require.NoError(t, s.Free()) })
	for name, frame := range map[string][]byte{
		"regroup": wire.Append(nil, wire.TypeRegroup, &wire.Regroup{Runs: 1, Back: true}),
		"need":    wire.Append(nil, wire.TypeNeed, &wire.Needs{{Key: 1, Bytes: 8}}),
	} {
		require.ErrorContains(t, s.Frame(1, frame), "more than an Up", name)
	}
}
