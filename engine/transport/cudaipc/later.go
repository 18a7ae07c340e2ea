package cudaipc

import (
	"slices"
	"sync"
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
	kept    [kinds]amount // of those
	running bool
	watch   []*func(error) // who is told of a panic
}

// A Kind of what is given back says who has use for it.
type Kind int

// Memory of this GPU, mappings of other processes' memory, what takes up the host, and what
// who holds may still use.
const (
	Memory Kind = iota
	Mapping
	Host
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

type amount struct {
	bytes  uint64
	chores int
}

// Of each Kind so much is kept for who holds: peers that come and go for days are not to
// fill a GPU, or take all descriptors.
const (
	putOffMost   = 1 << 30
	putOffChores = 1000
)

func (a amount) over() bool { return a.bytes > putOffMost || a.chores > putOffChores }

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

// Release ends a Hold. After the last one all goes back that was put off. False: there was
// none.
func (l *Later) Release() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.holds == 0 {
		return false
	}
	l.holds--
	l.start()
	return true
}

// Held says whether somebody holds.
func (l *Later) Held() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.holds > 0
}

// Do calls what gives back so many bytes, in a goroutine of its own.
func (l *Later) Do(kind Kind, bytes uint64, do func()) *Chore {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := &Chore{kind: kind, bytes: bytes, do: do}
	l.left = append(l.left, c)
	l.kept[kind].bytes += bytes
	l.kept[kind].chores++
	l.start()
	return c
}

// Cancel says whether a Chore had not begun, and does not.
func (l *Later) Cancel(c *Chore) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	i := slices.Index(l.left, c)
	if i >= 0 {
		l.take(i)
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
	return l.running
}

// Wait waits until all is given back that is not put off, at most for so long. False: it is
// not.
func (l *Later) Wait(limit time.Duration) bool {
	for end := time.Now().Add(limit); l.works(); time.Sleep(100 * time.Microsecond) {
		if time.Now().After(end) {
			return false
		}
	}
	return true
}

func (l *Later) works() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.running
}

// due is the place in left of what is to be given back now, or -1.
func (l *Later) due() int {
	return slices.IndexFunc(l.left, func(c *Chore) bool { return l.holds == 0 || c.forced || l.kept[c.kind].over() })
}

func (l *Later) take(i int) *Chore {
	c := l.left[i]
	l.left = slices.Delete(l.left, i, i+1)
	l.kept[c.kind].bytes -= c.bytes
	l.kept[c.kind].chores--
	return c
}

func (l *Later) start() {
	if !l.running && l.due() >= 0 {
		l.running = true
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
	if l.running = i >= 0; !l.running {
		return nil
	}
	return l.take(i)
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
