package rails

import (
	"encoding/binary"

	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// The usual message is small, and nothing else waits: a few writes and a frame, all on one member, where the peer
// gives it at once. This file does for such a message what Post and rail.frame do for all, in two functions instead of forty. A
// system call drives code and data out of the nearest cache, so it is the calls and the memory that cost, not what
// they compute. What nobody waits for is done while the message is on its way: the notes about a message when a member has been
// given it, and what follows from an acknowledgement in the next Poll.

// mostCopied bounds the bytes of the sources of a small message that are copied.
const mostCopied = 4 << 10

// postSmall posts ops if they are a small message. If not, it changes nothing.
func (c *Conn) postSmall(ops []transport.Op) (posted bool) {
	o, f, last := c.order, c.f, len(ops)-1
	if c.err != nil || c.asks() || o.next != o.sealed || last < 0 || last >= len(f.ops) || len(c.writes)-len(c.spare)+last > mostOps {
		return false
	}
	live := c.lives()
	if len(live) == 0 {
		return false
	}
	r := c.best(live)
	if len(r.queue) != 0 || r.refused != nil || !o.holds(0, len(ops[last].Frame)) || !r.small(ops) {
		return false
	}
	it := o.upcoming()
	k := c.at(it.num)
	c.keepFrame(k, &ops[last])
	putItem(k.frame, &it)
	c.spares(last)
	for i := range last {
		f.ops[i].User = uint64(c.spare[len(c.spare)-1-i]) + 1 // as keepWrite will take them
	}
	to := &f.ops[last]
	to.Kind, to.User, to.Src, to.Dev, to.Frame = transport.OpFrame, 0, nil, k.dev, k.frame
	taken, err := r.conn.Post(f.ops[:len(ops)])
	c.posted(r, ops, it)
	if taken == len(ops) {
		c.sent(it.num)
		return true
	}
	for _, n := range k.writes[min(taken, last):] {
		r.queue = append(r.queue, entry{write: n + 1})
	}
	r.queue = append(r.queue, entry{item: it})
	r.refuses(err)
	c.wake()
	return true
}

// posted takes note of a small message that r was given, while that is on its way.
func (c *Conn) posted(r *rail, ops []transport.Op, it item) {
	f, last, k := c.f, len(ops)-1, c.at(it.num)
	c.order.postWhole(r.id, last, len(ops[last].Frame))
	bytes := uint64(0)
	for i := range ops[:last] {
		n := c.keepWrite(&ops[i], f.sizes[i], it.num)
		k.writes = append(k.writes, n)
		bytes += f.sizes[i]
	}
	r.load += bytes
	r.stat.sent += bytes + uint64(len(k.frame)-headerLen)
	if last > 0 && bytes <= mostCopied && !f.local {
		c.copySources(k, bytes)
	}
	f.asked[r.at].seen = f.polls
	c.open += len(ops)
	c.fed, c.owing, c.idle = 0, 0, 0
}

// copySources copies what the writes of a batch send, for the case that it is posted again. So the user need not wait for the
// peer's acknowledgement until it may change them.
func (c *Conn) copySources(k *kept, bytes uint64) {
	for _, n := range k.writes {
		if c.writes[n].dev != mem.CPU {
			return
		}
	}
	k.copies = c.f.pool.get(int(bytes))
	at := 0
	for _, n := range k.writes {
		w, from := &c.writes[n], at
		for _, s := range w.src {
			at += copy(k.copies[at:], s.Bytes())
		}
		w.spans = append(w.spans[:0], mem.Of(k.copies[from:at]))
		w.src, w.copied = w.spans, true
	}
}

// small reports whether ops are writes that are not to be cut and a frame that is sent whole, all without a fault. If so, it puts
// the writes into the Fabric's ops for r, and their sizes beside them.
func (r *rail) small(ops []transport.Op) bool {
	f := r.f
	for i := range ops {
		op, to := &ops[i], &f.ops[i]
		size, err := link.Check("rails", op)
		if i == len(ops)-1 {
			return err == nil && op.Kind == transport.OpFrame && headerLen+size <= transport.MaxFrame
		}
		if err != nil || op.Kind != transport.OpWrite || size >= f.o.Split {
			return false
		}
		if to.Key, err = memberKey(&op.Key, r.theirs, r.c.peers); err != nil {
			return false
		}
		to.Kind, to.Off, to.Src, to.Dev, to.Frame, f.sizes[i] = transport.OpWrite, op.Off, op.Src, op.Dev, nil, size
	}
	return false
}

// recvSmall takes a frame of the user that is the next one. If data is something else, or more is to be done than to give it, it
// changes nothing.
func (r *rail) recvSmall(data []byte, p *link.Found) (taken bool) {
	c := r.c
	if c == nil || !r.said || r.shut || len(r.tail) != 0 || len(data) < headerLen || kind(data[0]) != frame || !p.Room() {
		return false
	}
	o := c.order
	if c.fresh || c.closed || c.hinted || c.f.ailing|c.theirs != 0 {
		return false
	}
	num, ack, got := binary.LittleEndian.Uint64(data[1:]), binary.LittleEndian.Uint64(data[9:]), binary.LittleEndian.Uint64(data[17:])
	if !o.recvNext(r.id, num, ack, got) {
		return false
	}
	e := put(p)
	e.Kind, e.Conn, e.Data = transport.EvFrame, c, data[headerLen:]
	c.fed += len(data) - headerLen
	if o.ready() { // the ones behind it came before, on other members
		c.give(p)
	}
	if c.open != 0 { // the user waits for the end of an op
		c.confirm()
	} else if !c.late {
		c.late = true
		c.f.late = append(c.f.late, c)
	}
	return true
}

// catchUp does what recvSmall has put off.
func (c *Conn) catchUp() {
	if c.late {
		c.confirm()
	}
}

// confirm does what follows from frames that recvSmall has taken.
func (c *Conn) confirm() {
	c.late = false
	o := c.order
	o.confirm()
	for _, done := range o.done {
		c.finish(done)
	}
	o.done = o.done[:0]
	c.list()
	if o.owes() >= window/4 || c.fed >= mostBytes/4 || c.stirs() {
		c.wake()
	}
}

// catchUp does it for all Conns.
func (f *Fabric) catchUp() {
	for _, c := range f.late {
		c.catchUp()
	}
	clear(f.late)
	f.late = f.late[:0]
}

// keepFrame keeps the frame of op for a batch, behind room for the header.
func (c *Conn) keepFrame(k *kept, op *transport.Op) {
	k.frame = c.f.pool.get(headerLen + len(op.Frame))
	copy(k.frame[headerLen:], op.Frame)
	k.dev, k.user = op.Dev, op.User
}

// keepWrite keeps a write of a batch, or a part of one.
func (c *Conn) keepWrite(op *transport.Op, size, num uint64) (i uint32) {
	c.spares(1)
	last := len(c.spare) - 1
	i, c.spare = c.spare[last], c.spare[:last]
	w := &c.writes[i]
	w.key, w.off, w.src, w.dev = op.Key, op.Off, op.Src, op.Dev
	w.size, w.num, w.user, w.cut, w.copied, w.ended = size, num, op.User, false, false, false
	return i
}

// spares makes room for so many writes.
func (c *Conn) spares(n int) {
	for len(c.spare) < n {
		c.spare = append(c.spare, uint32(len(c.writes)))
		c.writes = append(c.writes, write{})
	}
}

// upcoming is the item of the next frame, where no batch is open.
func (o *order) upcoming() item { return item{kind: frame, num: o.next, ack: o.given, got: o.got} }

// postWhole is write and frame in one, where no batch is open: it says that so many writes and a frame of so many bytes were posted
// on member id, for which there was room. The frame was upcoming, and is not in out.
func (o *order) postWhole(id uint32, writes, bytes int) {
	m, num := o.find(id), o.next
	*o.at(num) = batch{at: int(id), pos: m.sent, bytes: bytes, writes: writes, held: writes, frame: true}
	m.sent++
	o.bytes += bytes
	o.next++
	o.sealed++
	o.told, o.owe = o.given, false
}

// recvNext is recv and take in one, for a frame of the peer that is the next one to be given and says nothing new but an
// acknowledgement, which confirm takes. If it is something else, or wrong, recvNext changes nothing.
func (o *order) recvNext(id uint32, num, ack, got uint64) bool {
	m := o.find(id)
	if num != o.given || o.over || o.ready() || m == nil || m.phase != live || got != m.got || ack < m.ack || ack > o.sealed {
		return false
	}
	for i := o.acked; i < ack; i++ {
		if b := o.at(i); b.at == nowhere || b.pos == never {
			return false
		}
	}
	m.ack, o.noted = ack, max(o.noted, ack)
	m.came++
	o.given++
	return true
}

// confirm takes the acknowledgements that recvNext has noted.
func (o *order) confirm() {
	for ; o.acked < o.noted; o.acked++ {
		if o.at(o.acked).held == 0 {
			o.finish(o.acked)
		}
	}
}
