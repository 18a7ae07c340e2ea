package cudaipc

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/gpu/fakegpu"
	"fserver/engine/transport"
	"fserver/engine/transport/transporttest"
	"fserver/engine/transport/transporttest/overtest"
)

func TestPasses(t *testing.T) {
	for _, c := range []struct {
		name        string
		alone, warm bool
	}{
		{"mapped", false, true},
		{"to be mapped", false, false},
		{"staged", true, true},
		{"to be staged", true, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := fakegpu.New()
			g.Alone = c.alone
			a, b := pairOf(t, g, overCMA)
			overtest.Passes(t, g, a, b, c.warm)
		})
	}
}

func TestLongWait(t *testing.T) {
	const stall = 100 * time.Millisecond
	for name, alone := range map[string]bool{"mapped": false, "staged": true} {
		t.Run(name, func(t *testing.T) {
			g := fakegpu.New()
			g.Alone = alone
			a, b := pairOf(t, g, func(o transporttest.Options) (transport.Fabric, error) {
				o.Limits.Stall = stall
				return overCMA(o)
			})
			overtest.LongWait(t, g, a, b, stall)
		})
	}
}

// TestHeldAtTheEnd: what is held when the peer closes is given if its writes come, and
// forgotten if they do not; EvDown comes after it.
func TestHeldAtTheEnd(t *testing.T) {
	before := lastWrites
	t.Cleanup(func() { lastWrites = before })
	lastWrites = 3 * time.Second
	for name, come := range map[string]bool{"come": true, "do not come": false} {
		t.Run(name, func(t *testing.T) {
			g := fakegpu.New()
			a, b, dst, _, _, open := underWay(t, g)
			until(t, a, b, func() bool { return ours(b).Held.Len() > 0 })
			began := time.Now()
			a.C.Close()
			until(t, a, b, func() bool { return ours(b).Err != nil })
			require.NoError(t, b.Down)
			if come {
				open()
			}
			until(t, a, b, func() bool { return b.Down != nil })
			if come {
				require.Len(t, b.Writes, 1)
				holds(t, g, dst, 5)
			} else {
				require.Empty(t, b.Writes)
				require.GreaterOrEqual(t, time.Since(began), lastWrites/2)
			}
		})
	}
}

// TestFullQueue: however much is posted behind a point, on however many Conns, no call waits for the queue of the driver.
// What needs no GPU arrives meanwhile, and so does a write of another Conn that waits for nothing.
func TestFullQueue(t *testing.T) {
	g := fakegpu.New()
	g.Depth = 1020
	a, b := pairOf(t, g, overCMA)
	src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1)
	k := b.Key(t, dst)
	point, open := heldUp(t, g, a.F)
	posted := 0
	fill := func() {
		for idle := 0; idle < 100; idle++ {
			n, err := a.Try(write(k, src, point))
			require.NoError(t, err)
			if posted += n; n > 0 {
				idle = 0
			}
			a.Poll(t)
			b.Poll(t)
		}
	}
	over := make(chan struct{})
	go func() {
		defer close(over)
		for range 3 {
			fill()
			connect(t, a, b)
			ours(a).asked = time.Now().Add(time.Hour)
		}
	}()
	select {
	case <-over:
	case <-time.After(10 * time.Second):
		t.Fatal("a call waits for the queue of the driver")
	}
	require.Greater(t, posted, 700)
	a.Post(t, []transport.Op{text("host", true)})
	a.Post(t, write(k, src, transport.Point{}))
	until(t, a, b, func() bool { return len(b.Frames) == 1 && len(b.Writes) == 1 && len(a.Done) == 2 })
	open()
	until(t, a, b, func() bool { return len(a.Done) == posted+2 })
	require.Zero(t, a.F.queued)
}
