package inproc

import (
	"encoding/binary"
	"fmt"
	"runtime"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// A bell is the descriptor of a Sleeper: an eventfd that is readable after
// ring and until take. Between two takes, only the first ring is a system call.
type bell struct {
	fd     int
	users  atomic.Int32 // inside ring or take
	closed atomic.Bool
	rung   atomic.Bool // somebody has written, or is about to, since the last take
	buf    [8]byte     // of take, which one goroutine at a time calls
}

// one is what a ring adds to the counter of the eventfd.
var one = binary.NativeEndian.AppendUint64(nil, 1)

func newBell() (*bell, error) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("eventfd: %w (raise the limit of open files: ulimit -n)", err)
	}
	return &bell{fd: fd}, nil
}

// ring makes the descriptor readable. Any goroutine may call it at any time.
func (b *bell) ring() {
	if b.rung.Swap(true) {
		return
	}
	b.users.Add(1)
	if !b.closed.Load() {
		unix.Write(b.fd, one)
	}
	b.users.Add(-1)
}

// take makes the descriptor unreadable. What was done before a ring is seen by
// who looks after take; when the write of a ring is still on its way, the ring
// stays in force and the descriptor becomes readable once more.
func (b *bell) take() {
	if !b.rung.Load() {
		return
	}
	b.users.Add(1)
	if !b.closed.Load() {
		if n, _ := unix.Read(b.fd, b.buf[:]); n == len(b.buf) {
			b.rung.Store(false)
		}
	}
	b.users.Add(-1)
}

// close gives the descriptor back when nobody uses it any more.
func (b *bell) close() {
	b.closed.Store(true)
	for b.users.Load() > 0 {
		runtime.Gosched()
	}
	unix.Close(b.fd)
}
