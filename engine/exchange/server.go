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

// ErrLeft says that a worker has left in good order, so that no batch will be
// complete any more.
var ErrLeft = errors.New("exchange: a worker has left, so no further batch can become complete")

// clientPlan is a plan of a worker, with what it means here.
type clientPlan struct {
	plan    *wire.Plan
	on      string // which of arrivals has its requests
	keys    []*receiver
	targets []target
	rows    []uint64 // bytes of a row of each pushed tensor; nil: they are not checked
	refusal string   // why its requests are refused; empty: they are not
}

// client is one worker of the rail.
type client struct {
	outbox
	index    int
	rank     int32
	fabric   transport.Fabric
	plans    []*clientPlan
	keys     map[uint64]*receiver
	pushed   int                    // of them, those of this run
	loans    []loan                 // whose request is not here
	answers  [classes]ring[*Ticket] // not wholly posted, by class
	replies  ring[[]byte]           // frames, likewise,
	owed     int                    // and their bytes
	count    int                    // requests that are not answered
	down     error                  // why it sends no more and nobody is waited for; nil: it does, or a successor is
	lost     error                  // why its last connection has ended
	recalled []uint64               // requests that were taken back, which the worker is still to be told
	runs     uint64                 // of its last Regroup
	life     atomic.Uint32          // how often it was lost
	needing  bool                   // a helper makes what its Need lacks
	calm     quiet                  // its earlier runs write nothing any more
}

// Server takes the requests of the workers of its rail and answers them.
type Server struct {
	*Table
	buffers  *Buffers
	elements Elements
	memory   Memory // of new buffers
	clients  []*client
	requests requests
	batch    []*Request           // scratch
	arrivals map[string]*Arrivals // by channel; batches have no name
	batches  *Arrivals
	unicasts *Arrivals
	able     atomic.Int32 // workers that have one, or may still send one
	ranked   atomic.Bool  // all clients have their ranks
	broken   error        // why not all workers are able, if so
	landings []*landing   // that are not released
	slots    uint64
	runs     uint64 // of the members of the rail, see Regroup
	partial  bool   // the last call of Batch took less than all
	noLoans  bool
	req      wire.Request
	resp     wire.Response

	mu    sync.Mutex // guards what follows
	fixed map[fixedKey]fixed
}

// fixed is the application's own memory for a key.
type fixed struct {
	region mem.Region
	used   bool // the key has been pushed: too late for another
}

type fixedKey struct {
	rank int32
	key  uint64
}

// NewServer makes a server of n workers, in the order of their groups. Each
// must be given its Conn before the first call of another kind.
func NewServer(n int, b *Buffers, c *trace.Counters, h Host) (*Server, error) {
	tb, err := newTable(n, c, h)
	if err != nil {
		return nil, err
	}
	s := &Server{Table: tb, buffers: b, elements: b.Holds(), memory: CPU{}, fixed: map[fixedKey]fixed{}}
	s.able.Store(int32(n))
	for i := range n {
		s.clients = append(s.clients, &client{index: i, keys: map[uint64]*receiver{}})
		tb.outs = append(tb.outs, &s.clients[i].outbox)
	}
	s.batches = s.newArrivals("")
	s.unicasts = s.newArrivals(onUnicasts)
	s.arrivals = map[string]*Arrivals{"": s.batches, onUnicasts: s.unicasts}
	return s, nil
}

// Own is memory of the application's for a key of a worker.
type Own struct {
	Rank   int32
	Key    uint64
	Region mem.Region
}

// Fix makes each the receive buffer of its key, or none if there is an error; it must
// come before the keys' first pushes. Once all workers are connected, the ranks must be
// theirs. Safe from any goroutine.
func (s *Server) Fix(all []Own) error {
	ranked := s.ranked.Load()
	s.mu.Lock()
	defer s.mu.Unlock()
	seen := map[fixedKey]bool{}
	for i, o := range all {
		k := fixedKey{o.Rank, o.Key}
		what := ""
		switch _, known := s.fixed[k]; {
		case ranked && !slices.ContainsFunc(s.clients, func(c *client) bool { return c.rank == o.Rank }):
			what = "this server has no such worker"
		case s.fixed[k].used:
			what = "the key has been pushed already (register before its first push)"
		case known || seen[k]:
			what = "the key has memory already (register each key of a worker once)"
		}
		if what != "" {
			return Shapef("exchange: register_recv_buffer: slice %d, key %d of worker %d: %s", i, o.Key, o.Rank, what)
		}
		seen[k] = true
	}
	for _, o := range all {
		s.fixed[fixedKey{o.Rank, o.Key}] = fixed{region: o.Region}
	}
	return nil
}

// RefuseLoans says whether all tensors are to be written into receive buffers. To be called before
// any request.
func (s *Server) RefuseLoans(all bool) { s.noLoans = all }

// ReceiveIn has receive buffers made of m. To be called before any request.
func (s *Server) ReceiveIn(m Memory) { s.memory = m }

