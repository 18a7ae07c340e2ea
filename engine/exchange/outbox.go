package exchange

import "fserver/engine/transport"

// outbox posts the operations of one ticket, or of none, to one Conn at a time
// and keeps what back-pressure left over.
type outbox struct {
	conn   transport.Conn // nil: there is no path to the peer
	points bool           // its Fabric takes points
	held   bool           // a ticket waits for its point; see Table.holds
	ops    []transport.Op
	next   int     // the first that has not been taken
	ticket *Ticket // whose operations these are, or nil
	frame  []byte  // of the frame in ops; free for reuse when all are taken
	passes bool    // the operations do not wait for those of others that wait for a device
	err    error   // what Post has said: it takes no more
}

// begin starts a new set of operations; the last one must be flushed. Frames and loans of
// channels, and frames of no ticket, do not wait for a device: it may wait for a message that
// comes after them. For frames of no ticket, see ordered.
func (o *outbox) begin(t *Ticket) {
	o.ops, o.next, o.ticket, o.frame = o.ops[:0], 0, t, o.frame[:0]
	o.passes = t == nil || t.class() == ofChannels
}

// ordered keeps the frame of the set behind the requests and answers that were posted before:
// it says something about those, or about later ones.
func (o *outbox) ordered() { o.passes = false }

// write adds a write of pushed tensor i of the ticket.
func (o *outbox) write(i int, to transport.Key, off uint64) {
	op := transport.Op{Kind: transport.OpWrite, Key: to, Off: off, Src: o.ticket.source(i), Dev: o.ticket.push[i].Dev}
	if o.points {
		op.After = o.ticket.after.Point
	}
	o.ops = append(o.ops, op)
}

// lend adds a loan of pushed tensor i of the ticket.
func (o *outbox) lend(i int) {
	o.ops = append(o.ops, transport.Op{Kind: transport.OpLend, Src: o.ticket.source(i), Passes: o.passes})
}

// send adds o.frame.
func (o *outbox) send() {
	o.ops = append(o.ops, transport.Op{Kind: transport.OpFrame, Frame: o.frame, Passes: o.passes})
}

// stamp gives every operation what ties it to its ticket.
func (o *outbox) stamp() {
	for i := range o.ops {
		o.ops[i].User, o.ops[i].Loan = o.ticket.id, uint32(o.ticket.id)
	}
}

// empty says whether everything has been taken.
func (o *outbox) empty() bool { return o.next == len(o.ops) }

// stuck reports whether back-pressure holds something up, which only a Poll ends.
func (o *outbox) stuck() bool { return !o.empty() && o.conn != nil && o.err == nil }

// flush posts what is left. An error means that the Conn takes no more.
func (o *outbox) flush() error {
	if o.empty() || o.err != nil {
		return o.err
	}
	n, err := o.conn.Post(o.ops[o.next:])
	o.next += n
	if o.ticket != nil {
		o.ticket.ops += n
	}
	o.err = err
	return err
}

// drop forgets what has not been taken, and its Conn's error.
func (o *outbox) drop() { o.ops, o.next, o.ticket, o.err = o.ops[:0], 0, nil, nil }
