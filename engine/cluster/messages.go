package cluster

import (
	"fmt"
	"slices"

	"fserver/engine/wire"
)

// Messages between nodes. A member sends them to the scheduler, which passes them on at once and keeps
// none. Each receiver answers whether it has taken a message into its inbox; when all have, or are gone, the
// sender is told. So all queues are bounded: a sender has maxSends under way, the scheduler passes on
// maxOwed that a receiver has not answered, and an inbox holds maxMail. Whatever is too much
// is dropped, and its sender told. A connection that is gone takes its messages along: the successor of a node
// gets none that were for its predecessor.

// The bounds.
const (
	maxSends     = 256 // of one sender, without an answer
	maxSendBytes = 16 << 20
	maxOwed      = 128 // to one receiver, without an answer
	maxOwedBytes = 4 << 20
	maxMail      = 1024 // in an inbox
	maxMailBytes = 16 << 20
)

// FullError says that a message was dropped because a queue is full.
type FullError struct{ Text string }

func (e *FullError) Error() string { return e.Text }

// room counts what is in a queue.
type room struct{ count, bytes int }

// takes counts a message of n bytes, unless that is more than the bounds.
func (r *room) takes(n, maxCount, maxBytes int) bool {
	if r.count >= maxCount || r.bytes+n > maxBytes {
		return false
	}
	r.count++
	r.bytes += n
	return true
}

func (r *room) gives(n int) { r.count, r.bytes = r.count-1, r.bytes-n }

// inbox holds the messages for this node that nobody has received.
type inbox struct {
	mail []*wire.Message
	room room
}

// put takes a message, if there is room.
func (b *inbox) put(m *wire.Message) bool {
	if !b.room.takes(len(m.Data), maxMail, maxMailBytes) {
		return false
	}
	b.mail = append(b.mail, m)
	return true
}

// Mail returns how many messages nobody has received, and the oldest of them.
func (b *inbox) Mail() (n int, first *wire.Message) {
	if len(b.mail) == 0 {
		return 0, nil
	}
	return len(b.mail), b.mail[0]
}

// Received drops the oldest message.
func (b *inbox) Received() {
	b.room.gives(len(b.mail[0].Data))
	b.mail[0] = nil
	if b.mail = b.mail[1:]; len(b.mail) == 0 {
		b.mail = nil
	}
}

// checkMessage returns what is wrong with a message. In a cluster of this shape.
func checkMessage(s wire.Shape, to *wire.Destination, data []byte) error {
	if err := to.Check(); err != nil {
		return err
	}
	if len(data) > wire.MaxMessage {
		return fmt.Errorf("cluster: a message of %d bytes: want at most %d (push tensors for more)", len(data), wire.MaxMessage)
	}
	for _, r := range []wire.Role{wire.RoleScheduler, wire.RoleServer, wire.RoleWorker} {
		most := 1
		if r != wire.RoleScheduler {
			most = s.Groups(r) * s.GroupSize
		}
		if to.Roles.Has(r) && (to.Rank < wire.All || to.Rank >= most) {
			return fmt.Errorf("cluster: a message for rank %d of the %vs: want 0 to %d, or -1 for all", to.Rank, r, most-1)
		}
	}
	return nil
}

// outcome is the error that a Sent is.
func outcome(v *wire.Sent) error {
	switch v.Outcome {
	case wire.WasFull:
		return &FullError{fmt.Sprintf("cluster: the message was dropped: %s %s", who(v.Role, v.Rank), v.Reason)}
	case wire.WasLost:
		return &LostError{v.Role, v.Rank, v.Address, v.Reason}
	}
	return nil
}

// ownSend is a message of this member that is not answered.
type ownSend struct {
	seq   uint64
	bytes int
}

// Send sends a message, which is copied; Sent with the number seq says what has become of it. Without a
// scheduler its loss is the error.
func (m *Member) Send(now int64, to wire.Destination, data []byte) (seq uint64, out []Output, err error) {
	m.begin(now)
	switch err := checkMessage(m.cfg.Shape, &to, data); {
	case err != nil:
		return 0, nil, err
	case m.stage != active:
		return 0, nil, ErrNotRunning
	case !m.agreed:
		return 0, nil, m.orphan
	case !m.sending.takes(len(data), maxSends, maxSendBytes):
		return 0, nil, &FullError{fmt.Sprintf("cluster: %d messages of %d bytes have not been answered yet: wait for them first (at most %d, of %d bytes)",
			m.sending.count, m.sending.bytes, maxSends, maxSendBytes)}
	}
	m.sends++
	m.unsent = append(m.unsent, ownSend{m.sends, len(data)})
	m.send(wire.Append(nil, wire.TypeSend, &wire.Send{Seq: m.sends, To: to, Data: data}))
	return m.sends, m.out, nil
}

// mailed takes a message.
func (m *Member) mailed(v *wire.Message) error {
	kept := m.put(v)
	m.send(wire.Append(nil, wire.TypeTaken, &wire.Taken{Full: !kept}))
	if kept {
		m.emit(Output{Kind: Mail})
	}
	return nil
}

// isSent takes what has become of a message.
func (m *Member) isSent(v *wire.Sent) error {
	i := slices.IndexFunc(m.unsent, func(o ownSend) bool { return o.seq == v.Seq })
	if i < 0 {
		return fmt.Errorf("cluster: message %d has been answered, and is not under way", v.Seq)
	}
	m.sending.gives(m.unsent[i].bytes)
	m.unsent = slices.Delete(m.unsent, i, i+1)
	m.emit(Output{Kind: Sent, Seq: v.Seq, Err: outcome(v)})
	return nil
}

