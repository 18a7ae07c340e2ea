package node

import (
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"fserver/engine/conf"
	"fserver/engine/exchange"
	"fserver/engine/transport"
	"fserver/engine/transport/faults"
	"fserver/engine/transport/inproc"
)

// over opens the Fabrics of a mesh in a Network, under the faults of overFaults. The scheduler's is
// found at port 1.
func over(net *inproc.Network) Fabrics {
	plain := func(cfg *conf.Config, g transport.Gate, _ *zap.Logger) ([]transport.Fabric, error) {
		name := fmt.Sprintf("%v-%d", cfg.Role, cfg.Rank)
		if cfg.Role == conf.Scheduler {
			name = "127.0.0.1:1"
		}
		f, err := net.Open(inproc.Options{Name: name, Listen: cfg.Role != conf.Worker, Gate: g, Depth: 8})
		return []transport.Fabric{f}, err
	}
	if overFaults != nil {
		return under(*overFaults, plain)
	}
	return plain
}

// under makes Fabrics worse. Each gets a seed of its own.
func under(o faults.Options, fabrics Fabrics) Fabrics {
	var opened atomic.Uint64
	return func(cfg *conf.Config, g transport.Gate, log *zap.Logger) ([]transport.Fabric, error) {
		list, err := fabrics(cfg, g, log)
		for i := range list {
			own := o
			own.Seed += opened.Add(1)
			if err == nil {
				list[i], err = faults.Wrap(list[i], own)
			}
		}
		return list, err
	}
}

// TestChaos runs push_pulls of random sizes, with several under way, over a
// network that behaves like a NIC.
func TestChaos(t *testing.T) {
	long(t)
	for seed := range uint64(6) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			m := newMesh(t, under(faults.NIC(seed<<10), over(inproc.New())), shape{2, 2, 1})
			const rounds, keys = 20, 3
			done := make(chan error, len(m.servers)+len(m.workers))
			for _, n := range m.servers {
				go func() { done <- serve(t, n, rounds*keys) }()
			}
			for _, n := range m.workers {
				rng := rand.New(rand.NewPCG(seed, uint64(n.Info().Rank)))
				go func() { done <- chaoticWorker(t, n, rng, rounds, keys) }()
			}
			for range cap(done) {
				require.NoError(t, <-done)
			}
			m.stop()
		})
	}
}

func chaoticWorker(t *testing.T, n *Node, rng *rand.Rand, rounds, keys int) error {
	servers := n.Info().Servers
	for round := range rounds {
		in := make([]exchange.Tensor, keys)
		out := make([][]exchange.Tensor, keys)
		ids := make([]uint64, keys)
		for k := range keys {
			rows := rng.IntN(400)
			if rng.IntN(5) == 0 {
				rows = 0
			}
			in[k] = tensor(t, uint64(k), rows)
			fill(in[k], byte(round*keys+k))
			for range servers {
				out[k] = append(out[k], tensor(t, 0, rows))
			}
			ids[k] = pushPull(t, n, in[k:k+1], out[k])
		}
		for k := range keys {
			if err := wait(n, ids[k]); err != nil {
				return err
			}
			for g := range servers {
				for i, b := range in[k].Span.Bytes() {
					if out[k][g].Span.Bytes()[i] != b+byte(g+1) {
						return fmt.Errorf("round %d, key %d, server %d, byte %d", round, k, g, i)
					}
				}
			}
		}
	}
	return nil
}

// TestKill kills a server in the middle of its work: the worker's push_pull
// ends in an error, and its other calls go on.
func TestKill(t *testing.T) {
	net := inproc.New()
	m := newMesh(t, over(net), shape{1, 2, 1})
	w := m.workers[0]
	x, out := tensor(t, 1, 9), []exchange.Tensor{tensor(t, 0, 9), tensor(t, 0, 9)}
	id := pushPull(t, w, []exchange.Tensor{x}, out)
	net.Kill("server-1")
	lostWithin(t, func() error { return wait(w, id) }, "server", 1)
}

// TestSilence holds everything between a worker and the rest: with heartbeats,
// everybody learns that it is gone.
func TestSilence(t *testing.T) {
	long(t)
	net := inproc.New()
	m := newMesh(t, over(net), shape{2, 1, 1}, "PS_HEARTBEAT_INTERVAL=1", "PS_HEARTBEAT_TIMEOUT=5")
	done := make(chan error, 1)
	go func() {
		_, err := getBatch(m.servers[0])
		done <- err
	}()
	net.Hold("worker-1", "127.0.0.1:1")
	net.Hold("worker-1", "server-0")
	lostWithin(t, func() error { return <-done }, "worker", 1)
}

// TestFailedOp ends the connection whose operation a device refuses.
func TestFailedOp(t *testing.T) {
	var device *faults.Fabric // the worker's
	plain := under(faults.Options{}, over(inproc.New()))
	m := newMesh(t, func(cfg *conf.Config, g transport.Gate, log *zap.Logger) ([]transport.Fabric, error) {
		list, err := plain(cfg, g, log)
		if cfg.Role == conf.Worker && err == nil {
			device = list[0].(*faults.Fabric)
		}
		return list, err
	}, shape{1, 1, 1})
	w := m.workers[0]
	done := make(chan error, 1)
	go func() { done <- serve(t, m.servers[0], 2) }()
	x, y := tensor(t, 1, 9), tensor(t, 1, 9)
	require.NoError(t, wait(w, pushPull(t, w, []exchange.Tensor{x}, []exchange.Tensor{y})))
	device.FailNext(fmt.Errorf("the device refuses"))
	err := wait(w, pushPull(t, w, []exchange.Tensor{x}, []exchange.Tensor{y}))
	require.ErrorContains(t, err, "the device refuses")
	require.Error(t, <-done)
}
