package node

import (
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/cluster"
	"fserver/engine/conf"
	"fserver/engine/exchange"
	"fserver/engine/transport"
	"fserver/engine/transport/all"
	"fserver/engine/transport/inproc"
	"fserver/engine/transport/tcp"
	"fserver/engine/wire"
)

// lostWithin waits for call to give a LostError of a node.
func lostWithin(t *testing.T, call func() error, role string, rank int) {
	t.Helper()
	start := time.Now()
	err := call()
	var lost *LostError
	require.ErrorAs(t, err, &lost)
	require.Equal(t, role, lost.Role.String())
	require.Equal(t, rank, lost.Rank)
	require.NotEmpty(t, lost.Reason)
	require.Less(t, time.Since(start), 20*time.Second)
}

// TestServerLost closes one of two servers while a push_pull waits for both.
func TestServerLost(t *testing.T) { eachWay(t, serverLost) }

func serverLost(t *testing.T, way ...string) {
	m := newMesh(t, openFabrics, shape{1, 2, 1}, way...)
	w := m.workers[0]
	x, out := tensor(t, 1, 9), []exchange.Tensor{tensor(t, 0, 9), tensor(t, 0, 9)}
	id := pushPull(t, w, []exchange.Tensor{x}, out)
	b, err := getBatch(m.servers[0])
	require.NoError(t, err)
	require.NoError(t, m.servers[1].Close())

	lostWithin(t, func() error { return wait(w, id) }, "server", 1)
	state, ok := w.worker.State(id)
	require.True(t, ok)
	require.Equal(t, exchange.StateFailing, state, "server 0 may still write")
	respond(t, m.servers[0], b.reqs[0].handler, tensor(t, 0, 9))
	require.Eventually(t, func() bool {
		state, _ := w.worker.State(id)
		return state == exchange.StateFailed
	}, 10*time.Second, time.Millisecond)

	lostWithin(t, func() error { return wait(w, pushPull(t, w, []exchange.Tensor{x}, out)) }, "server", 1)
	lostWithin(t, func() error { return barrierOf(w) }, "server", 1)
}

const everybody = uint32(wire.BarrierServers | wire.BarrierWorkers)

func barrierOf(n *Node) error {
	seq, err := n.Barrier(everybody, 0)
	for err == nil {
		if err = n.WaitBarrier(seq, time.Second); err == nil {
			return nil
		}
		if err == ErrAgain {
			err = nil
		}
	}
	return err
}

// TestWorkerLost closes one of two workers while the server waits for its
// request, and after it has got one of it.
func TestWorkerLost(t *testing.T) { eachWay(t, workerLost) }

func workerLost(t *testing.T, way ...string) {
	m := newMesh(t, openFabrics, shape{2, 1, 1}, way...)
	s := m.servers[0]
	x := tensor(t, 1, 9)
	for _, n := range m.workers {
		pushPull(t, n, []exchange.Tensor{x}, nil)
	}
	b, err := getBatch(s)
	require.NoError(t, err)
	done := make(chan error, 1)
	go func() {
		_, err := getBatch(s)
		done <- err
	}()
	require.NoError(t, m.workers[1].Close())
	lostWithin(t, func() error { return <-done }, "worker", 1)
	ticket, err := s.BeginAnswer()
	require.NoError(t, err)
	lostWithin(t, func() error { return s.Respond(b.reqs[1].handler, ticket) }, "worker", 1)
	respond(t, s, b.reqs[0].handler)
}

// TestLostInBarrier closes a server while everybody else is in a barrier.
func TestLostInBarrier(t *testing.T) {
	m := newMesh(t, openFabrics, shape{2, 2, 1})
	done := make(chan error, 3)
	for _, n := range append(m.workers, m.servers[0]) {
		go func() { done <- barrierOf(n) }()
	}
	require.NoError(t, m.servers[1].Close())
	for range 3 {
		lostWithin(t, func() error { return <-done }, "server", 1)
	}
}

