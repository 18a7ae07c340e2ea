package rails

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestPostWholeIsWriteAndFrame: postWhole leaves what write and frame leave, and returns the item that frame puts into out.
func TestPostWholeIsWriteAndFrame(t *testing.T) {
	for writes := range 3 {
		a, _ := joined(t, 2, 8, 1000)
		b, _ := joined(t, 2, 8, 1000)
		for _, o := range []*order{a, b} { // the next frame acknowledges it
			require.NoError(t, o.recv(0, item{kind: frame, num: 0}))
			_, ok := o.take()
			require.True(t, ok)
		}
		for range 5 {
			for range writes {
				a.write(1)
			}
			a.frame(1, 20)
			it := b.upcoming()
			b.postWhole(1, writes, 20)
			require.Equal(t, []post{{to: 1, item: it}}, a.out)
			a.out = a.out[:0]
			require.Equal(t, a, b)
		}
	}
}

// TestRecvNextIsRecvAndTake: where recvNext takes an item, it leaves what recv and take leave. Where it takes none, it leaves
// all as it was. Of random items, all kinds of both occur.
func TestRecvNextIsRecvAndTake(t *testing.T) {
	seen := map[string]int{}
	for seed := range uint64(20_000) {
		random := rand.New(rand.NewPCG(seed, 0))
		all := [3]*order{} // for recv, for recvNext, and as it was
		it, id := item{kind: frame, num: random.Uint64N(3), ack: random.Uint64N(5), got: random.Uint64N(2)}, uint32(random.IntN(3))
		setup := random.Uint64()
		for i := range all {
			all[i] = busy(t, rand.New(rand.NewPCG(setup, 1)))
		}
		taken := all[1].recvNext(id, it.num, it.ack, it.got)
		all[1].confirm()
		if !taken {
			require.Equal(t, all[2], all[1])
			seen["refused"]++
			continue
		}
		require.NoError(t, all[0].recv(id, it))
		num, ok := all[0].take()
		require.True(t, ok)
		require.Equal(t, it.num, num)
		require.Equal(t, all[0], all[1])
		seen[fmt.Sprint("taken, done ", len(all[1].done))]++
	}
	require.Len(t, seen, 5, "%v", seen)
}

// busy returns an order in a random state: some batches are on their way, some members let go of theirs, one may be lost, and
// frames may have come.
func busy(t *testing.T, random *rand.Rand) *order {
	o, _ := joined(t, 3, 8, 1000)
	for range random.IntN(4) {
		id := uint32(random.IntN(3))
		if num := o.write(id); random.IntN(2) == 0 {
			o.let(num)
		}
		o.frame(id, 10)
	}
	if random.IntN(3) == 0 {
		require.NoError(t, o.recv(0, item{kind: frame, num: uint64(random.IntN(2))}))
		if random.IntN(2) == 0 {
			o.take()
		}
	}
	switch random.IntN(8) {
	case 0:
		o.down(2)
	case 3:
		o.write(2)
		o.down(2)
		o.frame(0, 10) // the write's fence waits for what the peer says of member 2
	case 1:
		o.down(2)
		o.closed(2)
	case 2:
		o.end()
	}
	o.out, o.shut, o.done = o.out[:0], o.shut[:0], o.done[:0]
	return o
}
