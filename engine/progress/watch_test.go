package progress

import (
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// newWatch opens a watch, and gives the eventfd of its caller.
func newWatch(t *testing.T, d *Driver) (id uint64, fd int) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	require.NoError(t, err)
	t.Cleanup(func() { unix.Close(fd) })
	id, err = d.Watch(fd)
	require.NoError(t, err)
	return id, fd
}

// alarmed reports whether an eventfd is written to within a time, and makes it silent.
func alarmed(fd int, limit time.Duration) bool {
	if !rings(fd, limit) {
		return false
	}
	var buf [8]byte
	_, err := unix.Read(fd, buf[:])
	return err == nil
}

// TestWatch: a watch is written to once for each time that it was armed, by whoever ends something.
func TestWatch(t *testing.T) {
	d, f := newFake(t, Settings{})
	first, firstFD := newWatch(t, d)
	second, secondFD := newWatch(t, d)
	for name, ends := range map[string]func(){
		"a pass":                 func() { f.arrives(func() {}); d.Drive(0) },
		"what ends in its call":  func() { f.submit(func() {}) },
		"a call under the token": func() { d.Under(func() {}) },
	} {
		require.True(t, d.Arm(first))
		require.True(t, d.Arm(first))
		ends()
		require.True(t, alarmed(firstFD, 0), name)
		require.False(t, alarmed(secondFD, 0), name)
		ends()
		require.False(t, alarmed(firstFD, 0), name)
	}
	d.Drive(0) // takes the news of the last submission
	require.True(t, d.Arm(first))
	require.True(t, d.Arm(second))
	d.Drive(0) // ends nothing
	require.False(t, alarmed(firstFD, 0))
	d.Under(func() {})
	require.True(t, alarmed(firstFD, 0))
	require.True(t, alarmed(secondFD, 0))
	require.Zero(t, d.armed.Load())
}

// TestWatchEnds: a closed watch is not written to, the end of the work is, and none is left open.
func TestWatchEnds(t *testing.T) {
	d, _ := newFake(t, Settings{})
	id, fd := newWatch(t, d)
	_, idle := newWatch(t, d)
	require.True(t, d.Arm(id))
	d.Unwatch(id)
	d.Unwatch(id) // does nothing
	require.Zero(t, d.armed.Load())
	require.False(t, d.Arm(id))
	require.Zero(t, d.armed.Load())
	_, err := d.Watch(-1)
	require.ErrorIs(t, err, unix.EBADF)
	d.Shut(errOver)
	require.False(t, alarmed(fd, 0))
	require.True(t, alarmed(idle, 0))
	d.UnwatchAll()
	require.Empty(t, d.all)
}

// TestArmDrives: a watch that is armed while nobody drives ends the nap of the background goroutine.
func TestArmDrives(t *testing.T) {
	for _, c := range []struct{ thread, resting, calling, nudged bool }{
		{nudged: true}, {thread: true}, {resting: true}, {calling: true},
	} {
		d, _ := newFake(t, Settings{Thread: c.thread})
		if c.resting {
			d.sleeper.Store(atRest)
		}
		if c.calling {
			d.callers.Add(1)
		}
		id, _ := newWatch(t, d)
		require.True(t, d.Arm(id))
		require.Equal(t, c.nudged, d.nudge.hush(), "%+v", c)
		d.callers.Store(0)
	}
}

// TestWatchesWhileOthersClose arms, alarms and closes watches at the same time.
func TestWatchesWhileOthersClose(t *testing.T) {
	d, _ := newFake(t, Settings{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		for range 2000 {
			d.wakeAll()
			runtime.Gosched()
		}
	}()
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	require.NoError(t, err)
	defer unix.Close(fd)
	for running := true; running; {
		select {
		case <-done:
			running = false
		default:
		}
		id, err := d.Watch(fd)
		require.NoError(t, err)
		require.True(t, d.Arm(id))
		d.Unwatch(id)
	}
	require.Zero(t, d.armed.Load())
	require.Empty(t, d.all)
}
