package cluster

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"fserver/engine/wire"
)

// Scheduler introduces the members to each other, counts them at barriers, and
// tells the others when one is gone and when one has taken its place. Its outputs
// are Send, Close, Log, Warn, Running, Lost, Joined and Ended. It ends when all
// members have left, when one is lost before the cluster is running, since then
// the cluster cannot come to be, and when all are lost and none comes back. One
// that starts while a cluster runs collects its members.
type Scheduler struct {
	machine
	Run      uint64 // of its process, which messages name; set before the first Step
	shape    wire.Shape
	rejoin   int64
	phase    phase
	conns    map[int64]*conn
	seats    []*conn        // by role and rank; nil: empty, or its member is gone
	seated   int            // seats taken
	ready    int            // members that said so, until the cluster runs
	leaving  int            // members that want to leave
	parting  bool           // some want to, or may
	finishes bool           // the scheduler is about to go
	known    []wire.Member  // once the cluster runs: who has each seat, or had it last
	view     uint64         // changes of known so far
	era      uint64         // the view of the last loss: barrier calls from before it are over
	came     map[int]uint64 // by instance: the view in which the last worker has come
	resumed  bool           // it collects the members of an earlier scheduler
	heard    uint64         // the latest view that one of them had
	seeking  []*conn        // without a rank, and wait for one to be lost; in the order in which they came
	changed  []bool         // seats whose owner has been lost, or has come, since then
	barriers [wire.BarrierKinds]barrier
	sends    uint64 // messages of its own so far
	scan     int64  // no connection's time is up before this
	told     string // what the members have heard that the cluster waits for
	tellBy   int64  // when they hear it again
	expectBy int64  // when a member is lost that an earlier scheduler knew and this one does not
	emptyBy  int64  // when a cluster ends of which nobody is left
	endBy    int64
	err      error // of Ended
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
	any     bool  // has come without a rank
	told    bool  // has been told to go
	ready   bool
	leaving bool
	done    bool   // a server whose workers have left
	calls   int    // barrier calls that are pending
	sends   int    // its messages that are not answered
	owed    []owed // messages for it that it has not answered, in order
	owing   room   // of those
	rival   *conn  // who wants its seat, and waits to see whether it answers
	waits   *conn  // whose seat it wants
	giveUp  int64  // of one of seeking: when it is refused
}

// address is where people find the member, or its connection.
func (c *conn) address() string {
	return cmp.Or(place(&c.Member), c.remote)
}

