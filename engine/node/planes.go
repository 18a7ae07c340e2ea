package node

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"go.uber.org/zap"

	"fserver/engine/trace"
	"fserver/engine/transport"
	"fserver/engine/wire"
)

// plane is one Fabric of a node. A node has one that reaches everybody: it
// carries the control connections, and the data of the peers that no better one
// reaches. The others carry only data.
type plane struct {
	transport.Fabric
	sleeper transport.Sleeper // the same
	peers   int               // connections to peers on it; for the owner of the node
}

// restPasses is how many passes go by between two looks at a Fabric that
// carries no data, while others do. A look at sockets costs 0.4 µs, one at
// shared memory 20 ns.
const restPasses = 64

// enter takes the Fabrics that were opened, the best first, and sleeps on them
// from now on.
func (n *Node) enter(fabrics []transport.Fabric) error {
	var err error
	for _, f := range fabrics {
		s, ok := f.(transport.Sleeper)
		if !ok {
			err = errors.Join(err, fmt.Errorf("node: transport %s cannot be slept on", f.Name()))
		}
		n.planes = append(n.planes, &plane{Fabric: f, sleeper: s})
	}
	for _, p := range n.planes {
		if err == nil {
			err = n.watch(p.sleeper.FD())
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

// poll polls the Fabrics and hands on what they found.
func (n *Node) poll() (found int) {
	all := n.phase.Load() != running || n.woken.Load()
	if n.passes++; n.passes >= restPasses || all {
		n.passes, all = 0, true
		n.woken.Store(false)
	}
	for _, p := range n.planes {
		if p.peers == 0 && !all {
			continue
		}
		k, err := p.Poll(n.events[:])
		if tb := n.tickets(); k > 0 && tb != nil {
			tb.Found(trace.Now())
		}
		for i := range k {
			n.event(p, &n.events[i])
		}
		if err != nil {
			n.fail(fmt.Errorf("node: %s: %w", p.Name(), err))
		}
		found += k
	}
	return found
}

// shutFabrics closes the Fabrics and hands on what they still have to tell.
func (n *Node) shutFabrics() error {
	var errs []error
	for _, p := range n.planes {
		errs = append(errs, p.Close())
	}
	n.take() // what was submitted meanwhile ends at once
	for _, p := range n.planes {
		for {
			k, err := p.Poll(n.events[:])
			for i := range k {
				n.event(p, &n.events[i])
			}
			if k == 0 || err != nil {
				break
			}
		}
	}
	return errors.Join(errs...)
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

// via is how a connection travels, and why not better.
func (l *link) via() (how, why string) {
	if how, why = transport.Via(l.conn, l.plane.Name()); why == "" {
		why = l.why
	}
	return how, why
}

// path connects to m over the best Fabric that can. Only the last one that
// reaches it is tried again and again. why is what spoke against the better
// ones.
func (n *Node) path(ctx context.Context, m wire.Member) (p *plane, c transport.Conn, why string, err error) {
	type way struct {
		p  *plane
		at transport.Addr
	}
	var ways []way
	for _, p := range n.planes {
		for _, a := range m.Addrs {
			if n.carries(p) && p.Reaches(transport.Addr(a)) {
				ways = append(ways, way{p, transport.Addr(a)})
				break
			}
		}
	}
	if len(ways) == 0 {
		return nil, nil, "", badSetting("node: %v %d listens at %v, which %s cannot reach", m.Role, m.Rank, m.Addrs, n.wayNames())
	}
	last := len(ways) - 1
	for _, w := range ways[:last] {
		try, cancel := context.WithTimeout(ctx, 10*time.Second)
		c, err := w.p.Connect(try, w.at)
		cancel()
		if err == nil {
			return w.p, c, why, nil
		}
		n.log.Warn("no connection over "+scheme(w.p)+", taking another way", zap.String("to", string(w.at)), zap.Error(err))
		why = err.Error()
	}
	c, err = n.dial(ctx, ways[last].p, ways[last].at)
	return ways[last].p, c, why, err
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
