package cluster

import "fserver/engine/wire"

// Status is what is known of a node.
type Status struct {
	Role   wire.Role
	Rank   int
	Run    uint64     // 0: not known
	State  wire.State // as FS_PRESENT and the others of fserver.h
	Silent int64      // ns since it was last heard; -1: not heard directly
}

// Statuses returns what this member knows of the scheduler and, by role and rank, of all
// members; nothing before the roster has come. The run of the scheduler is not known.
func (m *Member) Statuses(now int64) []Status {
	if m.roster == nil {
		return nil
	}
	s := Status{Role: wire.RoleScheduler, Silent: max(0, now-m.heard)}
	if m.stage >= active && !m.agreed {
		s.State = wire.Gone
	}
	all := []Status{s}
	for i := range m.roster {
		v := &m.roster[i]
		all = append(all, Status{v.Role, v.Rank, v.Epoch, v.State, -1})
	}
	return all
}

// Statuses returns what the scheduler knows of itself and, by role and rank, of all members;
// nothing before the cluster runs.
func (s *Scheduler) Statuses(now int64) []Status {
	if s.known == nil {
		return nil
	}
	all := []Status{{Role: wire.RoleScheduler, Run: s.Run}}
	for i := range s.known {
		v := Status{s.known[i].Role, s.known[i].Rank, s.known[i].Epoch, s.known[i].State, -1}
		if c := s.seats[i]; c != nil {
			v.Silent = max(0, now-c.heard)
		}
		all = append(all, v)
	}
	return all
}
