package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"

	"fserver/engine/cluster"
	"fserver/engine/conf"
	"fserver/engine/trace"
	"fserver/engine/transport"
	"fserver/engine/wire"
)

// Peers that are lost and come back, and schedulers that do. The scheduler says
// which run of a process has a rank, by its epoch: a worker dials that run, a
// server takes its connection, and nobody else's. A connection that breaks
// between two that live is opened again by the worker.

// hasLeft is why a peer that has said Bye is gone, and replaced why one is whose successor
// has come.
const (
	hasLeft  = "it has left the cluster"
	replaced = "another process has taken its place"
)

// patience is how long a worker may be connected that the scheduler has not named.
const patience = 10 * time.Second

// steady is how long a connection must have lasted to be dialled again at once.
const steady = time.Second

// maxWaiting bounds the connections of one rank that a server keeps for workers that the
// scheduler has not named.
const maxWaiting = 4

// comingBack is what a node knows of its peers' absence. Slices are by rail.
type comingBack struct {
	late   bool                 // this node came to a cluster that ran
	dials  []context.CancelFunc // of the dial under way, or nil
	breaks []int                // connections in turn that did not last
	until  []int64              // when calls do not wait for the successor any more
	why    []error              // the loss that they then end in
	oldest int64                // of the workers that wait for their name, or Never
	past   map[uint64]bool      // epochs of the rail that are over
	seen   []bool               // a connection has been there before
}

func (b *comingBack) open(n *Node) {
	k := len(n.peers)
	b.dials, b.breaks, b.why, b.seen = make([]context.CancelFunc, k), make([]int, k), make([]error, k), make([]bool, k)
	b.until = slices.Repeat([]int64{cluster.Never}, k)
	b.oldest, b.past = cluster.Never, map[uint64]bool{}
}

// next is when overdue has something to do.
func (b *comingBack) next() int64 {
	next := int64(cluster.Never)
	if b.oldest != cluster.Never {
		next = b.oldest + int64(patience)
	}
	for _, t := range b.until {
		next = min(next, t)
	}
	return next
}

// patient says whether calls wait for the successor of a peer that is lost.
func (n *Node) patient() bool { return n.cfg.OnPeerLost == conf.WaitForSuccessor }

// place is the index of a member in the rail, or -1.
func (n *Node) place(r wire.Role, rank int) int {
	return slices.IndexFunc(n.rail, func(m wire.Member) bool { return m.Role == r && m.Rank == rank })
}

// current says whether m is the run of peer i that is to be connected.
func (n *Node) current(i int, m *wire.Member) bool {
	return n.rail[i].Epoch == m.Epoch && n.rail[i].State != wire.Gone && n.failed() == nil
}

// up says whether the connection to a peer stands.
func (n *Node) up(l *link) bool { return l != nil && n.links[l.conn] == l }

// lose ends what waits for peer i, or lets it wait for the successor.
func (n *Node) lose(i int, err error) {
	n.channels.Lose(i, err)
	n.side.Lose(i, err)
	if n.patient() && n.back.until[i] == cluster.Never {
		n.back.until[i], n.back.why[i] = trace.Now()+int64(n.cfg.RejoinTimeout), err
	}
	n.timer.Store(n.nextTimer())
}

// overdue ends what has waited for too long.
func (n *Node) overdue(now int64) {
	for i, t := range n.back.until {
		if now >= t {
			n.back.until[i] = cluster.Never
			n.side.Down(i, n.back.why[i])
		}
	}
	if n.back.oldest != cluster.Never && now >= n.back.oldest+int64(patience) {
		for _, l := range slices.Clone(n.waiting) {
			if now >= l.since+int64(patience) {
				n.turnAway(l, "the scheduler has not named it, or it does not use the connection")
			}
		}
		n.admitAll()
	}
}

// absent takes a peer that was not there when this node came.
func (n *Node) absent(i int) {
	m := &n.rail[i]
	err := &LostError{Role: m.Role, Rank: m.Rank, Reason: "the process was lost and has not been replaced yet"}
	switch {
	case m.State == wire.Gone:
		n.lose(i, err)
	case n.worker != nil:
		err.Reason = hasLeft
		n.worker.Down(i, err)
	default:
		_ = n.server.Frame(i, wire.AppendSignal(nil, wire.TypeBye)) // as it would say itself
	}
}

