package transporttest

import (
	"encoding/binary"
	"errors"
	"math/rand/v2"

	"github.com/stretchr/testify/require"

	"fserver/engine/mem"
	"fserver/engine/transport"
)

var soakCases = []testCase{
	{"SoakSeed1", func(w *world) { soak(w, 1, 0) }},
	{"SoakSeed2", func(w *world) { soak(w, 2, 0) }},
	{"SoakSeed3WithLoss", func(w *world) { soak(w, 3, 0.01) }},
}

// Each direction of a Conn has so many places in the memory of both ends.
const (
	flowSlots = 6
	slotBytes = 96 << 10
)

// A flow is one direction of one Conn under soak. It checks every byte that
// arrives, and spoils every source whose op has ended.
type flow struct {
	w           *world
	from, to    *link
	dst         target
	src         mem.Span
	slots       [flowSlots]slot
	bySource    map[uint64]*slot // by the op's User
	byNumber    map[uint32]*slot
	writes      uint32 // posted so far
	frames, got uint32
	cut         bool // the Conn was closed: ops may fail
}

// A slot is a place that holds one write at a time.
type slot struct {
	at          uint64 // of the slot, in dst and in src
	off, n      uint64 // of the write in the slot
	seed        uint64
	sourceInUse bool // until EvDone
	targetInUse bool // until its mark
}

func newFlow(w *world, from, to *link, dst target, src mem.Span) *flow {
	l := &flow{w: w, from: from, to: to, dst: dst, src: src,
		bySource: map[uint64]*slot{}, byNumber: map[uint32]*slot{}}
	for i := range l.slots {
		l.slots[i].at = uint64(i) * slotBytes
	}
	w.poison(dst.Span())
	from.onDone, to.onFrame, to.onWritten = l.done, l.frame, l.written
	return l
}

func (l *flow) done(user uint64, err error) {
	if err != nil && !l.cut {
		l.w.Errorf("an op failed on a conn that nobody closed: %v", err)
	}
	if s := l.bySource[user]; s != nil {
		l.w.poison(slice(l.src, s.at, slotBytes))
		s.sourceInUse = false
		delete(l.bySource, user)
	}
}

func (l *flow) written(number uint32, n uint64) {
	s := l.byNumber[number]
	if s == nil || s.n != n {
		l.w.Errorf("write %d of %d bytes was not posted", number, n)
		return
	}
	l.w.holds("soak: target", slice(l.dst.Span(), s.at+s.off, n), s.seed)
	l.w.poison(slice(l.dst.Span(), s.at+s.off, n))
	l.w.untouched("soak: around the target", slice(l.dst.Span(), s.at, slotBytes))
	s.targetInUse = false
	delete(l.byNumber, number)
}

func (l *flow) frame(data []byte) {
	want := pattern(uint64(l.got), uint64(len(data)))
	if len(data) < 4 || binary.LittleEndian.Uint32(data) != l.got {
		l.w.Errorf("frame %d came in place of frame %d", data, l.got)
		return
	}
	if d := difference(data[4:], want[4:]); d != "" {
		l.w.Errorf("frame %d: %s", l.got, d)
	}
	l.got++
}

// post posts one random batch, as far as it is taken.
func (l *flow) post(r *rand.Rand) {
	var ops []transport.Op
	var used []*slot // of the ops, nil for a frame
	number, write := l.frames, l.writes
	for range 1 + r.IntN(5) {
		if r.IntN(3) == 0 {
			b := pattern(uint64(number), 4+r.Uint64N(1<<r.IntN(14)))
			binary.LittleEndian.PutUint32(b, number)
			ops, used = append(ops, frame(b)), append(used, nil)
			number++
			continue
		}
		s := &l.slots[r.IntN(flowSlots)]
		if s.sourceInUse || s.targetInUse {
			continue
		}
		s.sourceInUse, s.targetInUse = true, true
		s.n = r.Uint64N(1 + slotBytes>>r.IntN(16))
		s.off = r.Uint64N(slotBytes - s.n + 1)
		s.seed = r.Uint64()
		where := r.Uint64N(slotBytes - s.n + 1)
		src := slice(l.src, s.at+where, s.n)
		l.w.fill(src, s.seed)
		ops = append(ops, l.dst.write(s.at+s.off, write, spans(src, r.Uint64N(s.n+1))...))
		used = append(used, s)
		write++
	}
	if len(ops) == 0 {
		return
	}
	k, err := l.from.try(ops...)
	require.NoError(l.w, err)
	for i, s := range used {
		switch {
		case s == nil && i < k:
			l.frames++
		case s != nil && i < k:
			l.bySource[ops[i].User], l.byNumber[ops[i].Loan] = s, s
			l.writes++
		case s != nil:
			s.sourceInUse, s.targetInUse = false, false
		}
	}
}

// quiet says whether all that was taken has ended and arrived.
func (l *flow) quiet() bool { return l.from.idle() && len(l.byNumber) == 0 && l.got == l.frames }

// A path is one Conn under soak.
type path struct {
	a, b     *node
	to, back *flow
}

// soak runs random traffic between a few Fabrics whose users are slow at
// random, and closes a Conn with probability loss at each step.
func soak(w *world, seed uint64, loss float64) {
	const nodes, steps = 4, 1000
	r := rand.New(rand.NewPCG(seed, 0))
	var paths []*path
	for i := range nodes {
		a := w.open(string(rune('a' + i)))
		for _, b := range w.nodes[:i] {
			la, lb := w.connect(a, b)
			paths = append(paths, &path{a, b,
				newFlow(w, la, lb, b.target(flowSlots*slotBytes), w.alloc(flowSlots*slotBytes).Span()),
				newFlow(w, lb, la, a.target(flowSlots*slotBytes), w.alloc(flowSlots*slotBytes).Span())})
		}
	}
	for range steps {
		p := paths[r.IntN(len(paths))]
		if r.IntN(2) == 0 {
			p.to.post(r)
		} else {
			p.back.post(r)
		}
		for _, n := range w.nodes {
			if r.IntN(20) == 0 {
				n.asleep = !n.asleep
				n.ev = n.ev[:1+r.IntN(cap(n.ev))]
			}
		}
		w.turn()
		if w.Failed() {
			w.FailNow()
		}
		if r.Float64() < loss {
			p.again(r)
		}
	}
	wake(w)
	w.until("all that was posted arrives", func() bool {
		for _, p := range paths {
			if !p.to.quiet() || !p.back.quiet() {
				return false
			}
		}
		return true
	})
}

func wake(w *world) {
	for _, n := range w.nodes {
		n.asleep = false
	}
}

// again closes the Conn at one end, then at the other, and opens it anew on the
// same memory when both have given EvClosed: until then writes may still land.
func (p *path) again(r *rand.Rand) {
	w := p.to.w
	p.to.cut, p.back.cut = true, true
	end, other := p.to.from, p.to.to
	if r.IntN(2) == 0 {
		end, other = other, end
	}
	end.close()
	wake(w)
	w.until("the peer hears", func() bool { return other.isDown })
	other.close()
	w.until("both ends of a closed conn are over", func() bool { return end.isOver && other.isOver })
	for _, d := range end.done {
		if d.err != nil && !errors.Is(d.err, transport.ErrClosed) {
			w.Errorf("an op on a conn that its user closed ended in %v", d.err)
		}
	}
	a, b := w.connect(p.a, p.b)
	p.to = newFlow(w, a, b, p.to.dst, p.to.src)
	p.back = newFlow(w, b, a, p.back.dst, p.back.src)
}
