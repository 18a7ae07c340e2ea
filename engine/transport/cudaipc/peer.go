package cudaipc

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"fserver/cshim/cuda"
	"fserver/engine/gpu"
	"fserver/engine/mem"
	"fserver/engine/transport"
)

// answerLimit is how long writes wait for both sides to introduce themselves. They are
// staged until they have done so then.
const answerLimit = 200 * time.Millisecond

// A queue of the driver takes 1,020 entries of streams that wait (on an H200), and one call more blocks until the streams
// move: under the token, where nobody delivers what a stream may be waiting for. A mapped write takes an entry for each
// copy and one for its number. So the writes of all Conns that have begun and not ended take up to queuedMost entries, as
// if all streams shared one queue, which they may. A Conn whose own take fewer than ownMost may begin one all the same:
// the streams of the others may wait for what it writes. The bound is of one Fabric, and the queues are of the process and the
// GPU: the Fabrics of several nodes of a process add up.
const (
	queuedMost = 256
	ownMost    = 16
)

// A mapping is an allocation of the peer's in our address space.
type mapping struct {
	id, base, size uint64 // of the peer's allocation, for the peer
	at             uint64 // where it is here
	reach          uint8
	lens           []uint64
	used           int // ways that go through it
	idle           bool
	chore          *gpu.Chore  // that closes it, or nil
	closed         atomic.Bool // it has
}

// unmap closes a mapping, later.
func (f *Fabric) unmap(m *mapping) {
	m.chore = f.Calls.Later.Do(gpu.Mapping, m.size, func() {
		if m.reach == reachIPC {
			_ = f.Calls.Dev.CloseIPC(m.at)
		} else {
			_ = f.Calls.Dev.UnmapFDs(m.at, m.lens)
		}
		m.closed.Store(true)
	})
}

// is says whether a mapping is of the allocation of r.
func (m *mapping) is(r *remote) bool { return m.id == r.id && m.base == r.base && m.size == r.size }

// over says whether a mapping is of addresses of the peer's that r is of too.
func (m *mapping) over(r *remote) bool { return m.base < r.base+r.size && r.base < m.base+m.size }

// A way is where a region of the peer's is in our address space.
type way struct {
	slot  uint64
	at    uint64 // 0: it cannot be mapped
	n     uint64 // bytes of the region
	again bool   // for now: what was at its address is still mapped
	m     *mapping
}

// What mapInto says of a write.
const (
	notNow  = iota
	mapped  // it has begun
	toInner // it cannot be mapped
)

// mapInto starts a write by mapping if it can.
func (c *Conn) mapInto(wr *waiting, r *remote) int {
	if c.apart {
		return toInner
	}
	if c.asked.IsZero() {
		c.asked = time.Now()
	}
	// Before the peer knows our segment, the end of a key would not wait for us.
	if !c.introduce() || c.theirs == nil || c.theirs.met.Load() == 0 {
		if c.introducing() || time.Since(c.asked) < answerLimit {
			return notNow
		}
		return toInner
	}
	n := wr.Is.n
	if r.fabric != c.theirs.fabric || wr.Op.Off > r.n || n > r.n-wr.Op.Off {
		return toInner // which refuses it
	}
	w := c.ways[r.key.ID]
	if w == nil {
		w = c.reach(r)
	}
	switch {
	case c.Waits:
		return notNow
	case w == nil || w.at == 0 || wr.Op.Off+n > w.n: // another Blob for the same key may say that it has more
		return toInner
	case c.queued >= ownMost && c.f.queued >= queuedMost:
		return notNow
	}
	l := &c.sender
	s := l.seg
	number := s.begun.Load() + 1
	s.keys[number%depth] = r.key.ID
	s.begun.Store(number)
	if c.peers[w.slot].Load() != r.key.ID || c.theirs.over.Load() != 0 {
		s.begun.Store(number - 1) // the key is gone, or the Conn: inner refuses it
		return toInner
	}
	l.copies = gpu.Gather(l.copies[:0], wr.Op.Src, 0, w.at+wr.Op.Off, n)
	// After an error, a part of it may be under way: tick finds out when that is over.
	wr.Is.number, wr.Is.queued = number, len(l.copies)+1
	c.queued += wr.Is.queued
	c.f.queued += wr.Is.queued
	if err := c.f.Calls.Enqueue(l.stream, wr.Op.After, l.copies, l.mapped, number); err != nil {
		c.Fail(fmt.Errorf("write %d bytes into the peer's memory: %w", n, err))
		return mapped
	}
	c.mapped = true
	return mapped
}

