package exchange

import (
	"fmt"

	"fserver/engine/wire"
)

// A server pairs the n-th requests of its workers, and each server of a rail must pair
// the same ones. A worker that dies may have been heard by one server and not, or not
// yet, by another: the first has delivered a batch that the second can never have. The
// requests of the other workers in that batch would then be paired with the first of
// the successor at the second server, and one call later at the first.
//
// The loss of a server does the same harm. It may have answered one worker and not the
// other, which then sends the call again: the successor would pair that with the next call of
// the first.
//
// So a change among the workers of a rail begins an era, and so does the loss of a server,
// where there are several of both. Each worker tells its servers, by a Regroup with a number
// for the runs that it knows. A server then gives back what it has of that worker and has not
// delivered, answers, and makes no batch before all workers know the runs that it knows. The
// worker sends it nothing new before that answer. What no server has delivered is sent again,
// to all. A push_pull that some have delivered and others have not fails: there is nobody to
// pair it with.
//
// The successor of a server begins no era. It gets all push_pulls of the one that began with
// the loss, as the other servers do. Only the runs that all know have changed.
//
// A server whose application takes batches of less than all pairs nothing, and gives
// nothing back.

// The values of server.tell.
const (
	tellNothing = iota
	tellRuns    // which runs the worker knows
	tellBack    // and the server is to give back what it has not delivered
)

// Regroup takes note of the runs of the members of the rail, of which runs is a number. With
// back it begins an era, because of err: a loss, or nil at the start.
func (w *Worker) Regroup(runs uint64, back bool, err error) {
	if back && err != nil {
		w.gone = err
	}
	if runs == w.runs {
		return
	}
	w.runs = runs
	for _, s := range w.servers {
		if s.conn != nil {
			s.tell = max(s.tell, tellRuns)
			if back {
				s.tell = tellBack
			}
		}
	}
	if back {
		w.beginEra()
	}
	for _, s := range w.servers {
		if s.conn != nil {
			w.advance(s)
		}
	}
}

// beginEra marks the push_pulls that a server may have delivered.
func (w *Worker) beginEra() {
	w.era++
	for _, t := range w.active {
		if t != nil && t.class() == ofBatches {
			t.torn = t.torn || w.sentOf(t)
		}
	}
}

// sentOf reports whether a server may have been sent t.
func (w *Worker) sentOf(t *Ticket) bool {
	for i, s := range w.servers {
		if t.legs[i].state != legQueued || s.ticket == t {
			return true
		}
	}
	return false
}

// settled reports whether s has said what it has delivered of the eras before.
func (s *server) settled() bool { return s.tell == tellNothing && s.untold == 0 }

// regrouped takes the answer to a Regroup: what s has not given back by now is delivered.
func (w *Worker) regrouped(s *server, b []byte) error {
	v, err := wire.Parse[wire.Regroup](b, wire.TypeRegroup)
	if err != nil {
		return err
	}
	if s.untold == 0 {
		return fmt.Errorf("exchange: server %d answered a Regroup message that was not sent to it", s.rank)
	}
	s.untold--
	s.pairs = v.Runs != 0
	for _, o := range w.servers { // they may have waited for this
		w.advance(o)
	}
	return nil
}

// takeBack takes a push_pull back that s has not delivered.
func (w *Worker) takeBack(t *Ticket, s *server) error {
	l := &t.legs[s.index]
	if l.era >= w.era {
		return fmt.Errorf("exchange: server %d returned push_pull %d, but no member was lost since it was sent", s.rank, t.id)
	}
	for _, k := range l.keys {
		if k.holder == t.id {
			k.holder = 0
		}
	}
	*l = leg{keys: l.keys[:0], lends: l.lends[:0], sends: l.sends - 1}
	s.back = append(s.back, t)
	return nil
}

// mend decides what becomes of a push_pull that s has not, and that other servers may have
// delivered before somebody was lost. It returns false while that is not known. Else the
// push_pull has failed, or can be sent.
func (w *Worker) mend(s *server, t *Ticket) bool {
	delivered := false
	for i, o := range w.servers {
		state := t.legs[i].state
		if o.ticket == t || state == legPosted && !o.settled() {
			return false
		}
		delivered = delivered || state != legQueued
	}
	switch {
	case !delivered:
		t.torn = false
	case s.pairs:
		w.fail(t, fmt.Errorf("exchange: another server paired this push_pull with requests of other workers, and server %d cannot pair it with the same ones (call push_pull again): %w", s.rank, w.gone))
	default: // s takes it by itself
		t.torn = false
	}
	return true
}

// Regroup holds batches back until all workers know the same runs of the members of the rail
// as this server: runs is a number for these.
func (s *Server) Regroup(runs uint64) {
	s.runs = runs
	s.publish(s.batches)
}

// apart reports whether a worker and this server know of different runs.
func (s *Server) apart() bool {
	if s.partial {
		return false
	}
	for _, c := range s.clients {
		if c.conn != nil && c.down == nil && c.runs != s.runs {
			return true
		}
	}
	return false
}

// regroup takes the runs that c knows. If c wants it back, it gives back what has come of c
// for batches and was not delivered.
func (s *Server) regroup(c *client, b []byte) error {
	v, err := wire.Parse[wire.Regroup](b, wire.TypeRegroup)
	if err != nil {
		return err
	}
	c.runs = v.Runs
	switch {
	case s.partial:
		v.Runs = 0
	case v.Back:
		for q := &s.batches.queues[c.index]; q.len() != 0; {
			s.dismiss(c, q.pop())
		}
	}
	s.publish(s.batches)
	return s.reply(c, wire.Append(nil, wire.TypeRegroup, v))
}
