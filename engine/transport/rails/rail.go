package rails

import (
	"errors"
	"fmt"
	"slices"

	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// A rail is a member Conn. The Fabric's mu guards it.
type rail struct {
	f      *Fabric
	c      *Conn // nil until it is known
	conn   transport.Conn
	at     int    // our Fabric that it is over
	strand int    // of the pair of Fabrics that it is between
	theirs int    // the peer's
	id     uint32 // in c
	// known says that the peer has opened it, or that Connect has returned it, and fresh that the peer has
	// not said what it is for.
	known, fresh bool
	queue        []entry       // to be posted, in order
	stat         *stat         // of its place
	load         uint64        // bytes of the writes that it has not let go of
	meter        meter         // of its rate
	tail         []byte        // of the next frame
	refused      error         // why it takes no op; EvDown is to come
	quiet        uint64        // of asked, when it was refused
	down         error         // why it is unusable
	shut         bool          // we have closed it
	over         bool          // it has given EvClosed
	said         bool          // News has it that it is used
	hint         uint64        // that the peer was given on it
	hinted       bool          // it was given one
	lost         chan struct{} // closed with over
}

// entry is an op that waits to be posted: a write, an item, or one of the other kinds of frames.
type entry struct {
	write uint32 // its number + 1
	text  []byte // of a greeting, or a reason
	item
}

func (r *rail) push(e entry) {
	last := len(r.queue) - 1
	switch {
	case r.shut:
	case last >= 0 && e.kind == bare && r.queue[last].kind == bare:
		r.queue[last] = e // says all that the one before says
	default:
		r.queue = append(r.queue, e)
		r.f.asked[r.at].seen = r.f.polls // what comes of it is not to wait
	}
	if len(r.queue) > mostQueued {
		r.c.doom = fmt.Errorf("rails: %d frames and writes wait for a peer that goes on sending, and takes none of them (%s)", len(r.queue), r.conn.Peer().Remote)
	}
}

// pushItem queues an item, and what of its frame does not fit behind the header.
func (r *rail) pushItem(it item) {
	if it.kind == frame && len(r.c.at(it.num).frame) > transport.MaxFrame {
		r.push(entry{item: item{kind: piece, num: it.num}})
	}
	if it.kind == frame {
		r.c.stat(r.at, r.strand).sent += uint64(len(r.c.at(it.num).frame) - headerLen)
	}
	r.push(entry{item: it})
}

func (r *rail) pushWrite(i uint32) {
	r.load += r.c.writes[i].size
	r.c.stat(r.at, r.strand).sent += r.c.writes[i].size
	r.push(entry{write: i + 1})
}

// flush posts what waits, as far as it is taken.
func (r *rail) flush() {
	for len(r.queue) > 0 && r.refused == nil && !r.shut {
		n := min(len(r.f.ops), len(r.queue))
		for i := range n {
			if err := r.op(&r.f.ops[i], r.f.heads[i][:], &r.queue[i]); err != nil {
				r.c.fail(err)
				return
			}
		}
		taken, err := r.conn.Post(r.f.ops[:n])
		for i := range r.queue[:taken] {
			if e := &r.queue[i]; e.write == 0 && e.kind == frame {
				r.c.sent(e.num)
			}
		}
		if r.refuses(err); taken == len(r.queue) {
			r.queue = r.queue[:0]
		} else {
			r.queue = slices.Delete(r.queue, 0, taken)
		}
		if taken < n || err != nil {
			r.c.wake()
			return
		}
	}
}

// refuses takes the error of a Post, if there is one.
func (r *rail) refuses(err error) {
	if err != nil {
		r.refused, r.quiet = err, r.f.asked[r.at].quiet
	}
}

// judge takes a refusal that no EvDown has followed, or has r's Fabric asked by the next Poll.
func (r *rail) judge() {
	if r.refused == nil || r.down != nil {
		return
	}
	a := &r.f.asked[r.at]
	if a.seen = r.f.polls; a.quiet-r.quiet >= quietPolls {
		r.wentDown(r.refused)
	}
}

// op makes the op of an entry. head is room for the frame of one.
func (r *rail) op(op *transport.Op, head []byte, e *entry) error {
	c := r.c
	if e.write != 0 {
		w := &c.writes[e.write-1]
		op.Kind, op.User, op.Off, op.Src, op.Dev, op.Frame = transport.OpWrite, uint64(e.write), w.off, w.src, w.dev, nil
		op.Key, _ = memberKey(&w.key, r.theirs, 0) // Post has looked at it
		return nil
	}
	op.Kind, op.User, op.Src, op.Dev, op.Frame = transport.OpFrame, 0, nil, mem.CPU, nil
	switch e.kind {
	case greeting, broken, ailing:
		op.Frame = e.text
		return nil
	case bare, fence, stating:
		putItem(head, &e.item)
		op.Frame = head[:headerLen]
		return nil
	}
	if e.num < c.order.acked {
		return fmt.Errorf("rails: the peer acknowledges frame %d, which was not sent", e.num)
	}
	k := c.at(e.num)
	op.Dev = k.dev
	if e.kind == piece {
		head[0] = byte(piece)
		op.Frame = head[:1+copy(head[1:], k.frame[transport.MaxFrame:])]
		return nil
	}
	putItem(k.frame, &e.item)
	op.Frame = k.frame[:min(len(k.frame), transport.MaxFrame)]
	return nil
}

// ended takes the end of an op.
func (r *rail) ended(user uint64) {
	w := &r.c.writes[user-1]
	r.load -= w.size
	if r.meter.on {
		r.meter.took += w.size
		r.f.timed = append(r.f.timed, r)
	}
	if w.copied && !w.ended {
		w.ended = true
		r.c.end(w, nil)
	}
	r.c.order.let(w.num)
	if r.c.asks() {
		r.c.after()
	}
}

// close closes the member Conn and lets go of what it was not handed.
func (r *rail) close() {
	if r.shut {
		return
	}
	r.shut = true
	for _, e := range r.queue {
		if e.write != 0 {
			r.load -= r.c.writes[e.write-1].size
			r.c.order.let(r.c.writes[e.write-1].num)
		}
	}
	untold := len(r.queue) > 0
	r.queue, r.tail = nil, nil
	switch {
	case !r.f.answers(r.at):
	case r.c != nil && untold && r.c.broken: // the peer has not been told on this member
		r.conn.CloseFor(r.c.err)
	case r.c != nil && r.refused != nil && !r.c.closed: // the peer's member may still work
		r.conn.CloseFor(r.refused)
	default:
		r.conn.Close()
	}
}

// frame takes a frame of the peer that recvSmall does not.
func (r *rail) frame(data []byte, p *link.Found) {
	switch {
	case r.fresh:
		r.f.greeted(r, data)
	case r.c == nil:
		r.breach(errors.New("rails: the peer speaks before it is greeted"))
	case r.shut:
	case len(data) > 0 && kind(data[0]) == piece:
		if n := len(data) - 1; n < 1 || n > headerLen || len(r.tail) > 0 {
			r.breach(fmt.Errorf("rails: a piece of %d bytes, behind one of %d: want one of 1 to %d", n, len(r.tail), headerLen))
			return
		}
		r.tail = append(r.tail[:0], data[1:]...)
	case len(data) > 0 && kind(data[0]) == ailing:
		if err := r.c.hears(data); err != nil {
			r.breach(err)
		}
	case len(data) > 0 && kind(data[0]) == broken:
		r.c.fail(fmt.Errorf("rails: the peer has ended the connection: %q", data[1:min(len(data), 1+maxReason)]))
	default:
		it, err := parseItem(data)
		if err == nil && len(r.tail) > 0 && (it.kind != frame || len(data) != transport.MaxFrame) {
			err = fmt.Errorf("rails: an item of kind %d and %d bytes behind a piece", it.kind, len(data))
		}
		if err == nil {
			err = r.c.recv(r, it, data[min(headerLen, len(data)):], p)
		}
		if err != nil {
			r.breach(err)
		}
	}
}

// breach ends what r is for because of what the peer has done.
func (r *rail) breach(err error) {
	if r.c != nil {
		r.c.fail(fmt.Errorf("%w (%s)", err, r.conn.Peer().Remote))
		return
	}
	r.down = err
	r.conn.Close()
}

// refuse closes a member that no Conn has.
func (r *rail) refuse() {
	if r.fresh {
		r.f.unfresh(r)
	}
	if r.known = true; r.over {
		r.f.forget(r)
	}
	r.conn.Close()
}

// wentDown takes EvDown, or a refusal that no EvDown has followed.
func (r *rail) wentDown(err error) {
	r.down = err
	switch {
	case r.fresh:
		r.refuse()
	case r.c != nil && !r.shut:
		r.c.lose(r)
	}
}

// hasEnded takes EvClosed.
func (r *rail) hasEnded() {
	r.over = true
	if r.fresh {
		r.f.unfresh(r)
	}
	if r.known {
		r.f.forget(r)
	}
	if r.c != nil {
		close(r.lost)
		r.c.order.closed(r.id)
		r.c.after()
		r.c.rails = slices.DeleteFunc(r.c.rails, func(o *rail) bool { return o == r })
	}
}