// sender is the stream of a Conn on which its copies are made, and its segment, where the stream says how far it is.
type sender struct {
	stream cuda.Stream
	shared *mem.Shared
	seg    *segment
	mapped gpu.Word // seg.done; it is the GPU that stores it, also where our own CPU asks events
	copies []cuda.Copy
	broken bool // the device does nothing any more
}

// equip gives c what it needs for GPU memory, once.
func (c *Conn) equip() {
	if c.equipped {
		return
	}
	c.equipped = true
	var l sender
	var err error
	c.Aside(func() { err = l.open(c.f) }, func() {
		if err != nil {
			c.Fail(fmt.Errorf("set up the memory that shows the progress of writes: %w", err))
			return
		}
		c.sender = l
		c.met()
	})
}

func (l *sender) open(f *Fabric) (err error) {
	if l.shared, err = mem.NewNamed("fserver-cudaipc", uint64(segmentSize)); err != nil {
		return gpu.Scarce(err)
	}
	r := l.shared.Region()
	seen, err := f.Calls.Pin(r)
	if err != nil {
		_ = mem.FreeShared(l.shared.ID())
		return err
	}
	l.seg = segmentIn(r)
	l.mapped = gpu.Word{At: seen + uint64(doneAt)}
	l.seg.spaces, l.seg.magic, l.seg.fabric = f.spaces, segmentMagic, f.id
	if l.stream, err = f.Calls.Dev.NewStream(); err != nil {
		l.close(f)
	}
	return err
}

// close gives back what open acquired.
func (l *sender) close(f *Fabric) {
	f.Calls.FreeStream(l.stream)
	if s := l.shared; s != nil {
		f.Calls.Unpin(s.Region(), func() { _ = mem.FreeShared(s.ID()) })
	}
	*l = sender{}
}

// working says whether copies are under way.
func (l *sender) working() bool {
	return l.seg != nil && !l.broken && l.seg.done.Load() < l.seg.begun.Load()
}

// introduction is how many operations introduce tells the peer with.
const introduction = 3

var meeting = appendHead(nil, kindIntroduction, 0)

// introduce shows the peer our table of keys and our segment; false: not wholly,
// for now. It passes what inner has not sent, so that no loan with a number comes before it.
func (c *Conn) introduce() bool {
	if c.shown == introduction || c.sender.seg == nil {
		return c.sender.seg != nil
	}
	table, seg := c.f.table.Region().Span(), c.sender.shared.Region().Span()
	if !c.Conn.Lends(table) || !c.Conn.Lends(seg) || !c.Flush() {
		return false
	}
	ops := [introduction]transport.Op{
		{Kind: transport.OpFrame, Frame: meeting, Passes: true},
		{Kind: transport.OpLend, Src: []mem.Span{table}, Passes: true},
		{Kind: transport.OpLend, Src: []mem.Span{seg}, Passes: true},
	}
	for ; c.shown < introduction; c.shown++ {
		if !c.Signal(ops[c.shown]) {
			return false
		}
	}
	c.Owes = false
	return true
}

// meet begins to take the peer's introduction: two loans follow.
func (c *Conn) meet() error {
	if c.theirs != nil || c.expect > 0 || c.loan.View != nil {
		return errors.New("the peer introduced itself where that is not allowed")
	}
	c.expect = 2
	return nil
}

// introducing says whether the peer takes the next loan for one of the introduction.
func (c *Conn) introducing() bool { return c.shown > 0 && c.shown < introduction }

// greeted takes a loan that belongs to the peer's introduction.
func (c *Conn) greeted(e *transport.Event) error {
	c.expect--
	c.views[1-c.expect] = e.View
	if c.expect > 0 {
		return nil
	}
	table, seg := c.views[0].Region(), c.views[1].Region()
	if table.Len < tableSize || seg.Len < uint64(segmentSize) || segmentIn(seg).magic != segmentMagic {
		return fmt.Errorf("the peer lent a table of %d bytes and a segment of %d bytes, which this version does not know (run the same version of fserver on both sides)", table.Len, seg.Len)
	}
	theirs := segmentIn(seg)
	c.peers, c.theirs, c.ways = tableIn(table), theirs, map[uint64]*way{}
	c.Owes = c.shown < introduction // our own, in answer
	if why := c.f.spaces.apart(theirs.spaces); why != "" {
		c.apart, c.staged = true, why
	}
	c.met()
	c.equip()
	c.Wake()
	return nil
}

// met tells the peer that we know its segment, when we have one ourselves.
func (c *Conn) met() {
	if c.theirs != nil && c.sender.seg != nil {
		c.sender.seg.met.Store(1)
	}
}

