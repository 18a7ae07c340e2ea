//go:build !race

package rails

import (
	"fmt"
	"hash/maphash"
	"math/bits"
	"regexp"
	"slices"
)

// The model: two orders, and all that a network between them may do. A search visits each state that
// they can get into and checks what the package promises.
//
// Members 0 and 1 are live at the start, and member 2 is being dialed. Each member has a queue in
// each direction. A member dies when the first side is told that it is down. What is in its queues may
// still arrive until the receiver is told that it is closed; then the rest is lost. A write may
// land at any time from its posting until then. It is not needed to try all those times: a write
// that can land after its frame was given is an error at once, and a frame
// counts only on writes that had to land before it.

const (
	maxNums    = 8 // window, too
	maxMembers = 3
	late       = 2 // the member that comes later
)

// packet is what travels: parts of a message, or an item.
type packet struct {
	parts                      uint8 // not 0: a write of these
	kind                       kind
	num, ack, got, about, came uint8
}

type pipe struct {
	n uint8
	p [16]packet
}

func (q *pipe) push(p packet) {
	q.p[q.n] = p
	q.n++
}

// side is an order with its arrays, what its user and its Fabrics know, and what is true.
type side struct {
	order
	arrays struct {
		members [maxMembers]member
		log     [8]statement
		batches [maxNums]batch
		in      [maxNums]kind
	}
	step   uint8          // of the script
	what   [maxNums]uint8 // by number: 1 + which frame it is, or 0 for a fence
	parts  [maxNums]uint8 // by number: which parts are written before it
	reads  [maxNums]uint8 // by number: members that may read the source
	free   uint8          // numbers that were let go of
	taken  uint8          // frames that were given here
	landed uint8          // parts that have landed here, of frames to come
	shut   uint8          // members that are to be closed here
	gone   uint8          // members that are closed here
	quiet  uint8          // wrong variants: members that were half open when they went down
	count  [maxMembers]uint8
	spoken uint8
}

type world struct {
	sides  [2]side // the dialer first
	pipes  [2][maxMembers]pipe
	dead   uint8 // members
	deaths uint8
	asked  bool // the other side was told of the late member
}

var scratch struct {
	out  []post
	done []uint64
	shut []uint32
	key  []byte
}

// clone copies w into to.
func (w *world) clone(to *world) {
	*to = *w
	for i := range to.sides {
		s := &to.sides[i]
		s.members = s.arrays.members[:len(s.members)]
		s.log = s.arrays.log[:len(s.log)]
		s.batches, s.in = s.arrays.batches[:], s.arrays.in[:]
		s.order.out, s.order.done, s.order.shut = scratch.out[:0], scratch.done[:0], scratch.shut[:0]
	}
}

// step of a script: a write of a part, or, if that is 0, the next frame.
type step struct {
	part uint8
	on   uint32 // the member, if it is usable; or sealing
}

const sealing = 255 // ends open batches in fences

// A model is what is searched.
type model struct {
	name   string
	script [2][]step
	deaths uint8
	slow   bool // members let go of sources as late as they can, else at once
	long   bool // left to check-long
	narrow bool // nothing is received on a member that is down
	eager  bool // an acknowledgement is sent as soon as it is owed
	relief bool // the late member comes only when another has died
	wrong  wrong
	want   string // the violation of a wrong variant
}

// wrong is a variant of the protocol that must fail.
type wrong uint8

const (
	right wrong = iota
	statesEarly
	countsAtDown
	resendsEarly
	freesOnAck
	statesOnce
	overtakes
	owesNothing
	dropsSilently
	acceptorEarly
	dialerEarly
)

func frames(script []step) (need []uint8) {
	var parts uint8
	for _, s := range script {
		if parts |= s.part; s.part == 0 && s.on != sealing {
			need, parts = append(need, parts), 0
		}
	}
	return need
}

type act uint8

const (
	actStep act = iota
	actRecv
	actDown
	actClosed
	actLet
	actAck
	actConnect
	actFail
	actAccept
)

