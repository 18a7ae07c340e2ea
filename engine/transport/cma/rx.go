package cma

import (
	"fmt"

	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// rx is the receiving half of a Conn.
type rx struct {
	consumer
	regions *link.Regions
	direct  bool

	frame uint64 // bytes of the large frame that is coming; 0 if none is
	got   uint64 // bytes of it that came
	big   []byte // where it goes
	held  uint64 // the Poll whose event points into big

	views
}

// An arena holds the frames of one Poll, but for large ones. Frames are copied
// out of the ring, where the peer could change them while they are read.
const arenaSize = 64 << 10

// receive turns what the ring has into events, up to about quantum bytes of
// it.
func (f *Fabric) receive(c *Conn, ev []transport.Event) (n int, moved uint64) {
	x := &c.rx
	start := x.pos
	for n < len(ev) && x.pos-start < quantum {
		w := x.peek()
		if w == 0 {
			break
		}
		made, taken, err := x.take(c, w, &ev[n])
		if err != nil {
			f.fail(c, err)
			return n, x.pos - start
		}
		if !taken {
			break
		}
		if made {
			ev[n].Conn = c
			n++
		}
	}
	if x.pos != start {
		c.mine.head.Store(x.pos)
		c.report()
		c.ring(asleepRoom)
	}
	return n, x.pos - start
}

// take reads the record that starts with w. It may make an event; it is not
// taken if the frames of this Poll are in the way.
func (x *rx) take(c *Conn, w uint64, ev *transport.Event) (made, taken bool, err error) {
	kind, zero, size, total := splitWord(w)
	inside := x.frame > 0 && kind != recFrame
	if zero != 0 || total != 0 && kind != recFrame || inside && kind != recSkip {
		return false, false, fmt.Errorf("the peer sent a record that starts with %#x, which is not allowed at this place", w)
	}
	switch kind {
	case recLent, recFreed:
		return c.takeLoan(kind, size, ev)
	case recSkip:
		if size != 0 {
			return false, false, fmt.Errorf("the peer sent a skip record with %d bytes of data, want 0", size)
		}
		return false, true, x.skip()
	case recFrame:
		return x.takeFrame(c.f, size, total, ev)
	case recWritten, recStaged:
		if kind == recWritten && (!x.direct || size != 0) {
			return false, false, fmt.Errorf("the peer announced a direct write, which this connection does not allow, or one with data")
		}
		return false, true, x.takeWrite(c, kind, size)
	}
	return false, false, fmt.Errorf("the peer sent a record that starts with %#x: this version does not know its kind", w)
}

func (x *rx) takeWrite(c *Conn, kind uint8, size uint64) error {
	rec, err := x.record(writeLen + size)
	if err != nil {
		return err
	}
	id, token, off, n := get64(rec, 1), get64(rec, 2), get64(rec, 3), get64(rec, 4)
	if kind == recStaged && n != size {
		return fmt.Errorf("the peer announced %d bytes of a write in a record with %d", n, size)
	}
	to, err := x.regions.Target(c, id, token, off, n)
	if err != nil {
		return err
	}
	if kind == recStaged {
		copy(to.Bytes(), rec[writeLen:])
	}
	x.next(writeLen + size)
	return nil
}

func (x *rx) takeFrame(f *Fabric, size, total uint64, ev *transport.Event) (made, taken bool, err error) {
	if total > transport.MaxFrame || size > framePiece || x.got+size > total || x.frame > 0 && total != x.frame || size == 0 && total > 0 {
		return false, false, fmt.Errorf("the peer sent %d bytes of a frame of %d after %d bytes: a frame has at most %d", size, total, x.got, transport.MaxFrame)
	}
	rec, err := x.record(wordLen + size)
	if err != nil {
		return false, false, err
	}
	if size == total {
		at := len(f.arena)
		if at+int(size) > cap(f.arena) {
			return false, false, nil
		}
		f.arena = append(f.arena, rec[wordLen:]...)
		x.next(wordLen + size)
		*ev = transport.Event{Kind: transport.EvFrame, Data: f.arena[at:len(f.arena):len(f.arena)]}
		return true, true, nil
	}
	if x.frame == 0 {
		if x.held == f.Seq {
			return false, false, nil
		}
		if uint64(cap(x.big)) < total {
			x.big = make([]byte, total)
		}
		x.frame, x.big = total, x.big[:total]
	}
	x.got += uint64(copy(x.big[x.got:], rec[wordLen:]))
	x.next(wordLen + size)
	if x.got < total {
		return false, true, nil
	}
	*ev = transport.Event{Kind: transport.EvFrame, Data: x.big}
	x.frame, x.got, x.held = 0, 0, f.Seq
	return true, true, nil
}

// trim frees the buffer for large frames if it is idle. Whoever still reads
// the last one keeps it alive.
func (x *rx) trim() {
	if x.frame == 0 {
		x.big = nil
	}
}