// reach finds the way to a region of the peer's; nil: that takes calls of the driver, or what
// lay at the address before is still mapped.
func (c *Conn) reach(arg *remote) *way {
	r := *arg // it may outlive the operation
	id, dev, there := r.key.ID, c.f.Calls.Dev, &c.peers[r.slot]
	w := &way{slot: r.slot, n: r.n}
	var err error
	if ordinal, ours := c.f.ours(&r); ours && r.reach == reachIPC {
		// An IPC handle cannot be opened where it comes from, and need not.
		c.Aside(func() { err = dev.Reach(ordinal) }, func() {
			if c.ways[id] = w; err == nil {
				w.at = r.addr
			} else {
				c.staged = err.Error()
			}
		})
		return nil
	}
	beside := false
	for _, m := range c.maps {
		switch {
		case m.closed.Load() || !m.over(&r):
		case m.is(&r) && (m.chore == nil || c.f.Calls.Later.Cancel(m.chore)):
			m.chore = nil
			c.ways[id] = w
			w.through(m, &r)
			return w
		case m.is(&r) || m.reach == reachIPC:
			// What lies at the same addresses of the peer has been freed there, and a handle
			// cannot be opened beside it. Of mapped pieces, others may share some: they are in use.
			if beside = true; m.chore == nil {
				c.forget(m)
			}
		}
	}
	if beside {
		return nil
	}
	m, process := &mapping{id: r.id, base: r.base, size: r.size, reach: r.reach}, c.Conn.Peer().Process
	c.Aside(func() { err = m.open(dev, &r, process, func() bool { return there.Load() == id }) }, func() {
		switch c.ways[id] = w; {
		case err == nil:
			c.maps = append(c.maps, m)
			w.through(m, &r)
			return
		case m.at != 0: // it is not what it should be
			c.f.unmap(m)
		}
		if w.again = cuda.Is(err, cuda.AlreadyMapped); !w.again { // by another Conn, or a channel
			c.staged = err.Error()
		}
	})
	return nil
}

// through makes w the way to r by a mapping.
func (w *way) through(m *mapping, r *remote) {
	m.used++
	m.idle = false
	w.m, w.at = m, m.at+(r.addr-r.base)
}

var (
	errGone  = errors.New("cudaipc: the peer has deregistered the key")
	errOther = errors.New("cudaipc: the mapped memory does not match the key")
)

// open maps the allocation of r, which is of the peer's process. A descriptor's number may have been given to
// something else since the owner wrote it down, but not as long as the key is there.
// A copy behind the end of what is mapped would cost us our context.
func (m *mapping) open(d gpu.Device, r *remote, process int, there func() bool) (err error) {
	if r.reach == reachIPC {
		var h cuda.IPCHandle
		copy(h[:], r.handle)
		if m.at, err = d.ImportIPC(h); err != nil {
			return err
		}
		is, err := d.Describe(m.at)
		if err == nil && is.Base+is.Len-m.at < m.size { // a small allocation lies in a block
			err = errOther
		}
		return err
	}
	if process == 0 || r.pid != uint64(process) {
		return fmt.Errorf("cudaipc: the key names memory of process %d, and the peer is process %d", r.pid, process)
	}
	pidfd, err := unix.PidfdOpen(process, 0)
	if err != nil {
		return err
	}
	defer unix.Close(pidfd)
	var fds []int32
	defer func() {
		for _, fd := range fds {
			unix.Close(int(fd))
		}
	}()
	for b := []byte(r.fdsAndPieces); len(b) > 0; b = b[pieceLen:] {
		fd, err := unix.PidfdGetfd(pidfd, int(binary.LittleEndian.Uint32(b)), 0)
		if err != nil {
			return err
		}
		fds = append(fds, int32(fd))
		m.lens = append(m.lens, binary.LittleEndian.Uint64(b[4:]))
	}
	if !there() {
		return errGone
	}
	m.at, err = d.MapFDs(fds, m.lens)
	return err
}

// forget closes a mapping; the ways through it are found anew.
func (c *Conn) forget(m *mapping) {
	for id, w := range c.ways {
		if w.m == m {
			delete(c.ways, id)
		}
	}
	m.used = 0
	c.f.unmap(m)
}

// sweep forgets, while no copies are under way, the keys that are gone, and closes the mappings that have had none
// since the last time.
func (c *Conn) sweep() {
	for id, w := range c.ways {
		if c.peers[w.slot].Load() != id || w.again {
			delete(c.ways, id)
			if w.m != nil {
				w.m.used--
			}
		}
	}
	c.maps = slices.DeleteFunc(c.maps, func(m *mapping) bool {
		if m.used == 0 && m.idle && m.chore == nil {
			c.f.unmap(m)
		}
		m.idle = m.used == 0
		return m.closed.Load()
	})
}
