package node

import (
	"fmt"
	"maps"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// watches are how event loops wait: threads that sleep on descriptors of their own, in no call of
// the node. A loop arms its watch, looks whether what it waits for has come, and sleeps on an
// eventfd. When something has ended, whoever drives writes to the eventfds of the watches that
// are armed, once for each time that they were.
type watches struct {
	armed  atomic.Int32 // how many are
	calls  atomic.Int32 // of ring, under way
	change sync.Mutex   // of what follows; the writes under it cannot block, as an eventfd takes 2^64 of them
	all    map[uint64]*watch
	opened uint64 // watches so far
}

// watch is one eventfd.
type watch struct {
	fd    int // a duplicate of the caller's, so that it is ours to close
	armed bool
}

// Watch opens a watch that writes to fd, an eventfd of the caller's.
func (n *Node) Watch(fd int) (uint64, error) {
	own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("node: watch: duplicate descriptor %d: %w", fd, err)
	}
	n.change.Lock()
	defer n.change.Unlock()
	n.opened++
	n.all[n.opened] = &watch{fd: own}
	return n.opened, nil
}

// Arm has a watch written to when something may have ended next. It is to be called before the
// caller looks, so that nothing is missed. The node is driven until then.
func (n *Node) Arm(id uint64) error {
	n.change.Lock()
	w := n.all[id]
	if w != nil && !w.armed {
		w.armed = true
		n.armed.Add(1)
	}
	n.change.Unlock()
	if w == nil {
		return badSetting("node: watch %d is not open", id)
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
	n.unwatchIf(func(x uint64) bool { return x == id })
}

// unwatchIf closes the watches that are to go.
func (p *watches) unwatchIf(goes func(id uint64) bool) {
	p.change.Lock()
	defer p.change.Unlock()
	maps.DeleteFunc(p.all, func(id uint64, w *watch) bool {
		if !goes(id) {
			return false
		}
		if w.armed {
			p.armed.Add(-1)
		}
		unix.Close(w.fd)
		return true
	})
}

// alarm writes to the eventfds of the watches that are armed, or of every one.
func (p *watches) alarm(every bool) {
	p.change.Lock()
	defer p.change.Unlock()
	for _, w := range p.all {
		if w.armed {
			w.armed = false
			p.armed.Add(-1)
		} else if !every {
			continue
		}
		one := [8]byte{1}
		_, _ = unix.Write(w.fd, one[:]) // full means that it is readable already
	}
}

// watched reports whether what comes is to be found also while no caller drives: a watch is armed, or
// a proxy runs.
func (n *Node) watched() bool { return n.armed.Load() > 0 || n.proxies.running.Load() > 0 }

// unattended reports whether that is so and the background goroutine may be in a nap, so that nobody
// would find it.
func (n *Node) unattended() bool {
	return !n.threaded && n.watched() && !n.resting.Load()
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
