package node

import (
	"runtime"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"fserver/engine/conf"
	"fserver/engine/progress"
	"fserver/engine/topo"
)

// coresPerNode is how many cores a process must have to itself before a poller
// of its own costs nobody else one: the caller's, the poller's, and as many for
// the tensor library.
const coresPerNode = 8

// threaded says whether a node has a poller of its own, where so many cores are
// free.
func threaded(cfg *conf.Config, free int) bool {
	switch {
	case cfg.Role == conf.Scheduler || cfg.Progress == conf.ByCaller:
		return false
	case cfg.Progress == conf.ByThread:
		return true
	}
	return free >= coresPerNode*cfg.GroupSize
}

// waits is how the node waits.
func (n *Node) waits() progress.Settings {
	free := topo.FreeCores().Free
	return progress.Settings{
		Spin: spins(n.cfg), Yield: yieldsAfter(n.cfg, n.gpu, free), Thread: threaded(n.cfg, free), Bind: n.bind,
	}
}

// spins is how long a waiting call polls before it sleeps. A scheduler carries no tensors: it does not
// poll, because workers and servers of its host may need the core.
func spins(cfg *conf.Config) time.Duration {
	if cfg.Role == conf.Scheduler {
		return 0
	}
	return cfg.Spin
}

// A round trip between GPUs takes 15 µs and more, and nobody runs meanwhile who
// could do with the core, if there are this many for each process.
const (
	coresToSpin   = 4
	gpuYieldAfter = 200 * time.Microsecond
)

// yieldsAfter is how long a node with a GPU polls at least before it gives its core to others between
// polls.
func yieldsAfter(cfg *conf.Config, g *card, free int) time.Duration {
	if g == nil || free < coresToSpin*cfg.GroupSize {
		return 0
	}
	return min(gpuYieldAfter, cfg.Spin)
}

// bind binds the calling goroutine to the core that the settings name for it, and
// to its thread, for good then: both end together. Without need it is not bound to
// a thread: the runtime interrupts whoever runs for 10 ms, and then gives the P of
// a bound one away and back, by two futexes, 70 to 100 µs.
func (n *Node) bind() {
	core, ok, err := topo.Pin(n.cfg, n.cfg.GPU, 0, topo.FreeCores().Allowed)
	if ok {
		runtime.LockOSThread()
		var set unix.CPUSet
		set.Set(core)
		err = unix.SchedSetaffinity(0, &set)
	}
	if err != nil {
		n.log.Warn("cannot pin the polling thread to a core", zap.Error(err))
	}
}
