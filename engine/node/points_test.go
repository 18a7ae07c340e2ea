package node

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"fserver/cshim/cuda"
	"fserver/engine/exchange"
	"fserver/engine/gpu"
	"fserver/engine/gpu/fakegpu"
	"fserver/engine/trace"
)

// heldPair is a worker and a server on a fake GPU, and a stream of it that is held up until open is called.
func heldPair(t *testing.T, transport string, settings ...string) (m *mesh, g *fakegpu.GPU, stream cuda.Stream, open func()) {
	g = fakegpu.New()
	t.Cleanup(func() { g.Empty(t) })
	m = newGPUPair(t, transport, func(int) (gpu.Device, error) { return g, nil }, settings...)
	stream, err := g.NewStream()
	require.NoError(t, err)
	gate, open := closedAtEnd(t)
	g.Put(stream, func() { <-gate })
	return m, g, stream, open
}

// words is how many words a node waits for, or a stream is still to store.
func words(n *Node) int { return int(n.gpu.under.Load()) }

// TestHostMemoryBehindAStream sends tensors of the CPU that a stream is still to fill, alone and beside one of the
// GPU, both ways, and with both ways of learning how far a stream is.
func TestHostMemoryBehindAStream(t *testing.T) {
	for _, transport := range []string{"tcp", "cma", "cudaipc"} {
		for _, sync := range []string{"0", "1"} {
			t.Run(transport+sync, func(t *testing.T) {
				g := fakegpu.New()
				t.Cleanup(func() { g.Empty(t) })
				m := newGPUPair(t, transport, func(int) (gpu.Device, error) { return g, nil }, "STEPMESH_MEM_SYNC="+sync)
				worker, server := m.workers[0], m.servers[0]
				stream, err := g.NewStream()
				require.NoError(t, err)
				for round := range 6 {
					x, y, z := tensor(t, 1, 64), tensor(t, 2, 64), gpuTensor(t, g, 3, 64, 1)
					gate, open := closedAtEnd(t)
					g.Put(stream, func() { <-gate; fill(x, byte(round)) })
					ticket, err := worker.BeginPushPull()
					require.NoError(t, err)
					require.NoError(t, ticket.AddPush(x))
					if round%2 == 0 {
						require.NoError(t, ticket.AddPush(z))
					}
					require.NoError(t, ticket.AddPull(y))
					require.NoError(t, worker.After(ticket, uint64(stream)))
					id := ticket.ID()
					require.NoError(t, worker.PushPull(ticket))
					require.Equal(t, ErrAgain, server.GetBatch(&taken{}, 0, 20*time.Millisecond, true))
					require.Equal(t, 1, words(worker))
					open()
					b, err := getBatch(server)
					require.NoError(t, err)
					require.Equal(t, x.Span.Bytes(), contents(t, g, b.reqs[0].push[0].Span))
					require.Equal(t, byte(round)+63, x.Span.Bytes()[63])

					gate, open = closedAtEnd(t)
					back := tensor(t, 0, 64)
					g.Put(stream, func() { <-gate; fill(back, byte(round+100)) })
					respondBehind(t, server, b.reqs[0].handler, back, stream)
					require.Equal(t, ErrAgain, worker.Wait(id, 20*time.Millisecond, true))
					require.Equal(t, 1, words(server))
					open()
					require.NoError(t, wait(worker, id))
					require.Equal(t, back.Span.Bytes(), y.Span.Bytes())
				}
				require.Zero(t, words(worker))
				require.NoError(t, g.FreeStream(stream))
				m.stop()
				m.letGo(t)
			})
		}
	}
}

// TestStopBehindAStream: a server that stops after its answers says Bye behind them, also behind one that
// waits for a stream.
func TestStopBehindAStream(t *testing.T) {
	for _, progress := range []string{"caller", "thread"} {
		t.Run(progress, func(t *testing.T) {
			m, g, stream, open := heldPair(t, "tcp", "FSERVER_PROGRESS="+progress)
			worker, server := m.workers[0], m.servers[0]
			id := m.answerBehind(t, stream)
			require.Equal(t, ErrAgain, server.Stop(50*time.Millisecond))
			require.Equal(t, ErrAgain, worker.Wait(id, 50*time.Millisecond, true))
			open()
			require.NoError(t, wait(worker, id))
			require.NoError(t, g.FreeStream(stream))
			require.ErrorContains(t, wait(worker, pushPull(t, worker, nil, []exchange.Tensor{tensor(t, 2, 64)})), hasLeft)
			m.stop()
			m.letGo(t)
		})
	}
}

