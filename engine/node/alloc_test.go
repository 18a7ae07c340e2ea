//go:build !race

package node

import (
	"errors"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/cshim/verbs/fakeverbs"
	"fserver/engine/channel"
	"fserver/engine/exchange"
	"fserver/engine/mem"
	"fserver/engine/trace"
)

// counter takes a batch without keeping it.
type counter struct{ handler, lent uint64 }

func (c *counter) Batch(reqs []*exchange.Request) error {
	c.handler = reqs[0].Handler()
	for _, p := range reqs[0].Push() {
		if p.Lent {
			c.lent = p.Buffer
		}
	}
	return nil
}

// TestAllocations gates the hot path: a push_pull from its start to the end of
// wait, with everything that the server does for it, allocates nothing.
func TestAllocations(t *testing.T) { eachWay(t, allocations) }

func allocations(t *testing.T, way ...string) {
	m := newMesh(t, openFabrics, shape{1, 1, 1}, way...)
	shared, err := mem.NewShared(8)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, mem.FreeShared(shared.ID())) })
	lent := Tensor{Span: mem.Span{Addr: shared.Region().Addr, Len: 8}, Dev: mem.CPU, Key: 2, Base: shared.Region(), Alloc: 1 << 60, Dims: []int64{8}}
	with, without := m.once(tensor(t, 1, 512), lent, tensor(t, 1, 512)), m.once(tensor(t, 1, 512), tensor(t, 2, 3), tensor(t, 1, 512))
	watch, _ := newWatch(t, m.workers[0])
	once := func() {
		with()
		must(t, m.workers[0].Arm(watch))
		without()
	}
	for range 1000 {
		once()
	}
	runs := 2000
	if m.workers[0].driver.Settings().Thread {
		runs = 50 // AllocsPerRun leaves one P to all, which the pollers hold for 10 ms at a time
	}
	require.Zero(t, testing.AllocsPerRun(runs, once))
	m.stop()
}

// TestAilingAllocations: passes allocate nothing while a connection takes no more and is not ended yet.
func TestAilingAllocations(t *testing.T) {
	downWithin(t, time.Minute)
	m := newMesh(t, openFabrics, shape{1, 2, 1}, "FSERVER_TRANSPORT=tcp", "FSERVER_PROGRESS=caller")
	w := m.workers[0]
	require.True(t, w.driver.Under(func() { w.broken(0, errors.New("test: it takes no more")) }))
	require.Zero(t, testing.AllocsPerRun(2000, func() { w.driver.Drive(trace.Now()) }))
	require.True(t, w.driver.Under(func() { require.Len(t, w.ailing, 1) }))
	m.stop()
}

// TestUnicastAllocations: a push_pull with one server allocates nothing, at neither side.
func TestUnicastAllocations(t *testing.T) {
	m := newMesh(t, openFabrics, shape{1, 1, 1}, "FSERVER_TRANSPORT=tcp", "FSERVER_PROGRESS=caller")
	w, s := m.workers[0], m.servers[0]
	x, out := tensor(t, 1, 512), tensor(t, 1, 512)
	var last counter
	once := func() {
		ticket, err := w.BeginPushPull()
		must(t, err)
		must(t, ticket.AddPush(x))
		must(t, ticket.AddPull(out))
		id := ticket.ID()
		must(t, w.PushPullTo(0, ticket))
		must(t, retried(func() error { return s.TakeUnicasts(&last, 1e10, true) }))
		answer, err := s.BeginAnswer()
		must(t, err)
		must(t, answer.AddPush(x))
		must(t, s.Respond(last.handler, answer))
		s.Flush()
		must(t, retried(func() error { return w.Wait(id, 1e10, true) }))
	}
	for range 1000 {
		once()
	}
	require.Zero(t, testing.AllocsPerRun(2000, once))
	m.stop()
}

// TestVerbsAllocations: a push_pull over verbs allocates nothing either.
func TestVerbsAllocations(t *testing.T) {
	if fakeverbs.Real() {
		t.Skip("counted over the fake library: over software NICs 3,000 push_pulls take seconds, in which the background allocates too")
	}
	n := newNICs(t)
	m := newMesh(t, n.open, shape{1, 1, 1})
	once := m.once(tensor(t, 1, 512), tensor(t, 2, 3), tensor(t, 1, 512))
	for range 1000 {
		once()
	}
	require.Zero(t, testing.AllocsPerRun(2000, once))
	m.stop()
}

// message is a function that exchanges one message through proxies, both sides driven by its caller.
func (m *mesh) message(w, s *proxied) func() {
	i := 0
	reaches := func(p *proxied) {
		for p.words[channel.WordDone].Load() < int64(i) {
			for _, n := range []*Node{m.workers[0], m.servers[0]} {
				n.driver.Drive(trace.Now())
			}
		}
	}
	return func() {
		i++
		w.ring(i)
		reaches(s)
		s.ring(i)
		reaches(w)
	}
}

