package verbs

import (
	"encoding/binary"
	"fmt"

	rdma "fserver/cshim/verbs"
	"fserver/engine/mem"
	"fserver/engine/transport"
)

const recvMark = 1 << 63 // of the ID of a receive; the slot is in the lower half

// rx is the receiving half.
type rx struct {
	got    [slots + spare]arrival // messages that have come and were not given: n from at
	at, n  int
	posted int      // slots that the NIC has
	spent  []uint32 // slots to post again
	freed  int      // of them, those that a credit is due for
	long   []byte   // the long frame that is coming
	total  int
	deaf   bool // a message was dropped, and with it all behind it
}

type arrival struct {
	slot uint32
	n    int
	read uint64 // that must have completed; 0: none. See readback
}

// recv is the memory of a slot to receive in.
func (c *Conn) recv(slot uint32) mem.Span {
	return mem.Span{Addr: c.buf.Addr + (slots+uintptr(slot))*slotBytes, Len: slotBytes}
}

// post gives slots to the NIC and empties list, which is rx.spent.
func (c *Conn) post(list []uint32) error {
	var s [slots + spare]rdma.Slot
	for i, slot := range list {
		s[i] = rdma.Slot{ID: recvMark | uint64(slot), To: rdma.Piece{Address: uint64(c.recv(slot).Addr), Len: slotBytes, LKey: c.mr.LKey}}
	}
	n, err := c.qp.PostRecv(s[:len(list)])
	c.rx.posted += n
	c.rx.spent = c.rx.spent[:0]
	return err
}

// received takes the completion of a receive.
func (c *Conn) received(w *rdma.Completion) {
	r := &c.rx
	r.posted--
	if w.Status != rdma.Success {
		if w.Status == rdma.Flushed {
			c.end(fmt.Errorf("the queue pair ended"))
		} else {
			c.end(fmt.Errorf("receive: %v", w.Status))
		}
		return
	}
	if r.deaf {
		return
	}
	slot, n := uint32(w.ID), int(w.Len)
	b := c.recv(slot).Bytes()
	credits := int(c.peer.Slots) / 2
	if n > 0 {
		if n < headLen || n > slotBytes {
			c.refuse(fmt.Errorf("the peer sent a message of %d bytes: want none, or %d to %d", n, headLen, slotBytes))
			return
		}
		credits = int(binary.LittleEndian.Uint16(b))
	}
	c.tx.credits += credits
	if c.tx.credits > int(c.peer.Slots) {
		c.refuse(fmt.Errorf("the peer returned more credits than it was sent frames"))
		return
	}
	switch {
	case n == 0:
		r.spent = append(r.spent, slot)
	case b[2] != kindData:
		c.refuse(fmt.Errorf("the peer sent a message of unknown kind %d", b[2]))
	default:
		a := arrival{slot: slot, n: n}
		if back := c.f.back; back != nil && b[3]&behindGPU != 0 {
			if a.read = back.after(c); a.read == 0 {
				r.deaf = true
				return
			}
		}
		r.got[(r.at+r.n)%len(r.got)] = a
		r.n++
	}
}

// refuse ends c for a message that the peer must not send, and drops what comes behind it.
func (c *Conn) refuse(why error) {
	c.rx.deaf = true
	c.end(why)
}

// ready reports whether a message can be given.
func (c *Conn) ready() bool {
	return c.rx.n > 0 && (c.f.back == nil || c.f.back.passed(c.rx.got[c.rx.at].read))
}

// give reports frames.
func (c *Conn) give(ev []transport.Event) (n int) {
	r := &c.rx
	for c.ready() && n < len(ev) && cap(c.f.frames)-len(c.f.frames) >= slotBytes {
		a := r.got[r.at]
		r.at = (r.at + 1) % len(r.got)
		r.n--
		b := c.recv(a.slot).Bytes()[:a.n]
		frame, whole, err := c.assemble(b)
		if err != nil {
			c.refuse(err)
			r.n = 0
			return n
		}
		r.spent = append(r.spent, a.slot)
		r.freed++
		if whole {
			ev[n] = transport.Event{Kind: transport.EvFrame, Conn: c, Data: frame}
			n++
		}
	}
	return n
}

// assemble is the frame that a message completes. Its slot may be posted again.
func (c *Conn) assemble(b []byte) (frame []byte, whole bool, err error) {
	r := &c.rx
	total, b := binary.LittleEndian.Uint32(b[4:]), b[headLen:]
	if total > transport.MaxFrame {
		return nil, false, fmt.Errorf("the peer announced a frame of %d bytes: at most %d", total, transport.MaxFrame)
	}
	if r.long == nil && int(total) == len(b) {
		at := len(c.f.frames)
		c.f.frames = append(c.f.frames, b...)
		return c.f.frames[at:len(c.f.frames):len(c.f.frames)], true, nil
	}
	if r.long == nil {
		r.long, r.total = make([]byte, 0, total), int(total)
	}
	if int(total) != r.total || len(b) == 0 || len(r.long)+len(b) > r.total {
		return nil, false, fmt.Errorf("the peer sent pieces that make no frame")
	}
	if r.long = append(r.long, b...); len(r.long) < r.total {
		return nil, false, nil
	}
	frame, r.long = r.long, nil
	return frame, true, nil
}

// repostAt is how many slots of frames are posted again together, with one doorbell. Until then their
// credits are held back. With those that are owed, that is less than all that the peer has, so it can go on.
const repostAt = slots / 4

// repost posts the spent slots again, and owes their credits. A slot that took a message without bytes is
// posted at once: such messages take no credits, and there are few spare slots.
func (c *Conn) repost() {
	r := &c.rx
	if c.Err != nil || len(r.spent) < repostAt && len(r.spent) == r.freed {
		return
	}
	c.tx.owed += r.freed
	r.freed = 0
	c.f.counts.Refills++
	if err := c.post(r.spent); err != nil {
		c.end(err)
	}
}
