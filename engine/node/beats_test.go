package node

import (
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/cluster"
	"fserver/engine/transport"
	"fserver/engine/wire"
)

// sinkConn is a Conn that takes everything.
type sinkConn struct {
	transport.Conn
	frames int
}

func (c *sinkConn) Post(ops []transport.Op) (int, error) {
	c.frames += len(ops)
	return len(ops), nil
}

// BenchmarkBeats is what the scheduler does for one heartbeat, which must not depend on
// how many members there are.
func BenchmarkBeats(b *testing.B) {
	for _, members := range []int{16, 4096} {
		b.Run(strconv.Itoa(members), func(b *testing.B) {
			n := &Node{links: map[transport.Conn]*link{}, controls: map[int64]*link{}}
			beats := make([]cluster.Output, members)
			conns := make([]sinkConn, members)
			for i := range members {
				n.enlist(&link{conn: &conns[i], kind: linkMember, id: int64(i + 1)})
				beats[i] = cluster.Output{Kind: cluster.Send, Conn: int64(i + 1), Frame: wire.AppendSignal(nil, wire.TypeHeartbeat)}
			}
			rounds := 0
			for b.Loop() {
				n.outputs(beats)
				rounds++
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(rounds*members), "ns/beat")
			for i := range conns {
				require.Equal(b, rounds, conns[i].frames)
			}
		})
	}
}
