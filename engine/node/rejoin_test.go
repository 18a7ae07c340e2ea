package node

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/cluster"
	"fserver/engine/exchange"
	"fserver/engine/peers"
	"fserver/engine/transport"
	"fserver/engine/transport/faults"
	"fserver/engine/transport/inproc"
	"fserver/engine/wire"
)

// restart kills a node and opens another of the same rank, which is in the
// cluster when restart returns.
func (m *mesh) restart(net *inproc.Network, s shape, old *Node, extra ...string) *Node {
	m.tb.Helper()
	role := old.cfg.Role.String()
	net.Kill(fmt.Sprintf("%s-%d", role, old.cfg.Rank))
	n := m.start(s.settings(role, old.Info().Group, old.Info().Instance, "1", extra...))
	waitReady(m.tb, n)
	for _, list := range [][]*Node{m.workers, m.servers} {
		for i := range list {
			if list[i] == old {
				list[i] = n
			}
		}
	}
	return n
}

// echo makes push_pulls from w, which all servers of its rail answer, and checks
// the bytes. It returns when it has made count of them and stop is closed.
func echo(t *testing.T, w *Node, servers []*Node, count int, stop <-chan struct{}) error {
	quit := make(chan struct{})
	done := make(chan error, len(servers))
	for _, s := range servers {
		go func() {
			var sink batch
			for {
				select {
				case <-quit:
					done <- nil
					return
				default:
				}
				if err := s.GetBatch(&sink, 0, 10*time.Millisecond, false); err == ErrAgain {
					continue
				} else if err != nil {
					done <- err
					return
				}
				for _, r := range sink.reqs {
					y := tensor(t, 0, int(r.push[0].Rows))
					for j, v := range r.push[0].Span.Bytes() {
						y.Span.Bytes()[j] = v + byte(s.Info().Rank+1)
					}
					respond(t, s, r.handler, y)
				}
			}
		}()
	}
	err := push(t, w, servers, count, stop)
	close(quit)
	for range servers {
		err = errors.Join(err, <-done)
	}
	return err
}

func push(t *testing.T, w *Node, servers []*Node, count int, stop <-chan struct{}) error {
	x := tensor(t, 7, 4)
	out := make([]exchange.Tensor, len(servers))
	for i := range out {
		out[i] = tensor(t, uint64(i), 4)
	}
	for round := 0; ; round++ {
		if round >= count {
			select {
			case <-stop:
				return nil
			default:
			}
		}
		fill(x, byte(round))
		if err := wait(w, pushPull(t, w, []exchange.Tensor{x}, out)); err != nil {
			return err
		}
		for i, s := range servers {
			for j, b := range out[i].Span.Bytes() {
				if want := byte(round+j) + byte(s.Info().Rank+1); b != want {
					return fmt.Errorf("push_pull %d: byte %d of server %d is %d, want %d", round, j, i, b, want)
				}
			}
		}
	}
}

// closed is a stop that is.
func closed() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}

// meet makes a barrier of all, which shows that everybody is in the cluster. Who has
// not heard yet that a lost node is back tries again.
func (m *mesh) meet() {
	m.tb.Helper()
	done := make(chan error)
	for _, n := range m.all()[1:] {
		go func() {
			err := barrierOf(n)
			var lost *cluster.LostError
			for end := time.Now().Add(10 * time.Second); errors.As(err, &lost) && time.Now().Before(end); {
				time.Sleep(time.Millisecond)
				err = barrierOf(n)
			}
			done <- err
		}()
	}
	for range m.all()[1:] {
		require.NoError(m.tb, <-done)
	}
}

