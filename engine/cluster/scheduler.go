package cluster

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"fserver/engine/wire"
)

// SchedulerConfig is what a Scheduler is told.
type SchedulerConfig struct {
	Shape  wire.Shape
	Timing Timing
}

// Scheduler introduces the members to each other, counts them at barriers, and
// tells the others when one is gone and when one has taken its place. Its outputs
// are Send, Close, Log, Warn, Running, Lost, Joined and Ended. It ends when all
// members have left, when one is lost before the cluster is running, since then
// the cluster cannot come to be, and when all are lost and none comes back. One
// that starts while a cluster runs collects its members.
type Scheduler struct {
	shape  wire.Shape
	hb     heartbeat
	rejoin int64

	now      int64
	phase    phase
	conns    map[int64]*conn
	seats    []*conn        // by role and rank; nil: empty, or its member is gone
	rails    map[rail]*conn // the same by rail, until the cluster runs
	seated   int            // seats taken
	ready    int            // members that said so, until the cluster runs
	leaving  int            // members that want to leave
	parting  bool           // some want to, or may
	finishes bool           // the scheduler is about to go
	known    []wire.Member  // once the cluster runs: who has each seat, or had it last
	view     uint64         // changes of known so far
	era      uint64         // the view of the last loss: barrier calls from before it are over
	heard    uint64         // the latest view that a member of an earlier scheduler had
	changed  []bool         // seats whose owner has been lost, or has come, since then
	barriers [wire.BarrierKinds]barrier
	scan     int64   // no connection's time is up before this
	due      []int64 // room for tick
	told     string  // what the members have heard that the cluster waits for
	tellBy   int64   // when they hear it again
	expectBy int64   // when a member is lost that an earlier scheduler knew and this one does not
	emptyBy  int64   // when a cluster ends of which nobody is left
	endBy    int64
	err      error // of Ended
	out      []Output
}

// phase is where a Scheduler is in its life.
type phase uint8

const (
	forming phase = iota // members register
	linking              // they connect to each other
	running
	ending // all have been told to go
	over
)

// conn is a connection; a member once it has registered.
type conn struct {
	wire.Member
	id      int64
	remote  string
	heard   int64 // or when it opened, or was told to go
	member  bool  // has registered
	told    bool  // has been told to go
	ready   bool
	leaving bool
	done    bool  // a server whose workers have left
	calls   int   // barrier calls that are pending
	rival   *conn // who wants its seat, and waits to see whether it answers
	waits   *conn // whose seat it wants
}

func (c *conn) who() string { return c.Name() }

// address is where people find the member, or its connection.
func (c *conn) address() string {
	return cmp.Or(place(&c.Member), c.remote)
}

// rail is a place in a group.
type rail struct {
	role            wire.Role
	group, instance int
}

func (c *conn) rail() rail { return rail{c.Role, c.Group, c.Instance} }

// NewScheduler makes a Scheduler that waits for the members of cfg.Shape.
func NewScheduler(cfg SchedulerConfig) (*Scheduler, error) {
	s := cfg.Shape
	for _, n := range []int{s.Workers, s.Servers, s.GroupSize} {
		if n < 1 || n > wire.MaxMembers {
			return nil, fmt.Errorf("cluster: %v: each must be from 1 to %d", s, wire.MaxMembers)
		}
	}
	if n := s.Members(); n > wire.MaxMembers {
		return nil, fmt.Errorf("cluster: %v are %d members: more than %d", s, n, wire.MaxMembers)
	}
	return &Scheduler{
		shape:    s,
		hb:       newHeartbeat(cfg.Timing),
		rejoin:   int64(cfg.Timing.Rejoin),
		conns:    make(map[int64]*conn),
		seats:    make([]*conn, s.Members()),
		rails:    make(map[rail]*conn),
		changed:  make([]bool, s.Members()),
		scan:     Never,
		tellBy:   Never,
		expectBy: Never,
		emptyBy:  Never,
		endBy:    Never,
	}, nil
}

