package node

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"fserver/engine/conf"
	"fserver/engine/exchange"
	"fserver/engine/mem"
	"fserver/engine/progress"
	"fserver/engine/topo"
	"fserver/engine/transport"
	"fserver/engine/transport/all"
	"fserver/engine/transport/inproc"
)

// TestSleepersHear has one caller asleep while another polls for a moment and
// goes: what comes then wakes the first at once.
func TestSleepersHear(t *testing.T) { eachWay(t, sleepersHear) }

func sleepersHear(t *testing.T, way ...string) {
	m := newMesh(t, openFabrics, shape{1, 1, 1}, append(way, "FSERVER_SPIN_US=50")...)
	w, s := m.workers[0], m.servers[0]
	x := tensor(t, 1, 4)
	// Without a wake-up each round takes almost progress.LongSleep. A loaded machine may be slow too, in some rounds.
	quick := 0
	for range 20 {
		first := pushPull(t, w, []exchange.Tensor{x}, nil)
		b, err := getBatch(s)
		require.NoError(t, err)
		ended := make(chan time.Time, 1)
		go func() {
			if retried(func() error { return w.Wait(first, time.Minute, true) }) == nil {
				ended <- time.Now()
			}
			close(ended)
		}()
		require.Eventually(t, func() bool { return w.driver.State().Sleeping || w.driver.State().Parked > 0 }, 10*time.Second, 100*time.Microsecond)
		require.ErrorIs(t, w.Wait(first, 100*time.Microsecond, true), ErrAgain)
		respond(t, s, b.reqs[0].handler)
		answered := time.Now()
		at, ok := <-ended
		require.True(t, ok)
		if at.Sub(answered) < progress.LongSleep/2 {
			quick++
		}
	}
	require.Greater(t, quick, 10)
	m.stop()
}

// counted is a Fabric that counts how often it is polled.
type counted struct {
	transport.Fabric
	polls *atomic.Int64
}

func (c counted) Poll(ev []transport.Event) (int, error) {
	c.polls.Add(1)
	return c.Fabric.Poll(ev)
}

// TestIdlePair has a server wait for requests that do not come: soon nobody polls, on
// either side. There are no heartbeats: after each of them a node polls for FSERVER_SPIN_US, and on a loaded machine
// there may be one in each window.
func TestIdlePair(t *testing.T) {
	eachWay(t, func(t *testing.T, way ...string) {
		var polls atomic.Int64
		m := newMesh(t, func(cfg *conf.Config, g transport.Gate, log *zap.Logger) ([]transport.Fabric, error) {
			list, err := openFabrics(cfg, g, log)
			for i, f := range list {
				list[i] = counted{f, &polls}
			}
			return list, err
		}, shape{1, 1, 1}, append(way, "PS_HEARTBEAT_INTERVAL=0", "PS_HEARTBEAT_TIMEOUT=0")...)
		require.NoError(t, echo(t, m.workers[0], m.servers, 5, closed()))
		var b batch
		came := make(chan error, 1)
		go func() { came <- retried(func() error { return m.servers[0].GetBatch(&b, 0, 30*time.Second, true) }) }()
		require.Eventually(t, func() bool {
			before := polls.Load()
			time.Sleep(300 * time.Millisecond)
			return polls.Load()-before < 200
		}, 15*time.Second, time.Millisecond)
		id := pushPull(t, m.workers[0], []exchange.Tensor{tensor(t, 1, 4)}, nil)
		require.NoError(t, <-came)
		respond(t, m.servers[0], b.reqs[0].handler)
		require.NoError(t, wait(m.workers[0], id))
		m.stop()
	})
}

// hostOf is a host with these cores online, of which the process may use those in
// the mask, as far as cpu.max of its cgroup goes.
func hostOf(t *testing.T, online string, mask int, quota string) topo.System {
	root := t.TempDir()
	for name, text := range map[string]string{
		"sys/devices/system/cpu/online": online,
		"proc/self/cgroup":              "0::/",
		"proc/self/mountinfo":           "31 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
		"sys/fs/cgroup/cpu.max":         quota,
	} {
		name = filepath.Join(root, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(name), 0o755))
		require.NoError(t, os.WriteFile(name, []byte(text+"\n"), 0o644))
	}
	return topo.System{
		Root:      root,
		GPUs:      func() ([]topo.GPU, topo.Driver) { return nil, topo.Driver{} },
		Addresses: func() (map[string][]netip.Prefix, error) { return nil, nil },
		Affinity: func() (cores []int, err error) {
			for i := range mask {
				cores = append(cores, i)
			}
			return cores, nil
		},
	}
}

