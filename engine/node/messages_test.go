package node

import (
	"bytes"
	"fmt"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/cluster"
	"fserver/engine/exchange"
	"fserver/engine/trace"
	"fserver/engine/transport"
	"fserver/engine/transport/inproc"
	"fserver/engine/wire"
)

func to(roles wire.Roles, rank int) Destination { return Destination{Roles: roles, Rank: rank} }

// send sends a message and waits until it has been taken, or will not be.
func send(n *Node, d Destination, data []byte) error {
	id, err := n.Send(d, data)
	if err != nil {
		return err
	}
	return retried(func() error { return n.WaitSent(id, 100*time.Millisecond) })
}

// receive takes a message.
func receive(n *Node) (m Message, err error) {
	err = retried(func() error {
		return n.Receive(func(got *Message) error { m = *got; return nil }, 100*time.Millisecond)
	})
	return m, err
}

func received(t *testing.T, n *Node, from *Node, data []byte) {
	t.Helper()
	m, err := receive(n)
	require.NoError(t, err)
	require.Equal(t, from.Info().Role, int(m.Role))
	require.Equal(t, from.rank(), m.Rank)
	require.Equal(t, from.gate.me.Epoch, m.Run)
	require.True(t, bytes.Equal(data, m.Data))
}

// TestMessages sends between any two nodes, and to groups, of 0 to the most bytes.
func TestMessages(t *testing.T) { eachWay(t, messages) }

func messages(t *testing.T, way ...string) {
	m := newMesh(t, openFabrics, shape{2, 2, 1}, way...)
	everybody := append([]*Node{m.scheduler}, append(m.workers, m.servers...)...)
	role := map[int]wire.Roles{0: wire.ToScheduler, 1: wire.ToWorkers, 2: wire.ToServers}
	for i, from := range everybody {
		for j, n := range everybody {
			data := fmt.Appendf(nil, "%d to %d", i, j)
			require.NoError(t, send(from, to(role[n.Info().Role], n.rank()), data))
			received(t, n, from, data)
		}
	}
	for _, size := range []int{0, 1, 1 << 16, wire.MaxMessage} {
		data := bytes.Repeat([]byte{byte(size)}, size)
		require.NoError(t, send(m.workers[1], to(wire.ToScheduler|wire.ToServers|wire.ToWorkers, wire.All), data))
		for _, n := range everybody {
			received(t, n, m.workers[1], data)
		}
	}
	w := m.workers[0]
	for want, err := range map[string]error{
		"a message of 1000001 bytes: want at most 1000000": send(w, to(wire.ToServers, 0), make([]byte, wire.MaxMessage+1)),
		"rank 2 of the servers: want 0 to 1":               send(w, to(wire.ToServers, 2), nil),
		"no set of scheduler":                              send(w, to(0, 0), nil),
	} {
		require.ErrorContains(t, err, want)
		require.Equal(t, syscall.EINVAL, Errno(err))
	}
	require.Equal(t, ErrAgain, w.Receive(nil, 0))
	_, err := w.Send(to(wire.ToServers, 0), nil)
	require.NoError(t, err)
	require.ErrorIs(t, w.WaitSent(99, 0), exchange.ErrNoTicket)
	all, err := w.Statuses()
	require.NoError(t, err)
	require.Len(t, all, 5)
	require.Equal(t, Status{Role: wire.RoleServer, Rank: 1, Run: m.servers[1].gate.me.Epoch, Silent: -1}, all[4])
	require.Equal(t, m.scheduler.gate.me.Epoch, all[0].Run)
	m.stop()
	require.ErrorIs(t, send(w, to(wire.ToServers, 0), nil), ErrClosed)
	_, err = receive(w)
	require.ErrorIs(t, err, ErrClosed)
}

// TestLeftAlone: the others are told of a member that leaves alone.
func TestLeftAlone(t *testing.T) {
	m := newMesh(t, over(inproc.New()), shape{2, 1, 1}, "FSERVER_STOP_TIMEOUT=1")
	var late *TimeoutError
	require.ErrorAs(t, retried(func() error { return m.workers[1].Stop(longest) }), &late)
	for _, n := range []*Node{m.workers[0], m.servers[0], m.scheduler} {
		require.Eventually(t, func() bool {
			all, err := n.Statuses()
			require.NoError(t, err)
			return all[2].State == wire.Parting && all[1].State == wire.Present
		}, longest, time.Millisecond)
	}
	lostWithin(t, func() error { return send(m.workers[0], to(wire.ToWorkers, 1), nil) }, "worker", 1)
	m.stop()
}

