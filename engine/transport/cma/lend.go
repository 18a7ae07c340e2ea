package cma

import (
	"fmt"

	"golang.org/x/sys/unix"

	"fserver/engine/mem"
	"fserver/engine/transport"
)

// How shared memory is lent.
//
// Its descriptor goes over the socket, once for each Conn, with a byte that
// wakes as any does. The descriptors of a Conn are numbered from 1 as they go,
// so both sides know the number of each, and no number is used twice. A loan
// names the number, an offset and a length. Whoever reads it has read the
// socket that far, or does so then: the descriptor was sent before the record
// was stored. The receiver checks what it was passed, maps it for reading,
// closes the descriptor, and keeps the mapping for later loans, until the owner
// says that the memory is freed (recFreed), or the Conn ends. Who still looks
// at a loan then holds the mapping by itself.
//
// A side takes maxViews pieces of shared memory and maxViewBytes of them at a
// time. Each counts until it is unmapped, whoever holds it; control.views tells
// the owner of that. The owner counts too, and lends nothing beyond: whoever asks
// Lends writes instead.
const (
	maxViews     = 1024
	maxViewBytes = 1 << 40
	// maxLetters bounds the reads of a socket in search of a descriptor: each
	// takes one, and up to 256 bytes that only wake.
	maxLetters = 2 * maxViews
)

// amount is how much shared memory went over a socket, ever.
type amount struct{ pieces, bytes uint64 }

// room says whether n bytes more may be shown when so much has been unmapped.
// Lies in that only make it refuse, or are found out by the other side.
func (a amount) room(gone, goneBytes, n uint64) bool {
	return n <= maxViewBytes && a.pieces-gone < maxViews && a.bytes-goneBytes <= maxViewBytes-n
}

// views is the peer's shared memory as the receiving half of a Conn sees it.
type views struct {
	mapped map[uint64]*mem.View // by number
	had    amount
	tally  *mem.Tally // outlives the Conn, as the views may
}

// Lends implements transport.Conn. It passes what the peer does not have yet.
func (c *Conn) Lends(s mem.Span) bool {
	m := mem.SharedAt(s)
	if m == nil {
		return false
	}
	if c.tx.lent[m] != 0 {
		return true
	}
	c.f.Owner.Lock()
	defer c.f.Owner.Unlock()
	n := m.Region().Len
	if c.Err != nil || c.hup || !c.tx.shown.room(c.theirs.views.Load(), c.theirs.viewBytes.Load(), n) {
		return false
	}
	if passFD(c.FD, m.FD()) != nil {
		return false // the socket is full, or too many descriptors are under way
	}
	c.tx.shown.pieces++
	c.tx.shown.bytes += n
	if c.tx.lent == nil {
		c.tx.lent = map[*mem.Shared]uint64{}
	}
	c.tx.lent[m] = c.tx.shown.pieces
	return true
}

// loan is where the memory of an operation that lends is, as the peer knows it.
func (t *tx) loan(o *transport.Op) (number, off uint64, err error) {
	if len(o.Src) != 1 {
		return 0, 0, fmt.Errorf("cma: post: a loan has %d spans, want one", len(o.Src))
	}
	m := mem.SharedAt(o.Src[0])
	if number = t.lent[m]; number == 0 {
		return 0, 0, fmt.Errorf("cma: post: loan of %d bytes at %#x: the peer does not have that memory (ask Lends)", o.Src[0].Len, o.Src[0].Addr)
	}
	return number, uint64(o.Src[0].Addr - m.Region().Addr), nil
}

// recall has the peer told of shared memory that was freed.
func (t *tx) recall() {
	for m, number := range t.lent {
		if m.Freed() {
			delete(t.lent, m)
			t.freed = append(t.freed, number)
		}
	}
}

// hear reads the socket of c once and takes the descriptor that comes, if one
// does. It is false when there was nothing to read, or c has ended.
func (f *Fabric) hear(c *Conn) bool {
	n, fd, e := f.letter.receive(c.FD, f.letter.bytes[:])
	var err error
	if fd >= 0 {
		if e == 0 {
			err = c.rx.gain(fd)
		}
		unix.Close(fd)
	}
	switch {
	case e == unix.EPROTO:
		err = fmt.Errorf("the peer passed something other than one descriptor, or this process has no free descriptor (raise ulimit -n)")
	case e == unix.EAGAIN:
		return false
	case e == unix.EINTR:
		return true
	case e != 0 || n == 0:
		f.part(c, nil)
		return false
	}
	if err != nil {
		f.fail(c, err)
		return false
	}
	return true
}

// gain maps shared memory that the peer passed; fd stays the caller's.
func (v *views) gain(fd int) error {
	if v.tally == nil {
		v.mapped, v.tally = map[uint64]*mem.View{}, new(mem.Tally)
	}
	n, err := mem.CheckSealed(fd, mem.Seals)
	if err != nil {
		return fmt.Errorf("the peer passed a descriptor that cannot be used: %w", err)
	}
	if !v.had.room(v.tally.Views.Load(), v.tally.Bytes.Load(), n) {
		return fmt.Errorf("the peer passed %d more bytes of shared memory after %d pieces of %d bytes: want at most %d pieces of %d bytes", n, v.had.pieces-v.tally.Views.Load(), v.had.bytes-v.tally.Bytes.Load(), maxViews, uint64(maxViewBytes))
	}
	view, err := mem.NewView(fd, n, v.tally)
	if err != nil {
		return err
	}
	v.had.pieces++
	v.had.bytes += n
	v.mapped[v.had.pieces] = view
	return nil
}

// forget lets go of all views.
func (v *views) forget() {
	for _, view := range v.mapped {
		_ = view.Drop() // our own mapping: it can be unmapped
	}
	clear(v.mapped)
}

// takeLoan reads a record of a loan, or of its end.
func (c *Conn) takeLoan(kind uint8, size uint64, ev *transport.Event) (made, taken bool, err error) {
	x := &c.rx
	length := uint64(writeLen)
	if kind == recFreed {
		length = 2 * wordLen
	}
	rec, err := x.record(length)
	if err != nil {
		return false, false, err
	}
	number := get64(rec, 1)
	if size != 0 {
		return false, false, fmt.Errorf("the peer sent a loan record with %d bytes of data, want 0", size)
	}
	for range maxLetters {
		if number <= x.had.pieces || !c.f.hear(c) {
			break
		}
	}
	if c.Err != nil {
		return false, false, c.Err
	}
	view := x.mapped[number]
	if view == nil {
		return false, false, fmt.Errorf("the peer named shared memory %d of %d, which it has not passed or has freed", number, x.had.pieces)
	}
	if kind == recFreed {
		delete(x.mapped, number)
		x.next(length)
		return false, true, view.Drop()
	}
	loan, off, n := get64(rec, 2), get64(rec, 3), get64(rec, 4)
	if n == 0 {
		return false, false, fmt.Errorf("the peer sent a loan of 0 bytes")
	}
	span, err := view.Region().Slice(off, n)
	if err != nil {
		return false, false, fmt.Errorf("the peer sent a loan out of bounds of shared memory %d: %w", number, err)
	}
	x.next(length)
	view.Hold()
	*ev = transport.Event{Kind: transport.EvLent, Loan: uint32(loan), Len: n, Span: span, View: view}
	return true, true, nil
}

// report tells the peer how much of its memory has been unmapped.
func (c *Conn) report() {
	if t := c.rx.tally; t != nil {
		if n := t.Bytes.Load(); n != c.mine.viewBytes.Load() {
			c.mine.views.Store(t.Views.Load())
			c.mine.viewBytes.Store(n)
		}
	}
}