// TestProgressAuto: a poller of its own costs a core, which the process must have
// to spare: of the host, inside its mask and inside its quota, for each process of
// its group.
func TestProgressAuto(t *testing.T) {
	const unlimited = "max 100000"
	for _, c := range []struct {
		name, online string
		mask         int
		quota        string
		settings     []string
		want         bool
	}{
		{"enough", "0-7", 8, unlimited, nil, true},
		{"few cores", "0-6", 7, unlimited, nil, false},
		{"one core", "0", 1, unlimited, nil, false},
		{"narrow mask", "0-63", 7, unlimited, nil, false},
		{"wide mask", "0-63", 8, unlimited, nil, true},
		{"quota", "0-63", 64, "799999 100000", nil, false},
		{"large quota", "0-63", 64, "800000 100000", nil, true},
		{"two processes", "0-14", 15, unlimited, []string{"DMLC_GROUP_SIZE=2"}, false},
		{"two processes, enough", "0-15", 16, unlimited, []string{"DMLC_GROUP_SIZE=2"}, true},
		{"by the caller", "0-63", 64, unlimited, []string{"FSERVER_PROGRESS=caller"}, false},
		{"by a thread", "0", 1, unlimited, []string{"FSERVER_PROGRESS=thread"}, true},
		{"scheduler", "0-63", 64, unlimited, []string{"DMLC_ROLE=scheduler", "FSERVER_PROGRESS=thread"}, false},
	} {
		cfg, _, err := conf.Parse(shape{1, 1, 1}.settings("worker", 0, 0, "1", c.settings...), all.Ways())
		require.NoError(t, err)
		require.Equal(t, c.want, threaded(cfg, hostOf(t, c.online, c.mask, c.quota).Read().Cores.Free), c.name)
	}
}

// TestProgressOnOneCore opens nodes from threads that may use one core and all.
func TestProgressOnOneCore(t *testing.T) {
	every := topo.FreeCores()
	for _, cores := range [][]int{every.Allowed[:1], every.Allowed} {
		m := newCluster(t, openFabrics)
		cfg, _, err := conf.Parse(shape{1, 1, 1}.settings("worker", 0, 0, "1"), all.Ways())
		require.NoError(t, err)
		var n *Node
		done := make(chan struct{})
		go func() {
			defer close(done)
			runtime.LockOSThread() // and end the thread with the goroutine
			var set unix.CPUSet
			for _, core := range cores {
				set.Set(core)
			}
			if err = unix.SchedSetaffinity(0, &set); err == nil {
				n, err = open(cfg, zap.NewNop(), m.buffers, m.fabrics, nil)
			}
		}()
		<-done
		require.NoError(t, err)
		require.Equal(t, len(cores) > 1 && every.Free >= coresPerNode, n.driver.Settings().Thread)
		require.NoError(t, n.Free())
	}
}

// boundTo is the threads of this process that may use that core alone.
func boundTo(t *testing.T, core int) (threads []string) {
	tasks, err := os.ReadDir("/proc/self/task")
	require.NoError(t, err)
	for _, task := range tasks {
		b, err := os.ReadFile("/proc/self/task/" + task.Name() + "/status")
		if err == nil && strings.Contains(string(b), fmt.Sprintf("\nCpus_allowed_list:\t%d\n", core)) {
			threads = append(threads, task.Name()) // and others may have ended meanwhile
		}
	}
	return threads
}

// TestPollerIsBound: STEPMESH_BIND_CPU_CORE and its relatives bind the poller's
// thread, which ends with the node, and no other.
func TestPollerIsBound(t *testing.T) {
	cores := topo.FreeCores().Allowed
	if len(cores) < 2 {
		t.Skip("every thread is bound to the only core")
	}
	first, second := cores[0], cores[1]
	apart := second - first
	// The main thread does not end where others do: the runtime parks it for good.
	main := strconv.Itoa(os.Getpid())
	gone := func() bool {
		left := append(boundTo(t, first), boundTo(t, second)...)
		return len(slices.DeleteFunc(left, func(s string) bool { return s == main })) == 0
	}
	require.Eventually(t, gone, 10*time.Second, time.Millisecond) // those of earlier tests
	for _, c := range []struct {
		gpu           int
		mode, bind    string
		first, second int // threads
	}{
		{0, "thread", "1", 1, 0},
		{1, "thread", "1", 0, 1}, // the other one of the half
		{2, "thread", "1", 0, 1}, // in the other half
		{0, "thread", "0", 0, 0},
		{0, "caller", "1", 0, 0},
	} {
		m := newCluster(t, openFabrics)
		before := [][]string{boundTo(t, first), boundTo(t, second)}
		n, logs := m.watch(shape{1, 1, 3}.settings("worker", 0, c.gpu, "1",
			"FSERVER_PROGRESS="+c.mode, "STEPMESH_BIND_CPU_CORE="+c.bind,
			fmt.Sprint("STEPMESH_CPU_START_OFFSET=", first), fmt.Sprint("STEPMESH_CPU_CORES_PER_GPU=", apart),
			fmt.Sprint("STEPMESH_CPU_CORES_PER_SOCKET=", 2*apart)))
		if c.mode == "thread" {
			require.Eventually(t, func() bool { return n.driver.State().Resting }, 10*time.Second, time.Millisecond) // it has been bound
		}
		for i, want := range []int{c.first, c.second} {
			require.Len(t, boundTo(t, cores[i]), len(before[i])+want, "core %d, GPU %d, %s, %s", cores[i], c.gpu, c.mode, c.bind)
		}
		require.Zero(t, logs.Len())
		require.NoError(t, n.Free())
		require.Eventually(t, gone, 10*time.Second, time.Millisecond)
	}

	// A core that the process may not use is no reason to fail.
	m := newCluster(t, openFabrics)
	n, logs := m.watch(shape{1, 1, 1}.settings("worker", 0, 0, "1", "FSERVER_PROGRESS=thread",
		"STEPMESH_BIND_CPU_CORE=1", fmt.Sprint("STEPMESH_CPU_START_OFFSET=", cores[len(cores)-1]+1)))
	require.Eventually(t, func() bool { return logs.FilterMessage("cannot pin the polling thread to a core").Len() == 1 }, 10*time.Second, time.Millisecond)
	require.NoError(t, n.Free())
}

