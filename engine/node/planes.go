package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"fserver/engine/trace"
	"fserver/engine/transport"
	"fserver/engine/transport/rails"
	"fserver/engine/wire"
)

// plane is one Fabric of a node. A node has one that reaches everybody: it
// carries the control connections, and the data of the peers that no better one
// reaches. The others carry only data.
type plane struct {
	transport.Fabric
	peers int         // connections to peers on it; for the owner of the node
	lost  atomic.Bool // it has failed: there is nothing to ask it any more
}

// restPasses is how many passes go by between two looks at a Fabric that
// carries no data, while others do. A look at sockets costs 0.4 µs, one at
// shared memory 20 ns.
const restPasses = 64

// enter takes the Fabrics that were opened, the best first, and sleeps on them
// from now on.
func (n *Node) enter(fabrics []transport.Fabric) (err error) {
	for _, f := range fabrics {
		n.planes = append(n.planes, &plane{Fabric: f})
		if err == nil {
			err = n.driver.Add(f.FD())
		}
	}
	return err
}

// base is the Fabric that reaches everybody.
func (n *Node) base() *plane { return n.planes[len(n.planes)-1] }

// addrs are the addresses that peers can choose from.
func (n *Node) addrs() []string {
	var all []string
	for _, p := range n.planes {
		if a := p.Addr(); a != "" {
			all = append(all, string(a))
		}
	}
	return all
}

// poll polls the Fabrics and hands on what they found. all: also those without peers.
func (n *Node) poll(all bool) (found int) {
	if n.passes++; n.passes >= restPasses || all || n.phase.Load() != running {
		n.passes, all = 0, true
	}
	for _, p := range n.planes {
		if p.lost.Load() || p.peers == 0 && !all {
			continue
		}
		k, err := p.Poll(n.events[:])
		if k > 0 {
			n.table.Found(trace.Now())
		}
		for i := range k {
			n.event(p, &n.events[i])
		}
		if err != nil {
			if e := (*transport.PanicError)(nil); errors.As(err, &e) {
				panic(e) // of a goroutine of the Fabric: it ends the node like one of ours
			}
			p.lost.Store(true)
			n.driver.Remove(p.FD())
			n.fail(fmt.Errorf("node: %s: %w", p.Name(), err))
		}
		found += k
	}
	return found
}

// drain hands on what a Fabric that is closed still has to tell.
func (n *Node) drain(p *plane) {
	for {
		k, err := p.Poll(n.events[:])
		for i := range k {
			n.event(p, &n.events[i])
		}
		if k == 0 || err != nil {
			return
		}
	}
}

// location is an address for people: without the name of its transport.
func location(a transport.Addr) string {
	_, rest, _ := strings.Cut(string(a), ":")
	return rest
}

// scheme is the name that starts the addresses of a Fabric's kind.
func scheme(f transport.Fabric) string {
	s, _, _ := strings.Cut(f.Name(), "/")
	return s
}

// via is how a connection travels, and why not by each better way.
func (l *link) via() (how, why string) {
	p := l.conn.Peer()
	return p.Via, whyNot(l.why, p.Why)
}

// A way is a Fabric that reaches a peer.
type way struct {
	p   *plane
	at  transport.Addr
	why string // what speaks against the Fabrics that are better
}

// path connects to m over the best Fabric that can. The last one that reaches it is tried
// again and again, each of the others once, and again after an AgainError. The link says what spoke against the better
// ones, and whether one was tried in vain.
func (n *Node) path(ctx context.Context, m wire.Member) (*link, error) {
	ways, why := n.ways(&m)
	if len(ways) == 0 {
		return nil, badSetting("node: %s cannot be reached over %s (%s)", m.Name(), n.wayNames(), why)
	}
	last := len(ways) - 1
	failed := ""
	for _, w := range ways[:last] {
		c, err := n.try(ctx, &w, m.Name())
		switch {
		case err == nil:
			return &link{conn: c, plane: w.p, why: whyNot(w.why, failed), tried: failed != ""}, nil
		case ctx.Err() != nil: // nobody wants the connection any more
			return nil, err
		}
		failed = whyNot(failed, n.gives(scheme(w.p))+": "+strings.TrimPrefix(err.Error(), scheme(w.p)+": "))
	}
	w := ways[last]
	c, err := n.dial(ctx, w.p, w.at, m.Name())
	return &link{conn: c, plane: w.p, why: whyNot(w.why, failed), tried: failed != ""}, err
}

// repeats is how often try repeats an attempt at most: each side may change the address of its device twice.
const repeats = 4

// try connects over w to the peer named who. It repeats an attempt that ends in an AgainError.
func (n *Node) try(ctx context.Context, w *way, who string) (c transport.Conn, err error) {
	for range 1 + repeats {
		once, cancel := context.WithTimeout(ctx, 10*time.Second)
		c, err = w.p.Connect(once, w.at)
		cancel()
		if !is[*transport.AgainError](err) {
			break
		}
		n.log.Debug("not connected yet", zap.String("to", who), zap.Error(err))
	}
	return c, err
}

// ways are the Fabrics that reach m, the best first. why is what speaks against the
// others.
func (n *Node) ways(m *wire.Member) (list []way, why string) {
	why = n.lack
	for _, p := range n.planes {
		at, no := n.reaches(p, m)
		if no == "" {
			list = append(list, way{p, at, why})
		} else {
			why = whyNot(why, n.gives(scheme(p))+": "+no)
		}
	}
	return list, why
}

// reaches is where p reaches m, or why it does not.
func (n *Node) reaches(p *plane, m *wire.Member) (at transport.Addr, no string) {
	if !n.carries(p) {
		return "", "FSERVER_TRANSPORT=" + n.only + " at " + n.me()
	}
	absent := fmt.Sprintf("%v %d does not offer it (see FSERVER_TRANSPORT, BYTEPS_ENABLE_IPC and the log there)", m.Role, m.Rank)
	for _, a := range m.Addrs {
		at = transport.Addr(a)
		err := p.Reaches(at)
		if err == nil {
			return at, ""
		}
		if no == "" && (strings.HasPrefix(a, scheme(p)+":") || rails.Joined(a, scheme(p))) {
			no = err.Error()
		}
	}
	return "", cmp.Or(no, absent)
}

// carries says whether the data of peers may travel over p: over all, unless
// the user wants one.
func (n *Node) carries(p *plane) bool {
	return n.only == "" || scheme(p) == n.only
}

func (n *Node) wayNames() string {
	var names []string
	for _, p := range n.planes {
		if n.carries(p) {
			names = append(names, p.Name())
		}
	}
	return strings.Join(names, " and ")
}
