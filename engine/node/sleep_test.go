package node

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/exchange"
)

// TestSleepersHear has one caller asleep while another polls for a moment and
// goes: what comes then wakes the first at once.
func TestSleepersHear(t *testing.T) { eachWay(t, sleepersHear) }

func sleepersHear(t *testing.T, way ...string) {
	m := newMesh(t, openFabrics, shape{1, 1, 1}, append(way, "FSERVER_SPIN_US=50")...)
	w, s := m.workers[0], m.servers[0]
	x := tensor(t, 1, 4)
	for range 20 {
		first := pushPull(t, w, []exchange.Tensor{x}, nil)
		b, err := getBatch(s)
		require.NoError(t, err)
		ended := make(chan time.Time, 1)
		go func() {
			if w.Wait(first, time.Minute, true) == nil {
				ended <- time.Now()
			}
			close(ended)
		}()
		require.Eventually(t, func() bool { return w.sleeping.Load() || w.count.Load() > 0 }, 10*time.Second, 100*time.Microsecond)
		require.ErrorIs(t, w.Wait(first, 100*time.Microsecond, true), ErrAgain)
		respond(t, s, b.reqs[0].handler)
		answered := time.Now()
		at, ok := <-ended
		require.True(t, ok)
		require.Less(t, at.Sub(answered), longSleep/2)
	}
	m.stop()
}
