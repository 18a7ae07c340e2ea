package gpu

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"fserver/engine/transport"
)

// A Later frees, unmaps and unpins memory of one GPU for all of this process. Before it
// does any of these, the driver waits for all that the GPU has to do, and meanwhile
// keeps everyone else of the process from that GPU, launches and copies included. A kernel
// that waits for a message could then wait for ever: what it waits for may have to pass this
// GPU. So nothing is given back while somebody holds, up to a limit; else at once, aside.
// Its zero value is ready.
type Later struct {
	mu      sync.Mutex
	holds   int
	left    []*Chore
	running atomic.Bool    // changes under mu
	watch   []*func(error) // who is told of a panic
}

// A Kind of what is given back, by its number in fserver.h.
type Kind int

// Memory of this GPU, mappings of other processes' memory, pinned host memory, kernels, and what
// whoever holds may still use, a context that is not the primary one for example.
const (
	Memory Kind = iota
	Mapping
	Host
	Module
	Rest
	kinds
)

// A Chore is one thing that is given back.
type Chore struct {
	kind   Kind
	bytes  uint64
	do     func()
	forced bool
}

// Of each Kind so much is kept for whoever holds: peers that come and go for days are not to
// fill a GPU, or take all descriptors.
const (
	putOffMost   = 1 << 30
	putOffChores = 1000
)

// holdLimit bounds how long Hold waits.
const holdLimit = 5 * time.Second

// Hold has nothing given back until Release, which every Hold needs: kernels may wait for
// messages meanwhile. It waits for what is being given back now.
func (l *Later) Hold() {
	l.mu.Lock()
	l.holds++
	l.mu.Unlock()
	l.Wait(holdLimit)
}

// Release ends a Hold. After the last one all goes back that was put off, and Release waits for
// that, at most for so long. False: there was no Hold.
func (l *Later) Release(limit time.Duration) bool {
	l.mu.Lock()
	holds := l.holds
	l.holds = max(0, holds-1)
	l.start()
	l.mu.Unlock()
	if holds == 1 {
		l.Wait(limit)
	}
	return holds > 0
}

// Do calls what gives back so many bytes, in a goroutine of its own.
func (l *Later) Do(kind Kind, bytes uint64, do func()) *Chore {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := &Chore{kind: kind, bytes: bytes, do: do}
	l.left = append(l.left, c)
	l.start()
	return c
}

// Cancel says whether a Chore had not begun, and does not.
func (l *Later) Cancel(c *Chore) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	i := slices.Index(l.left, c)
	if i >= 0 {
		l.left = slices.Delete(l.left, i, i+1)
	}
	return i >= 0
}

// Force gives back all of a Kind that is put off now, also for who holds: there is need of
// it. It says whether anything is being given back.
func (l *Later) Force(kind Kind) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range l.left {
		c.forced = c.forced || c.kind == kind
	}
	l.start()
	return l.running.Load()
}

// Reclaim is Force, and waits for that, at most for so long. It says whether that has been of use.
func (l *Later) Reclaim(kind Kind, limit time.Duration) bool { return l.Force(kind) && l.Wait(limit) }

// Wait waits until all is given back that is not put off, at most for so long. False: it is
// not.
func (l *Later) Wait(limit time.Duration) bool {
	for end := time.Now().Add(limit); l.running.Load(); time.Sleep(100 * time.Microsecond) {
		if time.Now().After(end) {
			return false
		}
	}
	return true
}

// due is the place in left of what is to be given back now, or -1.
func (l *Later) due() int {
	var bytes, chores [kinds]uint64
	for _, c := range l.left {
		bytes[c.kind] += c.bytes
		chores[c.kind]++
	}
	return slices.IndexFunc(l.left, func(c *Chore) bool {
		return l.holds == 0 || c.forced || bytes[c.kind] > putOffMost || chores[c.kind] > putOffChores
	})
}

func (l *Later) start() {
	if !l.running.Load() && l.due() >= 0 {
		l.running.Store(true)
		go l.run()
	}
}

// run does what is due. A chore that panics does not keep back the others; when they
// are done, those who watch are told of the first.
func (l *Later) run() {
	var first *transport.PanicError
	for c := l.next(); c != nil; c = l.next() {
		if err := c.try(); first == nil {
			first = err
		}
	}
	if first == nil {
		return
	}
	l.mu.Lock()
	watch := slices.Clone(l.watch)
	l.mu.Unlock()
	for _, f := range watch {
		(*f)(first)
	}
}

// next takes a chore that is due; nil: run has done all.
func (l *Later) next() *Chore {
	l.mu.Lock()
	defer l.mu.Unlock()
	i := l.due()
	if i < 0 {
		l.running.Store(false)
		return nil
	}
	c := l.left[i]
	l.left = slices.Delete(l.left, i, i+1)
	return c
}

func (c *Chore) try() (err *transport.PanicError) {
	defer func() { err = transport.Caught(recover()) }()
	c.do()
	return nil
}

// OnPanic has f called with a *transport.PanicError when a chore has panicked: what the
// GPU holds is not known any more. f must not panic. stop ends that.
func (l *Later) OnPanic(f func(error)) (stop func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.watch = append(l.watch, &f)
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.watch = slices.DeleteFunc(l.watch, func(w *func(error)) bool { return w == &f })
	}
}
