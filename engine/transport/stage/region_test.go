package stage

import (
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/transport"
)

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
