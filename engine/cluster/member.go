package cluster

import (
	"fmt"
	"slices"

	"fserver/engine/wire"
)

// MemberConfig is what a Member is told.
type MemberConfig struct {
	Self      wire.Member
	Shape     wire.Shape
	Scheduler string // its address, for people
	Timing    Timing
}

// Member is the side of a worker or server. Its life: Up (it registers),
// Roster (the caller connects it to its peers, then calls Connected), Running,
// Leave, Ended. Its outputs are Send, Close, Redial, Roster, Running, Released,
// Lost and Ended.
//
// Before Running, the loss of any node is Ended. After it, it is Lost, and
// everything but barriers goes on: that the scheduler is gone stops nothing
// else either.
type Member struct {
	cfg MemberConfig
	hb  heartbeat

	now     int64
	stage   stage
	online  bool  // the scheduler is there
	known   bool  // it has said something
	heard   int64 // from it
	leaveBy int64
	lost    *LostError // the first
	seq     uint64     // barrier calls so far
	waiting map[uint64]wire.BarrierFlags
	left    [wire.BarrierKinds][]leftCall
	out     []Output
}

// stage is where a Member is in its life.
type stage uint8

const (
	alone     stage = iota // not connected to the scheduler
	joining                // registered
	meeting                // has the roster, connects to its peers
	connected              // waits for the others to be
	active
	parting // has asked to leave
	gone
)

// leftCall is a barrier call that its caller has given up.
type leftCall struct {
	seq      uint64
	released bool
}

// NewMember makes a Member.
func NewMember(cfg MemberConfig) *Member {
	return &Member{
		cfg:     cfg,
		hb:      newHeartbeat(cfg.Timing),
		leaveBy: Never,
		waiting: make(map[uint64]wire.BarrierFlags),
	}
}

// Step takes one input at time now. What it returns is valid until the next
// call that returns outputs. A time that is up is noticed at any Step after it.
func (m *Member) Step(now int64, in Input) []Output {
	m.out = m.out[:0]
	if m.stage == gone {
		return nil
	}
	m.now = now
	m.heard += m.hb.step(now)
	switch {
	case in.Kind == Up && m.stage == alone:
		m.stage, m.online, m.known, m.heard = joining, true, false, now
		m.send(wire.AppendRegister(nil, &wire.Register{Shape: m.cfg.Shape, Member: m.cfg.Self}))
	case !m.online:
	case in.Kind == Frame:
		m.heard, m.known = now, true
		if err := m.frame(in.Data); err != nil {
			m.emit(Output{Kind: Close})
			m.schedulerLost("it broke the protocol: " + err.Error())
		}
	case in.Kind == Down && !m.known:
		// A scheduler that ends just now, and is not the one that we look for.
		m.stage, m.online = alone, false
		m.emit(Output{Kind: Redial})
	case in.Kind == Down:
		m.schedulerLost(reason(in.Err))
	}
	m.tick()
	return m.out
}

// Next is when Step must be called at the latest.
func (m *Member) Next() int64 {
	if !m.online {
		return Never
	}
	return min(m.hb.beat, m.hb.silence(m.heard), m.leaveBy)
}

// Waiting says what the member waits for before it runs.
func (m *Member) Waiting() string {
	switch m.stage {
	case alone:
		return "not connected to the scheduler at " + m.cfg.Scheduler
	case joining:
		return "members are missing at the scheduler at " + m.cfg.Scheduler
	case meeting:
		return "not connected to all its peers"
	case connected:
		return "other members are not connected to all their peers"
	}
	return "nothing"
}

// Connected says that the connections to all peers of the Roster stand.
func (m *Member) Connected(now int64) []Output {
	m.out = m.out[:0]
	if m.stage == meeting {
		m.now, m.stage = now, connected
		m.send(wire.AppendSignal(nil, wire.TypeReady))
	}
	return m.out
}

// Barrier begins a call of a barrier; Released with the number seq ends it,
// and may be among the outputs of this very call. Lost and Ended end all calls.
// After a Lost no barrier can be called any more, and it is the error.
func (m *Member) Barrier(now int64, f wire.BarrierFlags) (seq uint64, out []Output, err error) {
	m.out = m.out[:0]
	switch self := m.cfg.Self; {
	case !f.Valid() || !f.Has(self.Role):
		return 0, nil, fmt.Errorf("cluster: %v called by %s: it must take part", f, who(self.Role, self.Rank))
	case m.stage != active:
		return 0, nil, ErrNotRunning
	case m.lost != nil:
		return 0, nil, m.lost
	}
	m.now = now
	if len(m.left[f]) != 0 {
		c := m.left[f][0]
		m.left[f] = slices.Delete(m.left[f], 0, 1)
		if c.released {
			m.emit(Output{Kind: Released, Seq: c.seq})
		} else {
			m.waiting[c.seq] = f
		}
		return c.seq, m.out, nil
	}
	pending := len(m.waiting)
	for _, left := range m.left {
		pending += len(left)
	}
	if pending >= maxCalls {
		return 0, nil, fmt.Errorf("cluster: %v: %d barrier calls are pending already", f, pending)
	}
	m.seq++
	m.waiting[m.seq] = f
	m.send(wire.AppendBarrier(nil, wire.Barrier{Flags: f, Seq: m.seq}))
	return m.seq, m.out, nil
}

