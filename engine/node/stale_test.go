package node

import (
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"fserver/engine/conf"
	"fserver/engine/exchange"
	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/wire"
)

// keeper is the Fabric of a server; it keeps the last key of a worker's pull tensor, and where it came from.
type keeper struct {
	transport.Fabric
	mu   sync.Mutex
	key  transport.Key
	conn transport.Conn
}

func (p *keeper) Poll(ev []transport.Event) (int, error) {
	n, err := p.Fabric.Poll(ev)
	for _, e := range ev[:n] {
		if e.Kind != transport.EvFrame || wire.FrameType(e.Data) != wire.TypeRequest {
			continue
		}
		var q wire.Request
		if wire.ParseRequest(e.Data, &q) == nil && len(q.Pull) == 1 && q.Pull[0].Changed {
			p.mu.Lock()
			p.key, p.conn = transport.Key{ID: q.Pull[0].Region.ID, Token: q.Pull[0].Region.Token}, e.Conn
			p.mu.Unlock()
		}
	}
	return n, err
}

// TestStaleKey: when a push_pull has ended, its memory may be given back. A server that writes with the key of then loses its
// connection, and the worker lives.
func TestStaleKey(t *testing.T) { eachWay(t, staleKey) }

func staleKey(t *testing.T, way ...string) {
	var keepers []*keeper
	m := newMesh(t, func(cfg *conf.Config, g transport.Gate, log *zap.Logger) ([]transport.Fabric, error) {
		list, err := openFabrics(cfg, g, log)
		for i := range list {
			if cfg.Role == conf.Server {
				k := &keeper{Fabric: list[i]}
				keepers = append(keepers, k)
				list[i] = k
			}
		}
		return list, err
	}, shape{1, 1, 1}, append(way, "FSERVER_ON_PEER_LOST=wait")...)
	w, s := m.workers[0], m.servers[0]
	core, logs := observer.New(zapcore.WarnLevel)
	w.driver.Under(func() { w.log = zap.New(core) })
	require.NoError(t, echo(t, w, m.servers, 1, closed()))
	for i := range 2 {
		base, err := mem.Map(4096)
		require.NoError(t, err)
		out := exchange.Tensor{Span: base.Span(), Dev: mem.CPU, Key: 0, Base: base, Alloc: 1<<60 + uint64(i), DType: 7, Dims: []int64{512, 8}}
		id := pushPull(t, w, []exchange.Tensor{tensor(t, 1, 512)}, []exchange.Tensor{out})
		var sink batch
		require.NoError(t, retried(func() error { return s.GetBatch(&sink, 0, 10*time.Millisecond, false) }))
		answer, err := s.BeginAnswer()
		require.NoError(t, err)
		require.NoError(t, answer.AddPush(tensor(t, 0, 512)))
		require.NoError(t, s.Respond(sink.reqs[0].handler, answer))
		s.Flush()
		require.NoError(t, wait(w, id))
		require.NoError(t, mem.Unmap(base))

		var at *keeper
		for _, k := range keepers {
			if k.conn != nil {
				at = k
			}
		}
		evil := tensor(t, 0, 1)
		op := transport.Op{Kind: transport.OpWrite, Key: at.key, Src: []mem.Span{evil.Span}}
		require.Eventually(t, func() bool { // a Fabric takes nothing while it is armed
			posted := 0
			require.True(t, s.driver.Under(func() { posted, err = at.conn.Post([]transport.Op{op}) }))
			require.NoError(t, err)
			return posted == 1
		}, 10*time.Second, time.Millisecond)
		require.Eventually(t, func() bool { return logs.FilterMessage("connection ended").Len() == i+1 }, 20*time.Second, time.Millisecond, "%v", logs.All())
		// Of NICs the server's says what is wrong, and it may not come through before its connection ends.
		require.Regexp(t, "no operation of this process uses the memory|a wrong key|the queue pair ended", logs.FilterMessage("connection ended").All()[i].ContextMap()["error"])
		require.NoError(t, echo(t, w, m.servers, 1, closed()), "it is dialled again")
	}
	m.stop()
}
