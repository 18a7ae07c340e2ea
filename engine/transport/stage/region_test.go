package stage

import (
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/gpu/fakegpu"
	"fserver/engine/transport"
)

// TestUserOfAnOperation: one with the bit of this package is refused, whatever the operation; that of the package above is
// not.
func TestUserOfAnOperation(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overTCP)
	src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1)
	k := b.Key(t, dst)
	for _, op := range append([]transport.Op{text("frame", false), text("passes", true)}, write(k, src, transport.Point{})...) {
		op.User = 1 << 63
		n, err := a.C.Post([]transport.Op{op})
		require.Zero(t, n)
		require.ErrorContains(t, err, "want less than 2^62")
		op.User = 1 << 62
		a.Post(t, []transport.Op{op})
	}
	until(t, a, b, func() bool { return len(a.Done) == 3 && len(b.Writes) == 1 })
}

// TestBlob refuses what is no key of a shadow, and leaves alone what is behind it.
func TestBlob(t *testing.T) {
	for _, blob := range []string{"", "of inner's key"} {
		in := transport.Key{ID: 3, Token: 4, Blob: blob}
		k := shadowKey(in)
		got, ours := innerKey(k)
		require.True(t, ours)
		require.Equal(t, in, got)
		for i := range k.Blob {
			_, ours = innerKey(transport.Key{ID: 3, Token: 4, Blob: k.Blob[:i]})
			require.False(t, ours, "%d bytes", i)
		}
		got, ours = innerKey(transport.Key{ID: 3, Token: 4, Blob: k.Blob + "of a Fabric over this one"})
		require.True(t, ours)
		require.Equal(t, in, got)
		for _, other := range []transport.Key{{ID: 2, Token: 4, Blob: k.Blob}, {ID: 3, Token: 5, Blob: k.Blob}} {
			got, ours = innerKey(other)
			require.False(t, ours)
			require.Equal(t, other, got)
		}
	}
}
