package exchange

import (
	"errors"
	"fmt"
	"math"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/trace"
	"fserver/engine/wire"
)

// failIt has the application of server i refuse a request.
func (p *pair) failIt(i int, handler uint64, text string) error {
	t, err := p.servers[i].Begin()
	require.NoError(p.t, err)
	return p.servers[i].Fail(handler, t, text)
}

// refusedWith checks that the application of the server of a rank has refused a push_pull.
func (p *pair) refusedWith(id uint64, rank int, text string) {
	p.t.Helper()
	var refused *RefusedError
	require.ErrorAs(p.t, p.w.Result(id), &refused)
	require.Equal(p.t, RefusedError{rank, text}, *refused)
}

// TestFail ends a request with the text of the server's application, and nothing else.
func TestFail(t *testing.T) {
	p := newPair(t, 1)
	for _, c := range []struct{ text, want string }{
		{"expert 3 is not loaded", "expert 3 is not loaded"},
		{"", ""},
		{strings.Repeat("ä", 4000), strings.Repeat("ä", wire.MaxRefusal/2)},
	} {
		out := bytesOf(t, 0, 8, 7)
		id, err := p.pushPull([]Tensor{bytesOf(t, 1, 8, 1)}, []Tensor{out})
		require.NoError(t, err)
		behind, err := p.pushPull([]Tensor{bytesOf(t, 1, 16, 2)}, []Tensor{out}) // waits for the key
		require.NoError(t, err)
		require.NoError(t, p.settle())
		r := p.take(0)[0]
		h := r.Handler()
		require.NoError(t, p.failIt(0, h, c.text))
		require.ErrorContains(t, p.failIt(0, h, "again"), fmt.Sprintf("fail handler %d: no such request", h))
		require.NoError(t, p.settle())
		require.Equal(t, StateFailed, p.state(id))
		p.refusedWith(id, 10, c.want)
		require.Contains(t, p.w.Result(id).Error(), "server 10 refused the request")
		require.Equal(t, byte(7), out.Span.Bytes()[0])
		r = p.take(0)[0]
		require.NoError(t, p.respond(0, r, bytesOf(t, 0, 8, 3)))
		require.NoError(t, p.settle())
		require.Equal(t, StateDone, p.state(behind))
		require.Zero(t, p.servers[0].clients[0].count)
	}
	require.ErrorContains(t, p.failIt(0, 12345, "nobody"), "fail handler 12345: no such request")
}

// TestFailByOneServer: the other one's part is taken back, or answered.
func TestFailByOneServer(t *testing.T) {
	for _, delivered := range []bool{false, true} {
		p := newPair(t, 2)
		id := p.push(1, 8)
		var r *Request
		if delivered {
			r = p.take(0)[0]
		}
		require.NoError(t, p.failIt(1, p.take(1)[0].Handler(), "no"))
		require.NoError(t, p.settle())
		p.refusedWith(id, 11, "no")
		if delivered {
			require.Equal(t, StateFailing, p.state(id))
			require.NoError(t, p.failIt(0, r.Handler(), "not I either"))
			require.NoError(t, p.settle())
			p.refusedWith(id, 11, "no")
		}
		require.Equal(t, StateFailed, p.state(id))
		require.Nil(t, p.take(0))
		next := p.push(2, 8)
		require.NoError(t, p.respond(1, p.take(1)[0]))
		p.answer(next, 2)
	}
}

// TestFailForTheLost is told to nobody.
func TestFailForTheLost(t *testing.T) {
	p := newPair(t, 1)
	p.push(1, 8)
	h := p.take(0)[0].Handler()
	p.servers[0].Lose(0, errGone)
	require.ErrorIs(t, p.failIt(0, h, "no"), errGone)
	require.ErrorContains(t, p.failIt(0, h, "no"), "no such request")
}

// TestRefusedBreaches are refusals that no honest server sends.
func TestRefusedBreaches(t *testing.T) {
	p := newPair(t, 1)
	id := p.push(1, 8)
	refusal := func(seq uint64) []byte { return wire.Append(nil, wire.TypeRefused, &wire.Refused{Seq: seq}) }
	require.Error(t, p.w.Frame(0, refusal(id+1)))
	require.Error(t, p.w.Frame(0, refusal(id)[:5]))
	p.answer(id, 1)
	require.Error(t, p.w.Frame(0, refusal(id)))
}

// elements are those of a library with three types.
var elements = Elements{1, 0, 4, 8}

