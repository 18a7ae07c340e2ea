package tcp

import (
	"fmt"
	"io"

	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// rxStage is the size of the staging buffer of a Conn. What comes behind the
// header of a record in the same read is copied from there once; the rest of a
// record goes from the kernel to its place. A second system call in place of
// that copy costs more: 0.45 µs against 0.05 µs for 4 KiB. A write of 4 KiB with
// a small frame behind it must fit; more room gains nothing up to 4 KiB, 3 of
// 33 µs in a round trip of 64 KiB, and loses at 1 MiB.
const rxStage = 8 << 10

// rx is the receiving half of a Conn: it says where the next bytes of the
// stream go, and turns what came into events. It makes no system call.
type rx struct {
	regions *link.Regions

	stage []byte // stage[r:w] has come and is not used up
	base  uintptr
	r, w  int
	held  uint64 // the Poll whose events point into stage
	more  bool   // stage holds what can become an event without further bytes

	// The record whose payload goes to its place: kind is 0 when there is
	// none, rest is what has not come. stage is empty while rest is not.
	kind uint8
	key  uint64
	rest mem.Span

	big     []byte // the frame that is too large for stage
	bigHeld uint64 // the Poll whose event points into big

	came uint64 // bytes that came, ever
}

func (x *rx) init(t *link.Regions) {
	x.regions = t
	x.stage = make([]byte, rxStage)
	x.base = mem.Of(x.stage).Addr
}

// inside says whether the stream stands in the middle of a record.
func (x *rx) inside() bool { return x.kind != 0 || x.r != x.w }

// writes says whether further bytes would go to the region of that key.
func (x *rx) writes(key uint64) bool {
	return x.kind == recWrite && x.key == key && x.rest.Len > 0
}

// idle is why the rest of a write is not read, or nil: its memory is not in use any more, and may be gone.
func (x *rx) idle() error {
	if x.kind == recWrite && x.rest.Len > 0 && x.regions.Idle(x.key) {
		return fmt.Errorf("the peer is in the middle of a write to key %d, of which %d bytes are missing: %w", x.key, x.rest.Len, link.ErrNotInUse)
	}
	return nil
}

// want fills v with where the next bytes go, payload at most limit; none if
// the events of this Poll are in the way.
func (x *rx) want(v *vec, seq, limit uint64) {
	v.reset()
	if x.held != seq && x.r > 0 {
		x.w = copy(x.stage, x.stage[x.r:x.w])
		x.r = 0
	}
	if n := min(x.rest.Len, limit); n > 0 {
		v.add(x.rest.Addr, n)
	}
	if n := rxStage - x.w; n > 0 && x.rest.Len <= limit {
		v.add(x.base+uintptr(x.w), uint64(n))
	}
}

// take notes that n bytes came to where want said.
func (x *rx) take(n uint64) {
	x.came += n
	d := min(n, x.rest.Len)
	x.rest.Addr += uintptr(d)
	x.rest.Len -= d
	x.w += int(n - d)
}

// parse turns what has come into events of c. An error is for the peer's
// misuse of the stream or its goodbye, and comes after the events before it.
func (x *rx) parse(c transport.Conn, ev []transport.Event, seq uint64) (n int, err error) {
	x.more = false
	for {
		if x.kind != 0 {
			if d := min(uint64(x.w-x.r), x.rest.Len); d > 0 {
				copy(x.rest.Bytes(), x.stage[x.r:x.w])
				x.r += int(d)
				x.rest = mem.Span{Addr: x.rest.Addr + uintptr(d), Len: x.rest.Len - d}
			}
			if x.rest.Len > 0 {
				return n, nil
			}
			if x.kind == recFrame {
				if x.more = n == len(ev); x.more {
					return n, nil
				}
				ev[n] = transport.Event{Kind: transport.EvFrame, Conn: c, Data: x.big}
				x.bigHeld = seq
				n++
			}
			x.kind = 0
		}
		if x.w-x.r < headerLen {
			return n, nil
		}
		var h header
		if err := h.parse(x.stage[x.r:]); err != nil {
			return n, err
		}
		if h.kind != recFrame || h.length > rxStage-headerLen {
			if x.more, err = x.begin(c, &h, seq); x.more || err != nil {
				return n, err
			}
			continue
		}
		end := x.r + headerLen + int(h.length)
		if end > x.w {
			return n, nil
		}
		if x.more = n == len(ev); x.more {
			return n, nil
		}
		ev[n] = transport.Event{Kind: transport.EvFrame, Conn: c, Data: x.stage[x.r+headerLen : end : end]}
		n++
		x.r, x.held = end, seq
	}
}

// begin finds the place of a record's payload. wait says that an event of this Poll is there.
func (x *rx) begin(c transport.Conn, h *header, seq uint64) (wait bool, err error) {
	switch h.kind {
	case recBye:
		return false, fmt.Errorf("the peer closed the connection: %w", io.EOF)
	case recFrame:
		if x.bigHeld == seq {
			return true, nil
		}
		if uint64(cap(x.big)) < h.length {
			x.big = make([]byte, h.length)
		}
		x.big = x.big[:h.length]
		x.rest = mem.Of(x.big)
	default:
		if x.rest, err = x.regions.Target(c, h.key, h.token, h.offset, h.length); err != nil {
			return false, err
		}
	}
	x.kind, x.key = h.kind, h.key
	x.r += headerLen
	return false, nil
}

// end is the reason of a stream that ended without a goodbye.
func (x *rx) end() error {
	where := "without a goodbye"
	if x.inside() {
		where = "in the middle of a record"
	}
	return fmt.Errorf("the peer's end closed %s: %w", where, io.ErrUnexpectedEOF)
}

// trim frees the buffer for large frames if it is idle. Whoever still reads
// the last one keeps it alive.
func (x *rx) trim() {
	if x.kind != recFrame {
		x.big = nil
	}
}