// hangUp ends the connection to peer i, if there is one.
func (n *Node) hangUp(i int, err error) {
	if l := n.peers[i]; n.up(l) {
		n.unlink(l)
		n.ended[l.conn] = err
		l.conn.Close()
	}
	n.lose(i, err)
}

// peerDown takes the end of the connection to a peer.
func (n *Node) peerDown(l *link, err error) {
	if n.phase.Load() == joining && !n.back.late {
		n.fail(err)
		return
	}
	i := l.index
	n.lose(i, err)
	if n.worker == nil || l.left || n.rail[i].State == wire.Gone || n.failed() != nil || n.phase.Load() >= leaving {
		return
	}
	// It may live, and only the connection be gone. If not, the scheduler says so.
	wait := time.Duration(0)
	if trace.Now()-l.since < int64(steady) {
		wait = firstPause << min(n.back.breaks[i], 5)
		n.back.breaks[i]++
	} else {
		n.back.breaks[i] = 0
	}
	n.reach(i, wait)
}

// peerLost takes the news that peer i is gone.
func (n *Node) peerLost(i int, err error) {
	n.rail[i].State = wire.Gone
	if n.back.dials[i] != nil {
		n.back.dials[i]()
	}
	n.hangUp(i, err)
	n.meet()
}

// knownGone reports whether this node has already taken note that the server with the rank of m
// was lost, whose successor m is.
func (n *Node) knownGone(m *wire.Member) bool {
	i := n.place(m.Role, m.Rank)
	return m.Role == wire.RoleServer && i >= 0 && n.rail[i].State == wire.Gone
}

// regroup has the workers and servers of a rail agree on what is paired with what, when one of
// them is lost, or has a successor, as err says; nil at the start. With back the servers give
// back what they have not delivered.
func (n *Node) regroup(back bool, err error) {
	switch {
	case n.failed() != nil:
	case n.server != nil:
		n.server.Regroup(n.member.Runs())
	case n.worker != nil:
		n.worker.Regroup(n.member.Runs(), back, err)
	}
}

// joined takes the news that a node has the place of one that is gone.
func (n *Node) joined(m wire.Member) {
	var lost *LostError
	if errors.As(n.stopErr, &lost) && lost.Role == m.Role && lost.Rank == m.Rank {
		n.stopErr = nil
	}
	i := n.place(m.Role, m.Rank)
	if i < 0 { // a peer is back when it is connected
		n.log.Info(fmt.Sprintf("%v %d is back", m.Role, m.Rank), zap.Uint32("pid", m.Pid), zap.String("host", m.Host))
	}
	if i < 0 || n.failed() != nil {
		return
	}
	n.back.seen[i] = true
	n.hangUp(i, &LostError{Role: m.Role, Rank: m.Rank, Reason: replaced})
	if n.rail[i].Epoch != m.Epoch {
		n.back.past[n.rail[i].Epoch] = true
	}
	n.rail[i] = m
	n.back.breaks[i] = 0
	if n.worker != nil {
		n.reach(i, 0)
	}
	n.admitAll()
}

// reachAll connects a worker to the servers that it has no connection to and that
// have come, or come back, while the bring-up ended.
func (n *Node) reachAll() {
	for i := range n.rail {
		if n.worker != nil && n.rail[i].State == wire.Present && !n.up(n.peers[i]) {
			n.reach(i, 0)
		}
	}
}

// reach connects a worker to server i, after a while.
func (n *Node) reach(i int, wait time.Duration) {
	if n.back.dials[i] != nil {
		n.back.dials[i]()
	}
	ctx, cancel := context.WithCancel(n.dialContext())
	n.back.dials[i] = cancel
	m := n.rail[i]
	n.dialling(func() {
		pause(ctx, wait)
		n.connect(ctx, i, m)
	})
}

