package node

import (
	"testing"
	"time"

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

// TestBeatsAreLinear: what the scheduler does for one heartbeat does not depend on how
// many members there are. It looked for each among all its links.
func TestBeatsAreLinear(t *testing.T) {
	each := func(members int) time.Duration {
		n := &Node{links: map[transport.Conn]*link{}, controls: map[int64]*link{}}
		beats := make([]cluster.Output, members)
		conns := make([]sinkConn, members)
		for i := range members {
			n.enlist(&link{conn: &conns[i], kind: linkMember, id: int64(i + 1)})
			beats[i] = cluster.Output{Kind: cluster.Send, Conn: int64(i + 1), Frame: wire.AppendSignal(nil, wire.TypeHeartbeat)}
		}
		least := time.Hour
		for range 10 {
			begin := time.Now()
			for range 4096 / members {
				n.outputs(beats)
			}
			least = min(least, time.Since(begin))
		}
		for i := range conns {
			require.Equal(t, 10*4096/members, conns[i].frames)
		}
		return least
	}
	few, many := each(16), each(4096)
	require.Less(t, many, 16*few, "4096 heartbeats for 16 members took %v, for 4096 members %v", few, many)
}
