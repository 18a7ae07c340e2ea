package exchange

import (
	"fmt"
	"math"
	"math/bits"

	"fserver/engine/transport"
	"fserver/engine/wire"
)

// RefusedError says that the application of a server has refused a request.
type RefusedError struct {
	Rank int    // of the server
	Text string // what its application said
}

func (e *RefusedError) Error() string {
	if e.Text == "" {
		return fmt.Sprintf("exchange: server %d refused the request without a reason", e.Rank)
	}
	return fmt.Sprintf("exchange: server %d refused the request: %s", e.Rank, e.Text)
}

// Elements are the types of tensors that a server can hold: the bytes of one element, by
// dtype, and 0 for a dtype that it cannot hold. Nil: all, of whatever size.
type Elements []uint8

// row returns the bytes of a row of t, or of all of it where it has no dimension.
// MaxUint64 stands for more than a tensor can have. ok is false if there is no such type.
func (e Elements) row(t *wire.PlanTensor) (n uint64, ok bool) {
	if int(t.DType) >= len(e) || e[t.DType] == 0 {
		return 0, false
	}
	n = uint64(e[t.DType])
	for _, d := range t.Tail {
		var over uint64
		if over, n = bits.Mul64(n, uint64(d)); over != 0 || n > math.MaxInt64 {
			return math.MaxUint64, true
		}
	}
	return n, true
}

// fit works out what the requests of a plan are checked against, or why all of them are
// refused.
func (p *clientPlan) fit(e Elements) {
	if e == nil {
		return
	}
	p.rows = make([]uint64, len(p.plan.Push))
	for i := range p.plan.Push {
		t := &p.plan.Push[i]
		n, ok := e.row(t)
		if !ok && p.refusal == "" {
			p.refusal = fmt.Sprintf("push tensor %d, of key %d, has dtype %d, which the server cannot hold (install the same version of torch on both sides)", i, t.Key, t.DType)
		}
		p.rows[i] = n
	}
}

// misfit returns why the server cannot hold pushed tensor i as x describes it, or nothing.
func (p *clientPlan) misfit(i int, x *wire.Pushed) string {
	if p.rows == nil || p.refusal != "" {
		return p.refusal
	}
	t, rows := &p.plan.Push[i], uint64(x.Rows)
	if t.NDim == 0 {
		rows = 1
	}
	switch over, n := bits.Mul64(p.rows[i], rows); {
	case rows == 0 && x.Bytes == 0, rows != 0 && over == 0 && n == x.Bytes:
		return ""
	}
	dims := []int64{}
	if t.NDim != 0 {
		dims = append(append(dims, x.Rows), t.Tail...)
	}
	return fmt.Sprintf("push tensor %d, of key %d, has %d bytes, which is not what dtype %d and shape %s make", i, t.Key, x.Bytes, t.DType, shape(dims))
}

// shape is dims for people.
func shape(dims []int64) string {
	if len(dims) > 8 {
		return fmt.Sprintf("%v and %d more dimensions", dims[:8], len(dims)-8)
	}
	return fmt.Sprint(dims)
}

// refuse has the worker told that a request, which is complete, is not answered. Nobody
// else learns of it.
func (s *Server) refuse(c *client, r *Request, why uint8, text string) error {
	b := wire.Append(nil, wire.TypeRefused, &wire.Refused{Seq: r.seq, Why: why, Text: text})
	s.put(r)
	c.count--
	return s.reply(c, b)
}

// maxOwed bounds the frames that a worker has not taken, other than answers, in bytes. One that
// keeps to the protocol is owed one of Buffers, and a Refused for each push_pull.
const (
	maxOwed   = 4 * transport.MaxFrame
	owedExtra = 64 // for each of them
)

// reply has c told b, of no ticket. An error means that it does not read what it is told.
func (s *Server) reply(c *client, b []byte) error {
	if c.owed += len(b) + owedExtra; c.owed > maxOwed {
		return fmt.Errorf("exchange: worker %d does not read the answers to its messages: %d frames are queued", c.rank, c.replies.len())
	}
	c.replies.push(b)
	s.advance(c)
	return nil
}

// Fail ends the request of a handler at its worker with a RefusedError that has text, of
// which wire.MaxRefusal bytes travel. Else it is as Respond with a ticket that has no
// tensors.
func (s *Server) Fail(handler uint64, t *Ticket, text string) error {
	t.fails, t.why = true, text
	return s.Respond(handler, t)
}

// refused takes the word of s that it does not answer a push_pull.
func (w *Worker) refused(s *server, b []byte) error {
	v, err := wire.Parse[wire.Refused](b, wire.TypeRefused)
	if err != nil {
		return err
	}
	t := w.ticket(v.Seq)
	if t == nil || t.legs[s.index].state != legPosted {
		return fmt.Errorf("exchange: server %d refused push_pull %d, which does not wait for its answer", s.rank, v.Seq)
	}
	switch v.Why {
	case wire.RefusedUnfit:
		err = Shapef("exchange: server %d cannot take the push_pull: %s", s.rank, v.Text)
	case wire.RefusedClosed:
		err = parting(t.on, s.index)
	default:
		err = &RefusedError{Rank: s.rank, Text: v.Text}
	}
	w.endLeg(t, s, err)
	w.advance(s) // somebody may have waited for the credit
	return nil
}
