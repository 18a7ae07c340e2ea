package exchange

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/mem"
)

// counted is memory that says how often it was used.
type counted struct {
	CPU
	n *int
}

func (c counted) Alloc(n uint64) (mem.Region, error) {
	*c.n++
	return c.CPU.Alloc(n)
}

// TestChannelRequests sends push_pulls through a channel and beside it. Those
// through it are received in memory of the CPU, whatever the others are.
func TestChannelRequests(t *testing.T) {
	p := newPair(t, 1)
	s := p.servers[0]
	elsewhere := 0
	s.ReceiveIn(counted{n: &elsewhere})
	at := s.Attach("a")
	push := func(ch string, key uint64, fill byte) (uint64, Tensor) { return p.through(ch, key, 100, fill) }
	for turn := range 3 {
		on, y := push("a", 1, 7)
		beside, z := push("", 2, 9)
		require.NoError(t, p.settle())
		require.True(t, at.Full())
		r := s.Take("a")[0]
		require.EqualValues(t, 7, r.Push()[0].Span.Bytes()[99])
		s.Deliver()
		require.False(t, at.Full())
		require.Nil(t, s.Take("a"))
		q := p.take(0)
		require.Len(t, q, 1)
		require.EqualValues(t, 9, q[0].Push()[0].Span.Bytes()[0])
		require.NoError(t, p.respond(0, q[0], bytesOf(t, 0, 100, 3)))
		require.NoError(t, p.respond(0, r, bytesOf(t, 0, 100, 4)))
		require.NoError(t, p.settle())
		require.Equal(t, StateDone, p.state(on), turn)
		require.Equal(t, StateDone, p.state(beside), turn)
		require.EqualValues(t, 4, y.Span.Bytes()[50])
		require.EqualValues(t, 3, z.Span.Bytes()[50])
		require.Equal(t, 1, elsewhere)
	}
	// What a closed channel has not answered, taken or not, goes back to its worker and does
	// not hold its key, whoever closes first.
	for turn := range 4 {
		on, _ := push("a", 1, 7)
		require.NoError(t, p.settle())
		if turn%2 == 0 {
			require.Len(t, s.Take("a"), 1)
			s.Deliver()
		}
		if turn < 2 {
			s.Detach("a")
			p.w.ChannelOver(0, "a")
		} else {
			p.w.ChannelOver(0, "a")
			require.NoError(t, p.settle())
			s.Detach("a")
		}
		require.NoError(t, p.settle())
		require.Equal(t, StateFailed, p.state(on), turn)
		require.True(t, IsOver(p.w.Result(on)), turn)
		require.Zero(t, s.clients[0].count)
		beside, _ := push("", 1, 9) // with the same key
		require.NoError(t, p.settle())
		q := p.take(0)
		require.Len(t, q, 1)
		require.NoError(t, p.respond(0, q[0], bytesOf(t, 0, 100, 3)))
		require.NoError(t, p.settle())
		require.Equal(t, StateDone, p.state(beside), turn)
		at = s.Attach("a")
	}
	// So is what the worker sent to an earlier channel of the name, before it opens this one.
	at.Heard = func(int) bool { return false }
	early, _ := push("a", 1, 1)
	require.NoError(t, p.settle())
	require.True(t, IsOver(p.w.Result(early)))
	require.Nil(t, s.Take("a"))
	at.Heard = func(int) bool { return true }
	_, _ = push("a", 1, 1)
	require.NoError(t, p.settle())
	require.Len(t, s.Take("a"), 1)
	s.Detach("a")
	require.NoError(t, p.settle())
	at = s.Attach("a")
	// What comes for a channel that is closed is refused at once. The loss of a worker that has not
	// read that frees it.
	s.Detach("a")
	require.False(t, at.Full())
	on, _ := push("a", 1, 1)
	require.NoError(t, p.settle())
	require.Equal(t, StateFailed, p.state(on))
	require.ErrorContains(t, p.w.Result(on), `channel "a": peer 0 has closed its side`)
	require.True(t, IsOver(p.w.Result(on)))
	p.from[0].room = 0
	for range 3 {
		_, _ = push("a", 1, 1)
		require.NoError(t, p.settle())
	}
	s.Lose(0, errGone)
	require.Zero(t, s.clients[0].count)
	require.Len(t, s.requests.free, len(s.requests.all))
}

