package node

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/cshim/cuda"
	"fserver/engine/exchange"
	"fserver/engine/gpu"
	"fserver/engine/gpu/fakegpu"
	"fserver/engine/mem"
)

// letGo frees the nodes and what the server has received into.
func (m *mesh) letGo(tb testing.TB) {
	for _, n := range m.all() {
		require.NoError(tb, n.Free())
	}
	for id := uint64(1); m.buffers.Len() > 0 && id < 1<<20; id++ {
		for m.buffers.Release(id, 1) == nil {
		}
	}
	for _, n := range m.all() {
		if n.gpu != nil {
			n.gpu.Later.Wait(freeLimit)
		}
	}
}

// pushBehind submits a push_pull of one tensor that is sent when a stream has passed.
func pushBehind(t *testing.T, n *Node, stream cuda.Stream, x, y exchange.Tensor) uint64 {
	ticket, err := n.BeginPushPull()
	require.NoError(t, err)
	require.NoError(t, ticket.AddPush(x))
	require.NoError(t, ticket.AddPull(y))
	require.NoError(t, n.After(ticket, uint64(stream)))
	id := ticket.ID()
	require.NoError(t, n.PushPull(ticket))
	return id
}

// closedAtEnd is a channel and what closes it, at the latest with the test.
func closedAtEnd(t *testing.T) (gate chan struct{}, open func()) {
	gate = make(chan struct{})
	open = sync.OnceFunc(func() { close(gate) })
	t.Cleanup(open)
	return gate, open
}

// TestChannelPassesAWait holds push_pulls up behind a stream and exchanges messages of a
// channel meanwhile. The stream may wait for just those: with one push_pull under way the
// server has its request, and with two of one key the second waits for credit at the worker.
func TestChannelPassesAWait(t *testing.T) {
	for _, transport := range []string{"cudaipc", "cma", "tcp"} {
		for held := 1; held <= 2; held++ {
			t.Run(fmt.Sprint(transport, held), func(t *testing.T) {
				g := fakegpu.New()
				t.Cleanup(func() { g.Empty(t) })
				m := newGPUPair(t, transport, func(int) (gpu.Device, error) { return g, nil })
				worker, server := m.workers[0], m.servers[0]
				here, err := worker.OpenChannel("c")
				require.NoError(t, err)
				there, err := server.OpenChannel("c")
				require.NoError(t, err)
				require.NoError(t, worker.TellChannel(here, 0, ""))
				stream, err := g.NewStream()
				require.NoError(t, err)
				gate, open := closedAtEnd(t)
				g.Put(stream, func() { <-gate })

				x, y := gpuTensor(t, g, 1, 5000, 1), gpuTensor(t, g, 2, 5000, 200)
				var ids []uint64
				for range held {
					ids = append(ids, pushBehind(t, worker, stream, x, y))
				}
				// The request of the first is at the server before the channel's is sent.
				require.Equal(t, ErrAgain, server.GetBatch(&taken{}, 0, 50*time.Millisecond, true))
				for turn := range 3 {
					out, back := tensor(t, 7, 64), tensor(t, 8, 64)
					fill(out, byte(turn+1))
					ticket, err := worker.BeginPushPull()
					require.NoError(t, err)
					require.NoError(t, ticket.AddPush(out))
					require.NoError(t, ticket.AddPull(back))
					id := ticket.ID()
					require.NoError(t, worker.PushPullOn(here, ticket))
					var b batch
					require.NoError(t, retried(func() error { return server.TakeOn(there, &b, 3*time.Second, true) }))
					require.Equal(t, out.Span.Bytes(), b.reqs[0].push[0].Span.Bytes())
					respond(t, server, b.reqs[0].handler, out)
					require.NoError(t, wait(worker, id))
					require.Equal(t, out.Span.Bytes(), back.Span.Bytes())
				}
				open()
				for _, id := range ids {
					b, err := getBatch(server)
					require.NoError(t, err)
					require.Equal(t, contents(t, g, x.Span), contents(t, g, b.reqs[0].push[0].Span))
					respond(t, server, b.reqs[0].handler, gpuTensor(t, g, 0, 5000, 3))
					require.NoError(t, wait(worker, id))
				}
				require.NoError(t, worker.CloseChannel(here, "", -1))
				require.NoError(t, server.CloseChannel(there, "", -1))
				require.NoError(t, g.FreeStream(stream))
				m.stop()
				m.letGo(t)
			})
		}
	}
}

// TestLoanBehindAStream pushes a tensor of shared memory, which could be lent, beside one of a
// GPU that a stream is still to fill.
func TestLoanBehindAStream(t *testing.T) {
	g := fakegpu.New()
	t.Cleanup(func() { g.Empty(t) })
	m := newGPUPair(t, "cudaipc", func(int) (gpu.Device, error) { return g, nil })
	worker, server := m.workers[0], m.servers[0]
	stream, err := g.NewStream()
	require.NoError(t, err)
	shared, err := mem.NewShared(4096)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, mem.FreeShared(shared.ID())) })
	r := shared.Region()
	lent := exchange.Tensor{Span: r.Span(), Key: 2, Base: r, Alloc: 1, Dims: []int64{4096}}
	for range 3 {
		gate, open := closedAtEnd(t)
		g.Put(stream, func() { <-gate })
		x, y := gpuTensor(t, g, 1, 5000, 1), gpuTensor(t, g, 3, 8, 0)
		ticket, err := worker.BeginPushPull()
		require.NoError(t, err)
		require.NoError(t, ticket.AddPush(x))
		require.NoError(t, ticket.AddPush(lent))
		require.NoError(t, ticket.AddPull(y))
		require.NoError(t, worker.After(ticket, uint64(stream)))
		id := ticket.ID()
		require.NoError(t, worker.PushPull(ticket))
		require.Equal(t, ErrAgain, server.GetBatch(&taken{}, 0, 50*time.Millisecond, true))
		open()
		b, err := getBatch(server)
		require.NoError(t, err)
		require.Equal(t, lent.Span.Bytes(), contents(t, g, b.reqs[0].push[1].Span))
		respond(t, server, b.reqs[0].handler, gpuTensor(t, g, 0, 8, 3))
		require.NoError(t, wait(worker, id))
	}
	require.NoError(t, g.FreeStream(stream))
	m.stop()
	m.letGo(t)
}