// TestRestart kills a node of one rail and starts it again, while the other rail
// makes 1,000 push_pulls. Then all work, and leave together.
func TestRestart(t *testing.T) {
	s := shape{1, 1, 2}
	for _, role := range []string{"worker", "server"} {
		t.Run(role, func(t *testing.T) {
			net := inproc.New()
			m := newMesh(t, over(net), s)
			stop, done := make(chan struct{}), make(chan error, 1)
			go func() { done <- echo(t, m.workers[0], m.servers[:1], 1000, stop) }()
			for range 3 {
				require.NoError(t, echo(t, m.workers[1], m.servers[1:], 5, closed()))
				if role == "worker" {
					m.restart(net, s, m.workers[1])
				} else {
					m.restart(net, s, m.servers[1])
				}
				m.meet()
			}
			require.NoError(t, echo(t, m.workers[1], m.servers[1:], 5, closed()))
			close(stop)
			require.NoError(t, <-done)
			m.stop()
		})
	}
}

// TestServerRestarts looks at what a worker sees of a server that dies and comes
// back, with another one beside it.
func TestServerRestarts(t *testing.T) {
	net, s := inproc.New(), shape{1, 2, 1}
	m := newMesh(t, over(net), s)
	w := m.workers[0]
	x, out := tensor(t, 7, 4), []exchange.Tensor{tensor(t, 0, 4), tensor(t, 0, 4)}
	require.NoError(t, echo(t, w, m.servers, 5, closed()))

	pending := pushPull(t, w, []exchange.Tensor{x}, out)
	b, err := getBatch(m.servers[0])
	require.NoError(t, err)
	net.Kill("server-1")
	lostWithin(t, func() error { return wait(w, pending) }, "server", 1)
	lostWithin(t, func() error { return wait(w, pushPull(t, w, []exchange.Tensor{tensor(t, 8, 4)}, out)) }, "server", 1)
	respond(t, m.servers[0], b.reqs[0].handler, tensor(t, 0, 4))
	lostWithin(t, func() error { return barrierOf(w) }, "server", 1)

	m.restart(net, s, m.servers[1])
	require.NoError(t, echo(t, w, m.servers, 100, closed()))
	m.meet()
	m.stop()
}

// TestWorkerRestarts looks at what a server sees of a worker that dies and comes
// back: its tensors stay as they were, and the other's requests are not lost.
func TestWorkerRestarts(t *testing.T) {
	net, sh := inproc.New(), shape{2, 1, 1}
	m := newMesh(t, over(net), sh)
	s := m.servers[0]
	x, y := tensor(t, 1, 9), tensor(t, 2, 9)
	fill(x, 10)
	fill(y, 20)
	for _, n := range m.workers {
		pushPull(t, n, []exchange.Tensor{x}, nil)
	}
	b, err := getBatch(s)
	require.NoError(t, err)
	waits := pushPull(t, m.workers[0], []exchange.Tensor{y}, nil)

	net.Kill("worker-1")
	lostWithin(t, func() error { _, err := getBatch(s); return err }, "worker", 1)
	require.Equal(t, x.Span.Bytes(), b.reqs[1].push[0].Span.Bytes())
	m.restart(net, sh, m.workers[1])
	pushPull(t, m.workers[1], []exchange.Tensor{tensor(t, 1, 9)}, nil)
	next, err := getBatch(s)
	require.NoError(t, err)
	require.Equal(t, y.Span.Bytes(), next.reqs[0].push[0].Span.Bytes(), "it has waited")
	require.Equal(t, make([]byte, 72), next.reqs[1].push[0].Span.Bytes())
	require.Equal(t, x.Span.Bytes(), b.reqs[1].push[0].Span.Bytes(), "the application may still look at it")
	for _, r := range b.reqs {
		if id := r.push[0].Buffer; r.rank == 1 {
			require.NoError(t, m.buffers.Release(id, 1))
		}
	}

	ticket, err := s.BeginAnswer()
	require.NoError(t, err)
	lostWithin(t, func() error { return s.Respond(b.reqs[1].handler, ticket) }, "worker", 1)
	respond(t, s, b.reqs[0].handler)
	respond(t, s, next.reqs[0].handler)
	respond(t, s, next.reqs[1].handler)
	require.NoError(t, wait(m.workers[0], waits))
	m.stop()
}

