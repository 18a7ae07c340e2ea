package node

import (
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"fserver/engine/conf"
	"fserver/engine/transport"
	"fserver/engine/wire"
)

// gate checks who connects, and says who we are.
type gate struct {
	me     wire.Hello
	rank   *atomic.Int32 // conf.NoRank until the scheduler has assigned it; nil: that of me
	device any           // the GPU of the node, as drivers know it; nil: none. me tells peers of it
	secret []byte
}

func newGate(cfg *conf.Config) *gate {
	g := &gate{rank: new(atomic.Int32), me: wire.Hello{
		Build: "fserver " + Version, Cluster: cfg.Cluster, Role: wire.Role(cfg.Role), Rank: int32(cfg.Rank),
		Epoch: uint64(time.Now().UnixNano()),
	}}
	g.rank.Store(int32(cfg.Rank))
	if cfg.Secret.IsSet() {
		g.secret = cfg.Secret.Bytes()
	}
	return g
}

// Open implements transport.Gate.
func (g *gate) Open(dialer bool) transport.Handshake {
	me := g.me
	if g.rank != nil {
		me.Rank = g.rank.Load()
	}
	return wire.NewHandshake(me, g.secret, dialer)
}

// named takes the rank that the scheduler has assigned to this node. A server may be dialled before it
// knows its rank: then its workers know it by its epoch.
func (n *Node) named() {
	if n.rank() == conf.NoRank {
		n.gate.rank.Store(int32(n.member.Rank()))
		n.log.Info("the scheduler has assigned a rank", zap.Int("rank", n.rank()))
	}
}
