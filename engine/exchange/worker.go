package exchange

import (
	"fmt"
	"slices"

	"fserver/engine/trace"
	"fserver/engine/transport"
	"fserver/engine/wire"
)

// credit is what a worker knows of one key at one server: where its tensor is
// received, and whether the last one has been answered.
type credit struct {
	region transport.Key
	cap    uint64
	holder uint64 // the push_pull that was written and is not answered: it must not be overwritten; 0: none
	asked  bool   // whether tensors of the key may be lent,
	lend   bool   // and they may
	passed uint64 // the scan in which a unicast with the key had to wait
}

// target is where a pull tensor was, the last time the server was told.
type target struct {
	region transport.Key
	off    uint64
}

// sent is a plan as one server knows it.
type sent struct {
	plan    *plan
	targets []target // of this server's share of plan.pull
}

// server is one server of the rail.
type server struct {
	outbox
	index  int
	rank   int
	ring   *keyring // of the Fabric of its path
	lends  bool     // the Fabric lends memory
	plans  []*sent  // by number
	keys   map[uint64]*credit
	queues [classes]ring[*Ticket] // those whose request is not wholly posted; see queue
	asked  *Ticket                // whose Need is not answered yet, or nil
	turn   *Ticket                // whose frames are in the outbox, while it is not empty, or nil
	down   error                  // why push_pulls cannot end there; nil: they can, or wait until they can
	recall []uint64               // push_pulls that have failed, which it is still to be told
	tell   uint8                  // the Regroup that is to be sent: tellNothing, tellRuns, tellBack;
	untold int                    // so many are not answered
	back   []*Ticket              // push_pulls that were given back
	pairs  bool                   // it makes batches of all workers, as its last Regroup says
	needs  []wire.Need            // scratch
	req    wire.Request
}

// The classes of tickets. Messages of channels go first, and wait for none of the others: a
// push_pull may wait for a device stream that waits for such a message. Unicasts keep no order but
// that of their keys; see unicast.go.
const (
	ofChannels = iota
	ofBatches
	ofUnicasts
	classes
)

func (t *Ticket) class() int {
	switch t.on {
	case "":
		return ofBatches
	case onUnicasts:
		return ofUnicasts
	}
	return ofChannels
}

// queue returns the queue in which t waits until its request is posted.
func (s *server) queue(t *Ticket) *ring[*Ticket] { return &s.queues[t.class()] }

// unqueue takes t out of its queue, where it is the first, unless it is a unicast.
func (s *server) unqueue(t *Ticket) {
	q := s.queue(t)
	for i := range q.len() {
		if q.at(i) == t {
			q.remove(i)
			return
		}
	}
}

// waiting returns how many tickets are in the queues.
func (s *server) waiting() (n int) {
	for i := range s.queues {
		n += s.queues[i].len()
	}
	return n
}

// Worker pushes to every server of its rail and takes their answers.
type Worker struct {
	*Table
	servers []*server
	plans   map[uint64]*plan    // by signature
	numbers [2][planShare]*plan // by class, which has its share of the numbers
	planned [2]uint64           // plans so far, likewise
	scans   uint64              // looks for a unicast that can go
	turns   uint64              // push_pulls so far
	runs    uint64              // of the members of the rail, see Regroup
	era     uint64              // how often what servers have not delivered was to be given back
	gone    error               // the loss that this was for, the last time
	resp    wire.Response
}

// NewWorker makes a worker of n servers. Each must be given its Conn before the
// first submission.
func NewWorker(n int, c *trace.Counters, h Host) (*Worker, error) {
	tb, err := newTable(n, c, h)
	if err != nil {
		return nil, err
	}
	w := &Worker{Table: tb, servers: make([]*server, n), plans: map[uint64]*plan{}}
	for i := range w.servers {
		w.servers[i] = &server{index: i, keys: map[uint64]*credit{}}
		tb.outs = append(tb.outs, &w.servers[i].outbox)
	}
	return w, nil
}

