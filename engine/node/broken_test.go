package node

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"fserver/engine/conf"
	"fserver/engine/exchange"
	"fserver/engine/trace"
	"fserver/engine/transport"
	"fserver/engine/wire"
)

var errNeverTaken = errors.New("test: this operation can never be taken")

// refusing is a Fabric whose Conns refuse frames of one type, for as many times as are left,
// and live on. While it is blind, its Polls find nothing.
type refusing struct {
	transport.Fabric
	blind *atomic.Bool
	kind  wire.Type
	left  *atomic.Int32
	seen  func(frame []byte) // is given each frame of that type, if it is not nil
	mu    sync.Mutex
	conns map[transport.Conn]*refusingConn
}

type refusingConn struct {
	transport.Conn
	of *refusing
}

func (p *refusing) wrap(c transport.Conn) transport.Conn {
	if c == nil {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.conns[c] == nil {
		p.conns[c] = &refusingConn{c, p}
	}
	return p.conns[c]
}

func (p *refusing) Poll(ev []transport.Event) (int, error) {
	if p.blind != nil && p.blind.Load() {
		return 0, nil
	}
	n, err := p.Fabric.Poll(ev)
	for i := range ev[:n] {
		ev[i].Conn = p.wrap(ev[i].Conn)
	}
	return n, err
}

func (p *refusing) Connect(ctx context.Context, at transport.Addr) (transport.Conn, error) {
	c, err := p.Fabric.Connect(ctx, at)
	return p.wrap(c), err
}

func (p *refusing) Bind(k transport.Key, c transport.Conn) error {
	return p.Fabric.Bind(k, c.(*refusingConn).Conn)
}

func (c *refusingConn) Post(ops []transport.Op) (int, error) {
	for i := range ops {
		if ops[i].Kind != transport.OpFrame || wire.FrameType(ops[i].Frame) != c.of.kind {
			continue
		}
		if c.of.seen != nil {
			c.of.seen(ops[i].Frame)
		}
		if c.of.left.Load() > 0 {
			c.of.left.Add(-1)
			return 0, errNeverTaken
		}
	}
	return c.Conn.Post(ops)
}

// refusingFrames puts a refusing over the Fabrics of the nodes of a role.
func refusingFrames(role conf.Role, kind wire.Type, left *atomic.Int32, blind *atomic.Bool) Fabrics {
	return func(cfg *conf.Config, g transport.Gate, log *zap.Logger) ([]transport.Fabric, error) {
		list, err := openFabrics(cfg, g, log)
		if err == nil && cfg.Role == role {
			for i, f := range list {
				list[i] = &refusing{
					Fabric: f, blind: blind,
					kind: kind, left: left, conns: map[transport.Conn]*refusingConn{},
				}
			}
		}
		return list, err
	}
}

// downWithin sets downLimit for a test.
func downWithin(t *testing.T, limit time.Duration) {
	before := downLimit
	downLimit = limit
	t.Cleanup(func() { downLimit = before })
}

// TestLastAnswer: a connection that takes no more is ended only when it has had the time to give what has come, which its
// Polls may not find at once.
func TestLastAnswer(t *testing.T) {
	eachWay(t, func(t *testing.T, way ...string) {
		downWithin(t, time.Minute)
		var left atomic.Int32
		var blind atomic.Bool
		m := newMesh(t, refusingFrames(conf.Worker, wire.TypeNeed, &left, &blind), shape{1, 1, 1}, append(way, "FSERVER_ON_PEER_LOST=raise")...)
		w, s := m.workers[0], m.servers[0]
		require.NoError(t, echo(t, w, m.servers, 1, closed()))
		blind.Store(true)
		first := pushPull(t, w, []exchange.Tensor{tensor(t, 7, 4)}, []exchange.Tensor{tensor(t, 0, 4)}) // as echo's, so that it needs no answer to go
		var sink batch
		require.Eventually(t, func() bool { return s.GetBatch(&sink, 0, time.Millisecond, true) == nil }, 20*time.Second, time.Millisecond)
		answer, err := s.BeginAnswer()
		require.NoError(t, err)
		require.NoError(t, answer.AddPush(tensor(t, 0, 4)))
		require.NoError(t, s.Respond(sink.reqs[0].handler, answer))
		s.Flush()
		left.Store(1)
		second := pushPull(t, w, []exchange.Tensor{tensor(t, 77, 9)}, nil) // new, so that it begins with a Need
		require.Eventually(t, func() bool { return left.Load() == 0 }, 20*time.Second, time.Millisecond)
		require.ErrorIs(t, w.Wait(second, 20*time.Millisecond, true), ErrAgain)
		blind.Store(false)
		require.NoError(t, wait(w, first))
		require.True(t, w.driver.Under(func() { w.peers[0].link.until = trace.Now() }))
		lostWithin(t, func() error { return wait(w, second) }, "server", 0)
		m.stop()
	})
}

// TestBreachEnds: a connection whose peer does not keep to the protocol is not waited for.
func TestBreachEnds(t *testing.T) {
	downWithin(t, time.Minute)
	m := newMesh(t, openFabrics, shape{1, 1, 1}, "FSERVER_TRANSPORT=tcp", "FSERVER_ON_PEER_LOST=raise")
	w, s := m.workers[0], m.servers[0]
	id := pushPull(t, w, []exchange.Tensor{tensor(t, 1, 9)}, []exchange.Tensor{tensor(t, 0, 9)})
	_, err := getBatch(s)
	require.NoError(t, err)
	require.True(t, s.driver.Under(func() {
		s.broken(0, errNeverTaken)
		s.breached(0, errors.New("test: it breaks the protocol"))
	}))
	lostWithin(t, func() error { return wait(w, id) }, "server", 0)
	m.stop()
}

// TestPostFails: a connection that lives, and takes no more, is ended and made anew.
func TestPostFails(t *testing.T) { eachWay(t, postFails) }

func postFails(t *testing.T, way ...string) {
	downWithin(t, time.Millisecond)
	for _, c := range []struct {
		name string
		role conf.Role
		kind wire.Type
	}{
		{"need", conf.Worker, wire.TypeNeed},
		{"plan", conf.Worker, wire.TypePlan},
		{"request", conf.Worker, wire.TypeRequest},
		{"buffers", conf.Server, wire.TypeBuffers},
		{"response", conf.Server, wire.TypeResponse},
	} {
		for _, lost := range []string{"wait", "raise"} {
			t.Run(c.name+" "+lost, func(t *testing.T) {
				var left atomic.Int32
				m := newMesh(t, refusingFrames(c.role, c.kind, &left, nil), shape{1, 1, 1}, append(way, "FSERVER_ON_PEER_LOST="+lost)...)
				w, s := m.workers[0], m.servers[0]
				echoOne := func() error {
					id := pushPull(t, w, []exchange.Tensor{tensor(t, 1, 9)}, []exchange.Tensor{tensor(t, 0, 9)})
					var sink batch
					for end := time.Now().Add(20 * time.Second); time.Now().Before(end); {
						if err := s.GetBatch(&sink, 0, time.Millisecond, true); err == nil {
							answer, err := s.BeginAnswer()
							require.NoError(t, err)
							require.NoError(t, answer.AddPush(tensor(t, 0, 9)))
							if s.Respond(sink.reqs[0].handler, answer) == nil {
								s.Flush()
							}
						}
						if err := w.Wait(id, time.Millisecond, true); err != ErrAgain {
							return err
						}
					}
					return ErrAgain
				}
				left.Store(1)
				err := echoOne()
				if lost == "wait" {
					require.NoError(t, err)
				} else {
					lostWithin(t, func() error { return err }, [...]string{conf.Worker: "server", conf.Server: "server"}[c.role], 0)
					require.Eventually(t, func() bool { return echoOne() == nil }, 20*time.Second, time.Millisecond, "it is dialled again")
				}
				require.NoError(t, echoOne())
				m.stop()
			})
		}
	}
}

// TestPostFailsForEver: what can never be sent ends, also where calls wait for a successor,
// and what comes after it is sent.
func TestPostFailsForEver(t *testing.T) {
	downWithin(t, time.Millisecond)
	for _, kind := range []wire.Type{wire.TypeNeed, wire.TypePlan, wire.TypeRequest} {
		var left atomic.Int32
		m := newMesh(t, refusingFrames(conf.Worker, kind, &left, nil), shape{1, 1, 1}, "FSERVER_ON_PEER_LOST=wait", "FSERVER_TRANSPORT=tcp")
		left.Store(1 << 30)
		err := wait(m.workers[0], pushPull(t, m.workers[0], []exchange.Tensor{tensor(t, 1, 9)}, nil))
		var gone *LostError
		require.ErrorAs(t, err, &gone)
		require.Contains(t, gone.Reason, errNeverTaken.Error())
		left.Store(0)
		require.NoError(t, echo(t, m.workers[0], m.servers, 3, closed()))
		m.stop()
	}
}
