package node

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"fserver/cshim/cuda"
	"fserver/engine/exchange"
	"fserver/engine/gpu"
	"fserver/engine/gpu/fakegpu"
	"fserver/engine/mem"
	"fserver/engine/transport"
)

// gpuTensor is n bytes of a GPU.
func gpuTensor(t testing.TB, g *fakegpu.GPU, key, n uint64, fill byte) exchange.Tensor {
	r, err := fakegpu.Memory{G: g}.Alloc(n)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, fakegpu.Memory{G: g}.Free(r)) })
	b := make([]byte, n)
	for i := range b {
		b[i] = fill + byte(i*7)
	}
	require.NoError(t, fakegpu.Memory{G: g}.Store(r.Span(), b))
	return exchange.Tensor{Span: r.Span(), Dev: r.Dev, Key: key, Base: r, Alloc: uint64(r.Addr), Dims: []int64{int64(n)}}
}

func contents(t *testing.T, g *fakegpu.GPU, s mem.Span) []byte {
	b := make([]byte, s.Len)
	require.NoError(t, fakegpu.Memory{G: g}.Load(b, s))
	return b
}

// TestHiddenGPU: a node whose GPU is not among those that CUDA shows warns that its tensors are on the CPU. Where there is
// no GPU, nobody meant one.
func TestHiddenGPU(t *testing.T) {
	no := &transport.ErrUnavailable{Transport: "gpu", Reason: "gpu 3: CUDA shows 1 GPUs", Remedy: "see STEPMESH_GPU"}
	cfg := settingsOf(t, "")
	for err, want := range map[error]zapcore.Level{no: zap.DebugLevel, &gpu.IndexError{ErrUnavailable: no}: zap.WarnLevel} {
		core, logs := observer.New(zap.DebugLevel)
		g, failed := openGPU(cfg, func(int) (gpu.Device, error) { return nil, err }, zap.New(core))
		require.NoError(t, failed)
		require.Nil(t, g)
		require.Equal(t, want, logs.All()[0].Level)
		require.Contains(t, fmt.Sprint(logs.All()[0].ContextMap()), "CUDA shows 1 GPUs (see STEPMESH_GPU)")
	}
	_, err := openGPU(settingsOf(t, "FSERVER_TRANSPORT=cudaipc"), func(int) (gpu.Device, error) { return nil, &gpu.IndexError{ErrUnavailable: no} }, zap.NewNop())
	require.ErrorContains(t, err, visible)
}