// NewScheduler makes a Scheduler that waits for the members of s.
func NewScheduler(s wire.Shape, t Timing) (*Scheduler, error) {
	for _, n := range []int{s.Workers, s.Servers, s.GroupSize} {
		if n < 1 || n > wire.MaxMembers {
			return nil, fmt.Errorf("cluster: %v: each must be from 1 to %d", s, wire.MaxMembers)
		}
	}
	if n := s.Members(); n > wire.MaxMembers {
		return nil, fmt.Errorf("cluster: %v are %d members: more than %d", s, n, wire.MaxMembers)
	}
	return &Scheduler{
		machine:  machine{hb: newHeartbeat(t)},
		shape:    s,
		rejoin:   int64(t.Rejoin),
		conns:    make(map[int64]*conn),
		seats:    make([]*conn, s.Members()),
		changed:  make([]bool, s.Members()),
		came:     make(map[int]uint64),
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
	s.begin(now)
	if s.phase == over {
		if in.Kind == Up { // it is early for the next cluster
			s.emit(Output{Kind: Close, Conn: in.Conn})
		}
		return s.out
	}
	if late := s.hb.step(now); late != 0 {
		for _, c := range s.conns {
			if c.heard += late; c.giveUp != 0 {
				c.giveUp += late
			}
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
		return c.Name()
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
	servers := seatOf(s.shape, wire.RoleServer, 0) // those from here on
	var names []string
	for i, c := range s.seats {
		switch {
		case !chosen(c):
		case i >= servers:
			names = append(names, who(wire.RoleServer, i-servers))
		default:
			names = append(names, who(wire.RoleWorker, i))
		}
	}
	if n := len(names); n > most {
		names = append(names[:most], fmt.Sprintf("%d more", n-most))
	}
	return strings.Join(names, ", ")
}

// deadline is when the time of a connection is up.
func (s *Scheduler) deadline(c *conn) int64 {
	switch {
	case c.giveUp != 0:
		return c.giveUp
	case c.member || c.waits != nil && s.hb.timeout != 0:
		return s.hb.silence(c.heard)
	}
	return c.heard + int64(patience)
}

// tick does what is due.
func (s *Scheduler) tick() {
	if s.now >= s.expectBy { // first: who waits until then gets a seat that this frees
		s.giveUp()
		s.fill()
	}
	if s.now >= s.scan {
		s.endDue()
	}
	if s.hb.due(s.now) {
		s.all(beat)
		for _, c := range s.seats {
			if c != nil && c.rival != nil {
				s.send(c.rival, beat)
			}
		}
		for _, c := range s.seeking {
			s.send(c, beat)
		}
	}
	if s.now >= s.tellBy {
		s.tell()
	}
	if len(s.seeking) != 0 && s.phase == running {
		s.fill()
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

// endDue ends the connections whose time is over, and notes when the next one is.
func (s *Scheduler) endDue() {
	var due []int64
	var seekers []*conn
	for id, c := range s.conns {
		if s.now >= s.deadline(c) {
			due = append(due, id)
		}
	}
	slices.Sort(due)
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
		case c.giveUp != 0:
			seekers = append(seekers, c)
			continue
		case c.member:
			why = s.hb.reason()
		}
		s.emit(Output{Kind: Close, Conn: id})
		s.drop(c, why)
	}
	s.refuseSeekers(seekers)
	s.scan = Never
	for _, c := range s.conns {
		s.scan = min(s.scan, s.deadline(c))
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
	case t == wire.TypeRegister && !c.member && c.waits == nil && c.giveUp == 0:
		err = with(data, func(g *wire.Register) error { return s.register(c, g) })
	case t == wire.TypeHeartbeat && (c.member || c.waits != nil || c.giveUp != 0):
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
		err = with(data, func(v *wire.Barrier) error { return s.barrier(c, v) })
	case t == wire.TypeSend && s.phase == running && c.ready && !c.leaving:
		err = with(data, func(v *wire.Send) error { return s.passOn(c, v) })
	case t == wire.TypeTaken:
		err = with(data, func(v *wire.Taken) error { return s.answer(c, v) })
	case t == wire.TypeDone && s.phase == running && c.Role == wire.RoleServer:
		err = with(data, func(d *wire.Done) error {
			if d.View >= s.came[c.Instance] { // else it has crossed the news of a worker
				c.done, s.parting = true, true
			}
			return nil
		})
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

// wantsToLeave counts c, which keeps its seat until all leave.
func (s *Scheduler) wantsToLeave(c *conn) {
	c.leaving, s.parting = true, true
	s.leaving++
	s.known[s.seat(&c.Member)].State = wire.Parting
	s.logf("%s wants to leave, %d of %d", c.Name(), s.leaving, s.seated)
	s.leaveTogether()
}

// Finish says that the scheduler is about to go. A server whose workers have left
// is not waited for then. The result says whether members are leaving, so that the
// cluster may end in order yet.
func (s *Scheduler) Finish(now int64) (out []Output, parting bool) {
	s.begin(now)
	if s.phase == running {
		s.finishes = true
		s.leaveTogether()
	}
	return s.out, s.parting && s.phase < over
}

// leaveTogether ends the cluster if all members that there still are want it.
func (s *Scheduler) leaveTogether() {
	if s.awaits() {
		return // giveUp calls it again
	}
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
	s.seeking = slices.DeleteFunc(s.seeking, func(o *conn) bool { return o == c })
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
		s.hasParted(c, "before the others")
	case c.done:
		s.hasParted(c, "after its workers")
	default:
		err = s.lose(&c.Member, c.address(), why)
	}
	s.unanswered(c, why)
	if c.rival != nil { // while the cluster runs
		s.inherit(c)
	}
	switch {
	case s.phase < running:
		s.end(err)
		return
	case s.seated == 0 && s.awaits():
		s.err, s.emptyBy = err, max(s.now+s.rejoin, s.expectBy)
	case s.seated == 0 && (left || s.rejoin == 0):
		s.end(err)
		return
	case s.seated == 0:
		s.err, s.emptyBy = err, s.now+s.rejoin
	}
	s.leaveTogether()
}

// hasParted tells everybody that a member has left, and the others go on.
func (s *Scheduler) hasParted(c *conn, when string) {
	s.known[s.seat(&c.Member)].State = wire.Parting
	s.logf("%s has left %s", c.Name(), when)
	s.all(wire.Append(nil, wire.TypeParted, &wire.Parted{Role: c.Role, Rank: c.Rank, Epoch: c.Epoch}))
}

// lose tells everybody that a member is gone.
func (s *Scheduler) lose(m *wire.Member, address, why string) error {
	err := &LostError{m.Role, m.Rank, address, why}
	s.view++
	s.era = s.view
	if s.known != nil {
		s.known[s.seat(m)].State = wire.Gone
	}
	s.all(wire.Append(nil, wire.TypeLost, &wire.Lost{View: s.view, Role: m.Role, Rank: m.Rank, Epoch: m.Epoch, Address: address, Reason: why}))
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
	s.endBy, s.emptyBy, s.expectBy = s.now+int64(patience), Never, Never
	s.refuseWaiting("the cluster has ended")
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
