package verbs

import (
	"encoding/binary"
	"errors"
	"fmt"

	rdma "fserver/cshim/verbs"
	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

const (
	opDepth  = 256     // operations between Post and their EvDone; a power of two
	wrDepth  = 256     // requests that are made and not done; a power of two
	longest  = 1 << 20 // bytes of one request
	signalAt = 4 << 20 // bytes after which a request is signalled, so that progress is seen
	headLen  = 8
	kindData = 1 // a piece of a frame

	behindGPU = 1 // flag of a message: writes to memory of a GPU came before it
)

// tx is the sending half: operations, the requests that they are made into, and the
// slots that hold what is copied. Numbers run on and wrap.
type tx struct {
	link.Window[sendOp]        // those in [Done, Sent) have ended
	cur                 cursor // the newest operation, while it is not wholly made into requests

	// wrs[acked:posted] are with the NIC, wrs[posted:prepared] wait for room or credit.
	wrs                     [wrDepth]sendWR
	acked, posted, prepared uint32
	sq, sqAcked             uint32 // requests that the NIC was given, and those that are over; 31 bits

	ends             [slots]uint32 // acked must have come so far for a slot to be free
	slotHead, slotAt uint32
	credits          int
	owed             int  // credits to return
	onGPU            bool // a write to memory of a GPU was made since the last frame
}

type sendOp struct {
	end   uint32 // it has ended when acked is here
	whole bool   // it is made into requests
}

type sendWR struct {
	r     rdma.Request
	frame bool // takes a credit
}

type cursor struct {
	active bool
	frame  []byte // of a long frame, what is left
	total  uint32
	src    []mem.Span
	off    uint64 // into src[0]
	dev    mem.Device
	to     remote
	at     uint64 // of the next byte, into the peer's region
}

// take takes an operation if there is room. An error means that there never will be.
func (c *Conn) take(op *transport.Op) (bool, error) {
	t := &c.tx
	n, err := link.Check("verbs", op)
	if err == nil && n > 0 && op.Kind == transport.OpWrite && op.Dev != mem.CPU {
		err = c.f.checkSource(op)
	}
	if err != nil {
		return false, err
	}
	c.prepare()
	if c.Err != nil || t.cur.active || t.Full() {
		return false, nil
	}
	switch {
	case op.Kind == transport.OpWrite:
		t.cur = cursor{active: true, src: op.Src, dev: op.Dev, to: remoteOf(&op.Key), at: op.Off} // the NIC at the peer refuses what is none
		t.onGPU = t.onGPU || t.cur.to.gpu && n > 0
	case len(op.Frame) <= slotBytes-headLen:
		slot, ok := c.slot()
		if !ok {
			return false, nil
		}
		c.piece(slot, op.Frame, uint32(len(op.Frame)))
		*t.Push(op.User) = sendOp{end: t.prepared, whole: true}
		return true, nil
	default:
		t.cur = cursor{active: true, frame: append([]byte(nil), op.Frame...), total: uint32(len(op.Frame))}
	}
	*t.Push(op.User) = sendOp{}
	c.prepare()
	return true, nil
}

// slot is a free slot and room for a request.
func (c *Conn) slot() (uint32, bool) {
	t := &c.tx
	for t.slotHead != t.slotAt && int32(t.acked-t.ends[t.slotHead%slots]) >= 0 {
		t.slotHead++
	}
	if t.slotAt-t.slotHead == slots || t.prepared-t.acked == wrDepth {
		return 0, false
	}
	return t.slotAt % slots, true
}

// add adds a request, for which there is room.
func (t *tx) add(w sendWR) {
	t.wrs[t.prepared%wrDepth] = w
	t.prepared++
}

// use makes a request of n bytes of a slot.
func (c *Conn) use(slot uint32, n int, w sendWR) {
	t := &c.tx
	w.r.From = rdma.Piece{Address: uint64(c.buf.Addr) + uint64(slot)*slotBytes, Len: uint32(n), LKey: c.mr.LKey}
	if c.carries(uint64(n)) {
		w.r.Flags = rdma.Inline
	}
	t.add(w)
	t.ends[slot] = t.prepared
	t.slotAt++
}

// carries reports whether a request can carry n bytes by itself. Then the NIC need not fetch them.
func (c *Conn) carries(n uint64) bool { return n <= uint64(c.qp.Room.Inline) }

// send is the memory of a slot to send.
func (c *Conn) send(slot uint32) []byte {
	return mem.Span{Addr: c.buf.Addr + uintptr(slot)*slotBytes, Len: slotBytes}.Bytes()
}

// piece makes a request of a piece of a frame that has total bytes.
func (c *Conn) piece(slot uint32, b []byte, total uint32) {
	s := c.send(slot)
	head := uint32(kindData << 16)
	if c.tx.onGPU {
		head |= behindGPU << 24
		c.tx.onGPU = false
	}
	binary.LittleEndian.PutUint32(s, head)
	binary.LittleEndian.PutUint32(s[4:], total)
	n := headLen + copy(s[headLen:], b)
	c.use(slot, n, sendWR{r: rdma.Request{Op: rdma.Send}, frame: true})
}

// prepare makes the newest operation into requests, as far as there is room.
func (c *Conn) prepare() {
	t := &c.tx
	cur := &t.cur
	for cur.active {
		switch {
		case len(cur.frame) > 0:
			slot, ok := c.slot()
			if !ok {
				return
			}
			n := min(len(cur.frame), slotBytes-headLen)
			c.piece(slot, cur.frame[:n], cur.total)
			cur.frame = cur.frame[n:]
		case len(cur.src) > 0 && cur.off == cur.src[0].Len:
			cur.src, cur.off = cur.src[1:], 0
		case len(cur.src) > 0:
			if t.prepared-t.acked == wrDepth || !c.prepareWrite() {
				return
			}
		default:
			o := t.At(t.End - 1)
			o.end, o.whole = t.prepared, true
			*cur = cursor{}
		}
	}
}

// checkSource refuses a source on a GPU that cannot be read, because nothing else can.
func (f *Fabric) checkSource(op *transport.Op) error {
	if op.Dev != f.direct.at {
		return fmt.Errorf("verbs: post: a write of memory on %v: this NIC takes no such memory by itself", op.Dev)
	}
	for _, s := range op.Src {
		if _, n := f.local(s); s.Len > 0 && n == 0 {
			return fmt.Errorf("verbs: post: %w", notRegistered(s, op.Dev))
		}
	}
	return nil
}

func notRegistered(s mem.Span, dev mem.Device) error {
	return fmt.Errorf("a write of %d bytes at %#x on %v, which are not registered, or no longer: register memory of a GPU before it is sent", s.Len, s.Addr, dev)
}

// prepareWrite makes one request of the write; false: there is no slot.
func (c *Conn) prepareWrite() bool {
	t := &c.tx
	cur := &t.cur
	rkey, there := cur.to.at(cur.at)
	w := sendWR{r: rdma.Request{Remote: cur.to.address + cur.at, RKey: rkey, Op: rdma.Write}}
	src := mem.Span{Addr: cur.src[0].Addr + uintptr(cur.off), Len: cur.src[0].Len - cur.off}
	n := min(src.Len, longest, there)
	if cur.dev == mem.CPU && c.carries(n) {
		w.r.From, w.r.Flags = rdma.Piece{Address: uint64(src.Addr), Len: uint32(n)}, rdma.Inline
		t.add(w)
	} else if lkey, here := c.f.local(src); here > 0 {
		n = min(n, here)
		w.r.From = rdma.Piece{Address: uint64(src.Addr), Len: uint32(n), LKey: lkey}
		t.add(w)
	} else if cur.dev != mem.CPU {
		c.end(notRegistered(src, cur.dev))
		return false
	} else if slot, ok := c.slot(); ok {
		n = uint64(copy(c.send(slot), mem.Span{Addr: src.Addr, Len: n}.Bytes()))
		c.use(slot, int(n), w)
	} else {
		return false
	}
	cur.off += n
	cur.at += n
	return true
}

// over says whether the oldest operation that is under way has ended.
func (t *tx) over() bool {
	if t.Sent == t.End {
		return false
	}
	o := t.At(t.Sent)
	return o.whole && int32(t.acked-o.end) >= 0
}

// pump gives the NIC what there is room and credit for, in one chain for each Chain of
// requests. The last of them is signalled, and one in between every 4 MiB.
func (c *Conn) pump() {
	for c.up && c.Err == nil {
		c.prepare()
		n := c.fill()
		if n == 0 {
			return
		}
		b := &c.f.batch
		b[n-1].Flags |= rdma.Signaled
		taken, err := c.qp.PostSend(b[:n])
		c.f.counts.Doorbells++
		c.f.counts.Requests += uint64(taken)
		if err != nil {
			if errors.Is(err, rdma.ErrFull) {
				err = fmt.Errorf("%w, with %d of %d requests in it", err, (c.tx.sq-c.tx.sqAcked)&mask31, sendRoom)
			}
			c.tx.sq = (c.tx.sq - uint32(n-taken)) & mask31
			c.end(err)
		}
	}
}

const mask31 = 1<<31 - 1

// fill fills the batch.
func (c *Conn) fill() (n int) {
	t, b := &c.tx, &c.f.batch
	silent := uint32(0)
	for n < rdma.Chain && t.posted != t.prepared && (t.sq-t.sqAcked)&mask31 < sendRoom-1 {
		w := &t.wrs[t.posted%wrDepth]
		if w.frame {
			if t.credits == 0 {
				break
			}
			t.credits--
			s := mem.Span{Addr: uintptr(w.r.From.Address), Len: headLen}.Bytes()
			binary.LittleEndian.PutUint16(s, uint16(t.owed))
			t.owed = 0
		}
		t.posted++
		b[n] = w.r
		b[n].ID = c.number31()
		if silent += w.r.From.Len; silent >= signalAt {
			b[n].Flags |= rdma.Signaled
			silent = 0
		}
		n++
	}
	if n < rdma.Chain && t.owed >= slots/2 && (t.sq-t.sqAcked)&mask31 < sendRoom {
		// It takes no credit: the peer has spare slots for two of them, and there are never more, for each
		// stands for half of the peer's slots.
		t.owed -= slots / 2
		b[n] = rdma.Request{ID: c.number31(), Op: rdma.Send}
		n++
	}
	return n
}

// number31 is the ID of the request that is given to the NIC now: how many it has been given,
// and how many of wrs.
func (c *Conn) number31() uint64 {
	c.tx.sq = (c.tx.sq + 1) & mask31
	return uint64(c.tx.sq)<<32 | uint64(c.tx.posted)
}

// sent takes the completion of a request.
func (c *Conn) sent(w *rdma.Completion) {
	t := &c.tx
	t.sqAcked = uint32(w.ID>>32) & mask31
	switch {
	case w.Status == rdma.Success:
		t.acked = uint32(w.ID)
	case w.Status == rdma.Flushed:
		c.end(errors.New("the queue pair ended"))
	default:
		c.end(errors.New(w.Status.String()))
	}
}