// TestUnfit pushes what the server cannot hold. It is refused to the worker, and is in no
// batch.
func TestUnfit(t *testing.T) {
	const huge = 1 << 40
	for name, c := range map[string]struct {
		dtype uint8
		bytes uint64
		dims  []int64
		text  string
	}{
		"unknown type":      {99, 16, []int64{4}, "push tensor 1, of key 2, has dtype 99"},
		"type of no size":   {1, 16, []int64{16}, "has dtype 1, which"},
		"first unknown":     {4, 16, []int64{4}, "has dtype 4, which"},
		"too many bytes":    {2, 16, []int64{3}, "has 16 bytes, which is not what dtype 2 and shape [3] make"},
		"no bytes":          {2, 0, []int64{3}, "has 0 bytes"},
		"no rows":           {2, 4, []int64{0}, "has 4 bytes"},
		"no rows, of tails": {2, 4, []int64{0, 3}, "shape [0 3]"},
		"too few bytes":     {3, 16, []int64{3}, "has 16 bytes"},
		"no dimension":      {2, 8, nil, "shape []"},
		"overflow of rows":  {2, 16, []int64{1 << 62}, "shape [4611686018427387904]"},
		"overflow to 0":     {3, 0, []int64{1 << 61}, "has 0 bytes"},
		"overflow of tails": {2, 16, []int64{huge, huge}, "shape [1099511627776 1099511627776]"},
		"and of one row":    {2, 16, []int64{1, huge, huge}, "shape [1 1099511627776 1099511627776]"},
		"many dimensions":   {2, 3, make([]int64, 64), "and 56 more dimensions"},
	} {
		for _, lent := range []bool{false, true} {
			t.Run(fmt.Sprint(name, " lent ", lent), func(t *testing.T) {
				p := strict(t)
				p.to[0].lend = lent
				odd := bytesOf(t, 2, 4096, 5)
				if lent {
					odd = sharedOf(t, 2, 4096, 5)
				}
				odd.Span.Len, odd.DType, odd.Dims = c.bytes, c.dtype, c.dims
				for range 2 {
					refused, err := p.pushPull([]Tensor{bytesOf(t, 1, 8, 6), odd}, nil)
					require.NoError(t, err)
					good := p.push(7, 4096, 100)
					require.NoError(t, p.settle())
					p.shapeFails(refused, "server 10 cannot take the push_pull: ")
					p.shapeFails(refused, c.text)
					p.answer(good, 7)
					require.Nil(t, p.take(0))
					require.Zero(t, p.servers[0].clients[0].count)
					require.Zero(t, views(t))
				}
			})
		}
	}
}

// strict is a pair whose server holds elements.
func strict(t *testing.T) *pair {
	p := newPair(t, 1)
	p.buffers.Hold(elements)
	s, err := NewServer(1, p.buffers, new(trace.Counters), inline)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()); require.NoError(t, s.Free()) })
	s.Up(0, 0, p.sf[0], p.from[0])
	p.servers[0] = s
	return p
}

// TestFits takes all that the server can hold.
func TestFits(t *testing.T) {
	p := strict(t)
	for _, c := range []struct {
		dtype uint8
		bytes uint64
		dims  []int64
	}{
		{2, 4, nil}, {2, 12, []int64{3}}, {0, 6, []int64{2, 3}}, {3, 0, []int64{0}}, {3, 0, []int64{5, 0}},
		{2, 0, []int64{0, 1 << 40, 1 << 40}}, {2, 0, []int64{3, 0, 1 << 62}}, {2, 4, []int64{1, 1, 1}},
	} {
		x := bytesOf(t, 1, 64, 5)
		x.Span.Len, x.DType, x.Dims = c.bytes, c.dtype, c.dims
		id, err := p.pushPull([]Tensor{x}, nil)
		require.NoError(t, err)
		require.NoError(t, p.settle())
		require.NoError(t, p.respond(0, p.take(0)[0]))
		require.NoError(t, p.settle())
		require.Equal(t, StateDone, p.state(id), c)
	}
	n, ok := Elements{8}.row(&wire.PlanTensor{NDim: 2, Tail: []int64{1 << 60}})
	require.True(t, ok)
	require.EqualValues(t, uint64(math.MaxUint64), n, "more than an int64")
}

// TestUnfitAndLost: what was refused and not told goes with its worker.
func TestUnfitAndLost(t *testing.T) {
	p := strict(t)
	p.from[0].room = 0
	for k := range uint64(3) {
		x := bytesOf(t, k, 0, 0)
		x.DType = 99
		_, err := p.pushPull([]Tensor{x}, nil)
		require.NoError(t, err)
	}
	require.NoError(t, p.settle())
	s := p.servers[0]
	require.Equal(t, 2, s.clients[0].replies.len(), "and one is on its way")
	s.Lose(0, errGone)
	require.Zero(t, s.clients[0].count)
	require.Len(t, s.requests.free, len(s.requests.all))
}

// TestWrongAnswersAndDetach has answers refused while their channel closes: the requests go
// back to their worker all the same.
func TestWrongAnswersAndDetach(t *testing.T) {
	p := newPair(t, 1)
	s := p.servers[0]
	x := bytesOf(t, 1, 8, 1)
	for range 300 {
		s.Attach("a")
		tk, err := p.w.Begin()
		require.NoError(t, err)
		require.NoError(t, tk.AddPush(x))
		tk.Through("a")
		id := tk.ID()
		require.NoError(t, p.w.Submit(tk))
		require.NoError(t, p.settle())
		h := s.Take("a")[0].Handler()
		s.Deliver()
		began, stop, done := make(chan bool), make(chan bool), make(chan error)
		go func() {
			close(began)
			for {
				select {
				case <-stop:
					close(done)
					return
				default:
				}
				wrong, err := s.Begin()
				if err == nil {
					err = wrong.AddPush(x)
				}
				if err == nil && s.Respond(h, wrong) == nil {
					err = errors.New("a wrong answer was taken")
				}
				if err != nil {
					done <- err
					return
				}
			}
		}()
		<-began
		runtime.Gosched()
		s.Detach("a")
		p.w.ChannelOver(0, "a")
		require.NoError(t, p.settle())
		close(stop)
		require.NoError(t, <-done)
		require.NoError(t, p.settle())
		require.Equal(t, StateFailed, p.state(id))
		require.Zero(t, s.clients[0].count)
	}
}
