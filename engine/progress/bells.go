package progress

import (
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// bell wakes a thread that sleeps on fd, an eventfd.
type bell struct {
	fd   int
	rung atomic.Bool // fd has been written and not read
}

func (b *bell) open() (err error) {
	b.fd, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	return err
}

// ring is to be called only while counted among callers or holding the token: then fd is open.
func (b *bell) ring() {
	if !b.rung.Swap(true) {
		one := [8]byte{1}
		_, _ = unix.Write(b.fd, one[:]) // full means that it is readable already
	}
}

// hush says whether the bell has been rung, and makes it silent. A thread that rings may have set rung and not yet written
// fd. Then rung stays set, so that the next hush reads fd.
func (b *bell) hush() bool {
	if !b.rung.Load() {
		return false
	}
	var buf [8]byte
	if n, _ := unix.Read(b.fd, buf[:]); n == len(buf) {
		b.rung.Store(false)
	}
	return true
}

// callerComes is how long what a caller has left to be sent waits for a caller to drive it. Who calls
// push_pull most likely waits next. To wake the background goroutine for that costs more than a
// small message takes, above all where both share a core: 33 µs of 93 (GPU tensors of 4 KiB over TCP).
const callerComes = 50 * time.Microsecond

// On a virtual machine it takes 10 µs to start and stop a timer that ends before all others of its core, because the host
// has to be told. After habit callers in a row that came in time, the timer therefore runs for patience, and is
// neither started nor stopped for each of them. The first caller that does not come is noticed after patience.
const (
	habit    = 8
	patience = 4 * time.Millisecond
)

// timer wakes a thread that sleeps on fd, a timerfd, unless it is stopped before.
type timer struct {
	fd      int
	pending atomic.Bool
	inTime  atomic.Int32 // stops in a row before its time, at most habit
	runs    atomic.Bool  // it was started for patience, and runs on when it is stopped
}

func (t *timer) open() (err error) {
	t.fd, err = unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_CLOEXEC|unix.TFD_NONBLOCK)
	return err
}

// set starts it, if it is not pending.
func (t *timer) set(d time.Duration) {
	switch {
	case t.pending.Swap(true):
	case t.inTime.Load() < habit:
		t.runs.Store(false)
		t.start(d)
	case !t.runs.Swap(true):
		t.start(patience)
	}
}

func (t *timer) stop() {
	if !t.pending.Load() || !t.pending.Swap(false) {
		return
	}
	if t.inTime.Load() < habit {
		t.inTime.Add(1)
	}
	if !t.runs.Load() {
		t.start(0)
	}
}

func (t *timer) start(d time.Duration) {
	at := unix.ItimerSpec{Value: unix.NsecToTimespec(int64(d))} // 0 stops it
	_ = unix.TimerfdSettime(t.fd, 0, &at, nil)                  // nothing of it can be wrong
}

// over says whether its time is up, and makes it silent.
func (t *timer) over() bool {
	var buf [8]byte
	if n, _ := unix.Read(t.fd, buf[:]); n != len(buf) {
		return false
	}
	t.runs.Store(false) // before pending, so that a set between the two starts it again
	if !t.pending.Swap(false) {
		return false
	}
	t.inTime.Store(0)
	return true
}

// nap sleeps for limit, by a system call: a channel and a timer would do, but for
// each select Go takes records out of a list per core, and gives them back to the
// list of the core it wakes on, so that memory grew by up to 12 KiB a core.
// nudged says that somebody ended it earlier: the last caller that left, the time for callers to come, or
// Shut.
func (d *Driver) nap(limit time.Duration) (nudged bool) {
	fds := [...]unix.PollFd{{Fd: int32(d.nudge.fd), Events: unix.POLLIN}, {Fd: int32(d.soon.fd), Events: unix.POLLIN}}
	_, _ = unix.Poll(fds[:], int(limit/time.Millisecond))
	if fds[1].Revents != 0 && d.soon.over() { // nobody has come: drive at once
		d.driven.Store(0)
		nudged = true
	}
	return d.nudge.hush() || nudged
}
