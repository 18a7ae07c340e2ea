package cma

import (
	"io"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"fserver/engine/mem"
	"fserver/engine/transport"
)

// memfd is shared memory as a peer might pass it.
func memfd(t *testing.T, size int64, seals int) int {
	t.Helper()
	fd, err := unix.MemfdCreate("fserver-test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	require.NoError(t, err)
	t.Cleanup(func() { unix.Close(fd) })
	require.NoError(t, unix.Ftruncate(fd, size))
	_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
	require.NoError(t, err)
	return fd
}

const lendSeals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

// TestBrokenLoans lends and passes what no peer of ours does. Each ends its own
// Conn, and leaves nothing mapped.
func TestBrokenLoans(t *testing.T) {
	eachMode(t, func(t *testing.T, m Mode) {
		const size = 8192
		good := memfd(t, size, lendSeals)
		for _, c := range []struct {
			name string
			fds  []int // passed first
			do   func(e *end)
			want string
		}{
			{"never passed", nil, func(e *end) { e.inject(recLent, 1, 0, 0, 8, 0) }, "shared memory 1 of 0"},
			{"number zero", []int{good}, func(e *end) { e.inject(recLent, 0, 0, 0, 8, 0) }, "shared memory 0 of "},
			{"number of all ones", []int{good}, func(e *end) { e.inject(recLent, ^uint64(0), 0, 0, 8, 0) }, "of 1"},
			{"next number", []int{good}, func(e *end) { e.inject(recLent, 2, 0, 0, 8, 0) }, "shared memory 2 of 1"},
			{"behind the end", []int{good}, func(e *end) { e.inject(recLent, 1, 0, size, 1, 0) }, "out of bounds"},
			{"over the end", []int{good}, func(e *end) { e.inject(recLent, 1, 0, size-7, 8, 0) }, "out of bounds"},
			{"far away", []int{good}, func(e *end) { e.inject(recLent, 1, 0, ^uint64(0), 8, 0) }, "out of bounds"},
			{"length of all ones", []int{good}, func(e *end) { e.inject(recLent, 1, 0, 1, ^uint64(0), 0) }, "out of bounds"},
			{"no bytes", []int{good}, func(e *end) { e.inject(recLent, 1, 0, 1, 0, 0) }, "loan of 0 bytes"},
			{"with bytes", []int{good}, func(e *end) { e.inject(makeWord(recLent, 8, 0), 1, 0, 0, 8, 0, 0) }, "with 8 bytes"},
			{"freed", []int{good}, func(e *end) { e.inject(recFreed, 1); e.inject(recLent, 1, 0, 0, 8, 0) }, "has freed"},
			{"freed twice", []int{good}, func(e *end) { e.inject(recFreed, 1); e.inject(recFreed, 1) }, "has freed"},
			{"freed, never passed", nil, func(e *end) { e.inject(recFreed, 1) }, "has not passed"},
			{"in a frame", []int{good}, func(e *end) { e.inject(makeWord(recFrame, 8, 16), 0); e.inject(recLent, 1, 0, 0, 8, 0) }, "not allowed at this place"},
			{"can shrink", []int{memfd(t, size, unix.F_SEAL_GROW|unix.F_SEAL_SEAL)}, func(e *end) { e.inject(recLent, 1, 0, 0, 8, 0) }, "could shrink"},
			{"seals can be added", []int{memfd(t, size, unix.F_SEAL_GROW|unix.F_SEAL_SHRINK)}, func(*end) {}, "want"},
			{"no memory", []int{memfd(t, 0, lendSeals)}, func(*end) {}, "0 bytes"},
			{"too much memory", []int{memfd(t, 1<<41, lendSeals)}, func(*end) {}, "passed 2199023255552 more bytes"},
			{"too much memory together", []int{memfd(t, 1<<39, lendSeals), memfd(t, 1<<39, lendSeals), good}, func(*end) {}, "after 2 pieces"},
			{"a socket", []int{-1}, func(*end) {}, "not shared memory"},
			{"two at once", []int{-2}, func(*end) {}, "something other than one descriptor"},
		} {
			t.Run(c.name, func(t *testing.T) {
				noLeaks(t)
				evil, victim := pair(t, m, m)
				conn := evil.conn.(*Conn)
				for _, fd := range c.fds {
					switch fd {
					case -1:
						fd = conn.FD
					case -2:
						require.NoError(t, unix.Sendmsg(conn.FD, []byte{0}, unix.UnixRights(good, good), nil, 0))
						continue
					}
					require.NoError(t, passFD(conn.FD, fd))
				}
				c.do(evil)
				var err error
				until(t, func() bool { _, err = victim.poll(); return err != nil })
				require.NotErrorIs(t, err, io.EOF)
				require.ErrorContains(t, err, c.want)
				require.Empty(t, victim.conn.(*Conn).rx.mapped)
			})
		}
	})
}

// TestTooManyViews passes descriptors beyond what a side takes.
func TestTooManyViews(t *testing.T) {
	noLeaks(t)
	evil, victim := pair(t, Direct, Direct)
	fd := memfd(t, 4096, lendSeals)
	var err error
	sent := 0
	until(t, func() bool {
		for passFD(evil.conn.(*Conn).FD, fd) == nil {
			sent++
		}
		victim.f.Arm()
		_, err = victim.poll()
		return err != nil
	})
	require.ErrorContains(t, err, "at most 1024 pieces of ")
	require.Greater(t, sent, maxViews)
}

// TestLendsUpToTheBound: beyond what the peer takes, Lends says no, and yes
// again when the peer has unmapped something.
func TestLendsUpToTheBound(t *testing.T) {
	a, b := pair(t, Direct, Direct)
	c := a.conn.(*Conn)
	c.tx.shown.pieces = maxViews - 2
	b.conn.(*Conn).rx.had.pieces = maxViews - 2
	b.conn.(*Conn).rx.mapped, b.conn.(*Conn).rx.tally = map[uint64]*mem.View{}, new(mem.Tally)
	all := make([]*mem.Shared, 3)
	var spans [3]mem.Span
	for i := range all {
		var err error
		all[i], err = mem.NewShared(4096)
		require.NoError(t, err)
		spans[i] = all[i].Region().Span()
	}
	t.Cleanup(func() {
		require.NoError(t, mem.FreeShared(all[1].ID()))
		require.NoError(t, mem.FreeShared(all[2].ID()))
	})
	require.True(t, c.Lends(spans[0]))
	require.True(t, c.Lends(spans[1]))
	require.False(t, c.Lends(spans[2]))
	require.True(t, c.Lends(spans[0]), "what the peer has goes on")
	require.NoError(t, mem.FreeShared(all[0].ID()))
	until(t, func() bool {
		for _, e := range []*end{a, b} {
			_, err := e.poll()
			require.NoError(t, err)
		}
		return c.Lends(spans[2])
	})
	n, err := c.Post([]transport.Op{{Kind: transport.OpLend, Src: spans[2:]}})
	require.NoError(t, err)
	require.Equal(t, 1, n)
	until(t, func() bool {
		_, err := b.poll()
		require.NoError(t, err)
		return len(b.conn.(*Conn).rx.mapped) == 2
	})
	for i := range b.ev[:b.count] {
		if v := b.ev[i].View; v != nil {
			require.NoError(t, v.Drop())
		}
	}

	c.tx.shown = amount{1, maxViewBytes}
	c.theirs.views.Store(1)
	c.theirs.viewBytes.Store(^uint64(0)) // more than ever went: believed to our own cost alone
	other, err := mem.NewShared(1)
	require.NoError(t, err)
	require.False(t, c.Lends(other.Region().Span()))
	require.NoError(t, mem.FreeShared(other.ID()))
}
