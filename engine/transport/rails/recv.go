package rails

import "fmt"

// recv says that an item has come on member id. Numbered ones are given by take. An error says what the peer
// has done wrong: the user ends the Conn with it.
func (o *order) recv(id uint32, it item) error {
	m := o.find(id)
	switch {
	case m == nil || m.phase == dialing || m.phase == closed:
		return fmt.Errorf("rails: an item on member %d, which is not open here", id)
	case it.kind == none || it.kind > lastKind:
		return fmt.Errorf("rails: an item of unknown kind %d on member %d", it.kind, id)
	case o.over:
		return nil
	case m.phase == half:
		o.lift(m)
	}
	var err error
	if it.kind == stating {
		err = o.learn(it.num, it.statement)
	} else if err = o.heard(m, it.ack, it.got); err == nil && it.kind <= numbered {
		err = o.arrive(m, it)
	}
	o.forget()
	return err
}

// lift makes a member usable: the peer has it.
func (o *order) lift(m *member) {
	m.phase = live
	o.turn++
	if !o.dialer {
		o.greet(m)
	}
	o.resend()
}

// heard takes what every item carries.
func (o *order) heard(m *member, ack, got uint64) error {
	switch {
	case ack < m.ack:
		return fmt.Errorf("rails: member %d acknowledges %d frames, after %d", m.id, ack, m.ack)
	case ack > o.sealed:
		return fmt.Errorf("rails: member %d acknowledges %d frames, of %d", m.id, ack, o.sealed)
	case got < m.got:
		return fmt.Errorf("rails: member %d confirms %d statements, after %d", m.id, got, m.got)
	case got > o.stated:
		return fmt.Errorf("rails: member %d confirms %d statements, of %d", m.id, got, o.stated)
	}
	m.ack, m.got = ack, got
	for ; o.acked < ack; o.acked++ {
		b := o.at(o.acked)
		if b.at == nowhere || b.pos == never {
			return fmt.Errorf("rails: member %d acknowledges frame %d, which was not sent", m.id, o.acked)
		}
		if b.held == 0 {
			o.finish(o.acked)
		}
	}
	o.noted = max(o.noted, ack)
	if first := o.stated - uint64(len(o.log)); got > first {
		o.log = o.log[:copy(o.log, o.log[got-first:])]
	}
	return nil
}

// arrive takes a frame or fence.
func (o *order) arrive(m *member, it item) error {
	if it.num < o.given {
		return fmt.Errorf("rails: frame %d on member %d has come before", it.num, m.id)
	}
	if it.num-o.given >= uint64(len(o.in)) {
		return fmt.Errorf("rails: frame %d on member %d: only %d to %d may come", it.num, m.id, o.given, o.given+uint64(len(o.in))-1)
	}
	slot := &o.in[it.num&uint64(len(o.in)-1)]
	if *slot != none {
		return fmt.Errorf("rails: frame %d on member %d has come before", it.num, m.id)
	}
	*slot = it.kind
	m.came++
	return nil
}

// take returns the number of the next frame that is to be given to the user, if it has come.
func (o *order) take() (num uint64, ok bool) {
	for {
		slot := &o.in[o.given&uint64(len(o.in)-1)]
		k := *slot
		if k == none {
			return 0, false
		}
		*slot = none
		num = o.given
		o.given++
		if k == frame {
			return num, true
		}
	}
}

// learn takes a statement of the peer. Each comes on several members, and counts once. The peer is told
// so, and that is also how it gets the acknowledgements that were lost with the member: each loss
// makes both sides state.
func (o *order) learn(num uint64, s statement) error {
	if num < o.got {
		return nil
	}
	if num > o.got {
		return fmt.Errorf("rails: statement %d, about member %d: only %d may come", num, s.id, o.got)
	}
	o.got++
	o.owe = true
	m := o.find(s.id)
	switch {
	case m == nil:
		return o.absent(s)
	case m.theirs:
		return fmt.Errorf("rails: member %d, whose end was stated before", s.id)
	case s.n > m.sent:
		return fmt.Errorf("rails: %d frames of member %d have come, of %d", s.n, s.id, m.sent)
	}
	m.theirs, m.n = true, s.n
	switch m.phase {
	case half, live:
		o.lose(m)
	case closed:
		o.settle(m)
	}
	return nil
}

// absent takes a statement about a member that is not here. That may be one whose dialing has
// failed: then it will not come, and the dialer is told so.
func (o *order) absent(s statement) error {
	if o.dialer && s.id >= o.seen.low {
		return fmt.Errorf("rails: member %d has closed, which there never was", s.id)
	}
	if err := o.seen.add(s.id); err != nil {
		return err
	}
	if s.n != 0 {
		return fmt.Errorf("rails: %d frames of member %d have come, of 0", s.n, s.id)
	}
	if len(o.log) >= mostKept {
		return fmt.Errorf("rails: member %d has closed, and %d statements are not confirmed", s.id, len(o.log))
	}
	o.state(statement{s.id, 0})
	return nil
}

// owes returns how many frames have been given since the peer was last told, and at least 1 if it
// has to be told for another reason. The user calls acknowledge when it has nothing else to send, or when
// it is many.
func (o *order) owes() uint64 {
	n := o.given - o.told
	if o.owe {
		n = max(n, 1)
	}
	return n
}

// acknowledge sends what owes has counted, if there is a member for it.
func (o *order) acknowledge() {
	if m := o.usable(); m != nil {
		o.emit(m, item{kind: bare}, false)
	}
}
