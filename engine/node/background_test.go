package node

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// TestBackgroundNapsBesideAPost: while somebody has the token for long, as who posts to a NIC that does its work in
// the system call, the background goroutine leaves the core to others. It called sched_yield all that time.
func TestBackgroundNapsBesideAPost(t *testing.T) {
	m := newMesh(t, openFabrics, shape{1, 1, 1})
	const held = 300 * time.Millisecond
	var before, after unix.Rusage
	n := m.workers[0]
	require.True(t, n.under(func() {
		n.kick.ring() // its sleep ends, and it finds the token taken
		require.NoError(t, unix.Getrusage(unix.RUSAGE_SELF, &before))
		time.Sleep(held)
		require.NoError(t, unix.Getrusage(unix.RUSAGE_SELF, &after))
	}))
	used := after.Utime.Nano() + after.Stime.Nano() - before.Utime.Nano() - before.Stime.Nano()
	require.Less(t, time.Duration(used), held/2, "processor time of all threads")
	m.stop()
}
