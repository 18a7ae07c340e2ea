package exchange

import (
	"fmt"
	"slices"

	"fserver/engine/mem"
	"fserver/engine/wire"
)

// loan is a tensor that a worker lends. Its request is behind it, so all that
// are here belong to one.
type loan struct {
	imm  uint32
	span mem.Span
	view *mem.View // held
}

// arrival counts the writes of one immediate.
type arrival struct {
	imm uint32
	n   uint64
}

// Written takes a write of n bytes with an immediate from worker i.
func (s *Server) Written(i int, imm uint32, n uint64) error {
	c := s.clients[i]
	a := &c.arrived[imm%Window]
	if a.n != 0 && a.imm != imm {
		return fmt.Errorf("exchange: worker %d wrote data for push_pulls %d and %d at once, which must be less than %d apart", c.rank, a.imm, imm, Window)
	}
	a.imm = imm
	a.n++
	s.counters.BytesIn.Add(n)
	if len(c.open) != 0 {
		return s.match(c)
	}
	return nil
}

// Lent takes a loan with an immediate from worker i, and in any case the hold on
// its view.
func (s *Server) Lent(i int, imm uint32, span mem.Span, view *mem.View) error {
	c := s.clients[i]
	if len(c.loans) == wire.MaxTensors {
		_ = view.Drop()
		return fmt.Errorf("exchange: worker %d lent more than %d tensors for one request", c.rank, wire.MaxTensors)
	}
	c.loans = append(c.loans, loan{imm, span, view})
	return nil
}

// claim takes the next loan for a tensor of n bytes, and the hold on its view.
func (c *client) claim(imm uint32, n uint64, k *receiver) (loan, error) {
	switch {
	case k.fixed():
		return loan{}, fmt.Errorf("exchange: worker %d lent a tensor for key %d, which is received into a registered buffer and takes no loans", c.rank, k.key)
	case len(c.loans) == 0:
		return loan{}, fmt.Errorf("exchange: worker %d announced a loan for push_pull %d, but did not lend the tensor", c.rank, imm)
	}
	v := c.loans[0]
	if v.imm != imm || v.span.Len != n {
		return loan{}, fmt.Errorf("exchange: worker %d announced a loan of %d bytes for push_pull %d, but lent %d bytes for push_pull %d", c.rank, n, imm, v.span.Len, v.imm)
	}
	c.loans = slices.Delete(c.loans, 0, 1)
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
	if c.count == Window {
		return fmt.Errorf("exchange: worker %d has sent more than %d requests that are not answered yet", c.rank, Window)
	}
	r := s.requests.get()
	if err := r.fill(c, c.plans[q.Plan], q); err != nil {
		s.put(r)
		return err
	}
	c.count++
	s.counters.Requests.Add(1)
	r.state.Store(reqFilling)
	r.writes = q.Writes
	c.open = append(c.open, r)
	return s.match(c)
}

// match moves the requests whose writes have all arrived to where their callers look, in
// the order of their frames. A request whose writes have not arrived holds back later
// requests of its channel, or, if it has none, later requests without one. It holds back no
// others: its writes may wait for a device stream that waits for one of those.
func (s *Server) match(c *client) error {
	open, kept := c.open, c.open[:0]
	for i, r := range open {
		here, err := c.arrivedWhole(r)
		if err != nil {
			c.open = append(kept, open[i:]...) // those before are elsewhere, or free
			return err
		}
		if !here || slices.ContainsFunc(kept, func(q *Request) bool { return q.channel == r.channel }) {
			kept = append(kept, r)
			continue
		}
		c.arrived[uint32(r.seq)%Window] = arrival{}
		switch {
		case r.recalled:
			s.dismiss(c, r)
		case r.refusal != "":
			s.refuse(c, r)
		default:
			r.stamps[0] = s.found
			r.state.Store(reqReady)
			s.route(c, r)
		}
	}
	if len(kept) != len(open) {
		clear(open[len(kept):])
		c.open = kept
		s.publish()
	}
	if len(c.recalled)+c.refusals.len()+len(c.echoes) != 0 {
		s.advance(c)
	}
	return nil
}

// arrivedWhole reports whether all writes of a request have arrived.
func (c *client) arrivedWhole(r *Request) (bool, error) {
	a := &c.arrived[uint32(r.seq)%Window]
	switch {
	case r.writes == 0:
		return true, nil
	case a.imm != uint32(r.seq) || a.n < r.writes:
		return false, nil
	case a.n > r.writes:
		return false, fmt.Errorf("exchange: worker %d wrote %d tensors for push_pull %d, want %d", c.rank, a.n, r.seq, r.writes)
	}
	return true, nil
}
