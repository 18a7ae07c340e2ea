package exchange

import (
	"errors"
	"maps"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/mem"
	"fserver/engine/trace"
	"fserver/engine/wire"
)

// shapeFails checks that a push_pull has ended in a ShapeError.
func (p *pair) shapeFails(id uint64, text string) {
	p.t.Helper()
	require.Equal(p.t, StateFailed, p.state(id))
	var shape *ShapeError
	require.ErrorAs(p.t, p.w.Result(id), &shape)
	require.ErrorContains(p.t, p.w.Result(id), text)
}

// push pushes tensors of the sizes given under keys 1, 2 and so on.
func (p *pair) push(fill byte, sizes ...uint64) uint64 {
	p.t.Helper()
	var all []Tensor
	for i, n := range sizes {
		if n != 0 {
			all = append(all, bytesOf(p.t, uint64(i+1), n, fill))
		}
	}
	id, err := p.pushPull(all, nil)
	require.NoError(p.t, err)
	require.NoError(p.t, p.settle())
	return id
}

// answer takes the next request of the first server, checks what the first tensor is full of,
// and answers it.
func (p *pair) answer(id uint64, fill byte) {
	p.t.Helper()
	batch := p.take(0)
	require.Len(p.t, batch, 1)
	for _, x := range batch[0].Push() {
		require.Equal(p.t, fill, x.Span.Bytes()[x.Span.Len-1], "key %d", x.Key)
		if x.Buffer != 0 && x.Lent {
			require.NoError(p.t, p.buffers.Release(x.Buffer, 1))
		}
	}
	require.NoError(p.t, p.respond(0, batch[0]))
	require.NoError(p.t, p.settle())
	require.Equal(p.t, StateDone, p.state(id))
}

// TestRefusalLeavesNothing refuses a push_pull of several keys because of one of them, in each
// order, and then uses all of them.
func TestRefusalLeavesNothing(t *testing.T) {
	const small, large = 4096, 8192
	for name, c := range map[string]struct {
		fixed   []uint64 // keys with 16 bytes of the application's own
		refused []uint64 // sizes by key, from 1
		text    string
	}{
		"the last key":   {[]uint64{2}, []uint64{large, 17}, "17 bytes for key 2"},
		"the first key":  {[]uint64{1}, []uint64{17, large}, "17 bytes for key 1"},
		"two keys":       {[]uint64{2, 3}, []uint64{large, 17, 18}, "17 bytes for key 2"},
		"one in between": {[]uint64{2}, []uint64{large, 17, small}, "17 bytes for key 2"},
		"new keys":       {[]uint64{4}, []uint64{large, small, small, 17}, "17 bytes for key 4"},
		"no memory":      {nil, []uint64{large, 1 << 20}, "no memory"},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPair(t, 1)
			s := p.servers[0]
			s.ReceiveIn(little{})
			own := func(k uint64) error { return s.Fix([]Own{{0, k, bytesOf(t, 0, 16, 0).Base}}) }
			for _, k := range c.fixed {
				require.NoError(t, own(k))
			}
			first := uint64(small)
			if c.fixed != nil && c.fixed[0] == 1 {
				first = 16
			}
			p.answer(p.push(1, first), 1)
			keys, slots, buffers, credits := maps.Clone(p.sf[0].keys), s.slots, p.buffers.Len(), len(p.w.servers[0].keys)
			for range 3 { // refused once or thrice: it is the same
				p.shapeFails(p.push(2, c.refused...), c.text)
				require.Equal(t, keys, p.sf[0].keys)
				require.Equal(t, slots, s.slots)
				require.Equal(t, buffers, p.buffers.Len())
				require.Len(t, s.clients[0].keys, 1)
				require.Len(t, p.w.servers[0].keys, credits)
			}
			// All but those that were there before can still be given memory.
			for k := uint64(2); k < 6; k++ {
				if !slices.Contains(c.fixed, k) {
					require.NoError(t, own(k))
				}
			}
			if first == small {
				p.answer(p.push(3, small), 3)
				p.answer(p.push(4, large), 4)
				p.answer(p.push(5, small, 16), 5)
				first = 2 * large
			}
			p.answer(p.push(6, first, 16, 16, 16), 6)
		})
	}
}

