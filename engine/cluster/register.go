package cluster

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"fserver/engine/wire"
)

// register takes a member, or refuses it: that is no fault of the protocol.
func (s *Scheduler) register(c *conn, g *wire.Register) error {
	if s.phase == ending && s.err == nil {
		// It is early for the next cluster: it will find the next scheduler.
		s.emit(Output{Kind: Close, Conn: c.id})
		delete(s.conns, c.id)
		return nil
	}
	why := s.judge(g)
	g.State = wire.Present
	if c.any = g.Any; g.Any {
		g.Rank, g.Group = NoRank, NoRank
	}
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
		s.turnAway(c, who(g.Role, g.Rank), why)
	}
	return nil
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
	if sum := g.AddrSum(); sum > wire.MaxAddrSum {
		return fmt.Sprintf("its addresses have %d bytes, and a member may have %d: use fewer interfaces and devices (DMLC_INTERFACE)", sum, wire.MaxAddrSum)
	}
	groups, size := s.shape.Groups(g.Role), s.shape.GroupSize
	if g.Any && (size > 1 || g.Known != nil) {
		return fmt.Sprintf("it has no rank: the scheduler assigns ranks only to new members, and to groups of one process; this cluster has %v (set DMLC_NODE_RANK)", s.shape)
	}
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
	if c.any {
		return fmt.Sprintf("%s is there already, at %s, where the scheduler has assigned that rank: "+
			"set DMLC_NODE_RANK for each %v, or for none", who(c.Role, c.Rank), c.address(), c.Role)
	}
	return fmt.Sprintf("%s is there already, at %s: each %v needs a rank of its own "+
		"(DMLC_GROUP_SIZE × DMLC_NODE_RANK + STEPMESH_GPU + DMLC_RANK_OFFSET)", who(c.Role, c.Rank), c.address(), c.Role)
}

// comes takes a member before the cluster runs.
func (s *Scheduler) comes(c *conn, g *wire.Register) (why string) {
	if g.Any {
		free := s.lowest(g.Role, func(i int) bool { return s.seats[i] == nil })
		if free == NoRank {
			return s.full(g.Role)
		}
		g.Rank, g.Group = free, free
	}
	if c := s.seats[s.seat(&g.Member)]; c != nil && !s.yields(c) {
		return isThere(c)
	}
	same := func(o *conn) bool {
		return o != nil && o.Role == g.Role && o.Group == g.Group && o.Instance == g.Instance
	}
	if i := slices.IndexFunc(s.seats, same); i >= 0 {
		c := s.seats[i]
		return fmt.Sprintf("instance %d of %v group %d is %s already: each process of a group needs an instance of its own "+
			"(DMLC_INSTANCE_ID, else STEPMESH_GPU + DMLC_RANK_OFFSET)", g.Instance, g.Role, g.Group, who(c.Role, c.Rank))
	}
	s.sit(c, &g.Member)
	s.registered(c)
	s.tellSoon()
	if s.seated < len(s.seats) {
		s.send(c, wire.Append(nil, wire.TypeWaiting, &wire.Text{Text: s.Waiting()})) // so that it knows that it is here
		return ""
	}
	s.known = make([]wire.Member, len(s.seats))
	for i, c := range s.seats {
		s.known[i] = c.Member
	}
	roster, why := list(&wire.Roster{Members: s.known})
	if why != "" {
		s.all(wire.Append(nil, wire.TypeRefuse, &wire.Text{Text: why}))
		s.end(errors.New("cluster: " + why))
		return ""
	}
	s.phase = linking
	s.all(roster)
	return ""
}

// list returns the frame of a roster, or why there can be none.
func list(r *wire.Roster) (frame []byte, why string) {
	frame = wire.Append(nil, wire.TypeRoster, r)
	if len(frame) > wire.MaxRoster {
		why = fmt.Sprintf("the list of %d members takes %d bytes, more than %d: they have too many addresses", len(r.Members), len(frame), wire.MaxRoster)
	}
	return frame, why
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
	s.logf("%s at %s has registered, %d of %d", c.Name(), c.address(), s.seated, len(s.seats))
}

// tellEvery is how often members hear at most what the cluster waits for.
const tellEvery = time.Second

func (s *Scheduler) tellSoon() { s.tellBy = min(s.tellBy, s.now+int64(tellEvery)) }

// tell tells the members what the cluster waits for, if that has changed.
func (s *Scheduler) tell() {
	s.tellBy = Never
	if what := s.Waiting(); s.phase < running && what != s.told {
		s.told = what
		s.all(wire.Append(nil, wire.TypeWaiting, &wire.Text{Text: what}))
	}
}

// turnAway refuses one who has come, and says so here too.
func (s *Scheduler) turnAway(c *conn, name, why string) {
	s.warnf("%s at %s is refused: %s", name, c.remote, why)
	s.refuse(c, why)
}

func (s *Scheduler) refuse(c *conn, why string) {
	s.send(c, wire.Append(nil, wire.TypeRefuse, &wire.Text{Text: why}))
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
