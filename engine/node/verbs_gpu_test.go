package node

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"fserver/cshim/cuda"
	"fserver/cshim/verbs/fakeverbs"
	"fserver/engine/exchange"
	"fserver/engine/gpu"
	"fserver/engine/gpu/fakegpu"
	"fserver/engine/mem"
)

// Tensors of a GPU between a worker and a server on two RDMA devices. The GPU is fakegpu: the addresses of its tensors
// cannot be read or written by this process, the kernel included, and its copy engine and, where it takes them, the NIC
// use a second mapping of the same pages. The devices are those of the fake library or, with FSERVER_TEST_RDMA, real
// ones: then library, kernel, NIC and packets are real, and what is played is the GPU and, with
// FSERVER_TEST_DMABUF=LIBRARY (tests/softroce/dmabuf.c), the export of its memory to the NIC.

// gpuSizes are those of the tensors, there and back.
var gpuSizes = []uint64{1, 7, 4095, 4096, 4097, 65537, 1<<20 - 1, 1 << 20, 3<<20 + 5, 16 << 20}

// TestVerbsGPUStaged: a NIC that does not take memory of the GPU gets it through host memory.
func TestVerbsGPUStaged(t *testing.T) {
	if os.Getenv("FSERVER_TEST_DMABUF") != "" {
		t.Skip("FSERVER_TEST_DMABUF is set, and with it the NIC takes memory of the GPU")
	}
	m, g, _ := newGPUNICs(t, func(*fakegpu.GPU) {
		if !fakeverbs.Real() {
			fakeverbs.Set("dmabuf", 0)
		}
	})
	for _, n := range []*Node{m.workers[0], m.servers[0]} {
		reason := linkOf(t, n).Reason
		require.Contains(t, reason, "no GPUDirect between the NIC and gpu 0, so its tensors go through host memory")
		require.Contains(t, reason, "takes no dma-buf")
	}
	exchangeOnGPU(t, m, g.GPU, gpuSizes)
	require.NotZero(t, g.copied.Load())
}

// TestVerbsGPUDirect: the NIC reads and writes memory of the GPU by itself; also where the GPU does not order
// what NICs write, which takes a read behind it.
func TestVerbsGPUDirect(t *testing.T) {
	if fakeverbs.Real() && os.Getenv("FSERVER_TEST_DMABUF") == "" {
		t.Skip("FSERVER_TEST_DMABUF is not set, and a real NIC does not take memory of a GPU that is played")
	}
	for name, ordering := range map[string]int32{"ordered": cuda.OwnerOrdering, "read back": 0} {
		t.Run(name, func(t *testing.T) {
			sizes := gpuSizes
			if ordering == 0 {
				sizes = []uint64{1, 4097, 1 << 20}
			}
			m, g, _ := newGPUNICs(t, func(g *fakegpu.GPU) {
				g.NIC.Ordering = ordering
				if ordering == 0 && !fakeverbs.Real() {
					fakeverbs.Set("late", 1)
				}
			})
			for _, n := range []*Node{m.workers[0], m.servers[0]} {
				require.NotContains(t, linkOf(t, n).Reason, "GPUDirect")
			}
			exchangeOnGPU(t, m, g.GPU, sizes)
			require.Zero(t, g.copied.Load(), "bytes that the copy engine has moved")
		})
	}
}

// TestVerbsGPURefused: of memory of the GPU that the NIC refuses, links() says why, and one line of the log.
func TestVerbsGPURefused(t *testing.T) {
	if fakeverbs.Real() {
		t.Skip("only the fake library refuses it")
	}
	for name, c := range map[string]struct {
		errno syscall.Errno
		times int
		why   string // empty: it is taken in the end
	}{
		"invalid":               {syscall.EINVAL, 1000, "invalid argument"},
		"no room":               {syscall.ENOMEM, 1000, "cannot allocate memory"},
		"room that is not used": {syscall.ENOMEM, 1, ""},
	} {
		t.Run(name, func(t *testing.T) {
			m, g, logs := newGPUNICs(t, func(*fakegpu.GPU) {})
			buffers := map[uint64]uint64{}
			onGPUs(t, m, g.GPU, 4096, 1, buffers) // its registrations can be given up
			fakeverbs.Fail("ibv_reg_dmabuf_mr", c.errno, 0, c.times)
			onGPUs(t, m, g.GPU, 4096, 3, buffers)
			how, said := linkOf(t, m.workers[0]), logs.FilterMessage("some GPU tensors go through host memory").All()
			require.Equal(t, "verbs", how.Transport)
			if c.why == "" {
				require.NotContains(t, how.Reason, "GPU")
				require.Empty(t, said)
				require.Zero(t, g.copied.Load())
			} else {
				why := "register [0-9]+ bytes at .* of gpu 0 for GPUDirect: by dma-buf: .*" + c.why
				require.Regexp(t, "some tensors of gpu 0 go through host memory: verbs: "+why, how.Reason)
				require.Len(t, said, 1)
				require.Regexp(t, why, said[0].ContextMap()["error"])
				require.NotZero(t, g.copied.Load())
			}
			endOnGPU(t, m, buffers)
		})
	}
}

// copyGPU counts the bytes that the copy engine moves for the nodes.
type copyGPU struct {
	*fakegpu.GPU
	copied atomic.Uint64
}

func (g *copyGPU) Enqueue(s cuda.Stream, e cuda.Event, copies []cuda.Copy, flag, value uint64) error {
	for _, c := range copies {
		g.copied.Add(c.Len)
	}
	return g.GPU.Enqueue(s, e, copies, flag, value)
}