// little is memory for small buffers.
type little struct{ CPU }

func (little) Alloc(n uint64) (mem.Region, error) {
	if n > 1<<16 {
		return mem.Region{}, errors.New("no memory")
	}
	return CPU{}.Alloc(n)
}

// TestRefusalWhileUnderWay refuses a push_pull while another of the same key waits for its answer,
// written or lent.
func TestRefusalWhileUnderWay(t *testing.T) {
	for _, lent := range []bool{false, true} {
		p := newPair(t, 1)
		p.to[0].lend = lent
		require.NoError(t, p.servers[0].Fix([]Own{{0, 2, bytesOf(t, 0, 16, 0).Base}}))
		p.answer(p.push(1, 4096), 1)
		x := bytesOf(t, 1, 4096, 2)
		if lent {
			x = sharedOf(t, 1, 4096, 2)
		}
		first, err := p.pushPull([]Tensor{x}, nil)
		require.NoError(t, err)
		require.NoError(t, p.settle())
		refused := p.push(3, 8192, 17)
		next := p.push(4, 4096)
		if !lent {
			require.Equal(t, StateOpen, p.state(refused), "it waits for the answer of the first")
		}
		p.answer(first, 2)
		p.shapeFails(refused, "17 bytes for key 2")
		p.answer(next, 4)
		p.answer(p.push(5, 8192, 16), 5)
	}
}

// TestRefusalWithoutRegistration refuses what cannot be registered, and later takes it.
func TestRefusalWithoutRegistration(t *testing.T) {
	p := newPair(t, 1)
	p.answer(p.push(1, 4096), 1)
	for _, room := range []int{0, 1} { // registrations that work
		p.sf[0].room = &room
		p.shapeFails(p.push(2, 8192, 8), "no room")
		p.sf[0].room = nil
		require.Len(t, p.sf[0].keys, 1)
		p.answer(p.push(3, 4096), 3)
	}
	p.answer(p.push(4, 8192, 8), 4)
}

// TestRefusalByOneServer: the other one had granted it, and both go on.
func TestRefusalByOneServer(t *testing.T) {
	p := newPair(t, 2)
	require.NoError(t, p.servers[1].Fix([]Own{{0, 2, bytesOf(t, 0, 16, 0).Base}}))
	both := func(id uint64, fill byte) {
		require.NoError(t, p.respond(1, p.take(1)[0]))
		p.answer(id, fill)
	}
	both(p.push(1, 4096), 1)
	p.shapeFails(p.push(2, 8192, 17), "17 bytes for key 2")
	require.Nil(t, p.take(0), "it is taken back")
	both(p.push(3, 4096), 3)
	both(p.push(4, 8192, 16), 4)
}

// TestNeedOfOneKeyTwice is refused, and leaves nothing.
func TestNeedOfOneKeyTwice(t *testing.T) {
	p := newPair(t, 1)
	p.answer(p.push(1, 4096), 1)
	require.NoError(t, p.servers[0].Frame(0, wire.Append(nil, wire.TypeNeed, &wire.Needs{{Key: 1, Bytes: 5000}, {Key: 1, Bytes: 9000}})))
	v, err := wire.Parse[wire.Buffers](p.from[0].ops[0].Frame, wire.TypeBuffers)
	require.NoError(t, err)
	require.Contains(t, v.Reason, "key 1 twice")
	p.from[0].ops = nil
	p.answer(p.push(2, 4096), 2)
}

