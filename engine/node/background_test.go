package node

import (
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"fserver/engine/conf"
	"fserver/engine/transport"
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
	n.under(func() { n.woken.Store(true) })
	n.rouse()
	require.Eventually(t, func() bool { return n.failed() != nil }, 10*time.Second, time.Millisecond)
	require.ErrorContains(t, n.failed(), "the device is gone")
	before := f.polls.Load()
	time.Sleep(100 * time.Millisecond)
	require.LessOrEqual(t, f.polls.Load()-before, int64(1))
	require.NoError(t, n.Close())
	require.NoError(t, m.servers[0].Close())
}