// answerBehind has the worker push and pull, and the server answer behind a stream. It returns the push_pull.
func (m *mesh) answerBehind(t *testing.T, stream cuda.Stream) (id uint64) {
	server := m.servers[0]
	x, y := tensor(t, 1, 64), tensor(t, 2, 64)
	id = pushPull(t, m.workers[0], []exchange.Tensor{x}, []exchange.Tensor{y})
	b, err := getBatch(server)
	require.NoError(t, err)
	respondBehind(t, server, b.reqs[0].handler, x, stream)
	return id
}

// respondBehind answers a request with x, behind what is queued on a stream.
func respondBehind(t *testing.T, server *Node, handler uint64, x exchange.Tensor, stream cuda.Stream) {
	answer, err := server.BeginAnswer()
	require.NoError(t, err)
	require.NoError(t, answer.AddPush(x))
	require.NoError(t, server.After(answer, uint64(stream)))
	require.NoError(t, server.Respond(handler, answer))
	server.Flush()
}

// TestStopInFrontOfAStream: a server that has left before its answers are sent has said Bye, and nobody waits for its
// successor.
func TestStopInFrontOfAStream(t *testing.T) {
	m, g, stream, open := heldPair(t, "tcp", "FSERVER_STOP_TIMEOUT=1", "FSERVER_ON_PEER_LOST=wait")
	worker, server := m.workers[0], m.servers[0]
	id := m.answerBehind(t, stream)
	stopped := make(chan error, 1)
	go func() { stopped <- retried(func() error { return server.Stop(time.Second) }) }()
	start := time.Now()
	require.ErrorContains(t, wait(worker, id), hasLeft)
	require.Less(t, time.Since(start), 10*time.Second)
	open()
	var late *TimeoutError
	require.ErrorAs(t, <-stopped, &late)
	require.NoError(t, g.FreeStream(stream))
	require.NoError(t, retried(func() error { return worker.Stop(time.Second) }))
	require.NoError(t, retried(func() error { return m.scheduler.Stop(time.Second) }))
	m.letGo(t)
}

// TestStopSendsTheLast: an answer that waits for the device when the cluster ends, and the Bye behind it, are sent before the node is
// closed, if the device comes to it soon.
func TestStopSendsTheLast(t *testing.T) {
	m, g, stream, open := heldPair(t, "tcp", "FSERVER_STOP_TIMEOUT=1")
	worker, server := m.workers[0], m.servers[0]
	x, y := gpuTensor(t, g, 1, 64, 3), hostTensor(t, 2, 64, 0)
	id := pushPull(t, worker, []exchange.Tensor{tensor(t, 1, 64)}, []exchange.Tensor{y})
	b, err := getBatch(server)
	require.NoError(t, err)
	respondBehind(t, server, b.reqs[0].handler, x, stream)
	go func() {
		for server.phase.Load() != ended {
			time.Sleep(time.Millisecond)
		}
		time.Sleep(20 * time.Millisecond)
		open()
	}()
	var late *TimeoutError
	require.ErrorAs(t, retried(func() error { return server.Stop(time.Second) }), &late)
	require.NoError(t, wait(worker, id))
	require.Equal(t, byte(3), y.Span.Bytes()[0])
	require.ErrorContains(t, wait(worker, pushPull(t, worker, nil, []exchange.Tensor{tensor(t, 2, 64)})), hasLeft)
	require.NoError(t, g.FreeStream(stream))
	require.NoError(t, retried(func() error { return worker.Stop(time.Second) }))
	require.NoError(t, retried(func() error { return m.scheduler.Stop(time.Second) }))
	m.letGo(t)
}

// TestFailedSaysNoBye: a server that fails while it leaves does not leave in good order.
func TestFailedSaysNoBye(t *testing.T) {
	m, g, stream, open := heldPair(t, "tcp")
	worker, server := m.workers[0], m.servers[0]
	id := m.answerBehind(t, stream)
	require.Equal(t, ErrAgain, server.Stop(50*time.Millisecond))
	require.True(t, server.driver.Under(func() { server.fail(errNeverTaken) }))
	server.driver.Drive(trace.Now())
	open()
	require.NoError(t, server.Close())
	err := wait(worker, id)
	var lost *LostError
	require.ErrorAs(t, err, &lost)
	require.NotContains(t, err.Error(), hasLeft)
	require.NoError(t, g.FreeStream(stream))
	m.letGo(t)
}

// TestDeviceWaits: where the Fabric takes points, the device waits for the stream, and no word is made.
func TestDeviceWaits(t *testing.T) {
	for _, transport := range []string{"tcp", "cudaipc"} {
		t.Run(transport, func(t *testing.T) {
			m, g, stream, open := heldPair(t, transport)
			x, y := gpuTensor(t, g, 1, 64, 1), tensor(t, 2, 64)
			id := pushBehind(t, m.workers[0], stream, x, y)
			require.Equal(t, ErrAgain, m.servers[0].GetBatch(&taken{}, 0, 20*time.Millisecond, true))
			require.Zero(t, words(m.workers[0]))
			open()
			b, err := getBatch(m.servers[0])
			require.NoError(t, err)
			respond(t, m.servers[0], b.reqs[0].handler, y)
			require.NoError(t, wait(m.workers[0], id))
			require.NoError(t, g.FreeStream(stream))
			m.stop()
			m.letGo(t)
		})
	}
}