// Step takes one input at time now. What it returns is valid until the next
// Step. A time that is up is noticed at any Step after it.
func (s *Scheduler) Step(now int64, in Input) []Output {
	s.out = s.out[:0]
	if s.phase == over {
		return nil
	}
	s.now = now
	if late := s.hb.step(now); late != 0 {
		for _, c := range s.conns {
			c.heard += late
		}
		s.scan = now
	}
	c := s.conns[in.Conn]
	switch {
	case in.Kind == Up:
		c = &conn{id: in.Conn, remote: in.Remote, heard: now}
		s.conns[in.Conn] = c
		s.scan = min(s.scan, s.deadline(c))
	case c == nil: // closed by us, or no input of a connection
	case in.Kind == Frame:
		s.frame(c, in.Data)
	case in.Kind == Down:
		s.drop(c, reason(in.Err))
	}
	s.tick()
	return s.out
}

// Next is when Step must be called at the latest.
func (s *Scheduler) Next() int64 {
	if s.phase == over {
		return Never
	}
	return min(s.hb.beat, s.scan, s.tellBy, s.expectBy, s.emptyBy, s.endBy)
}

// Name returns the name of the member on a connection, or an empty text: it has none.
func (s *Scheduler) Name(conn int64) string {
	if c := s.conns[conn]; c != nil && c.member {
		return c.who()
	}
	return ""
}

// Waiting says what the cluster waits for before it runs.
func (s *Scheduler) Waiting() string {
	switch s.phase {
	case forming:
		return fmt.Sprintf("%d of %d members have registered; missing: %s", s.seated, len(s.seats),
			s.names(func(c *conn) bool { return c == nil }))
	case linking:
		return "not connected to all their peers: " + s.names(func(c *conn) bool { return c != nil && !c.ready })
	}
	return "nothing"
}

func (s *Scheduler) emit(o Output) { s.out = append(s.out, o) }

func (s *Scheduler) send(c *conn, frame []byte) {
	s.emit(Output{Kind: Send, Conn: c.id, Frame: frame})
}

// all sends frame to every member.
func (s *Scheduler) all(frame []byte) {
	for _, c := range s.seats {
		if c != nil {
			s.send(c, frame)
		}
	}
}

func (s *Scheduler) logf(format string, args ...any) {
	s.emit(Output{Kind: Log, Text: fmt.Sprintf(format, args...)})
}

func (s *Scheduler) warnf(format string, args ...any) {
	s.emit(Output{Kind: Warn, Text: fmt.Sprintf(format, args...)})
}

// seat is the index of a member in seats.
func (s *Scheduler) seat(m *wire.Member) int { return seatOf(s.shape, m.Role, m.Rank) }

// names lists the members whose seats are chosen, at most some of them.
func (s *Scheduler) names(chosen func(*conn) bool) string {
	const most = 8
	var names []string
	n := 0
	for i, c := range s.seats {
		if !chosen(c) {
			continue
		}
		if n++; n <= most {
			role, rank := wire.RoleWorker, i
			if first := seatOf(s.shape, wire.RoleServer, 0); i >= first {
				role, rank = wire.RoleServer, i-first
			}
			names = append(names, who(role, rank))
		}
	}
	if n > most {
		names = append(names, fmt.Sprintf("%d more", n-most))
	}
	return strings.Join(names, ", ")
}

// deadline is when the time of a connection is up.
func (s *Scheduler) deadline(c *conn) int64 {
	if c.member || c.waits != nil && s.hb.timeout != 0 {
		return s.hb.silence(c.heard)
	}
	return c.heard + int64(patience)
}

