package exchange

import (
	"cmp"
	"fmt"
	"slices"

	"fserver/engine/transport"
	"fserver/engine/wire"
)

// A peer that is lost may have a successor, or come back over another Conn. In
// between there is no path to it, and nothing that was agreed with it holds any
// more: plans, receive buffers, credit and keys are all made anew. A frame or
// write of the old Conn cannot come any more, since the owner has closed it, and
// no key that the old peer was given stays valid.

// maxSends bounds how often one push_pull is sent to one server and its
// successors, or is about to be: a request that makes servers die is not to take all of
// them along, and one that no Conn takes is not to end all of them.
const maxSends = 4

// Lose takes note that server i is gone: the push_pulls that wait for it end with
// err, or, if the worker is patient, wait for its successor until Down. Those
// whose request is out are sent again then: the answers that have come of them do
// not count. The operations on its Conn must have ended, or be about to.
func (w *Worker) Lose(i int, err error) {
	s := w.servers[i]
	switch {
	case !w.Patient:
		w.Down(i, err)
		return
	case s.conn == nil:
		return
	}
	turn := s.turn
	if s.empty() {
		turn = nil
	}
	w.part(s, s.conn)
	if turn != nil {
		if turn.legs[i].sends++; turn.legs[i].sends >= maxSends {
			s.unqueue(turn)
			w.endLeg(turn, s, err)
		}
	}
	var again []*Ticket
	for _, t := range w.active {
		if t == nil || t.legs[i].state != legPosted {
			continue
		}
		l := &t.legs[i]
		if l.sends == maxSends {
			w.endLeg(t, s, err)
			continue
		}
		*l = leg{keys: l.keys[:0], lends: l.lends[:0], sends: l.sends}
		again = append(again, t)
	}
	s.enqueue(again)
}

// enqueue puts push_pulls that are not posted any more into the queues of s, where they
// have their places by the order of the calls.
func (s *server) enqueue(again []*Ticket) {
	for q := range s.queues {
		for s.queues[q].len() != 0 {
			t := s.queues[q].pop()
			l := &t.legs[s.index]
			l.keys = l.keys[:0]
			again = append(again, t)
		}
	}
	slices.SortFunc(again, func(a, b *Ticket) int { return cmp.Compare(a.turn, b.turn) })
	for _, t := range again {
		s.queue(t).push(t)
	}
}

// spoil makes the first error of a push_pull known, and takes it back from the servers that have it:
// one that has not delivered it would pair it with what another worker pushes
// later. Drain tells them. At those that have not been sent it, it ends when its
// turn comes.
func (w *Worker) spoil(t *Ticket, err error) {
	if err == nil || t.err != nil {
		return
	}
	w.fail(t, err)
	for i, s := range w.servers {
		if s.conn != nil && t.legs[i].state == legPosted {
			s.takeback(t)
		}
	}
}

// takeback has s told that t is not to be answered. One that is in no batch pairs with none.
func (s *server) takeback(t *Ticket) {
	if t.class() == ofBatches {
		s.recall = append(s.recall, t.id)
	}
}

// ChannelOver fails what was asked of server i through a channel that both have closed. The server
// refuses what it has of it, and the next channel of that name gets none of the rest.
func (w *Worker) ChannelOver(i int, channel string) {
	for _, t := range w.active {
		if t != nil && t.on == channel && t.legs[i].state != legEnded {
			w.fail(t, errOver)
		}
	}
	w.advance(w.servers[i])
}

// Sends reports whether something is still to be sent to server i through a channel.
func (w *Worker) Sends(i int, channel string) bool {
	s := w.servers[i]
	q := &s.queues[ofChannels]
	for j := range q.len() {
		if t := q.at(j); s.conn != nil && t.on == channel && (t.err == nil || t == s.ticket) {
			return true
		}
	}
	return false
}

// Awaits reports whether server i has not answered a push_pull that is under way.
func (w *Worker) Awaits(id uint64, i int) bool {
	t := w.ticket(id)
	return t != nil && t.legs[i].state != legEnded
}

