package exchange

import (
	"slices"
	"sync/atomic"

	"fserver/engine/mem"
	"fserver/engine/trace"
)

// What follows exchanges fixed tensors again and again through a channel. Their memory is
// registered once, by who makes a Carried; the owner does the rest, without waiting and without an
// allocation.

// Asking is the worker's side of such an exchange: each message is a push_pull.
type Asking struct {
	w    *Worker
	on   string
	own  bool // the keys of push are no others'
	push []Tensor
	pull []Tensor
	most []int64        // rows of push
	row  []uint64       // bytes of a row
	rows []atomic.Int64 // that are to be sent of them, at the time of Send
	id   uint64         // of the last push_pull
}

// Carry makes the worker's side of a channel. rows has the rows to send of each push tensor. own says that the keys of push
// are the channel's alone: servers receive them in tensors of the channel. It registers the memory of the tensors, which may
// block. Safe from any goroutine.
func (w *Worker) Carry(channel string, push, pull []Tensor, own bool, rows []atomic.Int64) (*Asking, error) {
	a := &Asking{w: w, on: channel, own: own, push: owned(push), pull: owned(pull), rows: rows}
	for i := range a.push {
		x := &a.push[i]
		if len(x.Dims) == 0 { // one row, which is sent or not
			x.Dims = []int64{1}
		}
		a.most = append(a.most, x.Dims[0])
		a.row = append(a.row, x.Span.Len/uint64(max(x.Dims[0], 1)))
	}
	t, err := w.Begin()
	if err != nil {
		return nil, err
	}
	defer w.Abandon(t)
	t.Through(channel)
	if err := a.fill(t); err != nil {
		return nil, err
	}
	return a, w.equip(t)
}

// owned is a copy of tensors with dims of its own.
func owned(tensors []Tensor) []Tensor {
	list := append([]Tensor(nil), tensors...)
	for i := range list {
		list[i].Dims = append([]int64(nil), list[i].Dims...)
	}
	return list
}

func (a *Asking) fill(t *Ticket) error {
	for i := range a.push {
		if err := t.AddPush(a.push[i]); err != nil {
			return err
		}
	}
	for i := range a.pull {
		if err := t.AddPull(a.pull[i]); err != nil {
			return err
		}
	}
	return nil
}