// TestGPUTensors moves tensors of a GPU between two nodes over each transport, from
// behind a stream that is held up.
func TestGPUTensors(t *testing.T) {
	for _, way := range []string{"cma", "cudaipc", "tcp", "verbs", "verbs FSERVER_RDMA_DEVICE=fake0,fake1"} {
		transport, more, _ := strings.Cut(way, " ")
		settings := strings.Fields(more)
		for _, pieces := range []bool{false, true} {
			t.Run(fmt.Sprint(way, pieces), func(t *testing.T) {
				g := fakegpu.New()
				g.Pieces = pieces
				t.Cleanup(func() { g.Empty(t) })
				reads := func() int { return 0 }
				if transport == "verbs" {
					reads = directNICs(t, g)
				}
				m := newGPUPair(t, transport, func(int) (gpu.Device, error) { return g, nil }, settings...)
				worker, server := m.workers[0], m.servers[0]
				require.Equal(t, mem.GPU(0), worker.Info().Device)
				stream, err := g.NewStream()
				require.NoError(t, err)
				t.Cleanup(func() { require.NoError(t, g.FreeStream(stream)) })
				buffers := map[uint64]uint64{} // how often we have seen each
				for round, n := range []uint64{1, 5000, 3 << 20, 3 << 20, 700000, 0} {
					x, y := gpuTensor(t, g, 1, n, byte(round)), gpuTensor(t, g, 2, n, 200)
					gate := make(chan struct{})
					g.Put(cuda.Stream(stream), func() { <-gate })
					late := contents(t, g, x.Span)
					for i := range late {
						late[i] ^= 0x55
					}
					g.Put(cuda.Stream(stream), func() {
						_ = fakegpu.Memory{G: g}.Store(x.Span, late)
					})
					ticket, err := worker.BeginPushPull()
					require.NoError(t, err)
					require.NoError(t, ticket.AddPush(x))
					require.NoError(t, ticket.AddPull(y))
					require.NoError(t, worker.After(ticket, uint64(stream)))
					id := ticket.ID()
					require.NoError(t, worker.PushPull(ticket))
					if n != 0 {
						require.Equal(t, ErrAgain, server.GetBatch(&taken{}, 0, 20*time.Millisecond, true))
					}
					close(gate)
					var batch taken
					for err = ErrAgain; err == ErrAgain; {
						err = server.GetBatch(&batch, 0, time.Second, true)
					}
					require.NoError(t, err)
					got := batch.push[0]
					if n != 0 {
						buffers[got.Buffer]++
						require.Equal(t, mem.GPU(0), got.Dev)
						require.Equal(t, late, contents(t, g, got.Span))
					}
					answer, err := server.BeginAnswer()
					require.NoError(t, err)
					back := gpuTensor(t, g, 0, n, 100)
					require.NoError(t, answer.AddPush(back))
					require.NoError(t, server.Respond(batch.handler, answer))
					server.Flush()
					for err = ErrAgain; err == ErrAgain; {
						err = worker.Wait(id, time.Second, true)
					}
					require.NoError(t, err)
					require.Equal(t, contents(t, g, back.Span), contents(t, g, y.Span))
				}
				b, err := worker.Describe()
				require.NoError(t, err)
				want := `"transport":"cudaipc"`
				if transport == "tcp" || transport == "verbs" {
					want = `"transport":"` + transport + strings.Repeat("+verbs", strings.Count(more, ",")) + `"`
				}
				require.Equal(t, transport == "verbs", reads() > 0, "the NIC writes into the GPU")
				require.Contains(t, string(b), want)
				m.stop()
				for _, n := range m.all() {
					require.NoError(t, n.Free())
				}
				for id, times := range buffers {
					require.NoError(t, m.buffers.Release(id, times))
				}
			})
		}
	}
}

// TestGPUOutOfMemory: whoever asks is told where memory is short, and what to do, and
// not that the peer is gone; the same request is taken later.
func TestGPUOutOfMemory(t *testing.T) {
	for call, says := range map[string]string{
		"Alloc": "server 0 has no receive buffer: Alloc: cuda: injected failure: out of memory (call torch.cuda.empty_cache()",
		"Pin":   "allocate host memory for staging: Pin: cuda: injected failure: out of memory (send fewer or smaller",
	} {
		t.Run(call, func(t *testing.T) {
			g := fakegpu.New()
			t.Cleanup(func() { g.Empty(t) })
			m := newGPUPair(t, "tcp", func(int) (gpu.Device, error) { return g, nil })
			worker, server := m.workers[0], m.servers[0]
			x := gpuTensor(t, g, 1, 5000, 1)
			push := func(limit time.Duration) error {
				ticket, err := worker.BeginPushPull()
				require.NoError(t, err)
				require.NoError(t, ticket.AddPush(x))
				id := ticket.ID()
				if err := worker.PushPull(ticket); err != nil {
					return err
				}
				if limit < time.Second {
					return worker.Wait(id, limit, true)
				}
				return retried(func() error { return worker.Wait(id, limit, true) })
			}
			g.Fail(call, 1)
			err := push(10 * time.Second)
			require.ErrorContains(t, err, says)
			var lost *LostError
			require.NotErrorAs(t, err, &lost)
			if call == "Pin" { // the connection has ended with it
				require.Eventually(t, func() bool {
					err = push(20 * time.Millisecond)
					return err == ErrAgain
				}, 10*time.Second, time.Millisecond)
			} else {
				require.Equal(t, ErrAgain, push(20*time.Millisecond))
			}
			var batch taken
			require.Eventually(t, func() bool { // the server may not have heard of the new connection
				return server.GetBatch(&batch, 0, time.Second, true) == nil
			}, 10*time.Second, time.Millisecond)
			require.Equal(t, contents(t, g, x.Span), contents(t, g, batch.push[0].Span))
			m.stop()
			for _, n := range m.all() {
				require.NoError(t, n.Free())
			}
			require.NoError(t, m.buffers.Release(batch.push[0].Buffer, 1))
		})
	}
}