// tick does what is due.
func (s *Scheduler) tick() {
	if s.now >= s.scan {
		due := s.due[:0]
		for id, c := range s.conns {
			if s.now >= s.deadline(c) {
				due = append(due, id)
			}
		}
		slices.Sort(due)
		s.due = due
		for _, id := range due {
			c, ok := s.conns[id]
			if !ok || s.now < s.deadline(c) {
				continue
			}
			why := "it did not register"
			switch {
			case c.waits != nil:
				s.taken(c.waits)
				continue
			case c.member:
				why = s.hb.reason()
			}
			s.emit(Output{Kind: Close, Conn: id})
			s.drop(c, why)
		}
		s.scan = Never
		for _, c := range s.conns {
			s.scan = min(s.scan, s.deadline(c))
		}
	}
	if s.hb.due(s.now) {
		s.all(beat)
		for _, c := range s.seats {
			if c != nil && c.rival != nil {
				s.send(c.rival, beat)
			}
		}
	}
	if s.now >= s.tellBy {
		s.tell()
	}
	if s.now >= s.expectBy {
		s.giveUp()
	}
	if s.now >= s.emptyBy && s.phase == running {
		s.end(s.err)
	}
	if s.phase == ending && (len(s.conns) == 0 || s.now >= s.endBy) {
		for _, id := range slices.Sorted(maps.Keys(s.conns)) {
			s.emit(Output{Kind: Close, Conn: id})
		}
		s.phase = over
		s.emit(Output{Kind: Ended, Err: s.err})
	}
}

func (s *Scheduler) frame(c *conn, data []byte) {
	t := wire.FrameType(data)
	var err error
	if c.told {
		return
	}
	c.heard = s.now
	switch {
	case t == wire.TypeRegister && !c.member:
		var g *wire.Register
		if g, err = wire.ParseRegister(data); err == nil {
			s.register(c, g)
		}
	case t == wire.TypeHeartbeat && (c.member || c.waits != nil):
		err = wire.ParseSignal(data)
	case !c.member:
		err = unexpected(t)
	case t == wire.TypePing:
		if err = wire.ParseSignal(data); err == nil && c.rival != nil {
			s.taken(c)
		}
	case t == wire.TypeReady && (s.phase == linking || s.phase == running) && !c.ready:
		if err = wire.ParseSignal(data); err == nil {
			s.isReady(c)
		}
	case t == wire.TypeBarrier && s.phase == running && c.ready && !c.leaving:
		var v wire.Barrier
		if v, err = wire.ParseBarrier(data); err == nil {
			err = s.barrier(c, v)
		}
	case t == wire.TypeDone && s.phase == running && c.Role == wire.RoleServer:
		err = wire.ParseSignal(data)
		c.done, s.parting = true, true
	case t == wire.TypeLeave && s.phase == running && !c.leaving:
		if err = wire.ParseSignal(data); err == nil {
			s.wantsToLeave(c)
		}
	default:
		err = unexpected(t)
	}
	if err != nil {
		s.emit(Output{Kind: Close, Conn: c.id})
		s.drop(c, brokeProtocol(err))
	}
}

func (s *Scheduler) register(c *conn, g *wire.Register) {
	if s.phase == ending && s.err == nil {
		// It is early for the next cluster: it will find the next scheduler.
		s.emit(Output{Kind: Close, Conn: c.id})
		delete(s.conns, c.id)
		return
	}
	why := s.judge(g)
	switch {
	case why != "":
	case g.Known != nil:
		why = s.comesBack(c, g)
	case s.phase == running:
		why = s.succeeds(c, g)
	default:
		why = s.comes(c, g)
	}
	if why != "" {
		s.warnf("%s at %s is refused: %s", who(g.Role, g.Rank), c.remote, why)
		s.refuse(c, why)
	}
}

// sit gives c the seat of m, which is empty.
func (s *Scheduler) sit(c *conn, m *wire.Member) {
	c.Member, c.member = *m, true
	s.seats[s.seat(m)] = c
	s.seated++
	s.emptyBy = Never
	s.scan = min(s.scan, s.deadline(c))
}

func (s *Scheduler) registered(c *conn) {
	s.logf("%s at %s has registered, %d of %d", c.who(), c.address(), s.seated, len(s.seats))
}

