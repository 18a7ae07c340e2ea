//go:build !race

package node

import (
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/exchange"
	"fserver/engine/mem"
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
	w, s := m.workers[0], m.servers[0]
	x, y, out := tensor(t, 1, 512), tensor(t, 2, 3), tensor(t, 1, 512)
	shared, err := mem.NewShared(8)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, mem.FreeShared(shared.ID())) })
	z := exchange.Tensor{Span: mem.Span{Addr: shared.Region().Addr, Len: 8}, Dev: mem.CPU, Key: 3, Base: shared.Region(), Dims: []int64{8}}
	var sink counter
	once := func() {
		ticket, err := w.BeginPushPull()
		must(t, err)
		must(t, ticket.AddPush(x))
		must(t, ticket.AddPush(y))
		must(t, ticket.AddPush(z))
		must(t, ticket.AddPull(out))
		id := ticket.ID()
		must(t, w.PushPull(ticket))
		must(t, s.GetBatch(&sink, 1e9, true))
		answer, err := s.BeginAnswer()
		must(t, err)
		must(t, answer.AddPush(x))
		must(t, s.Respond(sink.handler, answer))
		s.Flush()
		must(t, w.Wait(id, 1e9, true))
		if sink.lent != 0 {
			must(t, m.buffers.Release(sink.lent))
			sink.lent = 0
		}
	}
	for range 1000 {
		once()
	}
	require.Zero(t, testing.AllocsPerRun(2000, once))
	m.stop()
}

func must(t *testing.T, err error) {
	if err != nil {
		t.Fatal(err)
	}
}

func BenchmarkPushPull(b *testing.B) {
	m := newMesh(b, openFabrics, shape{1, 1, 1})
	w, s := m.workers[0], m.servers[0]
	x, out := tensor(b, 1, 512), tensor(b, 1, 512)
	go func() {
		var sink counter
		for s.GetBatch(&sink, forever, true) == nil {
			answer, err := s.BeginAnswer()
			if err != nil {
				return
			}
			if answer.AddPush(x) != nil || s.Respond(sink.handler, answer) != nil {
				return
			}
			s.Flush()
		}
	}()
	for b.Loop() {
		ticket, err := w.BeginPushPull()
		if err != nil {
			b.Fatal(err)
		}
		_ = ticket.AddPush(x)
		_ = ticket.AddPull(out)
		id := ticket.ID()
		if err := w.PushPull(ticket); err != nil {
			b.Fatal(err)
		}
		if err := w.Wait(id, 1e10, true); err != nil {
			b.Fatal(err)
		}
	}
}
