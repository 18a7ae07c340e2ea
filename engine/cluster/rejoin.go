package cluster

import (
	"fmt"
	"slices"

	"fserver/engine/wire"
)

// How members come back, and how a scheduler collects a cluster that runs.
//
// A seat belongs to one run of a process, told apart by its epoch. When that run
// is lost, another may have the seat: known says who has it, everybody is told,
// and the run that was lost never gets it back. Every loss and every return makes
// a new view. Of two members of a scheduler that is gone, the one with the later
// view knows all that the other knows.

// viewsOfOne is the number of views that one scheduler has: those of the next
// start above them, so that they are later than all that anybody has heard.
const viewsOfOne = 1 << 20

// takenForLost is what a member is told that is not of the cluster any more.
const takenForLost = "it was taken for lost, and the others have gone on without it: start it again"

// succeeds takes a new member of a cluster that runs. If its seat is taken, it
// waits until the one who has it answers, or is lost.
func (s *Scheduler) succeeds(c *conn, g *wire.Register) (why string) {
	if g.Any {
		s.seek(c, &g.Member)
		return ""
	}
	was := &s.known[s.seat(&g.Member)]
	if g.Group != was.Group || g.Instance != was.Instance {
		return fmt.Sprintf("the %s of this cluster is instance %d of group %d, and it says that it is instance %d of group %d: "+
			"it can only take the place of the one that it follows", who(g.Role, g.Rank), was.Instance, was.Group, g.Instance, g.Group)
	}
	old := s.seats[s.seat(&g.Member)]
	switch {
	case old == nil:
		return s.admit(c, &g.Member)
	case old.rival != nil:
		return isThere(old)
	}
	c.Member, c.waits, old.rival = g.Member, old, c
	s.send(old, wire.AppendSignal(nil, wire.TypePing))
	s.send(c, beat) // so that it knows that it is here
	return ""
}

// taken refuses the rival of a member that has answered.
func (s *Scheduler) taken(old *conn) {
	c := old.rival
	old.rival, c.waits = nil, nil
	s.turnAway(c, c.Name(), isThere(old))
}

// inherit gives the seat of a member that is lost to its rival.
func (s *Scheduler) inherit(old *conn) {
	c := old.rival
	old.rival, c.waits = nil, nil
	if why := s.admit(c, &c.Member); why != "" {
		s.turnAway(c, c.Name(), why)
	}
}

// admit gives a new member an empty seat of a cluster that runs, and tells all. It returns why it
// does not, if the roster would be too long with the addresses of the new member.
func (s *Scheduler) admit(c *conn, m *wire.Member) (why string) {
	seat := s.seat(m)
	members := slices.Clone(s.known)
	members[seat] = *m
	if _, why = list(&wire.Roster{View: s.view, Running: true, Members: members}); why != "" {
		return why
	}
	s.changed[seat] = true
	s.announce(m)
	s.sit(c, m)
	s.introduce(c)
	return ""
}

// announce makes m the owner of its seat.
func (s *Scheduler) announce(m *wire.Member) {
	s.known[s.seat(m)] = *m
	s.uncall(s.seat(m)) // the calls of one that has left are not those of its successor
	s.view++
	if m.Role == wire.RoleWorker {
		s.came[m.Instance] = s.view
		for _, c := range s.seats {
			if c != nil && c.Instance == m.Instance {
				c.done = false // a server of its rail has a worker again
			}
		}
	}
	s.all(wire.Append(nil, wire.TypeJoined, &wire.Joined{View: s.view, Member: *m}))
	s.emit(Output{Kind: Joined, Member: m})
}

// introduce tells c who else there is.
func (s *Scheduler) introduce(c *conn) {
	s.send(c, wire.Append(nil, wire.TypeRoster, &wire.Roster{View: s.view, Running: true, Members: s.known}))
}

