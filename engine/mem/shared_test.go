package mem

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestShared(t *testing.T) {
	freed := SharedFreed()
	a, err := NewShared(5000)
	require.NoError(t, err)
	b, err := NewShared(1)
	require.NoError(t, err)
	require.NotEqual(t, a.ID(), b.ID())
	require.Equal(t, uint64(8192), a.Region().Len)
	for _, s := range []*Shared{a, b} {
		r := s.Region()
		require.Same(t, s, SharedAt(r.Span()))
		require.Same(t, s, SharedAt(Span{r.Addr + uintptr(r.Len) - 1, 1}))
		require.Nil(t, SharedAt(Span{r.Addr, r.Len + 1}))
		require.Nil(t, SharedAt(Span{r.Addr - 1, 2}))
		require.Nil(t, SharedAt(Span{r.Addr, 0}))
	}
	own, err := Map(1)
	require.NoError(t, err)
	require.Nil(t, SharedAt(own.Span()))
	require.NoError(t, Unmap(own))
	require.NoError(t, FreeShared(a.ID()))
	require.ErrorContains(t, FreeShared(a.ID()), "no such memory")
	require.True(t, a.Freed())
	require.False(t, b.Freed())
	require.NoError(t, FreeShared(b.ID()))
	require.Equal(t, freed+2, SharedFreed())
	require.Nil(t, SharedAt(b.Region().Span()))
	for _, n := range []uint64{0, 1<<46 + 1} {
		_, err := NewShared(n)
		require.ErrorContains(t, err, "want 1 to 2^46")
	}
}

// TestView: a view sees what the owner writes, outlives it, and goes with the
// last who holds it.
func TestView(t *testing.T) {
	s, err := NewShared(5000)
	require.NoError(t, err)
	n, err := CheckSealed(s.FD(), Seals)
	require.NoError(t, err)
	require.Equal(t, uint64(8192), n)
	var tally Tally
	v, err := NewView(s.FD(), n, &tally)
	require.NoError(t, err)
	s.Region().Span().Bytes()[4999] = 7
	require.Equal(t, byte(7), v.Region().Span().Bytes()[4999])
	require.NoError(t, FreeShared(s.ID()))
	v.Hold()
	require.NoError(t, v.Drop())
	require.Equal(t, byte(7), v.Region().Span().Bytes()[4999])
	require.Zero(t, tally.Views.Load())
	require.NoError(t, v.Drop())
	require.Equal(t, []uint64{1, 8192}, []uint64{tally.Views.Load(), tally.Bytes.Load()})
}

// TestCheckSealed refuses what could fail under a reader.
func TestCheckSealed(t *testing.T) {
	file, err := os.CreateTemp(t.TempDir(), "")
	require.NoError(t, err)
	defer file.Close()
	_, err = CheckSealed(int(file.Fd()), Seals)
	require.Error(t, err)
	for _, c := range []struct {
		size  int64
		seals int
		want  string
	}{
		{4096, 0, "could shrink"},
		{4096, unix.F_SEAL_GROW, "could shrink"},
		{4096, unix.F_SEAL_GROW | unix.F_SEAL_SHRINK, "could shrink"},
		{0, Seals, "0 bytes"},
	} {
		fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
		require.NoError(t, err)
		require.NoError(t, unix.Ftruncate(fd, c.size))
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, c.seals)
		require.NoError(t, err)
		_, err = CheckSealed(fd, Seals)
		require.ErrorContains(t, err, c.want)
		require.NoError(t, unix.Close(fd))
	}
}

// TestStrict: where the kernel counts what it promises, shared memory has its pages from the start, and else it has none.
func TestStrict(t *testing.T) {
	before := strict
	defer func() { strict = before }()
	for _, on := range []bool{true, false} {
		strict = func() bool { return on }
		const n = claimPiece + 3*4096
		s, err := NewShared(n)
		require.NoError(t, err)
		var st unix.Stat_t
		require.NoError(t, unix.Fstat(s.FD(), &st))
		require.Equal(t, map[bool]int64{true: n / 512, false: 0}[on], st.Blocks)
		require.NoError(t, FreeShared(s.ID()))
	}
	require.ErrorContains(t, claim(-1, 1), "take its pages")
}
