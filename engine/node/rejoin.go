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
	"fserver/engine/peers"
	"fserver/engine/trace"
	"fserver/engine/transport"
	"fserver/engine/wire"
)

// hasLeft is why a peer that has said Bye is gone, and replaced why one is whose successor
// has come.
const (
	hasLeft  = "it has left the cluster"
	replaced = "another process has taken its place"
)

// patience is how long a worker may be connected that the scheduler has not named.
const patience = 10 * time.Second

// maxWaiting bounds the connections of one rank that a server keeps for workers that the
// scheduler has not named.
const maxWaiting = 4

// peer is a worker or server on the other side of the rail.
type peer struct {
	peers.Peer
	index int                // its place in the rail
	link  *link              // nil: no connection stands
	at    string             // the remote address of the last one
	stop  context.CancelFunc // of the dial under way, or nil
	parts bool               // a Bye is to be said over link
}

// meetPeers makes the peers, which nobody has named yet.
func (n *Node) meetPeers(count int) {
	cfg := peers.Config{Dials: n.cfg.Role == conf.Worker, Waits: n.patient(), Limit: n.cfg.RejoinTimeout}
	for i := range count {
		n.peers = append(n.peers, &peer{Peer: peers.New(cfg), index: i})
	}
}

// lostError is the error for the loss of a peer.
func (p *peer) lostError(why string) error {
	m := p.Member()
	return &LostError{Role: m.Role, Rank: m.Rank, Address: p.at, Reason: why}
}

// lostBy is lostError from what the connection said, unless that is none of the peer's doing.
func (p *peer) lostBy(err error) error {
	switch {
	case errors.Is(err, transport.ErrClosed):
		return closedError(err)
	case scarce(err):
		return fmt.Errorf("node: the connection to %v %d was ended here: %w", p.Member().Role, p.Member().Rank, err)
	}
	return p.lostError(reason(err))
}

// patient says whether calls wait for the successor of a peer that is lost.
func (n *Node) patient() bool { return n.cfg.OnPeerLost == conf.WaitForSuccessor }

// place is the peer with a role and rank, or nil.
func (n *Node) place(r wire.Role, rank int) *peer {
	for _, p := range n.peers {
		if m := p.Member(); p.State() != peers.Absent && m.Role == r && m.Rank == rank {
			return p
		}
	}
	return nil
}

// wants says whether m is the run of a peer that is to be connected.
func (n *Node) wants(p *peer, m *wire.Member) bool { return p.Wants(m.Epoch) && n.failed() == nil }

// step tells a peer's machine what has happened, and does what that asks for.
func (n *Node) step(p *peer, in peers.Input) {
	for _, o := range p.Step(trace.Now(), in) {
		n.act(p, o)
	}
	n.reschedule()
}

func (n *Node) stepAll(kind peers.Kind) {
	for _, p := range n.peers {
		n.step(p, peers.Input{Kind: kind})
	}
}

func (n *Node) act(p *peer, o peers.Output) {
	switch o.Do {
	case peers.Dial:
		if n.failed() == nil {
			n.reach(p, o.After)
		}
	case peers.Stop:
		if p.stop != nil {
			p.stop()
		}
	case peers.Close:
		l := p.link
		n.unlink(l)
		n.ended[l.conn] = o.Err
		l.conn.Close()
	case peers.Greet:
		if n.worker != nil { // what it has to send waits for the answer of the server
			n.worker.Expect(p.index)
		}
		n.sendFrame(p.link, wire.Append(nil, wire.TypeUp, &wire.Text{Text: p.link.why}))
	case peers.Begin:
		n.sayLinked(p.link, o.Again)
		n.side.Up(p.index, p.Member().Rank, p.link.plane.Fabric, p.link.conn)
		n.meet()
	case peers.SayBye:
		p.parts, n.byes = true, true
		n.sayByes(false)
	case peers.Part:
		n.channels.Left(p.index)
		n.side.Left(p.index, o.Err)
		if n.server != nil {
			n.sayDone()
		}
	case peers.Lose:
		n.channels.Lose(p.index, o.Err)
		n.side.Lose(p.index, o.Err)
	case peers.GiveUp:
		n.side.Down(p.index, o.Err)
	case peers.Fail:
		n.fail(closedError(o.Err))
	case peers.Warn:
		n.log.Warn(p.Member().Name()+" cannot be reached", zap.Error(o.Err))
	}
}

// sayByes says the Byes that are due. That of a server waits until all answers to the worker are
// posted: what comes later is no answer for the worker. With last it does not wait: there is no later.
// A node that has failed does not leave in good order.
func (n *Node) sayByes(last bool) {
	n.byes = false
	if n.failed() != nil {
		return
	}
	for _, p := range n.peers {
		switch {
		case !p.parts:
		case n.server != nil && !last && !n.server.Quiet(p.index):
			n.byes = true
		default:
			p.parts = false
			n.sendFrame(p.link, wire.AppendSignal(nil, wire.TypeBye))
		}
	}
}

// nextOfPeers is when overdue has something to do.
func (n *Node) nextOfPeers() int64 {
	next := int64(cluster.Never)
	if n.oldest != cluster.Never {
		next = n.oldest + int64(patience)
	}
	for _, p := range n.peers {
		next = min(next, p.Next())
	}
	return next
}

