package node

import (
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"fserver/engine/conf"
	"fserver/engine/transport"
)

// brokenFabric is a Fabric whose Poll fails once it is told to, and whose descriptor is readable then.
type brokenFabric struct {
	transport.Fabric
	fails atomic.Bool
	polls atomic.Int64 // since then
}

func (f *brokenFabric) Poll(ev []transport.Event) (int, error) {
	if f.fails.Load() {
		f.polls.Add(1)
		return 0, errors.New("the device is gone")
	}
	return f.Fabric.Poll(ev)
}

func (f *brokenFabric) Arm() bool { return f.fails.Load() || f.Fabric.Arm() }

// TestFailedFabricIsLeftAlone: a node whose Fabric has failed sleeps until it is closed. It polled that Fabric all the time.
func TestFailedFabricIsLeftAlone(t *testing.T) {
	var all []*brokenFabric
	m := newMesh(t, func(cfg *conf.Config, g transport.Gate, log *zap.Logger) ([]transport.Fabric, error) {
		list, err := openFabrics(cfg, g, log)
		if err == nil && cfg.Role == conf.Worker {
			f := &brokenFabric{Fabric: list[0]}
			list[0], all = f, append(all, f)
		}
		return list, err
	}, shape{1, 1, 1})
	f, n := all[0], m.workers[0]
	f.fails.Store(true)
	n.driver.Under(func() {
		n.passes = restPasses // the next pass looks at every Fabric
		n.driver.Stir()
	})
	require.Eventually(t, func() bool { return n.failed() != nil }, 10*time.Second, time.Millisecond)
	require.ErrorContains(t, n.failed(), "the device is gone")
	before := f.polls.Load()
	time.Sleep(100 * time.Millisecond)
	require.LessOrEqual(t, f.polls.Load()-before, int64(1))
	require.NoError(t, n.Close())
	require.NoError(t, m.servers[0].Close())
}
