package cudaipc

import (
	"fmt"
	"time"

	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// The limits of what one queue holds. A peer that sends more loses its Conn. A peer that runs
// exchange stays far below: it has at most exchange.Window (4096) requests that are not
// answered, each with one frame, and nobody else sends frames behind writes of GPU memory.
const (
	heldMost  = 1 << 13
	heldBytes = 64 << 20
)

// held is a frame or a loan that has arrived before the writes in front of it have landed.
type held struct {
	ev     transport.Event
	number uint64 // of the peer's mapped write that must have landed
	landed uint64 // of the copy from a shadow that must have ended
	data   []byte // the bytes of the frame; the buffer is used again
	poll   uint64 // the Poll that gave data to the user, who may read it until the next
}

// A queue is a ring of held events, in the order of their arrival.
type queue struct {
	list     []held
	first, n int
	bytes    int
}

func (q *queue) at(i int) *held { return &q.list[(q.first+i)%len(q.list)] }

// push holds an event back.
func (q *queue) push(e *transport.Event, number, landed, poll uint64) error {
	if q.n == heldMost || q.n > 0 && q.bytes+len(e.Data) > heldBytes {
		return fmt.Errorf("the peer sent more than %d frames, or %d bytes, behind writes that have not landed", heldMost, heldBytes)
	}
	if q.n == len(q.list) {
		list := make([]held, max(8, 2*q.n))
		for i := range q.n {
			list[i] = *q.at(i)
		}
		q.list, q.first = list, 0
	}
	h := q.at(q.n)
	if h.poll == poll {
		h.data = nil
	}
	h.data = append(h.data[:0], e.Data...)
	h.ev, h.number, h.landed = *e, number, landed
	h.ev.Data = h.data
	q.bytes += len(e.Data)
	q.n++
	return nil
}

// pop takes the oldest event out. Its data is valid until the next Poll.
func (q *queue) pop(poll uint64) transport.Event {
	h := q.at(0)
	e := h.ev
	h.ev, h.poll = transport.Event{}, poll
	h.data = trim(h.data)
	q.bytes -= len(e.Data)
	q.first = (q.first + 1) % len(q.list)
	q.n--
	return e
}

// arrive gives an event of the peer's, for which p has room, or holds it until its mapped write
// has landed, the copies from shadows that the peer has asked for have ended, and the events
// before it have been given. An event that passes waits for no mapped write, and for none of
// the events that do not pass. It does wait for the copies from shadows: some are of host
// memory, and a copy waits for no stream of an application.
func (c *Conn) arrive(e *transport.Event, number uint64, passes bool, p *link.Found) error {
	q := &c.held[0]
	if passes {
		q = &c.held[1]
	}
	landed := c.landed
	if c.f.in.reached(landed) {
		landed = 0
	}
	if q.n == 0 && landed == 0 && c.reached(number) {
		p.Put(*e)
		return nil
	}
	c.wake()
	err := q.push(e, number, landed, c.f.polls)
	if err != nil {
		link.Drop(e)
	}
	return err
}

// reached reports whether mapped write number of the peer has landed; 0 is none.
func (c *Conn) reached(number uint64) bool {
	return number == 0 || c.theirs.done.Load() >= number
}

// holds reports whether an event is held.
func (c *Conn) holds() bool { return c.held[0].n+c.held[1].n != 0 }

// give gives the events whose turn has come, as far as p has room. When the Conn has ended,
// mapped writes may still land: give waits for them for lastWrites, and then drops all events.
func (c *Conn) give(p *link.Found) {
	for i := range c.held {
		q := &c.held[i]
		for q.n > 0 && p.Room() {
			h := q.at(0)
			if !c.f.in.reached(h.landed) {
				break
			}
			if !c.reached(h.number) {
				if c.over != nil && time.Since(c.since) > lastWrites {
					c.giveUp()
				}
				break
			}
			p.Put(q.pop(c.f.polls))
		}
	}
}

// giveUp drops all held events.
func (c *Conn) giveUp() {
	for i := range c.held {
		for q := &c.held[i]; q.n > 0; {
			e := q.pop(c.f.polls)
			link.Drop(&e)
		}
	}
	link.Drop(&c.loan)
}