// overdue ends what has waited for too long.
func (n *Node) overdue(now int64) {
	for _, p := range n.peers {
		if now >= p.Next() {
			n.step(p, peers.Input{Kind: peers.Tick})
		}
	}
	if n.oldest != cluster.Never && now >= n.oldest+int64(patience) {
		for _, l := range slices.Clone(n.waiting) {
			if now >= l.since+int64(patience) {
				n.turnAway(l, "the scheduler has not named it, or it does not use the connection")
			}
		}
		n.admitAll()
	}
}

// knownGone reports whether this node has already taken note that the server with the rank of m
// was lost, whose successor m is.
func (n *Node) knownGone(m *wire.Member) bool {
	p := n.place(m.Role, m.Rank)
	return m.Role == wire.RoleServer && p != nil && p.Lost()
}

// changed takes the news of a loss or a successor. It returns the loss, if that begins an era.
func (n *Node) changed(o *cluster.Output) (gone error) {
	if o.Kind == cluster.Lost {
		n.nodeLost(o.Err, o.Seqs)
		return o.Err
	}
	m := o.Member
	if !n.knownGone(m) {
		gone = &LostError{Role: m.Role, Rank: m.Rank, Reason: replaced}
	}
	n.joined(m)
	return gone
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
func (n *Node) joined(m *wire.Member) {
	var lost *LostError
	if errors.As(n.stopErr, &lost) && lost.Role == m.Role && lost.Rank == m.Rank {
		n.stopErr = nil
	}
	p := n.place(m.Role, m.Rank)
	if p == nil { // a peer is back when it is connected
		n.log.Info(fmt.Sprintf("%v %d is back", m.Role, m.Rank), zap.Uint32("pid", m.Pid), zap.String("host", m.Host))
	}
	if p == nil || n.failed() != nil {
		return
	}
	n.step(p, peers.Input{Kind: peers.Succeeded, Member: m, Err: &LostError{Role: m.Role, Rank: m.Rank, Reason: replaced}})
	n.admitAll()
}

// reach connects a worker to a server, after a while.
func (n *Node) reach(p *peer, wait time.Duration) {
	if p.stop != nil {
		p.stop()
	}
	ctx, cancel := context.WithCancel(n.dialContext())
	p.stop = cancel
	m := *p.Member()
	n.dialling(func() {
		pause(ctx, wait)
		n.connect(ctx, p, m)
	})
}

// unreached takes the failure of connect, unless the server has been lost or replaced
// meanwhile, or is dialled anew.
func (n *Node) unreached(ctx context.Context, p *peer, m *wire.Member, err error) {
	if errors.Is(ctx.Err(), context.Canceled) || !n.driver.Own() {
		return
	}
	defer n.driver.Disown()
	if n.wants(p, m) {
		n.step(p, peers.Input{Kind: peers.Failed, Other: errors.As(err, new(*LostError)), Err: err})
	}
}

// linked gives a peer its connection.
func (n *Node) linked(p *peer, l *link) {
	n.step(p, peers.Input{Kind: peers.Again, Err: p.lostError("it has connected again")})
	heard := l.kind == linkWaiting
	l.kind, l.peer = linkPeer, p
	l.plane.peers++
	p.link, p.at = l, l.conn.Peer().Remote
	n.step(p, peers.Input{Kind: peers.Connected, Heard: heard})
	n.flushed(l)
}

// flushed notes that all frames to a peer are posted, unless some wait, which what calls post
// would overtake.
func (n *Node) flushed(l *link) {
	if l.kind == linkPeer && l.peer.link == l && len(l.frames) == 0 {
		n.step(l.peer, peers.Input{Kind: peers.Flushed})
	}
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
	if n.peers[0].State() == peers.Absent {
		return
	}
	waiting := n.waiting
	n.waiting, n.oldest = nil, cluster.Never
	for _, l := range waiting {
		p := n.place(wire.RoleWorker, int(l.hello.Rank))
		if p == nil {
			n.turnAway(l, "it is not of this rail")
			continue
		}
		switch v := p.Judge(l.hello.Epoch); {
		case v == peers.Past:
			n.turnAway(l, replaced)
		case v == peers.Missed:
			n.turnAway(l, "it was taken for lost")
		case v == peers.Wait || l.kind == linkStranger:
			n.waiting = append(n.waiting, l)
			n.oldest = min(n.oldest, l.since)
		default:
			n.linked(p, l)
		}
	}
	n.reschedule()
}

// told takes the first frame of the other side, its Up, and what that says of why no better
// way was taken. What this side lacks itself, it knows better.
func (l *link) told(n *Node, ev *transport.Event) error {
	said, err := wire.Parse[wire.Text](ev.Data, wire.TypeUp)
	if said.Text != "" && n.lack == "" {
		l.why = said.Text
	}
	return err
}

// turnAway ends the connection of a worker that waited.
func (n *Node) turnAway(l *link, why string) {
	n.log.Warn("connection closed", zap.String("peer", n.name(l)), zap.String("reason", why))
	n.waiting = slices.DeleteFunc(n.waiting, func(w *link) bool { return w == l })
	n.unlink(l)
	l.conn.Close()
}
