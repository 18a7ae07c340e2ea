package mem

import (
	"fmt"
	"math"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestContains(t *testing.T) {
	r := Region{Addr: 1000, Len: 100, Dev: CPU}
	for _, c := range []struct {
		s    Span
		want bool
	}{
		{r.Span(), true},
		{Span{1000, 0}, true},
		{Span{1100, 0}, true},
		{Span{1099, 1}, true},
		{Span{1099, 2}, false},
		{Span{1101, 0}, false},
		{Span{999, 1}, false},
		{Span{1001, math.MaxUint64}, false},
	} {
		require.Equal(t, c.want, r.Contains(c.s), "%+v", c.s)
	}
}

func TestSlice(t *testing.T) {
	r := Region{Addr: 1000, Len: 5 << 30, Dev: CPU}
	s, err := r.Slice(3<<30, 2<<30)
	require.NoError(t, err)
	require.Equal(t, Span{1000 + 3<<30, 2 << 30}, s)
	for _, c := range [][2]uint64{{0, 5<<30 + 1}, {5<<30 + 1, 0}, {math.MaxUint64, 2}, {2, math.MaxUint64}} {
		_, err := r.Slice(c[0], c[1])
		require.ErrorContains(t, err, "leave the region")
	}
}

func TestMap(t *testing.T) {
	r, err := Map(12345)
	require.NoError(t, err)
	b := r.Span().Bytes()
	require.Len(t, b, 12345)
	require.Equal(t, make([]byte, 12345), b)
	b[12344] = 7
	require.Equal(t, r.Span(), Of(b))
	require.Equal(t, &b[0], r.Span().Ptr())
	require.NoError(t, Unmap(r))

	require.Nil(t, Span{}.Bytes())
	require.Nil(t, Span{}.Ptr())
	for _, n := range []uint64{0, 1<<46 + 1} {
		_, err := Map(n)
		require.ErrorContains(t, err, "want 1 to 2^46")
	}
}

// TestMapLarge aligns what may take huge pages, and leaves nothing mapped.
func TestMapLarge(t *testing.T) {
	const times = 400 // an arena of malloc takes 128 MiB of addresses
	for _, n := range []uint64{hugePage - 1, hugePage, hugePage + 1, 3*hugePage + 12345} {
		before := mapped(t)
		for range times {
			r, err := Map(n)
			require.NoError(t, err)
			if n >= hugePage {
				require.Zero(t, r.Addr%hugePage)
			}
			b := r.Span().Bytes()
			b[0], b[n-1] = 1, 2
			require.NoError(t, Unmap(r))
		}
		require.Less(t, mapped(t)-before, int64(times*hugePage/2))
	}
}

// mapped is how many bytes of addresses this process uses.
func mapped(t *testing.T) (n int64) {
	b, err := os.ReadFile("/proc/self/statm")
	require.NoError(t, err)
	_, err = fmt.Sscan(string(b), &n)
	require.NoError(t, err)
	return n * int64(os.Getpagesize())
}

func TestDevice(t *testing.T) {
	require.Equal(t, "cpu", CPU.String())
	require.Equal(t, "gpu 3", GPU(3).String())
	require.Equal(t, CPU, GPU(-1))
	require.Equal(t, 3, GPU(3).Index())
	require.Zero(t, CPU)
}
