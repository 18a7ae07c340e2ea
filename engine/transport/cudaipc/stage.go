package cudaipc

import (
	"errors"
	"fmt"
	"math"
	"math/bits"

	"golang.org/x/sys/unix"

	"fserver/cshim/cuda"
	"fserver/engine/mem"
	"fserver/engine/transport"
)

// Writes go through pinned host memory in pieces: while one travels, the next are
// copied. 512 KiB take the copy engine 10 µs, and a network at 400 Gbps as long.
const (
	pieceSize = 512 << 10
	buffers   = 4 // of a Conn; its lane.buffers has a bit for each
)

// lane is the stream of a Conn on which its copies are made, its segment, where
// the stream says how far it is, and the buffers of staging.
type lane struct {
	stream cuda.Stream
	opened bool
	shared *mem.Shared
	seg    *segment
	flags  uint64 // the segment's address for the GPU

	staged  uint64     // number of the newest copy to a buffer
	pool    mem.Region // the buffers; mapped when first used
	seen    uint64     // their address for the GPU
	buffers uint8      // those that are free
	pending []piece    // copied, or being copied, and not handed to inner; by number
	whole   mem.Region // for a write that must not go in pieces
	wholeAt uint64
	copies  []cuda.Copy
	spans   [buffers + 1]mem.Span // what of each buffer inner has
	broken  bool                  // the device does nothing any more
}

// piece is a part of an item in a buffer.
type piece struct {
	item   uint32
	number uint64 // of its copy
	off, n uint64 // in the item
	buf    int8   // bufWhole: lane.whole
	last   bool
	addr   uintptr
}

const bufWhole = buffers // its bit in lane.buffers

// equip gives c what it needs for GPU memory.
func (c *Conn) equip() (err error) {
	l := &c.lane
	if l.shared, err = mem.NewNamed("fserver-cudaipc", uint64(segmentSize)); err != nil {
		return scarce(err)
	}
	r := l.shared.Region()
	if l.flags, err = c.f.pin(uint64(r.Addr), r.Len); err != nil {
		_ = mem.FreeShared(l.shared.ID())
		l.shared = nil
		return scarce(err)
	}
	l.seg = segmentIn(r)
	if l.stream, err = c.f.dev.NewStream(); err != nil {
		l.close(c.f)
		return err
	}
	l.opened = true
	l.seg.spaces = c.f.spaces
	l.seg.magic, l.seg.fabric, l.seg.boxID, l.seg.boxToken = segmentMagic, c.f.id, c.f.mailbox.ID, c.f.mailbox.Token
	l.buffers = 1<<buffers - 1 | 1<<bufWhole
	c.items = make([]item, depth)
	return nil
}

// close gives back what equip and open acquired.
func (l *lane) close(f *Fabric) {
	if l.opened {
		_ = f.dev.FreeStream(l.stream)
	}
	for _, r := range []mem.Region{l.pool, l.whole} {
		if r.Len != 0 {
			f.unpinMapped(r)
		}
	}
	if s := l.shared; s != nil {
		f.unpin(s.Region(), func() { _ = mem.FreeShared(s.ID()) })
	}
	*l = lane{}
}

// working says whether copies are under way.
func (l *lane) working() bool {
	return l.seg != nil && !l.broken && (l.seg.done.Load() < l.seg.begun.Load() || l.seg.staged.Load() < l.staged)
}

// queued says whether pieces wait for inner.
func (l *lane) queued() bool { return len(l.pending) != 0 }

// uses says whether a copy of item i is under way, or a buffer holds a piece of it.
func (l *lane) uses(i uint32) bool {
	for k := range l.pending {
		if l.pending[k].item == i {
			return true
		}
	}
	return false
}

// stage starts the copies of an item to the buffers, as far as there are any; true
// when all have been started.
func (c *Conn) stage(it *item) bool {
	l := &c.lane
	var r remote
	known := r.decode(it.op.Key)
	if known {
		if end, carry := bits.Add64(it.op.Off, it.n, 0); carry != 0 || end > r.n {
			c.misplaced(it)
			return true
		}
	}
	if l.pool.Len == 0 {
		if err := l.provide(c.f); err != nil {
			c.fail(err)
			return false
		}
	}
	for it.sent < it.n {
		n := min(it.n-it.sent, pieceSize)
		buf := int8(bits.TrailingZeros8(l.buffers & (1<<buffers - 1)))
		at, seen := l.pool.Addr, l.seen
		if !known && it.n > pieceSize { // a peer that knows nothing of pieces
			n, buf = it.n, bufWhole
			if l.buffers&(1<<bufWhole) == 0 {
				return false
			}
			if err := l.extend(c.f, n); err != nil {
				c.fail(err)
				return false
			}
			at, seen = l.whole.Addr, l.wholeAt
		} else if buf >= buffers {
			return false
		} else {
			at, seen = at+uintptr(buf)*pieceSize, seen+uint64(buf)*pieceSize
		}
		l.gather(it, seen, n)
		var event cuda.Event
		if it.sent == 0 {
			event = cuda.Event(it.op.After.Event)
		}
		err := c.f.dev.Enqueue(l.stream, event, l.copies, l.flags+uint64(stagedAt), l.staged+1)
		l.staged++ // after an error too, as in write
		l.buffers &^= 1 << buf
		l.pending = append(l.pending, piece{
			item: c.next, number: l.staged, off: it.sent, n: n, buf: buf, last: it.sent+n == it.n,
			addr: at,
		})
		it.sent += n
		if err != nil {
			c.fail(fmt.Errorf("copy %d bytes to the host: %w", n, err))
			return false
		}
	}
	return true
}