// comesBack takes a member that runs and has lost its scheduler.
func (s *Scheduler) comesBack(c *conn, g *wire.Register) (why string) {
	seat := s.seat(&g.Member)
	if !s.whole(g.Known.Members) || g.Known.Members[seat].Epoch != g.Epoch {
		return fmt.Sprintf("its list of %d members is not that of a cluster of %v with itself in it", len(g.Known.Members), s.shape)
	}
	if s.phase != running {
		if c := s.seats[seat]; c != nil && (!c.any || s.phase == linking) { // who links knows its rank, and keeps it
			return isThere(c)
		}
		s.resume(g.Known)
	} else if s.resumed && g.Known.View > s.heard && s.knows(g.Known) {
		s.learn(g.Known)
	}
	if old := s.seats[seat]; old != nil && old.Epoch == g.Epoch {
		s.emit(Output{Kind: Close, Conn: old.id})
		s.drop(old, "it has lost its connection to the scheduler")
	}
	was := &s.known[seat]
	if was.Epoch != g.Epoch || was.State == wire.Gone {
		return takenForLost
	}
	s.uncall(seat)           // it calls again
	was.State = wire.Present // if it still leaves, it says so again
	c.ready = true
	s.sit(c, &g.Member)
	s.registered(c)
	s.introduce(c)
	return ""
}

// whole says whether ms has each member once, in order.
func (s *Scheduler) whole(ms []wire.Member) bool {
	for i := range ms {
		if s.seat(&ms[i]) != i {
			return false
		}
	}
	return len(ms) == len(s.seats)
}

// knows reports whether r is of the cluster of this scheduler: a process of another one has no run
// in common with it.
func (s *Scheduler) knows(r *wire.Roster) bool {
	for i := range r.Members {
		if r.Members[i].Epoch == s.known[i].Epoch {
			return true
		}
	}
	return false
}

// resume makes this the scheduler of the cluster that r is the roster of. Those
// who have registered so far are new, and follow those who had their seats.
func (s *Scheduler) resume(r *wire.Roster) {
	s.phase, s.known, s.heard, s.resumed = running, r.Members, r.View, true
	s.view = (r.View/viewsOfOne + 1) * viewsOfOne
	s.expectBy = s.now + max(int64(patience), s.hb.timeout)
	s.warnf("the cluster runs already: its members are collected again")
	s.emit(Output{Kind: Running})
	first := slices.Clone(s.seats)
	clear(s.seats)
	s.seated = 0
	for _, c := range first {
		if c == nil {
			continue
		}
		c.member = false
		if why := s.succeeds(c, &wire.Register{Member: c.Member, Any: c.any}); why != "" {
			s.refuse(c, why)
		}
	}
	s.era = s.view
}

// learn takes over what a member has heard from the scheduler before, and those
// who have come back until now have not.
func (s *Scheduler) learn(r *wire.Roster) {
	s.heard = r.View
	s.view = max(s.view, r.View)
	for i := range r.Members {
		m, was, c := &r.Members[i], &s.known[i], s.seats[i]
		if s.changed[i] || m.Epoch == was.Epoch && (m.State == wire.Gone) == (was.State == wire.Gone) {
			if c == nil && was.State == wire.Present { // else the member says itself whether it leaves
				was.State = m.State
			}
			continue
		}
		if c != nil {
			s.seats[i] = nil
			s.seated--
			if c.leaving {
				s.leaving--
			}
			s.refuse(c, takenForLost)
			s.unanswered(c, takenForLost)
		}
		if *was = *m; m.State == wire.Gone {
			s.lose(m, lostBefore(m).Address, lostBefore(m).Reason)
		} else {
			s.announce(m)
		}
		switch {
		case c == nil || c.rival == nil:
		case m.State == wire.Gone:
			s.inherit(c)
		default:
			s.taken(c)
		}
	}
}

// awaits reports whether a member that an earlier scheduler knew may still come to this one.
func (s *Scheduler) awaits() bool {
	if s.expectBy == Never || s.finishes {
		return false
	}
	for i := range s.known {
		if s.seats[i] == nil && s.known[i].State == wire.Present {
			return true
		}
	}
	return false
}

// giveUp loses the members that have not come to this scheduler.
func (s *Scheduler) giveUp() {
	s.expectBy = Never
	for i := range s.known {
		if m := &s.known[i]; s.seats[i] == nil && m.State == wire.Present {
			s.lose(m, lostBefore(m).Address, "it has not come back to the scheduler, which was started again")
		}
	}
	s.leaveTogether()
}
