package progress

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// rings says whether fd becomes readable within limit.
func rings(fd int, limit time.Duration) bool {
	fds := [...]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	for end := time.Now().Add(limit); ; {
		n, err := unix.Poll(fds[:], int(max(0, time.Until(end)/time.Millisecond)))
		if err != unix.EINTR { // as Go's own signals give
			return n > 0
		}
	}
}

// TestTimer: a timer that is set rings once, and one that is stopped before does not.
func TestTimer(t *testing.T) {
	var soon timer
	require.NoError(t, soon.open())
	defer unix.Close(soon.fd)
	require.False(t, soon.over())
	soon.set(time.Microsecond)
	require.True(t, rings(soon.fd, 10*time.Second))
	require.True(t, soon.over())
	require.False(t, soon.over())
	soon.set(time.Hour)
	soon.set(time.Microsecond) // it is pending already
	require.False(t, rings(soon.fd, 20*time.Millisecond))
	soon.stop()
	soon.set(time.Microsecond)
	require.True(t, rings(soon.fd, 10*time.Second))
	soon.stop()
	require.False(t, soon.over(), "it was stopped after its time")
	require.Zero(t, testing.AllocsPerRun(100, func() {
		soon.set(time.Hour)
		soon.stop()
	}))
}

// TestTimerOfHabit: after callers that came in time, the timer runs on when it is stopped. Its end is then no news, but
// it rings within patience for the first caller that does not come, and is exact again.
func TestTimerOfHabit(t *testing.T) {
	var soon timer
	require.NoError(t, soon.open())
	defer unix.Close(soon.fd)
	for range habit {
		soon.set(time.Hour)
		soon.stop()
	}
	require.False(t, soon.runs.Load())
	soon.set(time.Hour)
	require.True(t, soon.runs.Load())
	soon.stop()
	require.True(t, rings(soon.fd, 10*time.Second))
	require.False(t, soon.over(), "a caller came")
	require.False(t, rings(soon.fd, 20*time.Millisecond))
	soon.set(time.Hour)
	require.True(t, rings(soon.fd, 10*time.Second))
	require.True(t, soon.over())
	soon.set(time.Hour)
	require.False(t, rings(soon.fd, 20*time.Millisecond))
	soon.stop()
	for range habit { // an exact time replaces patience
		soon.set(time.Hour)
		soon.stop()
	}
	soon.set(time.Hour)
	soon.inTime.Store(0)
	soon.stop()
	soon.set(time.Hour)
	require.False(t, soon.runs.Load())
	require.False(t, rings(soon.fd, 20*time.Millisecond))
}

// TestBellBeforeItIsWritten: a hush comes between the two steps of a ring. The next hush reads what the ring has written.
func TestBellBeforeItIsWritten(t *testing.T) {
	var b bell
	require.NoError(t, b.open())
	defer unix.Close(b.fd)
	b.rung.Store(true) // ring is about to write
	require.True(t, b.hush())
	b.rung.Store(false)
	b.ring()
	require.True(t, b.hush())
	require.False(t, rings(b.fd, 0))

	b.rung.Store(true)
	require.True(t, b.hush())
	b.ring() // another one, who leaves it to the first
	one := [8]byte{1}
	_, err := unix.Write(b.fd, one[:])
	require.NoError(t, err)
	require.True(t, b.hush())
	require.False(t, rings(b.fd, 0), "somebody has read it")
	require.False(t, b.hush())
}