// TestProxyAllocations: a message through proxies allocates nothing, at neither side.
func TestProxyAllocations(t *testing.T) {
	for _, way := range []string{"cma", "tcp", "rails"} {
		t.Run(way, func(t *testing.T) {
			open, transport := openFabrics, way
			switch way {
			case "cma":
				skipWithoutCMA(t)
			case "rails":
				open, transport = overTwo, "tcp"
			}
			m := newMesh(t, open, shape{1, 1, 1}, "FSERVER_TRANSPORT="+transport, "FSERVER_PROGRESS=caller")
			message := m.message(carriedPair(t, m, "a", 512, longest))
			for range 1000 {
				message()
			}
			require.Zero(t, testing.AllocsPerRun(2000, message))
			m.stop()
		})
	}
}

// BenchmarkChannel is a message of 4 KiB and its answer: as a push_pull, and through proxies, with both
// sides in one thread. What the second takes more is what the words and copies cost.
func BenchmarkChannel(b *testing.B) {
	for _, way := range []string{"cma", "tcp"} {
		m := newMesh(b, openFabrics, shape{1, 1, 1}, "FSERVER_TRANSPORT="+way, "FSERVER_PROGRESS=caller", "FSERVER_LOG=error")
		calls := m.once(tensor(b, 11, 512), tensor(b, 12, 0), tensor(b, 11, 512))
		b.Run(way+"/push_pull", func(b *testing.B) {
			for b.Loop() {
				calls()
				runtime.Gosched() // see BenchmarkPushPull
			}
		})
		message := m.message(carriedPair(b, m, "a", 512, longest))
		b.Run(way+"/proxy", func(b *testing.B) {
			for b.Loop() {
				message()
				runtime.Gosched()
			}
		})
		m.stop()
	}
}

// once is a function that pushes x and y, pulls out, and answers with x.
func (m *mesh) once(x, y, out Tensor) func() {
	w, s := m.workers[0], m.servers[0]
	var sink counter
	return func() {
		ticket, err := w.BeginPushPull()
		must(m.tb, err)
		must(m.tb, ticket.AddPush(x))
		must(m.tb, ticket.AddPush(y))
		must(m.tb, ticket.AddPull(out))
		if m.behind != 0 {
			must(m.tb, w.After(ticket, m.behind))
		}
		id := ticket.ID()
		must(m.tb, w.PushPull(ticket))
		must(m.tb, retried(func() error { return s.GetBatch(&sink, 0, 1e10, true) }))
		answer, err := s.BeginAnswer()
		must(m.tb, err)
		must(m.tb, answer.AddPush(x))
		if m.behind != 0 {
			must(m.tb, s.After(answer, m.behind))
		}
		must(m.tb, s.Respond(sink.handler, answer))
		s.Flush()
		must(m.tb, retried(func() error { return w.Wait(id, 1e10, true) }))
		if sink.lent != 0 {
			must(m.tb, m.buffers.Release(sink.lent, 1))
			sink.lent = 0
		}
	}
}

func must(tb testing.TB, err error) {
	if err != nil {
		tb.Fatal(err)
	}
}

// BenchmarkPushPull is a push_pull of 64 bytes and its answer, both sides in one
// thread: what the engine costs, without waiting. `make pgo` profiles it.
func BenchmarkPushPull(b *testing.B) {
	for _, way := range []string{"cma", "tcp", "verbs", "rails"} {
		b.Run(way, func(b *testing.B) {
			open, transport := openFabrics, way
			switch way {
			case "verbs":
				open = newNICs(b).open
			case "rails":
				open, transport = overTwo, "tcp"
			}
			m := newMesh(b, open, shape{1, 1, 1}, "FSERVER_TRANSPORT="+transport, "FSERVER_PROGRESS=caller", "FSERVER_LOG=error")
			once := m.once(tensor(b, 1, 16), tensor(b, 2, 16), tensor(b, 1, 16))
			for b.Loop() {
				once()
				// A call from C gives the P back when it returns. This loop would keep the only
				// P of a process that is bound to one core for 10 ms at a time. The background
				// goroutine, once asleep on the descriptors, then cannot say that it is awake,
				// and each message rings a bell for nobody: 25 µs instead of 4.
				runtime.Gosched()
			}
			m.stop()
		})
	}
}

// TestHeartbeatAllocations gates what a cluster does that moves nothing: a node
// that sends and takes heartbeats allocates nothing.
func TestHeartbeatAllocations(t *testing.T) {
	m := newMesh(t, openFabrics, shape{2, 1, 1}, "PS_HEARTBEAT_INTERVAL=0.001", "PS_HEARTBEAT_TIMEOUT=10")
	var sink counter
	beats := func() { // some 20 of each node
		require.ErrorIs(t, m.servers[0].GetBatch(&sink, 0, 20*time.Millisecond, true), ErrAgain)
	}
	for range 10 {
		beats()
	}
	require.Zero(t, testing.AllocsPerRun(20, beats))
	m.stop()
}
