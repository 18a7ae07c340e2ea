package link

import (
	"fmt"

	"fserver/engine/transport"
)

// The limits of what Held holds. A peer that sends more loses its Conn. A peer that runs exchange stays far below: it has
// at most exchange.Window (4096) requests that are not answered, each with one frame, and nobody else sends frames behind
// writes of GPU memory.
const (
	HeldMost  = 1 << 13
	HeldBytes = 64 << 20
)

// Held is the frames and loans of a peer that have arrived before the writes in front of them have landed: a ring, in the
// order of their arrival. The writes have numbers.
type Held struct {
	list     []held
	first, n int
	bytes    int
}

type held struct {
	ev     transport.Event
	number uint64 // of the write that must have landed
	data   []byte // the bytes of the frame; the buffer is used again
	poll   uint64 // the Poll that gave data to the user, who may read it until the next
}

func (q *Held) at(i int) *held { return &q.list[(q.first+i)%len(q.list)] }

// Len is how many are held.
func (q *Held) Len() int { return q.n }

// Number is that of the write that the oldest waits for.
func (q *Held) Number() uint64 { return q.at(0).number }

// Push holds an event back during a Poll, or drops its loan and returns an error.
func (q *Held) Push(e *transport.Event, number, poll uint64) error {
	if q.n == HeldMost || q.n > 0 && q.bytes+len(e.Data) > HeldBytes {
		Drop(e)
		return fmt.Errorf("the peer sent more than %d frames, or %d bytes, behind writes that have not landed", HeldMost, HeldBytes)
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
	h.ev, h.number = *e, number
	h.ev.Data = h.data
	q.bytes += len(e.Data)
	q.n++
	return nil
}

// Pop takes the oldest event out. Its data is valid until the next Poll.
func (q *Held) Pop(poll uint64) transport.Event {
	h := q.at(0)
	e := h.ev
	h.ev, h.poll = transport.Event{}, poll
	h.data = Trim(h.data)
	q.bytes -= len(e.Data)
	q.first = (q.first + 1) % len(q.list)
	q.n--
	return e
}

// Drop drops all.
func (q *Held) Drop() { q.DropFrom(0) }

// DropFrom drops what waits for the write with a number, or for one after it, and all behind that.
func (q *Held) DropFrom(number uint64) {
	keep := 0
	for keep < q.n && q.at(keep).number < number {
		keep++
	}
	for q.n > keep {
		q.n--
		h := q.at(q.n)
		q.bytes -= len(h.ev.Data)
		Drop(&h.ev)
		h.ev, h.data = transport.Event{}, Trim(h.data)
	}
}

// keepMost is the largest buffer for a frame that is kept.
const keepMost = 64 << 10

// Trim returns b empty, for the next frame, or nil if it is large.
func Trim(b []byte) []byte {
	if cap(b) > keepMost {
		return nil
	}
	return b[:0]
}