// Submit checks t, registers memory that is new, and hands t to the owner. It may block, and with
// an error t is gone. Safe from any goroutine.
func (w *Worker) Submit(t *Ticket) error {
	err := w.equip(t)
	if err == nil && t.behind {
		first, end := 0, len(w.servers)
		if t.only != nowhere {
			first, end = t.only.index(), t.only.index()+1
		}
		err = w.point(t, first, end)
	}
	if err != nil {
		w.Abandon(t)
		return err
	}
	w.inbox.put(submission{ticket: t})
	return nil
}

// equip checks t, and gives it its legs and keys. It may block.
func (w *Worker) equip(t *Ticket) error {
	if err := w.check(t); err != nil {
		return err
	}
	w.outfit(t)
	for i := range w.servers {
		if err := w.acquire(t, i); err != nil {
			return err
		}
	}
	return w.keys.source(t, true)
}

// outfit gives t what it has of each server.
func (w *Worker) outfit(t *Ticket) {
	t.legs = slices.Grow(t.legs, len(w.servers))[:len(w.servers)] // keeps the memory of the legs' keys
	t.regs = slices.Grow(t.regs[:0], len(t.pull))[:len(t.pull)]
	t.open = len(w.servers)
	if t.only != nowhere {
		t.open = 1
	}
}

func (w *Worker) check(t *Ticket) error {
	if len(t.push)+len(t.pull) == 0 {
		return Shapef("exchange: push_pull of no tensors at all")
	}
	servers := len(w.servers)
	if t.class() == ofUnicasts {
		if i := t.only.index(); i < 0 || i >= servers {
			return Shapef("exchange: push_pull with server %d: there are %d (give 0 to %d)", i, servers, servers-1)
		}
		servers = 1
	}
	if len(t.pull)%servers != 0 {
		return Shapef("exchange: %d pull tensors for %d servers: give the same number for each server, those of server 0 first", len(t.pull), len(w.servers))
	}
	if n := t.planBytes(len(t.pull) / servers); n > transport.MaxFrame {
		return Shapef("exchange: push_pull: the description of %d push and %d pull tensors takes %d bytes, and a frame has at most %d (push fewer tensors in one call, or of fewer dimensions)", len(t.push), len(t.pull), n, transport.MaxFrame)
	}
	return nil
}

// acquire gives the pull tensors of t that server i is to write their keys. It may block.
func (w *Worker) acquire(t *Ticket, i int) error {
	first, end := w.share(t, i)
	return w.keys.acquire(i, t.pull[first:end], t.regs[first:end], true)
}

// share returns which pull tensors of t server i is to write.
func (w *Worker) share(t *Ticket, i int) (first, end int) {
	if t.only != nowhere {
		if i != t.only.index() {
			return 0, 0
		}
		return 0, len(t.pull)
	}
	n := len(t.pull) / len(w.servers)
	return i * n, (i + 1) * n
}

// Drain takes what callers have submitted and posts what can be posted. For
// the owner, as everything below.
func (w *Worker) Drain() {
	for _, s := range w.inbox.take() {
		if s.then != nil {
			s.then()
		} else {
			w.start(s.ticket)
		}
	}
	for _, s := range w.servers {
		if s.held = false; s.waiting() != 0 || !s.empty() || len(s.recall)+len(s.back) != 0 || s.tell != tellNothing {
			w.advance(s)
		}
	}
	w.tellHeld()
}

func (w *Worker) start(t *Ticket) {
	w.adopt(t)
	w.turns++
	t.turn = w.turns
	w.counters.PushPulls.Add(1)
	err := w.missing(t)
	if err == nil {
		err = w.assign(t)
	}
	for i, s := range w.servers {
		t.legs[i] = leg{keys: t.legs[i].keys[:0], lends: t.legs[i].lends[:0]}
		switch {
		case !t.goesTo(i):
			t.legs[i].state = legEnded
		case err != nil:
			w.endLeg(t, s, err)
		default:
			s.queue(t).push(t)
		}
	}
}

