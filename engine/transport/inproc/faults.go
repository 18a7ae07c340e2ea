package inproc

import (
	"errors"
	"fmt"
	"hash/fnv"
)

// Faults are what a Network does to everything that passes, within what the
// contract of package transport allows. The zero value does nothing.
type Faults struct {
	// Delay holds each op and each EvAccept back for 0 to Delay Polls of the
	// receiver, by chance.
	Delay int
	// Reorder lets a write land before or after the writes around it, and before the frames
	// before it. It holds for Conns that are opened under it.
	Reorder bool
	// Pressure is the share of Posts that take fewer ops than they could, or
	// none.
	Pressure float64
	// Stage is the share of small writes whose source is read in Post, so that
	// they end long before the peer has them.
	Stage float64
	// Forget is the share of Closes of a Conn that lose what was posted before
	// and has not arrived. The others deliver it, then io.EOF.
	Forget float64
}

// Chaos is every fault at once.
var Chaos = Faults{Delay: 4, Reorder: true, Pressure: 0.2, Stage: 0.5, Forget: 0.5}

// SetFaults changes what happens to ops from now on.
func (n *Network) SetFaults(f Faults) {
	n.mu.Lock()
	n.faults = f
	n.mu.Unlock()
}

// FailOp makes the count-th op (from 1) that the Fabric posts from now on end
// in err. A reliable path cannot skip an op: the Conn goes down at both ends.
func (n *Network) FailOp(name string, count int, err error) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	f := n.fabrics[name]
	if f == nil {
		return fmt.Errorf("inproc: fail op %d of %q: no fabric of that name is open", count, name)
	}
	f.failIn, f.failWith = count, err
	return nil
}

// Refuse makes each Connect to the Fabric fail with err before the Gate; nil
// lets them pass again.
func (n *Network) Refuse(name string, err error) {
	n.mu.Lock()
	n.refuse[name] = err
	n.mu.Unlock()
}

// Cut ends all Conns between two Fabrics, as a reset does, and refuses new ones
// until Heal.
func (n *Network) Cut(a, b string) {
	var w wakes
	n.mu.Lock()
	n.cut(a, b, &w)
	n.mu.Unlock()
	w.ring()
}

// Partition cuts each of the named Fabrics from every open one that is not
// named.
func (n *Network) Partition(names ...string) {
	inside := map[string]bool{}
	for _, a := range names {
		inside[a] = true
	}
	var w wakes
	n.mu.Lock()
	for b := range n.fabrics {
		for _, a := range names {
			if !inside[b] {
				n.cut(a, b, &w)
			}
		}
	}
	n.mu.Unlock()
	w.ring()
}

func (n *Network) cut(a, b string, w *wakes) {
	n.relation(a, b).cut = true
	f := n.fabrics[a]
	if f == nil {
		return
	}
	for _, c := range f.conns {
		if c.peer.f.name == b {
			c.end(errCut, errCut, false, w)
			c.peer.end(errCut, errCut, false, w)
		}
	}
}

var errCut = errors.New("inproc: the network is cut")

// Hold lets nothing pass between two Fabrics until Heal, not even the news that
// one of them has closed: the silence of a host that has lost its power. A
// Connect waits until its context or Limits.Handshake ends it; a Conn that owes
// bytes ends with Limits.Stall.
func (n *Network) Hold(a, b string) {
	n.mu.Lock()
	n.relation(a, b).held = true
	n.mu.Unlock()
}

// Heal undoes Cut, Partition and Hold. Conns that have ended stay so.
func (n *Network) Heal() {
	var w wakes
	n.mu.Lock()
	for _, r := range n.between {
		r.cut, r.held = false, false
	}
	for _, f := range n.fabrics {
		w.add(f)
	}
	n.mu.Unlock()
	w.ring()
}

// Kill ends a Fabric as the death of its process does: its peers' Conns go down
// with an error that is not io.EOF, its own Poll gives an error and no events.
// Close is still to be called. A name that is not open is no error.
func (n *Network) Kill(name string) {
	var w wakes
	n.mu.Lock()
	if f := n.fabrics[name]; f != nil {
		f.killed = true
		f.shut(errKilled, &w)
		bye := fmt.Errorf("inproc: %s is gone: connection reset", name)
		for _, c := range f.conns {
			c.end(errKilled, bye, false, &w)
		}
	}
	n.mu.Unlock()
	w.ring()
}

// mix derives a number from the seed of a Network, a name and a count.
func mix(seed uint64, name string, count uint64) uint64 {
	h := fnv.New64a()
	fmt.Fprintf(h, "%d/%d/%s", seed, count, name)
	return h.Sum64()
}