// comes takes a member before the cluster runs.
func (s *Scheduler) comes(c *conn, g *wire.Register) (why string) {
	if c := s.seats[s.seat(&g.Member)]; c != nil {
		return isThere(c)
	}
	if c := s.rails[rail{g.Role, g.Group, g.Instance}]; c != nil {
		return fmt.Sprintf("instance %d of %v group %d is %s already: each process of a group needs an instance of its own "+
			"(DMLC_INSTANCE_ID, else STEPMESH_GPU + DMLC_RANK_OFFSET)", g.Instance, g.Role, g.Group, who(c.Role, c.Rank))
	}
	s.sit(c, &g.Member)
	s.registered(c)
	s.rails[c.rail()] = c
	s.tellSoon()
	if s.seated < len(s.seats) {
		s.send(c, wire.AppendWaiting(nil, s.Waiting())) // so that it knows that it is here
		return ""
	}
	s.known = make([]wire.Member, len(s.seats))
	for i, c := range s.seats {
		s.known[i] = c.Member
	}
	roster := wire.AppendRoster(nil, &wire.Roster{Members: s.known})
	if len(roster) > wire.MaxRoster {
		why := fmt.Sprintf("the list of %d members takes %d bytes, more than %d: they have too many addresses",
			len(s.known), len(roster), wire.MaxRoster)
		s.all(wire.AppendRefuse(nil, why))
		s.end(errors.New("cluster: " + why))
		return ""
	}
	s.phase = linking
	s.all(roster)
	return ""
}

// tellEvery is how often members hear at most what the cluster waits for.
const tellEvery = time.Second

func (s *Scheduler) tellSoon() { s.tellBy = min(s.tellBy, s.now+int64(tellEvery)) }

// tell tells the members what the cluster waits for, if that has changed.
func (s *Scheduler) tell() {
	s.tellBy = Never
	if what := s.Waiting(); s.phase < running && what != s.told {
		s.told = what
		s.all(wire.AppendWaiting(nil, what))
	}
}

// judge says why nobody like this can take part, or nothing.
func (s *Scheduler) judge(g *wire.Register) (why string) {
	if s.phase == ending {
		return "the cluster has ended: " + strings.TrimPrefix(s.err.Error(), "cluster: ")
	}
	if g.Shape != s.shape {
		return fmt.Sprintf("it is configured with %v, the scheduler with %v: "+
			"DMLC_NUM_WORKER, DMLC_NUM_SERVER and DMLC_GROUP_SIZE must be the same on all nodes", g.Shape, s.shape)
	}
	if g.Role == wire.RoleScheduler {
		return "it is a scheduler, and there is one already"
	}
	groups, size := s.shape.Groups(g.Role), s.shape.GroupSize
	for _, v := range []struct {
		what   string
		is, to int
	}{{"rank", g.Rank, groups * size}, {"group", g.Group, groups}, {"instance", g.Instance, size}} {
		if v.is >= v.to {
			return fmt.Sprintf("%s %d of a %v is not from 0 to %d, for %v", v.what, v.is, g.Role, v.to-1, s.shape)
		}
	}
	return ""
}

// isThere says why nobody else can have the seat of c.
func isThere(c *conn) string {
	return fmt.Sprintf("%s is there already, at %s: each %v needs a rank of its own "+
		"(DMLC_GROUP_SIZE × DMLC_NODE_RANK + STEPMESH_GPU + DMLC_RANK_OFFSET)", who(c.Role, c.Rank), c.address(), c.Role)
}

func (s *Scheduler) refuse(c *conn, why string) {
	s.send(c, wire.AppendRefuse(nil, why))
	s.dismiss(c)
}

// dismiss leaves it to the other end to close a connection, for a while: what
// it was told would be lost if we closed it.
func (s *Scheduler) dismiss(c *conn) {
	c.member, c.told, c.heard = false, true, s.now
	s.scan = min(s.scan, s.deadline(c))
}

func (s *Scheduler) isReady(c *conn) {
	c.ready = true
	if s.phase == running {
		s.send(c, wire.AppendSignal(nil, wire.TypeGo))
		return
	}
	if s.ready++; s.ready < len(s.seats) {
		s.tellSoon()
		return
	}
	s.phase, s.tellBy = running, Never
	s.all(wire.AppendSignal(nil, wire.TypeGo))
	s.logf("the cluster is running: %v", s.shape)
	s.emit(Output{Kind: Running})
}

