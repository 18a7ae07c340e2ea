package exchange

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestPullKeys: each server sees the keys of its share, until it has answered.
func TestPullKeys(t *testing.T) {
	p := newPair(t, 2)
	id, err := p.pushPull([]Tensor{bytesOf(t, 1, 8, 5)}, []Tensor{bytesOf(t, 70, 8, 0), bytesOf(t, 71, 8, 0), bytesOf(t, 1<<63, 8, 0), bytesOf(t, 73, 8, 0)})
	require.NoError(t, err)
	require.NoError(t, p.settle())
	for i, want := range [][]uint64{{70, 71}, {1 << 63, 73}} {
		r := p.take(i)[0]
		keys := make([]uint64, 3)
		n, err := p.servers[i].PullKeys(r.Handler(), keys)
		require.NoError(t, err)
		require.Equal(t, want, keys[:n])
		one := []uint64{0}
		n, err = p.servers[i].PullKeys(r.Handler(), one)
		require.NoError(t, err)
		require.Equal(t, 2, n, "all of them are counted")
		require.Equal(t, want[0], one[0])
		require.NoError(t, p.respond(i, r, bytesOf(t, 0, 8, 1), bytesOf(t, 0, 8, 2)))
		_, err = p.servers[i].PullKeys(r.Handler(), keys)
		require.ErrorContains(t, err, "no such request is waiting for an answer")
	}
	require.NoError(t, p.settle())
	require.Equal(t, StateDone, p.state(id))
}

// TestLosses: each loss of a worker is counted, once.
func TestLosses(t *testing.T) {
	p := newPair(t, 1)
	s := p.servers[0]
	losses := func() uint32 {
		t.Helper()
		n, err := s.Losses(0)
		require.NoError(t, err)
		return n
	}
	require.Zero(t, losses())
	s.Lose(0, errGone)
	require.EqualValues(t, 1, losses())
	s.Lose(0, errGone)
	require.EqualValues(t, 1, losses())
	s.Up(0, 0, p.sf[0], p.from[0])
	require.EqualValues(t, 1, losses())
	s.Lose(0, errGone)
	require.EqualValues(t, 2, losses())
	_, err := s.Losses(1)
	require.ErrorContains(t, err, "worker 1 is not one of this server's")
}