// TestMoreKeysThanThereMayBe is refused to the worker, which goes on with those that it has.
func TestMoreKeysThanThereMayBe(t *testing.T) {
	p := newPair(t, 1)
	p.answer(p.push(1, 4096), 1)
	c := p.servers[0].clients[0]
	for k := uint64(100); len(c.keys) < maxKeys; k++ {
		p.servers[0].receiver(c, k)
	}
	p.shapeFails(p.push(2, 8192, 8), "more than 32768 keys")
	p.answer(p.push(3, 4096), 3)
}

// TestKeysOfEarlierRuns: what earlier runs of a worker have pushed does not count, and leaves its slots to what
// the next one pushes. Memory of the application's own keeps its place.
func TestKeysOfEarlierRuns(t *testing.T) {
	p := newPair(t, 1)
	s := p.servers[0]
	require.NoError(t, s.Fix([]Own{{0, 2, bytesOf(t, 0, 4096, 0).Base}}))
	c := s.clients[0]
	for k := uint64(2); len(c.keys) < maxKeys; k++ {
		s.receiver(c, k)
	}
	require.EqualValues(t, maxKeys, s.slots)
	for key := uint64(1 << 40); key < 1<<40+3; key++ {
		s.Lose(0, errGone)
		s.Up(0, 0, p.sf[0], p.from[0])
		require.True(t, c.fresh(2))
		require.NoError(t, c.tooMany(maxKeys))
		require.Error(t, c.tooMany(maxKeys+1))
		k := s.receiver(c, key)
		require.Less(t, k.slot, uint64(maxKeys))
		for other, o := range c.keys {
			require.True(t, other == key || o.slot != k.slot)
		}
		require.Contains(t, c.keys, uint64(2))
		require.Error(t, c.tooMany(maxKeys))
	}
	require.Len(t, c.keys, maxKeys)
	require.Len(t, s.fixed, maxKeys)
	require.NotZero(t, s.fixed[fixedKey{0, 2}].region.Len)
	require.EqualValues(t, maxKeys, s.slots)
}

// TestPlanOfMoreKeysThanThereMayBe is refused likewise: its tensors have no bytes, and ask
// for no buffer.
func TestPlanOfMoreKeysThanThereMayBe(t *testing.T) {
	p := newPair(t, 1)
	p.answer(p.push(1, 4096), 1)
	c := p.servers[0].clients[0]
	for k := uint64(100); len(c.keys) < maxKeys-1; k++ {
		p.servers[0].receiver(c, k)
	}
	id, err := p.pushPull([]Tensor{bytesOf(t, 2, 0, 0), bytesOf(t, 3, 0, 0), bytesOf(t, 4, 0, 0)}, nil)
	require.NoError(t, err)
	require.NoError(t, p.settle())
	p.shapeFails(id, "more than 32768 keys")
	require.Len(t, c.keys, maxKeys-1)
	p.answer(p.push(4, 8192), 4)
}

// aside has the helpers of a server that is new wait for the test. The function runs what they are
// to do.
func (p *pair) aside() (run func()) {
	var jobs []func()
	s, err := NewServer(1, p.buffers, new(trace.Counters), Host{
		Breach: func(_ int, err error) { p.broken = err },
		Aside:  func(f func()) { jobs = append(jobs, f) },
		Owned:  func(f func()) { f() },
	})
	require.NoError(p.t, err)
	p.servers[0] = s
	s.Up(0, 0, p.sf[0], p.from[0])
	run = func() {
		for len(jobs) != 0 {
			f := jobs[0]
			jobs = jobs[1:]
			f()
			s.Drain()
		}
	}
	p.t.Cleanup(func() {
		s.Lose(0, errGone)
		run()
		s.Over()
		run()
		require.NoError(p.t, errors.Join(s.Close(), s.Free()))
		require.Empty(p.t, p.sf[0].keys)
		require.Zero(p.t, p.buffers.Len())
	})
	return run
}

