package node

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/exchange"
	"fserver/engine/transport/inproc"
)

// call is a push_pull to two servers whose first byte says which one it is.
func call(t *testing.T, n *Node, v byte) uint64 {
	x := tensor(t, uint64(v), 4)
	fill(x, v)
	return pushPull(t, n, []exchange.Tensor{x}, []exchange.Tensor{tensor(t, 0, 4), tensor(t, 0, 4)})
}

// pair takes the next batch of a server of two workers, answers those that live, and gives
// the calls.
func pair(t *testing.T, s *Node) [2]byte {
	t.Helper()
	b, err := getBatch(s)
	for end := time.Now().Add(10 * time.Second); err != nil && time.Now().Before(end); b, err = getBatch(s) { // a worker is lost
	}
	require.NoError(t, err)
	for _, r := range b.reqs {
		respond(t, s, r.handler, tensor(t, 0, 4))
	}
	return [2]byte{b.reqs[0].push[0].Span.Bytes()[0], b.reqs[1].push[0].Span.Bytes()[0]}
}

// TestPairsAfterALoss has server 0 of two deliver calls of two workers that server 1 has not
// delivered when worker 1 dies. All servers pair the same calls afterwards: worker 0's last
// call, which cannot be paired any more, fails, and those that no server has delivered
// are sent again. Server 1 paired the call with the first of the successor, and all that
// came later one off; after two such losses two workers could wait for each other.
func TestPairsAfterALoss(t *testing.T) {
	for _, mode := range []string{"wait", "raise"} {
		t.Run(mode, func(t *testing.T) {
			net, sh := inproc.New(1), shape{2, 2, 1}
			settings := []string{"FSERVER_ON_PEER_LOST=" + mode}
			m := newMesh(t, over(net), sh, settings...)
			w, v := m.workers[0], byte(0)
			next := func() byte { v++; return v }
			for _, ahead := range []int{0, 0, 1} {
				half := next()
				broken := call(t, w, half)
				call(t, m.workers[1], 100+half)
				b, err := getBatch(m.servers[ahead]) // the other one is behind
				require.NoError(t, err)
				respond(t, m.servers[ahead], b.reqs[0].handler, tensor(t, 0, 4))
				var whole []uint64
				first := v + 1
				for range 2 {
					whole = append(whole, call(t, w, next()))
				}
				m.restart(net, sh, m.workers[1], settings...)
				lostWithin(t, func() error { return wait(w, broken) }, "worker", 1)

				for range 2 {
					whole = append(whole, call(t, w, next()))
				}
				for i := range whole {
					whole = append(whole, call(t, m.workers[1], 100+first+byte(i)))
				}
				for i := range byte(4) {
					for _, s := range m.servers {
						require.Equal(t, [2]byte{first + i, 100 + first + i}, pair(t, s))
					}
				}
				for i, id := range whole {
					n := w
					if i >= 4 {
						n = m.workers[1]
					}
					require.NoError(t, wait(n, id))
				}
			}
			m.stop()
		})
	}
}