// TestBackPressureWakes: a push_pull, or an answer, of more tensors than a Conn takes at once gets
// out although nobody waits for it: who sleeps on the descriptors is woken to post the rest.
func TestBackPressureWakes(t *testing.T) {
	eachWay(t, func(t *testing.T, way ...string) { pressed(t, openFabrics, way...) })
	for _, mode := range []string{"caller", "thread"} {
		t.Run("inproc "+mode, func(t *testing.T) { pressed(t, over(inproc.New()), "FSERVER_PROGRESS="+mode) })
	}
}

func pressed(t *testing.T, f Fabrics, way ...string) {
	const tensors = 2000 // a Conn takes some hundreds
	m := newMesh(t, f, shape{1, 1, 1}, append(way, "FSERVER_SPIN_US=50")...)
	w, s := m.workers[0], m.servers[0]
	all := tensor(t, 0, tensors)
	var list []exchange.Tensor
	for i := range tensors {
		x := all
		x.Span, x.Key, x.Dims = mem.Span{Addr: all.Span.Addr + uintptr(8*i), Len: 8}, uint64(i), []int64{1, 8}
		list = append(list, x)
	}
	// Nobody waits at n, and its background goroutine sleeps on the descriptors.
	asleep := func(n *Node) {
		require.Eventually(t, func() bool { return n.driver.State() == progress.State{Sleeping: true, Resting: true} }, 10*time.Second, 100*time.Microsecond)
		time.Sleep(5 * time.Millisecond) // it is about to, until then
	}
	// Another thread waits at n, and sleeps on the descriptors.
	waits := func(n *Node, met func() error) (end func()) {
		done := make(chan error, 1)
		go func() { done <- met() }()
		require.Eventually(t, func() bool { return n.driver.State() == progress.State{Callers: 1, Sleeping: true} }, 10*time.Second, 100*time.Microsecond)
		time.Sleep(5 * time.Millisecond)
		return func() { require.NoError(t, <-done) }
	}
	// Without a wake-up each of them takes almost progress.LongSleep. A loaded machine may be slow too, so of some
	// rounds of each kind one has to be quick.
	var pushed, answered [2]bool // while nobody waits at the worker, and while another thread does
	for round := range 9 {
		another := round%2 == 0 && round > 0
		first := pushPull(t, w, list[:1], list[:1])
		b, err := getBatch(s)
		require.NoError(t, err)
		ended := func() {}
		if another {
			ended = waits(w, func() error { return wait(w, first) })
		} else {
			respond(t, s, b.reqs[0].handler, list[0])
			require.NoError(t, wait(w, first))
			asleep(w)
		}
		since := time.Now()
		id := pushPull(t, w, list[1:], list[1:])
		next, err := getBatch(s)
		require.NoError(t, err)
		kind := round % 2 // the first round asks for buffers
		pushed[kind] = pushed[kind] || round > 0 && time.Since(since) < progress.LongSleep/2
		if another {
			respond(t, s, b.reqs[0].handler, list[0])
			ended()
		}
		asleep(s)
		answer, err := s.BeginAnswer()
		require.NoError(t, err)
		for _, x := range list[1:] {
			require.NoError(t, answer.AddPush(x))
		}
		since = time.Now()
		require.NoError(t, s.Respond(next.reqs[0].handler, answer))
		s.Flush()
		require.NoError(t, wait(w, id))
		answered[kind] = answered[kind] || time.Since(since) < progress.LongSleep/2
		if both := [2]bool{true, true}; pushed == both && answered == both {
			break
		}
	}
	require.Equal(t, [2]bool{true, true}, pushed)
	require.Equal(t, [2]bool{true, true}, answered)
	m.stop()
}

// TestSchedulerDoesNotPoll: where three processes shared two cores, a scheduler that polled for
// FSERVER_SPIN_US after each heartbeat made a push_pull take three to six times as long.
func TestSchedulerDoesNotPoll(t *testing.T) {
	m := newMesh(t, openFabrics, shape{1, 1, 1}, "FSERVER_SPIN_US=1000000")
	require.Zero(t, m.scheduler.driver.Settings().Spin)
	require.Equal(t, time.Second, m.workers[0].driver.Settings().Spin)
	m.stop()
}
