package inproc

import (
	"fmt"
	"io"
	"math/rand/v2"
	"time"

	"fserver/engine/transport"
)

// A Conn is one end of a path between two Fabrics. All but what newConn sets is
// guarded by net.mu.
type Conn struct {
	f       *Fabric
	peer    *Conn // the other end
	rel     *relation
	hello   []byte
	ordered bool
	rng     *rand.Rand // draws the faults of what is posted here

	out      pipe      // what is posted here; the peer's Poll takes from it
	fresh    bool      // EvAccept is still to come,
	due      uint64    // in this Poll or a later one
	pressed  bool      // the last Post took fewer ops than it was given
	progress time.Time // when the peer last took something, or had taken all
	over     error     // why this end is at its end; it is told in EvDone and EvDown
	bye      error     // what the peer's end will say; valid with over
	closed   bool      // by its user: no EvDown
	downTold bool      // EvDown was given
}

// newConn makes f's end of a Conn to p. The caller holds net.mu, joins the two
// ends and has counted the Conn in rel.
func newConn(f, p *Fabric, rel *relation, hello []byte) *Conn {
	seed := mix(f.net.seed, f.name+" to "+p.name, rel.conns)
	return &Conn{f: f, rel: rel, hello: hello, ordered: !f.net.faults.Reorder,
		rng: rand.New(rand.NewPCG(seed, 0)), out: pipe{ring: make([]entry, f.depth)}}
}

// Hello implements transport.Conn.
func (c *Conn) Hello() []byte { return c.hello }

// Remote is "inproc:NAME" of the peer, which need not take connections.
func (c *Conn) Remote() string { return prefix + c.peer.f.name }

// Post implements transport.Conn.
func (c *Conn) Post(ops []transport.Op) (int, error) {
	f := c.f
	f.net.mu.Lock()
	k, err := c.post(ops)
	f.net.mu.Unlock()
	f.touched.ring()
	if err != nil {
		err = fmt.Errorf("inproc: post to %s: %w", c.Remote(), err)
	}
	return k, err
}

func (c *Conn) post(ops []transport.Op) (int, error) {
	if c.over != nil {
		return 0, c.over
	}
	room := len(ops)
	if room > 0 && c.chance(c.f.net.faults.Pressure) {
		room = c.rng.IntN(room)
		c.f.touched.add(c.f) // the next Post may take more
	}
	for i := range ops {
		if err := check(&ops[i]); err != nil {
			return i, err
		}
		if i == room || !c.out.takes(&ops[i]) {
			c.pressed = true
			return i, nil
		}
		if c.accept(&ops[i]); c.over != nil {
			return i + 1, nil
		}
	}
	return len(ops), nil
}

// stageMax bounds the writes that Faults.Stage is about, in bytes.
const stageMax = 64 << 10

// accept takes one op that there is room for.
func (c *Conn) accept(op *transport.Op) {
	f := c.f
	if c.out.unsent == 0 {
		c.progress = time.Now()
	}
	e := c.out.push(op)
	e.due = c.peer.f.polls + 1 + c.delay()
	if op.Kind == transport.OpFrame {
		e.buf = f.net.spare.get(len(op.Frame))
		c.out.owned += copy(e.buf, op.Frame)
		c.out.finish(e, nil)
	} else {
		for _, s := range op.Src {
			e.size += s.Len
		}
		e.src = op.Src
		if e.size <= stageMax && c.chance(f.net.faults.Stage) {
			buf := f.net.spare.get(int(e.size))
			e.gather(buf)
			e.at, e.buf = 0, buf
			c.out.owned += len(buf)
			c.out.finish(e, nil)
		}
	}
	if e.over {
		f.touched.add(f)
	}
	f.touched.add(c.peer.f)
	f.watch()
	if f.failIn > 0 {
		if f.failIn--; f.failIn == 0 {
			c.fail(e, f.failWith)
		}
	}
}

// fail ends e, the last op posted, and with it the Conn in err.
func (c *Conn) fail(e *entry, err error) {
	if e.over {
		e.err = err
	}
	c.end(err, fmt.Errorf("inproc: an op of %s failed: %w", c.f.name, err), false, &c.f.touched)
}

// chance is true for a share p of its calls.
func (c *Conn) chance(p float64) bool { return p > 0 && c.rng.Float64() < p }

// delay draws how many Polls of the receiver something is held back.
func (c *Conn) delay() uint64 {
	if d := c.f.net.faults.Delay; d > 0 {
		return c.rng.Uint64N(uint64(d) + 1)
	}
	return 0
}

// Close implements transport.Conn.
func (c *Conn) Close() error {
	var w wakes
	c.f.net.mu.Lock()
	c.close(&w)
	c.f.net.mu.Unlock()
	w.ring()
	return nil
}

func (c *Conn) close(w *wakes) {
	c.closed = true
	bye := fmt.Errorf("inproc: %s closed the connection: %w", c.f.name, io.EOF)
	c.end(transport.ErrClosed, bye, !c.chance(c.f.net.faults.Forget), w)
	w.add(c.f)
}

// end ends this end of the Conn: open ops are told why. With deliver, what the
// peer can still be given without a source is, before it learns of the end, up to the first
// write that cannot: no frame may come after that. The caller holds net.mu.
func (c *Conn) end(why, bye error, deliver bool, w *wakes) {
	if c.over != nil {
		return
	}
	c.over, c.bye = why, bye
	for i := c.out.head; i < c.out.tail; i++ {
		e := c.out.at(i)
		open := !e.over
		if open {
			c.out.finish(e, why)
			deliver = false
		}
		if !e.sent && (open || !deliver) {
			c.f.net.spare.put(c.out.send(e))
		}
	}
	w.add(c.f)
	w.add(c.peer.f)
}

// gone says whether the Conn has no more events to give.
func (c *Conn) gone() bool { return c.out.untold == 0 && (c.closed || c.downTold) }
