package node

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"fserver/engine/exchange"
	"fserver/engine/progress"
	"fserver/engine/transport/transporttest"
)

// newWatch opens a watch of a node, and gives the eventfd of its caller.
func newWatch(t *testing.T, n *Node) (id uint64, fd int) {
	t.Helper()
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	require.NoError(t, err)
	t.Cleanup(func() { unix.Close(fd) })
	id, err = n.Watch(fd)
	require.NoError(t, err)
	return id, fd
}

// alarmed reports whether an eventfd is written to within a time, and makes it silent.
func alarmed(t *testing.T, fd int, limit time.Duration) bool {
	t.Helper()
	ready, err := transporttest.Sleep([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, limit)
	require.NoError(t, err)
	if ready != 0 {
		var buf [8]byte
		_, err = unix.Read(fd, buf[:])
		require.NoError(t, err)
	}
	return ready != 0
}

// alarms arms a watch until something is met, and returns how long that took.
func alarms(t *testing.T, n *Node, id uint64, fd int, met func() bool) time.Duration {
	t.Helper()
	for begin := time.Now(); ; {
		require.NoError(t, n.Arm(id))
		if met() {
			return time.Since(begin)
		}
		require.True(t, alarmed(t, fd, 10*time.Second), "no alarm for 10 s")
	}
}

// TestWatches has event loops wait for requests and for answers while no caller drives: an alarm
// comes at once, and none is missed.
func TestWatches(t *testing.T) { eachWay(t, watchesHear) }

func watchesHear(t *testing.T, way ...string) {
	m := newMesh(t, openFabrics, shape{1, 1, 1}, way...)
	w, s := m.workers[0], m.servers[0]
	mine, mineFD := newWatch(t, w)
	other, otherFD := newWatch(t, w)
	theirs, theirsFD := newWatch(t, s)
	x := tensor(t, 1, 4)
	slow := 0
	for range 50 {
		id := pushPull(t, w, []exchange.Tensor{x}, nil)
		took := alarms(t, s, theirs, theirsFD, func() bool { return s.server.Ready(1) })
		b, err := getBatch(s)
		require.NoError(t, err)
		require.NoError(t, w.Arm(other)) // two loops wait for one ticket
		respond(t, s, b.reqs[0].handler)
		ended := func() bool { state, _ := w.worker.State(id); return state == exchange.StateDone }
		took = max(took, alarms(t, w, mine, mineFD, ended))
		require.True(t, alarmed(t, otherFD, 20*time.Second))
		if took > progress.LongSleep/4 { // as if it had waited for a heartbeat
			slow++
		}
	}
	require.LessOrEqual(t, slow, 5)
	m.stop()
}

// TestWatchEnds closes a watch that is armed, and nodes whose watches are not: a closed watch is not
// written to, the end of a node is, and no descriptor stays.
func TestWatchEnds(t *testing.T) {
	m := newMesh(t, openFabrics, shape{1, 1, 1})
	w, s := m.workers[0], m.servers[0]
	id, fd := newWatch(t, s)
	require.NoError(t, s.Arm(id))
	s.Unwatch(id)
	s.Unwatch(id) // does nothing
	require.ErrorContains(t, s.Arm(id), "watch 1 is not open")
	_ = alarmed(t, fd, 0)     // it may have been while it was armed
	s.driver.Under(func() {}) // wakes all
	require.False(t, alarmed(t, fd, 0))
	_, err := s.Watch(-1)
	require.ErrorIs(t, err, unix.EBADF)

	idle, idleFD := newWatch(t, w)
	require.NoError(t, w.Close())
	require.True(t, alarmed(t, idleFD, 0))
	require.ErrorIs(t, w.Arm(idle), ErrClosed)
	require.NoError(t, w.Free())
}

// TestWatchOfATicketThatEndsAtOnce has a push_pull end in the call that hands it to the owner, as
// when its server is lost: the watch of another loop hears of it.
func TestWatchOfATicketThatEndsAtOnce(t *testing.T) {
	m := newMesh(t, openFabrics, shape{1, 1, 1})
	w, s := m.workers[0], m.servers[0]
	require.NoError(t, s.Close())
	require.Eventually(t, func() bool {
		id := pushPull(t, w, []exchange.Tensor{tensor(t, 1, 4)}, nil)
		return w.Wait(id, 10*time.Millisecond, true) != ErrAgain
	}, 10*time.Second, time.Millisecond)
	id, fd := newWatch(t, w)
	for range 20 {
		require.NoError(t, w.Arm(id))
		pushPull(t, w, []exchange.Tensor{tensor(t, 1, 4)}, nil)
		require.True(t, alarmed(t, fd, 20*time.Second))
	}
}