// unreached takes the failure of connect: an error of the bring-up, and else
// worth a line, unless the server has been lost or replaced meanwhile, or is
// dialled anew.
func (n *Node) unreached(ctx context.Context, i int, m *wire.Member, err error) {
	if errors.Is(ctx.Err(), context.Canceled) || !n.own() {
		return
	}
	defer n.disown()
	switch {
	case !n.current(i, m):
	case n.phase.Load() == joining:
		n.fail(closedError(err))
	default:
		n.log.Warn(m.Name()+" cannot be reached", zap.Error(err))
	}
}

// linked gives peer l.index its connection, and tells it so before anything else. What a worker
// has to send waits from now on for the answer of the server, which has had the worker's Up.
func (n *Node) linked(l *link) {
	n.peers[l.index] = l
	l.plane.peers++
	if n.worker != nil {
		n.worker.Expect(l.index)
	}
	n.sendFrame(l, wire.Append(nil, wire.TypeUp, &wire.Text{Text: l.why}))
	n.begin(l)
}

// begin lets the calls use the connection to a peer that uses it too, unless frames wait:
// what the calls post would overtake them.
func (n *Node) begin(l *link) {
	if l.begun || !l.used || len(l.frames) != 0 || !n.up(l) {
		return
	}
	l.begun = true
	n.sayLinked(l)
	n.back.until[l.index] = cluster.Never
	n.side.Up(l.index, n.rail[l.index].Rank, l.plane.Fabric, l.conn)
	if n.phase.Load() == leaving {
		n.sendFrame(l, wire.AppendSignal(nil, wire.TypeBye))
	}
	n.meet()
}

// hold keeps the connection of a worker until the scheduler has named it. Of too
// many of one rank the oldest is closed: its worker has most likely dialled again.
func (n *Node) hold(l *link) {
	n.enlist(l)
	n.waiting = append(n.waiting, l)
	other := func(o *link) bool { return o.hello.Rank != l.hello.Rank }
	if same := slices.DeleteFunc(slices.Clone(n.waiting), other); len(same) > maxWaiting {
		n.turnAway(same[0], fmt.Sprintf("it has connected more than %d times before the scheduler has named it", maxWaiting))
	}
}

// admitAll gives the workers that wait their places in the rail, as far as the
// scheduler has named them and they have said that they use the connection: one
// that has dialled in vain may be late to close what it has opened.
func (n *Node) admitAll() {
	if n.rail == nil {
		return
	}
	waiting := n.waiting
	n.waiting, n.back.oldest = nil, cluster.Never
	for _, l := range waiting {
		i := n.place(wire.RoleWorker, int(l.hello.Rank))
		switch {
		case i < 0:
			n.turnAway(l, "it is not of this rail")
		case n.back.past[l.hello.Epoch]:
			n.turnAway(l, replaced)
		case n.rail[i].State == wire.Gone && n.rail[i].Epoch == l.hello.Epoch:
			n.turnAway(l, "it was taken for lost")
		case n.rail[i].Epoch != l.hello.Epoch || !l.used:
			n.waiting = append(n.waiting, l)
			n.back.oldest = min(n.back.oldest, l.since)
		default:
			n.admit(i, l)
		}
	}
	n.timer.Store(n.nextTimer())
}

// told takes the first frame of the other side, its Up, and what that says of why no better
// way was taken. What this side lacks itself, it knows better.
func (l *link) told(n *Node, ev *transport.Event) error {
	if l.used {
		return errors.New("node: the peer sent more than an Up before it was answered")
	}
	l.used = true
	said, err := wire.Parse[wire.Text](ev.Data, wire.TypeUp)
	if said.Text != "" && n.lack == "" {
		l.why = said.Text
	}
	return err
}

// admit makes a worker's connection that of peer i.
func (n *Node) admit(i int, l *link) {
	if old := n.peers[i]; old != nil {
		n.hangUp(i, n.lostPeer(old, "it has connected again"))
	}
	l.kind, l.index = linkPeer, i
	n.linked(l)
}

// turnAway ends the connection of a worker that waited.
func (n *Node) turnAway(l *link, why string) {
	n.log.Warn("connection closed", zap.String("peer", n.name(l)), zap.String("reason", why))
	n.waiting = slices.DeleteFunc(n.waiting, func(w *link) bool { return w == l })
	n.unlink(l)
	l.conn.Close()
}
