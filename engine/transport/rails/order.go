package rails

import (
	"fmt"
	"slices"
)

// An order is one side of a Conn made of members. Its user tells it what is posted and what has
// come. It answers in out, done and shut, which the user empties, in order, after each call.
//
// Both sides know a member by a number, which the dialer chooses with dial and which is never used
// again. Member 0 begins the Conn and is usable at once. On each later member the dialer speaks
// first and the other side answers. Until a side has an item of its peer on such a member, it posts
// no frame and no write there: only then the peer is known to have the member, so that its statement
// about it will mean that no write can land any more.
type order struct {
	dialer  bool
	members []member
	seen    seen

	// What is sent. Each batch has a number, which is that of the frame that ends it. In
	// [tail, acked) are batches that the peer has given to its user and of which a member has not
	// let go, up to sealed those on their way, up to next those whose frame is not posted yet.
	batches                   []batch // by number % its length, which is a power of two
	tail, acked, sealed, next uint64
	noted                     uint64 // the peer has acknowledged these; acked goes there with confirm
	bytes, most               int    // of the frames that are kept, and the bound

	// What comes. Numbers in [given, given+len(in)) may come.
	in    []kind // by number % its length, which is that of the peer's batches
	given uint64 // numbers below have been given to the user
	told  uint64 // the peer was last told of these
	owe   bool   // it must be told again, or of something else

	// Statements about members that are closed here. The peer confirms them by their running number.
	log    []statement // those that are not confirmed
	stated uint64      // how many there have been, log included
	got    uint64      // how many of the peer have come

	over bool // no member is left, or end was called

	turn  int // counts changes of the members that are live
	ended int // members that are closed, and not forgotten

	out  []post   // what the user has to send, in order on each member
	done []uint64 // batches whose ops are done; once over is set, those not acknowledged have failed
	shut []uint32 // members that the user has to close
}

// phase is how far a member is, seen from here.
type phase uint8

const (
	dialing phase = iota // the dialer has chosen the number
	half                 // it has come, and nothing of the peer on it
	live
	down   // it is being closed
	closed // nothing of the peer can land over it any more
)

// member is one member Conn.
type member struct {
	id       uint32
	phase    phase
	sent     uint64 // numbered items posted on it
	came     uint64 // numbered items that have come on it
	ack, got uint64 // the last ones that have come on it
	log      uint64 // once closed: the running number of our statement
	theirs   bool   // the peer has stated, that
	n        uint64 // so many of our items have come
}

// statement says that a member is closed here, and that n numbered items of it have come.
type statement struct {
	id uint32
	n  uint64
}

type kind uint8

const (
	none     kind = iota
	frame         // a frame of the user
	fence         // ends the writes of a member; it is numbered as frames are
	bare          // an acknowledgement alone
	stating       // a statement
	lastKind = stating
	numbered = fence // kinds from frame to here have a number and are acknowledged
)

const (
	dialAhead = 64  // bounds the numbers of members that the dialer knows of and the peer may not
	mostKept  = 256 // bounds members, and statements that the peer has not confirmed
)

// item is what travels as one frame of a member, less the bytes of the user's frame.
type item struct {
	kind      kind
	num       uint64 // of a frame or fence its number, of a statement its running number
	ack       uint64 // the sender has given its user all numbers below; not with a statement
	got       uint64 // so many statements of the receiver have come; likewise
	statement        // with a statement alone
}

// post asks for an item to be sent on member to. With again, the writes of its batch are to be
// posted there first.
type post struct {
	to    uint32
	again bool
	item
}

// newOrder returns an order that keeps at most window batches, a power of two, and most bytes of
// frames. Both sides have the same window.
func newOrder(dialer bool, window, most int) *order {
	return &order{dialer: dialer, most: most, batches: make([]batch, window), in: make([]kind, window)}
}

func (o *order) find(id uint32) *member {
	for i := range o.members {
		if o.members[i].id == id {
			return &o.members[i]
		}
	}
	return nil
}

// dial returns the number of a new member. It is false if the Conn has ended or too many members are
// unsettled. Call come or failed when the attempt has ended.
func (o *order) dial() (id uint32, ok bool) {
	id = o.seen.low
	oldest := slices.IndexFunc(o.members, func(m member) bool { return m.phase != live && !m.theirs })
	if o.over || len(o.members) >= mostKept || oldest >= 0 && id-o.members[oldest].id >= dialAhead {
		return 0, false
	}
	o.seen.add(id)
	o.members = append(o.members, member{id: id, phase: dialing})
	return id, true
}

