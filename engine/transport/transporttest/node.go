package transporttest

import (
	"bytes"
	"errors"
	"sync"

	"github.com/stretchr/testify/require"

	"fserver/engine/mem"
	"fserver/engine/transport"
)

// A node drives one Fabric and checks each event against the contract. One
// goroutine at a time uses it.
type node struct {
	w      *world
	f      transport.Fabric
	name   string
	ev     []transport.Event // handed to Poll; tests change its length
	links  map[transport.Conn]*link
	fresh  []*link // accepted, and not yet claimed by connect
	held   []heldData
	user   uint64
	polls  int
	asleep bool     // not polled by turn
	ends   sync.Map // by the ID of a Key: whether EvFreed has come since deregister
	closed bool
	killed bool
}

// heldData is an Event.Data and what was in it when Poll returned.
type heldData struct{ data, was []byte }

// link is this node's view of c.
func (n *node) link(c transport.Conn) *link {
	l := n.links[c]
	if l == nil {
		l = &link{n: n, c: c, open: map[uint64]bool{}}
		n.links[c] = l
	}
	return l
}

// poll polls once, takes what came and returns how many events that were.
func (n *node) poll() int {
	for _, h := range n.held {
		if !bytes.Equal(h.data, h.was) {
			n.w.Errorf("%s: the data of a frame changed before the next Poll", n.name)
		}
	}
	n.held = n.held[:0]
	n.polls++
	k, err := n.f.Poll(n.ev)
	if err != nil && !n.killed && !(n.closed && errors.Is(err, transport.ErrClosed)) {
		n.w.Errorf("%s: poll: %v", n.name, err)
	}
	if k < 0 || k > len(n.ev) {
		n.w.Errorf("%s: poll found %d events in room for %d", n.name, k, len(n.ev))
		return 0
	}
	for i := range n.ev[:k] {
		n.take(&n.ev[i])
	}
	for _, l := range n.links {
		l.pay()
	}
	return k
}

// take files one event.
func (n *node) take(e *transport.Event) {
	if e.Kind == transport.EvFreed {
		if freed, known := n.ends.Load(e.User); !known || freed.(bool) {
			n.w.Errorf("%s: EvFreed of key %d, which is not being deregistered", n.name, e.User)
		}
		n.ends.Store(e.User, true)
		return
	}
	if e.Conn == nil {
		n.w.Errorf("%s: event %+v names no conn", n.name, *e)
		return
	}
	_, known := n.links[e.Conn]
	l := n.link(e.Conn)
	if l.isOver || l.isDown && e.Kind != transport.EvDone && e.Kind != transport.EvClosed {
		n.w.Errorf("%s: event %+v after EvDown or EvClosed", n.name, *e)
	}
	if l.closed && e.Kind != transport.EvDone && e.Kind != transport.EvClosed {
		n.w.Errorf("%s: event %+v after Close", n.name, *e)
	}
	switch e.Kind {
	case transport.EvAccept:
		if known {
			n.w.Errorf("%s: EvAccept is not the first event of its conn", n.name)
		}
		l.accepted = true
		n.fresh = append(n.fresh, l)
	case transport.EvDone:
		if !l.open[e.User] {
			n.w.Errorf("%s: EvDone for op %d, which is not open (err %v)", n.name, e.User, e.Err)
		}
		delete(l.open, e.User)
		if e.User&aMark != 0 {
			return
		}
		l.done = append(l.done, doneOp{e.User, e.Err})
		if l.onDone != nil {
			l.onDone(e.User, e.Err)
		}
	case transport.EvFrame:
		n.held = append(n.held, heldData{e.Data, bytes.Clone(e.Data)})
		if m, ok := parseMark(e.Data); ok {
			l.writes = append(l.writes, m)
			if l.onWritten != nil {
				l.onWritten(m.number, m.n)
			}
			return
		}
		l.frames = append(l.frames, bytes.Clone(e.Data))
		if l.onFrame != nil {
			l.onFrame(e.Data)
		}
	case transport.EvLent:
		l.loans = append(l.loans, loan{e.Loan, e.Span, e.View, len(l.frames)})
		if e.Span.Len != e.Len || !e.View.Region().Contains(e.Span) {
			n.w.Errorf("%s: a loan of %d bytes at %+v of %+v", n.name, e.Len, e.Span, e.View.Region())
		}
	case transport.EvDown:
		l.forgive()
		if n.closed {
			n.w.Errorf("%s: EvDown on a closed fabric: %v", n.name, e.Err)
		}
		if e.Err == nil {
			n.w.Errorf("%s: EvDown says no reason", n.name)
		}
		l.isDown, l.down = true, e.Err
	case transport.EvClosed:
		l.forgive()
		if len(l.open) > 0 {
			n.w.Errorf("%s: EvClosed with %d ops open", n.name, len(l.open))
		}
		if !l.closed && !n.closed {
			n.w.Errorf("%s: EvClosed for a conn that its own user has not closed", n.name)
		}
		l.isOver = true
	default:
		n.w.Errorf("%s: event of unknown kind %+v", n.name, *e)
	}
}

// target is memory that a node has registered for its peers.
type target struct {
	mem.Region
	key transport.Key
}

// target allocates and registers size bytes.
func (n *node) target(size uint64) target {
	n.w.Helper()
	r := n.w.alloc(size)
	return target{r, n.register(r)}
}

func (n *node) register(r mem.Region) transport.Key {
	n.w.Helper()
	k, err := n.f.Register(r)
	require.NoError(n.w, err)
	return k
}

// deregister starts the end of a key; freed says whether it has come. Both are for any goroutine.
func (n *node) deregister(k transport.Key) {
	n.ends.Store(k.ID, false)
	n.f.Deregister(k)
}

func (n *node) freed(k transport.Key) bool {
	freed, _ := n.ends.Load(k.ID)
	return freed == true
}

// free ends a key.
func (n *node) free(k transport.Key) {
	n.w.Helper()
	n.deregister(k)
	n.w.until("the key is freed", func() bool { return n.freed(k) })
}

// close closes the Fabric once more or for the first time.
func (n *node) close() {
	n.closed = true
	for _, l := range n.links {
		l.forgive()
	}
	if err := n.f.Close(); err != nil {
		n.w.Errorf("%s: close: %v", n.name, err)
	}
}

// drain polls a closed Fabric until it has nothing more to give.
func (n *node) drain() {
	if len(n.ev) == 0 {
		n.ev = make([]transport.Event, 1)
	}
	for n.poll() > 0 {
	}
}

// settled checks that every Op has ended and that every Conn is one that
// Connect returned or EvAccept brought.
func (n *node) settled() {
	for _, l := range n.links {
		if len(l.open) > 0 && !n.killed {
			n.w.Errorf("%s: %d ops never ended", n.name, len(l.open))
		}
		if !l.isOver && !n.killed {
			n.w.Errorf("%s: a conn has no EvClosed", n.name)
		}
		if l.accepted == l.dialed {
			n.w.Errorf("%s: a conn was accepted: %v, dialed: %v", n.name, l.accepted, l.dialed)
		}
	}
}
