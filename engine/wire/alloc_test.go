//go:build !race

package wire

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestControlAllocs(t *testing.T) {
	buf := make([]byte, 0, 1<<16)
	g := &Register{Shape: Shape{3, 2, 4}, Member: member}
	l := &Lost{7, RoleServer, 5, 9, "10.0.0.9:7000", "connection reset by peer"}
	why, release, barrier := &Text{"rank 9 is taken"}, &Release{9}, &Barrier{BarrierServers, 1 << 40, 3}
	require.Zero(t, testing.AllocsPerRun(100, func() {
		buf = Append(buf[:0], TypeRegister, g)
		buf = Append(buf[:0], TypeRoster, roster)
		buf = Append(buf[:0], TypeLost, l)
		buf = Append(buf[:0], TypeRefuse, why)
		buf = Append(buf[:0], TypeRelease, release)
		buf = Append(buf[:0], TypeBarrier, barrier)
		buf = AppendSignal(buf[:0], TypeHeartbeat)
		if err := ParseSignal(buf); err != nil {
			t.Error(err)
		}
	}))
}
