package trace

import (
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// TestNow compares with the clock itself, which others stamp with too.
func TestNow(t *testing.T) {
	var a, b unix.Timespec
	for range 1000 {
		require.NoError(t, unix.ClockGettime(unix.CLOCK_MONOTONIC, &a))
		now := Now()
		require.NoError(t, unix.ClockGettime(unix.CLOCK_MONOTONIC, &b))
		// The base is read once, a moment beside the epoch that it belongs to.
		require.InDelta(t, (a.Nano()+b.Nano())/2, now, float64(b.Nano()-a.Nano())+1e6)
	}
}
