package node

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"fserver/engine/cluster"
	"fserver/engine/conf"
	"fserver/engine/exchange"
	"fserver/engine/trace"
	"fserver/engine/transport"
	"fserver/engine/transport/inproc"
	"fserver/engine/wire"
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
			net, sh := inproc.New(), shape{2, 2, 1}
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

// TestPairsAfterAServerIsLost has server 0 of two answer a call of worker 0, and die before it
// answers the call of worker 1 in the same batch. Its successor pairs the same calls as server 1,
// whether server 1 had delivered these two calls or not. The successor paired the call of worker 1
// with the next one of worker 0; with a second loss the two could wait for each other.
func TestPairsAfterAServerIsLost(t *testing.T) {
	for _, mode := range []string{"wait", "raise"} {
		for _, delivered := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, delivered %v", mode, delivered), func(t *testing.T) {
				net, sh := inproc.New(), shape{2, 2, 1}
				settings := []string{"FSERVER_ON_PEER_LOST=" + mode}
				m := newMesh(t, over(net), sh, settings...)
				first := halfAnswered(t, m, delivered)
				second := [2]uint64{call(t, m.workers[0], 2), call(t, m.workers[1], 102)}
				m.restart(net, sh, m.servers[0], settings...)
				third := [2]uint64{call(t, m.workers[0], 3), call(t, m.workers[1], 103)}

				// What one worker has the answer to, and the other has not, is lost at one of them.
				lost, whole := []callOf{}, []callOf{{0, third[0]}, {1, third[1]}}
				want := [][2]byte{{3, 103}}
				switch {
				case mode == "raise":
					lost = append(lost, callOf{0, second[0]}, callOf{1, first[1]}, callOf{1, second[1]})
				case delivered:
					lost = append(lost, callOf{1, first[1]})
					whole = append(whole, callOf{0, second[0]}, callOf{1, second[1]})
					want = append([][2]byte{{2, 102}}, want...)
				default: // nobody has delivered the first call of worker 1 to stay
					whole = append(whole, callOf{0, second[0]}, callOf{1, first[1]}, callOf{1, second[1]})
					want = [][2]byte{{2, 101}, {3, 102}, {4, 103}}
					whole = append(whole, callOf{0, call(t, m.workers[0], 4)})
				}
				if delivered {
					whole = append(whole, callOf{0, first[0]})
				} else {
					lost = append(lost, callOf{0, first[0]})
				}
				for _, c := range lost {
					lostWithin(t, func() error { return wait(m.workers[c.worker], c.id) }, "server", 0)
				}
				for _, pairs := range want {
					for _, s := range m.servers {
						require.Equal(t, pairs, pair(t, s))
					}
				}
				for _, c := range whole {
					require.NoError(t, wait(m.workers[c.worker], c.id))
				}
				m.stop()
			})
		}
	}
}

// TestEraOfSeveralChanges: a Roster may tell a worker of the return of a server and of the loss of a worker at
// once. That begins an era, in whatever order they come.
func TestEraOfSeveralChanges(t *testing.T) {
	var told []wire.Regroup
	net := over(inproc.New())
	m := newMesh(t, func(cfg *conf.Config, g transport.Gate, log *zap.Logger) ([]transport.Fabric, error) {
		list, err := net(cfg, g, log)
		if cfg.Role == conf.Worker && cfg.Rank == 0 {
			list[0] = &refusing{Fabric: list[0], kind: wire.TypeRegroup, left: new(atomic.Int32), conns: map[transport.Conn]*refusingConn{}, seen: func(b []byte) {
				v, err := wire.Parse[wire.Regroup](b, wire.TypeRegroup)
				require.NoError(t, err)
				told = append(told, *v)
			}}
		}
		return list, err
	}, shape{2, 2, 1}, "FSERVER_ON_PEER_LOST=wait")
	w := m.workers[0]
	lost := func(r wire.Role, rank int, view uint64) cluster.Input {
		return cluster.Input{Kind: cluster.Frame, Data: wire.Append(nil, wire.TypeLost, &wire.Lost{View: view, Role: r, Rank: rank})}
	}
	require.True(t, w.driver.Under(func() {
		w.control(lost(wire.RoleServer, 0, 1))
		back := *w.peers[0].Member()
		back.Epoch++
		told = nil
		w.outputs(append([]cluster.Output{{Kind: cluster.Joined, Member: &back}}, w.member.Step(trace.Now(), lost(wire.RoleWorker, 1, 2))...))
		require.Len(t, told, 1)
		require.True(t, told[0].Back)
		require.Equal(t, w.member.Runs(), told[0].Runs)
	}))
}

// callOf is a call of one of two workers.
type callOf struct {
	worker int
	id     uint64
}

// halfAnswered makes a call of both workers, of which server 0 answers that of worker 0 alone.
// Server 1 delivers and answers both, or has not delivered them.
func halfAnswered(t *testing.T, m *mesh, delivered bool) [2]uint64 {
	x, y := tensor(t, 1, 4), tensor(t, 0, 4)
	fill(x, 1)
	a := pushPull(t, m.workers[0], []exchange.Tensor{x}, []exchange.Tensor{y, tensor(t, 0, 4)})
	b := call(t, m.workers[1], 101)
	batch, err := getBatch(m.servers[0])
	require.NoError(t, err)
	answer := tensor(t, 0, 4)
	fill(answer, 9)
	respond(t, m.servers[0], batch.reqs[0].handler, answer)
	if delivered {
		require.Equal(t, [2]byte{1, 101}, pair(t, m.servers[1]))
		require.NoError(t, wait(m.workers[0], a))
	}
	require.Eventually(t, func() bool { return y.Span.Bytes()[0] == 9 }, 5*time.Second, time.Millisecond)
	time.Sleep(20 * time.Millisecond) // the frame is behind it
	return [2]uint64{a, b}
}