// Respond answers the request of a handler with the pushed tensors of t, and registers those that
// are new. It may block. With an error t is gone, and the request, unless its worker is lost, can
// still be answered. Safe from any goroutine.
func (s *Server) Respond(handler uint64, t *Ticket) error {
	err := s.respond(handler, t)
	if err != nil {
		s.Abandon(t)
	}
	return err
}

// respond is Respond. With an error t is still the caller's.
func (s *Server) respond(handler uint64, t *Ticket) error {
	if err := s.keys.source(t, true); err != nil {
		return err
	}
	if err := s.behind(handler, t); err != nil {
		return err
	}
	r, lost, err := s.requests.claim(handler, t)
	if err != nil {
		return err
	}
	if lost {
		err := r.lost
		s.put(r)
		return err
	}
	r.stamps[trace.Respond-trace.Received] = t.rec.stamps[trace.Start]
	t.request, t.on = r, r.channel
	s.inbox.put(submission{ticket: t})
	return nil
}

// Workers is how many there are.
func (s *Server) Workers() int { return len(s.clients) }

// Ready says whether Batch would give a batch of at least so many requests, or an error. Safe
// from any goroutine.
func (s *Server) Ready(least int) bool {
	return int(s.batches.ready.Load()) >= least || int(s.able.Load()) < least
}

// Drain takes the answers that callers have submitted and posts what can be
// posted. For the owner, as everything below.
func (s *Server) Drain() {
	for _, m := range s.inbox.take() {
		if m.then != nil {
			m.then()
			continue
		}
		t := m.ticket
		c := t.request.client
		s.adopt(t)
		s.counters.Responses.Add(1)
		t.open = 1
		if c.conn == nil || t.request.life != c.life.Load() {
			s.drop(t, c.lost)
			continue
		}
		c.answers[t.class()].push(t)
	}
	for _, c := range s.clients {
		if c.held = false; !s.Quiet(c.index) {
			s.advance(c)
		}
	}
	s.tellHeld()
}

// waiting returns how many answers are not wholly posted.
func (c *client) waiting() (n int) {
	for i := range c.answers {
		n += c.answers[i].len()
	}
	return n
}

// Quiet reports whether all that worker i is to be told is posted.
func (s *Server) Quiet(i int) bool {
	c := s.clients[i]
	return c.empty() && c.waiting()+c.replies.len()+len(c.recalled) == 0
}

// put frees r.
func (s *Server) put(r *Request) {
	r.served()
	r.giveBack(s.buffers)
	s.requests.put(r)
}

// drop ends an answer that was not wholly posted.
func (s *Server) drop(t *Ticket, err error) {
	s.put(t.request)
	t.open = 0
	s.settle(t, err)
}

// advance posts answers to c until there is none or back-pressure.
func (s *Server) advance(c *client) {
	c.held = false
	for {
		if err := c.flush(); err != nil {
			s.Broken(c.index, err)
			return
		}
		if !c.empty() {
			return
		}
		if t := c.ticket; t != nil {
			c.answers[t.class()].pop()
			c.ticket = nil
			c.count--
			s.put(t.request)
			t.open = 0
			s.settle(t, nil)
		}
		switch {
		case len(c.recalled) != 0: // before the answer to a Regroup
			c.begin(nil)
			c.frame = wire.Append(c.frame, wire.TypeRecalled, (*wire.Seqs)(&c.recalled))
			c.send()
			c.recalled = c.recalled[:0]
		case c.replies.len() != 0:
			c.begin(nil)
			c.frame = append(c.frame, c.replies.pop()...)
			c.owed -= len(c.frame) + owedExtra
			c.send()
		case !s.proceed(c):
			return
		}
	}
}

// proceed puts the next answer into the outbox of c; false: there is none, or it must wait.
func (s *Server) proceed(c *client) bool {
	for i := range c.answers {
		if c.answers[i].len() != 0 && !s.holds(&c.outbox, c.answers[i].at(0)) {
			s.compose(c, c.answers[i].at(0))
			return true
		}
	}
	return false
}

func (s *Server) compose(c *client, t *Ticket) {
	r := t.request
	c.begin(t)
	if t.fails {
		c.frame = wire.Append(c.frame, wire.TypeRefused, &wire.Refused{Seq: r.seq, Text: t.why})
		c.send()
		c.stamp()
		return
	}
	s.resp.Seq = r.seq
	for i := range r.pull {
		if r.pull[i].bytes != 0 {
			c.write(i, r.pull[i].region, r.pull[i].off)
			s.counters.BytesOut.Add(r.pull[i].bytes)
		}
	}
	r.stamps[trace.Answered-trace.Received] = trace.Now()
	s.resp.Stamps = r.stamps
	c.frame = wire.AppendResponse(c.frame, &s.resp)
	c.send()
	c.stamp()
}

// Done takes the end of an operation.
func (s *Server) Done(user uint64, err error) {
	t := s.ticket(user)
	if t == nil { // a frame of no ticket
		return
	}
	t.ops--
	s.settle(t, err)
}

