package exchange

import (
	"errors"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/mem"
)

// device makes points that the test lets pass.
type device struct {
	made  [][2]bool // the forms of each
	words []*atomic.Uint64
	late  int   // words that were asked for later
	live  int   // points that were not given back
	err   error // of Point
}

func (d *device) host() (h Host) {
	h = inline
	h.Takes = func(mem.Device) error { return nil }
	h.Point = func(stream uint64, event, word bool) (p Point, err error) {
		if d.err != nil {
			return p, d.err
		}
		d.made = append(d.made, [2]bool{event, word})
		d.live++
		if event {
			p.Dev, p.Event = mem.GPU(0), stream
		}
		if word {
			d.word(&p)
		}
		return p, nil
	}
	h.Word = func(p *Point) { d.late++; d.word(p) }
	h.Passed = func(Point) { d.live-- }
	return h
}

func (d *device) word(p *Point) {
	p.Word, p.Value = new(atomic.Uint64), 5
	p.Word.Store(4)
	d.words = append(d.words, p.Word)
}

// pass has all words say that their streams have passed.
func (d *device) pass() {
	for _, w := range d.words {
		w.Store(5)
	}
}

// withDevice is newPair with a device on both sides.
func withDevice(t *testing.T, servers int) (*pair, *device) {
	p, d := newPair(t, servers), &device{}
	p.w.Host = d.host()
	for _, s := range p.servers {
		s.Host = d.host()
	}
	return p, d
}

// behind pushes tensors behind a stream.
func (p *pair) behind(push, pull []Tensor) uint64 {
	tk, err := p.w.Begin()
	require.NoError(p.t, err)
	for _, x := range push {
		require.NoError(p.t, tk.AddPush(x))
	}
	for _, x := range pull {
		require.NoError(p.t, tk.AddPull(x))
	}
	tk.After(7)
	id := tk.ID()
	require.NoError(p.t, p.w.Submit(tk))
	return id
}

// onDevice is a tensor that counts as memory of a GPU.
func onDevice(t *testing.T, key, n uint64) Tensor {
	x := bytesOf(t, key, n, byte(key))
	x.Dev = mem.GPU(0)
	return x
}

// TestForms: a point is made in the forms that its peers need, and in no other.
func TestForms(t *testing.T) {
	const event, word = true, true
	for name, c := range map[string]struct {
		points [2]bool // of the Fabrics to the servers
		gpu    []bool  // where the tensors are
		bytes  uint64
		want   [][2]bool
	}{
		"on the device, all take points":  {[2]bool{true, true}, []bool{true, true}, 8, [][2]bool{{event, false}}},
		"on the device, none takes them":  {[2]bool{}, []bool{true}, 8, [][2]bool{{false, word}}},
		"on the device, one takes them":   {[2]bool{true, false}, []bool{true}, 8, [][2]bool{{event, word}}},
		"on the host":                     {[2]bool{true, true}, []bool{false}, 8, [][2]bool{{false, word}}},
		"on both, so the word is awaited": {[2]bool{true, false}, []bool{true, false}, 8, [][2]bool{{false, word}}},
		"nothing is read":                 {[2]bool{true, false}, []bool{true, false}, 0, nil},
	} {
		t.Run(name, func(t *testing.T) {
			p, d := withDevice(t, 2)
			p.copies = false
			for i, points := range c.points {
				f := newFabric()
				f.points, p.to[i].of = points, f
				p.meet(i, f)
			}
			var push []Tensor
			for i, gpu := range c.gpu {
				x := bytesOf(t, uint64(i), c.bytes, 1)
				if gpu {
					x.Dev = mem.GPU(0)
				}
				push = append(push, x)
			}
			id := p.behind(push, nil)
			require.Equal(t, c.want, d.made)
			require.NoError(t, p.settle())
			var held [2]bool
			for i := range p.servers {
				held[i] = c.want != nil && !(c.want[0][0] && c.points[i])
				require.Equal(t, held[i], len(p.take(i)) == 0, i)
			}
			require.Equal(t, c.want != nil && c.want[0][1], p.w.Held())
			d.pass()
			require.NoError(t, p.settle())
			require.False(t, p.w.Held())
			for i := range p.servers {
				require.Equal(t, held[i], len(p.take(i)) == 1, i)
			}
			p.w.Down(0, errors.New("over"))
			p.w.Down(1, errors.New("over"))
			require.Equal(t, StateFailed, p.state(id))
			require.Zero(t, d.live)
		})
	}
}

