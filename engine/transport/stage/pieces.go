package stage

import (
	"fmt"

	"fserver/cshim/cuda"
	"fserver/engine/gpu"
	"fserver/engine/mem"
	"fserver/engine/transport"
)

// Writes go through pinned host memory in pieces: while one travels, the next are copied. A piece costs both CPUs some 15 µs:
// over TCP, 64 MiB in pieces of 128 KiB take 1.5 times as long as in those of 2 MiB, and 1 MiB is fastest in two.
const (
	pieceLeast = 512 << 10
	pieceMost  = 2 << 20
	buffers    = 4 // of a Conn; its sender.buffers has a bit for each
)

// pieceOf is the size of the pieces, but the last, of a write of n bytes.
func pieceOf(n uint64) uint64 { return min(max(n/buffers&^4095, pieceLeast), pieceMost) }

// A pool is the buffers of a sender, and behind them a page for its word. Where inner reads sources by their registrations it
// knows them, by key, unless no more memory could be locked: then it copies them.
type pool struct {
	gpu.Pinned
	key   transport.Key
	known bool
}

// sender is the stream of a Conn on which its copies are made, and the buffers of staging. It is made when it is first used.
type sender struct {
	stream  cuda.Stream
	pool    pool
	word    gpu.Word // where the stream says how far it is
	staged  uint64   // number of the newest copy to a buffer
	buffers uint8    // those that are free
	copies  []cuda.Copy
	spans   [buffers]mem.Span // what of each buffer inner has
	broken  bool              // the device does nothing any more
}

// provide makes the sender.
func (c *Conn) provide() {
	var l sender
	var err error
	f := c.f
	if n := len(f.pools); n > 0 {
		l.pool, f.pools = f.pools[n-1], f.pools[:n-1]
	}
	c.Aside(func() { err = l.open(f) }, func() {
		if c.sender = l; err != nil {
			c.sender.close(f)
			c.Fail(err)
		}
	})
}

func (l *sender) open(f *Fabric) (err error) {
	if l.pool.Len == 0 {
		if l.pool.Pinned, err = f.Calls.Map(buffers*pieceMost + 4096); err != nil {
			return err
		}
	}
	if !l.pool.known && f.Fabric.Caps().LocalKeys {
		l.pool.show(f)
	}
	l.word = l.pool.Word(buffers * pieceMost)
	l.word.Here.Store(0) // a Conn before this one may have had the pool
	l.buffers = 1<<buffers - 1
	l.stream, err = f.Calls.Dev.NewStream()
	return err
}

// show registers p with inner. That may fail for want of locked memory, and is no error.
func (p *pool) show(f *Fabric) {
	k, err := f.Fabric.Register(mem.Region{Addr: p.Addr, Len: buffers * pieceMost})
	p.key, p.known = k, err == nil
}

// spare gives up the registrations of pools that no Conn has, because no more memory can be locked. It reports whether there
// were any.
func (f *Fabric) spare() bool {
	var keys []transport.Key
	f.Lock()
	for i := range f.pools {
		if p := &f.pools[i]; p.known && !f.Closed {
			f.Spare(p.key.ID)
			keys = append(keys, p.key)
			p.known = false
		}
	}
	f.Mu.Unlock()
	for _, k := range keys {
		f.Fabric.Deregister(k)
	}
	return len(keys) > 0
}

// close leaves the pool to another Conn. If the device is broken, it may still be written to.
func (l *sender) close(f *Fabric) {
	f.Calls.FreeStream(l.stream)
	switch {
	case l.pool.Len == 0:
	case l.broken:
		f.broken = append(f.broken, l.pool)
	default:
		f.pools = append(f.pools, l.pool)
	}
	*l = sender{}
}

// working says whether copies are under way.
func (l *sender) working() bool { return l.stream != 0 && !l.broken && l.word.Here.Load() < l.staged }

// stage starts the copies of a write to the buffers, as far as there are any; true
// when all have been started.
func (c *Conn) stage(w *waiting) bool {
	l, it := &c.sender, &w.Is
	if l.stream == 0 {
		c.provide()
		return false
	}
	for it.sent < it.n {
		n, buf := min(it.n-it.sent, pieceOf(it.n)), (l.staged+1)%buffers
		if l.buffers&(1<<buf) == 0 {
			return false
		}
		l.copies = gpu.Gather(l.copies[:0], w.Op.Src, it.sent, l.pool.Seen+buf*pieceMost, n)
		l.staged++
		l.buffers &^= 1 << buf
		var after transport.Point
		if it.sent == 0 {
			after, it.number = w.Op.After, l.staged
		}
		it.sent += n
		// After an error, a part of it may be under way: tick finds out when that is over.
		if err := c.f.Calls.Enqueue(l.stream, after, l.copies, l.word, l.staged); err != nil {
			c.Fail(fmt.Errorf("copy %d bytes to the host: %w", n, err))
			return false
		}
	}
	return true
}

// behind returns the frame or loan that waits right behind the write whose turn it is; nil if it cannot go with the last
// piece of that write.
func (c *Conn) behind() *waiting {
	if c.next-c.passed < 2 {
		return nil
	}
	if w := c.Line.At(c.passed + 1); w.Is.way == wayBehind && !w.Over && !escaped(w.Op.Frame) {
		return w
	}
	return nil
}

// handPiece hands inner the next piece of a write, if it has reached its buffer.
func (c *Conn) handPiece(w *waiting) bool {
	l, it := &c.sender, &w.Is
	size := pieceOf(it.n)
	number, n := it.number+it.passed/size, min(it.n-it.passed, size)
	buf := number % buffers
	switch {
	case number > l.word.Here.Load() && !l.broken:
		return false
	case c.Err != nil:
		l.buffers |= 1 << buf
	default:
		l.spans[buf] = mem.Span{Addr: l.pool.Addr + uintptr(buf*pieceMost), Len: n}
		op := transport.Op{Kind: transport.OpWrite, Key: w.Op.Key, Off: w.Op.Off + it.passed, Src: l.spans[buf : buf+1]}
		var then *waiting
		if it.passed+n == it.n {
			then = c.behind()
		}
		taken, err := c.write(&op, n, piece{Of: w, Buf: uint8(buf)}, then)
		if !taken {
			c.Refused(err)
			return false
		}
		it.open++
	}
	it.passed += n
	return true
}