// TestGPUUntaken: the memory that a request came in which nobody takes goes with the
// node.
func TestGPUUntaken(t *testing.T) {
	g := fakegpu.New()
	t.Cleanup(func() { g.Empty(t) })
	m := newGPUPair(t, "tcp", func(int) (gpu.Device, error) { return g, nil })
	worker, server := m.workers[0], m.servers[0]
	ticket, err := worker.BeginPushPull()
	require.NoError(t, err)
	require.NoError(t, ticket.AddPush(gpuTensor(t, g, 1, 5000, 1)))
	require.NoError(t, worker.PushPull(ticket))
	require.Eventually(t, func() bool { // a signal ends a call
		return server.driver.Await(func() bool { return server.server.Ready(1) }, time.Second, true)
	}, 10*time.Second, time.Millisecond)
	require.Equal(t, 1, m.buffers.Len())
	for _, n := range m.all() {
		require.NoError(t, n.Free())
	}
	require.Zero(t, m.buffers.Len())
}

// taken is the first request of a batch.
type taken struct {
	handler uint64
	push    []exchange.Received
}

func (s *taken) Batch(reqs []*Request) error {
	s.handler, s.push = reqs[0].Handler(), append(s.push[:0], reqs[0].Push()...)
	return nil
}

// TestWrongDevice refuses tensors of another GPU, by name.
func TestWrongDevice(t *testing.T) {
	m := newMesh(t, openFabrics, shape{1, 1, 1})
	x := tensor(t, 1, 1)
	x.Dev, x.Base.Dev = mem.GPU(3), mem.GPU(3)
	ticket, err := m.workers[0].BeginPushPull()
	require.NoError(t, err)
	for what, add := range map[string]func(Tensor) error{"push": ticket.AddPush, "pull": ticket.AddPull} {
		err = add(x)
		require.ErrorContains(t, err, what+" tensor 0 is on gpu 3, and this node takes CPU tensors only")
		require.Equal(t, syscall.EINVAL, Errno(err))
	}
	m.workers[0].Abandon(ticket)
	ticket, err = m.servers[0].BeginAnswer()
	require.NoError(t, err)
	require.ErrorContains(t, ticket.AddPush(x), "push tensor 0 is on gpu 3")
	m.servers[0].Abandon(ticket)
	ticket, err = m.workers[0].BeginPushPull()
	require.NoError(t, err)
	require.ErrorContains(t, m.workers[0].After(ticket, 0), "STEPMESH_BACKEND")
	m.workers[0].Abandon(ticket)
	require.ErrorContains(t, m.servers[0].RegisterRecv(x, []int32{0}, []uint64{1}), "gpu 3")
}

// TestBackendWithoutGPU says what is missing, and the default is the CPU then.
func TestBackendWithoutGPU(t *testing.T) {
	if _, err := gpu.Open(0); err == nil {
		t.Skip("this host has a GPU")
	}
	s := shape{1, 1, 1}
	_, err := Open(s.settings("worker", 0, 0, "1", "STEPMESH_BACKEND=GPU"), exchange.NewBuffers())
	require.ErrorContains(t, err, "STEPMESH_BACKEND=GPU: gpu: not available: cuda: ")
	_, err = Open(s.settings("worker", 0, 0, "1", "FSERVER_TRANSPORT=cudaipc", "STEPMESH_BACKEND="), exchange.NewBuffers())
	require.ErrorContains(t, err, "FSERVER_TRANSPORT=cudaipc: gpu: not available: cuda: ")
	_, err = Open(s.settings("worker", 0, 0, "1", "FSERVER_TRANSPORT=cudaipc", "STEPMESH_BACKEND=CPU"), exchange.NewBuffers())
	require.ErrorContains(t, err, "FSERVER_TRANSPORT=cudaipc with STEPMESH_BACKEND=CPU")
}

