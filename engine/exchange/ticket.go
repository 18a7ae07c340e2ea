package exchange

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"fserver/engine/mem"
	"fserver/engine/trace"
	"fserver/engine/transport"
	"fserver/engine/wire"
)

// Window is how many tickets can be under way, and how many of the last ones
// are remembered.
const Window = 4096

// The states in the low two bits of a ticket's word.
const (
	StateOpen    = 0 // under way
	StateDone    = 1
	StateFailed  = 2
	StateFailing = 3 // failed, but a peer may still write to its memory
)

// ErrFull says that as many tickets are under way as there may be.
var ErrFull = fmt.Errorf("exchange: %d push_pulls or answers of this node are in progress, which is the limit (wait for one of them first)", Window)

// ErrNoTicket says that a ticket was never issued or is givenUp.
var ErrNoTicket = errors.New("exchange: no such ticket")

// Ticket is one push-pull, or one answer, on its way. Between Begin and Submit
// it is the caller's, then the owner's.
type Ticket struct {
	tb      *Table
	id      uint64 // also the User of its operations
	rec     *record
	push    []Tensor // of an answer: its tensors
	pull    []Tensor
	spans   []mem.Span // of push: what the operations' sources point to
	dims    []int64    // what the tensors' Dims point to
	legs    []leg      // one per server
	plan    *plan
	on      string // the channel that it goes through; onUnicasts: one server alone has it,
	only    place  // this one
	open    int    // legs that have not ended
	ops     int    // operations that have not ended
	err     error
	turn    uint64 // of a push_pull: its place among all of its worker
	torn    bool   // see Regroup
	exposed bool   // a lost peer may still write with keys that it had

	stream uint64 // what is pushed is not read before what was queued there has run,
	behind bool   // if this says so: then
	after  Point  // stands for that

	regs     []*registration // of pull, nil: there is none yet; then those of what is sent
	rings    int             // Fabrics that know what is sent, if they must
	renewing bool            // a helper changes regs

	request *Request // answers only
	fails   bool     // the answer is a refusal,
	why     string   // with this text
}

// leg is the part of a push-pull that one server has.
type leg struct {
	state uint8  // legQueued, legPosted, legEnded
	era   uint64 // in which its request was composed
	sends uint8  // times that the request was posted
	keys  []*credit
	lends []bool // by pushed tensor: it is lent
}

const (
	legQueued = iota
	legPosted
	legEnded
)

// record is what stays of a ticket when it has ended.
type record struct {
	id     uint64
	stamps trace.Stamps
	err    error
	ticket *Ticket // while it is open
}

// Host is what a Worker or a Server needs of its node.
type Host struct {
	// Broken takes note that the Conn of peer i takes no more, and why; more than once. The
	// owner calls it. It is to close that Conn when what it still has to say has been handed on,
	// and then to call Lose.
	Broken func(i int, err error)
	// Breach takes note that peer i does not keep to the protocol, and how; more than once. It is as
	// Broken, but what the Conn still has to say does not count.
	Breach func(i int, err error)
	// Aside calls f, which may block, without the token, and has Drain called after it. It does
	// not wait for it.
	Aside func(f func())
	// Owned calls f under the token, for a goroutine that does not hold it, and waits for that. If there is no owner any
	// more, it calls f all the same.
	Owned func(f func())
	// Patient has what waits for a peer that is lost wait for its successor.
	Patient bool
	// Point makes a point of what is queued on a stream of the device so far, in the forms that are
	// asked for. It may wait, and is called from any goroutine without a lock. Nil: there is no device.
	Point func(stream uint64, event, word bool) (Point, error)
	// Word gives a point that has the form of an event that of a word too. It does not wait. If there are
	// too many it does nothing, and is called again.
	Word func(*Point)
	// Passed is told of each point that is not needed any more, whether or not the stream has passed
	// it; from any goroutine.
	Passed func(Point)
	// Takes refuses tensors on a device. It is for any goroutine; its error follows the name of a tensor.
	Takes func(d mem.Device) error
}

