package inproc

import (
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/transport"
)

func TestBuffers(t *testing.T) {
	var b buffers
	for _, n := range []int{0, 1, 63, 64, 65, 4096, transport.MaxFrame - 1, transport.MaxFrame} {
		buf := b.get(n)
		require.Len(t, buf, n)
		require.NotNil(t, buf)
		b.put(buf)
		require.Zero(t, testing.AllocsPerRun(10, func() { b.put(b.get(n)) }), "%d bytes", n)
	}
	b.put(nil)

	var many [][]byte
	for range 2 * keep / transport.MaxFrame {
		many = append(many, b.get(transport.MaxFrame))
	}
	for _, buf := range many {
		b.put(buf)
	}
	require.LessOrEqual(t, b.size, keep)
}
