package cluster

import (
	"fmt"
	"slices"

	"fserver/engine/wire"
)

// ownCall is a barrier call of this member that is not over.
type ownCall struct {
	seq      uint64 // its caller's
	sent     uint64 // its number on the wire: that of the first caller, if this one goes on with a call
	flags    wire.BarrierFlags
	left     bool // its caller has given it up
	released bool // after that
}

// Barrier begins a call of a barrier; Released with the number seq ends it,
// and may be among the outputs of this very call. A Lost or an Overdue that names it
// and Ended end it too. While a member is lost a barrier cannot be called, and the loss is
// the error, unless this member is patient. Without a scheduler the call waits
// for the next one.
func (m *Member) Barrier(now int64, f wire.BarrierFlags) (seq uint64, out []Output, err error) {
	m.begin(now)
	switch self := m.cfg.Self; {
	case !f.Valid() || !f.Has(self.Role):
		return 0, nil, fmt.Errorf("cluster: %v called by %s: the caller must be a member", f, who(self.Role, self.Rank))
	case m.stage != active:
		return 0, nil, ErrNotRunning
	}
	for i := range m.losses {
		if !m.cfg.Patient || m.losses[i].until == Never {
			return 0, nil, m.losses[i].err
		}
	}
	i := slices.IndexFunc(m.calls, func(c ownCall) bool { return c.left && c.flags == f })
	switch {
	case i >= 0:
		m.seq++
		seq = m.seq // another number, because the first caller may not know yet that its call is over
		m.calls[i].seq, m.calls[i].left = seq, false
		if m.calls[i].released {
			m.released(i)
		}
		return seq, m.out, nil
	case len(m.calls) >= maxCalls:
		return 0, nil, fmt.Errorf("cluster: %v: %d barrier calls are already pending (wait for them first)", f, len(m.calls))
	}
	m.seq++
	m.calls = append(m.calls, ownCall{seq: m.seq, sent: m.seq, flags: f})
	if m.agreed {
		m.call(m.seq, f)
	}
	return m.seq, m.out, nil
}

// GiveUp says that nobody waits for a barrier call any more. The member has
// reached the barrier all the same: the next call of the same kind goes on with
// this one.
func (m *Member) GiveUp(seq uint64) {
	for i := range m.calls {
		if c := &m.calls[i]; c.seq == seq {
			c.left = true
		}
	}
}

// release ends a barrier call, or notes that it has ended.
func (m *Member) release(v *wire.Release) error {
	i := slices.IndexFunc(m.calls, func(c ownCall) bool { return c.sent == v.Seq })
	switch {
	case i < 0 || m.calls[i].released:
		return fmt.Errorf("cluster: barrier call %d was released, and is not pending", v.Seq)
	case m.calls[i].left:
		m.calls[i].released = true
	default:
		m.released(i)
	}
	return nil
}

func (m *Member) released(i int) {
	m.emit(Output{Kind: Released, Seq: m.calls[i].seq})
	m.calls = slices.Delete(m.calls, i, i+1)
}

// abandon ends all barrier calls and gives those that somebody waits for.
func (m *Member) abandon() (seqs []uint64) {
	for _, c := range m.calls {
		if !c.left {
			seqs = append(seqs, c.seq)
		}
	}
	m.calls = m.calls[:0]
	return seqs
}

// giveUpAll gives up all barrier calls and returns those that somebody waits for. The scheduler
// still has them, so the next call of the same kind goes on with each.
func (m *Member) giveUpAll() (seqs []uint64) {
	for i := range m.calls {
		if c := &m.calls[i]; !c.left {
			seqs, c.left = append(seqs, c.seq), true
		}
	}
	return seqs
}

// callAgain sends the barrier calls that are not released: the scheduler has
// none of this view yet.
func (m *Member) callAgain() {
	for _, c := range m.calls {
		if m.agreed && !c.released {
			m.call(c.sent, c.flags)
		}
	}
}

func (m *Member) call(seq uint64, f wire.BarrierFlags) {
	m.send(wire.Append(nil, wire.TypeBarrier, &wire.Barrier{Flags: f, Seq: seq, View: m.view}))
}
