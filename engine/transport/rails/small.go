package rails

import (
	"encoding/binary"

	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// The usual message is small, and nothing else waits: a few writes and a frame, all on one member, where the peer
// gives it at once. This file does for such a message what Post and rail.frame do for all, in two functions instead of forty. A
// system call drives code and data out of the nearest cache, so it is the calls and the memory that cost, not what
// they compute.

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
	if len(r.queue) != 0 || r.refused != nil || !r.small(ops) || !o.room(0, len(ops[last].Frame)) {
		return false
	}
	it := o.postWhole(r.id, last, len(ops[last].Frame))
	k := c.at(it.num)
	for i := range ops[:last] {
		n := c.keepWrite(&ops[i], f.sizes[i], it.num)
		k.writes = append(k.writes, n)
		f.ops[i].User = uint64(n) + 1
		r.load += f.sizes[i]
		r.stat.sent += f.sizes[i]
	}
	c.keepFrame(k, &ops[last])
	putItem(k.frame, &it)
	to := &f.ops[last]
	to.Kind, to.User, to.Src, to.Dev, to.Frame = transport.OpFrame, 0, nil, k.dev, k.frame
	r.stat.sent += uint64(len(k.frame) - headerLen)
	f.asked[r.at].seen = f.polls
	c.open += len(ops)
	c.fed, c.owing = 0, 0
	taken, err := r.conn.Post(f.ops[:len(ops)])
	if taken == len(ops) {
		c.sent(it.num)
		return true
	}
	for _, n := range k.writes[min(taken, last):] {
		r.queue = append(r.queue, entry{write: n + 1})
	}
	r.queue = append(r.queue, entry{item: it})
	r.refused = err
	c.wake()
	return true
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
	for _, done := range o.done {
		c.finish(done)
	}
	o.done = o.done[:0]
	c.list()
	if o.owes() >= window/4 || c.fed >= mostBytes/4 || c.stirs() {
		c.wake()
	}
	return true
}

// keepFrame keeps the frame of op for a batch, behind room for the header.
func (c *Conn) keepFrame(k *kept, op *transport.Op) {
	k.frame = c.f.pool.get(headerLen + len(op.Frame))
	copy(k.frame[headerLen:], op.Frame)
	k.dev, k.user = op.Dev, op.User
}

// keepWrite keeps a write of a batch, or a part of one.
func (c *Conn) keepWrite(op *transport.Op, size, num uint64) (i uint32) {
	if len(c.spare) == 0 {
		c.spare = append(c.spare, uint32(len(c.writes)))
		c.writes = append(c.writes, write{})
	}
	last := len(c.spare) - 1
	i, c.spare = c.spare[last], c.spare[:last]
	w := &c.writes[i]
	w.key, w.off, w.src, w.dev = op.Key, op.Off, op.Src, op.Dev
	w.size, w.num, w.user, w.cut = size, num, op.User, false
	return i
}

// postWhole is write and frame in one, where no batch is open: it says that so many writes and a frame of so many bytes are posted
// on member id, for which there is room. The item is for the user to send, and not in out.
func (o *order) postWhole(id uint32, writes, bytes int) item {
	m, num := o.find(id), o.next
	*o.at(num) = batch{at: int(id), pos: m.sent, bytes: bytes, writes: writes, held: writes, frame: true}
	m.sent++
	o.bytes += bytes
	o.next++
	o.sealed++
	o.told, o.owe = o.given, false
	return item{kind: frame, num: num, ack: o.given, got: o.got}
}

// recvNext is recv and take in one, for a frame of the peer that is the next one to be given and says nothing new but an
// acknowledgement. If it is something else, or wrong, recvNext changes nothing.
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
	for m.ack = ack; o.acked < ack; o.acked++ {
		if o.at(o.acked).held == 0 {
			o.finish(o.acked)
		}
	}
	m.came++
	o.given++
	return true
}