// TestPatientWorker has push_pulls that wait for the successor of a server: one
// that was delivered, one that had not been sent, one that comes later.
func TestPatientWorker(t *testing.T) {
	net, sh := inproc.New(), shape{1, 2, 1}
	patient := []string{"FSERVER_ON_PEER_LOST=wait"}
	m := newMesh(t, over(net), sh, patient...)
	w := m.workers[0]
	x, out := tensor(t, 7, 4), make([][]exchange.Tensor, 4)
	ids := make([]uint64, 4)
	for i := range ids {
		out[i] = []exchange.Tensor{tensor(t, 0, 4), tensor(t, 0, 4)}
		switch i {
		case 1:
			_, err := getBatch(m.servers[1])
			require.NoError(t, err)
		case 3:
			net.Kill("server-1")
			require.Eventually(t, func() bool { return lostPeers(w) == 1 }, 10*time.Second, time.Millisecond)
		}
		ids[i] = pushPull(t, w, []exchange.Tensor{x}, out[i])
	}
	require.ErrorIs(t, w.Wait(ids[0], 20*time.Millisecond, true), ErrAgain)
	barrier, err := w.Barrier(everybody, 0)
	require.NoError(t, err)
	m.restart(net, sh, m.servers[1], patient...)
	done := make(chan error, 2)
	for _, n := range m.servers {
		go func() { done <- serve(t, n, len(ids)) }()
	}
	for i := range ids {
		require.NoError(t, wait(w, ids[i]))
		require.Equal(t, byte(1), out[i][0].Span.Bytes()[0])
		require.Equal(t, byte(2), out[i][1].Span.Bytes()[0])
	}
	require.NoError(t, <-done)
	require.NoError(t, <-done)
	for _, n := range m.servers {
		go func() { done <- barrierOf(n) }()
	}
	require.NoError(t, retried(func() error { return w.WaitBarrier(barrier, 10*time.Second) }))
	require.NoError(t, <-done)
	require.NoError(t, <-done)
	m.stop()
}

// TestUpComesFirst: a push_pull that waits for the successor of a server does not
// overtake, under back-pressure, the frame that says that the connection is used.
// It did, and the server then waited for that frame until its patience ended.
func TestUpComesFirst(t *testing.T) {
	long(t)
	net, sh := inproc.New(), shape{1, 1, 1}
	patient := []string{"FSERVER_ON_PEER_LOST=wait"}
	m := newMesh(t, under(faults.Options{Starve: 0.3}, over(net)), sh, patient...)
	w := m.workers[0]
	start := time.Now()
	for range 3 {
		out := []exchange.Tensor{tensor(t, 0, 4)}
		id := pushPull(t, w, []exchange.Tensor{tensor(t, 7, 4)}, out)
		s := m.restart(net, sh, m.servers[0], patient...)
		require.NoError(t, serve(t, s, 1))
		require.NoError(t, wait(w, id))
	}
	m.stop()
	require.Less(t, time.Since(start), patience, "nobody was sent away")
}

// lostPeers counts the peers of a node that are not ready: they have no connection, or one that not
// both sides use yet.
func lostPeers(n *Node) (lost int) {
	if !n.driver.Own() {
		return 0
	}
	defer n.driver.Disown()
	for _, p := range n.peers {
		if p.State() != peers.Ready {
			lost++
		}
	}
	return lost
}

// TestPatientServer has a get_batch that waits for the successor of a worker.
func TestPatientServer(t *testing.T) {
	net, sh := inproc.New(), shape{2, 1, 1}
	patient := []string{"FSERVER_ON_PEER_LOST=wait"}
	m := newMesh(t, over(net), sh, patient...)
	x := tensor(t, 1, 9)
	first := pushPull(t, m.workers[0], []exchange.Tensor{x}, []exchange.Tensor{tensor(t, 0, 9)})
	done := make(chan error, 1)
	go func() { done <- serve(t, m.servers[0], 1) }()
	w := m.restart(net, sh, m.workers[1], patient...)
	require.NoError(t, wait(w, pushPull(t, w, []exchange.Tensor{x}, []exchange.Tensor{tensor(t, 0, 9)})))
	require.NoError(t, wait(m.workers[0], first))
	require.NoError(t, <-done)
	m.stop()
}