// TestSends: the news that a channel is closed waits for what is still to be sent through it.
func TestSends(t *testing.T) {
	p := newPair(t, 1)
	at := p.servers[0].Attach("a")
	require.False(t, p.w.Sends(0, "a"))
	p.to[0].room = 0
	_, _ = p.through("a", 1, 100, 1)
	require.NoError(t, p.settle())
	require.True(t, p.w.Sends(0, "a"))
	require.False(t, p.w.Sends(0, "b"))
	p.to[0].room = 1000
	require.NoError(t, p.settle())
	require.False(t, p.w.Sends(0, "a"))
	require.True(t, at.Full())
	p.to[0].room = 0
	on, _ := p.through("a", 2, 100, 1)
	require.NoError(t, p.settle())
	require.True(t, p.w.Sends(0, "a"))
	p.w.ChannelOver(0, "a") // both have closed it: nobody takes that
	require.False(t, p.w.Sends(0, "a"))
	require.True(t, IsOver(p.w.Result(on)))
}

// TestLostOnChannel: a request that was delivered on a channel, and whose worker is lost, goes with the channel.
func TestLostOnChannel(t *testing.T) {
	p := newPair(t, 1)
	s := p.servers[0]
	s.Attach("a")
	_, _ = p.through("a", 1, 100, 1)
	require.NoError(t, p.settle())
	handler := s.Take("a")[0].Handler()
	s.Deliver()
	s.Lose(0, errGone)
	require.Empty(t, s.requests.free)
	s.Detach("a")
	require.Len(t, s.requests.free, 1)
	tk, err := s.Begin()
	require.NoError(t, err)
	require.ErrorContains(t, s.Respond(handler, tk), "no such request")
}

// TestChannelWaitsForNobody sends messages of a channel while push_pulls beside it wait: a
// stream that they are behind may be waiting for the message.
func TestChannelWaitsForNobody(t *testing.T) {
	p := newPair(t, 1)
	s := p.servers[0]
	at := s.Attach("a")
	message := func(key uint64, fill byte) {
		on, y := p.through("a", key, 100, fill)
		require.NoError(t, p.settle())
		require.True(t, at.Full())
		r := s.Take("a")[0]
		require.Equal(t, fill, r.Push()[0].Span.Bytes()[99])
		s.Deliver()
		require.NoError(t, p.respond(0, r, bytesOf(t, 0, 100, fill+1)))
		require.NoError(t, p.settle())
		require.Equal(t, StateDone, p.state(on))
		require.Equal(t, fill+1, y.Span.Bytes()[50])
	}

	p.to[0].held = p.w.next // its request is out, and its bytes are not
	first, _ := p.through("", 2, 100, 9)
	require.NoError(t, p.settle())
	message(1, 3)
	second, _ := p.through("", 2, 100, 10) // behind it for the key
	third, _ := p.through("", 5, 100, 11)  // behind that
	require.NoError(t, p.settle())
	message(1, 4)
	message(6, 5) // new keys and buffers are asked for in between
	p.to[0].held = 0
	for i, id := range []uint64{first, second, third} { // in the order of the calls
		require.NoError(t, p.settle())
		q := p.take(0)
		require.Len(t, q, 1, i)
		require.EqualValues(t, 9+i, q[0].Push()[0].Span.Bytes()[0])
		require.NoError(t, p.respond(0, q[0], bytesOf(t, 0, 100, 3)))
		require.NoError(t, p.settle())
		require.Equal(t, StateDone, p.state(id), i)
	}

	// A message that waits itself, for its key, keeps nobody.
	p.to[0].held = p.w.next
	first, _ = p.through("", 1, 100, 9)
	require.NoError(t, p.settle())
	on, _ := p.through("a", 1, 100, 7)
	beside, _ := p.through("", 2, 100, 8)
	require.NoError(t, p.settle())
	require.Empty(t, p.take(0))
	p.to[0].held = 0
	for i, id := range []uint64{first, beside} {
		require.NoError(t, p.settle())
		q := p.take(0)
		require.Len(t, q, 1, i)
		require.NoError(t, p.respond(0, q[0], bytesOf(t, 0, 100, 3)))
		require.NoError(t, p.settle())
		require.Equal(t, StateDone, p.state(id))
	}
	require.True(t, at.Full())
	r := s.Take("a")[0]
	s.Deliver()
	require.NoError(t, p.respond(0, r, bytesOf(t, 0, 100, 1)))
	require.NoError(t, p.settle())
	require.Equal(t, StateDone, p.state(on))
}