// missing is why t cannot complete now, or nil. A push_pull that cannot is sent
// to nobody: a server that has it would pair it with what another worker pushes
// later.
func (w *Worker) missing(t *Ticket) error {
	for i, s := range w.servers {
		if s.down != nil && t.goesTo(i) {
			return s.down
		}
	}
	return nil
}

// assign gives t its plan.
func (w *Worker) assign(t *Ticket) error {
	h := t.signature()
	p := w.plans[h]
	if p == nil || !p.fits(t) {
		var err error
		if p, err = w.newPlan(h, t); err != nil {
			return err
		}
	}
	t.plan = p
	return nil
}

func (w *Worker) newPlan(h uint64, t *Ticket) (*plan, error) {
	seen := make(map[uint64]int, len(t.push))
	p := &plan{hash: h, on: t.on, push: make([]wire.PlanTensor, len(t.push)), pull: make([]wire.PlanPull, len(t.pull))}
	for i := range t.push {
		x := &t.push[i]
		if j, dup := seen[x.Key]; dup {
			return nil, Shapef("exchange: push tensors %d and %d have the same key %d (each needs its own receive buffer)", j, i, x.Key)
		}
		seen[x.Key] = i
		p.push[i] = wire.PlanTensor{Key: x.Key, DType: x.DType, NDim: len(x.Dims), Tail: append([]int64(nil), x.tail()...)}
	}
	for i := range t.pull {
		p.pull[i] = wire.PlanPull{Key: t.pull[i].Key, DType: t.pull[i].DType}
	}
	w.number(p, t.class())
	w.plans[h] = p
	return p, nil
}

// planShare is how many plans are known at a time: batches and unicasts have the numbers below it,
// channels those above. Plans of channels pass requests with other plans, so none may take
// the number of one of the others.
const planShare = wire.MaxPlans / 2

// number gives p a number of its class, and forgets the plan that had it.
func (w *Worker) number(p *plan, class int) {
	class = min(class, ofBatches)
	at := w.planned[class] % planShare
	w.planned[class]++
	if old := w.numbers[class][at]; old != nil && w.plans[old.hash] == old {
		delete(w.plans, old.hash)
	}
	w.numbers[class][at] = p
	p.number = at + planShare*uint64(ofBatches-class)
}

// endLeg ends the part of t that s has, with an error or without.
func (w *Worker) endLeg(t *Ticket, s *server, err error) {
	l := &t.legs[s.index]
	if l.state == legEnded {
		return
	}
	if l.state == legPosted {
		for _, k := range l.keys {
			if k.holder == t.id {
				k.holder = 0
			}
		}
	}
	l.state = legEnded
	t.open--
	w.spoil(t, err)
	w.settle(t, nil) // t may be another's from here on
}

// Done takes the end of an operation.
func (w *Worker) Done(user uint64, err error) {
	t := w.ticket(user)
	if t == nil { // a frame of no ticket
		return
	}
	if w.Patient {
		err = nil // the end of the Conn follows, and decides
	}
	t.ops--
	w.spoil(t, err)
	w.settle(t, nil)
}

// Frame takes a frame of server i. An error means that the server does not
// keep to the protocol.
func (w *Worker) Frame(i int, b []byte) error {
	s := w.servers[i]
	switch wire.FrameType(b) {
	case wire.TypeResponse:
		if err := wire.ParseResponse(b, &w.resp); err != nil {
			return err
		}
		t := w.ticket(w.resp.Seq)
		if t == nil || t.legs[i].state != legPosted {
			return fmt.Errorf("exchange: server %d answered push_pull %d, which does not wait for its answer", s.rank, w.resp.Seq)
		}
		copy(t.rec.stamps[trace.Received:trace.Arrived], w.resp.Stamps[:])
		w.answered(s, t)
		return nil
	case wire.TypeBuffers:
		v, err := wire.Parse[wire.Buffers](b, wire.TypeBuffers)
		if err != nil {
			return err
		}
		t := s.asked
		if t == nil {
			return fmt.Errorf("exchange: server %d sent %d receive buffers that were not requested", s.rank, len(v.List))
		}
		s.asked = nil
		return w.granted(s, t, v)
	case wire.TypeRecalled:
		return w.recalled(s, b)
	case wire.TypeRefused:
		return w.refused(s, b)
	case wire.TypeRegroup:
		return w.regrouped(s, b)
	default:
		return fmt.Errorf("exchange: server %d sent a frame of type %d, which only workers send or this version does not know", s.rank, wire.FrameType(b))
	}
}

