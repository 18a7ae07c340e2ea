package rails

// What batch.at and batch.pos may be instead of a place.
const (
	nowhere = -1         // to be posted again
	arrived = -2         // its member is gone, but the peer has it
	never   = ^uint64(0) // it was not posted on its member
)

// batch is the writes on one member up to a frame or fence, and that frame.
type batch struct {
	at     int    // its member, nowhere or arrived
	pos    uint64 // its frame is numbered item pos of that member, from 0, or never
	bytes  int    // of its frame
	writes int
	held   int // ops that its member has not let go of
	frame  bool
	done   bool
}

func (o *order) at(num uint64) *batch { return &o.batches[num&uint64(len(o.batches)-1)] }

// usable returns a member that takes frames and writes, or nil.
func (o *order) usable() *member {
	for i := range o.members {
		if o.members[i].phase == live {
			return &o.members[i]
		}
	}
	return nil
}

// room reports whether writes on so many members and a frame of so many bytes can be taken now.
func (o *order) room(members, bytes int) bool { return o.holds(members, bytes) && o.usable() != nil }

// holds is room, but for a member that takes them.
func (o *order) holds(members, bytes int) bool {
	return o.next-o.tail+uint64(members)+1 <= uint64(len(o.batches)) && (o.bytes == 0 || o.bytes+bytes <= o.most)
}

// open begins a batch on member id, for which there is room.
func (o *order) open(id uint32) uint64 {
	*o.at(o.next) = batch{at: int(id), pos: never}
	o.next++
	return o.next - 1
}

// write says that a write is posted on member id, which is live. It returns the batch that the write is part of.
// The user calls let with that number when the member has let go of the source.
func (o *order) write(id uint32) (num uint64) {
	for num = o.sealed; num < o.next && o.at(num).at != int(id); num++ {
	}
	if num == o.next {
		o.open(id)
	}
	b := o.at(num)
	b.writes++
	b.held++
	return num
}

// frame says that a frame is to be sent on member id, which is live, and returns its number. It is
// given to the peer's user after all writes before it: each other member that has some gets a
// fence. The frame costs no fence on id if the last batch was begun there.
func (o *order) frame(id uint32, bytes int) (num uint64) {
	if o.next == o.sealed || o.at(o.next-1).at != int(id) {
		o.open(id)
	}
	num = o.next - 1
	b := o.at(num)
	b.frame, b.bytes = true, bytes
	o.bytes += bytes
	o.seal()
	return num
}

// seal ends the open batches. Those that have no frame end in a fence: frame calls it, and so does a user
// whose writes no frame has followed so far.
func (o *order) seal() {
	lost := false
	for ; o.sealed < o.next; o.sealed++ {
		if b := o.at(o.sealed); b.at == nowhere {
			lost = true
		} else if m := o.find(uint32(b.at)); m.phase == live {
			o.send(m, o.sealed, false)
		} // else it waits for the peer's statement
	}
	if lost {
		o.resend()
	}
}

// send posts the frame of a batch on m, with again also its writes.
func (o *order) send(m *member, num uint64, again bool) {
	b := o.at(num)
	b.at, b.pos = int(m.id), m.sent
	m.sent++
	it := item{kind: fence, num: num}
	if b.frame {
		it.kind = frame
	}
	if again {
		b.held += b.writes
	}
	o.emit(m, it, again)
}

// settle decides what has become of the batches of m, which is closed on both sides.
func (o *order) settle(m *member) {
	for num := o.acked; num < o.next; num++ {
		if b := o.at(num); b.at == int(m.id) {
			b.at = nowhere
			if b.pos < m.n {
				b.at = arrived
			}
		}
	}
	o.resend()
}

// unsent reports whether writes wait for their frame, or a batch for a member or for the peer's statement.
func (o *order) unsent() bool {
	for num := o.acked; !o.over && num < o.next; num++ {
		if b := o.at(num); num >= o.sealed || b.at == nowhere || b.at >= 0 && o.find(uint32(b.at)).phase != live {
			return true
		}
	}
	return false
}

// resend posts again what settle has found to be lost, if there is a member for it.
func (o *order) resend() {
	m := o.usable()
	if m == nil {
		return
	}
	for num := o.acked; num < o.sealed; num++ {
		if o.at(num).at == nowhere {
			o.send(m, num, true)
		}
	}
}

// let says that a member has let go of one write of a batch, or that the write was not handed to
// the member after all.
func (o *order) let(num uint64) {
	b := o.at(num)
	b.held--
	if b.held == 0 && (num < o.acked || o.over) {
		o.finish(num)
	}
}

// finish ends a batch: nobody reads its sources any more.
func (o *order) finish(num uint64) {
	b := o.at(num)
	b.done = true
	o.bytes -= b.bytes
	o.done = append(o.done, num)
	for o.tail < o.next && o.at(o.tail).done {
		o.tail++
	}
}