// TestMessagesEarly: before the cluster is complete nothing is sent.
func TestMessagesEarly(t *testing.T) {
	m := newCluster(t, over(inproc.New()))
	for _, n := range []*Node{m.start(shape{1, 1, 1}.settings("scheduler", 0, 0, "0")), m.start(shape{1, 1, 1}.settings("worker", 0, 0, "1"))} {
		require.ErrorContains(t, send(n, to(wire.ToServers, 0), nil), "before the cluster is complete")
		_, err := receive(n)
		require.ErrorContains(t, err, "before the cluster is complete")
		_, err = n.Statuses()
		require.Equal(t, syscall.EINVAL, Errno(err))
	}
}

// TestMessagesNotReceived: a node that does not receive costs its senders their messages, and nobody a connection.
func TestMessagesNotReceived(t *testing.T) {
	m := newMesh(t, openFabrics, shape{2, 1, 1})
	w, s := m.workers[0], m.servers[0]
	var full error
	sent := 0
	for ; full == nil; sent++ {
		full = send(w, to(wire.ToServers, 0), []byte{1})
	}
	require.Equal(t, 1025, sent)
	require.ErrorContains(t, full, "server 0 does not receive its messages")
	require.Equal(t, syscall.EXFULL, Errno(full))
	require.NoError(t, send(w, to(wire.ToWorkers, 1), []byte{2}))
	received(t, m.workers[1], w, []byte{2})
	for range 1024 {
		received(t, s, w, []byte{1})
	}
	for range 8 { // several threads receive
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() { received(t, s, w, []byte{3}) })
		}
		for range 8 {
			require.NoError(t, send(w, to(wire.ToServers, 0), []byte{3}))
		}
		wg.Wait()
	}
	m.stop()
}

// TestMessagesUnanswered: too many at once are an error of the call.
func TestMessagesUnanswered(t *testing.T) {
	m := newMesh(t, openFabrics, shape{1, 1, 1})
	var ids []uint64
	var full *cluster.FullError
	for full == nil {
		id, err := m.workers[0].Send(to(wire.ToServers, 0), make([]byte, wire.MaxMessage))
		if err != nil {
			require.ErrorAs(t, err, &full)
			break
		}
		ids = append(ids, id)
		require.LessOrEqual(t, len(ids), 1000)
		if len(ids)%4 == 0 {
			received(t, m.servers[0], m.workers[0], make([]byte, wire.MaxMessage))
		}
	}
	for _, id := range ids {
		err := retried(func() error { return m.workers[0].WaitSent(id, time.Second) })
		if err != nil {
			require.ErrorAs(t, err, &full)
		}
	}
	m.stop()
}

// TestMessagesLost: the sender to a node that dies is told. The one that takes its place gets nothing of
// its predecessor's, and can be told from it.
func TestMessagesLost(t *testing.T) {
	net, sh := inproc.New(), shape{2, 1, 1}
	m := newCluster(t, over(net))
	m.scheduler = m.start(sh.settings("scheduler", 0, 0, "0"))
	m.servers = []*Node{m.start(sh.settings("server", 0, 0, "1"))}
	m.workers = []*Node{m.start(sh.settings("worker", 0, 0, "1")), m.start(sh.settings("worker", 1, 0, "1"))}
	for _, n := range m.all() {
		waitReady(t, n)
	}
	s, old := m.servers[0], m.workers[1]
	require.NoError(t, send(s, to(wire.ToWorkers, 1), []byte("for the first")))
	require.NoError(t, send(old, to(wire.ToServers, 0), []byte("of the first")))
	first, err := receive(s)
	require.NoError(t, err)
	net.Kill("worker-1")
	lostWithin(t, func() error {
		for {
			if err := send(s, to(wire.ToWorkers, 1), nil); err != nil {
				return err
			}
		}
	}, "worker", 1)
	require.Eventually(t, func() bool {
		all, err := s.Statuses()
		require.NoError(t, err)
		return all[2].State == wire.Gone && all[2].Run == first.Run
	}, longest, time.Millisecond)
	next := m.restart(net, sh, old)
	reply := Destination{Roles: wire.ToWorkers, Rank: first.Rank, Run: first.Run}
	lostWithin(t, func() error { return send(s, reply, nil) }, "worker", 1)
	require.NoError(t, send(s, to(wire.ToWorkers, 1), []byte("for the second")))
	received(t, next, s, []byte("for the second"))
	require.Equal(t, ErrAgain, next.Receive(nil, 0))
	m.stop()
}

