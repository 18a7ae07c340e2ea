package exchange

import (
	"fmt"

	"fserver/engine/mem"
	"fserver/engine/trace"
	"fserver/engine/wire"
)

// advance posts to s as much as credit, buffers and back-pressure allow. The
// order of submission is kept in each queue: a request that waits holds up those
// behind it, because the server pairs the n-th requests of its workers.
func (w *Worker) advance(s *server) {
	s.held = false
	if s.conn == nil {
		return
	}
	for {
		if err := s.flush(); err != nil {
			w.Broken(s.index, err)
			return
		}
		if !s.empty() {
			return
		}
		if t := s.ticket; t != nil { // its request is out
			t.legs[s.index].state = legPosted
			t.legs[s.index].sends++
			s.unqueue(t)
			s.ticket = nil
			if t.err != nil {
				s.takeback(t)
			}
		}
		switch {
		case len(s.recall) != 0: // behind the requests that it names
			s.turn = nil
			s.begin(nil)
			s.ordered()
			s.frame = wire.Append(s.frame, wire.TypeRecall, (*wire.Seqs)(&s.recall))
			s.send()
			s.recall = s.recall[:0]
		case s.tell != tellNothing:
			s.turn = nil
			s.begin(nil)
			s.ordered()
			s.frame = wire.Append(s.frame, wire.TypeRegroup, &wire.Regroup{Runs: w.runs, Back: s.tell == tellBack})
			s.send()
			s.tell = tellNothing
			s.untold++
		case s.asked != nil || s.untold != 0:
			return
		case len(s.back) != 0:
			s.enqueue(s.back)
			s.back = nil
		case !w.proceed(s):
			return
		}
	}
}

// proceed ends the first ticket of a queue, if it has failed, or puts into the outbox of s what
// it needs next; false if all must wait.
func (w *Worker) proceed(s *server) bool {
	for i := range s.queues[:ofUnicasts] {
		if s.queues[i].len() == 0 {
			continue
		}
		t := s.queues[i].at(0)
		if t.err != nil {
			s.queues[i].pop()
			w.endLeg(t, s, t.err)
			return true
		}
		if t.torn && !w.mend(s, t) {
			continue
		}
		if t.err != nil { // mend has ended it
			return true
		}
		if w.compose(s, t) {
			s.turn = t
			return true
		}
	}
	return w.unicast(s)
}

// compose puts into the outbox of s what t needs next; false if t must wait.
func (w *Worker) compose(s *server, t *Ticket) bool {
	if !w.keyed(t, s) {
		return false
	}
	l := s.credits(t)
	s.needs, l.lends = s.needs[:0], l.lends[:0]
	for i, k := range l.keys {
		x := &t.push[i]
		lend := s.lends && (k.lend && s.conn.Lends(x.Span) || !k.asked && mem.SharedAt(x.Span) != nil)
		l.lends = append(l.lends, lend)
		if lend && k.lend { // it touches no buffer
			continue
		}
		if k.holder != 0 {
			return false
		}
		if lend || x.Span.Len > k.cap {
			// A unicast's CPU tensors are received on the CPU: its server reads in one of them what the others are.
			host := t.class() == ofChannels || t.class() == ofUnicasts && x.Dev == mem.CPU
			s.needs = append(s.needs, wire.Need{Key: x.Key, Bytes: x.Span.Len, Lend: lend, Host: host})
		}
	}
	if len(s.needs) != 0 {
		s.begin(nil)
		s.frame = wire.Append(s.frame, wire.TypeNeed, (*wire.Needs)(&s.needs))
		s.send()
		s.asked = t
		return true
	}
	known := w.know(s, t)
	if known == nil {
		return true
	}
	if w.holds(&s.outbox, t) {
		return false
	}
	w.request(s, t, l, known)
	return true
}

