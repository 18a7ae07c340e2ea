package inproc

import (
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// TestBellLosesNoRing lets a sleeper wait for numbers that others count up,
// each followed by a ring.
func TestBellLosesNoRing(t *testing.T) {
	const ringers, each = 3, 3000
	b, err := newBell()
	require.NoError(t, err)
	defer b.close()
	var count atomic.Int64
	for range ringers {
		go func() {
			for range each {
				count.Add(1)
				b.ring()
			}
		}()
	}
	for count.Load() < ringers*each {
		fds := []unix.PollFd{{Fd: int32(b.fd), Events: unix.POLLIN}}
		k, err := unix.Poll(fds, 10000)
		if err == unix.EINTR {
			continue
		}
		require.NoError(t, err)
		require.Equal(t, 1, k, "a ring was lost at %d", count.Load())
		b.take()
	}
}

func TestBellAfterClose(t *testing.T) {
	b, err := newBell()
	require.NoError(t, err)
	b.ring()
	b.close()
	b.take()
	b.ring()
}
