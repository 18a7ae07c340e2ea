package exchange

import (
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/wire"
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
	waits(first, Pending{10, 5, false, 0})
	require.NoError(t, p.settle())
	waits(first, Pending{10, 5, true, 0})
	other := push(6)
	again, behind := push(5), push(7)
	require.NoError(t, p.settle())
	waits(other, Pending{10, 6, true, 0})
	waits(again, Pending{10, 5, false, first})
	waits(behind, Pending{10, 7, false, again})
	answer(0)
	waits(first, Pending{11, 5, true, 0})
	waits(again, Pending{10, 5, true, 0})
	for range 3 {
		answer(0)
	}
	waits(behind, Pending{11, 7, false, again})
	answer(1)
	_, err = p.w.Waits(first)
	require.ErrorIs(t, err, ErrNoTicket)
	for range 3 {
		answer(1)
	}

	p.to[0].room = 0
	stuck := push(6)
	p.w.Drain()
	waits(stuck, Pending{10, 6, false, 0})
	p.w.Patient = true
	p.w.Lose(0, errGone)
	waits(stuck, Pending{10, 6, false, 0})
}

// TestWaitsOfPulls have the key that is pulled.
func TestWaitsOfPulls(t *testing.T) {
	p := newPair(t, 2)
	id, err := p.pushPull(nil, []Tensor{bytesOf(t, 3, 8, 0), bytesOf(t, 4, 8, 0)})
	require.NoError(t, err)
	require.NoError(t, p.settle())
	got, err := p.w.Waits(id)
	require.NoError(t, err)
	require.Equal(t, Pending{10, 3, true, 0}, got)
	require.NoError(t, p.respond(0, p.take(0)[0], bytesOf(t, 0, 8, 0)))
	require.NoError(t, p.settle())
	got, err = p.w.Waits(id)
	require.NoError(t, err)
	require.Equal(t, Pending{11, 4, true, 0}, got)
}

// TestWaitsBesideARegroup: a server has given a push_pull back and has not said yet what it has delivered, so the push_pull is
// in no queue.
func TestWaitsBesideARegroup(t *testing.T) {
	p := newPair(t, 1)
	id, err := p.pushPull([]Tensor{bytesOf(t, 5, 8, 1)}, nil)
	require.NoError(t, err)
	require.NoError(t, p.settle())
	p.w.Regroup(7, true, errGone)
	p.to[0].ops = nil
	require.NoError(t, p.w.Frame(0, wire.Append(nil, wire.TypeRecalled, &wire.Seqs{id})))
	got, err := p.w.Waits(id)
	require.NoError(t, err)
	require.Equal(t, Pending{10, 5, false, 0}, got)
}