// credits gives t what is known of the keys that it pushes to s.
func (s *server) credits(t *Ticket) *leg {
	l := &t.legs[s.index]
	if len(l.keys) != 0 {
		return l
	}
	for i := range t.push {
		k := s.keys[t.push[i].Key]
		if k == nil {
			k = &credit{}
			s.keys[t.push[i].Key] = k
		}
		l.keys = append(l.keys, k)
	}
	return l
}

// keyed reports whether the pull tensors that s is to write, and what it is sent, have keys that
// are good for it. If not, it has a helper make them anew: s was lost, or had no path, when they
// were made. No answer is asked for before the lost Conn has ended, also if s is back over another
// Fabric: its last writes would come on top of the answer.
func (w *Worker) keyed(t *Ticket, s *server) bool {
	first, end := w.share(t, s.index)
	good := !t.renewing && (!s.ring.local || s.ring.at < t.rings)
	for i := first; i < end && good; i++ {
		r := t.regs[i]
		good = t.pull[i].Span.Len == 0 || r != nil && r.ring == s.ring && r.era == s.ring.era
	}
	if good || t.renewing {
		return good
	}
	t.renewing, t.exposed = true, true
	t.ops++
	calm := w.keys.calm(t.regs[first:end])
	w.keys.letGo(t.regs[first:end])
	var err error
	w.later(func() {
		if err = calm.wait(); err != nil {
			err = fmt.Errorf("exchange: push_pull: %w", err)
			return
		}
		t.exposed = false
		if err = w.acquire(t, s.index); err == nil {
			err = w.keys.source(t, true)
		}
	}, func() {
		t.renewing = false
		w.spoil(t, err)
		w.Done(t.id, nil)
	})
	return false
}

// know gives the plan of t as s knows it, or nil after it has put the plan into
// the outbox.
func (w *Worker) know(s *server, t *Ticket) *sent {
	n := t.plan.number
	if n < uint64(len(s.plans)) && s.plans[n].plan == t.plan {
		return s.plans[n]
	}
	first, end := w.share(t, s.index)
	k := &sent{plan: t.plan, targets: make([]target, end-first)}
	s.begin(nil)
	if t.class() != ofChannels {
		s.ordered()
	}
	of := wire.Plan{Number: n, Channel: t.on, Push: t.plan.push, Pull: t.plan.pull[first:end]}
	if t.class() == ofUnicasts {
		of.Channel, of.Unicast = "", true
	}
	s.frame = wire.Append(s.frame, wire.TypePlan, &of)
	s.send()
	for uint64(len(s.plans)) <= n {
		s.plans = append(s.plans, k)
	}
	s.plans[n] = k
	return nil
}

func (w *Worker) request(s *server, t *Ticket, l *leg, known *sent) {
	s.begin(t)
	q := &s.req
	q.Seq, q.Plan = t.id, t.plan.number
	q.Push, q.Pull = q.Push[:0], q.Pull[:0]
	for i := range t.push {
		x := &t.push[i]
		q.Push = append(q.Push, wire.Pushed{Rows: x.rows(), Bytes: x.Span.Len, Lent: l.lends[i]})
		if l.lends[i] {
			s.lend(i)
			w.counters.Loans.Add(1)
			continue
		}
		l.keys[i].holder = t.id
		if x.Span.Len != 0 {
			s.write(i, l.keys[i].region, 0)
			w.counters.BytesOut.Add(x.Span.Len)
		}
	}
	l.era = w.era
	first, _ := w.share(t, s.index)
	for j := range known.targets {
		i := first + j
		x := &t.pull[i]
		p := wire.Target{Bytes: x.Span.Len}
		if x.Span.Len != 0 {
			at := target{t.regs[i].key, uint64(x.Span.Addr - x.Base.Addr)}
			if at != known.targets[j] {
				known.targets[j] = at
				p.Changed, p.Region, p.Off = true, wireKey(at.region), at.off
			}
		}
		q.Pull = append(q.Pull, p)
	}
	t.rec.stamps[trace.Posted] = trace.Now()
	s.frame = wire.AppendRequest(s.frame, q)
	s.send()
	s.stamp()
}
