package cluster

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"slices"

	"fserver/engine/wire"
)

// Runs returns a number for the runs of the workers of this member's rail, as it knows them
// once it has a Roster: two members of a rail that know the same have the same number. If a
// rail has several workers and several servers, the number is for the runs of both.
func (m *Member) Runs() uint64 {
	h := fnv.New64a()
	several := m.railHas(wire.RoleWorker) > 1 && m.railHas(wire.RoleServer) > 1
	for i := range m.roster {
		v := &m.roster[i]
		counts := v.Role == wire.RoleWorker || v.Role == wire.RoleServer && several
		if !counts || v.Instance != m.cfg.Self.Instance {
			continue
		}
		var epoch uint64 // none: it is gone
		if v.State != wire.Gone {
			epoch = v.Epoch
		}
		_, _ = h.Write(binary.LittleEndian.AppendUint64(nil, epoch))
	}
	return h.Sum64()
}

// railHas returns how many members of a role this member's rail has.
func (m *Member) railHas(r wire.Role) (n int) {
	for i := range m.roster {
		if v := &m.roster[i]; v.Role == r && v.Instance == m.cfg.Self.Instance {
			n++
		}
	}
	return n
}

// peers checks the list of all members and takes from it those of our rail:
// the same instance of each group of the other role.
func (m *Member) peers(members []wire.Member) ([]wire.Member, error) {
	self := m.cfg.Self
	role := wire.RoleServer
	if self.Role == wire.RoleServer {
		role = wire.RoleWorker
	}
	peers := make([]wire.Member, m.cfg.Shape.Groups(role))
	found := 0
	fits := len(members) == m.cfg.Shape.Members()
	for i, p := range members {
		fits = fits && seatOf(m.cfg.Shape, p.Role, p.Rank) == i &&
			(p.Role != self.Role || p.Rank != self.Rank || p.Epoch == self.Epoch)
		if p.Role == role && p.Instance == self.Instance {
			if found++; p.Group < len(peers) {
				peers[p.Group] = p
			}
		}
	}
	missing := slices.ContainsFunc(peers, func(p wire.Member) bool { return p.Role != role })
	if !fits || missing || found != len(peers) {
		return nil, fmt.Errorf("cluster: the list of %d members is not of %v with %s in it once, and with instance %d in each %v group",
			len(members), m.cfg.Shape, who(self.Role, self.Rank), self.Instance, role)
	}
	return peers, nil
}

// loss is a member that is gone and has no successor yet.
type loss struct {
	seat  int
	err   *LostError
	until int64 // a barrier of a patient member waits; Never: no longer
}

// isLost is what the scheduler says of a member.
func (m *Member) isLost(l *wire.Lost) error {
	e := &LostError{l.Role, l.Rank, l.Address, l.Reason}
	if m.stage < active && !m.late {
		m.end(e)
		return nil
	}
	seat := seatOf(m.cfg.Shape, l.Role, l.Rank)
	if seat < 0 {
		return fmt.Errorf("cluster: %s is lost, but is not a member", who(l.Role, l.Rank))
	}
	m.view = l.View
	m.lost(seat, e)
	return nil
}

// lost takes note that the member in a seat is gone.
func (m *Member) lost(seat int, e *LostError) {
	m.roster[seat].State = wire.Gone
	m.miss(seat, e)
	var over []uint64
	if !m.cfg.Patient {
		over = m.abandon()
	}
	m.emit(Output{Kind: Lost, Err: e, Seqs: over})
	m.callAgain()
}

// miss counts a member among those that are gone. It may have been one of them before.
func (m *Member) miss(seat int, e *LostError) {
	m.losses = slices.DeleteFunc(m.losses, func(l loss) bool { return l.seat == seat })
	l := loss{seat, e, Never}
	if m.cfg.Patient {
		l.until = m.now + int64(m.cfg.Timing.Rejoin)
	}
	m.losses = append(m.losses, l)
}

// hasJoined is what the scheduler says of a successor.
func (m *Member) hasJoined(j *wire.Joined) error {
	seat := seatOf(m.cfg.Shape, j.Role, j.Rank)
	if seat < 0 || m.roster[seat].Group != j.Group || m.roster[seat].Instance != j.Instance {
		return fmt.Errorf("cluster: %s has joined group %d as instance %d, where there is no place for it", who(j.Role, j.Rank), j.Group, j.Instance)
	}
	m.view = j.View
	m.joined(seat, j.Member)
	return nil
}

// joined takes note of a successor.
func (m *Member) joined(seat int, j wire.Member) {
	m.roster[seat] = j
	m.done = m.done && (j.Role == wire.RoleServer || j.Instance != m.cfg.Self.Instance)
	m.losses = slices.DeleteFunc(m.losses, func(l loss) bool { return l.seat == seat })
	m.emit(Output{Kind: Joined, Member: &j})
}

// hasParted is what the scheduler says of a member that has left alone. Statuses says so; what waits
// for it ends when its own connection says that it leaves.
func (m *Member) hasParted(p *wire.Parted) error {
	seat := seatOf(m.cfg.Shape, p.Role, p.Rank)
	if seat < 0 {
		return fmt.Errorf("cluster: %s has left, but is not a member", who(p.Role, p.Rank))
	}
	if v := &m.roster[seat]; v.Epoch == p.Epoch {
		v.State = wire.Parting
	}
	return nil
}

// lostBefore is the loss of a member of which only the result is known.
func lostBefore(v *wire.Member) *LostError {
	return &LostError{v.Role, v.Rank, place(v), "the process was lost and has not been replaced yet"}
}

// meet takes the first roster.
func (m *Member) meet(r *wire.Roster) error {
	if self := &m.cfg.Self; self.Rank == NoRank {
		own := func(v wire.Member) bool {
			return v.Role == self.Role && v.Epoch == self.Epoch && v.State == wire.Present
		}
		if i := slices.IndexFunc(r.Members, own); i >= 0 {
			self.Rank, self.Group = r.Members[i].Rank, r.Members[i].Group
		}
	}
	peers, err := m.peers(r.Members)
	if err != nil {
		return err
	}
	m.stage, m.late, m.view, m.roster = meeting, r.Running, r.View, r.Members
	m.missing = ""
	for i := range m.roster {
		if v := &m.roster[i]; v.State == wire.Gone {
			m.miss(i, lostBefore(v))
		}
	}
	m.emit(Output{Kind: Roster, Peers: peers, Late: m.late})
	return nil
}

// agree takes the roster of a scheduler that is new: what has happened while
// there was none, happens now.
func (m *Member) agree(r *wire.Roster) error {
	if _, err := m.peers(r.Members); err != nil {
		return err
	}
	m.view = r.View
	for i, v := range r.Members {
		was := m.roster[i]
		switch {
		case v.State == wire.Gone && (was.State != wire.Gone || was.Epoch != v.Epoch):
			m.roster[i] = v
			m.lost(i, lostBefore(&v))
		case v.State != wire.Gone && was.Epoch != v.Epoch:
			m.joined(i, v)
		case was.State != wire.Gone:
			m.roster[i].State = v.State // present or parting
		}
	}
	m.agreed = true
	m.sayDone()
	m.callAgain()
	if m.stage == parting {
		m.send(wire.AppendSignal(nil, wire.TypeLeave))
	}
	return nil
}
