package cluster

import (
	"fmt"
	"slices"

	"fserver/engine/wire"
)

// Ranks that the scheduler assigns. A member that comes without a rank gets the lowest seat of its
// role that is free. It is told by the roster, so until then it can still be moved: it yields its
// seat to a member that has been given that rank, and takes the next one. Once the cluster runs,
// such a member takes the place of one that is lost. If none is lost, it waits for a while, because
// its predecessor may be gone without anybody having noticed.

// lowest returns the lowest rank of a role whose seat is fit, or NoRank.
func (s *Scheduler) lowest(r wire.Role, fit func(seat int) bool) int {
	for rank := range s.shape.Groups(r) * s.shape.GroupSize {
		if fit(seatOf(s.shape, r, rank)) {
			return rank
		}
	}
	return NoRank
}

// yields moves c, whose seat a member wants that has been given it, to a free seat, and reports whether it could.
func (s *Scheduler) yields(c *conn) bool {
	if !c.any || s.phase != forming {
		return false
	}
	free := s.lowest(c.Role, func(i int) bool { return s.seats[i] == nil })
	if free == NoRank {
		return false
	}
	s.logf("%s at %s becomes %s: another %v has been given its rank", who(c.Role, c.Rank), c.address(), who(c.Role, free), c.Role)
	s.seats[s.seat(&c.Member)] = nil
	c.Rank, c.Group = free, free
	s.seats[s.seat(&c.Member)] = c
	return true
}

// full says why a member without a rank gets none.
func (s *Scheduler) full(r wire.Role) string {
	return fmt.Sprintf("it has no rank, and all %d of the role are taken by %vs that are there: "+
		"start as many as DMLC_NUM_WORKER and DMLC_NUM_SERVER say", s.shape.Groups(r), r)
}

// seek gives a member without a rank a place in a cluster that runs. If there is none, it waits for one.
func (s *Scheduler) seek(c *conn, m *wire.Member) {
	c.Member = *m
	c.giveUp = s.now + max(s.hb.timeout, int64(patience))
	if s.expectBy != Never {
		c.giveUp = max(c.giveUp, s.expectBy+1)
	}
	s.seeking = append(s.seeking, c)
	s.scan = min(s.scan, c.giveUp)
	if s.fill(); c.giveUp == 0 {
		return
	}
	s.send(c, wire.Append(nil, wire.TypeWaiting, &wire.Text{Text: fmt.Sprintf("all %vs are there: it waits for one to be lost", c.Role)}))
}

// fill gives the places of members that are gone to those that wait for one. A seat whose member has
// yet to come to this scheduler is not free.
func (s *Scheduler) fill() {
	for _, c := range slices.Clone(s.seeking) {
		free := NoRank
		for _, state := range []wire.State{wire.Gone, wire.Parting} {
			if free == NoRank {
				free = s.lowest(c.Role, func(i int) bool { return s.seats[i] == nil && s.known[i].State == state })
			}
		}
		if free == NoRank {
			continue
		}
		s.seeking = slices.DeleteFunc(s.seeking, func(o *conn) bool { return o == c })
		c.giveUp = 0
		c.Rank, c.Group = free, free
		m := c.Member
		if why := s.admit(c, &m); why != "" {
			s.turnAway(c, who(c.Role, NoRank), why)
			continue
		}
		s.logf("%s at %s has been assigned that rank", who(c.Role, c.Rank), c.address())
	}
}

// refuseSeekers fills the places that are free by now. It refuses those of due, whose time is over, that got none.
func (s *Scheduler) refuseSeekers(due []*conn) {
	if len(due) == 0 || s.phase != running {
		return
	}
	s.fill()
	for _, c := range due {
		if c.giveUp != 0 {
			s.seeking = slices.DeleteFunc(s.seeking, func(o *conn) bool { return o == c })
			c.giveUp = 0
			s.turnAway(c, who(c.Role, NoRank), s.full(c.Role))
		}
	}
}

// refuseWaiting refuses all that wait for a place: rivals of members, and members without a rank.
func (s *Scheduler) refuseWaiting(why string) {
	for _, c := range s.seats {
		if c != nil && c.rival != nil {
			s.refuse(c.rival, why)
			c.rival.waits, c.rival = nil, nil
		}
	}
	for _, c := range s.seeking {
		c.giveUp = 0
		s.refuse(c, why)
	}
	s.seeking = nil
}
