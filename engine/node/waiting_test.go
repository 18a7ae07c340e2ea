package node

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/transport"
	"fserver/engine/transport/inproc"
	"fserver/engine/wire"
)

// stranger is a connection of somebody who says that it is a worker.
type stranger struct {
	t    *testing.T
	f    transport.Fabric
	conn transport.Conn
	down bool
}

func meetServer(t *testing.T, net *inproc.Network, name string, hello wire.Hello) *stranger {
	t.Helper()
	f, err := net.Open(inproc.Options{Name: name, Gate: &gate{me: hello}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, f.Close()) })
	c, err := f.Connect(context.Background(), "inproc:server-0")
	require.NoError(t, err)
	return &stranger{t: t, f: f, conn: c}
}

// send posts a frame.
func (s *stranger) send(frame []byte) {
	s.t.Helper()
	require.Eventually(s.t, func() bool {
		k, err := s.conn.Post([]transport.Op{{Kind: transport.OpFrame, Frame: frame}})
		require.NoError(s.t, err)
		return k == 1
	}, 10*time.Second, time.Millisecond)
}

func (s *stranger) ended() bool {
	var ev [8]transport.Event
	k, err := s.f.Poll(ev[:])
	require.NoError(s.t, err)
	for _, e := range ev[:k] {
		s.down = s.down || e.Kind == transport.EvDown
	}
	return s.down
}

// kept is how many connections of a rank a server keeps that the scheduler has not named, and how
// many of these have said Up.
func kept(t *testing.T, n *Node, rank int32) (links, up int) {
	require.True(t, n.driver.Own())
	defer n.driver.Disown()
	for _, l := range n.waiting {
		if l.hello.Rank == rank {
			links++
			if l.kind == linkWaiting {
				up++
			}
		}
	}
	return links, up
}

// TestWaitingIsBounded has strangers connect to a server that waits for its roster. It
// keeps a few connections of each rank, of each of which it takes an Up and nothing else, and
// the cluster comes to be all the same.
func TestWaitingIsBounded(t *testing.T) {
	net, sh := inproc.New(), shape{5, 1, 1}
	m := newCluster(t, over(net))
	m.scheduler = m.start(sh.settings("scheduler", 0, 0, "0"))
	s := m.start(sh.settings("server", 0, 0, "1"))
	m.servers = []*Node{s}
	hello := s.gate.me
	hello.Role = wire.RoleWorker

	// Too many of one rank: the oldest give way. They come in any order.
	var all []*stranger
	for i := range 3 * maxWaiting {
		hello.Rank, hello.Epoch = 1, uint64(i+1)
		all = append(all, meetServer(t, net, fmt.Sprint("one-", i), hello))
	}
	over := func() (count int) {
		for _, c := range all {
			if c.ended() {
				count++
			}
		}
		return count
	}
	require.Eventually(t, func() bool { return over() == 2*maxWaiting }, 10*time.Second, time.Millisecond)
	links, _ := kept(t, s, 1)
	require.Equal(t, maxWaiting, links)
	require.Equal(t, 2*maxWaiting, over())

	// A rank that no worker has.
	for i, rank := range []int32{-1, 5, 1 << 30} {
		hello.Rank = rank
		c := meetServer(t, net, fmt.Sprint("none-", i), hello)
		require.Eventually(t, c.ended, 10*time.Second, time.Millisecond, "rank %d", rank)
	}

	// An Up is kept, and a second frame ends the connection.
	up := wire.Append(nil, wire.TypeUp, &wire.Text{Text: "for the test"})
	for i, more := range [][]byte{up, wire.AppendSignal(nil, wire.TypeBye), make([]byte, transport.MaxFrame)} {
		hello.Rank = 2
		c := meetServer(t, net, fmt.Sprint("two-", i), hello)
		c.send(up)
		require.Eventually(t, func() bool { _, up := kept(t, s, 2); return up == 1 }, 10*time.Second, time.Millisecond)
		require.False(t, c.ended())
		c.send(more)
		require.Eventually(t, c.ended, 10*time.Second, time.Millisecond)
		links, _ = kept(t, s, 2)
		require.Zero(t, links)
	}

	// So does a first one that is no Up.
	for i, first := range [][]byte{wire.AppendSignal(nil, wire.TypeBye), append(up, 0), make([]byte, transport.MaxFrame)} {
		c := meetServer(t, net, fmt.Sprint("first-", i), hello)
		c.send(first)
		require.Eventually(t, c.ended, 10*time.Second, time.Millisecond)
	}

	for i := range 5 {
		m.workers = append(m.workers, m.start(sh.settings("worker", i, 0, "1")))
	}
	for _, n := range m.all() {
		waitReady(t, n)
	}
	m.stop()
}
