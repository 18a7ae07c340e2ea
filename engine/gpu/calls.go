package gpu

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"fserver/cshim/cuda"
	"fserver/engine/mem"
	"fserver/engine/transport"
)

// Calls makes the calls of a Device for a Fabric, whose lock is Mu. Any call of the driver may wait: behind a thread that
// frees memory, or in a full queue. So none is made with Mu held. A call that prepares memory is made aside, in a
// goroutine. One that enqueues work or asks how far it is, which is quick as a rule, is made in place, with Mu let go.
// Mu guards the fields, and is held in all methods but Pin, Map and those that give something back.
type Calls struct {
	Mu  *sync.Mutex
	Dev Device // nil: there is none
	// Later is that of the Device, for all who share it.
	Later *Later
	// Events has the CPU ask events how far copies are, instead of having the streams say so in host memory.
	Events bool

	Inside   bool     // somebody calls the Device in place, and is to have Mu again
	Asides   int      // goroutines that call it, and what is in prepared
	Panicked error    // one of them has
	prepared []func() // what is to be done when they have called it
	marks    []mark
	spare    []cuda.Event // for marks
}

// Name is the GPU; the CPU if there is none.
func (c *Calls) Name() mem.Device {
	if c.Dev == nil {
		return mem.CPU
	}
	return mem.GPU(c.Dev.Ordinal())
}

// Busy says whether calls are under way, or copies whose end an event tells.
func (c *Calls) Busy() bool { return c.Inside || c.Asides > 0 || c.Marked() }

// Marked reports whether there are copies whose end an event tells.
func (c *Calls) Marked() bool { return len(c.marks) > 0 }

// Leave lets go of Mu for calls in place, and Back takes it again: defer c.Leave().Back(). Inside keeps all others who
// call the Device in place away meanwhile. A Conn may have ended since.
func (c *Calls) Leave() *Calls {
	c.Inside = true
	c.Mu.Unlock()
	return c
}

// Back ends Leave.
func (c *Calls) Back() {
	c.Mu.Lock()
	c.Inside = false
}

// Aside makes calls of the driver in a goroutine. When they are over, Proceed calls then.
func (c *Calls) Aside(calls, then func()) {
	c.Asides++
	go func() {
		defer func() {
			p := transport.Caught(recover())
			c.Mu.Lock()
			defer c.Mu.Unlock()
			if p != nil {
				c.Panicked = p
				c.Asides--
				return
			}
			c.prepared = append(c.prepared, then)
		}()
		calls()
	}()
}

// Proceed goes on with what calls aside have made.
func (c *Calls) Proceed() {
	for _, then := range c.prepared {
		c.Asides--
		then()
	}
	c.prepared = c.prepared[:0]
}

// A Word is where a stream stores numbers, which grow.
type Word struct {
	At   uint64         // for the GPU
	Here *atomic.Uint64 // for the CPU; nil: the stream stores there also with Events
}

// Enqueue has a stream wait for an event, make copies, and store a number; see Device.Enqueue. After an error a part of
// it may be under way.
func (c *Calls) Enqueue(s cuda.Stream, after transport.Point, copies []cuda.Copy, to Word, number uint64) error {
	if c.Events && to.Here != nil {
		return c.enqueueMark(s, after, copies, to.Here, number)
	}
	defer c.Leave().Back()
	return c.Dev.Enqueue(s, cuda.Event(after.Event), copies, to.At, number)
}

// A mark is a number that the CPU stores when an event has passed, in place of the stream: for
// a driver or machine where the stores of streams to host memory are not to be relied on.
type mark struct {
	event  cuda.Event
	to     *atomic.Uint64
	number uint64
}

// enqueueMark does what Enqueue does, and records an event in place of the store.
func (c *Calls) enqueueMark(s cuda.Stream, after transport.Point, copies []cuda.Copy, to *atomic.Uint64, number uint64) (err error) {
	var e cuda.Event
	if n := len(c.spare); n > 0 {
		e, c.spare = c.spare[n-1], c.spare[:n-1]
	}
	defer func() {
		switch {
		case err == nil:
			c.marks = append(c.marks, mark{e, to, number})
		case e != 0:
			c.spare = append(c.spare, e)
		}
	}()
	defer c.Leave().Back()
	if e == 0 {
		if e, err = c.Dev.NewEvent(); err != nil {
			return err
		}
	}
	if err = c.Dev.Enqueue(s, cuda.Event(after.Event), copies, 0, 0); err != nil {
		return err
	}
	return c.Dev.Record(e, s)
}

