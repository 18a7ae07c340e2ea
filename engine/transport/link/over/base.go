// Package over is what Fabrics around another one share that have a GPU work for them: how they poll and sleep beside the
// GPU, how their Conns begin, wait, end and fail, and how the end of a key waits for copies.
//
// A Fabric embeds a Base and is its Layer. Its Conns embed a Path, and are what the Path calls a Conn. The lock, Base.Mu,
// guards all but what is atomic, and is held whenever a Layer or Conn is called.
package over

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"fserver/engine/gpu"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// A Layer is what a Fabric adds to its Base.
type Layer interface {
	// Wrap makes the Conn over one of inner's, whose Path it begins.
	Wrap(in transport.Conn) Conn
	// Remove forgets the key of a region of the Layer, if it is one, and calls End.
	Remove(k transport.Key)
	// Waits reports whether copies are under way that are not of one Conn.
	Waits() bool
	// Proceed goes on with what is not of one Conn. Nobody is in the driver.
	Proceed()
	// Look looks, once a second, for what no event tells of.
	Look()
	// Shutting is called when Close has ended all Conns.
	Shutting()
	// Free gives back what the Layer holds. Nothing is under way.
	Free()
}

// Memory is what a key stood for that is gone.
type Memory interface {
	// Quiet reports whether nobody touches the memory any more, but for inner.
	Quiet() bool
	// Discard gives back what was held for it.
	Discard()
}

type ending struct {
	Memory      // nil: nobody waits for the end
	freed  bool // inner has let go of it
}

// A Base is the part of a Fabric around another one, inner, that does not depend on how it copies.
type Base struct {
	link.Over
	// Wraps says which Conns of inner to wrap; nil: all.
	Wraps func(in transport.Conn) bool
	// Below says that Posts and Polls of inner may call the device. Then Mu is not held during them.
	Below bool

	layer Layer
	name  string // for errors
	mark  uint64 // in the User of operations of ours

	Mu      sync.Mutex // not held during calls of the device
	Calls   gpu.Calls
	refused bool // a Post came while another was in the device, and no Poll since
	Closed  bool
	ended   error
	Conns   map[transport.Conn]Conn // by inner's
	last    Conn                    // that an event was of
	lastIn  transport.Conn          // its inner one; nil: none
	busy    []Conn                  // that a Poll has to look at; see due
	told    []transport.Event       // to be given first
	found   link.Found              // by this Poll
	ev      [64]transport.Event     // of inner
	ending  map[uint64]*ending      // memory whose keys are gone, but not what had begun before
	Looked  time.Time               // when Layer.Look was called
	polls   uint64
	quiet   uint64 // Polls of inner that have found nothing
	slept   bool   // Arm was called, and no Poll since

	spins uint64      // Polls, of those that look at nothing too; for whoever polls
	Calm  atomic.Bool // a Poll has nothing to look at but inner; see Lock

	Tracked atomic.Int32 // Conns that are wrapped, and Connects under way
}

// Begin begins a Base that is the one of layer, around inner. The operations of ours have the mark in their User. Undo undoes it, also after an error.
func (b *Base) Begin(name string, mark uint64, layer Layer, inner transport.Fabric, calls gpu.Calls) error {
	if calls.Later == nil {
		calls.Later = new(gpu.Later)
	}
	calls.Mu = &b.Mu
	b.Over, b.name, b.mark, b.layer, b.Calls = link.Over{Fabric: inner}, name, mark, layer, calls
	b.Conns, b.ending = map[transport.Conn]Conn{}, map[uint64]*ending{}
	if calls.Dev == nil {
		b.Calm.Store(true)
		return nil
	}
	return b.Open()
}

// Undo gives back what Begin and the Layer have acquired, once.
func (b *Base) Undo() {
	b.layer.Free()
	b.Calls.FreeEvents()
	b.Shut()
}

// It is the Base, of a Fabric that embeds it.
func (b *Base) It() *Base { return b }

// wraps reports whether a Conn of inner is wrapped.
func (b *Base) wraps(in transport.Conn) bool { return b.Wraps == nil || b.Wraps(in) }

