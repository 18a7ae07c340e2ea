package cudaipc

import (
	"errors"
	"fmt"
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
	pending []piece    // not handed to inner; by number
	copies  []cuda.Copy
	spans   [buffers]mem.Span // what of each buffer inner has
	broken  bool              // the device does nothing any more
}

// piece is a part of an item in a buffer, or a frame or a loan behind such.
type piece struct {
	item   uint32
	number uint64 // of its copy
	off, n uint64 // in the item
	buf    int8
	last   bool
}

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
	l.seg.magic, l.seg.fabric = segmentMagic, c.f.id
	l.buffers = 1<<buffers - 1
	c.items = make([]item, depth)
	return nil
}

// close gives back what equip and open acquired.
func (l *lane) close(f *Fabric) {
	if l.opened {
		_ = f.dev.FreeStream(l.stream)
	}
	if l.pool.Len != 0 {
		f.unpinMapped(l.pool)
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
	if l.pool.Len == 0 {
		if err := l.provide(c.f); err != nil {
			c.fail(err)
			return false
		}
	}
	for it.sent < it.n {
		n, buf := min(it.n-it.sent, pieceSize), bits.TrailingZeros8(l.buffers)
		if buf >= buffers {
			return false
		}
		l.gather(it, l.seen+uint64(buf)*pieceSize, n)
		var event cuda.Event
		if it.sent == 0 {
			event = cuda.Event(it.op.After.Event)
		}
		err := c.f.dev.Enqueue(l.stream, event, l.copies, l.flags+uint64(stagedAt), l.staged+1)
		l.staged++ // after an error too, as in mapInto
		l.buffers &^= 1 << buf
		l.pending = append(l.pending, piece{
			item: c.next, number: l.staged, off: it.sent, n: n, buf: int8(buf), last: it.sent+n == it.n,
		})
		it.sent += n
		if err != nil {
			c.fail(fmt.Errorf("copy %d bytes to the host: %w", n, err))
			return false
		}
	}
	return true
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

// scarce says what to do about an error if it is that there is no host memory for
// staging.
func scarce(err error) error {
	if cuda.Is(err, cuda.OutOfMemory) || errors.Is(err, unix.ENOMEM) {
		return fmt.Errorf("allocate host memory for staging: %w (send fewer or smaller tensors at once, or raise ulimit -l and the memory limit of the container)", err)
	}
	return err
}

// forward hands inner the pieces that have reached their buffers, and the frames and loans
// behind them.
func (c *Conn) forward() {
	l := &c.lane
	if len(l.pending) == 0 {
		return
	}
	here, n := l.seg.staged.Load(), 0
	for n < len(l.pending) && (l.pending[n].number <= here || l.broken) && c.hand(&l.pending[n]) {
		n++
	}
	l.pending = l.pending[:copy(l.pending, l.pending[n:])]
}

// hand hands inner the oldest entry of pending.
func (c *Conn) hand(p *piece) bool {
	l, it := &c.lane, &c.items[p.item%depth]
	if it.way == wayBehind {
		return c.over != nil || c.dispatch(it)
	}
	if c.over != nil {
		l.buffers |= 1 << p.buf
		return true
	}
	l.spans[p.buf] = mem.Span{Addr: l.pool.Addr + uintptr(p.buf)*pieceSize, Len: p.n}
	op := transport.Op{Kind: transport.OpWrite, Key: it.op.Key, Off: it.op.Off + p.off, Src: l.spans[p.buf : p.buf+1]}
	taken, err := c.write(&op, p.n, it.lift, job{kind: jobPiece, item: p.item, buf: p.buf, last: p.last})
	if err != nil {
		c.fail(err)
	}
	return taken
}
