package inproc

import (
	"fmt"

	"fserver/engine/mem"
	"fserver/engine/transport"
)

// An entry is an op between Post and the later of its EvDone and its arrival.
type entry struct {
	kind   transport.OpKind
	user   uint64
	off    uint64
	key    transport.Key
	src    []mem.Span // of a write whose source is read by the receiver
	buf    []byte     // a frame, or the bytes of a staged write
	size   uint64
	at     uint64 // bytes copied to the target
	span   int    // of src, that the next byte comes from
	spanAt uint64 // of that byte in its span
	due    uint64 // the receiver's Poll that may see it
	err    error  // for EvDone
	over   bool   // the source is free
	told   bool   // EvDone was given
	sent   bool   // nothing is left for the receiver
}

// A pipe holds the entries of one direction of a Conn in the order of Post.
type pipe struct {
	ring       []entry
	head, tail uint64 // ring[i%len] for head <= i < tail is in use
	untold     int    // entries that are over and not told
	unsent     int    // entries that are not sent
	owned      int    // bytes in the buffers of entries that are not sent
}

// ownedMax bounds the bytes of a pipe's buffers.
const ownedMax = 4 << 20

func (p *pipe) at(i uint64) *entry { return &p.ring[i%uint64(len(p.ring))] }

// takes says whether there is room for op.
func (p *pipe) takes(op *transport.Op) bool {
	return p.tail-p.head < uint64(len(p.ring)) && (p.owned == 0 || p.owned+len(op.Frame) <= ownedMax)
}

// push adds an entry for op.
func (p *pipe) push(op *transport.Op) *entry {
	e := p.at(p.tail)
	p.tail++
	p.unsent++
	*e = entry{kind: op.Kind, user: op.User, off: op.Off, key: op.Key}
	return e
}

// finish marks the source of e as free; err goes into its EvDone.
func (p *pipe) finish(e *entry, err error) {
	e.over, e.err, e.src = true, err, nil
	p.untold++
}

// send marks e as arrived, or lost. Its buffer is the caller's.
func (p *pipe) send(e *entry) (buf []byte) {
	buf, e.buf = e.buf, nil
	e.sent = true
	p.unsent--
	p.owned -= len(buf)
	return buf
}

// trim forgets the entries at the head that need nothing more.
func (p *pipe) trim() {
	for p.head < p.tail && p.at(p.head).sent && p.at(p.head).told {
		p.head++
	}
}

// check refuses an op that can never be taken.
func check(op *transport.Op) error {
	switch {
	case op.Kind == transport.OpFrame && len(op.Frame) > transport.MaxFrame:
		return fmt.Errorf("frame of %d bytes: the limit is %d", len(op.Frame), transport.MaxFrame)
	case op.Kind != transport.OpFrame && op.Kind != transport.OpWrite:
		return fmt.Errorf("op of unknown kind %d", op.Kind)
	}
	return nil
}

// gather copies the next bytes of a write to dst, which it fills.
func (e *entry) gather(dst []byte) {
	if e.src == nil {
		copy(dst, e.buf[e.at:])
		e.at += uint64(len(dst))
		return
	}
	for len(dst) > 0 {
		n := copy(dst, e.src[e.span].Bytes()[e.spanAt:])
		dst = dst[n:]
		e.at += uint64(n)
		if e.spanAt += uint64(n); e.spanAt == e.src[e.span].Len {
			e.span, e.spanAt = e.span+1, 0
		}
	}
}