// TestRealGPU moves tensors of this host's GPU, mapped and staged.
func TestRealGPU(t *testing.T) {
	d := fakegpu.Real(t)
	buffer := func(key, n uint64, fill byte) exchange.Tensor {
		a, err := d.Alloc(n)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, d.Free(a)) })
		require.NoError(t, d.Write(a, bytes.Repeat([]byte{fill}, int(n))))
		r := mem.Region{Addr: uintptr(a), Len: n, Dev: mem.GPU(0)}
		return exchange.Tensor{Span: r.Span(), Dev: r.Dev, Key: key, Base: r, Alloc: a, Dims: []int64{int64(n)}}
	}
	for _, transport := range []string{"cma", "tcp"} {
		m := newGPUPair(t, transport, gpu.Open)
		worker, server := m.workers[0], m.servers[0]
		buffers := map[uint64]uint64{}
		for round, n := range []uint64{1, 4096, 128 * 7168, 5 << 20, 64 << 20, 128 * 7168} {
			x, y, back := buffer(1, n, byte(round+1)), buffer(2, n, 200), buffer(0, n, byte(round+101))
			ticket, err := worker.BeginPushPull()
			require.NoError(t, err)
			require.NoError(t, errors.Join(ticket.AddPush(x), ticket.AddPull(y), worker.After(ticket, 0)))
			id := ticket.ID()
			require.NoError(t, worker.PushPull(ticket))
			var batch taken
			for err = ErrAgain; err == ErrAgain; {
				err = server.GetBatch(&batch, 0, time.Second, true)
			}
			require.NoError(t, err)
			buffers[batch.push[0].Buffer]++
			got := make([]byte, n)
			require.NoError(t, d.Read(got, uint64(batch.push[0].Span.Addr)))
			require.Equal(t, bytes.Repeat([]byte{byte(round + 1)}, int(n)), got)
			answer, err := server.BeginAnswer()
			require.NoError(t, err)
			require.NoError(t, answer.AddPush(back))
			require.NoError(t, server.Respond(batch.handler, answer))
			server.Flush()
			for err = ErrAgain; err == ErrAgain; {
				err = worker.Wait(id, time.Second, true)
			}
			require.NoError(t, err)
			require.NoError(t, d.Read(got, uint64(y.Span.Addr)))
			require.Equal(t, bytes.Repeat([]byte{byte(round + 101)}, int(n)), got)
		}
		links, err := worker.Describe()
		require.NoError(t, err)
		t.Log(string(links))
		m.stop()
		for _, n := range m.all() {
			require.NoError(t, n.Free())
		}
		for id, times := range buffers {
			require.NoError(t, m.buffers.Release(id, times))
		}
	}
}

// newGPUPair brings up a worker and a server with tensors on a GPU.
func newGPUPair(tb testing.TB, transport string, devices gpu.Opener, settings ...string) *mesh {
	m, s := newCluster(tb, openFabrics), shape{1, 1, 1}
	m.devices = devices
	extra := append(settings, "FSERVER_TRANSPORT="+transport, "STEPMESH_BACKEND=GPU")
	m.scheduler = m.start(s.settings("scheduler", 0, 0, "0", extra...))
	_, port := splitPort(tb, m.scheduler.Info().Address)
	m.workers = []*Node{m.start(s.settings("worker", 0, 0, port, extra...))}
	m.servers = []*Node{m.start(s.settings("server", 0, 0, port, extra...))}
	for _, n := range m.all() {
		waitReady(tb, n)
	}
	return m
}

// hostTensor is like gpuTensor, on the host.
func hostTensor(t *testing.T, key uint64, n uint64, fill byte) exchange.Tensor {
	r, err := mem.Map(n)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, mem.Unmap(r)) })
	copy(r.Span().Bytes(), bytes.Repeat([]byte{fill}, int(n)))
	return exchange.Tensor{Span: r.Span(), Key: key, Base: r, Alloc: uint64(r.Addr), Dims: []int64{int64(n)}}
}

