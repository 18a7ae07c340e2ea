package tcp

import (
	"fmt"
	"math/bits"

	"fserver/engine/mem"
	"fserver/engine/transport"
)

const (
	txDepth = 512      // operations of a Conn between Post and their EvDone; a power of two
	txHeads = 32 << 10 // bytes of headers and frames of a Conn that the kernel has not taken
)

// tx is the sending half of a Conn: a queue of operations, of which the kernel
// has taken some. It makes no system call.
type tx struct {
	ops [txDepth]sendOp
	// Running numbers: ops[done:sent] are with the kernel and wait for their
	// EvDone, ops[sent:tail] are not, or not wholly.
	done, sent, tail uint32
	cur              cursor // in ops[sent]

	// heads holds the headers, each followed by the frame if there is one, in
	// a ring of pieces that do not wrap. first and next enclose what is in use;
	// next < first if the newest pieces start over.
	heads       []byte
	base        uintptr // of heads
	first, next uint32

	// big holds the one frame that is too large for heads, while bigBusy.
	big     []byte
	bigSrc  [1]mem.Span
	bigBusy bool

	taken uint64 // bytes that the kernel has taken, ever
}

// sendOp is an operation in the queue: its head in heads, then src.
type sendOp struct {
	user  uint64
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
	t.heads = make([]byte, txHeads)
	t.base = mem.Of(t.heads).Addr
}

// unsent says whether the kernel has not taken everything.
func (t *tx) unsent() bool { return t.sent != t.tail }

// push puts op at the end of the queue. It is not taken when there is no room;
// an error means that there never will be.
func (t *tx) push(op *transport.Op) (taken bool, err error) {
	if op.After.Event != 0 {
		return false, fmt.Errorf("tcp: post: the operation waits for a point on %v: hold it back until that has passed", op.After.Dev)
	}
	h := header{}
	src := op.Src
	frame := op.Frame
	switch op.Kind {
	case transport.OpFrame:
		if len(frame) > transport.MaxFrame {
			return false, fmt.Errorf("tcp: post: frame of %d bytes: at most %d", len(frame), transport.MaxFrame)
		}
		h.kind, h.length, src = recFrame, uint64(len(frame)), nil
	case transport.OpWrite:
		h = header{recWrite, 0, op.Key.ID, op.Key.Token, op.Off}
		for _, s := range src {
			var carry uint64
			if h.length, carry = bits.Add64(h.length, s.Len, 0); carry != 0 {
				return false, fmt.Errorf("tcp: post: write of %d spans: more than 2^64 bytes", len(src))
			}
		}
		frame = nil
	default:
		return false, fmt.Errorf("tcp: post: operation of unknown kind %d", op.Kind)
	}
	if t.tail-t.done == txDepth {
		return false, nil
	}
	big := headerLen+len(frame) > txHeads
	if big {
		if t.bigBusy {
			return false, nil
		}
		if cap(t.big) < len(frame) {
			t.big = make([]byte, len(frame))
		}
		t.big = t.big[:copy(t.big[:len(frame)], frame)]
		t.bigSrc[0] = mem.Of(t.big)
		src, frame = t.bigSrc[:], nil
	}
	at, ok := t.room(uint32(headerLen + len(frame)))
	if !ok {
		return false, nil
	}
	t.bigBusy = t.bigBusy || big
	h.put(t.heads[at:])
	copy(t.heads[at+headerLen:], frame)
	t.ops[t.tail%txDepth] = sendOp{op.User, at, uint32(headerLen + len(frame)), src}
	t.tail++
	return true, nil
}

// room takes n bytes of heads.
func (t *tx) room(n uint32) (at uint32, ok bool) {
	switch {
	case t.next < t.first:
		if t.next+n >= t.first {
			return 0, false
		}
	case t.next+n <= txHeads:
	case n < t.first:
		t.next = 0
	default:
		return 0, false
	}
	at = t.next
	t.next += n
	return at, true
}

// gather fills v with what is to be sent next, at most limit bytes.
func (t *tx) gather(v *vec, limit uint64) {
	v.reset()
	at := t.cur
	for i := t.sent; i != t.tail; i++ {
		op := &t.ops[i%txDepth]
		if at.head < op.n {
			if v.full() || v.sum >= limit {
				return
			}
			v.add(t.base+uintptr(op.at+at.head), min(uint64(op.n-at.head), limit-v.sum))
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
	for t.sent != t.tail {
		op := &t.ops[t.sent%txDepth]
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
		if len(op.src) > 0 && &op.src[0] == &t.bigSrc[0] {
			t.bigBusy = false
		}
		t.first = op.at + op.n
		t.cur = cursor{}
		t.sent++
	}
	t.first, t.next = 0, 0
}

// complete takes the oldest operation off the queue if it has ended: all have
// when the Conn is down.
func (t *tx) complete(down bool) (user uint64, sent, ok bool) {
	if t.done == t.sent && !(down && t.done != t.tail) {
		return 0, false, false
	}
	op := &t.ops[t.done%txDepth]
	op.src = nil
	if sent = t.done != t.sent; !sent {
		t.sent++
	}
	t.done++
	return op.user, sent, true
}

// trim frees the buffer for large frames if it is idle.
func (t *tx) trim() {
	if !t.bigBusy {
		t.big = nil
	}
}