// TestHeldBack: what waits for its point is not sent before, nor is what is behind it to the same peer. It
// keeps nothing else: no message of a channel, and no answer to another worker.
func TestHeldBack(t *testing.T) {
	p, d := withDevice(t, 1)
	s := p.servers[0]
	at := s.Attach("a")
	message := func(key uint64, want int) {
		on, _ := p.through("a", key, 100, 1)
		require.NoError(t, p.settle())
		require.True(t, at.Full())
		r := s.Take("a")[0]
		s.Deliver()
		require.NoError(t, p.respond(0, r, bytesOf(t, 0, 100, 2)))
		require.NoError(t, p.settle())
		require.Equal(t, want, p.state(on))
	}
	x, y := bytesOf(t, 1, 100, 3), bytesOf(t, 1, 100, 0)
	first := p.behind([]Tensor{x}, []Tensor{y})
	second, _ := p.through("", 2, 100, 4)
	require.NoError(t, p.settle())
	require.Empty(t, p.take(0))
	require.True(t, p.w.Held())
	message(3, StateDone)
	x.Span.Bytes()[99] = 9 // the stream writes
	d.pass()
	for _, id := range []uint64{first, second} {
		require.NoError(t, p.settle())
		q := p.take(0)
		require.Len(t, q, 1)
		if id == first {
			require.EqualValues(t, 9, q[0].Push()[0].Span.Bytes()[99])
		}
		tk, err := s.Begin()
		require.NoError(t, err)
		back := bytesOf(t, 0, 100, 5)
		require.NoError(t, tk.AddPush(back))
		tk.After(7)
		require.NoError(t, s.Respond(q[0].Handler(), tk))
		require.NoError(t, p.settle())
		require.True(t, s.Held())
		require.Equal(t, StateOpen, p.state(id))
		message(3, StateDone) // its answer passes
		d.pass()
		require.NoError(t, p.settle())
		require.False(t, s.Held())
		require.Equal(t, StateDone, p.state(id))
	}
	require.EqualValues(t, 5, y.Span.Bytes()[0])
	require.Zero(t, d.live)
}

// TestHeldPerPeer: what waits for one server is not waited for at another.
func TestHeldPerPeer(t *testing.T) {
	p, d := withDevice(t, 2)
	p.copies = false
	f := newFabric()
	f.points, p.to[0].of = true, f
	p.meet(0, f)
	p.behind([]Tensor{onDevice(t, 1, 8)}, nil)
	_, err := p.pushPull([]Tensor{bytesOf(t, 2, 8, 1)}, nil)
	require.NoError(t, err)
	require.NoError(t, p.settle())
	for range 2 { // both are out
		require.Len(t, p.take(0), 1)
	}
	require.Empty(t, p.take(1))
	d.pass()
	require.NoError(t, p.settle())
	for range 2 {
		require.Len(t, p.take(1), 1)
	}
}

// TestLostWhileHeld: a push_pull that waits for its point ends with its peer, and a point goes back once.
func TestLostWhileHeld(t *testing.T) {
	p, d := withDevice(t, 1)
	id := p.behind([]Tensor{bytesOf(t, 1, 8, 1)}, nil)
	require.NoError(t, p.settle())
	require.Equal(t, 1, d.live)
	gone := errors.New("gone")
	p.w.Down(0, gone)
	require.Equal(t, StateFailed, p.state(id))
	require.ErrorIs(t, p.w.Result(id), gone)
	p.w.Drain()
	require.False(t, p.w.Held())
	require.Zero(t, d.live)
}

// TestOtherFabric: a point in the form of an event alone gets a word when the peer comes back over a Fabric
// that takes no points.
func TestOtherFabric(t *testing.T) {
	p, d := withDevice(t, 1)
	p.w.Patient = true
	p.copies = false
	f := newFabric()
	f.points, p.to[0].of = true, f
	p.meet(0, f)
	p.w.Lose(0, errors.New("gone"))
	id := p.behind([]Tensor{onDevice(t, 1, 8)}, nil)
	require.NoError(t, p.settle())
	require.Equal(t, [][2]bool{{true, false}}, d.made)
	p.to[0].of = p.wf
	p.meet(0, p.wf)
	require.NoError(t, p.settle())
	require.Equal(t, 1, d.late)
	require.True(t, p.w.Held())
	require.Empty(t, p.take(0))
	d.pass()
	require.NoError(t, p.settle())
	require.Len(t, p.take(0), 1)
	require.Equal(t, StateOpen, p.state(id))
}

// TestNoPoint: where the device makes no point, the call fails and the request can still be answered.
func TestNoPoint(t *testing.T) {
	p, d := withDevice(t, 1)
	_, y := p.through("", 1, 8, 1)
	require.NoError(t, p.settle())
	r := p.take(0)[0]
	d.err = errors.New("no such stream")
	tk, err := p.servers[0].Begin()
	require.NoError(t, err)
	require.NoError(t, tk.AddPush(bytesOf(t, 0, 8, 2)))
	tk.After(7)
	require.ErrorIs(t, p.servers[0].Respond(r.Handler(), tk), d.err)
	tk, err = p.w.Begin()
	require.NoError(t, err)
	require.NoError(t, tk.AddPush(bytesOf(t, 1, 8, 2)))
	tk.After(7)
	require.ErrorIs(t, p.w.Submit(tk), d.err)
	require.NoError(t, p.respond(0, r, bytesOf(t, 0, 8, 3)))
	require.NoError(t, p.settle())
	require.EqualValues(t, 3, y.Span.Bytes()[0])
}
