package cluster

import (
	"fmt"
	"slices"

	"fserver/engine/wire"
)

// barrier holds the calls of one kind of barrier that wait: for each party (a
// member, or a group) in order of arrival. The k-th calls of all parties are
// released together.
type barrier struct {
	calls [][]call
	here  int // parties with a call
}

type call struct {
	c   *conn
	seq uint64
}

// barrier counts a call, and releases it with the others if it is the last.
func (s *Scheduler) barrier(c *conn, v *wire.Barrier) error {
	if !v.Flags.Has(c.Role) {
		return fmt.Errorf("cluster: %s calls a %v", c.Name(), v.Flags)
	}
	if v.View < s.era { // the call has crossed the news of a loss, which ends it
		return nil
	}
	if c.calls++; c.calls > maxCalls {
		return fmt.Errorf("cluster: more than %d barrier calls at once", maxCalls)
	}
	party, parties := s.party(c, v.Flags)
	b := &s.barriers[v.Flags]
	if b.calls == nil {
		b.calls = make([][]call, parties)
	}
	b.calls[party] = append(b.calls[party], call{c, v.Seq})
	if len(b.calls[party]) == 1 {
		b.here++
	}
	if b.here < parties {
		return nil
	}
	for i, q := range b.calls {
		if q[0].c.member { // else it has left
			q[0].c.calls--
			s.send(q[0].c, wire.Append(nil, wire.TypeRelease, &wire.Release{Seq: q[0].seq}))
		}
		b.calls[i] = slices.Delete(q, 0, 1)
		if len(q) == 1 {
			b.here--
		}
	}
	return nil
}

// uncall takes out the calls of the member that had a seat.
func (s *Scheduler) uncall(seat int) {
	for k := range s.barriers {
		b := &s.barriers[k]
		for i, q := range b.calls {
			b.calls[i] = slices.DeleteFunc(q, func(v call) bool { return s.seat(&v.c.Member) == seat })
			if len(q) != 0 && len(b.calls[i]) == 0 {
				b.here--
			}
		}
	}
}

// party is the index of c among the parties of a barrier, and their number.
func (s *Scheduler) party(c *conn, f wire.BarrierFlags) (i, n int) {
	size := s.shape.GroupSize
	i = c.Rank
	if f&wire.BarrierGroups != 0 {
		size = 1
		i = c.Group
	}
	for _, r := range []wire.Role{wire.RoleWorker, wire.RoleServer} {
		if !f.Has(r) {
			continue
		}
		if c.Role == wire.RoleServer && r == wire.RoleWorker {
			i += s.shape.Workers * size
		}
		n += s.shape.Groups(r) * size
	}
	return i, n
}