// TestLostInInit closes a server while the others wait for one more.
func TestLostInInit(t *testing.T) {
	s := shape{1, 2, 1}
	m := newCluster(t, openFabrics)
	m.scheduler = m.start(s.settings("scheduler", 0, 0, "0"))
	_, port := splitPort(t, m.scheduler.Info().Address)
	w := m.start(s.settings("worker", 0, 0, port))
	lone := m.start(s.settings("server", 0, 0, port))
	require.Eventually(t, func() bool {
		require.True(t, m.scheduler.driver.Own())
		defer m.scheduler.driver.Disown()
		return strings.HasPrefix(m.scheduler.scheduler.Waiting(), "2 of 3 members")
	}, 10*time.Second, time.Millisecond)
	require.NoError(t, lone.Close())
	for _, n := range []*Node{w, m.scheduler} {
		lostWithin(t, func() error {
			for {
				if err := n.WaitReady(time.Second); err != ErrAgain {
					return err
				}
			}
		}, "server", 0)
	}
}

// TestLostInStop closes a worker while the others wait for it to leave.
func TestLostInStop(t *testing.T) {
	m := newMesh(t, openFabrics, shape{2, 1, 1})
	done := make(chan error, 3)
	for _, n := range []*Node{m.workers[0], m.servers[0]} {
		go func() {
			for {
				if err := n.Stop(time.Second); err != ErrAgain {
					done <- err
					return
				}
			}
		}()
	}
	for _, n := range []*Node{m.workers[0], m.servers[0]} {
		require.Eventually(t, func() bool { return n.phase.Load() == leaving }, 10*time.Second, time.Millisecond)
	}
	require.NoError(t, m.workers[1].Close())
	for range 2 {
		lostWithin(t, func() error { return <-done }, "worker", 1)
	}
}

// TestSchedulerLost closes the scheduler: push_pulls go on, the barrier that is
// under way does not, and those after it wait for another scheduler.
func TestSchedulerLost(t *testing.T) {
	m := newMesh(t, openFabrics, shape{1, 1, 1})
	w, s := m.workers[0], m.servers[0]
	seq, err := w.Barrier(everybody, 0)
	require.NoError(t, err)
	require.NoError(t, m.scheduler.Close())
	done := make(chan error, 1)
	go func() { done <- serve(t, s, 5) }()
	for range 5 {
		x, y := tensor(t, 1, 3), tensor(t, 1, 3)
		require.NoError(t, wait(w, pushPull(t, w, []exchange.Tensor{x}, []exchange.Tensor{y})))
	}
	require.NoError(t, <-done)
	barrier := func() error { return retried(func() error { return w.WaitBarrier(seq, 10*time.Second) }) }
	lostWithin(t, barrier, "scheduler", 0)
	seq, err = w.Barrier(everybody, 50*time.Millisecond)
	require.NoError(t, err)
	var late *TimeoutError
	require.ErrorAs(t, barrier(), &late)
}

// TestWorkersLeave ends the server's loop when its workers stop.
func TestWorkersLeave(t *testing.T) {
	m := newMesh(t, openFabrics, shape{1, 1, 1})
	done := make(chan error, 1)
	go func() {
		_, err := getBatch(m.servers[0])
		done <- err
	}()
	w := m.workers[0]
	require.ErrorIs(t, w.Stop(time.Millisecond), ErrAgain)
	require.ErrorIs(t, <-done, exchange.ErrLeft)
	m.stop()
	require.NoError(t, w.Stop(0), "again")
	_, err := w.BeginPushPull()
	require.ErrorIs(t, err, ErrClosed)
}

// TestSchedulerFollows starts a scheduler at the port of one whose cluster has ended, and
// that still waits for a connection to be closed. The port was given up after 2 s.
func TestSchedulerFollows(t *testing.T) {
	long(t)
	m := newMesh(t, openFabrics, shape{1, 1, 1})
	_, port := splitPort(t, m.scheduler.Info().Address)
	hello := m.workers[0].gate.me
	hello.Rank = -1
	f, err := tcp.Open(tcp.Options{Gate: &gate{me: hello}})
	require.NoError(t, err)
	defer f.Close()
	_, err = f.Connect(t.Context(), transport.Addr("tcp:127.0.0.1:"+port))
	require.NoError(t, err)
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		m.stop()
	}()
	require.Eventually(t, func() bool { return m.workers[0].driver.Stopped() && m.servers[0].driver.Stopped() }, 10*time.Second, time.Millisecond)
	next := m.start(shape{1, 1, 1}.settings("scheduler", 0, 0, port))
	require.Equal(t, "127.0.0.1:"+port, next.Info().Address)
	<-stopped
}