// Party is what a Worker and a Server have in common beside their Table. Tickets is for any
// goroutine, the rest for the owner.
type Party interface {
	Tickets() *Table
	// Drain takes what callers have submitted and posts what can be posted, and Backlog reports
	// whether back-pressure holds something up.
	Drain()
	Backlog() bool
	// Done takes the end of an operation, and Frame a frame of peer i. Its error means that the
	// peer does not keep to the protocol.
	Done(user uint64, err error)
	Frame(i int, b []byte) error
	// Up gives peer i its rank and a path, its first or after it was down.
	Up(i, rank int, f transport.Fabric, c transport.Conn)
	// Lose takes note that peer i is gone. If this side is patient, what waits for it waits for
	// its successor until Down. Operations on its Conn must have ended, or be about to.
	Lose(i int, err error)
	Down(i int, err error)
	// Left takes note that peer i has said that it leaves: that ends calls like Down.
	Left(i int, err error)
}

// Table issues tickets and tells how they ended.
type Table struct {
	Host
	counters *trace.Counters
	inbox    inbox
	outs     []*outbox // by peer
	region   mem.Region
	words    []atomic.Uint64 // id<<2 | state, at id % Window; in C memory
	keys     keys

	// The owner's.
	ends
	active []*Ticket // submitted and not ended, at id % Window
	found  int64     // when the events at hand were
	news   bool      // the result of a ticket has become known since News

	held atomic.Bool // see Held

	mu     sync.Mutex // held for a few instructions, never while waiting
	next   uint64
	free   []*Ticket
	recs   []record
	closed error
}

// newTable makes the Table of a node with n peers.
func newTable(n int, c *trace.Counters, h Host) (*Table, error) {
	r, err := mem.Map((Window + 1) * 8)
	if err != nil {
		return nil, fmt.Errorf("exchange: words of tickets: %w", err)
	}
	words := WordsIn(r, Window+1)
	return &Table{
		Host: h, counters: c,
		region: r,
		words:  words,
		next:   1,
		ends:   ends{freed: map[freed]func(){}, closed: map[transport.Conn]*closing{}},
		active: make([]*Ticket, Window),
		recs:   make([]record, Window),
		keys:   keys{paths: make([]*keyring, n), givenUp: &words[Window]},
	}, nil
}

// Found says when the events that the owner hands on from now on were found: it
// is what their stamps say. One look at the clock, at 25 to 50 ns, does for all
// that one Poll gives.
func (tb *Table) Found(now int64) { tb.found = now }

// Words is the memory of the ticket words: word i is that of the tickets whose
// number is i modulo Window. The one behind them counts how often registrations were given up that
// calls may count on: the next call that names the memory registers it again, and may wait.
func (tb *Table) Words() mem.Region { return tb.region }

// Begin issues a ticket, to be filled and then submitted or abandoned. It is
// safe from any goroutine, and so is Abandon.
func (tb *Table) Begin() (*Ticket, error) {
	now := trace.Now()
	tb.mu.Lock()
	defer tb.mu.Unlock()
	if tb.closed != nil {
		return nil, tb.closed
	}
	id := tb.next
	for tb.recs[id%Window].ticket != nil { // an older one is still under way: skip its place
		if id++; id-tb.next == Window {
			return nil, ErrFull
		}
	}
	tb.next = id + 1
	var t *Ticket
	if n := len(tb.free); n > 0 {
		t, tb.free = tb.free[n-1], tb.free[:n-1]
	} else {
		t = &Ticket{tb: tb}
	}
	t.id, t.rec = id, &tb.recs[id%Window]
	*t.rec = record{id: id, ticket: t}
	t.rec.stamps[trace.Start] = now
	tb.words[id%Window].Store(id<<2 | StateOpen)
	return t, nil
}

// fail makes the error of t known while its memory may still be written to.
func (tb *Table) fail(t *Ticket, err error) {
	if t.err != nil {
		return
	}
	t.err = err
	tb.mu.Lock()
	t.rec.err = err
	tb.mu.Unlock()
	tb.words[t.id%Window].Store(t.id<<2 | StateFailing)
	tb.news = true
}

