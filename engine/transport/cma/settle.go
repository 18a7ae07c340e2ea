package cma

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// settleLimit bounds how long Close waits for a peer that is in
// the middle of a copy. It takes less than a millisecond unless the peer is
// starved, and never as long as this if the peer is stopped or gone.
const settleLimit = 5 * time.Second

// A writer is a peer that was found in the middle of a copy. Who keeps one holds a
// reference to its seg.
type writer struct {
	seg  *segment
	at   *control // the peer's
	busy uint64   // as it was found
	peer process
}

// writer is the peer of c if it is in the middle of a copy, which it can then
// no longer begin. See copy.go.
func (c *Conn) writer() (w writer, found bool) {
	if c.theirs == nil { // it has ended
		return c.last, c.last.seg != nil
	}
	busy := c.theirs.busy.Load()
	if !c.tx.direct || busy%2 == 0 {
		return writer{}, false
	}
	for i := range c.theirs.iov {
		c.theirs.iov[i].n.Store(0)
	}
	return writer{c.seg, c.theirs, busy, c.peer}, true
}

// through says whether the copy is over.
func (w *writer) through() bool { return w.at.busy.Load() != w.busy }

// settle has the owner call then when the copies of all writers are over, or can do nothing any
// more. It takes over the references of the writers, and is for the owner.
func (f *Fabric) settle(all []writer, then func()) {
	if len(all) == 0 {
		then()
		return
	}
	f.Task(func() {
		err := await(all, f.Ending(), settleLimit)
		f.Owned(func() {
			for _, w := range all {
				w.seg.drop()
			}
			if err != nil {
				f.ended = fmt.Errorf("cma: close: %w", err)
				return
			}
			then()
		})
	})
}

// await waits for the copies of all writers, but only up to limit from closing on. It needs no lock.
func await(all []writer, closing <-chan struct{}, limit time.Duration) error {
	var end <-chan time.Time
	pause := 100 * time.Microsecond
	for _, w := range all {
		for turn := 1; !w.through(); turn++ {
			if turn < 100 {
				runtime.Gosched()
				continue
			}
			if turn%8 == 4 && w.peer.quiet() {
				break
			}
			select {
			case <-end:
				return fmt.Errorf("process %d has not finished a write for %v: keep the memory mapped until that process has ended", w.peer.pid, limit)
			case <-closing:
				closing, end = nil, time.After(limit)
			case <-time.After(pause):
				pause = min(pause+pause/8, 10*time.Millisecond)
			}
		}
	}
	return nil
}

// A process is a peer's. Its number may be another process's one day, its
// start tells them apart.
type process struct {
	pid   int
	start string // clock ticks since the boot; empty: it cannot be looked up
}

// findProcess looks up a process that is known to live.
func findProcess(pid int) (process, error) {
	if self, err := os.Readlink("/proc/self"); err == nil && self != strconv.Itoa(os.Getpid()) {
		return process{pid: pid}, errors.New("/proc belongs to another PID namespace (mount it again: unshare --mount-proc)")
	}
	_, start, err := stat(fmt.Sprintf("/proc/%d/stat", pid))
	return process{pid, start}, err
}

// quiet says whether p is gone, or none of its threads runs or waits for a
// page or a disk.
func (p process) quiet() bool {
	return p.every(func(state byte) bool { return state != 'R' && state != 'D' })
}

// dead says whether p is gone, or waits only to be taken note of.
func (p process) dead() bool {
	return p.every(func(state byte) bool { return state == 'Z' || state == 'X' })
}

// every says whether all threads of p that have not ended are in such a state.
func (p process) every(is func(state byte) bool) bool {
	_, start, err := stat(fmt.Sprintf("/proc/%d/stat", p.pid))
	if err != nil || start != p.start {
		return err == nil || gone(err)
	}
	threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", p.pid))
	if err != nil {
		return gone(err)
	}
	for _, t := range threads {
		switch state, _, err := stat(fmt.Sprintf("/proc/%d/task/%s/stat", p.pid, t.Name())); {
		case err != nil && !gone(err), err == nil && !is(state):
			return false
		}
	}
	return true
}

// gone says whether err is for a process or a thread that has ended.
func gone(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH)
}

// stat is two fields of a file that proc(5) describes.
func stat(name string) (state byte, start string, err error) {
	b, err := os.ReadFile(name)
	if err != nil {
		return 0, "", err
	}
	// The name in the second field may hold anything, also brackets.
	f := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
	if len(f) < 20 {
		return 0, "", fmt.Errorf("read %s: it has %d fields, want at least 20", name, len(f))
	}
	return f[0][0], string(f[19]), nil
}
