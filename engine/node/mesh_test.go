package node

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"fserver/engine/conf"
	"fserver/engine/exchange"
	"fserver/engine/gpu"
	"fserver/engine/mem"
	"fserver/engine/transport/all"
)

// mesh is a whole cluster in one process.
type mesh struct {
	tb        testing.TB
	fabrics   Fabrics
	devices   gpu.Opener // nil: none is asked for
	buffers   *exchange.Buffers
	scheduler *Node
	workers   []*Node
	servers   []*Node
	behind    uint64 // a stream that what once sends is behind; 0: none
}

// shape of a cluster: groups, and instances of each group.
type shape struct{ workers, servers, instances int }

func (s shape) settings(role string, group, instance int, port string, extra ...string) []string {
	// Of two entries with one name the later counts. All nodes are in one process: one that spins for the usual
	// 1 ms keeps the others from running.
	return append([]string{
		"FSERVER_SPIN_US=100",
		"DMLC_ROLE=" + role,
		fmt.Sprintf("DMLC_NUM_WORKER=%d", s.workers),
		fmt.Sprintf("DMLC_NUM_SERVER=%d", s.servers),
		fmt.Sprintf("DMLC_GROUP_SIZE=%d", s.instances),
		fmt.Sprintf("DMLC_NODE_RANK=%d", group),
		fmt.Sprintf("STEPMESH_GPU=%d", instance),
		"DMLC_PS_ROOT_URI=127.0.0.1", "DMLC_PS_ROOT_PORT=" + port,
		"STEPMESH_BACKEND=CPU", "FSERVER_INIT_TIMEOUT=20", "FSERVER_STOP_TIMEOUT=10", "FSERVER_LOG=warn",
	}, extra...)
}

// start opens one node.
func (m *mesh) start(settings []string) *Node {
	cfg, _, err := conf.Parse(settings, all.Ways())
	require.NoError(m.tb, err)
	return m.open(cfg, logger(cfg))
}

// watch opens one node whose warnings are kept.
func (m *mesh) watch(settings []string) (*Node, *observer.ObservedLogs) {
	cfg, _, err := conf.Parse(settings, all.Ways())
	require.NoError(m.tb, err)
	core, logs := observer.New(zapcore.WarnLevel)
	return m.open(cfg, zap.New(core)), logs
}

func (m *mesh) open(cfg *conf.Config, log *zap.Logger) *Node {
	n, err := open(cfg, log, m.buffers, m.fabrics, m.devices)
	require.NoError(m.tb, err)
	m.tb.Cleanup(func() { require.NoError(m.tb, n.Free()) })
	return n
}

// newCluster is a mesh without nodes. When the test has ended and all its nodes
// are freed, nothing of them is left.
func newCluster(tb testing.TB, f Fabrics) *mesh {
	warned.Clear()
	m := &mesh{tb: tb, fabrics: f, buffers: exchange.NewBuffers()}
	r, w, err := os.Pipe() // makes the runtime open its own poller, which it keeps
	require.NoError(tb, err)
	require.NoError(tb, errors.Join(r.Close(), w.Close()))
	goroutines, fds := runtime.NumGoroutine(), descriptors(tb)
	tb.Cleanup(func() {
		for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
			g, d := runtime.NumGoroutine(), descriptors(tb)
			if g <= goroutines && d <= fds {
				return
			}
			if time.Now().After(end) {
				buf := make([]byte, 1<<20)
				buf = buf[:runtime.Stack(buf, true)]
				// A toxic of toxiproxy may send on, for ever, to one that has been taken away.
				if d <= fds && g-goroutines <= bytes.Count(buf, []byte("\ncreated by github.com/Shopify/toxiproxy/")) {
					return
				}
				require.Fail(tb, "leak", "%d goroutines and %d descriptors are left\n%s", g-goroutines, d-fds, buf)
			}
		}
	})
	return m
}

func descriptors(tb testing.TB) int {
	list, err := os.ReadDir("/proc/self/fd")
	require.NoError(tb, err)
	count := 0
	for _, e := range list {
		// Those of a GPU's driver are its own affair.
		if target, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && !strings.HasPrefix(target, "/dev/nvidia") {
			count++
		}
	}
	return count
}

// callerSleeps reports whether a caller sleeps on the descriptors.
func (n *Node) callerSleeps() bool { return n.driver.State().Sleeping && !n.driver.State().Resting }

// newMesh brings a cluster up.
func newMesh(tb testing.TB, f Fabrics, s shape, extra ...string) *mesh {
	return newMixedMesh(tb, f, s, func(string) []string { return extra })
}

// newMixedMesh brings up a cluster whose settings depend on the role.
func newMixedMesh(tb testing.TB, f Fabrics, s shape, extra func(role string) []string) *mesh {
	m := newCluster(tb, f)
	m.scheduler = m.start(s.settings("scheduler", 0, 0, "0", extra("scheduler")...))
	_, port := splitPort(tb, m.scheduler.Info().Address)
	for i := range s.instances {
		for g := range s.workers {
			m.workers = append(m.workers, m.start(s.settings("worker", g, i, port, extra("worker")...)))
		}
		for g := range s.servers {
			m.servers = append(m.servers, m.start(s.settings("server", g, i, port, extra("server")...)))
		}
	}
	for _, n := range m.all() {
		waitReady(tb, n)
	}
	return m
}