// TestOneSideHasAGPU: a node with tensors on the CPU and one with tensors on a GPU write into
// each other's memory, also where frames are lost and sent again.
func TestOneSideHasAGPU(t *testing.T) {
	for _, transport := range []string{"cma", "tcp"} {
		for _, c := range []struct {
			name           string
			worker, server string
			more           []string
		}{
			{"server", "CPU", "GPU", nil},
			{"worker", "GPU", "CPU", nil},
			{"server, resend", "CPU", "GPU", []string{"PS_RESEND=1", "PS_DROP_MSG=10", "PS_RESEND_TIMEOUT=20"}},
		} {
			t.Run(transport+" "+c.name, func(t *testing.T) {
				g := fakegpu.New()
				t.Cleanup(func() { g.Empty(t) })
				m, s := newCluster(t, openFabrics), shape{1, 1, 1}
				m.devices = func(int) (gpu.Device, error) { return g, nil }
				with := func(backend string) []string {
					return slices.Concat([]string{"FSERVER_TRANSPORT=" + transport, "STEPMESH_BACKEND=" + backend}, c.more)
				}
				m.scheduler = m.start(s.settings("scheduler", 0, 0, "0", with("CPU")...))
				_, port := splitPort(t, m.scheduler.Info().Address)
				worker := m.start(s.settings("worker", 0, 0, port, with(c.worker)...))
				server := m.start(s.settings("server", 0, 0, port, with(c.server)...))
				m.workers, m.servers = []*Node{worker}, []*Node{server}
				for _, n := range m.all() {
					waitReady(t, n)
				}
				tensor := func(backend string, key, n uint64, fill byte) exchange.Tensor {
					if backend == "GPU" {
						return gpuTensor(t, g, key, n, fill)
					}
					return hostTensor(t, key, n, fill)
				}
				buffers := map[uint64]uint64{} // how often we have seen each
				for round, n := range []uint64{1, 5000, 3 << 20, 700000} {
					x, y := tensor(c.worker, 1, n, byte(round+1)), tensor(c.worker, 2, n, 200)
					ticket, err := worker.BeginPushPull()
					require.NoError(t, err)
					require.NoError(t, errors.Join(ticket.AddPush(x), ticket.AddPull(y)))
					id := ticket.ID()
					require.NoError(t, worker.PushPull(ticket))
					var batch taken
					for err = ErrAgain; err == ErrAgain; {
						err = server.GetBatch(&batch, 0, time.Second, true)
					}
					require.NoError(t, err)
					got := batch.push[0]
					buffers[got.Buffer]++
					require.Equal(t, server.Info().Device, got.Dev)
					require.Equal(t, contents(t, g, x.Span), contents(t, g, got.Span))
					back := tensor(c.server, 0, n, byte(100+round))
					answer, err := server.BeginAnswer()
					require.NoError(t, err)
					require.NoError(t, answer.AddPush(back))
					require.NoError(t, server.Respond(batch.handler, answer))
					server.Flush()
					for err = ErrAgain; err == ErrAgain; {
						err = worker.Wait(id, time.Second, true)
					}
					require.NoError(t, err)
					require.Equal(t, contents(t, g, back.Span), contents(t, g, y.Span))
				}
				m.stop()
				for _, n := range m.all() {
					require.NoError(t, n.Free())
				}
				for id, times := range buffers {
					require.NoError(t, m.buffers.Release(id, times))
				}
			})
		}
	}
}

// TestGPUFreesLater: nobody waits for a busy GPU to take memory back, but who finds none;
// and where kernels may wait for messages, nobody else does either.
func TestGPUFreesLater(t *testing.T) {
	fake := fakegpu.New()
	g := &card{GPU: gpu.GPU{Device: fake, Later: new(gpu.Later)}, log: zap.NewNop()}
	take := func() mem.Region {
		r, err := g.Alloc(4096)
		require.NoError(t, err)
		return r
	}
	r := take()
	end := fake.Kernel(t)
	require.NoError(t, g.Free(r))
	require.Eventually(t, func() bool { return fake.Reclaims() == 1 }, 10*time.Second, time.Millisecond)
	end()
	g.Later.Wait(freeLimit)
	fake.Empty(t)

	r = take()
	end = fake.Kernel(t)
	g.Later.Hold()
	require.NoError(t, g.Free(r))
	g.Later.Wait(5 * time.Millisecond)
	r = take()
	require.Zero(t, fake.Reclaims())
	fake.Fail("Alloc", 1)
	time.AfterFunc(20*time.Millisecond, end)
	require.NoError(t, g.Free(take())) // the first one makes room
	require.NoError(t, g.Free(r))
	g.Later.Release(0)
	g.Later.Wait(freeLimit)
	fake.Empty(t)

	fake.Fail("Alloc", 1)
	_, err := g.Alloc(4096)
	require.ErrorContains(t, err, "torch.cuda.empty_cache()")
}
