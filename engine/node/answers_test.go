package node

import (
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/exchange"
	"fserver/engine/transport/transporttest"
)

// TestManyAnswers takes more requests than there are tickets, and answers them
// in one go.
func TestManyAnswers(t *testing.T) {
	long(t)
	eachWay(t, func(t *testing.T, way ...string) {
		if transporttest.RaceEnabled && way[0] == "FSERVER_TRANSPORT=verbs" {
			t.Skip("with the race detector the fake takes 25 s for 4,700 requests")
		}
		manyAnswers(t, way...)
	})
}

func manyAnswers(t *testing.T, way ...string) {
	const each = exchange.Window/3 + 200
	m := newMesh(t, openFabrics, shape{3, 1, 1}, way...)
	s := m.servers[0]
	ids := make([][]uint64, len(m.workers))
	done := make(chan []uint64, 1)
	go func() {
		var handlers []uint64
		for range each {
			b, err := getBatch(s)
			if err != nil {
				t.Error(err)
				break
			}
			for _, r := range b.reqs {
				handlers = append(handlers, r.handler)
			}
		}
		done <- handlers
	}()
	for i := range each {
		for k, w := range m.workers {
			ids[k] = append(ids[k], pushPull(t, w, nil, []exchange.Tensor{tensor(t, uint64(i), 1)}))
		}
	}
	for _, h := range <-done {
		respond1(t, s, h)
	}
	for k, w := range m.workers {
		for _, id := range ids[k] {
			require.NoError(t, wait(w, id))
		}
	}
	m.stop()
}

// respond1 answers without waiting until the answer has left.
func respond1(t *testing.T, n *Node, handler uint64) {
	a, err := n.BeginAnswer()
	require.NoError(t, err)
	require.NoError(t, a.AddPush(tensor(t, 0, 1)))
	require.NoError(t, n.Respond(handler, a))
	n.Flush()
}

// TestAskAboutRequests: what a server can ask of a request, and a worker of one that waits; a node without such
// requests refuses.
func TestAskAboutRequests(t *testing.T) {
	m := newMesh(t, openFabrics, shape{1, 1, 1})
	w, s := m.workers[0], m.servers[0]
	id := pushPull(t, w, []exchange.Tensor{tensor(t, 5, 2)}, []exchange.Tensor{tensor(t, 7, 1), tensor(t, 9, 1)})
	b, err := getBatch(s)
	require.NoError(t, err)
	h := b.reqs[0].handler
	rank, err := s.WorkerOf(h)
	require.NoError(t, err)
	require.Zero(t, rank)
	keys := make([]uint64, 1) // as many as fit
	n, err := s.PullKeys(h, keys)
	require.NoError(t, err)
	require.Equal(t, 2, n)
	require.EqualValues(t, 7, keys[0])
	lost, err := s.Losses(0)
	require.NoError(t, err)
	require.Zero(t, lost)
	p, err := w.Waits(id)
	require.NoError(t, err)
	require.Equal(t, exchange.Pending{Key: 5, Sent: true}, p)
	require.NoError(t, s.Fail(h, "no\n such  expert"))
	require.ErrorContains(t, wait(w, id), "no such expert")

	_, err = s.WorkerOf(h + 1<<20)
	require.Error(t, err)
	_, err = w.WorkerOf(h)
	require.ErrorContains(t, err, "worker_of")
	_, err = w.PullKeys(h, keys)
	require.ErrorContains(t, err, "pull_keys")
	_, err = w.Losses(0)
	require.ErrorContains(t, err, "losses")
	require.ErrorContains(t, w.Fail(h, ""), "fail")
	_, err = s.Waits(id)
	require.ErrorContains(t, err, "no push_pulls")
	require.ErrorContains(t, m.scheduler.Wait(id, 0, false), "no push_pulls")
	m.stop()
}
