package cudaipc

import (
	"sync/atomic"

	"fserver/cshim/cuda"
	"fserver/engine/gpu"
	"fserver/engine/mem"
	"fserver/engine/transport"
)

// Any call of the driver may wait: behind a thread that frees memory, or in a full queue. So
// none is made with f.mu held. A call that prepares memory is made aside, in a goroutine. One
// that enqueues work or asks how far it is, which is quick as a rule, is made in place, with
// f.mu let go.

// A word is where a stream stores numbers, which grow.
type word struct {
	at   uint64         // for the GPU
	here *atomic.Uint64 // for the CPU
}

// wordAt is the word at an offset of pinned memory.
func wordAt(p pinned, off uint64) word {
	return word{p.seen + off, wordIn(mem.Region{Addr: p.Addr + uintptr(off), Len: 8})}
}

// leave lets go of f.mu for calls of the driver in place, and back takes it again: defer
// f.leave().back(). f.inside keeps all others who call the driver in place away meanwhile. A Conn
// may have ended since.
func (f *Fabric) leave() *Fabric {
	f.inside = true
	f.mu.Unlock()
	return f
}

func (f *Fabric) back() {
	f.mu.Lock()
	f.inside = false
}

// aside makes calls of the driver in a goroutine. When they are over, drive calls then.
func (f *Fabric) aside(calls, then func()) {
	f.asides++
	go func() {
		defer func() {
			p := transport.Caught(recover())
			f.mu.Lock()
			defer f.mu.Unlock()
			if p != nil {
				f.panicked = p
				f.asides--
				return
			}
			f.prepared = append(f.prepared, then)
		}()
		calls()
	}()
}

// enqueue has a stream wait for an event, make copies, and store a number; see Device.Enqueue.
// After an error a part of it may be under way.
func (f *Fabric) enqueue(s cuda.Stream, after transport.Point, copies []cuda.Copy, to word, number uint64) error {
	if f.o.Events && to.here != nil {
		return f.enqueueMark(s, after, copies, to.here, number)
	}
	defer f.leave().back()
	return f.dev.Enqueue(s, cuda.Event(after.Event), copies, to.at, number)
}

// A mark is a number that the CPU stores when an event has passed, in place of the stream: for
// a driver or machine where the stores of streams to host memory are not to be relied on.
type mark struct {
	event  cuda.Event
	to     *atomic.Uint64
	number uint64
}

// enqueueMark does what enqueue does, and records an event in place of the store.
func (f *Fabric) enqueueMark(s cuda.Stream, after transport.Point, copies []cuda.Copy, to *atomic.Uint64, number uint64) (err error) {
	var e cuda.Event
	if n := len(f.spare); n > 0 {
		e, f.spare = f.spare[n-1], f.spare[:n-1]
	}
	defer func() {
		switch {
		case err == nil:
			f.marks = append(f.marks, mark{e, to, number})
		case e != 0:
			f.spare = append(f.spare, e)
		}
	}()
	defer f.leave().back()
	if e == 0 {
		if e, err = f.dev.NewEvent(); err != nil {
			return err
		}
	}
	if err = f.dev.Enqueue(s, cuda.Event(after.Event), copies, 0, 0); err != nil {
		return err
	}
	return f.dev.Record(e, s)
}

// look stores the numbers of the marks whose events have passed.
func (f *Fabric) look() {
	left := f.marks[:0]
	for _, m := range f.marks {
		if passed, err := f.passed(m.event); err != nil || !passed {
			left = append(left, m)
			continue
		}
		m.to.Store(max(m.number, m.to.Load())) // an event before it may have been asked too early
		f.spare = append(f.spare, m.event)
	}
	f.marks = left
}

// passed reports whether an event has passed.
func (f *Fabric) passed(e cuda.Event) (bool, error) {
	defer f.leave().back()
	return f.dev.Passed(e)
}

// idle reports whether all has ended that a stream was given.
func (f *Fabric) idle(s cuda.Stream) (bool, error) {
	defer f.look()
	defer f.leave().back()
	return f.dev.Idle(s)
}

// pin is Pin. Where memory is short, what is put off is there for who tries again.
func (f *Fabric) pin(r mem.Region) (uint64, error) {
	seen, err := f.dev.Pin(uint64(r.Addr), r.Len)
	if cuda.Is(err, cuda.OutOfMemory) {
		f.o.Later.Force(gpu.Host)
	}
	return seen, scarce(err)
}

// unpin unpins host memory and then gives it back, later.
func (f *Fabric) unpin(r mem.Region, free func()) {
	f.o.Later.Do(gpu.Host, r.Len, func() {
		_ = f.dev.Unpin(uint64(r.Addr))
		free()
	})
}

// freeStream destroys a stream on which nothing is left.
func (f *Fabric) freeStream(s cuda.Stream) {
	if s != 0 {
		f.o.Later.Do(gpu.Rest, 0, func() { _ = f.dev.FreeStream(s) })
	}
}

// pinned is host memory that is mapped and pinned. The zero value has no memory.
type pinned struct {
	mem.Region
	seen uint64 // its address for the GPU
}

// mapPinned maps and pins host memory. unmapPinned undoes it.
func (f *Fabric) mapPinned(n uint64) (p pinned, err error) {
	if p.Region, err = mem.Map(n); err != nil {
		return pinned{}, scarce(err)
	}
	if p.seen, err = f.pin(p.Region); err != nil {
		_ = mem.Unmap(p.Region)
		p = pinned{}
	}
	return p, err
}

func (f *Fabric) unmapPinned(r mem.Region) {
	if r.Len != 0 {
		f.unpin(r, func() { _ = mem.Unmap(r) })
	}
}
