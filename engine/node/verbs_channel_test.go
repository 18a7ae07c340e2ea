package node

import (
	"fmt"
	"os"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/cshim/verbs/fakeverbs"
	"fserver/engine/gpu/fakegpu"
)

// Channels whose messages the engine carries between tensors of a GPU, on two RDMA devices.

// TestVerbsGPUDirectChannel: the NIC reads the messages from memory of the GPU, and writes them where they belong.
func TestVerbsGPUDirectChannel(t *testing.T) {
	if fakeverbs.Real() && os.Getenv("FSERVER_TEST_DMABUF") == "" {
		t.Skip("FSERVER_TEST_DMABUF is not set, and a real NIC does not take memory of a GPU that is played")
	}
	for name, ordering := range map[string]int32{"ordered": 2, "read back": 0} {
		t.Run(name, func(t *testing.T) {
			m, g, _ := newGPUNICs(t, func(g *fakegpu.GPU) {
				if ordering == 0 {
					g.NIC.Ordering = ordering
				}
				if ordering == 0 && !fakeverbs.Real() {
					fakeverbs.Set("late", 1)
				}
			})
			for _, n := range []*Node{m.workers[0], m.servers[0]} {
				direct, err := n.Direct()
				require.NoError(t, err)
				require.True(t, direct)
			}
			messagesOnGPU(t, m, g)
			require.Zero(t, g.copied.Load(), "bytes that the copy engine has moved")
		})
	}
}

// TestVerbsGPUStagedChannel: memory of the GPU is refused where the NIC takes none. Where it takes none of some tensors, these go
// through host memory, and the frame of a message waits for them.
func TestVerbsGPUStagedChannel(t *testing.T) {
	if fakeverbs.Real() {
		t.Skip("FSERVER_TEST_RDMA is set, and only the fake library refuses memory")
	}
	m, g, _ := newGPUNICs(t, func(*fakegpu.GPU) { fakeverbs.Set("dmabuf", 0) })
	direct, err := m.workers[0].Direct()
	require.NoError(t, err)
	require.False(t, direct)
	h, err := m.workers[0].OpenChannel("a")
	require.NoError(t, err)
	err = m.workers[0].CarryChannel(h, Carried{Out: []Tensor{onGPU(t, g.GPU, 1, []byte{1})}})
	require.ErrorContains(t, err, `channel "a": tensor 0 is on gpu 0, which some peers do not reach by themselves`)
	m.stop()

	m, g, _ = newGPUNICs(t, func(*fakegpu.GPU) {})
	fakeverbs.Fail("ibv_reg_dmabuf_mr", syscall.EINVAL, 0, 1000)
	messagesOnGPU(t, m, g)
	require.NotZero(t, g.copied.Load())
}

// messagesOnGPU exchanges messages of several sizes between tensors that this process cannot read, compares every byte, and
// ends the mesh.
func messagesOnGPU(t *testing.T, m *mesh, g *copyGPU) {
	one := func(key, n uint64) []Tensor { return []Tensor{onGPU(t, g.GPU, key, make([]byte, n))} }
	var sides []*proxied
	for i, n := range []uint64{1, 4097, 1<<20 + 5} {
		name, key := fmt.Sprint("channel ", i), uint64(10*i)
		s := carry(t, m.servers[0], name, 1, one(key+1, n), one(key, n), longest)
		w := carry(t, m.workers[0], name, 1, one(key, n), one(key+1, n), longest)
		hidden(t, s.in[0].Span)
		store := func(x Tensor, seed byte) {
			require.NoError(t, fakegpu.Memory{G: g.GPU}.Store(x.Span, spread(n, seed)))
		}
		holds := func(x Tensor, seed byte, rows int64) {
			same(t, spread(n, seed)[:rows], contents(t, g.GPU, x.Span)[:rows], fmt.Sprintf("%d bytes, %d rows", n, rows))
		}
		for turn := 1; turn <= 4; turn++ {
			seed, rows := byte(10*turn), int64(n)*int64(turn)/4
			store(w.out[0], seed)
			w.rows[0].Store(rows)
			w.ring(turn)
			s.done(turn)
			require.EqualValues(t, rows, s.counts[0].Load())
			holds(s.in[0], seed, rows)
			store(s.out[0], seed+1)
			s.ring(turn)
			w.done(turn)
			holds(w.in[0], seed+1, int64(n))
		}
		sides = append(sides, w, s)
	}
	for _, p := range sides {
		require.NoError(t, p.state())
	}
	for _, p := range sides {
		p.close()
	}
	for _, p := range sides {
		eventually(t, p.over)
	}
	m.stop()
	for _, n := range m.all() {
		require.NoError(t, n.Free())
	}
}
