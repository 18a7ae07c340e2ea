package cluster

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"maps"
	"slices"

	"fserver/engine/wire"
)

// MemberConfig is what a Member is told.
type MemberConfig struct {
	Self      wire.Member
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
	cfg MemberConfig
	hb  heartbeat

	now     int64
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
	waiting map[uint64]wire.BarrierFlags
	left    [wire.BarrierKinds][]leftCall
	out     []Output
}

// loss is a member that is gone and has no successor yet.
type loss struct {
	seat  int
	err   *LostError
	until int64 // a barrier of a patient member waits; Never: no longer
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
	case in.Kind == Up && !m.online && (m.stage == alone || m.stage == active):
		m.online, m.known, m.heard = true, false, now
		g := wire.Register{Shape: m.cfg.Shape, Member: m.cfg.Self}
		if m.stage == active {
			g.Known = &wire.Roster{View: m.view, Running: true, Members: m.roster}
		} else {
			m.stage = joining
		}
		m.send(wire.AppendRegister(nil, &g))
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
// and may be among the outputs of this very call. A Lost that names it and Ended
// end it too. While a member is lost a barrier cannot be called, and the loss is
// the error, unless this member is patient. Without a scheduler the call waits
// for the next one.
func (m *Member) Barrier(now int64, f wire.BarrierFlags) (seq uint64, out []Output, err error) {
	m.out = m.out[:0]
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
		return 0, nil, fmt.Errorf("cluster: %v: %d barrier calls are already pending (wait for them first)", f, pending)
	}
	m.seq++
	m.waiting[m.seq] = f
	if m.agreed {
		m.call(m.seq, f)
	}
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
// when Timing.Leave is over: then this member leaves alone, and the others go on.
// A member that is not running or is without a scheduler ends at once; one that has
// called the next scheduler waits for its answer.
func (m *Member) Leave(now int64) []Output {
	m.out = m.out[:0]
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
	m.out = m.out[:0]
	if m.now = now; m.stage == active && !m.done {
		m.done = true
		m.sayDone()
	}
	return m.out
}

func (m *Member) sayDone() {
	if m.done && m.agreed {
		m.send(wire.AppendSignal(nil, wire.TypeDone))
	}
}

func (m *Member) emit(o Output) { m.out = append(m.out, o) }

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
			m.emit(Output{Kind: Overdue, Err: l.err, Seqs: m.abandon()})
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
	}
	m.emit(Output{Kind: Redial})
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

// miss counts a member among those that are gone.
func (m *Member) miss(seat int, e *LostError) {
	l := loss{seat, e, Never}
	if m.cfg.Patient {
		l.until = m.now + int64(m.cfg.Timing.Rejoin)
	}
	m.losses = append(m.losses, l)
}

// joined takes note of a successor.
func (m *Member) joined(seat int, j wire.Member) {
	m.roster[seat] = j
	m.done = m.done && j.Role == wire.RoleServer
	m.losses = slices.DeleteFunc(m.losses, func(l loss) bool { return l.seat == seat })
	m.emit(Output{Kind: Joined, Members: []wire.Member{j}})
}

// abandon ends all barrier calls and gives those that somebody waits for.
func (m *Member) abandon() []uint64 {
	seqs := slices.Sorted(maps.Keys(m.waiting))
	clear(m.waiting)
	clear(m.left[:])
	return seqs
}

// callAgain sends the barrier calls that are not released: the scheduler has
// none of this view yet.
func (m *Member) callAgain() {
	if !m.agreed {
		return
	}
	calls := maps.Clone(m.waiting)
	for f, left := range m.left {
		for _, c := range left {
			if !c.released {
				calls[c.seq] = wire.BarrierFlags(f)
			}
		}
	}
	for _, seq := range slices.Sorted(maps.Keys(calls)) {
		m.call(seq, calls[seq])
	}
}

func (m *Member) call(seq uint64, f wire.BarrierFlags) {
	m.send(wire.AppendBarrier(nil, wire.Barrier{Flags: f, Seq: seq, View: m.view}))
}

