package node

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"go.uber.org/zap"

	"fserver/engine/cluster"
	"fserver/engine/peers"
	"fserver/engine/trace"
	"fserver/engine/transport"
	"fserver/engine/wire"
)

func (n *Node) event(p *plane, ev *transport.Event) {
	switch ev.Kind {
	case transport.EvDone:
		if ev.User != 0 { // else a frame of no ticket
			n.side.Done(ev.User, n.operation(ev))
		}
		return
	case transport.EvAccept:
		n.accept(p, ev.Conn)
		return
	case transport.EvFreed:
		n.table.Freed(p.Fabric, ev.User)
		return
	case transport.EvClosed:
		delete(n.ended, ev.Conn)
		n.table.Closed(ev.Conn)
		return
	}
	l := n.last
	if l == nil || l.conn != ev.Conn {
		if l = n.links[ev.Conn]; l == nil { // we have closed it
			if ev.Kind == transport.EvLent {
				_ = ev.View.Drop()
			}
			return
		}
		n.last = l
	}
	var err error
	switch {
	case ev.Kind == transport.EvLent:
		err = n.lent(l, ev)
	case ev.Kind == transport.EvDown:
		if !errors.Is(ev.Err, io.EOF) {
			n.log.Warn("connection ended", zap.String("peer", n.name(l)), zap.Error(ev.Err))
		}
		n.down(l, ev.Err)
	case l.kind == linkPeer:
		err = n.data(l, ev)
	case l.kind == linkStranger:
		if err = l.told(n, ev); err == nil {
			l.kind = linkWaiting
			n.admitAll()
		}
	case l.kind == linkWaiting:
		err = errors.New("node: the peer sent more than an Up before it was answered")
	case ev.Kind == transport.EvFrame:
		n.control(cluster.Input{Kind: cluster.Frame, Conn: l.id, Data: ev.Data})
	default:
		err = errors.New("node: the peer wrote data on a connection that does not accept data")
	}
	if err != nil {
		n.breach(l, n.protocol(l, err))
	}
}

// protocol adds to err what to do if a message of the peer caused it.
func (n *Node) protocol(l *link, err error) error {
	if scarce(err) {
		return err
	}
	return fmt.Errorf("%w (the peer runs %q, this node %q: run the same version on both; if it is the same, report this text)",
		err, l.hello.Build, "fserver "+Version)
}

// lent takes a loan, and with it the hold on its view.
func (n *Node) lent(l *link, ev *transport.Event) error {
	if l.kind == linkPeer && n.server != nil && n.failed() == nil {
		return n.server.Lent(l.peer.index, ev.Loan, ev.Span, ev.View)
	}
	_ = ev.View.Drop()
	if n.failed() != nil {
		return nil
	}
	return errors.New("node: the peer lent memory on a connection that does not accept loans")
}

// data takes a frame of a peer.
func (n *Node) data(l *link, ev *transport.Event) error {
	p := l.peer
	if n.failed() != nil { // there is no path to answer by
		return nil
	}
	if !p.Heard() { // the server answers the Up
		err := l.told(n, ev)
		if err == nil {
			n.step(p, peers.Input{Kind: peers.Heard})
			n.unstick()
			n.flushed(l)
		}
		return err
	}
	switch wire.FrameType(ev.Data) {
	case wire.TypeChannel:
		over, err := n.channels.Frame(p.index, ev.Data)
		if over != "" {
			n.channelOver(p.index, over)
		}
		return err
	case wire.TypeBye:
		n.step(p, peers.Input{Kind: peers.Bye, Err: p.lostError(hasLeft)})
		return nil
	}
	if n.worker != nil && p.State() == peers.Left {
		return nil
	}
	return n.side.Frame(p.index, ev.Data)
}

// breach ends a connection that is of no use: its peer does not keep to the protocol, or it
// takes no more.
func (n *Node) breach(l *link, err error) {
	n.log.Warn("connection closed", zap.String("peer", n.name(l)), zap.Error(err))
	n.down(l, err)
}

