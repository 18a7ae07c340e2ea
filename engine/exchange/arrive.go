package exchange

import (
	"fmt"
	"slices"

	"fserver/engine/mem"
	"fserver/engine/wire"
)

// loan is a tensor that a worker lends. Its request is behind it.
type loan struct {
	of   uint32 // the low bits of the request's number
	span mem.Span
	view *mem.View // held
}

// maxLoans bounds the loans whose requests are not here: of one request that was sent, and of
// one of a channel that has passed it.
const maxLoans = 2 * wire.MaxTensors

// Lent takes a loan with a number from worker i, and in any case the hold on its view.
func (s *Server) Lent(i int, of uint32, span mem.Span, view *mem.View) error {
	c := s.clients[i]
	if c.conn == nil {
		_ = view.Drop()
		return c.early()
	}
	if len(c.loans) == maxLoans {
		_ = view.Drop()
		return fmt.Errorf("exchange: worker %d lent more than %d tensors that no request has named", c.rank, maxLoans)
	}
	c.loans = append(c.loans, loan{of, span, view})
	return nil
}

// early is the error for a worker that does not wait for the answer to its Up.
func (c *client) early() error {
	return fmt.Errorf("exchange: worker %d (by group) sent more than an Up before it was answered", c.index)
}

// lent is the place of the first loan of a request, or -1.
func (c *client) lent(of uint32) int {
	return slices.IndexFunc(c.loans, func(v loan) bool { return v.of == of })
}

// claim takes the next loan of a request, for a tensor of n bytes, and the hold on its view.
func (c *client) claim(of uint32, n uint64, k *receiver) (loan, error) {
	if k.fixed() {
		return loan{}, fmt.Errorf("exchange: worker %d lent a tensor for key %d, which is received into a registered buffer and takes no loans", c.rank, k.key)
	}
	i := c.lent(of)
	if i < 0 {
		return loan{}, fmt.Errorf("exchange: worker %d announced a loan for push_pull %d, but did not lend the tensor", c.rank, of)
	}
	v := c.loans[i]
	if v.span.Len != n {
		return loan{}, fmt.Errorf("exchange: worker %d announced a loan of %d bytes for push_pull %d, but lent %d bytes", c.rank, n, of, v.span.Len)
	}
	c.loans = slices.Delete(c.loans, i, i+1)
	return v, nil
}

// dropLoans lets go of what no request has named.
func (c *client) dropLoans() {
	for _, v := range c.loans {
		_ = v.view.Drop() // our own mapping: it can be unmapped
	}
	c.loans = nil
}

func (s *Server) request(c *client, b []byte) error {
	q := &s.req
	if err := wire.ParseRequest(b, q); err != nil {
		return err
	}
	if q.Plan >= uint64(len(c.plans)) || c.plans[q.Plan] == nil {
		return fmt.Errorf("exchange: worker %d sent a request with plan %d, but not the plan", c.rank, q.Plan)
	}
	if c.count+len(c.recalled) >= Window { // one that was taken back is open until the worker is told
		return fmt.Errorf("exchange: worker %d has sent more than %d requests that are not answered yet", c.rank, Window)
	}
	r := s.requests.get()
	if err := r.fill(c, c.plans[q.Plan], q); err != nil {
		s.put(r)
		return err
	}
	c.count++
	s.counters.Requests.Add(1)
	for i := range r.push {
		if !r.push[i].Lent {
			s.counters.BytesIn.Add(r.push[i].Span.Len)
		}
	}
	if r.refusal != "" {
		return s.refuse(c, r, wire.RefusedUnfit, r.refusal)
	}
	r.stamps[0] = s.found
	r.await()
	s.route(c, r)
	return nil
}