// TestSomebodyDrives: between push_pull and wait nobody calls the worker, and what is held back is sent all the
// same when its stream has come there.
func TestSomebodyDrives(t *testing.T) {
	for _, progress := range []string{"caller", "thread"} {
		t.Run(progress, func(t *testing.T) {
			m, g, stream, open := heldPair(t, "tcp", "FSERVER_PROGRESS="+progress)
			worker, server := m.workers[0], m.servers[0]
			x, y := tensor(t, 1, 64), tensor(t, 2, 64)
			for round := range 3 {
				id := pushBehind(t, worker, stream, x, y)
				sleeps := worker.driver.Sleeps()
				looks := func() bool { return worker.driver.Sleeps() > sleeps+20 }
				if round > 0 { // the first has a question for the server
					require.Eventually(t, looks, 5*time.Second, time.Millisecond)
				}
				require.Equal(t, ErrAgain, server.GetBatch(&taken{}, 0, 50*time.Millisecond, true))
				require.Equal(t, ErrAgain, worker.Wait(id, time.Millisecond, true)) // and leaves
				require.Equal(t, ErrAgain, server.GetBatch(&taken{}, 0, 50*time.Millisecond, true))
				open()
				b, err := getBatch(server)
				require.NoError(t, err)
				respond(t, server, b.reqs[0].handler, x)
				require.NoError(t, wait(worker, id))
				var gate chan struct{}
				gate, open = closedAtEnd(t)
				g.Put(stream, func() { <-gate })
			}
			open()
			require.NoError(t, g.FreeStream(stream))
			m.stop()
			m.letGo(t)
		})
	}
}

// TestHeldEnds: what is held back ends in bounded time, and with an error that says why, when the peer is lost, the
// node is closed or the GPU fails; and it is sent if its stream is destroyed, which ends no work.
func TestHeldEnds(t *testing.T) {
	for _, sync := range []string{"0", "1"} {
		run := func(name string, f func(t *testing.T, m *mesh, g *fakegpu.GPU, stream cuda.Stream, id uint64, open func())) {
			t.Run(name+sync, func(t *testing.T) {
				m, g, stream, open := heldPair(t, "tcp", "STEPMESH_MEM_SYNC="+sync)
				id := pushBehind(t, m.workers[0], stream, tensor(t, 1, 64), tensor(t, 2, 64))
				require.Equal(t, ErrAgain, m.workers[0].Wait(id, 20*time.Millisecond, true))
				require.Equal(t, 1, words(m.workers[0]))
				f(t, m, g, stream, id, open)
				m.letGo(t)
			})
		}
		run("peer lost", func(t *testing.T, m *mesh, g *fakegpu.GPU, stream cuda.Stream, id uint64, open func()) {
			require.NoError(t, m.servers[0].Close())
			var lost *LostError
			require.ErrorAs(t, wait(m.workers[0], id), &lost)
			// The stream is still to store the word, if it does: nobody else gets that meanwhile.
			left := map[string]int{"0": 0, "1": 1}[sync]
			require.Eventually(t, func() bool { return words(m.workers[0]) == left }, 5*time.Second, time.Millisecond)
			open()
			require.NoError(t, g.FreeStream(stream))
		})
		run("close", func(t *testing.T, m *mesh, g *fakegpu.GPU, stream cuda.Stream, id uint64, open func()) {
			require.NoError(t, m.workers[0].Close())
			require.ErrorIs(t, m.workers[0].Wait(id, time.Second, true), ErrClosed)
			open()
			require.NoError(t, g.FreeStream(stream))
		})
		run("gpu", func(t *testing.T, m *mesh, g *fakegpu.GPU, stream cuda.Stream, id uint64, open func()) {
			g.Fail("Passed", 1<<30)
			require.ErrorContains(t, wait(m.workers[0], id), "gpu 0 does not work any more: Passed: cuda: injected failure")
			_, err := m.workers[0].BeginPushPull()
			require.ErrorContains(t, err, "gpu 0 does not work any more")
			open()
			require.NoError(t, g.FreeStream(stream))
		})
		run("stream", func(t *testing.T, m *mesh, g *fakegpu.GPU, stream cuda.Stream, id uint64, open func()) {
			freed := make(chan error)
			go func() { freed <- g.FreeStream(stream) }()
			require.Equal(t, ErrAgain, m.workers[0].Wait(id, 20*time.Millisecond, true))
			open()
			b, err := getBatch(m.servers[0])
			require.NoError(t, err)
			respond(t, m.servers[0], b.reqs[0].handler, tensor(t, 0, 64))
			require.NoError(t, wait(m.workers[0], id))
			require.NoError(t, <-freed)
			m.stop()
		})
	}
}