// downLimit bounds how long a connection that takes no more is waited for to report its end. One that has ended does so
// when it has given what had arrived: what is in a socket takes milliseconds, and what waits for a GPU 0.1 s. So it bounds
// the life of one that lives on, because only what was to be sent is wrong. It is a variable for tests.
var downLimit = time.Second

// broken notes that the connection to peer i takes no more. It may have ended, or only what
// was to be sent be wrong. The peer's last frames may be here: it is ended after downLimit, unless it reports
// its end before.
func (n *Node) broken(i int, err error) {
	if l := n.peers[i].link; l != nil {
		n.ails(l, err, downLimit)
	}
}

// breached notes that peer i does not keep to the protocol. The caller is in the midst of something, so
// the next pass ends the connection.
func (n *Node) breached(i int, err error) {
	if l := n.peers[i].link; l != nil {
		n.ails(l, n.protocol(l, err), 0)
	}
}

// ails has a connection ended because of err when limit has passed. What is to come first counts.
func (n *Node) ails(l *link, err error, limit time.Duration) {
	until := trace.Now() + int64(limit)
	if l.ailing != nil && l.until <= until {
		return
	}
	if l.ailing == nil {
		n.ailing = append(n.ailing, l)
	}
	l.ailing, l.until = err, until
	n.reschedule()
	n.driver.Stir()
}

// endAiling ends the connections that ail and whose time is over. That may add others.
func (n *Node) endAiling(now int64) {
	for i := 0; i < len(n.ailing); {
		l := n.ailing[i]
		if now < l.until {
			i++
			continue
		}
		n.ailing = slices.Delete(n.ailing, i, i+1)
		if n.links[l.conn] == l {
			n.breach(l, l.ailing)
		}
	}
	n.reschedule()
}

// nextAiling returns when endAiling has something to do.
func (n *Node) nextAiling() int64 {
	next := int64(cluster.Never)
	for _, l := range n.ailing {
		next = min(next, l.until)
	}
	return next
}

// down takes the end of a connection.
func (n *Node) down(l *link, err error) {
	known := n.links[l.conn] == l
	n.unlink(l)
	l.conn.Close()
	switch l.kind {
	case linkScheduler:
		n.control(cluster.Input{Kind: cluster.Down, Err: err})
	case linkMember:
		n.control(cluster.Input{Kind: cluster.Down, Conn: l.id, Err: err})
	case linkPeer:
		if known {
			err = l.peer.lostBy(err)
			n.ended[l.conn] = err
			n.step(l.peer, peers.Input{Kind: peers.Down, Err: err})
		}
	case linkStranger, linkWaiting:
		n.waiting = slices.DeleteFunc(n.waiting, func(w *link) bool { return w == l })
	}
}

// enlist makes a connection known.
func (n *Node) enlist(l *link) {
	n.links[l.conn] = l
	if l.kind == linkScheduler || l.kind == linkMember {
		n.controls[l.id] = l
	}
}

// unlink forgets a connection.
func (n *Node) unlink(l *link) {
	if n.links[l.conn] != l {
		return
	}
	delete(n.links, l.conn)
	n.last = nil
	switch {
	case l.kind == linkPeer:
		l.plane.peers--
		l.peer.link, l.peer.parts = nil, false
	case n.controls[l.id] == l:
		delete(n.controls, l.id)
	}
}

// operation is the error of an operation as the exchange is to tell it.
func (n *Node) operation(ev *transport.Event) error {
	if ev.Err == nil {
		return nil
	}
	if l := n.links[ev.Conn]; l != nil && l.kind == linkPeer {
		return l.peer.lostBy(ev.Err)
	}
	if err := n.ended[ev.Conn]; err != nil {
		return err
	}
	return closedError(ev.Err)
}
