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

// send posts a frame, and says whether the connection has ended before that or since.
func (s *stranger) send(frame []byte) (ended bool) {
	s.t.Helper()
	for end := time.Now().Add(10 * time.Second); !s.ended(); {
		require.True(s.t, time.Now().Before(end))
		k, err := s.conn.Post([]transport.Op{{Kind: transport.OpFrame, Frame: frame}})
		if err != nil || k == 1 {
			break
		}
	}
	return s.ended()
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

// kept is how many connections and bytes of frames a server keeps for workers that the
// scheduler has not named.
func kept(t *testing.T, n *Node) (links, bytes int) {
	require.True(t, n.own())
	defer n.disown()
	for _, l := range n.waiting {
		for _, b := range l.early {
			bytes += len(b)
		}
	}
	return len(n.waiting), bytes
}

// hasHeard says whether the newest connection of a rank that waits has brought so many frames.
func hasHeard(t *testing.T, n *Node, rank int32, frames int) (heard bool) {
	require.True(t, n.own())
	defer n.disown()
	for _, l := range n.waiting {
		if l.hello.Rank == rank {
			heard = len(l.early) == frames
		}
	}
	return heard
}

// TestWaitingIsBounded has strangers connect to a server that waits for its roster. It
// keeps a few connections of each rank and a bounded number of bytes, and the cluster
// comes to be all the same.
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
	links, _ := kept(t, s)
	require.Equal(t, maxWaiting, links)
	require.Equal(t, 2*maxWaiting, over())

	// A rank that no worker has.
	for i, rank := range []int32{-1, 5, 1 << 30} {
		hello.Rank = rank
		c := meetServer(t, net, fmt.Sprint("none-", i), hello)
		require.Eventually(t, c.ended, 10*time.Second, time.Millisecond, "rank %d", rank)
	}

	// Too many bytes on one connection.
	frame := make([]byte, maxEarlyBytes/4)
	hello.Rank = 2
	c := meetServer(t, net, "bytes", hello)
	require.Eventually(t, func() bool { return c.send(frame) }, 10*time.Second, time.Millisecond)

	// As many as one may have, on many.
	ended := 0
	for rank := range int32(5) {
		for i := range maxWaiting {
			hello.Rank = rank
			c := meetServer(t, net, fmt.Sprint("sum-", rank, "-", i), hello)
			for range 3 {
				c.send(frame)
			}
			require.Eventually(t, func() bool {
				links, bytes := kept(t, s)
				require.LessOrEqual(t, links, 5*maxWaiting)
				require.LessOrEqual(t, bytes, maxWaitingBytes)
				return c.ended() || hasHeard(t, s, rank, 3)
			}, 10*time.Second, time.Millisecond)
			if c.ended() {
				ended++
			}
		}
	}
	require.Positive(t, ended)
	_, bytes := kept(t, s)
	require.Greater(t, bytes, maxWaitingBytes/2)

	for i := range 5 {
		m.workers = append(m.workers, m.start(sh.settings("worker", i, 0, "1")))
	}
	for _, n := range m.all() {
		waitReady(t, n)
	}
	m.stop()
}