func (m *Member) frame(data []byte) error {
	switch t := wire.FrameType(data); {
	case t == wire.TypeHeartbeat:
		return wire.ParseSignal(data)
	case t == wire.TypePing:
		m.send(wire.AppendSignal(nil, wire.TypePing))
		return wire.ParseSignal(data)
	case t == wire.TypeWaiting && m.stage < active:
		what, err := wire.ParseWaiting(data)
		m.missing = what
		return err
	case t == wire.TypeRefuse:
		why, err := wire.ParseRefuse(data)
		if err != nil {
			return err
		}
		if m.stage >= active {
			m.end(&EndedError{why})
		} else {
			m.end(&RefusedError{why})
		}
	case t == wire.TypeRoster && (m.stage == joining || m.stage >= active && !m.agreed):
		r, err := wire.ParseRoster(data)
		if err != nil {
			return err
		}
		peers, err := m.peers(r.Members)
		if err != nil {
			return err
		}
		if m.stage >= active {
			m.agree(r)
			break
		}
		m.stage, m.late, m.view, m.roster = meeting, r.Running, r.View, r.Members
		m.missing = ""
		for i := range m.roster {
			if v := &m.roster[i]; v.State == wire.Gone {
				m.miss(i, lostBefore(v))
			}
		}
		m.emit(Output{Kind: Roster, Members: slices.Clone(m.roster), Peers: peers, Late: m.late})
	case t == wire.TypeGo && m.stage == connected:
		if err := wire.ParseSignal(data); err != nil {
			return err
		}
		m.stage, m.agreed = active, true
		m.emit(Output{Kind: Running})
	case t == wire.TypeRelease && m.agreed:
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
		e := &LostError{l.Role, l.Rank, l.Address, l.Reason}
		if m.stage < active && !m.late {
			m.end(e)
			break
		}
		seat := seatOf(m.cfg.Shape, l.Role, l.Rank)
		if seat < 0 || m.roster[seat].State == wire.Gone {
			return fmt.Errorf("cluster: %s is lost, but is not a member", who(l.Role, l.Rank))
		}
		m.view = l.View
		m.lost(seat, e)
	case t == wire.TypeJoined && m.roster != nil:
		j, err := wire.ParseJoined(data)
		if err != nil {
			return err
		}
		seat := seatOf(m.cfg.Shape, j.Role, j.Rank)
		if seat < 0 || m.roster[seat].Group != j.Group || m.roster[seat].Instance != j.Instance {
			return fmt.Errorf("cluster: %s has joined group %d as instance %d, where there is no place for it", who(j.Role, j.Rank), j.Group, j.Instance)
		}
		m.view = j.View
		m.joined(seat, j.Member)
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

// lostBefore is the loss of a member of which only the result is known.
func lostBefore(v *wire.Member) *LostError {
	e := &LostError{Role: v.Role, Rank: v.Rank, Reason: "the process was lost and has not been replaced yet"}
	e.Address = place(v)
	return e
}

// agree takes the roster of a scheduler that is new: what has happened while
// there was none, happens now.
func (m *Member) agree(r *wire.Roster) {
	m.view = r.View
	for i, v := range r.Members {
		was := m.roster[i]
		switch {
		case v.State == wire.Gone && (was.State != wire.Gone || was.Epoch != v.Epoch):
			m.roster[i] = v
			m.losses = slices.DeleteFunc(m.losses, func(l loss) bool { return l.seat == i })
			m.lost(i, lostBefore(&v))
		case v.State != wire.Gone && was.Epoch != v.Epoch:
			m.joined(i, v)
		}
	}
	m.agreed = true
	m.sayDone()
	m.callAgain()
	if m.stage == parting {
		m.send(wire.AppendSignal(nil, wire.TypeLeave))
	}
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
	ordered := true
	for i, p := range members {
		ordered = ordered && seatOf(m.cfg.Shape, p.Role, p.Rank) == i
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
	if own != 1 || found != len(peers) || !complete || !ordered || len(members) != m.cfg.Shape.Members() {
		return nil, fmt.Errorf("cluster: the list of %d members is not of %v with %s in it once, and with instance %d in each %v group",
			len(members), m.cfg.Shape, who(self.Role, self.Rank), self.Instance, role)
	}
	return peers, nil
}
