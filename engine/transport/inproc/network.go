// Package inproc is the transport between Fabrics of one process: memory to
// memory. It is for tests of what lies above transport.
//
//	net := inproc.New()
//	s, err := net.Open(inproc.Options{Name: "server", Listen: true, Gate: gate})
//	w, err := net.Open(inproc.Options{Name: "worker", Gate: gate})
//	conn, err := w.Connect(ctx, s.Addr()) // "inproc:server"
//	net.Kill("server")                    // the worker's Poll finds EvDown
//
// Package link sets connections up, over an abstract Unix socket. A write lands in Post. A frame
// waits for the peer's Poll, and so does the EvDone of all that was posted behind it: a peer that
// does not poll makes back-pressure. Package faults makes such a Fabric behave like a NIC.
package inproc

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"

	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

const prefix = "inproc:"

// A Network is where Fabrics find each other. Its methods are safe from any
// goroutine. Fabrics of two Networks cannot meet.
type Network struct {
	space string // begins the names of its sockets

	// mu guards the rest, and what Conns give each other. Who needs the owner's lock of a Fabric, too,
	// takes that first, and only one.
	mu      sync.Mutex
	fabrics map[string]*Fabric      // that are open, by name
	opened  int                     // Fabrics so far, for their default names
	between map[[2]string]*relation // the lesser name first
	dialing map[string]*Conn        // ends of dialers that have no peer yet, by a word that they tell it
}

// relation is what a Network knows about two names.
type relation struct{ cut, held bool }

// New returns a Network without Fabrics.
func New() *Network {
	return &Network{
		space: "@fserver-inproc-" + rand.Text() + "/", fabrics: map[string]*Fabric{},
		between: map[[2]string]*relation{}, dialing: map[string]*Conn{},
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
	// Depth is how many ops of one Conn may be under way, at most 128; 0 means 128.
	Depth int
}

const maxDepth = 128

// Open makes a Fabric. Its user closes it.
func (n *Network) Open(o Options) (*Fabric, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.opened++
	if o.Name == "" {
		o.Name = fmt.Sprintf("fabric-%d", n.opened)
	}
	f, err := n.open(o)
	if err != nil {
		return nil, fmt.Errorf("inproc: open fabric %q: %w", o.Name, err)
	}
	n.fabrics[o.Name] = f
	return f, nil
}

func (n *Network) open(o Options) (*Fabric, error) {
	if n.fabrics[o.Name] != nil {
		return nil, errors.New("a fabric of this name is already open")
	}
	f := &Fabric{net: n, name: o.Name, depth: maxDepth}
	if o.Depth > 0 {
		f.depth = min(o.Depth, maxDepth)
	}
	f.Regions.Init(&f.Fabric)
	err := f.Fabric.Open(link.Kind{
		Name: "inproc", Network: "unix", Gone: "no fabric of this name takes connections",
		Target: f.socket, Adopt: f.adopt,
	}, link.Options{Name: "inproc/" + o.Name, Gate: o.Gate, Limits: o.Limits})
	if err != nil {
		return nil, err
	}
	if o.Listen {
		l, err := net.Listen("unix", n.space+o.Name)
		if err != nil {
			f.Release()
			return nil, err
		}
		f.Serve(l, o.Name)
	}
	f.Start(f.inspect)
	return f, nil
}

// relation gives what is known about a and b. The caller holds mu.
func (n *Network) relation(a, b string) *relation {
	p := [2]string{min(a, b), max(a, b)}
	if n.between[p] == nil {
		n.between[p] = &relation{}
	}
	return n.between[p]
}

// Cut ends all Conns between two Fabrics, as a reset does, and refuses new ones
// until Heal.
func (n *Network) Cut(a, b string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	r := n.relation(a, b)
	r.cut = true
	for _, f := range n.fabrics {
		for _, c := range f.conns.All {
			if c.relation() == r {
				c.cut(errCut, errCut)
			}
		}
	}
}

// Hold lets nothing pass between two Fabrics until Heal, not even the news that
// one of them has closed: the silence of a host that has lost its power. A
// Connect waits until its context or Limits.Handshake ends it; a Conn that owes
// a frame ends with Limits.Stall, and takes no write.
func (n *Network) Hold(a, b string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.relation(a, b).held = true
}

// Heal undoes Cut and Hold. Conns that have ended stay so.
func (n *Network) Heal() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, r := range n.between {
		*r = relation{}
	}
	for _, f := range n.fabrics {
		f.ring()
	}
}

// Kill ends a Fabric as the death of its process does: its peers' Conns go down
// with an error that is not io.EOF, its own Poll gives an error and no events.
// Close is still to be called. A name that is not open is no error.
func (n *Network) Kill(name string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	f := n.fabrics[name]
	if f == nil {
		return
	}
	delete(n.fabrics, name)
	f.killed = true
	if f.Listener != nil {
		f.Listener.Close()
	}
	for _, c := range f.conns.All {
		c.cut(errKilled, errReset)
	}
	f.ring()
}

var (
	errCut    = errors.New("the network is cut")
	errKilled = errors.New("inproc: the fabric was killed")
	errReset  = errors.New("the peer is gone: connection reset")
	errBye    = fmt.Errorf("the peer closed the connection: %w", io.EOF)
)