// Abandon gives back a ticket that was not submitted. It is not for the owner: what the ticket names may not be in use any
// more then, which a Poll must not find half-way through a write there. Behind it, the memory is the caller's.
func (tb *Table) Abandon(t *Ticket) {
	if slices.ContainsFunc(t.regs, func(r *registration) bool { return r != nil }) {
		tb.Owned(func() { tb.keys.letGo(t.regs) })
	}
	tb.release(t)
}

// discard is Abandon for the owner.
func (tb *Table) discard(t *Ticket) {
	tb.keys.letGo(t.regs)
	tb.release(t)
}

// Forget drops what is cached for an allocation that is gone.
func (tb *Table) Forget(alloc uint64) { tb.keys.forget(alloc) }

// Pending reports whether Drain has something to do. Safe from any goroutine.
func (tb *Table) Pending() bool { return tb.inbox.waiting.Load() }

// Tickets is tb.
func (tb *Table) Tickets() *Table { return tb }

// Backlog reports whether back-pressure holds something up. For the owner.
func (tb *Table) Backlog() bool { return slices.ContainsFunc(tb.outs, (*outbox).stuck) }

// later has f run aside, and then has the owner call then, if that is not nil.
func (tb *Table) later(f, then func()) {
	tb.Aside(func() {
		f()
		if then != nil {
			tb.inbox.put(submission{then: then})
		}
	})
}

// adopt makes t known to the owner.
func (tb *Table) adopt(t *Ticket) {
	t.ops = 0
	tb.active[t.id%Window] = t
}

// settle ends t if nothing of it is under way any more: it takes t back and makes known how it
// ended.
func (tb *Table) settle(t *Ticket, err error) {
	if err != nil {
		tb.fail(t, err)
	}
	if t.open != 0 || t.ops != 0 {
		return
	}
	over, shared := tb.keys.letGo(t.regs)
	if tb.quiesce(t, over, (shared || t.exposed) && t.err != nil) { // nobody may write when t has ended
		return
	}
	t.rec.stamps[trace.Completed] = tb.found
	tb.active[t.id%Window] = nil
	tb.release(t)
	tb.news = true
}

// quiesce has t wait until the keys in over have ended. With conns it also waits until all Conns of lost peers have ended:
// these peers may know keys that t had and that have not ended. It reports whether there is something to wait for.
func (tb *Table) quiesce(t *Ticket, over []freed, conns bool) bool {
	lost := tb.ends.closed
	if !conns {
		lost = nil
	}
	if t.ops = len(over) + len(lost); t.ops == 0 {
		return false
	}
	then := func() {
		t.ops--
		tb.settle(t, nil)
	}
	for _, x := range lost {
		x.then = append(x.then, then)
	}
	for _, at := range over {
		tb.afterFreed(at, then)
	}
	return true
}

// News reports whether the result of a ticket has become known since the last call. For the
// owner.
func (tb *Table) News() bool {
	news := tb.news
	if news {
		tb.news = false
	}
	return news
}

// release takes back a ticket that the owner does not know, or no longer.
func (tb *Table) release(t *Ticket) {
	state := uint64(StateDone)
	if t.err != nil {
		state = StateFailed
	}
	if t.after != (Point{}) {
		tb.Passed(t.after)
		t.after = Point{}
	}
	t.behind = false
	t.push, t.pull, t.spans, t.dims, t.legs = t.push[:0], t.pull[:0], t.spans[:0], t.dims[:0], t.legs[:0]
	t.plan, t.on, t.only, t.err, t.request, t.open, t.torn, t.exposed, t.renewing = nil, "", nowhere, nil, nil, 0, false, false, false
	t.regs, t.rings = t.regs[:0], 0
	t.fails, t.why = false, ""
	tb.mu.Lock()
	defer tb.mu.Unlock()
	t.rec.ticket = nil
	tb.free = append(tb.free, t)
	// Inside the lock: after it, the place may belong to a later ticket.
	tb.words[t.id%Window].Store(t.id<<2 | state)
}