// newGPUNICs is a worker and a server with tensors on one GPU, each on a device of its own. set says what GPU and devices
// are like. The warnings are the worker's.
func newGPUNICs(t *testing.T, set func(*fakegpu.GPU)) (*mesh, *copyGPU, *observer.ObservedLogs) {
	newNICs(t)
	devices, g := fakeverbs.Devices(), &copyGPU{GPU: fakegpu.New()}
	if !fakeverbs.Real() {
		t.Cleanup(fakeverbs.Reset)
	}
	set(g.GPU)
	t.Cleanup(func() { g.Empty(t) })
	m, s := newCluster(t, openFabrics), shape{1, 1, 1}
	m.devices = func(int) (gpu.Device, error) { return g, nil }
	more := func(i int) []string {
		return []string{"FSERVER_TRANSPORT=verbs", "STEPMESH_BACKEND=GPU", "FSERVER_RDMA_DEVICE=" + devices[i]}
	}
	m.scheduler = m.start(s.settings("scheduler", 0, 0, "0"))
	_, port := splitPort(t, m.scheduler.Info().Address)
	w, logs := m.watch(s.settings("worker", 0, 0, port, more(0)...))
	m.workers = []*Node{w}
	m.servers = []*Node{m.start(s.settings("server", 0, 0, port, more(1)...))}
	for _, n := range m.all() {
		waitReady(t, n)
	}
	return m, g, logs
}

// spread is n bytes that differ from those at other places, packets and pages, and from those of another seed.
func spread(n uint64, seed byte) []byte {
	at := 4099 * uint64(seed)
	return patternOf()[at : at+n]
}

var patternOf = sync.OnceValue(func() []byte {
	b := make([]byte, 16<<20+4099*256)
	for i := range b {
		b[i] = byte(i)*7 + byte(i>>8)*3 + byte(i>>16)
	}
	return b
})

// exchangeOnGPU makes push_pulls of so many bytes there and back, compares every byte, and ends the mesh.
func exchangeOnGPU(t *testing.T, m *mesh, g *fakegpu.GPU, sizes []uint64) {
	buffers := map[uint64]uint64{}
	for i, n := range sizes {
		onGPUs(t, m, g, n, byte(10*i), buffers)
	}
	endOnGPU(t, m, buffers)
}

// onGPUs makes one push_pull of n bytes there and back, and compares every byte. It notes the server's receive buffer.
func onGPUs(t *testing.T, m *mesh, g *fakegpu.GPU, n uint64, seed byte, buffers map[uint64]uint64) {
	worker, server := m.workers[0], m.servers[0]
	x, y, back := onGPU(t, g, 1, spread(n, seed)), onGPU(t, g, 2, make([]byte, n)), onGPU(t, g, 0, spread(n, seed+1))
	hidden(t, x.Span)
	ticket, err := worker.BeginPushPull()
	require.NoError(t, err)
	require.NoError(t, errors.Join(ticket.AddPush(x), ticket.AddPull(y)))
	id := ticket.ID()
	require.NoError(t, worker.PushPull(ticket))
	batch := first(t, server)
	got := batch.push[0]
	require.Equal(t, mem.GPU(0), got.Dev)
	hidden(t, got.Span)
	buffers[got.Buffer]++
	same(t, spread(n, seed), contents(t, g, got.Span), fmt.Sprintf("%d bytes at the server", n))
	answer, err := server.BeginAnswer()
	require.NoError(t, err)
	require.NoError(t, answer.AddPush(back))
	require.NoError(t, server.Respond(batch.handler, answer))
	server.Flush()
	require.NoError(t, wait(worker, id))
	same(t, spread(n, seed+1), contents(t, g, y.Span), fmt.Sprintf("%d bytes at the worker", n))
}

// endOnGPU ends a mesh, and frees its receive buffers.
func endOnGPU(t *testing.T, m *mesh, buffers map[uint64]uint64) {
	m.stop()
	for _, n := range m.all() {
		require.NoError(t, n.Free())
	}
	for id, times := range buffers {
		require.NoError(t, m.buffers.Release(id, times))
	}
}

// onGPU is a tensor of the GPU with the bytes of b.
func onGPU(t *testing.T, g *fakegpu.GPU, key uint64, b []byte) exchange.Tensor {
	n := uint64(len(b))
	r, err := fakegpu.Memory{G: g}.Alloc(n)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, fakegpu.Memory{G: g}.Free(r)) })
	require.NoError(t, fakegpu.Memory{G: g}.Store(r.Span(), b))
	return exchange.Tensor{Span: r.Span(), Dev: r.Dev, Key: key, Base: r, Alloc: uint64(r.Addr), Dims: []int64{int64(n)}}
}

// first waits for a batch of one request.
func first(t *testing.T, server *Node) (batch taken) {
	require.NoError(t, retried(func() error { return server.GetBatch(&batch, 0, time.Second, true) }))
	return batch
}

// same compares, and names the first byte that differs: the rest would be megabytes.
func same(t *testing.T, want, got []byte, what string) {
	require.Len(t, got, len(want), what)
	if bytes.Equal(want, got) {
		return
	}
	for i := range want {
		if want[i] != got[i] {
			require.Equal(t, want[i], got[i], "%s: byte %d", what, i)
		}
	}
}

// hidden checks that neither this process nor the kernel for it can read s.
func hidden(t *testing.T, s mem.Span) {
	r, w, err := os.Pipe()
	require.NoError(t, err)
	defer r.Close()
	defer w.Close()
	_, err = unix.Write(int(w.Fd()), mem.Span{Addr: s.Addr, Len: 1}.Bytes())
	require.ErrorIs(t, err, unix.EFAULT)
}