// TestWhileBuffersAreMade has all sorts of things happen between a Need and its answer.
func TestWhileBuffersAreMade(t *testing.T) {
	need := func(key, bytes uint64) []byte {
		return wire.Append(nil, wire.TypeNeed, &wire.Needs{{Key: key, Bytes: bytes}})
	}
	t.Run("another need", func(t *testing.T) {
		p := newPair(t, 1)
		p.aside()
		require.NoError(t, p.servers[0].Frame(0, need(1, 8)))
		require.ErrorContains(t, p.servers[0].Frame(0, need(2, 8)), "again before the answer")
	})
	t.Run("memory of the application's", func(t *testing.T) {
		p := newPair(t, 1)
		run := p.aside()
		mine := bytesOf(t, 0, 16, 0)
		id := p.push(4, 8)
		require.NoError(t, p.servers[0].Fix([]Own{{0, 1, mine.Base}}))
		run()
		require.NoError(t, p.settle())
		p.answer(id, 4)
		require.EqualValues(t, 4, mine.Span.Bytes()[7])
		require.Len(t, p.sf[0].keys, 1)
	})
	t.Run("memory of the application's, for a key that was to be lent", func(t *testing.T) {
		p := newPair(t, 1)
		run := p.aside()
		needs := []wire.Need{{Key: 1, Bytes: 8, Lend: true}, {Key: 2, Bytes: 8}}
		require.NoError(t, p.servers[0].Frame(0, wire.Append(nil, wire.TypeNeed, (*wire.Needs)(&needs))))
		mine := bytesOf(t, 0, 16, 0)
		require.NoError(t, p.servers[0].Fix([]Own{{0, 1, mine.Base}}))
		run()
		v, err := wire.Parse[wire.Buffers](p.from[0].ops[0].Frame, wire.TypeBuffers)
		require.NoError(t, err)
		require.False(t, v.List[0].Lend)
		require.Equal(t, mine.Base, p.sf[0].keys[transportKey(v.List[0].Region)])
	})
	t.Run("a plan with the key", func(t *testing.T) {
		p := newPair(t, 1)
		run := p.aside()
		require.NoError(t, p.servers[0].Frame(0, need(1, 8)))
		require.NoError(t, p.servers[0].Frame(0, wire.Append(nil, wire.TypePlan, &wire.Plan{Push: []wire.PlanTensor{{Key: 1}, {Key: 2}}})))
		run()
		c := p.servers[0].clients[0]
		require.Len(t, c.keys, 2)
		require.Same(t, c.keys[1], c.plans[0].keys[0])
		require.True(t, c.keys[1].granted)
	})
	t.Run("a push that should have waited", func(t *testing.T) {
		p := newPair(t, 1)
		run := p.aside()
		id := p.push(1, 8)
		run()
		require.NoError(t, p.settle())
		p.answer(id, 1)
		require.NoError(t, p.servers[0].Frame(0, need(1, 1<<16)))
		require.NoError(t, p.servers[0].Frame(0, wire.AppendRequest(nil, &wire.Request{Seq: 9, Push: []wire.Pushed{{Rows: 8, Bytes: 8}}})))
		run()
		require.ErrorContains(t, p.broken, "before its last push of the key was answered")
		require.Len(t, p.sf[0].keys, 1)
		require.NoError(t, p.buffers.Release(p.servers[0].clients[0].keys[1].id, 1))
	})
	t.Run("the worker's loss", func(t *testing.T) {
		p := newPair(t, 1)
		run := p.aside()
		first := p.push(1, 8, 9)
		p.servers[0].Lose(0, errGone)
		p.w.Lose(0, errGone)
		p.servers[0].Up(0, 0, p.sf[0], p.from[0])
		p.w.Up(0, 10, p.wf, p.to[0])
		require.Equal(t, StateFailed, p.state(first))
		id := p.push(2, 8)
		run()
		require.NoError(t, p.settle())
		p.answer(id, 2)
		run()
		require.Len(t, p.sf[0].keys, 1)
		require.NoError(t, p.buffers.Release(p.servers[0].clients[0].keys[1].id, 1))
	})
}
