package cma

import (
	"fmt"

	"golang.org/x/sys/unix"

	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// How a copy into a peer's memory and the end of a key exclude each other.
//
// The sender looks its targets up in the peer's table, puts them into iov of
// its control block, makes busy odd, and only then looks again whether all keys
// are still there and the peer has not ended the Conn. If so, it copies. Then it
// makes busy even. The peer takes the key from its table, or ends the Conn, and
// then looks at busy. All of these are sequentially consistent, so one of the
// two sees the other. A peer that finds busy odd waits until it changes.
//
// A sender can be stopped (SIGSTOP, a debugger, a freezer) or starved at any
// instruction, so it may be long before busy changes. But the kernel reads iov,
// which both sides share, when the call begins, and stops nobody inside of the
// call. So the peer sets the lengths in iov to zero: a sender that has not
// begun its call will write nothing with it. One that has begun is running or
// waits for a page until it is through, so a peer of which no thread is in
// either state (/proc says that) writes nothing any more, and neither does one
// that is gone. What is left is a sender that the kernel lets not run in the
// middle of a call: EvFreed and EvClosed wait for that one, and Close up to settleLimit.
//
// A call whose lengths were taken moves fewer bytes than it was to, possibly to
// other targets of the same call. No write of it has been reported yet, so the
// sender starts it all over.

// vec is the arguments of one copy. It lives in a Fabric and is used by its
// owner.
type vec struct {
	local  [maxVec]iovec
	n, m   int // of local; of the remote ones
	sum    uint64
	ids    [maxRemote]uint64 // whose memory the remote ones are
	spaces [maxRemote]uint64 // their lengths
}

// gather fills v and the iov of c with the writes at the head of the queue, at most limit bytes and
// up to what goes through the ring. It returns where the queue stands when they have gone.
func (c *Conn) gather(v *vec, limit uint64) (ready uint32, cur cursor, err error) {
	t := &c.tx
	ready, cur = t.ready, t.cur
	v.n, v.m, v.sum = 0, 0, 0
	for ready != t.End && v.sum < limit && v.m < maxRemote {
		o := t.At(ready)
		if o.kind != transport.OpWrite || t.stages(o) {
			break
		}
		to, bad := c.table.target(o.id, o.token, o.off, o.n)
		if bad != nil {
			if v.sum > 0 {
				break // that comes when the others have gone
			}
			return ready, cur, bad
		}
		from := cur.done
		for most := min(o.n, from+limit-v.sum); cur.done < most && v.n < maxVec; v.n++ {
			s := cur.next(o.src, most-cur.done)
			v.local[v.n] = iovec{s.Addr, s.Len}
		}
		n := cur.done - from
		if n == 0 {
			break
		}
		c.mine.iov[v.m].base.Store(uint64(to.Addr) + from)
		c.mine.iov[v.m].n.Store(n)
		v.ids[v.m], v.spaces[v.m] = o.id, n
		v.m++
		v.sum += n
		if cur.done < o.n {
			break
		}
		ready++
		cur = cursor{}
	}
	return ready, cur, nil
}

// copy moves up to limit bytes of the writes at the head of the queue into the
// peer's memory, in one call. It may move none without an error: then the peer
// has just changed something.
func (c *Conn) copy(v *vec, limit uint64) (moved uint64, err error) {
	ready, cur, err := c.gather(v, limit)
	if err != nil || v.sum == 0 {
		return 0, err
	}
	c.mine.busy.Add(1)
	var n uint64
	var e unix.Errno
	valid := c.valid(v)
	if valid {
		n, e = writeTo(c.peer.pid, v.local[:v.n], &c.mine.iov, v.m)
	}
	revoked := c.revoked(v)
	c.mine.busy.Add(1)
	switch {
	case !valid || n != v.sum && revoked:
		return 0, nil
	case e == 0 && n == v.sum:
		c.tx.ready, c.tx.cur = ready, cur
		c.tx.moved += n
		return n, nil
	case e == 0:
		e = unix.EFAULT
	}
	if e == unix.EFAULT {
		return 0, fmt.Errorf("write %d bytes into process %d: %w (memory of one of the two processes is not mapped)", v.sum, c.peer.pid, e)
	}
	return 0, fmt.Errorf("write %d bytes into process %d: %w", v.sum, c.peer.pid, e)
}

// valid says whether what v names may still be written.
func (c *Conn) valid(v *vec) bool {
	for _, id := range v.ids[:v.m] {
		if c.table[id%link.SlotLimit].ID.Load() != id {
			return false
		}
	}
	return c.theirs.over.Load() == 0
}

// revoked says whether the peer has taken a length of v.
func (c *Conn) revoked(v *vec) bool {
	for i, n := range v.spaces[:v.m] {
		if c.mine.iov[i].n.Load() != n {
			return true
		}
	}
	return false
}
