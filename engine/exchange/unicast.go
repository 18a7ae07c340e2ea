package exchange

// A unicast is a push_pull with one server alone. It is in no batch, so nothing pairs it with what other
// workers push. Only unicasts that push the same key keep their order. A unicast may have to wait for the
// credit of a key, or for its point. Then those behind it that push one of its keys wait too, and others pass.

// onUnicasts stands for the name of a channel in unicasts. The name of a channel is printable, so none has it.
const onUnicasts = "\x00"

// place is a server of a unicast, as its index plus 1; the zero value is none.
type place int

const nowhere place = 0

func (p place) index() int { return int(p) - 1 }

// To makes t a unicast to the server with an index, from 0 in the order of the groups. All pull tensors of t
// are for that server.
func (t *Ticket) To(server int) {
	t.on, t.only = onUnicasts, place(server+1)
}

// goesTo reports whether server i is to answer t.
func (t *Ticket) goesTo(i int) bool { return t.only == nowhere || t.only.index() == i }

// overtakeMost is how many waiting unicasts the others may pass, so that one scan takes a few
// microseconds. A unicast further back waits, whatever its keys.
const overtakeMost = 64

// unicast is proceed for unicasts.
func (w *Worker) unicast(s *server) bool {
	q := &s.queues[ofUnicasts]
	if q.len() == 0 {
		return false
	}
	w.scans++
	for i := range min(q.len(), overtakeMost) {
		t := q.at(i)
		if t.err != nil {
			q.remove(i)
			w.endLeg(t, s, t.err)
			return true
		}
		if !s.overtakes(t, w.scans) || !w.compose(s, t) {
			s.wait(t, w.scans)
			continue
		}
		s.turn = t
		return true
	}
	return false
}

// overtakes reports whether t pushes no key of those that have to wait in a scan.
func (s *server) overtakes(t *Ticket, scan uint64) bool {
	for _, k := range s.credits(t).keys {
		if k.passed == scan {
			return false
		}
	}
	return true
}

// wait notes that t has to wait in a scan.
func (s *server) wait(t *Ticket, scan uint64) {
	for _, k := range s.credits(t).keys {
		k.passed = scan
	}
}

// ahead returns the first ticket in the queue of t that t waits for, or t. One that was given back is in no queue.
func (s *server) ahead(t *Ticket) *Ticket {
	q := s.queue(t)
	if t.only == nowhere {
		if q.len() != 0 && q.at(0).turn < t.turn {
			return q.at(0)
		}
		return t
	}
	for i := range q.len() {
		o := q.at(i)
		for j := range o.push {
			for k := range t.push {
				if o.push[j].Key == t.push[k].Key {
					return o
				}
			}
		}
	}
	return t
}

// Unicasts gives one request of each worker that has sent one to this server alone; nil: none has;
// an error if none will as things stand. The requests stay until Deliver. The slice is valid until
// the next call.
func (s *Server) Unicasts() ([]*Request, error) {
	if s.unicasts.ready.Load() != 0 {
		return s.heads(s.unicasts), nil
	}
	if s.able.Load() == 0 {
		return nil, s.broken
	}
	return nil, nil
}

// HasUnicasts says whether Unicasts would give requests, or an error. Safe from any goroutine.
func (s *Server) HasUnicasts() bool { return s.unicasts.ready.Load() != 0 || s.able.Load() == 0 }