type action struct {
	act  act
	side uint8
	m    uint8 // member, of actLet the number
}

func (a action) String() string {
	who := [...]string{"dialer", "acceptor"}[a.side]
	what := [...]string{"posts", "receives", "down", "closed", "lets go", "acknowledges", "connects", "fails to connect", "accepts"}[a.act]
	return fmt.Sprintf("%s %s %d", who, what, a.m)
}

// A search goes through the states of a model.
type search struct {
	*model
	need [2][]uint8 // parts of each frame
	w    *world     // that do works on
	bad  string     // the violation
}

func (x *search) fail(format string, args ...any) {
	if x.bad == "" {
		x.bad = fmt.Sprintf(format, args...)
	}
}

func (x *search) start() *world {
	w := &world{}
	for i := range w.sides {
		s := &w.sides[i]
		s.order = *newOrder(i == 0, maxNums, 1<<20)
		s.members = s.arrays.members[:0]
		s.log = s.arrays.log[:0]
	}
	first := &world{}
	w.clone(first)
	x.w = first
	for id := range uint8(2) {
		first.sides[0].dial()
		x.apply(action{actConnect, 0, id})
		x.apply(action{actAccept, 1, id})
		for n := range uint8(3) {
			side := (n + 1) % 2
			for first.pipes[1-side][id].n > 0 {
				x.apply(action{actRecv, side, id})
			}
		}
	}
	first.asked = false
	first.sides[0].dial()
	return first
}

// actions lists what may happen next. It reports whether one of them must happen.
func (x *search) actions(w *world, list []action) (_ []action, must bool) {
	for i := range uint8(2) {
		s := &w.sides[i]
		if int(s.step) < len(x.script[i]) && s.room(1, 0) {
			list = append(list, action{actStep, i, 0})
		}
		if s.owes() > 0 && s.usable() != nil {
			list = append(list, action{actAck, i, 0})
		}
		for m := range uint8(maxMembers) {
			if s.shut>>m&1 != 0 && s.gone>>m&1 == 0 {
				list = append(list, action{actClosed, i, m})
			}
		}
		for num := s.tail; x.slow && num < s.next; num++ {
			if s.reads[num] != 0 && (num < s.acked || s.over) {
				list = append(list, action{actLet, i, uint8(num)})
			}
		}
		for _, m := range s.members {
			id, may := uint8(m.id), w.dead>>m.id&1 != 0 || w.deaths < x.deaths
			switch m.phase {
			case dialing:
				if x.relief && w.dead == 0 {
					continue
				}
				list = append(list, action{actConnect, i, id})
				if may {
					list = append(list, action{actFail, i, id})
				}
			case half, live:
				if may && w.dead>>id&1 != 0 {
					list = append(list, action{actDown, i, id})
				}
			}
			if !s.over && m.phase != closed && !(x.narrow && m.phase == down) && x.first(w, i, id) >= 0 {
				list = append(list, action{actRecv, i, id})
			}
		}
	}
	must = len(list) > 0
	// Nothing needs to die. What is dead when it is dialed need not be accepted.
	for i := range uint8(2) {
		for _, m := range w.sides[i].members {
			if (m.phase == half || m.phase == live) && w.dead>>m.id&1 == 0 && w.deaths < x.deaths {
				list = append(list, action{actDown, i, uint8(m.id)})
			}
		}
	}
	if !w.asked && !(x.relief && w.dead == 0) {
		list = append(list, action{actAccept, 1, late})
		must = must || w.dead>>late&1 == 0
	}
	return list, must
}

// first is the place of the first item for side i on member m, or -1.
func (x *search) first(w *world, i, m uint8) int {
	q := &w.pipes[1-i][m]
	return slices.IndexFunc(q.p[:q.n], func(p packet) bool { return p.parts == 0 })
}

