package link

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/transport"
)

// TestHeld holds much, and uses its buffers again, but not those that were given in the same
// Poll.
func TestHeld(t *testing.T) {
	var q Held
	now := uint64(1)
	put := func(s string) { require.NoError(t, q.Push(&transport.Event{Data: []byte(s)}, 0, now)) }
	for i := range 100 {
		put(fmt.Sprint(i))
	}
	var got [][]byte
	for i := range 100 {
		got = append(got, q.Pop(now).Data)
		put(fmt.Sprint(100 + i))
	}
	for i := range 100 {
		require.Equal(t, fmt.Sprint(i), string(got[i]))
		require.Equal(t, fmt.Sprint(100+i), string(q.Pop(now).Data))
	}
	require.Zero(t, q.bytes)

	now++
	e := transport.Event{Data: make([]byte, 1000)}
	require.Zero(t, testing.AllocsPerRun(1000, func() {
		now++
		for range 3 {
			_ = q.Push(&e, 1, now)
		}
		for range 3 {
			q.Pop(now)
		}
	}))
	e.Data = make([]byte, HeldBytes)
	require.NoError(t, q.Push(&e, 0, now), "the first may be of any size")
	e.Data = make([]byte, 1)
	require.Error(t, q.Push(&e, 0, now))
	q.Pop(now)
	for range HeldMost {
		require.NoError(t, q.Push(&e, 0, now))
	}
	require.Error(t, q.Push(&e, 0, now))
}

// TestHeldDrops: what waits for a write that does not come is dropped, with all behind it.
func TestHeldDrops(t *testing.T) {
	for from, left := range []int{0, 2, 3, 6, 6} {
		var q Held
		for range 5 { // the ring begins somewhere
			require.NoError(t, q.Push(&transport.Event{}, 0, 1))
			q.Pop(1)
		}
		for i, number := range []uint64{0, 0, 1, 2, 2, 2} {
			require.NoError(t, q.Push(&transport.Event{Data: []byte{byte(i)}}, number, 2))
		}
		q.DropFrom(uint64(from))
		require.Equal(t, left, q.Len())
		require.Equal(t, left, q.bytes)
		for i := range left {
			require.Equal(t, []byte{byte(i)}, q.Pop(3).Data)
		}
	}
}

// TestLine: operations wait in order, with a copy of their frames, up to a limit; those that are over go when all before
// them are.
func TestLine(t *testing.T) {
	var l Line[int]
	op := transport.Op{Frame: []byte("frame")}
	for i := range LineMost {
		require.True(t, l.Push(&op, i))
	}
	require.False(t, l.Push(&op, 0))
	op.Frame[0] = 'F'
	require.Equal(t, "frame", string(l.At(0).Op.Frame))
	next := l.First
	l.Finish(l.At(1))
	l.Take(&next)
	require.Zero(t, l.First)
	l.Finish(l.At(0))
	l.Take(&next)
	require.Equal(t, [2]uint32{2, 2}, [2]uint32{l.First, next})
	require.Equal(t, 2, l.At(l.First).Is)
	for ; !l.Empty(); l.Take() {
		l.Finish(l.At(l.First))
	}
	op.Frame = make([]byte, lineBytes+1)
	require.True(t, l.Push(&op, 0), "the first may be of any size")
	require.False(t, l.Push(&op, 0))
	l.Finish(l.At(l.First))
	l.Take()
	op.Frame = op.Frame[:keepMost]
	require.Zero(t, testing.AllocsPerRun(2*LineMost, func() {
		l.Push(&op, 0)
		l.Finish(l.At(l.First))
		l.Take()
	}))
}
