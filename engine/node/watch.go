package node

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// watches are how event loops wait: threads that sleep on descriptors of their own, in no call of
// the node. A loop arms its watch, looks whether what it waits for has come, and sleeps on an
// eventfd. When something has ended, whoever drives writes to the eventfds of the watches that
// are armed, once for each time that they were.
type watches struct {
	armed  atomic.Int32 // how many; never less than are armed
	calls  atomic.Int32 // of alarm and rouse, under way
	all    atomic.Pointer[[]*watch]
	change sync.Mutex // of all
	opened uint64     // watches so far
}

// watch is one eventfd.
type watch struct {
	id    uint64
	fd    int // a duplicate of the caller's, so that it is ours to close
	state atomic.Int32
}

const (
	watchIdle int32 = iota
	watchArmed
	watchClosed
)

// Watch opens a watch that writes to fd, an eventfd of the caller's.
func (n *Node) Watch(fd int) (uint64, error) {
	own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("node: watch: duplicate descriptor %d: %w", fd, err)
	}
	n.change.Lock()
	defer n.change.Unlock()
	n.opened++
	w := &watch{id: n.opened, fd: own}
	list := append(slices.Clone(n.list()), w)
	n.all.Store(&list)
	return w.id, nil
}

// Arm has a watch written to when something may have ended next. It is to be called before the
// caller looks, so that nothing is missed. The node is driven until then.
func (n *Node) Arm(id uint64) error {
	w := n.watchOf(id)
	if w == nil {
		return badSetting("node: watch %d is not open", id)
	}
	n.armed.Add(1)
	if !w.state.CompareAndSwap(watchIdle, watchArmed) {
		n.armed.Add(-1)
	}
	if n.stopped.Load() {
		if err := n.failed(); err != nil {
			return err
		}
		return ErrClosed
	}
	if n.callers.Load() == 0 && n.unattended() {
		n.rouse()
	}
	return nil
}

// Unwatch closes a watch. Its eventfd is not written to any more when it has returned.
func (n *Node) Unwatch(id uint64) {
	n.change.Lock()
	defer n.change.Unlock()
	if w := n.watchOf(id); w != nil {
		list := slices.DeleteFunc(slices.Clone(n.list()), func(x *watch) bool { return x == w })
		n.all.Store(&list)
		if w.state.Swap(watchClosed) == watchArmed {
			n.armed.Add(-1)
		}
		for n.calls.Load() > 0 { // a write takes less than a microsecond
			yield()
		}
		unix.Close(w.fd)
	}
}

// unwatchAll closes all watches.
func (n *Node) unwatchAll() {
	for _, w := range n.list() {
		n.Unwatch(w.id)
	}
}

func (p *watches) list() []*watch {
	if l := p.all.Load(); l != nil {
		return *l
	}
	return nil
}

func (p *watches) watchOf(id uint64) *watch {
	for _, w := range p.list() {
		if w.id == id {
			return w
		}
	}
	return nil
}

// alarm writes to the eventfds of the watches that are armed, or of every one.
func (p *watches) alarm(every bool) {
	p.calls.Add(1)
	defer p.calls.Add(-1)
	for _, w := range p.list() {
		armed := w.state.CompareAndSwap(watchArmed, watchIdle)
		if armed {
			p.armed.Add(-1)
		}
		if armed || every && w.state.Load() != watchClosed {
			one := [8]byte{1}
			_, _ = unix.Write(w.fd, one[:]) // full means that it is readable already
		}
	}
}

// unattended reports whether a watch is armed and the background goroutine may be in a nap, so
// that nobody would find what comes.
func (n *Node) unattended() bool {
	return !n.threaded && n.armed.Load() > 0 && !n.resting.Load()
}

// rouse ends a nap of the background goroutine, unless the node is closed. It does not take the
// token: the goroutine wants it as soon as it wakes, and may wake on the caller's core.
func (n *Node) rouse() { n.ring(&n.nudge) }

// ring rings a bell, unless the node is closed.
func (n *Node) ring(b *bell) {
	n.calls.Add(1) // Close waits for this
	defer n.calls.Add(-1)
	if !n.stopped.Load() {
		b.ring()
	}
}
