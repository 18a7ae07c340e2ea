// Package inproc is the transport between Fabrics of one process: memory to
// memory, without a kernel, with faults on demand. It is for tests of what lies
// above transport.
//
//	net := inproc.New(seed)
//	net.SetFaults(inproc.Chaos)
//	s, err := net.Open(inproc.Options{Name: "server", Listen: true, Gate: gate})
//	w, err := net.Open(inproc.Options{Name: "worker", Gate: gate})
//	conn, err := w.Connect(ctx, s.Addr()) // "inproc:server"
//	net.Kill("server")                    // the worker's Poll finds EvDown
//
// Bytes move in the receiver's Poll. A frame ends as soon as it is posted, for
// it has been copied; a write ends when the receiver has read its source. So a
// peer that does not poll makes back-pressure, and an EvDone says as little
// about arrival as it does on a wire.
//
// Nothing depends on a clock but Limits. What a Conn does to its ops is drawn
// from the Network's seed, the names of its two Fabrics and its number between
// them, in the order of posting: a test that drives its Fabrics from one
// goroutine sees the same run each time.
package inproc

import (
	"fmt"
	"strings"
	"sync"
	"time"

	"fserver/engine/transport"
)

const prefix = "inproc:"

// A Network is where Fabrics find each other. Its methods are safe from any
// goroutine. Fabrics of two Networks cannot meet.
type Network struct {
	seed uint64

	// mu guards the Network, its Fabrics and all their Conns. It is not held
	// while a Gate runs or a system call.
	mu      sync.Mutex
	fabrics map[string]*Fabric // that are open, by name
	opened  int                // Fabrics so far, for their default names
	faults  Faults
	between map[pair]*relation
	refuse  map[string]error
	spare   buffers
}

// pair names two Fabrics, the lesser name first.
type pair struct{ a, b string }

func newPair(a, b string) pair {
	if b < a {
		a, b = b, a
	}
	return pair{a, b}
}

// relation is what a Network knows about two names.
type relation struct {
	conns uint64 // opened so far
	cut   bool
	held  bool
}

// New gives a Network without Fabrics and without faults.
func New(seed uint64) *Network {
	return &Network{
		seed:    seed,
		fabrics: map[string]*Fabric{},
		between: map[pair]*relation{},
		refuse:  map[string]error{},
	}
}

// Options describe a Fabric.
type Options struct {
	// Name tells the Fabric from all that are open in the Network; a name is
	// free again after Close and Kill. Empty means "fabric-N".
	Name string
	// Listen lets peers connect, to the address "inproc:NAME".
	Listen bool
	// Gate guards connections both ways.
	Gate transport.Gate
	// Limits are the bounds; zero fields mean the defaults of the type.
	Limits transport.Limits
	// Depth is how many ops of one Conn may be under way; 0 means 128.
	Depth int
}

// Open makes a Fabric. Its user closes it.
func (n *Network) Open(o Options) (*Fabric, error) {
	if o.Gate == nil {
		return nil, fmt.Errorf("inproc: open fabric %q: Options.Gate is nil", o.Name)
	}
	bell, err := newBell()
	if err != nil {
		return nil, fmt.Errorf("inproc: open fabric %q: %w", o.Name, err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.opened++
	if o.Name == "" {
		o.Name = fmt.Sprintf("fabric-%d", n.opened)
	}
	if n.fabrics[o.Name] != nil {
		bell.close()
		return nil, fmt.Errorf("inproc: open fabric %q: a fabric of this name is already open", o.Name)
	}
	f := &Fabric{net: n, name: o.Name, listen: o.Listen, gate: o.Gate, limits: o.Limits, depth: o.Depth,
		bell: bell, regions: map[uint64]region{}, done: make(chan struct{})}
	if f.limits.Handshake <= 0 {
		f.limits.Handshake = 10 * time.Second
	}
	if f.limits.Stall <= 0 {
		f.limits.Stall = 30 * time.Second
	}
	if f.limits.Pending <= 0 {
		f.limits.Pending = 256
	}
	if f.depth <= 0 {
		f.depth = 128
	}
	f.alarm = time.AfterFunc(f.limits.Stall, f.alarmed)
	f.alarm.Stop()
	n.fabrics[o.Name] = f
	return f, nil
}

// relation gives what is known about a and b. The caller holds mu.
func (n *Network) relation(a, b string) *relation {
	p := newPair(a, b)
	r := n.between[p]
	if r == nil {
		r = &relation{}
		n.between[p] = r
	}
	return r
}

// nameOf is the name in an address of this transport.
func nameOf(a transport.Addr) (string, bool) {
	name, ok := strings.CutPrefix(string(a), prefix)
	return name, ok && name != ""
}
