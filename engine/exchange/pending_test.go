package exchange

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestWaits: whoever waits is told for what, in each place where a push_pull can stand.
func TestWaits(t *testing.T) {
	p := newPair(t, 2)
	push := func(key uint64) uint64 {
		id, err := p.pushPull([]Tensor{bytesOf(t, key, 8, byte(key))}, nil)
		require.NoError(t, err)
		return id
	}
	waits := func(id uint64, want Pending) {
		t.Helper()
		got, err := p.w.Waits(id)
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
	answer := func(i int) {
		require.NoError(t, p.respond(i, p.take(i)[0]))
		require.NoError(t, p.settle())
	}
	first := push(5)
	_, err := p.w.Waits(first)
	require.ErrorIs(t, err, ErrNoTicket, "the owner does not know it yet")
	p.w.Drain()
	waits(first, Pending{PendingBuffer, 10, 5, first, 0})
	require.NoError(t, p.settle())
	waits(first, Pending{PendingAnswer, 10, 5, first, 0})
	other := push(6)
	again, behind := push(5), push(7)
	require.NoError(t, p.settle())
	waits(other, Pending{PendingAnswer, 10, 6, other, 0})
	waits(again, Pending{PendingKey, 10, 5, again, first})
	waits(behind, Pending{PendingKey, 10, 5, again, first})
	answer(0)
	waits(first, Pending{PendingAnswer, 11, 5, first, 0})
	waits(again, Pending{PendingAnswer, 10, 5, again, 0})
	for range 3 {
		answer(0)
	}
	waits(behind, Pending{PendingKey, 11, 5, again, first})
	answer(1)
	_, err = p.w.Waits(first)
	require.ErrorIs(t, err, ErrNoTicket)
	for range 3 {
		answer(1)
	}

	p.to[0].room = 0
	stuck := push(6)
	p.w.Drain()
	waits(stuck, Pending{PendingSending, 10, 0, stuck, 0})
	p.w.Patient = true
	p.w.Lose(0, errGone)
	waits(stuck, Pending{PendingPeer, 10, 0, stuck, 0})
}

// TestWaitsOfPulls have the key that is pulled.
func TestWaitsOfPulls(t *testing.T) {
	p := newPair(t, 2)
	id, err := p.pushPull(nil, []Tensor{bytesOf(t, 3, 8, 0), bytesOf(t, 4, 8, 0)})
	require.NoError(t, err)
	require.NoError(t, p.settle())
	got, err := p.w.Waits(id)
	require.NoError(t, err)
	require.Equal(t, Pending{PendingAnswer, 10, 3, id, 0}, got)
	require.NoError(t, p.respond(0, p.take(0)[0], bytesOf(t, 0, 8, 0)))
	require.NoError(t, p.settle())
	got, err = p.w.Waits(id)
	require.NoError(t, err)
	require.Equal(t, Pending{PendingAnswer, 11, 4, id, 0}, got)
}
