package transporttest

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fserver/engine/mem"
	"fserver/engine/transport"
)

// patience is how long a test waits for something that must happen. It is far
// above what any wait needs, because machines are shared.
const patience = 60 * time.Second

// A world is one test: its Fabrics, its memory, and what was there before.
type world struct {
	testing.TB
	bed     Bed
	mem     Memory
	nodes   []*node
	regions []mem.Region
	before  leaks
}

func newWorld(tb testing.TB, bed Bed) *world {
	w := &world{TB: tb, bed: bed, mem: bed.Memory, before: countLeaks(tb)}
	if w.mem == nil {
		w.mem = hostMemory{}
	}
	tb.Cleanup(w.end)
	return w
}

// open makes a node that lets everybody in and takes connections.
func (w *world) open(name string) *node {
	w.Helper()
	return w.openWith(Options{Gate: Gate{Hello: name}, Listen: true})
}

// pair opens two nodes and a Conn from the first to the second.
func (w *world) pair() (a, b *link) {
	w.Helper()
	return w.connect(w.open("a"), w.open("b"))
}

func (w *world) openWith(o Options) *node {
	w.Helper()
	f, err := w.bed.Open(o)
	var no *transport.ErrUnavailable
	if errors.As(err, &no) {
		w.Skip(no.Error())
	}
	if err != nil {
		w.Fatalf("open a fabric: %v", err)
	}
	n := &node{
		w: w, f: f, name: fmt.Sprintf("node %d", len(w.nodes)),
		ev: make([]transport.Event, 16), links: map[transport.Conn]*link{},
	}
	w.nodes = append(w.nodes, n)
	return n
}

// turn polls every node that is awake once, and returns how many events there were.
func (w *world) turn() (came int) {
	for _, n := range w.nodes {
		if !n.asleep {
			came += n.poll()
		}
	}
	return came
}

// Rest is for a test between two looks at something that has not happened yet: after the first 1,000 in a row, others
// have the core for 0.1 ms.
func Rest(looks int) {
	if looks < 1000 {
		runtime.Gosched()
		return
	}
	_ = unix.Nanosleep(&unix.Timespec{Nsec: 100_000}, nil) // a timer of Go's takes a millisecond
}

// turns polls every node that is awake so many times.
func (w *world) turns(count int) {
	for range count {
		w.turn()
		runtime.Gosched()
	}
}

// until polls the nodes in turn until cond holds.
func (w *world) until(what string, cond func() bool) {
	w.Helper()
	looks := 0
	for end := time.Now().Add(patience); !cond(); looks++ {
		if w.turn() > 0 {
			looks = 0
		}
		if w.Failed() {
			w.FailNow()
		}
		if time.Now().After(end) {
			w.Fatalf("did not happen within %v: %s\n%s", patience, what, w.state())
		}
		Rest(looks)
	}
}

// state describes every Conn, for the message of a test that hangs.
func (w *world) state() string {
	var s strings.Builder
	for _, n := range w.nodes {
		fmt.Fprintf(&s, "%s (%s): %d polls\n", n.name, n.f.Name(), n.polls)
		for _, l := range n.links {
			fmt.Fprintf(&s, "  to %s: %d ops open, %d ended, %d frames, %d writes, down %v %v\n",
				l.c.Peer().Remote, len(l.open), len(l.done), len(l.frames), len(l.writes), l.isDown, l.down)
		}
	}
	return s.String()
}

// A dialing is a Connect that runs in its own goroutine.
type dialing struct {
	n    *node
	res  chan dialed
	got  *dialed
	stop context.CancelFunc
}

type dialed struct {
	c   transport.Conn
	err error
}

// dial starts a Connect that ends with ctx.
func (n *node) dial(ctx context.Context, to transport.Addr) *dialing {
	ctx, stop := context.WithTimeout(ctx, patience)
	d := &dialing{n: n, res: make(chan dialed, 1), stop: stop}
	go func() {
		c, err := n.f.Connect(ctx, to)
		d.res <- dialed{c, err}
	}()
	return d
}

// over says whether the Connect has returned.
func (d *dialing) over() bool {
	if d.got != nil {
		return true
	}
	select {
	case r := <-d.res:
		d.stop()
		d.got = &r
		if r.err == nil {
			d.n.link(r.c).dialed = true
		}
		return true
	default:
		return false
	}
}

// connect opens a Conn from a to b and returns both its ends.
func (w *world) connect(a, b *node) (from, to *link) {
	w.Helper()
	d := a.dial(context.Background(), b.f.Addr())
	w.until("connect", d.over)
	if d.got.err != nil {
		w.Fatalf("connect to %s: %v", b.f.Addr(), d.got.err)
	}
	w.until("the listener hears of the connection", func() bool { return len(b.fresh) > 0 })
	to, b.fresh = b.fresh[0], b.fresh[1:]
	return a.link(d.got.c), to
}

// refused dials and returns the error that must come.
func (w *world) refused(ctx context.Context, a *node, to transport.Addr) error {
	w.Helper()
	d := a.dial(ctx, to)
	w.until("connect fails", d.over)
	if d.got.err == nil {
		w.Fatalf("connect to %q passed, want an error", to)
	}
	if d.got.c != nil {
		w.Fatalf("connect to %q gave a conn with the error %v", to, d.got.err)
	}
	return d.got.err
}

// end closes what is open, reads what Poll still has to give, and checks that
// every Op has ended and that nothing is left behind.
func (w *world) end() {
	for _, n := range w.nodes {
		n.close()
	}
	for _, n := range w.nodes {
		n.drain()
	}
	for _, r := range w.regions {
		if err := w.mem.Free(r); err != nil {
			w.Errorf("free: %v", err)
		}
	}
	if w.Failed() || w.Skipped() {
		return
	}
	for _, n := range w.nodes {
		n.settled()
	}
	w.before.check(w)
}