// apply does a on x.w, then what the orders ask for.
func (x *search) apply(a action) {
	s, m := &x.w.sides[a.side], uint32(a.m)
	switch a.act {
	case actStep:
		x.post(a.side)
	case actRecv:
		x.recv(a.side, a.m)
	case actDown:
		x.down(a.side, a.m)
	case actClosed:
		x.closed(a.side, a.m)
	case actLet:
		x.let(a.side, uint64(a.m))
	case actAck:
		s.acknowledge()
	case actConnect:
		if s.come(m); x.wrong == dialerEarly && s.find(m).phase == half {
			s.find(m).phase = live
			s.resend()
		}
	case actFail:
		x.kill(a.m)
		if s.failed(m); x.wrong == dropsSilently {
			x.silence(s, m)
		}
	case actAccept:
		x.w.asked = true
		if !s.come(m) {
			x.w.dead |= 1 << m
		} else if x.wrong == acceptorEarly {
			s.lift(s.find(m))
		}
	}
	x.flush(0)
	x.flush(1)
	for i := range x.w.sides {
		if s := &x.w.sides[i]; x.eager && s.owes() > 0 {
			s.acknowledge()
			x.flush(uint8(i))
		}
	}
	x.tidy()
}

func (x *search) kill(m uint8) {
	if x.w.dead>>m&1 == 0 {
		x.w.dead |= 1 << m
		x.w.deaths++
	}
}

// post does the next step of the script.
func (x *search) post(i uint8) {
	s := &x.w.sides[i]
	st := x.script[i][s.step]
	s.step++
	if st.on == sealing {
		s.seal()
		return
	}
	m := s.find(st.on)
	if m == nil || m.phase != live {
		m = s.usable()
	}
	if st.part != 0 {
		num := s.write(m.id)
		s.parts[num] |= st.part
		x.write(i, uint8(m.id), num, st.part)
		return
	}
	for num := s.sealed; x.wrong == overtakes && num < s.next; num++ {
		if b := s.at(num); b.at >= 0 && s.find(uint32(b.at)).phase != live {
			b.at, b.writes, s.parts[num] = nowhere, 0, 0
		}
	}
	var nth uint8
	for _, before := range x.script[i][:s.step] {
		if before.part == 0 && before.on != sealing {
			nth++
		}
	}
	s.what[s.frame(m.id, 1)] = nth
}

// write puts parts of batch num into the queue of member m.
func (x *search) write(i, m uint8, num uint64, parts uint8) {
	s, to := &x.w.sides[i], &x.w.sides[1-i]
	if s.free>>num&1 != 0 {
		x.fail("source: batch %d is posted again after it was let go of", num)
	}
	if s.reads[num] |= 1 << m; !x.slow {
		x.let(i, num)
	}
	if to.gone>>m&1 != 0 {
		return
	}
	for f := range to.taken {
		if x.need[i][f]&parts != 0 {
			x.fail("late write: batch %d is posted again after frame %d was given", num, f)
		}
	}
	x.w.pipes[i][m].push(packet{parts: parts})
}

// let says that the member has let go of what it has of a batch.
func (x *search) let(i uint8, num uint64) {
	s := &x.w.sides[i]
	s.reads[num] = 0
	for b := s.at(num); b.held > 0; {
		s.order.let(num)
	}
}

// flush does what the order of side i has answered.
func (x *search) flush(i uint8) {
	s, to := &x.w.sides[i], &x.w.sides[1-i]
	for _, p := range s.order.out {
		if parts := s.parts[p.num]; p.again && parts != 0 {
			x.write(i, uint8(p.to), p.num, parts)
		}
		if p.kind == stating && x.wrong == statesOnce {
			if s.spoken>>p.num&1 != 0 {
				continue
			}
			s.spoken |= 1 << p.num
		}
		if to.gone>>p.to&1 == 0 {
			x.w.pipes[i][p.to].push(packet{0, p.kind, uint8(p.num), uint8(p.ack), uint8(p.got), uint8(p.id), uint8(p.n)})
		}
	}
	for _, num := range s.order.done {
		if s.reads[num] != 0 {
			x.fail("source: batch %d is let go of, and member set %b may read it", num, s.reads[num])
		}
		if s.free>>num&1 != 0 {
			x.fail("source: batch %d is let go of twice", num)
		}
		s.free |= 1 << num
	}
	for _, id := range s.order.shut {
		s.shut |= 1 << id
		if x.wrong == countsAtDown {
			s.count[id] = uint8(s.find(id).came)
		}
	}
	s.order.out, s.order.done, s.order.shut = s.order.out[:0], s.order.done[:0], s.order.shut[:0]
}

