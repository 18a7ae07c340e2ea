package tcp

import (
	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

const (
	txDepth = 512      // operations of a Conn between Post and their EvDone; a power of two
	txHeads = 32 << 10 // bytes of headers and frames of a Conn that the kernel has not taken
)

// tx is the sending half of a Conn: a queue of operations, of which the kernel
// has taken some. It makes no system call.
type tx struct {
	link.Window[sendOp]            // those in [Done, Sent) are with the kernel
	cur                 cursor     // in the operation Sent
	heads               link.Bytes // the headers, each followed by the frame if there is one
	taken               uint64     // bytes that the kernel has taken, ever
}

// sendOp is an operation in the queue: its head in heads, then src.
type sendOp struct {
	at, n uint32
	src   []mem.Span
}

// cursor is where the kernel stopped in an operation.
type cursor struct {
	head uint32 // bytes of the head that it took
	span int    // the first of src that it has not taken wholly
	off  uint64 // bytes of that one that it took
}

func (t *tx) init() {
	t.Init(txDepth)
	t.heads.Trim(txHeads)
}

// unsent says whether the kernel has not taken everything.
func (t *tx) unsent() bool { return t.Sent != t.End }

// push puts op at the end of the queue. It is not taken when there is no room;
// an error means that there never will be.
func (t *tx) push(op *transport.Op) (taken bool, err error) {
	length, err := link.Check("tcp", op)
	if err != nil {
		return false, err
	}
	h, src, frame := header{kind: recFrame, length: length}, []mem.Span(nil), op.Frame
	if op.Kind == transport.OpWrite {
		h, src, frame = header{recWrite, length, op.Key.ID, op.Key.Token, op.Off}, op.Src, nil
	}
	if t.Full() {
		return false, nil
	}
	at, ok := t.heads.Add(headerLen+len(frame), txHeads)
	if !ok {
		return false, nil
	}
	h.put(t.heads[at:])
	copy(t.heads[at+headerLen:], frame)
	*t.Push(op.User) = sendOp{uint32(at), uint32(headerLen + len(frame)), src}
	return true, nil
}

// gather fills v with what is to be sent next, at most limit bytes.
func (t *tx) gather(v *vec, limit uint64) {
	v.reset()
	at, base := t.cur, mem.Of(t.heads).Addr
	for i := t.Sent; i != t.End; i++ {
		op := t.At(i)
		if at.head < op.n {
			if v.full() || v.sum >= limit {
				return
			}
			v.add(base+uintptr(op.at+at.head), min(uint64(op.n-at.head), limit-v.sum))
		}
		for _, s := range op.src[at.span:] {
			if v.full() || v.sum >= limit {
				return
			}
			if n := min(s.Len-at.off, limit-v.sum); n > 0 {
				v.add(s.Addr+uintptr(at.off), n)
			}
			at.off = 0
		}
		at = cursor{}
	}
}

// advance notes that the kernel took n bytes more.
func (t *tx) advance(n uint64) {
	t.taken += n
	for t.unsent() {
		op := t.At(t.Sent)
		d := min(n, uint64(op.n-t.cur.head))
		t.cur.head += uint32(d)
		n -= d
		if t.cur.head < op.n {
			return
		}
		for t.cur.span < len(op.src) {
			s := op.src[t.cur.span]
			d := min(n, s.Len-t.cur.off)
			t.cur.off += d
			n -= d
			if t.cur.off < s.Len {
				return
			}
			t.cur.span++
			t.cur.off = 0
		}
		t.cur = cursor{}
		t.Sent++
	}
	t.heads = t.heads[:0]
}