// TestBring-up errors name what was tried.
func TestBringUpErrors(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	_, port := splitPort(t, l.Addr().String())
	one := shape{1, 1, 1}

	cfg, _, err := conf.Parse(one.settings("scheduler", 0, 0, port, "FSERVER_INIT_TIMEOUT=0.1"), all.Ways())
	require.NoError(t, err)
	_, err = open(cfg, logger(cfg), exchange.NewBuffers(), openFabrics, nil)
	require.ErrorContains(t, err, "node: the port was not free within 100ms: tcp: listen on 127.0.0.1:"+port)
	require.ErrorContains(t, err, "address already in use")
	require.NoError(t, l.Close())

	_, err = Open(shape{65000, 65000, 1}.settings("scheduler", 0, 0, port), exchange.NewBuffers())
	require.ErrorContains(t, err, "are 130000 members: more than 65536")
	_, err = os.Stdin.Stat()
	require.NoError(t, err) // it closes what it has opened, and not descriptor 0

	_, err = Open(append(one.settings("server", 0, 0, port), "DMLC_INTERFACE=nosuch0"), exchange.NewBuffers())
	require.ErrorContains(t, err, "DMLC_INTERFACE=nosuch0")
	require.ErrorContains(t, err, "lo")

	n, err := Open(append(one.settings("worker", 0, 0, port), "FSERVER_INIT_TIMEOUT=3"), exchange.NewBuffers()) // enough for an attempt on a machine under load
	require.NoError(t, err)
	defer n.Free()
	err = ready(n)
	require.ErrorContains(t, err, "scheduler at 127.0.0.1:"+port)
	require.ErrorContains(t, err, "refused")
	require.EqualValues(t, 110, Errno(err))
}

// TestStrangers connects to the scheduler and to a server with bytes that are
// no handshake, a wrong cluster and a wrong secret, while the cluster works.
func TestStrangers(t *testing.T) {
	m := newMesh(t, openFabrics, shape{1, 1, 1}, "FSERVER_SECRET=a secret of some length")
	for _, n := range []*Node{m.scheduler, m.servers[0]} {
		for _, b := range []string{"GET / HTTP/1.1\r\n\r\n", "\x00", "fsv1\xff\xff\xff\xff", "FSRV\x05\x00\x00\x00hello"} {
			c, err := net.Dial("tcp", n.Info().Address)
			require.NoError(t, err)
			_, err = c.Write([]byte(b))
			require.NoError(t, err)
			_ = c.(*net.TCPConn).CloseWrite() // it may have been refused already
			_, err = io.ReadAll(c)
			require.NotErrorIs(t, err, net.ErrClosed)
			require.NoError(t, c.Close())
		}
	}
	_, port := splitPort(t, m.scheduler.Info().Address)
	for _, extra := range [][]string{{"FSERVER_SECRET=another secret, also long"}, {"FSERVER_CLUSTER=other", "FSERVER_SECRET=a secret of some length"}, {}} {
		n, err := Open(append(shape{1, 1, 1}.settings("worker", 0, 0, port), extra...), m.buffers)
		require.NoError(t, err)
		err = ready(n)
		require.EqualValues(t, 22, Errno(err), "%v", err)
		require.NoError(t, n.Free())
	}
	done := make(chan error, 1)
	go func() { done <- serve(t, m.servers[0], 1) }()
	x, y := tensor(t, 1, 3), tensor(t, 1, 3)
	require.NoError(t, wait(m.workers[0], pushPull(t, m.workers[0], []exchange.Tensor{x}, []exchange.Tensor{y})))
	require.NoError(t, <-done)
	m.stop()
}

// TestClose releases whoever waits.
func TestClose(t *testing.T) { eachWay(t, closing) }