// Look stores the numbers of the marks whose events have passed. Those before them in their stream have passed too, also
// if they were asked too early: no mark may outlive the memory of its word, which ends when the last number is there.
func (c *Calls) Look() {
	left := c.marks[:0]
	for _, m := range c.marks {
		if passed, err := c.Passed(m.event); err != nil || !passed {
			left = append(left, m)
			continue
		}
		m.to.Store(m.number)
		c.spare = append(c.spare, m.event)
		left = slices.DeleteFunc(left, func(before mark) bool {
			if before.to == m.to {
				c.spare = append(c.spare, before.event)
			}
			return before.to == m.to
		})
	}
	c.marks = left
}

// Passed reports whether an event has passed.
func (c *Calls) Passed(e cuda.Event) (bool, error) {
	defer c.Leave().Back()
	return c.Dev.Passed(e)
}

// Idle reports whether all has ended that a stream was given.
func (c *Calls) Idle(s cuda.Stream) (bool, error) {
	defer c.Look()
	defer c.Leave().Back()
	return c.Dev.Idle(s)
}

// Pin pins host memory, and returns its address for the GPU. Where memory is short, what is put off is there for who
// tries again.
func (c *Calls) Pin(r mem.Region) (uint64, error) {
	seen, err := c.Dev.Pin(uint64(r.Addr), r.Len)
	if cuda.Is(err, cuda.OutOfMemory) {
		c.Later.Force(Host)
	}
	return seen, Scarce(err)
}

// Unpin unpins host memory and then gives it back, later.
func (c *Calls) Unpin(r mem.Region, free func()) {
	c.Later.Do(Host, r.Len, func() {
		_ = c.Dev.Unpin(uint64(r.Addr))
		free()
	})
}

// Scarce says what to do about an error if it is that there is no host memory for staging.
func Scarce(err error) error {
	if cuda.Is(err, cuda.OutOfMemory) || errors.Is(err, unix.ENOMEM) {
		return fmt.Errorf("allocate host memory for staging: %w (send fewer or smaller tensors at once, or raise ulimit -l and the memory limit of the container)", err)
	}
	return err
}

// FreeStream destroys a stream on which nothing is left, later; 0 is none.
func (c *Calls) FreeStream(s cuda.Stream) {
	if s != 0 {
		c.Later.Do(Rest, 0, func() { _ = c.Dev.FreeStream(s) })
	}
}

// FreeEvents destroys the events of marks, later.
func (c *Calls) FreeEvents() {
	for _, e := range c.spare {
		c.Later.Do(Rest, 0, func() { _ = c.Dev.FreeEvent(e) })
	}
	c.spare = nil
}

// Pinned is host memory that is mapped and pinned. The zero value has no memory.
type Pinned struct {
	mem.Region
	Seen uint64 // its address for the GPU
}

// Word is the word at an offset.
func (p Pinned) Word(off uint64) Word {
	return Word{p.Seen + off, wordIn(mem.Region{Addr: p.Addr + uintptr(off), Len: 8})}
}

// Map maps and pins host memory. Unmap undoes it.
func (c *Calls) Map(n uint64) (p Pinned, err error) {
	if p.Region, err = mem.Map(n); err != nil {
		return Pinned{}, Scarce(err)
	}
	if p.Seen, err = c.Pin(p.Region); err != nil {
		_ = mem.Unmap(p.Region)
		p = Pinned{}
	}
	return p, err
}

// Unmap unpins and unmaps host memory, later; none does nothing.
func (c *Calls) Unmap(r mem.Region) {
	if r.Len != 0 {
		c.Unpin(r, func() { _ = mem.Unmap(r) })
	}
}

// Gather appends the copies of n bytes, from byte skip on of what spans name, to one address.
func Gather(copies []cuda.Copy, spans []mem.Span, skip, to, n uint64) []cuda.Copy {
	for _, s := range spans {
		if skip >= s.Len {
			skip -= s.Len
			continue
		}
		k := min(s.Len-skip, n)
		copies = append(copies, cuda.Copy{To: to, From: uint64(s.Addr) + skip, Len: k})
		to, n, skip = to+k, n-k, 0
		if n == 0 {
			break
		}
	}
	return copies
}