func (x *search) recv(i, m uint8) {
	s, from := &x.w.sides[i], &x.w.sides[1-i]
	q := &x.w.pipes[1-i][m]
	at := x.first(x.w, i, m)
	for _, p := range q.p[:at] {
		for f := int(s.taken); f < len(x.need[1-i]); f++ {
			s.landed |= p.parts & x.need[1-i][f]
		}
	}
	p := q.p[at]
	q.n = uint8(copy(q.p[:], q.p[at+1:q.n]))
	it := item{p.kind, uint64(p.num), uint64(p.ack), uint64(p.got), statement{uint32(p.about), uint64(p.came)}}
	if it.kind == stating && it.num == s.got && (x.wrong == resendsEarly || x.wrong == dropsSilently) {
		if about := s.find(it.id); about == nil || about.theirs {
			s.got++
			s.owe = true
		}
	}
	if it.kind == stating && it.num > s.got && x.wrong == statesOnce {
		s.got = it.num
	}
	owe := s.owe
	if err := s.order.recv(uint32(m), it); err != nil {
		x.fail("%v", err)
	}
	if it.kind == stating && x.wrong == owesNothing {
		s.owe = owe
	}
	for num := s.tail; x.wrong == freesOnAck && num < s.acked; num++ {
		for b := s.at(num); b.held > 0; {
			s.order.let(num)
		}
	}
	for {
		num, ok := s.take()
		if !ok {
			return
		}
		x.give(s, i, int(from.what[num])-1)
	}
}

// give checks a frame that is given on side i.
func (x *search) give(s *side, i uint8, f int) {
	if f != int(s.taken) {
		x.fail("order: frame %d is given, not %d", f, s.taken)
		return
	}
	need := x.need[1-i][f]
	if s.landed&need != need {
		x.fail("torn: frame %d is given, and of its writes %b only %b have landed", f, need, s.landed)
	}
	for m := range x.w.pipes[1-i] {
		q := &x.w.pipes[1-i][m]
		for _, p := range q.p[:q.n] {
			if p.parts&need != 0 {
				x.fail("late write: frame %d is given, and a write of it is on its way on member %d", f, m)
			}
		}
	}
	s.landed &^= need
	s.taken++
}

func (x *search) down(i, m uint8) {
	s := &x.w.sides[i]
	x.kill(m)
	if x.wrong == dropsSilently && s.find(uint32(m)).phase == half {
		s.quiet |= 1 << m
	}
	s.order.down(uint32(m))
	if x.wrong == statesEarly {
		s.order.closed(uint32(m))
	}
}

func (x *search) closed(i, m uint8) {
	s := &x.w.sides[i]
	s.gone |= 1 << m
	for num := s.tail; num < s.next; num++ {
		if s.reads[num]>>m&1 != 0 {
			s.reads[num] &^= 1 << m
			if s.reads[num] == 0 {
				x.let(i, num)
			}
		}
	}
	x.w.pipes[1-i][m].n = 0
	if x.wrong == countsAtDown {
		s.find(uint32(m)).came = uint64(s.count[m])
	}
	s.order.closed(uint32(m))
	if s.quiet>>m&1 != 0 {
		x.silence(s, uint32(m))
	}
	if found := s.find(uint32(m)); x.wrong == resendsEarly && found != nil && !found.theirs {
		found.theirs = true
		s.settle(found)
	}
}

// silence takes back what s has said and knows of member m.
func (x *search) silence(s *side, m uint32) {
	n := len(s.log)
	s.log = slices.DeleteFunc(s.log, func(st statement) bool { return st.id == m })
	s.stated -= uint64(n - len(s.log))
	s.members = slices.DeleteFunc(s.members, func(o member) bool { return o.id == m })
	s.order.out = slices.DeleteFunc(s.order.out, func(p post) bool { return p.kind == stating && p.id == m })
}