// TestPatienceEnds has calls that wait for nobody.
func TestPatienceEnds(t *testing.T) {
	net := inproc.New()
	// Without heartbeats nothing else wakes anybody.
	m := newMesh(t, over(net), shape{2, 2, 1}, "FSERVER_ON_PEER_LOST=wait", "FSERVER_REJOIN_TIMEOUT=0.3", "PS_HEARTBEAT_INTERVAL=0", "PS_HEARTBEAT_TIMEOUT=0")
	w, s := m.workers[0], m.servers[0]
	x, out := tensor(t, 1, 9), []exchange.Tensor{tensor(t, 0, 9), tensor(t, 0, 9)}
	id := pushPull(t, w, []exchange.Tensor{x}, out)
	killed := time.Now()
	net.Kill("server-1")
	net.Kill("worker-1")
	lostWithin(t, func() error { return wait(w, id) }, "server", 1)
	require.GreaterOrEqual(t, time.Since(killed), 300*time.Millisecond)
	lostWithin(t, func() error { return wait(w, pushPull(t, w, []exchange.Tensor{tensor(t, 2, 9)}, out)) }, "server", 1)
	lostWithin(t, func() error { _, err := getBatch(s); return err }, "worker", 1)
	require.Error(t, barrierOf(w))
}

// TestPoison has a request that makes every server die that gets it.
func TestPoison(t *testing.T) {
	net, sh := inproc.New(), shape{1, 1, 1}
	patient := []string{"FSERVER_ON_PEER_LOST=wait"}
	m := newMesh(t, over(net), sh, patient...)
	w := m.workers[0]
	id := pushPull(t, w, []exchange.Tensor{tensor(t, 1, 9)}, nil)
	for range 4 {
		_, err := getBatch(m.servers[0])
		require.NoError(t, err)
		m.restart(net, sh, m.servers[0], patient...)
	}
	lostWithin(t, func() error { return wait(w, id) }, "server", 0)
	require.NoError(t, echo(t, w, m.servers, 5, closed()))
	m.stop()
}

// TestSchedulerRestarts kills the scheduler, and with it nobody or a server.
func TestSchedulerRestarts(t *testing.T) {
	for _, with := range []string{"", "server", "worker"} {
		t.Run("and "+with, func(t *testing.T) {
			net, s := inproc.New(), shape{1, 1, 2}
			m := newMesh(t, over(net), s)
			stop, done := make(chan struct{}), make(chan error, 1)
			go func() { done <- echo(t, m.workers[0], m.servers[:1], 1000, stop) }()
			for range 2 {
				net.Kill("127.0.0.1:1")
				var again *Node
				switch with {
				case "server":
					net.Kill("server-1")
					again = m.start(s.settings("server", 0, 1, "1"))
					m.servers[1] = again
				case "worker":
					net.Kill("worker-1")
					again = m.start(s.settings("worker", 0, 1, "1"))
					m.workers[1] = again
				}
				for _, n := range m.all()[1:] {
					if n != again { // a barrier that it called before it knows would end
						require.Eventually(t, func() bool { return orphan(n) }, 10*time.Second, time.Millisecond)
					}
				}
				m.scheduler = m.start(s.settings("scheduler", 0, 0, "0"))
				waitReady(t, m.scheduler)
				if again != nil {
					waitReady(t, again)
				}
				m.meet()
				require.NoError(t, echo(t, m.workers[1], m.servers[1:], 5, closed()))
			}
			close(stop)
			require.NoError(t, <-done)
			m.stop()
		})
	}
}

// orphan says whether a node has no connection to a scheduler.
func orphan(n *Node) bool {
	if !n.driver.Own() {
		return true
	}
	defer n.driver.Disown()
	for _, l := range n.links {
		if l.kind == linkScheduler {
			return false
		}
	}
	return true
}