func closing(t *testing.T, way ...string) {
	m := newMesh(t, openFabrics, shape{1, 1, 1}, way...)
	w, s := m.workers[0], m.servers[0]
	id := pushPull(t, w, []exchange.Tensor{tensor(t, 1, 1)}, nil)
	waited, served := make(chan error, 1), make(chan error, 1)
	go func() { waited <- wait(w, id) }()
	go func() {
		for {
			if _, err := getBatch(s); err != nil {
				served <- err
				return
			}
		}
	}()
	require.Eventually(t, func() bool { return w.driver.State().Callers > 0 && s.driver.State().Callers > 0 }, 10*time.Second, time.Millisecond)
	require.NoError(t, w.Close())
	require.ErrorIs(t, <-waited, ErrClosed)
	require.NoError(t, s.Close())
	<-served
}

// TestDoneAfterDown: an operation that ends after its Conn went down fails because of the loss, and
// what the transport said of it is no error for a caller.
func TestDoneAfterDown(t *testing.T) {
	m := newMesh(t, openFabrics, shape{1, 1, 1})
	s := m.servers[0]
	s.driver.Under(func() {
		l := s.peers[0].link
		s.down(l, io.ErrUnexpectedEOF)
		var lost *LostError
		require.ErrorAs(t, s.operation(&transport.Event{Conn: l.conn, Err: errors.New("refused")}), &lost)
	})
	require.Eventually(t, func() (over bool) {
		s.driver.Under(func() { over = len(s.ended) == 0 })
		return over
	}, 10*time.Second, time.Millisecond)
	m.stop()
}

// TestFailed: a member that fails ends its connections, so that nobody waits for it. It takes no notice of what still comes,
// lets nobody in, and sleeps.
func TestFailed(t *testing.T) {
	for _, way := range []string{"raise", "wait"} {
		t.Run(way, func(t *testing.T) {
			net := inproc.New()
			m := newMesh(t, over(net), shape{1, 1, 1}, "FSERVER_ON_PEER_LOST="+way, "FSERVER_REJOIN_TIMEOUT=0.5", "PS_HEARTBEAT_INTERVAL=0.1")
			w, s := m.workers[0], m.servers[0]
			id := pushPull(t, w, []exchange.Tensor{tensor(t, 1, 4)}, nil) // nobody calls get_batch
			broken := errors.New("the device is gone")
			require.True(t, s.driver.Under(func() {
				s.fail(broken)
				for i := range s.peers {
					require.NoError(t, s.data(s.peers[i].link, &transport.Event{Data: wire.Append(nil, wire.TypeRegroup, &wire.Regroup{Runs: 7})}))
				}
			}))
			lostWithin(t, func() error { return wait(w, id) }, "server", 0)
			lostWithin(t, func() error { return wait(w, pushPull(t, w, []exchange.Tensor{tensor(t, 1, 4)}, nil)) }, "server", 0)
			lostWithin(t, func() error { return barrierOf(w) }, "server", 0)

			hello := w.gate.me
			require.Eventually(t, meetServer(t, net, "late", hello).ended, 10*time.Second, time.Millisecond)
			require.True(t, s.driver.Under(func() {
				require.Empty(t, s.links)
				require.EqualValues(t, cluster.Never, work{s}.Next())
			}))
			sleeps := s.driver.Sleeps()
			time.Sleep(300 * time.Millisecond)
			require.Less(t, s.driver.Sleeps()-sleeps, uint64(100))
			require.False(t, s.driver.Stopped())
			require.Equal(t, broken, s.failed())
		})
	}
}

// TestFailedWorker: a server learns of the loss of a worker that has failed.
func TestFailedWorker(t *testing.T) {
	m := newMesh(t, openFabrics, shape{1, 1, 1}, "FSERVER_ON_PEER_LOST=raise")
	w := m.workers[0]
	require.True(t, w.driver.Under(func() { w.fail(errors.New("the device is gone")) }))
	lostWithin(t, func() error { _, err := getBatch(m.servers[0]); return err }, "worker", 0)
	require.True(t, w.driver.Under(func() { require.Empty(t, w.links) }))
}
