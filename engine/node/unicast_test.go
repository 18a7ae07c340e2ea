package node

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/exchange"
)

// unicast pushes x to one server, and pulls out from it.
func unicast(n *Node, server int, x, out exchange.Tensor) (uint64, error) {
	t, err := n.BeginPushPull()
	if err != nil {
		return 0, err
	}
	if err := t.AddPush(x); err != nil {
		return 0, err
	}
	if err := t.AddPull(out); err != nil {
		return 0, err
	}
	id := t.ID()
	return id, n.PushPullTo(server, t)
}

// echoUnicasts answers each unicast of a server with what was pushed, after a while in disorder.
func echoUnicasts(n *Node, rounds int) error {
	var waiting []request
	answer := func(i int) error {
		r := waiting[i]
		waiting = append(waiting[:i], waiting[i+1:]...)
		t, err := n.BeginAnswer()
		if err != nil {
			return err
		}
		x := r.push[0]
		y := exchange.Tensor{Span: x.Span, Dev: x.Dev, DType: x.DType, Dims: []int64{x.Rows}}
		y.Base.Addr, y.Base.Len = x.Span.Addr, x.Span.Len
		if err := t.AddPush(y); err != nil {
			return err
		}
		err = n.Respond(r.handler, t)
		n.Flush()
		return err
	}
	for seen := 0; seen < rounds || len(waiting) > 0; {
		var b batch
		limit := 100 * time.Millisecond
		if len(waiting) > 0 {
			limit = 0 // a worker may wait for one of these
		}
		err := n.TakeUnicasts(&b, limit, true)
		switch {
		case err == nil:
			seen += len(b.reqs)
			waiting = append(waiting, b.reqs...)
		case err != ErrAgain:
			return err
		}
		if len(waiting) > 0 {
			if err := answer(rand.IntN(len(waiting))); err != nil {
				return err
			}
		}
	}
	return nil
}

// ask sends unicasts to random servers, several at a time and some with the same key, and compares what
// comes back.
func ask(tb testing.TB, n *Node, counts []int) error {
	type asked struct {
		id     uint64
		x, out exchange.Tensor
	}
	var under []asked
	end := func(a asked) error {
		if err := wait(n, a.id); err != nil {
			return err
		}
		if x, y := a.x.Span.Bytes(), a.out.Span.Bytes(); string(x) != string(y) {
			return fmt.Errorf("key %d: %d bytes came back wrong", a.x.Key, len(x))
		}
		return nil
	}
	var to []int
	for server, count := range counts {
		for range count {
			to = append(to, server)
		}
	}
	rand.Shuffle(len(to), func(i, j int) { to[i], to[j] = to[j], to[i] })
	for i, server := range to {
		key, rows := uint64(rand.IntN(5)), rand.IntN(3000)
		a := asked{x: tensor(tb, key, rows), out: tensor(tb, key, rows)}
		fill(a.x, byte(i))
		var err error
		if a.id, err = unicast(n, server, a.x, a.out); err != nil {
			return err
		}
		if under = append(under, a); len(under) == 8 {
			if err := end(under[0]); err != nil {
				return err
			}
			under = under[1:]
		}
	}
	for _, a := range under {
		if err := end(a); err != nil {
			return err
		}
	}
	return nil
}

// TestUnicasts: two workers ask two servers by unicasts, while both exchange push_pulls with both.
func TestUnicasts(t *testing.T) { eachWay(t, unicasts) }

func unicasts(t *testing.T, way ...string) {
	const each = 60 // of a worker to a server
	m := newMesh(t, openFabrics, shape{2, 2, 1}, way...)
	var all sync.WaitGroup
	failed := make(chan error, 16)
	run := func(f func() error) {
		all.Add(1)
		go func() {
			defer all.Done()
			if err := f(); err != nil {
				failed <- err
			}
		}()
	}
	for i, n := range m.servers {
		run(func() error { return echoUnicasts(n, each*len(m.workers)) })
		run(func() error {
			for range each {
				b, err := getBatch(n)
				if err != nil || len(b.reqs) != len(m.workers) {
					return fmt.Errorf("server %d: %d requests in a batch: %v", i, len(b.reqs), err)
				}
				for _, r := range b.reqs {
					a, err := n.BeginAnswer()
					if err == nil {
						err = n.Respond(r.handler, a)
					}
					if err != nil {
						return err
					}
				}
				n.Flush()
			}
			return nil
		})
	}
	for _, n := range m.workers {
		run(func() error { return ask(t, n, []int{each, each}) })
		run(func() error {
			for range each {
				if err := wait(n, pushPull(t, n, []exchange.Tensor{tensor(t, 100, 30)}, nil)); err != nil {
					return err
				}
			}
			return nil
		})
	}
	all.Wait()
	close(failed)
	for err := range failed {
		require.NoError(t, err)
	}
	require.ErrorContains(t, m.workers[0].PushPullTo(2, begun(t, m.workers[0])), "there are 2 (give 0 to 1)")
	require.ErrorContains(t, m.workers[0].TakeUnicasts(&batch{}, 0, true), "only a server does that")
	m.stop()
}

// begun is a ticket with a tensor to push.
func begun(t *testing.T, n *Node) *Ticket {
	ticket, err := n.BeginPushPull()
	require.NoError(t, err)
	require.NoError(t, ticket.AddPush(tensor(t, 1, 8)))
	return ticket
}

// TestUnicastsAfterLeaving: a server whose workers have left is told so.
func TestUnicastsAfterLeaving(t *testing.T) {
	m := newMesh(t, openFabrics, shape{1, 1, 1}, "FSERVER_TRANSPORT=tcp")
	left := make(chan error)
	go func() { left <- retried(func() error { return m.workers[0].Stop(time.Second) }) }()
	err := retried(func() error { return m.servers[0].TakeUnicasts(&batch{}, 100*time.Millisecond, true) })
	require.ErrorIs(t, err, exchange.ErrLeft)
	require.NoError(t, m.servers[0].Close())
	<-left
}