// ticket is the active ticket with number id, or nil. For the owner.
func (tb *Table) ticket(id uint64) *Ticket {
	if t := tb.active[id%Window]; t != nil && t.id == id {
		return t
	}
	return nil
}

// State is the state of a ticket; ok is false if it is no longer known.
func (tb *Table) State(id uint64) (state int, ok bool) {
	w := tb.words[id%Window].Load()
	return int(w & 3), w>>2 == id && id != 0
}

// Result is nil for a ticket that is done, its error if it failed, and
// ErrNoTicket if it is not known. Ask only when State is not StateOpen.
func (tb *Table) Result(id uint64) error {
	tb.mu.Lock()
	defer tb.mu.Unlock()
	r := &tb.recs[id%Window]
	if r.id != id || id == 0 {
		return fmt.Errorf("%w: %d", ErrNoTicket, id)
	}
	return r.err
}

// Stamps are the time stamps of a ticket that has ended.
func (tb *Table) Stamps(id uint64) (trace.Stamps, error) {
	state, ok := tb.State(id)
	tb.mu.Lock()
	defer tb.mu.Unlock()
	r := &tb.recs[id%Window]
	switch {
	case !ok || r.id != id:
		return trace.Stamps{}, fmt.Errorf("%w: %d (only the last %d are kept)", ErrNoTicket, id, Window)
	case state == StateOpen || state == StateFailing:
		return trace.Stamps{}, Shapef("exchange: ticket %d is under way: its trace is complete when wait has returned", id)
	}
	return r.stamps, nil
}

// Shut refuses further tickets, with err.
func (tb *Table) Shut(err error) {
	tb.mu.Lock()
	defer tb.mu.Unlock()
	tb.closed = err
}

// Free returns the memory of the words. Nobody may look at them any more.
func (tb *Table) Free() error { return mem.Unmap(tb.region) }

// ID is the number of the ticket.
func (t *Ticket) ID() uint64 { return t.id }

// Through makes t a push_pull on a channel.
func (t *Ticket) Through(channel string) { t.on = channel }

// AddPush adds a tensor to push, or to answer with. x.Dims is copied.
func (t *Ticket) AddPush(x Tensor) error {
	if err := t.add(&t.push, "push", x); err != nil {
		return err
	}
	t.spans = append(t.spans, x.Span)
	return nil
}

// AddPull adds a tensor to pull. x.Dims is copied.
func (t *Ticket) AddPull(x Tensor) error { return t.add(&t.pull, "pull", x) }

func (t *Ticket) add(to *[]Tensor, what string, x Tensor) error {
	n := len(*to)
	if n == wire.MaxTensors {
		return Shapef("exchange: more than %d %s tensors", wire.MaxTensors, what)
	}
	if err := x.check(what, n); err != nil {
		return err
	}
	if x.Dev != mem.CPU {
		if err := t.tb.Takes(x.Dev); err != nil {
			return fmt.Errorf("exchange: %s tensor %d %w", what, n, err)
		}
	}
	d := len(t.dims)
	t.dims = append(t.dims, x.Dims...)
	x.Dims = t.dims[d:len(t.dims):len(t.dims)]
	*to = append(*to, x)
	return nil
}

// source is the gather list of pushed tensor i. It stays in place until the
// ticket ends.
func (t *Ticket) source(i int) []mem.Span { return t.spans[i : i+1 : i+1] }

// submission hands work of callers to the owner.
type submission struct {
	ticket *Ticket
	then   func() // instead: what follows what a helper has done
}

// inbox is the queue of submissions. Its lock is held for a few instructions.
type inbox struct {
	mu      sync.Mutex
	in, out []submission
	waiting atomic.Bool
}

func (b *inbox) put(s submission) {
	b.mu.Lock()
	b.in = append(b.in, s)
	b.mu.Unlock()
	b.waiting.Store(true)
}

// take gives what has been put since the last take; valid until the next.
func (b *inbox) take() []submission {
	if !b.waiting.Load() {
		return nil
	}
	b.waiting.Store(false)
	b.mu.Lock()
	b.in, b.out = b.out[:0], b.in
	b.mu.Unlock()
	return b.out
}
