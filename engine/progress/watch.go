package progress

import (
	"fmt"
	"maps"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// watches are how event loops wait: threads that sleep on descriptors of their own, in no call of
// the Driver. A loop arms its watch, looks whether what it waits for has come, and sleeps on an
// eventfd. When something has ended, the owner writes to the eventfds of the watches that
// are armed, once for each time that they were.
type watches struct {
	armed  atomic.Int32 // how many are
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
func (d *Driver) Watch(fd int) (uint64, error) {
	own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("progress: watch: duplicate descriptor %d: %w", fd, err)
	}
	d.change.Lock()
	defer d.change.Unlock()
	d.opened++
	d.all[d.opened] = &watch{fd: own}
	return d.opened, nil
}

// Arm has a watch written to when something may have ended next, and reports whether it is open. The caller
// is to look after that, so that nothing is missed. The work is driven until then, if it has not been shut.
func (d *Driver) Arm(id uint64) (open bool) {
	d.change.Lock()
	w := d.all[id]
	if w != nil && !w.armed {
		w.armed = true
		d.armed.Add(1)
	}
	d.change.Unlock()
	if w != nil && d.callers.Load() == 0 && d.unattended() {
		d.rouse()
	}
	return w != nil
}

// Unwatch closes a watch. Its eventfd is not written to any more when it has returned.
func (d *Driver) Unwatch(id uint64) {
	d.unwatchIf(func(x uint64) bool { return x == id })
}

// UnwatchAll closes all watches.
func (d *Driver) UnwatchAll() {
	d.unwatchIf(func(uint64) bool { return true })
}

// unwatchIf closes the watches that are to go.
func (d *Driver) unwatchIf(goes func(id uint64) bool) {
	d.change.Lock()
	defer d.change.Unlock()
	maps.DeleteFunc(d.all, func(id uint64, w *watch) bool {
		if !goes(id) {
			return false
		}
		if w.armed {
			d.armed.Add(-1)
		}
		unix.Close(w.fd)
		return true
	})
}

// alarm writes to the eventfds of the watches that are armed, or of every one.
func (d *Driver) alarm(every bool) {
	d.change.Lock()
	defer d.change.Unlock()
	for _, w := range d.all {
		if w.armed {
			w.armed = false
			d.armed.Add(-1)
		} else if !every {
			continue
		}
		one := [8]byte{1}
		_, _ = unix.Write(w.fd, one[:]) // full means that it is readable already
	}
}

// watched reports whether what comes is to be found also while no caller drives: a watch is armed, or
// streams run whose words Pass looks at.
func (d *Driver) watched() bool { return d.armed.Load() > 0 || d.running.Load() > 0 }

// unattended reports whether that is so and the background goroutine may be in a nap, so that nobody
// would find it.
func (d *Driver) unattended() bool {
	return !d.settings.Thread && d.watched() && d.sleeper.Load() != atRest
}

// rouse ends a nap of the background goroutine, unless the work has been shut. It does not take the
// token: the goroutine wants it as soon as it wakes, and may wake on the caller's core.
func (d *Driver) rouse() { d.ring(&d.nudge) }

// ring rings a bell, unless the work has been shut.
func (d *Driver) ring(b *bell) {
	d.Enter()
	defer d.Leave()
	if !d.stopped.Load() {
		b.ring()
	}
}