func (m *mesh) all() []*Node {
	return append(append([]*Node{m.scheduler}, m.workers...), m.servers...)
}

func waitReady(tb testing.TB, n *Node) {
	tb.Helper()
	for {
		if err := n.WaitReady(time.Second); err != ErrAgain {
			require.NoError(tb, err)
			return
		}
	}
}

// stop lets everybody leave together.
func (m *mesh) stop() {
	var wg sync.WaitGroup
	for _, n := range m.all() {
		wg.Go(func() {
			for {
				if err := n.Stop(time.Second); err != ErrAgain {
					require.NoError(m.tb, err)
					return
				}
			}
		})
	}
	wg.Wait()
}

// tensor is memory outside the Go heap with n rows of 8 bytes. It stays mapped:
// where a test ends with push_pulls under way, a peer may still read it.
func tensor(tb testing.TB, key uint64, rows int) exchange.Tensor {
	r, err := mem.Map(uint64(max(rows, 1)) * 8)
	require.NoError(tb, err)
	return exchange.Tensor{
		Span: mem.Span{Addr: r.Addr, Len: uint64(rows) * 8}, Dev: mem.CPU, Key: key, Base: r,
		Alloc: uint64(r.Addr), DType: 7, Dims: []int64{int64(rows), 8},
	}
}

func fill(t exchange.Tensor, v byte) {
	for i, b := 0, t.Span.Bytes(); i < len(b); i++ {
		b[i] = v + byte(i)
	}
}

func pushPull(tb testing.TB, n *Node, push, pull []exchange.Tensor) uint64 {
	tb.Helper()
	t, err := n.BeginPushPull()
	require.NoError(tb, err)
	for _, x := range push {
		require.NoError(tb, t.AddPush(x))
	}
	for _, x := range pull {
		require.NoError(tb, t.AddPull(x))
	}
	id := t.ID()
	require.NoError(tb, n.PushPull(t))
	return id
}

func wait(n *Node, id uint64) error {
	return retried(func() error { return n.Wait(id, 100*time.Millisecond, true) })
}

// retried makes a call, which a signal may end early, until it gives something else than ErrAgain.
func retried(call func() error) error {
	for end := time.Now().Add(20 * time.Second); ; {
		if err := call(); err != ErrAgain || time.Now().After(end) {
			return err
		}
	}
}

// batch is a copy of what GetBatch gave.
type batch struct{ reqs []request }

type request struct {
	handler uint64
	rank    int32
	push    []exchange.Received
	pulls   []uint64
}

func (b *batch) Batch(reqs []*exchange.Request) error {
	b.reqs = b.reqs[:0]
	for _, r := range reqs {
		q := request{handler: r.Handler(), rank: r.Rank(), push: append([]exchange.Received(nil), r.Push()...)}
		for i := range r.Pulls() {
			q.pulls = append(q.pulls, r.PullBytes(i))
		}
		b.reqs = append(b.reqs, q)
	}
	return nil
}

func getBatch(n *Node) (batch, error) {
	var b batch
	err := retried(func() error { return n.GetBatch(&b, 0, 100*time.Millisecond, true) })
	return b, err
}

func respond(tb testing.TB, n *Node, handler uint64, tensors ...exchange.Tensor) {
	tb.Helper()
	t, err := n.BeginAnswer()
	require.NoError(tb, err)
	for _, x := range tensors {
		require.NoError(tb, t.AddPush(x))
	}
	id := t.ID()
	require.NoError(tb, n.Respond(handler, t))
	n.Flush()
	require.NoError(tb, wait(n, id))
}

func TestOneToOne(t *testing.T) { eachWay(t, oneToOne) }

func TestIPv6(t *testing.T) { oneToOne(t, "DMLC_PS_ROOT_URI=::1", "FSERVER_TRANSPORT=tcp") }

func oneToOne(t *testing.T, way ...string) {
	m := newMesh(t, openFabrics, shape{1, 1, 1}, way...)
	w, s := m.workers[0], m.servers[0]
	for round := range 100 {
		rows := round % 17 * 3
		x, y, out := tensor(t, 1, rows), tensor(t, 2, 5), tensor(t, 0, rows)
		fill(x, byte(round))
		fill(y, byte(2*round))
		id := pushPull(t, w, []exchange.Tensor{x, y}, []exchange.Tensor{out})
		b, err := getBatch(s)
		require.NoError(t, err)
		require.Len(t, b.reqs, 1)
		require.Equal(t, x.Span.Bytes(), b.reqs[0].push[0].Span.Bytes())
		require.Equal(t, y.Span.Bytes(), b.reqs[0].push[1].Span.Bytes())
		answer := tensor(t, 0, rows)
		fill(answer, byte(3*round))
		respond(t, s, b.reqs[0].handler, answer)
		require.NoError(t, wait(w, id))
		require.Equal(t, answer.Span.Bytes(), out.Span.Bytes())
	}
	m.stop()
}

// ready waits until n is connected, or says why it is not. A signal ends a wait early.
func ready(n *Node) error {
	return retried(func() error { return n.WaitReady(20 * time.Second) })
}
