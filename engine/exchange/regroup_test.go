package exchange

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/wire"
)

// TestRegroupHostile has a peer say with Regroup and Recalled what no peer would: each is a breach
// of the protocol, which ends that connection, and nothing else happens.
func TestRegroupHostile(t *testing.T) {
	answer := wire.Append(nil, wire.TypeRegroup, &wire.Regroup{Runs: 1, Back: true})

	t.Run("an answer that nobody asked for", func(t *testing.T) {
		p := newPair(t, 1)
		require.NoError(t, p.settle())
		require.ErrorContains(t, p.w.Frame(0, answer), "answered a Regroup message that was not sent to it")
	})
	t.Run("two answers", func(t *testing.T) {
		p := newPair(t, 1)
		p.w.Regroup(7, true, errors.New("worker 1 is lost"))
		p.to[0].ops = nil // the peer is the test
		require.NoError(t, p.w.Frame(0, answer))
		require.ErrorContains(t, p.w.Frame(0, answer), "answered a Regroup message that was not sent to it")
	})
	t.Run("given back without a loss", func(t *testing.T) {
		p := newPair(t, 1)
		id, err := p.pushPull([]Tensor{bytesOf(t, 1, 8, 1)}, []Tensor{bytesOf(t, 0, 8, 0)})
		require.NoError(t, err)
		require.NoError(t, p.settle())
		p.w.Regroup(7, false, nil)
		require.NoError(t, p.settle())
		recalled := wire.Append(nil, wire.TypeRecalled, &wire.Seqs{id})
		require.ErrorContains(t, p.w.Frame(0, recalled), "but no member was lost since it was sent")
		require.Equal(t, StateOpen, p.state(id))
	})
	t.Run("given back twice", func(t *testing.T) {
		p := newPair(t, 1)
		id, err := p.pushPull([]Tensor{bytesOf(t, 1, 8, 1)}, []Tensor{bytesOf(t, 0, 8, 0)})
		require.NoError(t, err)
		require.NoError(t, p.settle())
		p.w.Regroup(7, true, errors.New("worker 1 is lost"))
		p.to[0].ops = nil
		recalled := wire.Append(nil, wire.TypeRecalled, &wire.Seqs{id})
		require.NoError(t, p.w.Frame(0, recalled))
		require.ErrorContains(t, p.w.Frame(0, recalled), "which does not wait for its answer")
	})
	t.Run("changes without end", func(t *testing.T) {
		p := newPair(t, 1)
		require.NoError(t, p.settle())
		p.from[0].room = 0 // the worker takes no answers
		var err error
		for i := uint64(0); err == nil && i < 2*maxOwed/owedExtra; i++ {
			err = p.servers[0].Frame(0, wire.Append(nil, wire.TypeRegroup, &wire.Regroup{Runs: i}))
		}
		require.ErrorContains(t, err, "does not read the answers")
	})
	t.Run("a frame that is too short", func(t *testing.T) {
		p := newPair(t, 1)
		require.NoError(t, p.settle())
		require.Error(t, p.servers[0].Frame(0, answer[:5]))
		require.Error(t, p.servers[0].Frame(0, append(answer[:9:9], 2)))
	})
}

// TestRegroupKeeps has a worker tell other runs without wanting anything back: what the server has
// is in its batches when it knows the same runs, and not before.
func TestRegroupKeeps(t *testing.T) {
	p := newPair(t, 1)
	y := bytesOf(t, 0, 8, 0)
	id, err := p.pushPull([]Tensor{bytesOf(t, 1, 8, 1)}, []Tensor{y})
	require.NoError(t, err)
	require.NoError(t, p.settle())
	p.w.Regroup(7, false, nil)
	require.NoError(t, p.settle())
	require.Nil(t, p.take(0))
	p.servers[0].Regroup(7)
	b := p.take(0)
	require.Len(t, b, 1)
	require.NoError(t, p.respond(0, b[0], bytesOf(t, 0, 8, 3)))
	require.NoError(t, p.settle())
	require.Equal(t, StateDone, p.state(id))
}