// TestBothAreGone starts one of two that are gone before the other.
func TestBothAreGone(t *testing.T) {
	net, s := inproc.New(), shape{1, 2, 1}
	m := newMesh(t, over(net), s)
	w := m.workers[0]
	net.Kill("server-1")
	w2 := m.restart(net, s, w)
	x, out := tensor(t, 1, 9), []exchange.Tensor{tensor(t, 0, 9), tensor(t, 0, 9)}
	lostWithin(t, func() error { return wait(w2, pushPull(t, w2, []exchange.Tensor{x}, out)) }, "server", 1)
	m.restart(net, s, m.servers[1])
	require.NoError(t, echo(t, w2, m.servers, 5, closed()))
	m.stop()
}

// TestCut breaks the connection between two that live; the worker opens it again.
func TestCut(t *testing.T) {
	net := inproc.New()
	m := newMesh(t, over(net), shape{1, 1, 1})
	w := m.workers[0]
	for range 3 {
		id := pushPull(t, w, []exchange.Tensor{tensor(t, 1, 9)}, nil)
		net.Cut("worker-0", "server-0")
		lostWithin(t, func() error { return wait(w, id) }, "server", 0)
		net.Heal()
		require.Eventually(t, func() bool { return lostPeers(w)+lostPeers(m.servers[0]) == 0 }, 10*time.Second, time.Millisecond)
		require.NoError(t, echo(t, w, m.servers, 5, closed()))
	}
	m.stop()
}

// TestOldEpoch has a run of a worker that is over come back to a server, before
// and after it has a successor, and one that nobody has heard of.
func TestOldEpoch(t *testing.T) {
	net, sh := inproc.New(), shape{2, 1, 1}
	m := newMesh(t, over(net), sh)
	s := m.servers[0]
	old := m.workers[1].gate
	refused := func(name string) {
		t.Helper()
		f, err := net.Open(inproc.Options{Name: name, Gate: old})
		require.NoError(t, err)
		defer f.Close()
		c, err := f.Connect(context.Background(), "inproc:server-0")
		require.NoError(t, err)
		_, _ = c.Post([]transport.Op{{Kind: transport.OpFrame, Frame: wire.AppendSignal(nil, wire.TypeBye)}})
		var ev [4]transport.Event
		require.Eventually(t, func() bool {
			k, err := f.Poll(ev[:])
			require.NoError(t, err)
			return k > 0 && ev[k-1].Kind == transport.EvDown
		}, 10*time.Second, time.Millisecond)
	}
	net.Kill("worker-1")
	lostWithin(t, func() error { _, err := getBatch(s); return err }, "worker", 1)
	require.Eventually(t, func() bool {
		require.True(t, s.driver.Own())
		defer s.driver.Disown()
		return s.peers[1].Lost()
	}, 10*time.Second, time.Millisecond)
	refused("before")
	m.restart(net, sh, m.workers[1])
	refused("after")

	// One that the scheduler has not named waits, and is not heard.
	unknown := *old
	unknown.me.Epoch++
	f, err := net.Open(inproc.Options{Name: "unknown", Gate: &unknown})
	require.NoError(t, err)
	defer f.Close()
	c, err := f.Connect(context.Background(), "inproc:server-0")
	require.NoError(t, err)
	_, err = c.Post([]transport.Op{{Kind: transport.OpFrame, Frame: wire.Append(nil, wire.TypeUp, &wire.Text{})}})
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		require.True(t, s.driver.Own())
		defer s.driver.Disown()
		return len(s.waiting) == 1 && s.waiting[0].kind == linkWaiting
	}, 10*time.Second, time.Millisecond)
	for _, n := range m.workers {
		pushPull(t, n, []exchange.Tensor{tensor(t, 1, 9)}, nil)
	}
	_, err = getBatch(s)
	require.NoError(t, err)
}