// disown forgets the keys of a Need that was refused and of which nothing has come.
func (s *server) disown() {
	for _, n := range s.needs {
		if k := s.keys[n.Key]; k != nil && *k == (credit{passed: k.passed}) {
			delete(s.keys, n.Key)
		}
	}
	for i := range s.queues { // some may have looked one of them up
		for j := range s.queues[i].len() {
			l := &s.queues[i].at(j).legs[s.index]
			l.keys = l.keys[:0]
		}
	}
}

// granted takes the answer to the Need of t, which is in its queue.
func (w *Worker) granted(s *server, t *Ticket, v *wire.Buffers) error {
	if v.Reason != "" {
		s.unqueue(t)
		s.disown()
		w.endLeg(t, s, Shapef("exchange: server %d has no receive buffer: %s", s.rank, v.Reason))
		w.advance(s)
		return nil
	}
	for i := range v.List {
		b := &v.List[i]
		k := s.keys[b.Key]
		if k == nil && slices.ContainsFunc(s.needs, func(n wire.Need) bool { return n.Key == b.Key }) {
			continue // its channel is over
		}
		if k == nil {
			return fmt.Errorf("exchange: server %d sent a receive buffer for key %d, which was not requested", s.rank, b.Key)
		}
		if b.Lend {
			k.lend = true
			continue
		}
		if k.holder != 0 {
			return fmt.Errorf("exchange: server %d replaced the receive buffer of key %d while a push uses it", s.rank, b.Key)
		}
		k.region, k.cap = transportKey(b.Region), b.Cap
	}
	for _, n := range s.needs {
		k := s.keys[n.Key]
		if k == nil {
			continue
		}
		k.asked = k.asked || n.Lend
		if !(n.Lend && k.lend) && k.cap < n.Bytes {
			return fmt.Errorf("exchange: server %d sent a receive buffer of %d bytes for key %d, want at least %d", s.rank, k.cap, n.Key, n.Bytes)
		}
	}
	w.advance(s)
	return nil
}

// answered ends the leg of t: all that s wrote is here.
func (w *Worker) answered(s *server, t *Ticket) {
	for i, end := w.share(t, s.index); i < end; i++ {
		w.counters.BytesIn.Add(t.pull[i].Span.Len)
	}
	t.rec.stamps[trace.Arrived] = w.found
	w.endLeg(t, s, nil)
	if s.waiting() != 0 {
		w.advance(s) // somebody may have waited for the credit
	}
}

// Left is Down for a server that has said that it leaves. That frame came after all its writes, so
// what is registered next does not wait until its Conn is closed.
func (w *Worker) Left(i int, err error) {
	if s := w.servers[i]; s.conn != nil {
		w.part(s, nil)
	}
	w.Down(i, err)
}

// Down ends everything that waits for server i, or for its successor, with err.
// The operations on its Conn must have ended, or be about to.
func (w *Worker) Down(i int, err error) {
	s := w.servers[i]
	if s.down != nil {
		return
	}
	if s.conn != nil {
		w.part(s, s.conn)
	}
	s.down = err
	s.back = nil
	clear(s.queues[:])
	for _, t := range w.active {
		if t != nil {
			w.endLeg(t, s, err)
		}
	}
}
