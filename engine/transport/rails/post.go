package rails

import (
	"fmt"
	"slices"

	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// sending is what a Conn keeps of what was posted on it.
type sending struct {
	kept   []kept  // by number % window
	writes []write // User of the members' ops, from 1 on
	spare  []uint32
	ops    []userOp
	unused []uint32
	open   int     // ops that were taken, and whose EvDone was not given
	usable []*rail // what lives has returned,
	turn   int     // when order had this turn
	cuts   uint64  // writes that were cut
	doom   error   // why c has to end
}

// kept is the user's part of a batch.
type kept struct {
	frame  []byte // behind room for the header; nil: the batch ends in a fence
	dev    mem.Device
	user   uint64 // of the frame's op
	sent   bool   // it was handed to a member, and its op has ended
	tries  int
	writes []uint32
	copies []byte // of what they send; nil: there are none
}

// write is a write on one member, or a part of one.
type write struct {
	key   transport.Key
	off   uint64
	src   []mem.Span
	dev   mem.Device
	size  uint64
	num   uint64     // its batch
	user  uint64     // of its op; of a part, the number of the userOp
	cut   bool       // it is a part
	spans []mem.Span // of a part, or of a copy

	copied bool // src is a copy, so its op ends when the member has let go of it,
	ended  bool // which it has
}

// userOp is a write of the user that is cut, until all of its parts have ended.
type userOp struct {
	user uint64
	left int
	err  error
}

func (c *Conn) at(num uint64) *kept { return &c.kept[num%window] }

// Post implements transport.Conn.
func (c *Conn) Post(ops []transport.Op) (n int, err error) {
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	if c.postSmall(ops) {
		return len(ops), nil
	}
	c.catchUp()
	for ; n < len(ops) && err == nil; n++ {
		var taken bool
		if taken, err = c.post(&ops[n]); !taken {
			break
		}
	}
	c.idle = 0
	c.after()
	if c.news() {
		c.wake()
	}
	return n, err
}

// Unsent implements transport.Conn.
func (c *Conn) Unsent() bool {
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	for _, r := range c.rails {
		if !r.shut && (len(r.queue) != 0 || r.conn.Unsent()) {
			return true
		}
	}
	return c.order.unsent()
}

// post takes an op, if there is room for it.
func (c *Conn) post(op *transport.Op) (taken bool, err error) {
	if c.err != nil {
		return false, c.err
	}
	size, err := link.Check("rails", op)
	if err != nil {
		return false, err
	}
	if op.Kind == transport.OpWrite {
		if _, err := memberKey(&op.Key, 0, c.peers); err != nil {
			return false, err
		}
		taken = c.write(op, size)
	} else if taken = c.order.room(0, len(op.Frame)); taken {
		num := c.order.frame(c.best(c.lives()).id, len(op.Frame))
		c.keepFrame(c.at(num), op)
		c.sendAll()
	}
	if taken {
		c.open++
	}
	return taken, nil
}

// begin keeps a write of the user that is cut into so many parts.
func (c *Conn) begin(user uint64, parts int) (i uint32) {
	if len(c.unused) == 0 {
		c.unused = append(c.unused, uint32(len(c.ops)))
		c.ops = append(c.ops, userOp{})
	}
	last := len(c.unused) - 1
	i, c.unused = c.unused[last], c.unused[:last]
	c.ops[i] = userOp{user: user, left: parts}
	return i
}

// end ends a write, or a part of one.
func (c *Conn) end(w *write, err error) {
	if !w.cut {
		c.f.tell(c, w.user, err)
		return
	}
	o := &c.ops[w.user]
	o.left--
	if o.err == nil {
		o.err = err
	}
	if o.left == 0 {
		c.f.tell(c, o.user, o.err)
		o.err = nil
		c.unused = append(c.unused, uint32(w.user))
	}
}

// lives returns the members that take writes, until the next call.
func (c *Conn) lives() []*rail {
	if c.turn == c.order.turn {
		return c.usable
	}
	c.turn = c.order.turn
	c.usable = c.usable[:0]
	for _, r := range c.rails {
		if m := c.order.find(r.id); m != nil && m.phase == live {
			c.usable = append(c.usable, r)
		}
	}
	return c.usable
}

// best returns the member that the last batch is open on, or else the one with the least to do. So a small
// push_pull is one message of the first member, unless that is busy.
func (c *Conn) best(live []*rail) *rail {
	o := c.order
	if o.next > o.sealed {
		if i := slices.IndexFunc(live, func(r *rail) bool { return int(r.id) == o.at(o.next-1).at }); i >= 0 {
			return live[i]
		}
	}
	best := live[0]
	for _, r := range live {
		if r.load < best.load {
			best = r
		}
	}
	return best
}

// write takes a write. A large one is cut over the members.
func (c *Conn) write(op *transport.Op, size uint64) bool {
	live := c.lives()
	if size >= max(c.f.o.Split, 1) && len(live) > 1 {
		return c.spread(live, op, size)
	}
	taken := c.fits(1)
	if taken {
		c.part(c.best(live), op, size)
	}
	return taken
}

// fits reports whether there is room for so many parts of a write.
func (c *Conn) fits(parts int) bool {
	if len(c.writes)-len(c.spare)+parts > mostOps {
		c.order.seal() // or they wait for a frame that the user cannot post
		return false
	}
	return c.order.room(parts, 0)
}

// spread takes a write in parts, as divide says.
func (c *Conn) spread(live []*rail, op *transport.Op, size uint64) bool {
	to, parts := c.f.portions[:len(live)], 0
	for i, r := range live {
		to[i] = portion{rate: r.meter.rate, load: r.load}
	}
	divide(size, to, c.cuts%probeCuts == probeCuts-1)
	for i := range to {
		parts += int(min(to[i].size, 1))
	}
	if !c.fits(parts) {
		return false
	}
	c.cuts++
	of, off, now := c.begin(op.User, parts), uint64(0), c.f.now()
	for i, r := range live {
		if to[i].size == 0 {
			continue
		}
		r.meter.start(now)
		w := c.part(r, op, to[i].size)
		w.cut, w.user = true, uint64(of)
		w.off += off
		w.spans = piecesOf(w.spans, op.Src, off, w.size)
		w.src = w.spans
		off += w.size
	}
	return true
}

// part posts a write, or a part of one, on a member.
func (c *Conn) part(r *rail, op *transport.Op, size uint64) *write {
	num := c.order.write(r.id)
	i := c.keepWrite(op, size, num)
	k := c.at(num)
	k.writes = append(k.writes, i)
	r.pushWrite(i)
	return &c.writes[i]
}

// piecesOf appends n bytes of src, from off on, to dst, which it empties first.
func piecesOf(dst, src []mem.Span, off, n uint64) []mem.Span {
	dst = dst[:0]
	for _, s := range src {
		if off >= s.Len {
			off -= s.Len
			continue
		}
		part := mem.Span{Addr: s.Addr + uintptr(off), Len: min(s.Len-off, n)}
		dst = append(dst, part)
		if off, n = 0, n-part.Len; n == 0 {
			break
		}
	}
	return dst
}

// sendAll hands what order has answered to the members.
func (c *Conn) sendAll() {
	for i := range c.order.out {
		p := &c.order.out[i]
		r := c.rail(p.to)
		if p.again {
			k := c.at(p.num)
			if k.tries++; k.tries > maxTries {
				c.doom = fmt.Errorf("rails: %d members have ended with the same frame on its way: %v", maxTries, c.why())
			}
			for _, w := range k.writes {
				r.pushWrite(w)
			}
		}
		r.pushItem(p.item)
		if p.kind != stating {
			c.fed, c.owing = 0, 0
		}
	}
	c.order.out = c.order.out[:0]
}

// sent takes that a member has the frame of a batch. It has no source, so its op ends.
func (c *Conn) sent(num uint64) {
	if k := c.at(num); !k.sent {
		k.sent = true
		c.f.tell(c, k.user, nil)
	}
}

// finish ends a batch.
func (c *Conn) finish(num uint64) {
	k, err := c.at(num), error(nil)
	if num >= c.order.acked {
		err = c.err
	}
	for _, i := range k.writes {
		w := &c.writes[i]
		if !w.ended {
			c.end(w, err)
		}
		w.src, w.key.Blob = nil, ""
		c.spare = append(c.spare, i)
	}
	if k.frame != nil {
		if !k.sent {
			c.f.tell(c, k.user, err)
		}
		c.f.pool.put(k.frame)
	}
	c.f.pool.put(k.copies)
	*k = kept{writes: k.writes[:0]}
}