// Connect implements transport.Fabric.
func (b *Base) Connect(ctx context.Context, peer transport.Addr) (transport.Conn, error) {
	b.Tracked.Add(1) // before an event of the new Conn can come
	defer b.Tracked.Add(-1)
	in, err := b.Fabric.Connect(ctx, peer)
	if err != nil {
		return nil, err
	}
	b.Mu.Lock()
	defer b.Mu.Unlock()
	if !b.wraps(in) {
		return in, nil
	}
	if b.Closed && b.Conns[in] == nil {
		in.Close()
		return nil, transport.ErrClosed
	}
	return b.conn(in), nil
}

// conn is the Conn over one of inner, whose events may come before Connect
// returns.
func (b *Base) conn(in transport.Conn) Conn {
	c := b.Conns[in]
	if c == nil {
		c = b.layer.Wrap(in)
		b.Conns[in] = c
		b.Tracked.Add(1)
	}
	return c
}

// forget drops a Conn that has no more events to give.
func (b *Base) forget(c Conn, in transport.Conn) {
	c.Free()
	delete(b.Conns, in)
	b.last, b.lastIn = nil, nil
	b.Tracked.Add(-1)
}

// Deregister implements transport.Fabric. The key of a region of the Layer ends when the copies to it have ended, and
// inner has let go of its own.
func (b *Base) Deregister(k transport.Key) {
	b.Lock()
	b.layer.Remove(k)
	b.Mu.Unlock()
	b.Fabric.Deregister(k)
}

// End begins the end of a key: EvFreed comes when its memory is quiet and inner has let go of it.
func (b *Base) End(id uint64, m Memory) {
	b.ending[id] = &ending{Memory: m}
	b.rouse()
}

// Spare has inner's EvFreed of a key of ours given to nobody.
func (b *Base) Spare(id uint64) { b.ending[id] = &ending{} }

// Ending is how many keys are gone whose EvFreed has not come.
func (b *Base) Ending() int { return len(b.ending) }

// settle ends a key if its memory is quiet. Here, and nowhere else, the end of a key is complete.
func (b *Base) settle(id uint64, e *ending) {
	switch {
	case !e.freed && !b.Closed:
	case e.Memory == nil:
		delete(b.ending, id)
	case e.Quiet():
		delete(b.ending, id)
		e.Discard()
		b.told = append(b.told, transport.Event{Kind: transport.EvFreed, User: id})
	}
}

// SettleLimit bounds how long Close waits for copies that are under
// way. The wire needs microseconds; a copy may wait behind a kernel though.
const SettleLimit = 5 * time.Second

// Close implements transport.Fabric.
func (b *Base) Close() error {
	err := errors.Join(b.Fabric.Close(), b.end())
	b.Calls.Later.Wait(SettleLimit)
	return err
}

// end waits for what is under way, and gives back what the Fabric holds.
func (b *Base) end() error {
	b.Lock()
	defer b.Mu.Unlock()
	if b.Closed {
		return b.ended
	}
	b.Closed = true
	for _, c := range b.Conns {
		c.stop()
	}
	b.layer.Shutting()
	// Nobody may poll.
	for limit := time.Now().Add(SettleLimit); ; b.Mu.Lock() {
		if b.drive(true); b.idles() {
			break
		}
		if time.Now().After(limit) {
			b.ended = fmt.Errorf("%s: close: copies on %v have not finished within %v (a kernel before them does not end), so their memory stays pinned", b.name, b.Calls.Name(), SettleLimit)
			return b.ended
		}
		b.Mu.Unlock()
		time.Sleep(20 * time.Microsecond)
	}
	for _, c := range b.Conns {
		c.Free()
	}
	b.Undo()
	return nil
}

// idles reports whether nothing is under way that the end of the Fabric has to wait for.
func (b *Base) idles() bool {
	if b.Calls.Inside || b.Calls.Asides > 0 || len(b.ending) > 0 || b.layer.Waits() {
		return false
	}
	for _, c := range b.Conns {
		if !c.advance() || c.Working() || c.Lingers() { // a copy may have ended since Advance looked
			return false
		}
	}
	return true
}