// TestChannelAnswerPasses answers messages of a channel while an answer to a push_pull waits for a
// stream, which may be waiting for the next of those messages.
func TestChannelAnswerPasses(t *testing.T) {
	p := newPair(t, 1)
	s := p.servers[0]
	at := s.Attach("a")
	beside, _ := p.through("", 2, 100, 9)
	require.NoError(t, p.settle())
	q := p.take(0)
	require.Len(t, q, 1)
	p.from[0].held = s.next // the answer is out, and its bytes are not
	require.NoError(t, p.respond(0, q[0], bytesOf(t, 0, 100, 3)))
	for _, refuse := range []bool{false, true} {
		on, y := p.through("a", 1, 100, 4)
		require.NoError(t, p.settle())
		require.True(t, at.Full())
		r := s.Take("a")[0]
		s.Deliver()
		want := StateDone
		if refuse {
			tk, err := s.Begin()
			require.NoError(t, err)
			require.NoError(t, s.Fail(r.Handler(), tk, "no"))
			want = StateFailed
		} else {
			require.NoError(t, p.respond(0, r, bytesOf(t, 0, 100, 5)))
		}
		require.NoError(t, p.settle())
		require.Equal(t, want, p.state(on))
		require.Equal(t, !refuse, y.Span.Bytes()[50] == 5)
	}
	require.Equal(t, StateOpen, p.state(beside))
	p.from[0].held = 0
	require.NoError(t, p.settle())
	require.Equal(t, StateDone, p.state(beside))
}

// TestChannelBesideARefusal has the server refuse a buffer to a push_pull while a message of
// a channel is queued behind its question, and loses the server while both are queued.
func TestChannelBesideARefusal(t *testing.T) {
	p := newPair(t, 1)
	s := p.servers[0]
	require.NoError(t, s.Fix([]Own{{Key: 2, Region: bytesOf(t, 0, 10, 0).Base}}))
	at := s.Attach("a")
	bad, _ := p.through("", 2, 5000, 9)
	p.w.Drain() // it asks for a buffer
	on, _ := p.through("a", 1, 100, 7)
	require.NoError(t, p.settle())
	require.Equal(t, StateFailed, p.state(bad))
	require.True(t, at.Full())
	r := s.Take("a")[0]
	s.Deliver()
	require.NoError(t, p.respond(0, r, bytesOf(t, 0, 100, 1)))
	require.NoError(t, p.settle())
	require.Equal(t, StateDone, p.state(on))

	p.to[0].room = 0
	beside, _ := p.through("", 3, 100, 9)
	on, _ = p.through("a", 1, 100, 7)
	p.w.Drain()
	p.w.Lose(0, errors.New("gone"))
	p.w.Drain()
	require.Equal(t, StateFailed, p.state(beside))
	require.Equal(t, StateFailed, p.state(on))
}