// tidy removes from the queues what will change nothing, so that fewer states differ.
func (x *search) tidy() {
	for i := range x.w.sides {
		s := &x.w.sides[i]
		confirmed := uint8(s.stated) - uint8(len(s.log))
		for m := range maxMembers {
			q, to := &x.w.pipes[1-i][m], s.find(uint32(m))
			if s.over {
				q.n = 0
			}
			if to == nil || to.phase == half || to.phase == dialing || q.n == 0 {
				continue
			}
			n := 0
			for _, p := range q.p[:q.n] {
				switch {
				case p.parts != 0 && n > 0 && q.p[n-1].parts != 0:
					q.p[n-1].parts |= p.parts
					continue
				case p.kind == bare && uint64(p.ack) <= s.acked && p.got <= confirmed,
					p.kind == stating && uint64(p.num) < s.got,
					p.parts == 0 && x.narrow && to.phase == down:
					continue
				}
				q.p[n] = p
				n++
			}
			q.n = uint8(n)
		}
	}
}

// settled checks a state in which nothing needs to happen any more.
func (x *search) settled(w *world) {
	a, b := &w.sides[0], &w.sides[1]
	if a.over != b.over {
		x.fail("stuck: one side has ended: %v %v", a.over, b.over)
	}
	for i := range w.sides {
		s, to := &w.sides[i], &w.sides[1-i]
		if s.tail != s.next || bits.OnesCount8(s.free) != int(s.next) || s.bytes != 0 {
			x.fail("stuck: of side %d's batches up to %d are done up to %d", i, s.next, s.tail)
		}
		if s.over {
			if len(s.members) != 0 {
				x.fail("stuck: side %d has ended and keeps members %v", i, s.members)
			}
			continue
		}
		if int(s.step) != len(x.script[i]) || int(to.taken) != len(x.need[i]) {
			x.fail("stuck: side %d has done %d of %d steps, %d of %d frames were given", i, s.step, len(x.script[i]), to.taken, len(x.need[i]))
		}
		if len(s.log) != 0 || slices.ContainsFunc(s.members, func(m member) bool { return m.phase != live && m.phase != dialing }) {
			x.fail("kept: side %d keeps statements %v, members %v", i, s.log, s.members)
		}
		if slices.ContainsFunc(s.in, func(k kind) bool { return k != none }) || s.landed != 0 {
			x.fail("kept: side %d keeps frames %v", i, s.in)
		}
	}
}

func flag(b bool) byte {
	if b {
		return 1
	}
	return 0
}

// key is what tells states apart.
func (w *world) key(buf []byte) []byte {
	for i := range w.sides {
		s := &w.sides[i]
		buf = append(buf, s.shut, s.gone, s.free, byte(s.next))
		if s.over { // all that matters is what it still holds
			for num := s.tail; num < s.next; num++ {
				buf = append(buf, s.reads[num], byte(s.at(num).held))
			}
			for _, m := range s.members {
				buf = append(buf, byte(m.id), byte(m.phase))
			}
		} else {
			buf = s.key(buf)
		}
		for m := range w.pipes[i] {
			q := &w.pipes[i][m]
			buf = append(buf, q.n)
			for _, p := range q.p[:q.n] {
				buf = append(buf, p.parts, byte(p.kind), p.num, p.ack, p.got, p.about, p.came)
			}
		}
	}
	return append(buf, w.dead, w.deaths, flag(w.asked))
}