// GiveUp says that nobody waits for a barrier call any more. The member has
// reached the barrier all the same: the next call of the same kind goes on with
// this one.
func (m *Member) GiveUp(seq uint64) {
	if f, ok := m.waiting[seq]; ok {
		delete(m.waiting, seq)
		m.left[f] = append(m.left[f], leftCall{seq: seq})
	}
}

// Leave asks to leave together with the others; Ended answers, at the latest
// when Timing.Leave is over: then this member leaves alone, and the others go on. A member that is not running or has lost the
// scheduler ends at once.
func (m *Member) Leave(now int64) []Output {
	m.out = m.out[:0]
	switch {
	case m.stage == active && m.online:
		m.stage = parting
		m.leaveBy = now + int64(m.cfg.Timing.Leave)
		m.send(wire.AppendSignal(nil, wire.TypeLeave))
	case m.stage == active:
		m.end(m.lost)
	case m.stage < active:
		m.end(nil)
	}
	return m.out
}

func (m *Member) emit(o Output) { m.out = append(m.out, o) }

func (m *Member) send(frame []byte) { m.emit(Output{Kind: Send, Frame: frame}) }

func (m *Member) end(err error) {
	m.stage, m.online = gone, false
	m.emit(Output{Kind: Ended, Err: err})
}

// tick does what is due.
func (m *Member) tick() {
	switch {
	case !m.online:
	case m.now >= m.hb.silence(m.heard):
		m.emit(Output{Kind: Close})
		m.schedulerLost(m.hb.reason())
	case m.now >= m.leaveBy:
		m.end(&EndedError{fmt.Sprintf("not all members wanted to leave within %v", m.cfg.Timing.Leave)})
	case m.hb.due(m.now):
		m.send(wire.AppendSignal(nil, wire.TypeHeartbeat))
	}
}

func (m *Member) schedulerLost(why string) {
	m.online = false
	m.lose(&LostError{Role: wire.RoleScheduler, Address: m.cfg.Scheduler, Reason: why})
}

// lose takes note that a node is gone.
func (m *Member) lose(e *LostError) {
	if m.stage < active || m.stage == parting && !m.online {
		m.end(e)
		return
	}
	if m.lost == nil {
		m.lost = e
	}
	clear(m.waiting)
	clear(m.left[:])
	m.emit(Output{Kind: Lost, Err: e})
}

func (m *Member) frame(data []byte) error {
	switch t := wire.FrameType(data); {
	case t == wire.TypeHeartbeat:
		return wire.ParseSignal(data)
	case t == wire.TypeRefuse && m.stage < active:
		why, err := wire.ParseRefuse(data)
		if err != nil {
			return err
		}
		m.end(&RefusedError{why})
	case t == wire.TypeRoster && m.stage == joining:
		members, err := wire.ParseRoster(data)
		if err != nil {
			return err
		}
		peers, err := m.peers(members)
		if err != nil {
			return err
		}
		m.stage = meeting
		m.emit(Output{Kind: Roster, Members: members, Peers: peers})
	case t == wire.TypeGo && m.stage == connected:
		if err := wire.ParseSignal(data); err != nil {
			return err
		}
		m.stage = active
		m.emit(Output{Kind: Running})
	case t == wire.TypeRelease && m.stage >= active:
		seq, err := wire.ParseRelease(data)
		if err != nil {
			return err
		}
		return m.release(seq)
	case t == wire.TypeLost:
		l, err := wire.ParseLost(data)
		if err != nil {
			return err
		}
		m.lose(&LostError{l.Role, l.Rank, l.Address, l.Reason})
	case t == wire.TypeLeft && m.stage >= active:
		if err := wire.ParseSignal(data); err != nil {
			return err
		}
		m.end(nil)
	default:
		return unexpected(t)
	}
	return nil
}

// release ends a barrier call, or notes that it has ended.
func (m *Member) release(seq uint64) error {
	if _, ok := m.waiting[seq]; ok {
		delete(m.waiting, seq)
		m.emit(Output{Kind: Released, Seq: seq})
		return nil
	}
	for _, left := range m.left {
		for i := range left {
			if left[i].seq == seq && !left[i].released {
				left[i].released = true
				return nil
			}
		}
	}
	return fmt.Errorf("cluster: barrier call %d was released, and is not pending", seq)
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
	found, own := 0, 0
	for _, p := range members {
		if p.Role == self.Role && p.Rank == self.Rank && p.Epoch == self.Epoch {
			own++
		}
		if p.Role == role && p.Instance == self.Instance {
			if found++; p.Group < len(peers) {
				peers[p.Group] = p
			}
		}
	}
	complete := !slices.ContainsFunc(peers, func(p wire.Member) bool { return p.Role != role })
	if own != 1 || found != len(peers) || !complete || len(members) != m.cfg.Shape.Members() {
		return nil, fmt.Errorf("cluster: the list of %d members is not of %v with %s in it once, and with instance %d in each %v group",
			len(members), m.cfg.Shape, who(self.Role, self.Rank), self.Instance, role)
	}
	return peers, nil
}
