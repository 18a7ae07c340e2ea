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

// TestRevokedCopyWritesNothing is for a sender that goes to sleep between its
// last look at the keys and its system call.
func TestRevokedCopyWritesNothing(t *testing.T) {
	a, b := pair(t, Direct, Direct)
	copy(a.out.Span().Bytes(), bytes.Repeat([]byte{1}, 1<<20))
	c := halfway(t, a, b, 1<<20)
	v := &a.f.vec
	done := make(chan error)
	go func() { done <- b.f.Deregister(b.key) }()
	until(t, func() bool { return c.revoked(v) })
	n, e := writeTo(c.peer.pid, v.local[:v.n], &c.mine.iov, v.m)
	require.Zero(t, e)
	require.Zero(t, n)
	select {
	case err := <-done:
		t.Fatalf("deregister did not wait for the copy: %v", err)
	default:
	}
	c.mine.busy.Add(1)
	require.NoError(t, <-done)
	require.Equal(t, make([]byte, 1<<20), b.in.Span().Bytes())

	// The sender tries again and learns that the key is gone.
	require.ErrorIs(t, a.down(t), errNoKey)
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
	done := make(chan error)
	go func() { done <- b.f.Deregister(other) }()
	until(t, func() bool { return c.revoked(&a.f.vec) })
	c.mine.busy.Add(1)
	require.NoError(t, <-done)
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
	require.NoError(t, b.conn.Close())
	require.False(t, c.valid(&a.f.vec))
	done := make(chan error)
	go func() { done <- b.f.Deregister(b.key) }()
	select {
	case err := <-done:
		t.Fatalf("deregister did not wait for the copy: %v", err)
	case <-time.After(20 * time.Millisecond):
	}
	c.mine.busy.Add(1)
	require.NoError(t, <-done)
	require.Error(t, a.down(t))
}

// TestSettleHasALimit is for a peer that runs, or says so, for ever.
func TestSettleHasALimit(t *testing.T) {
	a, b := pair(t, Direct, Direct)
	c := halfway(t, a, b, 1<<20)
	b.f.owner.Lock()
	all := b.f.busy()
	b.f.owner.Unlock()
	require.Len(t, all, 1)
	require.ErrorContains(t, settle(all, 10*time.Millisecond), "keep the memory mapped")
	c.mine.busy.Add(1)
	require.NoError(t, settle(all, time.Minute))
	b.f.owner.Lock()
	drop(all)
	b.f.owner.Unlock()
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
	start := time.Now()
	require.NoError(t, e.f.Deregister(e.key))
	require.NoError(t, e.f.Close())
	require.Less(t, time.Since(start), time.Second)
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