func (s *side) key(buf []byte) []byte {
	buf = append(buf, byte(s.tail), byte(s.acked), byte(s.sealed), byte(s.given), byte(s.got), byte(s.stated),
		byte(len(s.log)), byte(len(s.members)), flag(s.owes() > 0), byte(s.seen.low), byte(s.seen.bits),
		s.step, s.taken, s.landed, s.quiet, s.spoken)
	buf = append(buf, s.count[:]...)
	for _, m := range s.members {
		if m.phase == closed {
			m.came = 0 // is in the statement
			if m.theirs {
				m.sent, m.n = 0, 0
			}
		}
		buf = append(buf, byte(m.id), byte(m.phase), byte(m.sent), byte(m.came), byte(m.log), flag(m.theirs), byte(m.n))
	}
	for _, l := range s.log {
		buf = append(buf, byte(l.id), byte(l.n))
	}
	for num := s.tail; num < s.next; num++ {
		b := s.at(num)
		pos, parts, what := byte(b.pos), s.parts[num], s.what[num]
		if b.at < 0 || num < s.acked {
			pos = 0 // it will not be looked at
		}
		if num < s.acked {
			parts, what = 0, 0
		}
		buf = append(buf, byte(b.at+2), pos, parts, what, byte(b.held), flag(b.done), s.reads[num])
	}
	for _, k := range s.in {
		buf = append(buf, byte(k))
	}
	return buf
}

// origin is how a state was found first.
type origin struct {
	from uint32
	by   action
}

// ledTo returns the actions that lead to state n, and last.
func ledTo(origins []origin, n uint32, last []action) (trace []action) {
	for trace = last; n != 0; n = origins[n].from {
		trace = append(trace, origins[n].by)
	}
	slices.Reverse(trace)
	return trace
}

// run searches all states, the nearest first if breadth is set. It returns how many there are, and
// the violation with what led to it. Of a wrong variant it looks for the wanted violation, and does not look
// behind others.
func (m *model) run(breadth bool) (states int, bad string, trace []action) {
	x := &search{model: m, need: [2][]uint8{frames(m.script[0]), frames(m.script[1])}}
	type entry struct {
		w *world
		n uint32
	}
	seed, want := maphash.MakeSeed(), regexp.MustCompile(m.want)
	origins, queue := []origin{{}}, []entry{{x.start(), 0}}
	seen := map[uint64]struct{}{}
	var spare []*world
	var acts []action
	stop := func(n uint32, last ...action) bool {
		if x.bad == "" || !want.MatchString(x.bad) {
			return false
		}
		trace = ledTo(origins, n, last)
		return true
	}
	for len(queue) > 0 {
		e := queue[len(queue)-1]
		if breadth {
			e, queue = queue[0], queue[1:]
		} else {
			queue = queue[:len(queue)-1]
		}
		var must bool
		if acts, must = x.actions(e.w, acts[:0]); !must {
			if x.settled(e.w); stop(e.n) {
				return len(origins), x.bad, trace
			}
		}
		for _, a := range acts {
			if len(spare) == 0 {
				spare = append(spare, &world{})
			}
			x.w, x.bad = spare[len(spare)-1], ""
			e.w.clone(x.w)
			if x.apply(a); stop(e.n, a) {
				return len(origins), x.bad, trace
			}
			scratch.key = x.w.key(scratch.key[:0])
			h := maphash.Bytes(seed, scratch.key)
			if _, ok := seen[h]; ok || x.bad != "" {
				continue
			}
			seen[h] = struct{}{}
			spare = spare[:len(spare)-1]
			origins = append(origins, origin{e.n, a})
			queue = append(queue, entry{x.w, uint32(len(origins) - 1)})
		}
		x.bad = ""
		spare = append(spare, e.w)
	}
	return len(origins), "", nil
}

var (
	// cut is a frame behind a write, then one whose writes are cut over both members.
	cut = []step{{1, 0}, {0, 0}, {2, 0}, {4, 1}, {0, 1}}
	// plain is two frames, on one member each.
	plain = []step{{0, 0}, {1, 1}, {0, 1}}
	// once is a frame behind a write, newer the same on the late member, and sealed one behind fences.
	once   = []step{{1, 0}, {0, 0}}
	sealed = []step{{1, 0}, {0, sealing}, {2, 0}, {4, 1}, {0, sealing}, {0, 1}}
	newer  = []step{{1, late}, {0, late}}
)