// Frame takes a frame of worker i. An error means that the worker does not
// keep to the protocol.
func (s *Server) Frame(i int, b []byte) error {
	c := s.clients[i]
	if c.conn == nil {
		return c.early()
	}
	switch wire.FrameType(b) {
	case wire.TypeRequest:
		return s.request(c, b)
	case wire.TypePlan:
		return s.plan(c, b)
	case wire.TypeNeed:
		return s.need(c, b)
	case wire.TypeRecall:
		return s.recall(c, b)
	case wire.TypeRegroup:
		return s.regroup(c, b)
	default:
		return fmt.Errorf("exchange: worker %d sent a frame of type %d, which only servers send or this version does not know", c.rank, wire.FrameType(b))
	}
}

func (s *Server) plan(c *client, b []byte) error {
	p, err := wire.Parse[wire.Plan](b, wire.TypePlan)
	if err != nil {
		return err
	}
	if p.Number >= wire.MaxPlans {
		return fmt.Errorf("exchange: worker %d sent plan %d, want at most %d", c.rank, p.Number, wire.MaxPlans-1)
	}
	if p.Unicast && p.Channel != "" {
		return fmt.Errorf("exchange: worker %d sent plan %d of unicasts on channel %q, want one of both", c.rank, p.Number, p.Channel)
	}
	cp := &clientPlan{plan: p, on: p.Channel, targets: make([]target, len(p.Pull))}
	if p.Unicast {
		cp.on = onUnicasts
	}
	fresh := 0
	for i := range p.Push {
		if c.fresh(p.Push[i].Key) {
			fresh++
		}
	}
	find := s.receiver
	if err := c.tooMany(fresh); err != nil {
		find, cp.refusal = s.look, err.Error()
	}
	for i := range p.Push {
		k := find(c, p.Push[i].Key)
		if k.channel != "" && k.channel != cp.on {
			return fmt.Errorf("exchange: worker %d sent plan %d with key %d, which is that of channel %q alone", c.rank, p.Number, k.key, k.channel)
		}
		cp.keys = append(cp.keys, k)
	}
	cp.fit(s.elements)
	for uint64(len(c.plans)) <= p.Number {
		c.plans = append(c.plans, nil)
	}
	c.plans[p.Number] = cp
	return nil
}

// publish has callers see what has arrived; of batches also how many requests one can have as things
// stand.
func (s *Server) publish(l *Arrivals) {
	l.publish()
	if l != s.batches {
		return
	}
	able := int32(len(s.clients))
	s.broken = nil
	for i, c := range s.clients {
		if l.queues[i].len() != 0 {
			continue
		}
		if c.down != nil {
			able--
			if s.broken == nil || c.down != ErrLeft {
				s.broken = c.down
			}
		}
	}
	if s.apart() {
		l.ready.Store(0)
	}
	s.able.Store(able)
}

// Batch gives the next batch: one request of each worker that has one, in the order of the
// groups; nil if those are fewer than least; an error if they will be as things stand. The
// requests stay until Deliver. The slice is valid until the next call.
func (s *Server) Batch(least int) ([]*Request, error) {
	if partial := least < len(s.clients); partial != s.partial {
		s.partial = partial
		s.publish(s.batches)
	}
	if int(s.batches.ready.Load()) < least {
		if int(s.able.Load()) < least {
			return nil, s.broken
		}
		return nil, nil
	}
	return s.heads(s.batches), nil
}

// Deliver takes what Batch or Take gave out of the queues.
func (s *Server) Deliver() {
	now := trace.Now()
	l := s.arrivals[s.batch[0].channel]
	for _, r := range s.batch {
		s.delivered(l.queues[r.client.index].pop(), now)
	}
	s.publish(l)
}

// delivered notes that the application is about to see r.
func (s *Server) delivered(r *Request, now int64) {
	r.stamps[trace.Delivered-trace.Received] = now
	r.served()
	s.buffers.hand(r.push)
	r.state.Store(reqDelivered)
}

// Down is Lose, and says that nobody waits for a successor of worker i, or no
// longer.
func (s *Server) Down(i int, err error) {
	c := s.clients[i]
	s.part(c, err)
	if c.down == nil {
		c.down = err
	}
	s.publish(s.batches)
}

// Left takes note that worker i sends no requests any more. It may still be answered.
func (s *Server) Left(i int, _ error) {
	s.clients[i].down = ErrLeft
	s.publish(s.batches)
}

// Close gives up all receive buffers. Over must have been called.
func (s *Server) Close() error {
	var errs []error
	for _, r := range s.requests.all {
		r.giveBack(s.buffers)
	}
	for _, c := range s.clients {
		c.dropLoans()
		for _, k := range c.keys {
			if k.id != 0 {
				errs = append(errs, s.buffers.drop(k.id))
			}
		}
		clear(c.keys)
	}
	return errors.Join(errs...)
}
