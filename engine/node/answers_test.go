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