// TestTakenForLost holds a worker for longer than the time-out of heartbeats. When
// it is back it learns that the others have gone on, and its rank is free.
func TestTakenForLost(t *testing.T) {
	net, sh := inproc.New(), shape{2, 1, 1}
	beats := []string{"PS_HEARTBEAT_INTERVAL=1", "PS_HEARTBEAT_TIMEOUT=5"}
	m := newMesh(t, over(net), sh, beats...)
	stopped := m.workers[1]
	net.Hold("worker-1", "127.0.0.1:1")
	net.Hold("worker-1", "server-0")
	lostWithin(t, func() error { _, err := getBatch(m.servers[0]); return err }, "worker", 1)
	net.Heal()
	require.Eventually(t, func() bool { return stopped.failed() != nil }, 10*time.Second, time.Millisecond)
	require.ErrorContains(t, stopped.failed(), "it was taken for lost, and the others have gone on without it: start it again")
	_, err := stopped.BeginPushPull()
	require.EqualValues(t, 108, Errno(err))
	m.restart(net, sh, stopped, beats...)
	m.meet()
	m.stop()
}

// TestRankTaken starts a second worker 0 beside the first.
func TestRankTaken(t *testing.T) {
	sh := shape{1, 1, 1}
	m := newMesh(t, openFabrics, sh)
	_, port := splitPort(t, m.scheduler.Info().Address)
	n := m.start(sh.settings("worker", 0, 0, port))
	require.ErrorContains(t, ready(n), "worker 0 is there already")
	require.NoError(t, n.Close())
	require.NoError(t, echo(t, m.workers[0], m.servers, 5, closed()))
	m.stop()
}

// TestStopWithoutTheLost leaves together with those that are left. Whether a loss
// just before it is told is a matter of time.
func TestStopWithoutTheLost(t *testing.T) {
	net := inproc.New()
	m := newMesh(t, over(net), shape{2, 2, 1})
	net.Kill("server-1")
	net.Kill("worker-1")
	start := time.Now()
	done := make(chan error, 2)
	for _, n := range []*Node{m.workers[0], m.servers[0]} {
		go func() {
			err := n.Stop(time.Second)
			for err == ErrAgain {
				err = n.Stop(time.Second)
			}
			done <- err
		}()
	}
	for range 2 {
		var lost *LostError
		if err := <-done; err != nil {
			require.ErrorAs(t, err, &lost)
			require.Equal(t, 1, lost.Rank)
		}
	}
	require.Less(t, time.Since(start), 20*time.Second)
}

// TestTickWakes has a caller wait for what ends by the clock alone, while another one
// sleeps on the descriptors and waits for something else. The first was not woken before
// its own limit.
func TestTickWakes(t *testing.T) {
	net := inproc.New()
	// Without heartbeats nothing else wakes anybody.
	m := newMesh(t, over(net), shape{2, 1, 1}, "FSERVER_ON_PEER_LOST=wait", "FSERVER_REJOIN_TIMEOUT=5", "PS_HEARTBEAT_INTERVAL=0", "PS_HEARTBEAT_TIMEOUT=0")
	w := m.workers[0]
	seq, err := w.Barrier(everybody, 0)
	require.NoError(t, err)
	id := pushPull(t, w, []exchange.Tensor{tensor(t, 1, 9)}, nil)
	net.Kill("worker-1")
	require.Eventually(t, func() bool {
		require.True(t, w.driver.Own())
		defer w.driver.Disown()
		return w.member.Next() != cluster.Never
	}, 10*time.Second, time.Millisecond, "it counts the time until a successor is too late")
	other, ended := make(chan error, 1), make(chan error, 1)
	go func() { other <- retried(func() error { return w.Wait(id, time.Minute, true) }) }()
	require.Eventually(t, w.callerSleeps, 10*time.Second, time.Millisecond)
	go func() { ended <- retried(func() error { return w.WaitBarrier(seq, time.Minute) }) }()
	require.Eventually(t, func() bool { return w.driver.State().Parked == 1 }, 10*time.Second, time.Millisecond)
	lostWithin(t, func() error { return <-ended }, "worker", 1)
	require.Empty(t, other)
	require.NoError(t, w.Close())
	require.ErrorIs(t, <-other, ErrClosed)
}
