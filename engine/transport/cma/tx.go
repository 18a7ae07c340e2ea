package cma

import (
	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

const (
	txDepth = 256      // operations of a Conn between Post and their EvDone; a power of two
	txHeld  = 32 << 10 // bytes of frames of a Conn that are not in its ring

	// small is the largest write that goes through the ring also where direct
	// ones can be had: two copies cost less than one system call that looks up
	// the pages, 6 µs in a round trip of 16 KiB. That holds up to 64 KiB, but
	// the second copy is the receiver's, which many may send to.
	small = 16 << 10
)

// tx is the sending half of a Conn: a queue of operations, of which some have
// gone into the ring.
type tx struct {
	producer
	direct bool
	// Operations in [Done, Sent) are in the ring, those in [Sent, End) are not, or not
	// wholly. Of those, the writes in [Sent, ready) have their bytes in the peer's memory.
	link.Window[op]
	ready  uint32
	cur    cursor                 // in the operation ready
	need   uint64                 // bytes of the record for which the ring had no room; or 0
	balked bool                   // the last copy moved nothing
	held   link.Bytes             // frames of ops[sent:end]
	moved  uint64                 // bytes of writes that went, ever
	lent   map[*mem.Shared]uint64 // what was passed to the peer, with its number
	shown  amount
	freed  []uint64 // numbers of shared memory that the peer is to hear is freed
}

type op struct {
	kind           transport.OpKind
	at             uint32 // of the frame in held
	n              uint64 // bytes of the frame or the write
	id, token, off uint64 // of a loan: numbers of the memory and the loan, offset
	src            []mem.Span
}

// cursor is how far an operation has got.
type cursor struct {
	done uint64 // bytes of it
	span int    // the first of src that is not used up
	off  uint64 // bytes of that one that are
}

// queued says whether not all operations are in the ring, or not wholly.
func (t *tx) queued() bool { return t.Sent != t.End }

// unsent says whether not everything is in the ring.
func (t *tx) unsent() bool { return t.queued() || len(t.freed) > 0 }

// blocked says whether what comes next waits for room in the ring.
func (t *tx) blocked() bool {
	if t.need == 0 {
		return false
	}
	_, _, ok, err := t.place(t.need)
	return !ok && err == nil
}

// push puts o at the end of the queue. It is not taken when there is no room;
// an error means that there never will be.
func (t *tx) push(o *transport.Op) (taken bool, err error) {
	q := op{kind: o.Kind, id: o.Key.ID, token: o.Key.Token, off: o.Off, src: o.Src}
	if o.Kind == transport.OpLend && o.After.Event == 0 {
		if q.id, q.off, err = t.loan(o); err != nil {
			return false, err
		}
		q.n, q.token = o.Src[0].Len, uint64(o.Loan)
	} else if q.n, err = link.Check("cma", o); err != nil {
		return false, err
	}
	if t.Full() {
		return false, nil
	}
	if o.Kind == transport.OpFrame {
		at, ok := t.held.Add(len(o.Frame), txHeld)
		if !ok {
			return false, nil
		}
		copy(t.held[at:], o.Frame)
		q = op{kind: o.Kind, n: q.n, at: uint32(at)}
	}
	*t.Push(o.User) = q
	return true, nil
}

// stages says whether the bytes of a write go through the ring.
func (t *tx) stages(o *op) bool { return !t.direct || o.n <= small }

// publish puts what can go into the ring there, staged bytes until moved is at
// end. It stops at a direct write whose bytes are not at the peer.
func (t *tx) publish(end uint64) (err error) {
	t.need = 0
	for t.cur.done == 0 && len(t.freed) > 0 {
		rec, err := t.record(2 * wordLen)
		if rec == nil {
			return err
		}
		put64(rec, 1, t.freed[0])
		t.put(makeWord(recFreed, 0, 0), 2*wordLen)
		t.freed = append(t.freed[:0], t.freed[1:]...)
	}
	for t.queued() {
		o := t.At(t.Sent)
		whole := false
		switch {
		case o.kind == transport.OpFrame:
			whole, err = t.frame(o)
		case o.kind == transport.OpLend:
			whole, err = t.told(recLent, o)
		case t.stages(o):
			if t.moved >= end {
				return nil
			}
			whole, err = t.stage(o)
		case t.Sent == t.ready:
			return nil
		default:
			whole, err = t.told(recWritten, o)
		}
		if err != nil || t.need > 0 {
			return err
		}
		if whole {
			if t.Sent == t.ready {
				t.ready++
				t.cur = cursor{}
			}
			t.Sent++
		}
	}
	if !t.queued() {
		t.held = t.held[:0]
	}
	return nil
}

// record is room that notes what was missing.
func (t *tx) record(n uint64) (rec []byte, err error) {
	rec, ok, err := t.room(n)
	if !ok {
		t.need = n
	}
	return rec, err
}

// frame puts the next piece of a frame into the ring.
func (t *tx) frame(o *op) (whole bool, err error) {
	n := min(o.n-t.cur.done, framePiece)
	rec, err := t.record(wordLen + n)
	if rec == nil {
		return false, err
	}
	copy(rec[wordLen:], t.held[uint64(o.at)+t.cur.done:])
	t.put(makeWord(recFrame, n, o.n), wordLen+n)
	t.cur.done += n
	return t.cur.done == o.n, nil
}

// stage puts the next bytes of a write into the ring.
func (t *tx) stage(o *op) (whole bool, err error) {
	n := min(o.n-t.cur.done, stagePiece)
	rec, err := t.record(writeLen + n)
	if rec == nil {
		return false, err
	}
	describe(rec, o, o.off+t.cur.done, n)
	for to := rec[writeLen:]; len(to) > 0; {
		s := t.cur.next(o.src, uint64(len(to)))
		to = to[copy(to, s.Bytes()):]
	}
	t.put(makeWord(recStaged, n, 0), writeLen+n)
	if n > small {
		t.commit() // the peer can begin
	}
	t.moved += n
	return t.cur.done == o.n, nil
}

// told tells the peer of a write whose bytes it has, or of a loan.
func (t *tx) told(kind uint64, o *op) (whole bool, err error) {
	rec, err := t.record(writeLen)
	if rec == nil {
		return false, err
	}
	describe(rec, o, o.off, o.n)
	t.put(makeWord(kind, 0, 0), writeLen)
	return true, nil
}

// describe fills the words of a write or a loan.
func describe(rec []byte, o *op, off, n uint64) {
	put64(rec, 1, o.id)
	put64(rec, 2, o.token)
	put64(rec, 3, off)
	put64(rec, 4, n)
}

// next is the next bytes of src, at least 1 and at most limit. They must be
// there.
func (c *cursor) next(src []mem.Span, limit uint64) mem.Span {
	for c.off == src[c.span].Len {
		c.span++
		c.off = 0
	}
	s := src[c.span]
	n := min(s.Len-c.off, limit)
	s = mem.Span{Addr: s.Addr + uintptr(c.off), Len: n}
	c.off += n
	c.done += n
	return s
}