// TestMessagesWithoutScheduler: whoever waits for an answer is told.
func TestMessagesWithoutScheduler(t *testing.T) {
	m := newMesh(t, openFabrics, shape{1, 1, 1})
	require.NoError(t, send(m.workers[0], to(wire.ToServers, 0), []byte("before")))
	require.NoError(t, m.scheduler.Close())
	lostWithin(t, func() error {
		for {
			if err := send(m.workers[0], to(wire.ToServers, 0), nil); err != nil {
				return err
			}
		}
	}, "scheduler", 0)
	received(t, m.servers[0], m.workers[0], []byte("before"))
	all, err := m.workers[0].Statuses()
	require.NoError(t, err)
	require.Equal(t, wire.Gone, all[0].State)
}

// TestMessagesClosed: a close ends the calls that wait.
func TestMessagesClosed(t *testing.T) {
	m := newMesh(t, openFabrics, shape{1, 1, 1})
	ended := make(chan error)
	for range 3 {
		go func() { ended <- m.servers[0].Receive(nil, time.Minute) }()
	}
	require.Eventually(t, func() bool { // all wait
		stacks := make([]byte, 1<<20)
		stacks = stacks[:runtime.Stack(stacks, true)]
		return bytes.Count(stacks, []byte("[select]:\nfserver/engine/node.(*Node).Receive(")) == 3
	}, longest, time.Millisecond)
	require.NoError(t, m.servers[0].Close())
	for range 3 {
		require.ErrorIs(t, <-ended, ErrClosed)
	}
}

// TestMessagesEnded: all leave while a message of the scheduler's own is on its way.
func TestMessagesEnded(t *testing.T) {
	m := newMesh(t, openFabrics, shape{1, 1, 1})
	s := m.scheduler
	require.ErrorIs(t, m.servers[0].Stop(time.Millisecond), ErrAgain)
	require.Eventually(t, func() bool {
		all, err := s.Statuses()
		require.NoError(t, err)
		return all[2].State == wire.Parting
	}, longest, time.Millisecond)
	var seq uint64
	require.True(t, s.driver.Under(func() { // it does not know yet that the worker leaves
		require.ErrorIs(t, m.workers[0].Stop(time.Millisecond), ErrAgain)
		var out []cluster.Output
		var err error
		seq, out, err = s.machine.Send(trace.Now(), to(wire.ToWorkers, 0), nil)
		require.NoError(t, err)
		s.sent[seq] = new(ending)
		s.outputs(out)
	}))
	for _, n := range []*Node{m.servers[0], m.workers[0]} {
		require.NoError(t, retried(func() error { return n.Stop(time.Second) }))
	}
	require.Equal(t, syscall.ESHUTDOWN, Errno(retried(func() error { return s.WaitSent(seq, 100*time.Millisecond) })))
	m.stop()
}

// TestMessagesHostile: a member that answers what it was not sent is put out; the others go on.
func TestMessagesHostile(t *testing.T) {
	m := newMesh(t, openFabrics, shape{2, 1, 1})
	bad := m.workers[1]
	for _, frame := range [][]byte{
		wire.Append(nil, wire.TypeTaken, &wire.Taken{}),
	} {
		require.True(t, bad.driver.Own())
		_, err := bad.controls[0].conn.Post([]transport.Op{{Kind: transport.OpFrame, Frame: frame}})
		bad.driver.Disown()
		require.NoError(t, err)
	}
	require.Eventually(t, func() bool {
		all, err := m.servers[0].Statuses()
		require.NoError(t, err)
		return all[2].State == wire.Gone
	}, longest, time.Millisecond)
	require.NoError(t, send(m.workers[0], to(wire.ToServers, 0), []byte("still")))
	received(t, m.servers[0], m.workers[0], []byte("still"))
}
