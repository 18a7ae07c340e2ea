package node

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"fserver/engine/conf"
	"fserver/engine/exchange"
	"fserver/engine/peers"
	"fserver/engine/transport"
	"fserver/engine/transport/tcp"
)

// lateDialer is a Fabric whose Connect to a peer returns its Conn only when its caller
// has lost interest, as often as it is told.
type lateDialer struct {
	*tcp.Fabric
	late  atomic.Int32 // so many calls to come are late
	dials atomic.Int32
}

func (f *lateDialer) Connect(ctx context.Context, to transport.Addr) (transport.Conn, error) {
	f.dials.Add(1)
	if f.late.Add(-1) < 0 {
		return f.Fabric.Connect(ctx, to)
	}
	c, err := f.Fabric.Connect(context.WithoutCancel(ctx), to)
	<-ctx.Done()
	return c, err
}

// TestDialledTwice has a worker dial a server anew while the first dial has just
// succeeded. One connection stays, and it is the one that both sides use. Each took the
// end of the other for its own, dialled again, and so on for ever.
func TestDialledTwice(t *testing.T) {
	var f *lateDialer
	m := newMesh(t, func(cfg *conf.Config, g transport.Gate, log *zap.Logger) ([]transport.Fabric, error) {
		base, err := openBase(cfg, g, log)
		if err == nil && cfg.Role == conf.Worker {
			f = &lateDialer{Fabric: base.(*tcp.Fabric)}
			base = f
		}
		return []transport.Fabric{base}, err
	}, shape{1, 1, 1}, "FSERVER_TRANSPORT=tcp")
	w := m.workers[0]
	for _, late := range []int32{1, 3} {
		f.late.Store(late)
		before := f.dials.Load()
		for range late + 1 { // all but the last are late
			require.True(t, w.driver.Own())
			w.dialAnew("the test ends it")
			w.driver.Disown()
			require.Eventually(t, func() bool { return f.dials.Load() > before }, 10*time.Second, time.Millisecond)
			before = f.dials.Load()
		}
		w.dials.Wait()
		require.Eventually(t, func() bool { return linkUsed(w) }, 10*time.Second, time.Millisecond)
		require.Equal(t, 1, peerLinks(w))
		require.Eventually(t, func() bool { return peerLinks(m.servers[0]) == 1 }, 10*time.Second, time.Millisecond)
		before = f.dials.Load()
		require.NoError(t, echo(t, w, m.servers, 100, closed()))
		require.Equal(t, before, f.dials.Load(), "nobody has dialled again")
	}
	m.stop()
}

// TestBeforeTheServerAnswers has a worker connect to a server that does not answer yet: what is
// called meanwhile waits, and is done when it does.
func TestBeforeTheServerAnswers(t *testing.T) {
	m := newMesh(t, openFabrics, shape{1, 1, 1}, "FSERVER_TRANSPORT=tcp")
	w, s := m.workers[0], m.servers[0]
	require.NoError(t, echo(t, w, m.servers, 5, closed()))
	require.True(t, s.driver.Own()) // it does nothing until disown
	require.True(t, w.driver.Own())
	w.dialAnew("the test ends it")
	w.driver.Disown()
	require.Eventually(t, func() bool { return peerLinks(w) == 1 }, 10*time.Second, time.Millisecond)
	id := pushPull(t, w, []exchange.Tensor{tensor(t, 1, 9)}, []exchange.Tensor{tensor(t, 0, 9)})
	ch, err := w.OpenChannel("a")
	require.NoError(t, err)
	require.NoError(t, w.TellChannel(ch, 0, "of the worker"))
	require.Equal(t, ErrAgain, w.Wait(id, 50*time.Millisecond, true))
	require.False(t, linkUsed(w))
	s.driver.Disown()
	require.Eventually(t, func() bool { return linkUsed(w) }, 10*time.Second, time.Millisecond)
	require.NoError(t, serve(t, s, 1))
	require.NoError(t, wait(w, id))
	theirs, err := s.OpenChannel("a")
	require.NoError(t, err)
	require.Equal(t, "of the worker", textOf(t, s, theirs, 0))
	for n, h := range map[*Node]uint64{w: ch, s: theirs} {
		require.NoError(t, n.CloseChannel(h, "", -1))
	}
	m.stop()
}

// dialAnew has a worker end its connection to its first server and dial again, as for a successor.
func (n *Node) dialAnew(why string) {
	p := n.peers[0]
	n.step(p, peers.Input{Kind: peers.Succeeded, Member: p.Member(), Err: p.lostError(why)})
}

// linkUsed reports whether the server has answered on the link that a worker uses.
func linkUsed(w *Node) bool {
	if !w.driver.Own() {
		return false
	}
	defer w.driver.Disown()
	return w.peers[0].Heard()
}

// peerLinks counts the connections of a node to peers.
func peerLinks(n *Node) (count int) {
	if !n.driver.Own() {
		return 0
	}
	defer n.driver.Disown()
	for _, l := range n.links {
		if l.kind == linkPeer || l.kind == linkWaiting {
			count++
		}
	}
	return count
}