// unsend ends all messages under way, because the scheduler is gone.
func (m *Member) unsend(e *LostError) {
	for _, o := range m.unsent {
		m.emit(Output{Kind: Sent, Seq: o.seq, Err: e})
	}
	m.unsent, m.sending = nil, room{}
}

// relay is a message that has been passed on.
type relay struct {
	from *conn // nil: the scheduler itself
	left int   // receivers that have not answered
	sent wire.Sent
}

// owed is a message that a receiver has not answered.
type owed struct {
	r     *relay
	bytes int
}

// Send sends a message of the scheduler itself, as that of a Member.
func (s *Scheduler) Send(now int64, to wire.Destination, data []byte) (seq uint64, out []Output, err error) {
	s.begin(now)
	if err := checkMessage(s.shape, &to, data); err != nil {
		return 0, nil, err
	}
	if s.phase != running {
		return 0, nil, ErrNotRunning
	}
	s.sends++
	s.relay(nil, &wire.Send{Seq: s.sends, To: to, Data: slices.Clone(data)})
	return s.sends, s.out, nil
}

// passOn takes a message of a member.
func (s *Scheduler) passOn(c *conn, v *wire.Send) error {
	if err := checkMessage(s.shape, &v.To, v.Data); err != nil {
		return err
	}
	if c.sends++; c.sends > maxSends {
		return fmt.Errorf("cluster: more than %d messages at once", maxSends)
	}
	s.relay(c, v)
	return nil
}

// relay passes a message on to all whom it is for.
func (s *Scheduler) relay(from *conn, v *wire.Send) {
	r := &relay{from: from, left: 1, sent: wire.Sent{Seq: v.Seq}}
	m := &wire.Message{Role: wire.RoleScheduler, Run: s.Run, Data: v.Data}
	if from != nil {
		m.Role, m.Rank, m.Run = from.Role, from.Rank, from.Epoch
	}
	if v.To.Roles.Has(wire.RoleScheduler) {
		switch {
		case v.To.Run != 0 && v.To.Run != s.Run:
			r.fail(wire.WasLost, &wire.Member{}, "", succeeded)
		case !s.put(m):
			r.fail(wire.WasFull, &wire.Member{}, "", inboxFull)
		default:
			s.emit(Output{Kind: Mail})
		}
	}
	frame := wire.Append(nil, wire.TypeMessage, m)
	for i := range s.known {
		if k := &s.known[i]; v.To.Roles.Has(k.Role) && (v.To.Rank == wire.All || v.To.Rank == k.Rank) {
			s.forward(r, i, v.To.Run, frame, len(v.Data))
		}
	}
	s.answered(r)
}

// Why a message has not been taken.
const (
	succeeded = "another process has taken its place"
	inboxFull = "does not receive its messages, of which it keeps 1,024, or 16 MiB"
	slowLink  = "does not answer, and 128 messages, or 4 MiB, are on their way to it"
	notBack   = "it has not come back yet to the scheduler, which was started again"
	hasParted = "it leaves the cluster, or has left"
)

// forward passes a message on to the member of a seat.
func (s *Scheduler) forward(r *relay, seat int, run uint64, frame []byte, bytes int) {
	k, c := &s.known[seat], s.seats[seat]
	switch {
	case run != 0 && run != k.Epoch:
		r.fail(wire.WasLost, k, place(k), succeeded)
	case k.State == wire.Parting:
		r.fail(wire.WasLost, k, place(k), hasParted)
	case c == nil && k.State == wire.Present:
		r.fail(wire.WasLost, k, place(k), notBack)
	case c == nil:
		r.fail(wire.WasLost, k, place(k), lostBefore(k).Reason)
	case !c.owing.takes(bytes, maxOwed, maxOwedBytes):
		r.fail(wire.WasFull, k, "", slowLink)
	default:
		r.left++
		c.owed = append(c.owed, owed{r, bytes})
		s.send(c, frame)
	}
}

// fail notes that a member has not taken the message.
func (r *relay) fail(o wire.Outcome, m *wire.Member, address, why string) {
	if v := &r.sent; v.Outcome == wire.WasTaken {
		v.Outcome, v.Role, v.Rank, v.Address, v.Reason = o, m.Role, m.Rank, address, why
	}
}

// answer takes a member's answer to the oldest message that it owes one.
func (s *Scheduler) answer(c *conn, v *wire.Taken) error {
	if len(c.owed) == 0 {
		return fmt.Errorf("cluster: %s has answered a message that it was not sent", c.Name())
	}
	o := c.owed[0]
	c.owed = slices.Delete(c.owed, 0, 1)
	c.owing.gives(o.bytes)
	if v.Full {
		o.r.fail(wire.WasFull, &c.Member, "", inboxFull)
	}
	s.answered(o.r)
	return nil
}

// unanswered ends what a member that is gone has not answered.
func (s *Scheduler) unanswered(c *conn, why string) {
	all := c.owed
	c.owed, c.owing = nil, room{}
	for _, o := range all {
		o.r.fail(wire.WasLost, &c.Member, c.address(), why)
		s.answered(o.r)
	}
}

// answered counts an answer, and tells the sender if it is the last.
func (s *Scheduler) answered(r *relay) {
	if r.left--; r.left > 0 || s.phase != running {
		return
	}
	switch {
	case r.from == nil:
		s.emit(Output{Kind: Sent, Seq: r.sent.Seq, Err: outcome(&r.sent)})
	case r.from.member: // else it is gone
		r.from.sends--
		s.send(r.from, wire.Append(nil, wire.TypeSent, &r.sent))
	}
}
