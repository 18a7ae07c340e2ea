//go:build !race

package node

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/exchange"
	"fserver/engine/gpu"
	"fserver/engine/gpu/fakegpu"
	"fserver/engine/trace"
)

// BenchmarkGPURoundTrip is what all but the driver takes, beside the same on the CPU.
func BenchmarkGPURoundTrip(b *testing.B) {
	run := func(b *testing.B, m *mesh, x exchange.Tensor, y exchange.Tensor, out exchange.Tensor) {
		once := m.once(x, y, out)
		for range 2000 {
			once()
		}
		for b.Loop() {
			once()
		}
		m.stop()
	}
	b.Run("cpu", func(b *testing.B) {
		m := newMesh(b, openFabrics, shape{1, 1, 1}, "FSERVER_PROGRESS=caller", "FSERVER_TRANSPORT=cma")
		run(b, m, tensor(b, 1, 64), tensor(b, 2, 64), tensor(b, 1, 64))
	})
	b.Run("gpu", func(b *testing.B) {
		g := fakegpu.New()
		g.Instant = true
		m := newGPUPair(b, "cma", func(int) (gpu.Device, error) { return g, nil }, "FSERVER_PROGRESS=caller")
		run(b, m, gpuTensor(b, g, 1, 64, 1), gpuTensor(b, g, 2, 64, 1), gpuTensor(b, g, 3, 64, 1))
		m.letGo(b)
	})
}

// BenchmarkHeldPass is a pass while a push_pull waits for its stream: whoever polls finds out at the next one that the
// stream has passed.
func BenchmarkHeldPass(b *testing.B) {
	g := fakegpu.New()
	m := newGPUPair(b, "cma", func(int) (gpu.Device, error) { return g, nil }, "FSERVER_PROGRESS=caller")
	x, out := tensor(b, 1, 64), tensor(b, 3, 64)
	m.once(x, tensor(b, 2, 64), out)()
	stream, err := g.NewStream()
	must(b, err)
	gate := make(chan struct{})
	g.Put(stream, func() { <-gate })
	n := m.workers[0]
	ticket, err := n.BeginPushPull()
	must(b, err)
	must(b, errors.Join(ticket.AddPush(x), ticket.AddPull(out), n.After(ticket, uint64(stream)), n.PushPull(ticket)))
	for b.Loop() {
		n.driver.Drive(trace.Now())
	}
	require.True(b, n.table.Held())
	close(gate)
	must(b, g.FreeStream(stream))
	m.stop()
	m.letGo(b)
}

// TestGPUAllocations gates the hot path with tensors on a GPU, and some on the CPU, behind a stream.
func TestGPUAllocations(t *testing.T) {
	g := fakegpu.New()
	g.Instant = true
	m := newGPUPair(t, "cma", func(int) (gpu.Device, error) { return g, nil }, "FSERVER_PROGRESS=caller")
	once := m.once(gpuTensor(t, g, 1, 64, 1), gpuTensor(t, g, 2, 64, 1), gpuTensor(t, g, 3, 64, 1))
	stream, err := g.NewStream()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, g.FreeStream(stream)) })
	mixed := m.once(gpuTensor(t, g, 4, 64, 1), tensor(t, 5, 64), gpuTensor(t, g, 6, 64, 1))
	m.behind = uint64(stream)
	round := func() {
		once()
		mixed()
	}
	for range 1000 {
		round()
	}
	require.Zero(t, testing.AllocsPerRun(1000, round))
	m.stop()
	m.letGo(t)
}