// misplaced hands inner a write that is out of bounds, for it to refuse.
func (c *Conn) misplaced(it *item) {
	op := transport.Op{Kind: transport.OpWrite, Key: it.op.Key, Off: math.MaxUint64, Src: []mem.Span{{Addr: c.f.box.Addr, Len: 1}}}
	it.over = true
	if taken, err := c.pass(&op, job{kind: jobUser, user: it.op.User}); !taken {
		it.over = false
		if err == nil {
			err = fmt.Errorf("write %d bytes at offset %d of the peer's key %d, which is out of bounds", it.n, it.op.Off, it.op.Key.ID)
		}
		c.fail(err)
	}
}

// gather makes the copies of the next n bytes of an item.
func (l *lane) gather(it *item, to, n uint64) {
	l.copies = l.copies[:0]
	skip := it.sent
	for _, s := range it.op.Src {
		if skip >= s.Len {
			skip -= s.Len
			continue
		}
		k := min(s.Len-skip, n)
		l.copies = append(l.copies, cuda.Copy{To: to, From: uint64(s.Addr) + skip, Len: k})
		to, n, skip = to+k, n-k, 0
		if n == 0 {
			return
		}
	}
}

// provide maps and pins the buffers.
func (l *lane) provide(f *Fabric) (err error) {
	if l.pool, err = mem.Map(buffers * pieceSize); err != nil {
		return scarce(err)
	}
	if l.seen, err = f.pin(uint64(l.pool.Addr), l.pool.Len); err != nil {
		_ = mem.Unmap(l.pool)
		l.pool = mem.Region{}
	}
	return scarce(err)
}

// extend makes the buffer for undivided writes as large as n.
func (l *lane) extend(f *Fabric, n uint64) (err error) {
	if l.whole.Len >= n {
		return nil
	}
	if l.whole.Len != 0 {
		f.unpinMapped(l.whole)
		l.whole = mem.Region{}
	}
	if l.whole, err = mem.Map(n); err != nil {
		return scarce(err)
	}
	// Pin takes whole pages.
	if l.wholeAt, err = f.pin(uint64(l.whole.Addr), (n+4095)&^4095); err != nil {
		_ = mem.Unmap(l.whole)
		l.whole = mem.Region{}
	}
	return scarce(err)
}

// scarce says what to do about an error if it is that there is no host memory for
// staging.
func scarce(err error) error {
	if cuda.Is(err, cuda.OutOfMemory) || errors.Is(err, unix.ENOMEM) {
		return fmt.Errorf("allocate host memory for staging: %w (send fewer or smaller tensors at once, or raise ulimit -l and the memory limit of the container)", err)
	}
	return err
}

// forward hands inner the pieces that have reached their buffers.
func (c *Conn) forward() {
	l := &c.lane
	if len(l.pending) == 0 {
		return
	}
	here, n := l.seg.staged.Load(), 0
	for ; n < len(l.pending) && (l.pending[n].number <= here || l.broken); n++ {
		p := &l.pending[n]
		it := &c.items[p.item%depth]
		if c.over != nil {
			l.buffers |= 1 << p.buf
			continue
		}
		l.spans[p.buf] = mem.Span{Addr: p.addr, Len: p.n}
		op := transport.Op{Kind: transport.OpWrite, Imm: it.op.Imm, Key: it.op.Key, Off: it.op.Off + p.off, Src: l.spans[p.buf : p.buf+1]}
		var r remote
		if !p.last && r.decode(op.Key) {
			op.Key = r.part
		}
		taken, err := c.pass(&op, job{kind: jobPiece, item: p.item, buf: p.buf, last: p.last})
		if err != nil {
			c.fail(err)
		}
		if !taken {
			break
		}
	}
	l.pending = l.pending[:copy(l.pending, l.pending[n:])]
}
