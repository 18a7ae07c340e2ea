package node

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/exchange"
)

// TestInstances runs 3 worker groups and 2 server groups of 2 instances: each
// worker reaches the servers of its own instance, each server answers each
// worker with what is its own.
func TestInstances(t *testing.T) { eachWay(t, instances) }

func instances(t *testing.T, way ...string) {
	s := shape{3, 2, 2}
	m := newMesh(t, openFabrics, s, way...)
	const rounds = 20
	done := make(chan error, len(m.servers))
	for _, n := range m.servers {
		go func() { done <- serve(t, n, rounds) }()
	}
	for round := range rounds {
		type call struct {
			n   *Node
			id  uint64
			out []exchange.Tensor
		}
		var calls []call
		for _, n := range m.workers {
			rank := n.Info().Rank
			x := tensor(t, 7, 4)
			fill(x, byte(round+rank))
			out := []exchange.Tensor{tensor(t, 0, 4), tensor(t, 1, 4)}
			calls = append(calls, call{n, pushPull(t, n, []exchange.Tensor{x}, out), out})
		}
		for _, c := range calls {
			require.NoError(t, wait(c.n, c.id))
			for g := range s.servers {
				server := g*s.instances + c.n.Info().Instance
				want := tensor(t, 0, 4)
				fill(want, byte(round+c.n.Info().Rank))
				for i, b := range c.out[g].Span.Bytes() {
					require.Equal(t, want.Span.Bytes()[i]+byte(server+1), b)
				}
			}
		}
	}
	for range m.servers {
		require.NoError(t, <-done)
	}
	m.stop()
}

// serve answers each request with its bytes plus the server's rank and one.
func serve(t *testing.T, n *Node, rounds int) error {
	for range rounds {
		b, err := getBatch(n)
		if err != nil {
			return err
		}
		for i, r := range b.reqs {
			if want := int32(i*n.cfg.GroupSize + n.Info().Instance); r.rank != want {
				t.Errorf("request %d is of worker %d, want %d", i, r.rank, want)
			}
			rows := int(r.push[0].Rows)
			y := tensor(t, 0, rows)
			for j, v := range r.push[0].Span.Bytes() {
				y.Span.Bytes()[j] = v + byte(n.Info().Rank+1)
			}
			respond(t, n, r.handler, y)
		}
	}
	return nil
}

// TestManyGroups runs 40 worker groups, of which each batch has one request
// in the order of their ranks.
func TestManyGroups(t *testing.T) {
	m := newMesh(t, openFabrics, shape{40, 1, 1})
	done := make(chan error, 1)
	go func() { done <- serve(t, m.servers[0], 3) }()
	for range 3 {
		ids := make([]uint64, len(m.workers))
		outs := make([]exchange.Tensor, len(m.workers))
		for i, n := range m.workers {
			x := tensor(t, 0, 1+i)
			fill(x, byte(i))
			outs[i] = tensor(t, 0, 1+i)
			ids[i] = pushPull(t, n, []exchange.Tensor{x}, []exchange.Tensor{outs[i]})
		}
		for i, n := range m.workers {
			require.NoError(t, wait(n, ids[i]))
			require.Equal(t, byte(i+1), outs[i].Span.Bytes()[0])
		}
	}
	require.NoError(t, <-done)
	m.stop()
}

// TestSizes shrinks and grows a tensor from call to call, at new addresses,
// through zero rows, and with several requests of different keys under way.
func TestSizes(t *testing.T) { eachWay(t, sizes) }

func sizes(t *testing.T, way ...string) {
	m := newMesh(t, openFabrics, shape{1, 1, 1}, way...)
	w, s := m.workers[0], m.servers[0]
	const rounds = 60
	done := make(chan error, 1)
	go func() { done <- serve(t, s, 2*rounds) }()
	for round := range rounds {
		var ids [2]uint64
		var in, out [2]exchange.Tensor
		for k := range 2 {
			rows := (round * 7919 % 23) * (round * 31 % 5) * (1 + 100*k)
			in[k], out[k] = tensor(t, uint64(k)+1<<63, rows), tensor(t, 0, rows)
			fill(in[k], byte(round))
			ids[k] = pushPull(t, w, in[k:k+1], out[k:k+1])
		}
		for k := range 2 {
			require.NoError(t, wait(w, ids[k]))
			for i, b := range in[k].Span.Bytes() {
				if out[k].Span.Bytes()[i] != b+1 {
					t.Fatalf("round %d, key %d, byte %d", round, k, i)
				}
			}
		}
	}
	require.NoError(t, <-done)
	m.stop()
}

// TestSameKeyWaits pushes a key again before the server has answered: the
// tensor that the server looks at stays as it is until then.
func TestSameKeyWaits(t *testing.T) { eachWay(t, sameKeyWaits) }

func sameKeyWaits(t *testing.T, way ...string) {
	m := newMesh(t, openFabrics, shape{1, 1, 1}, way...)
	w, s := m.workers[0], m.servers[0]
	x, y := tensor(t, 5, 1000), tensor(t, 5, 1000)
	fill(x, 1)
	fill(y, 2)
	first := pushPull(t, w, []exchange.Tensor{x}, nil)
	second := pushPull(t, w, []exchange.Tensor{y}, nil)
	b, err := getBatch(s)
	require.NoError(t, err)
	require.ErrorIs(t, w.Wait(second, 20e6, true), ErrAgain)
	require.True(t, bytes.Equal(x.Span.Bytes(), b.reqs[0].push[0].Span.Bytes()))
	respond(t, s, b.reqs[0].handler)
	require.NoError(t, wait(w, first))
	b, err = getBatch(s)
	require.NoError(t, err)
	require.True(t, bytes.Equal(y.Span.Bytes(), b.reqs[0].push[0].Span.Bytes()))
	respond(t, s, b.reqs[0].handler)
	require.NoError(t, wait(w, second))
	m.stop()
}

// TestManyShapes uses more shapes than there are numbers for plans, and comes
// back to the first.
func TestManyShapes(t *testing.T) {
	m := newMesh(t, openFabrics, shape{1, 1, 1})
	w, s := m.workers[0], m.servers[0]
	const shapes = 1100
	done := make(chan error, 1)
	go func() {
		for range 2 * shapes {
			b, err := getBatch(s)
			if err != nil {
				done <- err
				return
			}
			respond(t, s, b.reqs[0].handler)
		}
		done <- nil
	}()
	x := tensor(t, 1, 2)
	for i := range 2 * shapes {
		x.Dims = []int64{1, 1, int64(i % shapes), 16}
		require.NoError(t, wait(w, pushPull(t, w, []exchange.Tensor{x}, nil)))
	}
	require.NoError(t, <-done)
	m.stop()
}