// TestNoPoint: where the driver makes no point, push_pull says so, and what it took goes back.
func TestNoPoint(t *testing.T) {
	for call, sync := range map[string]string{"Record": "0", "Enqueue": "1", "NewEvent": "0"} {
		t.Run(call, func(t *testing.T) {
			m, g, stream, open := heldPair(t, "tcp", "STEPMESH_MEM_SYNC="+sync)
			worker := m.workers[0]
			g.Fail(call, 1)
			ticket, err := worker.BeginPushPull()
			require.NoError(t, err)
			require.NoError(t, ticket.AddPush(tensor(t, 1, 64)))
			require.NoError(t, worker.After(ticket, uint64(stream)))
			require.ErrorContains(t, worker.PushPull(ticket), call+": cuda: injected failure")
			require.Zero(t, words(worker))
			open()
			require.NoError(t, g.FreeStream(stream))
			m.stop()
			m.letGo(t)
		})
	}
}

// TestPointsThatFailKeepNoEvent: neither if the driver records none, nor if there is no word.
func TestPointsThatFailKeepNoEvent(t *testing.T) {
	fake := fakegpu.New()
	g, err := newCard(fake, new(gpu.Later), false, zap.NewNop())
	require.NoError(t, err)
	stream, err := fake.NewStream()
	require.NoError(t, err)
	for _, event := range []bool{false, true} {
		fake.Fail("Record", 3)
		for range 3 {
			_, err := g.point(uint64(stream), event, true)
			require.ErrorContains(t, err, "Record: cuda: injected failure")
		}
	}
	require.Len(t, g.all, 2) // one is g.unused
	spare := g.spare
	g.spare = nil
	for _, event := range []bool{false, true, false} {
		_, err := g.point(uint64(stream), event, true)
		require.ErrorContains(t, err, "operations wait for streams")
	}
	g.spare = spare
	require.Len(t, g.all, 2)
	for range 3 { // the event goes back once, with the mark or with the point
		p, err := g.point(uint64(stream), false, true)
		require.NoError(t, err)
		require.Zero(t, p.Event)
		g.passed(p)
	}
	require.Len(t, g.all, 2)
	require.Len(t, g.free, 1)
	require.NoError(t, fake.FreeStream(stream))
	g.close()
	fake.Empty(t)
}

// TestWords: each point has a word of its own until the stream has stored it, and there are so many.
func TestWords(t *testing.T) {
	fake := fakegpu.New()
	g, err := newCard(fake, new(gpu.Later), true, zap.NewNop())
	require.NoError(t, err)
	stream, err := fake.NewStream()
	require.NoError(t, err)
	gate, open := closedAtEnd(t)
	fake.Put(stream, func() { <-gate })
	seen := map[uint32]bool{}
	var all []exchange.Point
	for i := range pointsMost {
		p, err := g.point(uint64(stream), false, true)
		require.NoError(t, err)
		require.False(t, seen[p.ID])
		seen[p.ID] = true
		if all = append(all, p); i%2 == 0 {
			g.passed(p) // nobody waits for it
		}
	}
	require.NotEqual(t, all[0].ID/lineWords, all[1].ID/lineWords)
	_, err = g.point(uint64(stream), false, true)
	require.ErrorContains(t, err, fmt.Sprintf("%d operations wait for streams", pointsMost))
	open()
	require.NoError(t, fake.FreeStream(stream))
	for i, p := range all {
		require.Equal(t, p.Value, p.Word.Load())
		if i%2 != 0 {
			g.passed(p)
		}
	}
	require.Zero(t, g.under.Load())
	g.close()
	fake.Empty(t)
}

// TestStreamThatDoesNotEnd: memory that a stream may still write to stays where it is.
func TestStreamThatDoesNotEnd(t *testing.T) {
	if testing.Short() {
		t.Skip("waits for freeLimit")
	}
	fake := fakegpu.New()
	g, err := newCard(fake, new(gpu.Later), true, zap.NewNop())
	require.NoError(t, err)
	stream, err := fake.NewStream()
	require.NoError(t, err)
	gate, open := closedAtEnd(t)
	fake.Put(stream, func() { <-gate })
	p, err := g.point(uint64(stream), false, true)
	require.NoError(t, err)
	g.passed(p)
	g.close()
	g.Later.Wait(freeLimit)
	open()
	require.NoError(t, fake.FreeStream(stream))
	require.Equal(t, p.Value, p.Word.Load())
}