// wantsToLeave counts c, which keeps its seat until all leave.
func (s *Scheduler) wantsToLeave(c *conn) {
	c.leaving, s.parting = true, true
	s.leaving++
	s.known[s.seat(&c.Member)].State = wire.Parting
	s.logf("%s wants to leave, %d of %d", c.who(), s.leaving, s.seated)
	s.leaveTogether()
}

// Finish says that the scheduler is about to go. A server whose workers have left
// is not waited for then. The result says whether members are leaving, so that the
// cluster may end in order yet.
func (s *Scheduler) Finish(now int64) (out []Output, parting bool) {
	s.out, s.now = s.out[:0], now
	if s.phase == running {
		s.finishes = true
		s.leaveTogether()
	}
	return s.out, s.parting && s.phase < over
}

// leaveTogether ends the cluster if all members that there still are want it.
func (s *Scheduler) leaveTogether() {
	willing := s.leaving
	if s.finishes {
		for _, c := range s.seats {
			if c != nil && c.done && !c.leaving {
				willing++
			}
		}
	}
	if s.leaving != 0 && willing == s.seated {
		s.all(wire.AppendSignal(nil, wire.TypeLeft))
		s.end(nil)
	}
}

// drop forgets a connection that is gone. A member that has not asked to leave
// is lost.
func (s *Scheduler) drop(c *conn, why string) {
	delete(s.conns, c.id)
	if old := c.waits; old != nil {
		old.rival, c.waits = nil, nil
	}
	if !c.member {
		switch {
		case c.told:
		case why == closed: // `fserver doctor --peer`, for one
			s.logf("a connection from %s is gone: %s", c.remote, why)
		default:
			s.warnf("a connection from %s is gone: %s", c.remote, why)
		}
		return
	}
	c.member = false
	s.seats[s.seat(&c.Member)] = nil
	s.changed[s.seat(&c.Member)] = true
	s.seated--
	var err error
	left := c.leaving || c.done
	switch {
	case c.leaving:
		s.leaving--
		s.logf("%s has left before the others", c.who())
	case c.done:
		s.known[s.seat(&c.Member)].State = wire.Parting
		s.logf("%s has left after its workers", c.who())
	default:
		err = s.lose(&c.Member, c.address(), why)
	}
	switch {
	case s.phase < running:
		s.end(err)
		return
	case c.rival != nil:
		s.inherit(c)
	case s.seated == 0 && (left || s.rejoin == 0):
		s.end(err)
		return
	case s.seated == 0:
		s.err, s.emptyBy = err, s.now+s.rejoin
	}
	s.leaveTogether()
}

// lose tells everybody that a member is gone.
func (s *Scheduler) lose(m *wire.Member, address, why string) error {
	err := &LostError{m.Role, m.Rank, address, why}
	s.view++
	s.era = s.view
	if s.known != nil {
		s.known[s.seat(m)].State = wire.Gone
	}
	s.all(wire.AppendLost(nil, &wire.Lost{View: s.view, Role: m.Role, Rank: m.Rank, Epoch: m.Epoch, Address: address, Reason: why}))
	s.emit(Output{Kind: Lost, Err: err})
	s.barriers = [wire.BarrierKinds]barrier{}
	for _, c := range s.seats {
		if c != nil {
			c.calls = 0
		}
	}
	return err
}

// end is called when every member has been told why.
func (s *Scheduler) end(err error) {
	s.phase, s.err = ending, err
	s.endBy = s.now + int64(patience)
	for _, c := range s.seats {
		if c != nil {
			s.dismiss(c)
		}
	}
	clear(s.seats)
	s.seated = 0
}

func unexpected(t wire.Type) error {
	return fmt.Errorf("cluster: a frame of type %d was not expected", t)
}

const closed = "it closed its connection"

// reason says why a connection is gone.
func reason(err error) string {
	if err == nil || errors.Is(err, io.EOF) {
		return closed
	}
	return err.Error()
}
