package cluster

import (
	"cmp"
	"fmt"

	"fserver/engine/wire"
)

// MemberConfig is what a Member is told.
type MemberConfig struct {
	Self      wire.Member // with rank and group NoRank, the scheduler assigns them; see Rank
	Shape     wire.Shape
	Scheduler string // its address, for people
	Timing    Timing
	Patient   bool // a barrier waits for the successor of a lost member, for Timing.Rejoin
}

// Member is the side of a worker or server. Its life: Up (it registers),
// Roster (the caller connects it to its peers, then calls Connected), Running,
// Leave, Ended. Its outputs are Send, Close, Redial, Roster, Running, Released,
// Lost, Overdue, Joined and Ended.
//
// Before Running, the loss of any node is Ended, unless the cluster ran before
// this member came. After it, it is Lost, and everything but barriers goes on:
// that the scheduler is gone stops nothing else either. The member looks for the
// next scheduler then (Redial, Up) and tells it what it knows.
type Member struct {
	machine
	cfg     MemberConfig
	stage   stage
	online  bool   // connected to the scheduler
	known   bool   // it has said something
	missing string // what it says the cluster waits for
	done    bool   // of a server: its workers have left
	agreed  bool   // once active: the scheduler has told its roster
	heard   int64  // from it
	leaveBy int64
	orphan  *LostError    // the last loss of the scheduler
	late    bool          // the cluster ran before
	roster  []wire.Member // by role and rank, and kept up to date
	view    uint64        // of it
	losses  []loss        // members that are gone, in order
	seq     uint64        // barrier calls so far
	calls   []ownCall     // those that are not over, in order
	sends   uint64        // messages so far
	unsent  []ownSend     // those that are not answered, in order
	sending room          // of those
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

// NewMember makes a Member.
func NewMember(cfg MemberConfig) *Member {
	return &Member{cfg: cfg, machine: machine{hb: newHeartbeat(cfg.Timing)}, leaveBy: Never}
}

// Step takes one input at time now. What it returns is valid until the next
// call that returns outputs. A time that is up is noticed at any Step after it.
func (m *Member) Step(now int64, in Input) []Output {
	if m.stage == gone {
		return nil
	}
	m.begin(now)
	m.heard += m.hb.step(now)
	switch {
	case in.Kind == Up && !m.online && (m.stage == alone || m.stage == active):
		m.online, m.known, m.heard = true, false, now
		g := wire.Register{Shape: m.cfg.Shape, Member: m.cfg.Self}
		if g.Rank == NoRank {
			g.Any, g.Rank, g.Group = true, 0, 0
		}
		if m.stage == active {
			g.Known = &wire.Roster{View: m.view, Running: true, Members: m.roster}
		} else {
			m.stage = joining
		}
		m.send(wire.Append(nil, wire.TypeRegister, &g))
	case !m.online:
	case in.Kind == Frame:
		m.heard, m.known = now, true
		if err := m.frame(in.Data); err != nil {
			m.emit(Output{Kind: Close})
			m.schedulerLost(brokeProtocol(err))
		}
	case in.Kind == Down && !m.known && m.stage == joining:
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
	if m.stage == gone {
		return Never
	}
	next := int64(Never)
	for i := range m.losses {
		next = min(next, m.losses[i].until)
	}
	if m.online {
		next = min(next, m.hb.beat, m.hb.silence(m.heard), m.leaveBy)
	}
	return next
}

// Waiting says what the member waits for before it runs.
func (m *Member) Waiting() string {
	switch m.stage {
	case alone:
		return "not connected to the scheduler at " + m.cfg.Scheduler
	case joining:
		if m.missing == "" {
			return "members are missing at the scheduler at " + m.cfg.Scheduler
		}
		return fmt.Sprintf("members are missing at the scheduler at %s: %s", m.cfg.Scheduler, m.missing)
	case meeting:
		return "not connected to all its peers"
	case connected:
		return cmp.Or(m.missing, "other members are not connected to all their peers")
	}
	return "nothing"
}

// Rank returns the rank of this member, which is NoRank until the Roster if the scheduler assigns it.
func (m *Member) Rank() int { return m.cfg.Self.Rank }

// Connected says that the connections to all peers of the Roster stand.
func (m *Member) Connected(now int64) []Output {
	m.begin(now)
	if m.stage == meeting {
		m.stage = connected
		m.send(wire.AppendSignal(nil, wire.TypeReady))
	}
	return m.out
}

// Leave asks to leave together with the others; Ended answers, at the latest
// when Timing.Leave is over: then this member leaves alone, and the others go on.
// A member that is not running or is without a scheduler ends at once; one that has
// called the next scheduler waits for its answer.
func (m *Member) Leave(now int64) []Output {
	m.begin(now)
	switch {
	case m.stage == active && m.online:
		m.stage = parting
		m.leaveBy = now + int64(m.cfg.Timing.Leave)
		if m.agreed {
			m.send(wire.AppendSignal(nil, wire.TypeLeave))
		}
	case m.stage == active:
		m.end(m.orphan)
	case m.stage < active:
		m.end(nil)
	}
	return m.out
}

// Done says of a server that all its workers have left: that it ends without Leave is
// no loss any more.
func (m *Member) Done(now int64) []Output {
	m.begin(now)
	if m.stage == active && !m.done {
		m.done = true
		m.sayDone()
	}
	return m.out
}

func (m *Member) sayDone() {
	if m.done && m.agreed {
		m.send(wire.Append(nil, wire.TypeDone, &wire.Done{View: m.view}))
	}
}

func (m *Member) send(frame []byte) { m.emit(Output{Kind: Send, Frame: frame}) }

func (m *Member) end(err error) {
	m.stage, m.online = gone, false
	m.emit(Output{Kind: Ended, Err: err})
}

// tick does what is due.
func (m *Member) tick() {
	for i := range m.losses {
		if l := &m.losses[i]; m.now >= l.until {
			l.until = Never
			m.emit(Output{Kind: Overdue, Err: l.err, Seqs: m.giveUpAll()})
		}
	}
	switch {
	case !m.online:
	case m.now >= m.hb.silence(m.heard):
		m.emit(Output{Kind: Close})
		m.schedulerLost(m.hb.reason())
	case m.now >= m.leaveBy:
		m.end(&EndedError{fmt.Sprintf("not all members wanted to leave within %v", m.cfg.Timing.Leave)})
	case m.hb.due(m.now):
		m.send(beat)
	}
}

func (m *Member) schedulerLost(why string) {
	m.online = false
	e := &LostError{Role: wire.RoleScheduler, Address: m.cfg.Scheduler, Reason: why}
	if m.stage != active {
		m.end(e)
		return
	}
	if m.agreed { // else it is one that we have only tried
		// Some may have seen a barrier open and some not: it cannot be called again.
		m.agreed, m.orphan = false, e
		m.emit(Output{Kind: Lost, Err: e, Seqs: m.abandon()})
		m.unsend(e)
	}
	m.emit(Output{Kind: Redial})
}

func (m *Member) frame(data []byte) error {
	switch t := wire.FrameType(data); {
	case t == wire.TypeHeartbeat:
		return wire.ParseSignal(data)
	case t == wire.TypePing:
		m.send(wire.AppendSignal(nil, wire.TypePing))
		return wire.ParseSignal(data)
	case t == wire.TypeWaiting && m.stage < active:
		said, err := wire.Parse[wire.Text](data, t)
		m.missing = said.Text
		return err
	case t == wire.TypeRefuse:
		return with(data, m.refused)
	case t == wire.TypeRoster && m.stage == joining:
		return with(data, m.meet)
	case t == wire.TypeRoster && m.stage >= active && !m.agreed:
		return with(data, m.agree)
	case t == wire.TypeGo && m.stage == connected:
		if err := wire.ParseSignal(data); err != nil {
			return err
		}
		m.stage, m.agreed = active, true
		m.emit(Output{Kind: Running})
	case t == wire.TypeRelease && m.agreed:
		return with(data, m.release)
	case t == wire.TypeMessage && m.roster != nil:
		return with(data, m.mailed)
	case t == wire.TypeSent && m.agreed:
		return with(data, m.isSent)
	case t == wire.TypeLost:
		return with(data, m.isLost)
	case t == wire.TypeParted && m.roster != nil:
		return with(data, m.hasParted)
	case t == wire.TypeJoined && m.roster != nil:
		return with(data, m.hasJoined)
	case t == wire.TypeLeft && m.agreed:
		if err := wire.ParseSignal(data); err != nil {
			return err
		}
		m.end(nil)
	default:
		return unexpected(t)
	}
	return nil
}

// with parses a frame, and calls do with what it says.
func with[T any, P wire.Frame[T]](data []byte, do func(P) error) error {
	said, err := wire.Parse[T, P](data, wire.FrameType(data))
	if err != nil {
		return err
	}
	return do(said)
}

func (m *Member) refused(why *wire.Text) error {
	if m.stage >= active {
		m.end(&EndedError{why.Text})
	} else {
		m.end(&RefusedError{why.Text})
	}
	return nil
}