// come says that member id is connected. It is false where the member must be closed and not be
// mentioned again.
func (o *order) come(id uint32) bool {
	m := o.find(id)
	if !o.dialer {
		if o.over || len(o.members)+len(o.log) >= mostKept || o.seen.add(id) != nil {
			return false
		}
		o.members = append(o.members, member{id: id, phase: half})
		m = &o.members[len(o.members)-1]
	} else if m == nil || m.phase != dialing {
		return false
	}
	m.phase = half
	o.turn++
	switch {
	case o.over || m.theirs:
		o.lose(m)
	case id == 0:
		m.phase = live
	case o.dialer:
		o.greet(m)
	}
	return true
}

// greet sends what is due on each new member.
func (o *order) greet(m *member) {
	o.emit(m, item{kind: bare}, false)
	first := o.stated - uint64(len(o.log))
	for i, s := range o.log {
		o.emit(m, item{kind: stating, num: first + uint64(i), statement: s}, false)
	}
}

// failed says that the attempt to connect member id has failed, and that nothing of it is left.
func (o *order) failed(id uint32) {
	if m := o.find(id); m != nil && m.phase == dialing {
		o.close(m)
	}
}

// down says that member id is unusable, as EvDown does.
func (o *order) down(id uint32) {
	if m := o.find(id); m != nil && (m.phase == half || m.phase == live) {
		o.lose(m)
	}
}

// lose begins the end of a member.
func (o *order) lose(m *member) {
	m.phase = down
	o.turn++
	o.shut = append(o.shut, m.id)
	o.judge()
}

// judge ends the Conn if no member is left.
func (o *order) judge() {
	if !slices.ContainsFunc(o.members, func(m member) bool { return m.phase < down }) {
		o.end()
	}
}

// closed says that member id has ended, as EvClosed does. All its ops have been let go of before.
func (o *order) closed(id uint32) {
	if m := o.find(id); m != nil && m.phase != dialing && m.phase != closed {
		if m.phase != down {
			o.lose(m)
		}
		o.close(m)
	}
}

func (o *order) close(m *member) {
	m.phase, m.log = closed, o.stated
	o.ended++
	o.state(statement{m.id, m.came})
	if m.theirs {
		o.settle(m)
	}
	o.judge()
	o.forget()
}

// state makes a statement, on each member that can carry it. Later ones get it when they come.
func (o *order) state(s statement) {
	if o.over {
		return
	}
	o.log = append(o.log, s)
	o.stated++
	for i := range o.members {
		if m := &o.members[i]; m.phase == live || m.phase == half && o.dialer {
			o.emit(m, item{kind: stating, num: o.stated - 1, statement: s}, false)
		}
	}
}

// end ends the Conn. It is quiet when no member is left and all batches are done.
func (o *order) end() {
	if o.over {
		return
	}
	o.over = true
	o.turn++
	o.log = o.log[:0]
	for i := range o.members {
		if m := &o.members[i]; m.phase == half || m.phase == live {
			m.phase = down
			o.shut = append(o.shut, m.id)
		}
	}
	for num := o.tail; num < o.next; num++ {
		if b := o.at(num); b.held == 0 && !b.done {
			o.finish(num)
		}
	}
}

// unsettled returns the first member that is closed here and whose end the peer has not stated.
func (o *order) unsettled() (id uint32, ok bool) {
	for i := range o.members {
		if m := &o.members[i]; m.phase == closed && !m.theirs {
			return m.id, true
		}
	}
	return 0, false
}

// ready reports whether take has something to give, or a fence to pass.
func (o *order) ready() bool { return o.in[o.given&uint64(len(o.in)-1)] != none }

// forget drops members of which both sides know that the other has stated.
func (o *order) forget() {
	if o.ended == 0 {
		return
	}
	before, confirmed := len(o.members), o.stated-uint64(len(o.log))
	o.members = slices.DeleteFunc(o.members, func(m member) bool {
		return m.phase == closed && (o.over || m.theirs && m.log < confirmed)
	})
	o.ended -= before - len(o.members)
}

// emit hands out an item with what the peer is to know. The peer may not have a member yet that is not
// live, so it counts as told only by the others.
func (o *order) emit(m *member, it item, again bool) {
	if it.kind != stating {
		it.ack, it.got = o.given, o.got
		if m.phase == live {
			o.told, o.owe = o.given, false
		}
	}
	o.out = append(o.out, post{m.id, again, it})
}

// seen is the set of members' numbers that have been used.
type seen struct {
	low  uint32 // all below are in it
	bits uint64 // and low+i, if bit i is set
}

func (s *seen) add(id uint32) error {
	i := id - s.low
	switch {
	case id < s.low || i < dialAhead && s.bits>>i&1 != 0:
		return fmt.Errorf("rails: member %d, whose end was stated before", id)
	case i >= dialAhead:
		return fmt.Errorf("rails: member %d, but %d has not come yet: at most %d ahead", id, s.low, dialAhead-1)
	}
	for s.bits |= 1 << i; s.bits&1 != 0; s.low++ {
		s.bits >>= 1
	}
	return nil
}
