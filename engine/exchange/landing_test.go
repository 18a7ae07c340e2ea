package exchange

import (
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/mem"
)

// landed is a server's side of channel "a" in which pushes of key 1 land.
func landed(t *testing.T, s *Server) (*Arrivals, *Answering, []Tensor, []atomic.Int64) {
	at, into, counts := s.Attach("a"), []Tensor{bytesOf(t, 1, 100, 0)}, make([]atomic.Int64, 1)
	a, err := s.Carry(at, into, nil, true, counts)
	require.NoError(t, err)
	return at, a, into, counts
}

// TestLanding: messages are received in the channel's tensors, whose keys end when both sides are closed.
func TestLanding(t *testing.T) {
	p := newPair(t, 1)
	s, c := p.servers[0], p.servers[0].clients[0]
	_, a, into, counts := landed(t, s)
	require.Len(t, p.sf[0].keys, 1)
	for fill := range byte(3) {
		id, _ := p.through("a", 1, 100, fill)
		require.NoError(t, p.settle())
		require.Equal(t, fill, into[0].Span.Bytes()[99], "before the proxy looks")
		require.Equal(t, into[0].Span, s.Take("a")[0].Push()[0].Span)
		here, _, err := a.Arrived()
		require.NoError(t, err)
		require.True(t, here)
		require.EqualValues(t, 100, counts[0].Load())
		require.NoError(t, p.respond(0, s.requests.find(a.handlers[0]), bytesOf(t, 0, 100, 4)))
		require.NoError(t, p.settle())
		require.Equal(t, StateDone, p.state(id))
	}
	require.Zero(t, p.buffers.Len())
	p.w.ChannelOver(0, "a") // a closed side of the worker alone changes nothing
	s.ChannelOver(0, "a")
	require.Len(t, c.keys, 1)
	s.Detach("a")
	p.settle()
	require.False(t, a.Over(), "the worker may still write")
	s.ChannelOver(0, "a")
	require.Empty(t, c.keys)
	require.Zero(t, c.pushed)
	require.NoError(t, p.settle())
	require.True(t, a.Over())
	require.Empty(t, s.landings)

	_, again, _, _ := landed(t, s) // of the same name, after the worker has asked for more than there is
	id, _ := p.through("a", 1, 101, 5)
	require.NoError(t, p.settle())
	require.ErrorContains(t, p.w.Result(id), `a push of 101 bytes for key 1 of worker 0 exceeds the 100 bytes of its tensor in channel "a" (run the same`)
	again.Forget()
	require.NoError(t, p.settle())
	require.True(t, again.Over())
	require.Empty(t, c.keys)
}

// TestAnswerThatFailsLater: what a helper could not send ends the channel while it waits for the next message.
func TestAnswerThatFailsLater(t *testing.T) {
	p := newPair(t, 1)
	s := p.servers[0]
	_, a, _, _ := landed(t, s)
	ticket, err := s.Begin()
	require.NoError(t, err)
	here, _, err := a.Arrived()
	require.NoError(t, err)
	require.False(t, here)
	a.later(12345, ticket) // no request has that handler
	require.Eventually(t, func() bool {
		require.NoError(t, p.settle())
		_, _, err = a.Arrived()
		return err != nil
	}, 5*time.Second, time.Millisecond)
	require.ErrorContains(t, err, "12345")
}

// TestLandingKeys belong to their channel alone: who else pushes with one does not keep to the protocol.
func TestLandingKeys(t *testing.T) {
	for _, other := range []string{"", "b"} {
		p := newPair(t, 1)
		s := p.servers[0]
		landed(t, s)
		s.Attach("b")
		p.through(other, 1, 100, 7)
		require.ErrorContains(t, p.settle(), `key 1, which is that of channel "a" alone`)
	}
	p := newPair(t, 1)
	s := p.servers[0]
	p.through("", 1, 100, 7)
	require.NoError(t, p.settle())
	keys := len(p.sf[0].keys)
	_, err := s.Carry(s.Attach("a"), []Tensor{bytesOf(t, 2, 10, 0), bytesOf(t, 1, 100, 0)}, nil, true, make([]atomic.Int64, 2))
	require.ErrorContains(t, err, `channel "a": worker 0 has pushed tensors with key 1 already`)
	require.NoError(t, p.settle())
	require.Len(t, p.sf[0].keys, keys, "nothing stays of what failed")
	require.Len(t, s.clients[0].keys, 1)
	require.Empty(t, s.landings)
}

// TestLandingThatFails leaves nothing behind: no room for all registrations, memory of a GPU that the CPU would have to
// copy to, a worker that is gone.
func TestLandingThatFails(t *testing.T) {
	p := newPair(t, 1)
	s := p.servers[0]
	one := 1
	p.sf[0].room = &one
	into := []Tensor{bytesOf(t, 1, 10, 0), bytesOf(t, 2, 10, 0)}
	_, err := s.Carry(s.Attach("a"), into, nil, true, make([]atomic.Int64, 2))
	require.ErrorContains(t, err, `channel "a": tensor 1 from worker 0: fake: no room`)
	p.sf[0].room = nil
	into[1].Dev = mem.GPU(0)
	_, err = s.Carry(s.arrivals["a"], into, nil, false, make([]atomic.Int64, 2))
	require.ErrorContains(t, err, "tensor 1 is on gpu 0, where the CPU copies nothing")
	gone := errors.New("gone")
	s.Down(0, gone)
	_, err = s.Carry(s.arrivals["a"], into[:1], nil, true, make([]atomic.Int64, 1))
	require.ErrorIs(t, err, gone)
	require.NoError(t, p.settle())
	require.Empty(t, p.sf[0].keys)
	require.Empty(t, s.clients[0].keys)
	require.Empty(t, s.landings)
}

// TestLandingOfALostWorker ends with its connection.
func TestLandingOfALostWorker(t *testing.T) {
	p := newPair(t, 1)
	s := p.servers[0]
	_, a, _, _ := landed(t, s)
	p.through("a", 1, 100, 7)
	require.NoError(t, p.settle())
	s.Down(0, errors.New("gone"))
	require.Empty(t, s.clients[0].keys)
	for !a.Over() {
		require.True(t, p.sf[0].free(p.sf[0], s.Table), "its key")
	}
	require.Empty(t, p.sf[0].keys)
}

// TestForgottenKeys: a worker's side ends before the server has answered what it asked for.
func TestForgottenKeys(t *testing.T) {
	p := newPair(t, 1)
	landed(t, p.servers[0])
	rows := make([]atomic.Int64, 1)
	rows[0].Store(100)
	a, err := p.w.Carry("a", []Tensor{bytesOf(t, 1, 100, 5)}, nil, true, rows)
	require.NoError(t, err)
	sent, err := a.Send()
	require.NoError(t, err)
	require.True(t, sent)
	p.w.Drain()
	require.NotNil(t, p.w.servers[0].asked)
	p.w.ChannelOver(0, "a")
	a.Forget()
	require.Empty(t, p.w.servers[0].keys)
	require.NoError(t, p.settle())
	require.True(t, a.Over())
	require.Empty(t, p.w.servers[0].keys)
	id, _ := p.through("", 2, 100, 6)
	require.NoError(t, p.settle())
	require.NoError(t, p.respond(0, p.take(0)[0], bytesOf(t, 0, 100, 4)))
	require.NoError(t, p.settle())
	require.Equal(t, StateDone, p.state(id))
}
