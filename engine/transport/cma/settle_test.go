package cma

import (
	"bytes"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// halfway brings a to just before the system call of a copy into b.
func halfway(t *testing.T, a, b *end, n uint64) *Conn {
	t.Helper()
	c := a.conn.(*Conn)
	taken, err := c.tx.push(&transport.Op{Kind: transport.OpWrite, Key: b.key, Src: []mem.Span{{Addr: a.out.Addr, Len: n}}})
	require.True(t, taken)
	require.NoError(t, err)
	_, _, err = c.gather(&a.f.vec, quantum)
	require.NoError(t, err)
	c.mine.busy.Add(1)
	require.True(t, c.valid(&a.f.vec))
	return c
}

// frees polls until EvFreed has come; false: not within limit.
func (e *end) frees(t *testing.T, limit time.Duration) bool {
	t.Helper()
	for end := time.Now().Add(limit); e.freed == 0 && time.Now().Before(end); {
		_, err := e.poll()
		require.NoError(t, err)
	}
	return e.freed > 0
}

// TestRevokedCopyWritesNothing is for a sender that goes to sleep between its
// last look at the keys and its system call.
func TestRevokedCopyWritesNothing(t *testing.T) {
	a, b := pair(t, Direct, Direct)
	copy(a.out.Span().Bytes(), bytes.Repeat([]byte{1}, 1<<20))
	c := halfway(t, a, b, 1<<20)
	v := &a.f.vec
	b.f.Deregister(b.key)
	require.True(t, c.revoked(v))
	n, e := writeTo(c.peer.pid, v.local[:v.n], &c.mine.iov, v.m)
	require.Zero(t, e)
	require.Zero(t, n)
	require.False(t, b.frees(t, 10*time.Millisecond), "while a copy is under way")
	c.mine.busy.Add(1)
	require.True(t, b.frees(t, time.Minute))
	require.Equal(t, make([]byte, 1<<20), b.in.Span().Bytes())

	// The sender tries again and learns that the key is gone, behind what had come before that.
	require.NoError(t, b.post(0, []byte("why")))
	f, err := a.waitFrame(true)
	require.NoError(t, err)
	require.Equal(t, "why", string(f))
	require.ErrorIs(t, a.down(t), link.ErrNoKey)
	require.Error(t, b.down(t))
}

// TestRevokedCopyIsDoneAgain takes the lengths of a copy for another key's
// sake.
func TestRevokedCopyIsDoneAgain(t *testing.T) {
	a, b := pair(t, Direct, Direct)
	copy(a.out.Span().Bytes(), bytes.Repeat([]byte{1}, 1<<20))
	other, err := b.f.Register(b.out)
	require.NoError(t, err)
	c := halfway(t, a, b, 1<<20)
	b.f.Deregister(other)
	require.True(t, c.revoked(&a.f.vec))
	c.mine.busy.Add(1)
	require.True(t, b.frees(t, time.Minute))
	require.NoError(t, a.post(0, []byte("behind it")))
	until(t, func() bool {
		_, errA := a.poll()
		f, errB := b.poll()
		require.NoError(t, errA)
		require.NoError(t, errB)
		return f != nil
	})
	require.Equal(t, a.out.Span().Bytes(), b.in.Span().Bytes())
}

// TestEndedConnIsWaitedFor ends the receiving Conn in the middle of a copy, and
// then takes the key away.
func TestEndedConnIsWaitedFor(t *testing.T) {
	noLeaks(t)
	a, b := pair(t, Direct, Direct)
	c := halfway(t, a, b, 1<<20)
	b.conn.Close()
	require.False(t, c.valid(&a.f.vec))
	b.f.Deregister(b.key)
	require.False(t, b.frees(t, 20*time.Millisecond), "while a copy is under way")
	c.mine.busy.Add(1)
	require.True(t, b.frees(t, time.Minute))
	require.Error(t, a.down(t))
}

// TestCloseHasALimit is for a peer that runs, or says so, for ever: the Conn has no end, and Close
// says so in time.
func TestCloseHasALimit(t *testing.T) {
	a, b := pair(t, Direct, Direct)
	c := halfway(t, a, b, 1<<20)
	b.conn.Close()
	closing := make(chan struct{})
	close(closing)
	last := b.conn.(*Conn).last
	require.ErrorContains(t, await([]writer{last}, closing, 10*time.Millisecond), "keep the memory mapped")
	for range 100 {
		n, err := b.f.Poll(make([]transport.Event, 4))
		require.NoError(t, err)
		require.Zero(t, n, "EvClosed")
	}
	c.mine.busy.Add(1)
	require.NoError(t, await([]writer{last}, nil, settleLimit))
}

// TestStoppedWriter stops a child, which looks as if it were in the middle of a
// copy. It cannot go on with it, so nobody waits for it.
func TestStoppedWriter(t *testing.T) {
	fam := newFamily(t, Direct.digit(), "")
	e := fam.ends[0]
	e.echo(t, 1<<20)
	require.NoError(t, fam.child.Process.Signal(syscall.SIGSTOP))
	defer fam.child.Process.Signal(syscall.SIGCONT)
	c := e.conn.(*Conn)
	c.theirs.busy.Add(1)
	e.f.Deregister(e.key)
	require.True(t, e.frees(t, 20*time.Second))
	require.NoError(t, e.f.Close(), "it fails when it has waited for settleLimit")
}

func TestQuiet(t *testing.T) {
	child := exec.Command("sleep", "100")
	require.NoError(t, child.Start())
	pid := child.Process.Pid
	p, err := findProcess(pid)
	require.NoError(t, err)
	until(t, p.quiet) // it sleeps
	require.False(t, p.dead())
	self, err := findProcess(unix.Getpid())
	require.NoError(t, err)
	require.False(t, self.quiet())
	require.True(t, process{unix.Getpid(), "0"}.quiet(), "a process of the same number that began at another time")
	require.True(t, process{unix.Getpid(), "0"}.dead())
	require.NoError(t, child.Process.Kill())
	until(t, p.dead) // nobody has waited for it
	require.Error(t, child.Wait())
	require.True(t, p.quiet() && p.dead())
}

// TestForeignProc is in a PID namespace whose numbers are those of others in /proc.
func TestForeignProc(t *testing.T) {
	const inside = "CMA_TEST_FOREIGN"
	if os.Getenv(inside) != "" {
		_, err := findProcess(os.Getpid())
		require.ErrorContains(t, err, "/proc belongs to another PID namespace")
		return
	}
	attr := &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID}
	if none := (&exec.Cmd{Path: "/proc/self/exe", Args: []string{"", "-test.run=^$"}, SysProcAttr: attr}).Run(); none != nil {
		t.Skipf("this user can make no PID namespace: %v", none)
	}
	c := exec.Cmd{Path: "/proc/self/exe", Args: []string{"", "-test.run=^TestForeignProc$"}, Env: append(os.Environ(), inside+"=1"), SysProcAttr: attr}
	out, err := c.CombinedOutput()
	require.NoError(t, err, "%s", out)
}