// recalled takes the word of s that it will not deliver push_pulls.
func (w *Worker) recalled(s *server, b []byte) error {
	seqs, err := wire.Parse[wire.Seqs](b, wire.TypeRecalled)
	if err != nil {
		return err
	}
	for _, id := range *seqs {
		t := w.ticket(id)
		if t == nil || t.legs[s.index].state != legPosted {
			return fmt.Errorf("exchange: server %d returned push_pull %d, which does not wait for its answer", s.rank, id)
		}
		if t.err != nil {
			w.endLeg(t, s, t.err)
		} else if err := w.takeBack(t, s); err != nil {
			return err
		}
	}
	w.advance(s) // somebody may have waited for the credit
	return nil
}

// part forgets what was agreed with a server that is gone. It may write until by has ended; nil:
// it does not.
func (w *Worker) part(s *server, by transport.Conn) {
	s.conn = nil
	s.drop()
	s.lends, s.asked, s.turn = false, nil, nil
	s.plans, s.recall, s.untold = nil, nil, 0
	s.enqueue(s.back)
	s.back = nil
	s.keys = map[uint64]*credit{}
	if s.ring != nil {
		w.keys.revoke(s.ring, w.lost(by, s.ring.calm))
	}
}

// Expect has push_pulls wait for server i, which was lost and is about to be Up again, or to be
// lost.
func (w *Worker) Expect(i int) { w.servers[i].down = nil }

// Up gives server i its rank and a path, its first or after it was down, and sends what has
// waited for it.
func (w *Worker) Up(i, rank int, f transport.Fabric, c transport.Conn) {
	s := w.servers[i]
	s.down, s.tell = nil, tellRuns
	s.rank, s.ring, s.conn = rank, w.keys.path(i, f), c
	s.lends, s.points = f.Caps().Lends, s.ring.points
	w.advance(s)
}

// Lose takes note that worker i is gone: its requests and their answers end with
// err, and no batch is complete until Up. Batch says so, or, if the server is
// patient, waits until Down. The operations on its Conn must have ended, or be
// about to.
func (s *Server) Lose(i int, err error) {
	if !s.Patient {
		s.Down(i, err)
		return
	}
	s.part(s.clients[i], err)
	s.publish(s.batches)
}

// recall drops the requests that c takes back, unless they have been delivered:
// then they are answered.
func (s *Server) recall(c *client, b []byte) error {
	seqs, err := wire.Parse[wire.Seqs](b, wire.TypeRecall)
	if err != nil {
		return err
	}
	slices.Sort(*seqs)
	queue := &s.batches.queues[c.index]
	for range queue.len() {
		r := queue.pop()
		if _, named := slices.BinarySearch(*seqs, r.seq); named {
			s.dismiss(c, r)
		} else {
			queue.push(r)
		}
	}
	s.publish(s.batches)
	s.advance(c)
	return nil
}

// dismiss drops a request that is complete and was taken back.
func (s *Server) dismiss(c *client, r *Request) {
	c.recalled = append(c.recalled, r.seq)
	c.count--
	s.put(r)
}

// part ends what a worker that is gone has asked for, and its keys. A buffer that
// the application still looks at stays mapped, and its successor gets another.
func (s *Server) part(c *client, err error) {
	if c.conn == nil {
		return
	}
	c.lost = err
	c.needing = false
	c.outbox.drop()
	for i := range c.answers {
		for c.answers[i].len() != 0 {
			s.drop(c.answers[i].pop(), err)
		}
	}
	c.replies = ring[[]byte]{}
	s.unlane(c)
	c.dropLoans()
	c.plans, c.recalled, c.count, c.owed = nil, nil, 0, 0
	s.requests.lose(c, s.buffers)
	c.life.Add(1) // behind that: nobody who sees it answers a request of the life before
	c.calm = s.ends.lost(c.conn, c.calm)
	for _, l := range s.landings {
		if l.client == c {
			s.release(l)
		}
	}
	s.sweepLandings()
	for _, k := range c.keys {
		s.retire(c.fabric, k)
	}
	c.pushed = 0
	c.conn = nil
}

// Up gives worker i a path, its first or after it was down.
func (s *Server) Up(i, rank int, f transport.Fabric, conn transport.Conn) {
	c := s.clients[i]
	c.down, c.runs = nil, 0
	if c.rank != int32(rank) { // callers read it, from the first time on
		c.rank = int32(rank)
	}
	c.fabric, c.conn = f, conn
	c.points = s.keys.path(i, f).points
	s.ranked.Store(!slices.ContainsFunc(s.clients, func(c *client) bool { return c.fabric == nil }))
	s.publish(s.batches)
}