// Send starts a push_pull. False: there is no room for one.
func (a *Asking) Send() (bool, error) {
	for i := range a.push {
		x := &a.push[i]
		n := a.rows[i].Load()
		if n < 0 || n > a.most[i] {
			return false, Shapef("exchange: channel %q: %d rows of tensor %d are to be sent, but it has %d", a.on, n, i, a.most[i])
		}
		x.Dims[0], x.Span.Len = n, a.row[i]*uint64(n)
	}
	t, err := a.w.Begin()
	if err == ErrFull {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	t.Through(a.on)
	if err := a.fill(t); err != nil {
		a.w.discard(t)
		return false, err
	}
	a.id = t.id
	a.w.outfit(t)
	for i := range a.w.servers {
		first, end := a.w.share(t, i)
		_ = a.w.keys.acquire(i, t.pull[first:end], t.regs[first:end], false)
	}
	_ = a.w.keys.source(t, false) // what is not found, a helper registers: see keyed
	a.w.start(t)
	return true, nil
}

// Arrived reports whether the push_pull is done.
func (a *Asking) Arrived() (here, more bool, err error) {
	switch state, ok := a.w.State(a.id); {
	case ok && state == StateOpen:
		return false, false, nil
	case ok && state == StateDone:
		return true, false, nil
	}
	return false, false, a.w.Result(a.id)
}

// Lacks reports whether server i has not answered.
func (a *Asking) Lacks(i int) bool { return a.w.Awaits(a.id, i) }

// Over reports whether the tensors are not in use.
func (a *Asking) Over() bool { return a.w.rests(a.id) }

// Forget drops what is known of where servers receive tensors with keys of the channel's own.
func (a *Asking) Forget() {
	for _, s := range a.w.servers {
		for i := 0; a.own && i < len(a.push); i++ {
			delete(s.keys, a.push[i].Key)
		}
	}
}

// rests reports whether the memory of a ticket, or of none, is not in use any more.
func (tb *Table) rests(id uint64) bool {
	state, ok := tb.State(id)
	return !ok || state == StateDone || state == StateFailed
}

// Answering is the server's side: each message of the workers is a request, and this side's is its
// answer.
type Answering struct {
	s        *Server
	on       string
	arrivals *Arrivals
	into     [][]Tensor // by worker
	out      [][]Tensor // likewise
	counts   []atomic.Int64
	lands    []*landing // by worker; nil: messages are copied to into
	handlers []uint64   // of the requests that are not answered
	answered int        // of them
	ids      []uint64   // of the last answers, by worker
	err      error      // of a helper

	worker, tensor int    // where the copy of the next message is
	off            uint64 // likewise
}

// Carry makes the server's side of a channel. into are the tensors that the workers' go to, those of
// worker 0 first, and counts takes their rows; out are the answers. With lands, what a worker pushes through the channel with
// the key of one of into is received in that tensor. Otherwise the CPU copies it there. Nothing else has those keys, and no
// worker pushes with them before Carry has returned. It registers the memory, which may block. Safe from any goroutine.
func (s *Server) Carry(l *Arrivals, into, out []Tensor, lands bool, counts []atomic.Int64) (*Answering, error) {
	k := len(s.clients)
	if len(into)%k != 0 || len(out)%k != 0 {
		return nil, Shapef("exchange: channel: %d tensors from and %d to %d workers: give the same number for each worker, those of worker 0 first", len(into), len(out), k)
	}
	if gpu := slices.IndexFunc(into, func(x Tensor) bool { return x.Dev != mem.CPU }); gpu >= 0 && !lands {
		return nil, Shapef("exchange: channel %q: tensor %d is on %v, where the CPU copies nothing: have the messages land in it, or give one on the CPU", l.name, gpu, into[gpu].Dev)
	}
	a := &Answering{s: s, on: l.name, arrivals: l, counts: counts, ids: make([]uint64, k)}
	t, err := s.Begin()
	if err != nil {
		return nil, err
	}
	defer s.Abandon(t)
	for i := range k {
		a.into = append(a.into, owned(into[i*len(into)/k:(i+1)*len(into)/k]))
		a.out = append(a.out, owned(out[i*len(out)/k:(i+1)*len(out)/k]))
		for j := range a.out[i] {
			if err := t.AddPush(a.out[i][j]); err != nil {
				return nil, err
			}
		}
	}
	if err := s.keys.source(t, true); err != nil {
		return nil, err
	}
	if lands && len(into) != 0 {
		return a, a.land()
	}
	return a, nil
}

// land has all that comes received in the tensors of a.
func (a *Answering) land() (err error) {
	lands := make([]*landing, len(a.into))
	for i := range a.into {
		if lands[i], err = a.s.land(i, a.on, a.into[i]); err != nil {
			break
		}
	}
	a.s.Owned(func() {
		for i := 0; err == nil && i < len(lands); i++ {
			err = a.s.open(lands[i])
		}
		a.lands = lands
		if err != nil {
			a.Forget()
		}
	})
	return err
}

// landStep is how many bytes Arrived copies in one call, which takes about 100 µs.
const landStep = 1 << 20

// Arrived has the next message of all workers where it belongs, and reports whether it is there, or
// there is more to copy.
func (a *Answering) Arrived() (here, more bool, err error) {
	if a.err != nil { // of the last answer
		return false, false, a.err
	}
	reqs := a.s.Take(a.on)
	if reqs == nil {
		a.worker, a.tensor, a.off = 0, 0, 0
		return false, false, nil
	}
	for room := uint64(landStep); a.worker < len(reqs); {
		r, into := reqs[a.worker], a.into[a.worker]
		if a.tensor == 0 && a.off == 0 {
			if err := a.fits(a.worker, r); err != nil {
				return false, false, err
			}
		}
		if a.tensor == len(into) {
			a.worker, a.tensor = a.worker+1, 0
			continue
		}
		if from := r.push[a.tensor].Span; !a.landing(a.worker).has(r, a.tensor) {
			n := min(room, from.Len-a.off)
			if n != 0 {
				copy(into[a.tensor].Span.Bytes()[a.off:a.off+n], from.Bytes()[a.off:])
			}
			if a.off += n; a.off < from.Len {
				return false, true, nil // the rest in another pass
			}
			room -= n
		}
		a.counts[a.worker*len(into)+a.tensor].Store(r.push[a.tensor].Rows)
		a.tensor, a.off = a.tensor+1, 0
	}
	a.worker = 0
	a.handlers, a.answered = a.handlers[:0], 0
	now := trace.Now()
	for i, r := range reqs {
		a.handlers = append(a.handlers, r.handler)
		a.arrivals.queues[i].pop()
		r.stamps[trace.Delivered-trace.Received] = now
		r.served()
		r.state.Store(reqDelivered) // its buffers are not handed on: nobody but this has seen them
	}
	a.s.publish(a.arrivals)
	return true, false, nil
}

// landing is that of worker i, or nil.
func (a *Answering) landing(i int) *landing {
	if a.lands == nil {
		return nil
	}
	return a.lands[i]
}

// fits is why a request of worker i is not a message of this channel, or nil: its plan is its sender's.
func (a *Answering) fits(i int, r *Request) error {
	into := a.into[i]
	if len(r.push) != len(into) {
		return Shapef("exchange: channel %q: worker %d sent %d tensors, want %d: run the same version of fserver on both sides", a.on, r.client.rank, len(r.push), len(into))
	}
	for j := range r.push {
		v, x := &r.push[j], &into[j]
		rows := v.Rows
		if v.NDim == 0 {
			rows = 1
		}
		there := v.Span.Len == 0 || a.landing(i).has(r, j) || v.Dev == mem.CPU && x.Dev == mem.CPU
		if v.DType != x.DType || rows < 0 || rows > x.rows() || v.Span.Len > x.Span.Len || v.Span.Len != x.Span.Len/uint64(max(x.rows(), 1))*uint64(rows) || !there {
			return Shapef("exchange: channel %q: worker %d sent %d bytes in %d rows of dtype %d for tensor %d, which has %d in %d of %d: run the same version of fserver on both sides", a.on, r.client.rank, v.Span.Len, v.Rows, v.DType, j, x.Span.Len, x.rows(), x.DType)
		}
	}
	return nil
}

// Send answers the requests that have arrived. False: there is no room for all answers.
func (a *Answering) Send() (bool, error) {
	for ; a.answered < len(a.handlers); a.answered++ {
		if a.err != nil {
			return false, a.err
		}
		t, err := a.s.Begin()
		if err == ErrFull {
			return false, nil
		}
		if err != nil {
			return false, err
		}
		for j := range a.out[a.answered] {
			if err := t.AddPush(a.out[a.answered][j]); err != nil {
				a.s.discard(t)
				return false, err
			}
		}
		handler := a.handlers[a.answered]
		a.ids[a.answered] = t.id
		if a.s.keys.source(t, false) != nil { // a path that was not there at opening
			a.later(handler, t)
		} else if err := a.s.respond(handler, t); err != nil {
			a.s.discard(t)
			return false, err
		}
	}
	return true, nil
}

// later has a helper register what t sends, and then answer.
func (a *Answering) later(handler uint64, t *Ticket) {
	var err error
	a.s.later(func() { err = a.s.Respond(handler, t) }, func() { a.err = err })
}

// Lacks reports whether there is no request of worker i.
func (a *Answering) Lacks(i int) bool { return a.arrivals.Lacks(i) }

// Over reports whether the tensors are not in use. Those of messages that land are until the workers have closed their
// sides.
func (a *Answering) Over() bool {
	for _, id := range a.ids {
		if !a.s.rests(id) {
			return false
		}
	}
	for _, l := range a.lands {
		if l != nil && !l.over() {
			return false
		}
	}
	return true
}

// Forget ends what no worker was told of.
func (a *Answering) Forget() {
	for _, l := range a.lands {
		if l != nil {
			a.s.release(l)
		}
	}
	a.s.sweepLandings()
}
