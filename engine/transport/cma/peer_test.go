package cma

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
	"fserver/engine/transport/transporttest"
)

// noLeaks is called before anything is opened: at the end of the test no
// goroutine, descriptor or mapping may be left.
func noLeaks(t *testing.T) {
	t.Helper()
	held := func() (files, maps int) {
		e, err := os.ReadDir("/proc/self/fd")
		require.NoError(t, err)
		b, err := os.ReadFile("/proc/self/maps")
		require.NoError(t, err)
		return len(e), bytes.Count(b, []byte("memfd:"))
	}
	r, w, err := os.Pipe() // starts the runtime's poller
	require.NoError(t, err)
	r.Close()
	w.Close()
	routines := runtime.NumGoroutine()
	files, maps := held()
	t.Cleanup(func() {
		for end := time.Now().Add(patience); runtime.NumGoroutine() > routines && time.Now().Before(end); {
			time.Sleep(time.Millisecond)
		}
		require.LessOrEqual(t, runtime.NumGoroutine(), routines)
		f, m := held()
		require.Equal(t, files, f, "descriptors")
		require.Equal(t, maps, m, "shared memory")
	})
}

func open(t *testing.T, o Options) *Fabric {
	t.Helper()
	if o.Gate == nil {
		o.Gate = transporttest.Gate{}
	}
	f, err := Open(o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, f.Close()) })
	return f
}

// pair is two ends in this process.
func pair(t *testing.T, dialer, acceptor Mode) (a, b *end) {
	t.Helper()
	a, b = &end{f: open(t, Options{Mode: dialer})}, &end{f: open(t, Options{Options: link.Options{Listen: here}, Mode: acceptor})}
	join(t, a, b)
	a.equip(t)
	b.equip(t)
	a.remote, b.remote = b.key, a.key
	return a, b
}

// equip gives e its memory.
func (e *end) equip(t *testing.T) {
	t.Helper()
	var err error
	e.in, err = mem.Map(1 << 20)
	require.NoError(t, err)
	e.out, err = mem.Map(1 << 20)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, errors.Join(mem.Unmap(e.in), mem.Unmap(e.out))) })
	e.key, err = e.f.Register(e.in)
	require.NoError(t, err)
	e.ops[0] = transport.Op{Kind: transport.OpWrite, Src: e.span[:]}
	e.ops[1] = transport.Op{Kind: transport.OpFrame}
}

// join connects a to b, which uses that Conn from now on.
func join(t *testing.T, a, b *end) {
	t.Helper()
	b.conn = nil
	var err error
	a.conn, err = a.f.Connect(context.Background(), b.f.Addr())
	require.NoError(t, err)
	until(t, func() bool {
		_, err := b.poll()
		require.NoError(t, err)
		return b.conn != nil
	})
}

func until(t *testing.T, cond func() bool) {
	t.Helper()
	looks := 0
	for end := time.Now().Add(patience); !cond(); looks++ {
		require.True(t, time.Now().Before(end), "did not happen within %v", patience)
		transporttest.Rest(looks)
	}
}

// down polls e until its Conn is down.
func (e *end) down(t *testing.T) (err error) {
	t.Helper()
	until(t, func() bool { _, err = e.poll(); return err != nil })
	return err
}

// echo has the child send n bytes back, and checks them.
func (e *end) echo(t *testing.T, n uint64) {
	t.Helper()
	in, out := e.in.Span().Bytes()[:n], e.out.Span().Bytes()[:n]
	clear(in)
	require.NoError(t, e.post(n, command('e', 0, n)))
	f, err := e.waitFrame(true)
	require.NoError(t, err)
	require.Equal(t, command('e', 0, n), f)
	require.True(t, bytes.Equal(in, out), "%d bytes came back changed", n)
}

func eachMode(t *testing.T, run func(t *testing.T, m Mode)) {
	t.Run("direct", func(t *testing.T) { run(t, Direct) })
	t.Run("staged", func(t *testing.T) { run(t, Staged) })
}

func (m Mode) digit() string { return string(rune('0' + m)) }

func TestSecondProcess(t *testing.T) {
	eachMode(t, func(t *testing.T, m Mode) {
		noLeaks(t)
		e := newFamily(t, m.digit(), "").ends[0]
		for range 3 {
			for _, n := range []uint64{0, 1, 4096, small, small + 1, 100_003, 1 << 20, 5<<20 + 7} {
				e.echo(t, n)
			}
		}
		e.sleeps = true
		for range 50 {
			e.echo(t, 4096)
			e.echo(t, 1<<20)
		}
	})
}

// TestKilledProcess kills the child in the middle of everything. Whoever spins
// and whoever sleeps hears of it.
func TestKilledProcess(t *testing.T) {
	eachMode(t, func(t *testing.T, m Mode) {
		for _, asleep := range []bool{false, true} {
			noLeaks(t)
			fam := newFamily(t, m.digit(), "")
			e := fam.ends[0]
			e.echo(t, 1<<20)
			require.NoError(t, e.post(childMax, command('e', 0, childMax)))
			start := time.Now()
			require.NoError(t, fam.child.Process.Kill())
			var err error
			for err == nil {
				require.Less(t, time.Since(start), 20*time.Second)
				if asleep {
					_, bad := transporttest.Woken(time.Second, e.f)
					require.NoError(t, bad)
				}
				_, err = e.poll()
			}
			require.NotErrorIs(t, err, io.EOF)
			require.NotErrorIs(t, err, transport.ErrClosed)
		}
	})
}

// TestLastWords: a copy that finds that the peer's process is gone ends the Conn, but not before the frames that it has sent
// are given.
func TestLastWords(t *testing.T) {
	noLeaks(t)
	evil, victim := pair(t, Direct, Direct)
	words := strings.Repeat("last words", framePiece/5) // of several pieces
	require.NoError(t, evil.post(0, []byte("first words")))
	require.NoError(t, evil.post(0, []byte(words)))
	dead := exec.Command("true")
	require.NoError(t, dead.Run())
	victim.conn.(*Conn).peer.pid = dead.Process.Pid
	write := transport.Op{Kind: transport.OpWrite, Key: victim.remote, Src: []mem.Span{victim.out.Span()}}
	n, err := victim.conn.Post([]transport.Op{write})
	require.NoError(t, err)
	require.Equal(t, 1, n)
	for _, want := range []string{"first words", words} {
		f, err := victim.waitFrame(true)
		require.NoError(t, err)
		require.Equal(t, want, string(f))
	}
	require.ErrorIs(t, victim.down(t), io.ErrUnexpectedEOF)
}

// TestStoppedProcess stops the child, posts until there is no room, and lets
// it go on.
func TestStoppedProcess(t *testing.T) {
	eachMode(t, func(t *testing.T, m Mode) {
		fam := newFamily(t, m.digit(), "")
		e := fam.ends[0]
		e.echo(t, 4096)
		require.NoError(t, fam.child.Process.Signal(syscall.SIGSTOP))
		until(t, func() bool { return e.conn.(*Conn).peer.quiet() || m == Staged })
		frame := command('e', 0, 0)
		posted := 0
		for refused := 0; refused < 100; {
			n, err := e.conn.Post([]transport.Op{{Kind: transport.OpFrame, Frame: frame}})
			require.NoError(t, err)
			posted += n
			refused += 1 - n
			f, err := e.poll()
			require.NoError(t, err)
			if f != nil { // it was not stopped yet
				posted--
			}
		}
		require.Positive(t, posted)
		require.NoError(t, fam.child.Process.Signal(syscall.SIGCONT))
		for range posted {
			f, err := e.waitFrame(true)
			require.NoError(t, err)
			require.Equal(t, frame, f)
		}
		e.echo(t, 1<<20)
	})
}

// TestOtherUser has a child that another user runs, into which this process may
// write, but which may not write into this one.
func TestOtherUser(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root can start a process as another user")
	}
	childAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	defer func() { childAttr = nil }()
	e := newFamily(t, Auto.digit(), "").ends[0]
	c := e.conn.(*Conn)
	require.Equal(t, "cma/staged", c.Peer().Via)
	require.Contains(t, c.Peer().Why, "operation not permitted")
	require.Contains(t, c.Peer().Why, "same user")
	require.Contains(t, c.Peer().Remote, "of user 65534")
	e.echo(t, 1<<20)
}

// TestOtherPIDNamespace has a child to which this process has no number.
func TestOtherPIDNamespace(t *testing.T) {
	childAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID}
	defer func() { childAttr = nil }()
	if none := (&exec.Cmd{Path: "/proc/self/exe", Args: []string{"", "-test.run=^$"}, SysProcAttr: childAttr}).Run(); none != nil {
		t.Skipf("this user can make no PID namespace: %v", none)
	}
	e := newFamily(t, Auto.digit(), "").ends[0]
	c := e.conn.(*Conn)
	require.Equal(t, "cma/staged", c.Peer().Via)
	require.Contains(t, c.Peer().Why, "cannot write into this process: process_vm_writev: no such process")
	require.Contains(t, c.Peer().Why, "share a PID namespace")
	e.echo(t, 1<<20)
}

// TestYama has a child into which this process may write, as its parent, and which
// may write into this one if that says so. Few kernels at hand have Yama on, and
// root is above it: setpriv --reuid 65534 --clear-groups, kernel.yama.ptrace_scope
// at 1, 2 and 3.
func TestYama(t *testing.T) {
	b, err := os.ReadFile("/proc/sys/kernel/yama/ptrace_scope")
	scope := strings.TrimSpace(string(b))
	if err != nil || scope == "0" {
		t.Skipf("this kernel's Yama refuses nothing: kernel.yama.ptrace_scope is %q (%v)", scope, err)
	}
	if os.Getuid() == 0 {
		t.Skip("Yama refuses root nothing")
	}
	defer func() { noPtracer = false }()
	for _, noPtracer = range []bool{true, false} {
		require.NoError(t, unix.Prctl(unix.PR_SET_PTRACER, 0, 0, 0, 0)) // of other tests
		e := newFamily(t, Auto.digit(), "").ends[0]
		c := e.conn.(*Conn)
		if scope == "1" && !noPtracer {
			require.Equal(t, "cma", c.Peer().Via)
		} else {
			require.Equal(t, "cma/staged", c.Peer().Via)
			require.Contains(t, c.Peer().Why, "operation not permitted")
			remedy := "set kernel.yama.ptrace_scope to 0 or 1"
			if scope == "1" {
				remedy = "leave PR_SET_PTRACER on"
			}
			require.Contains(t, c.Peer().Why, remedy)
		}
		e.echo(t, 1<<20)
	}
}

// TestRefusedByTheKernel lets the kernel refuse the calls that copy, as Yama
// (both), a sandbox (either) and PID namespaces (both) do.
func TestRefusedByTheKernel(t *testing.T) {
	for _, c := range []struct {
		errno          unix.Errno
		reason, remedy string
	}{
		{unix.EPERM, "process_vm_writev: operation not permitted", "user"},
		{unix.ENOSYS, "process_vm_writev: function not implemented", "CONFIG_CROSS_MEMORY_ATTACH"},
		{unix.ESRCH, "process_vm_writev: no such process", "share a PID namespace"},
	} {
		for _, call := range []uint32{unix.SYS_PROCESS_VM_READV, unix.SYS_PROCESS_VM_WRITEV} {
			noLeaks(t)
			refuse := func(do func()) {
				transporttest.Refused(t, call, uint32(unix.Getpid()), c.errno, do)
			}
			unavailable := func(err error) {
				var no *transport.ErrUnavailable
				require.ErrorAs(t, err, &no)
				require.Equal(t, "cma", no.Transport)
				require.Contains(t, no.Reason, "this process cannot write into ")
				require.Contains(t, no.Reason, c.reason)
				require.Contains(t, no.Remedy, c.remedy)
			}
			var err error
			refuse(func() { _, err = Open(Options{Options: link.Options{Gate: transporttest.Gate{}}, Mode: Direct}) })
			unavailable(err)

			// The dialer's calls fail, the acceptor's do not.
			var refusals refusals
			for _, modes := range [][2]Mode{{Direct, Auto}, {Auto, Direct}, {Direct, Direct}} {
				a := open(t, Options{Mode: modes[0]})
				b := open(t, Options{Options: link.Options{Listen: here, Refused: refusals.add}, Mode: modes[1]})
				refuse(func() { _, err = a.Connect(context.Background(), b.Addr()) })
				unavailable(err)
				until(t, func() bool { return refusals.count() > 0 })
				require.ErrorContains(t, refusals.all[0], "cannot write into this process: "+c.reason)
				refusals.all = nil
			}

			a, b := &end{f: open(t, Options{})}, &end{f: open(t, Options{Options: link.Options{Listen: here}})}
			refuse(func() { a.conn, err = a.f.Connect(context.Background(), b.f.Addr()) })
			require.NoError(t, err)
			until(t, func() bool { _, err = b.poll(); return b.conn != nil })
			require.NoError(t, err)
			for _, e := range []*end{a, b} {
				require.Equal(t, "cma/staged", e.conn.(*Conn).Peer().Via)
				require.Contains(t, e.conn.(*Conn).Peer().Why, c.reason+" (")
				require.Contains(t, e.conn.(*Conn).Peer().Why, c.remedy)
			}
			a.equip(t)
			b.equip(t)
			a.remote = b.key
			copy(a.out.Span().Bytes(), bytes.Repeat([]byte{1}, 1<<20))
			require.NoError(t, a.post(1<<20, []byte("written")))
			until(t, func() bool {
				_, errA := a.poll()
				f, errB := b.poll()
				require.NoError(t, errors.Join(errA, errB))
				return f != nil
			})
			require.Equal(t, a.out.Span().Bytes(), b.in.Span().Bytes())
		}
	}
}

func TestModes(t *testing.T) {
	for _, c := range []struct {
		dialer, acceptor Mode
		via              string
	}{
		{Auto, Auto, "cma"},
		{Direct, Auto, "cma"},
		{Auto, Direct, "cma"},
		{Auto, Staged, "cma/staged"},
		{Staged, Auto, "cma/staged"},
		{Direct, Staged, ""},
		{Staged, Direct, ""},
	} {
		t.Run(fmt.Sprintf("%d to %d", c.dialer, c.acceptor), func(t *testing.T) {
			noLeaks(t)
			var refusals refusals
			a := &end{f: open(t, Options{Mode: c.dialer})}
			b := &end{f: open(t, Options{Options: link.Options{Listen: here, Refused: refusals.add}, Mode: c.acceptor})}
			if c.via != "" {
				join(t, a, b)
				for _, conn := range []transport.Conn{a.conn, b.conn} {
					require.Equal(t, c.via, conn.(*Conn).Peer().Via)
					require.Equal(t, c.via == "cma", conn.(*Conn).Peer().Why == "")
				}
				return
			}
			_, err := a.f.Connect(context.Background(), b.f.Addr())
			var no *transport.ErrUnavailable
			require.ErrorAs(t, err, &no)
			require.Contains(t, no.Reason, "staging")
			until(t, func() bool { return refusals.count() > 0 })
		})
	}
}

// refusals are what Options.Refused was told.
type refusals struct {
	mu  sync.Mutex
	all []error
}

func (r *refusals) add(_ string, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all = append(r.all, err)
}

func (r *refusals) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.all)
}

func TestAddresses(t *testing.T) {
	f := open(t, Options{Options: link.Options{Listen: here}})
	here := string(f.Addr())
	require.NoError(t, f.Reaches(f.Addr()))
	name := here[strings.LastIndexByte(here, '/')+1:]
	for _, a := range []string{
		"cma:0123456789abcdef/" + name, "cma:" + f.host + "/", "cma:" + f.host, "cma:" + f.host + "/" + name + "00",
		"cma:" + f.host + "/" + strings.Replace(name, prefix, "other-", 1), "tcp:127.0.0.1:1",
	} {
		require.Error(t, f.Reaches(transport.Addr(a)), a)
	}
	require.ErrorContains(t, f.Reaches(transport.Addr("cma:0123456789abcdef-0123456789abcdef/"+name)), "different hosts")
	boot, _, _ := strings.Cut(f.host, "-")
	require.ErrorContains(t, f.Reaches(transport.Addr("cma:"+boot+"-0123456789abcdef/"+name)), "different network namespaces")
	b, err := os.ReadFile("/proc/net/unix")
	require.NoError(t, err)
	require.Contains(t, string(b), "@"+name, "the socket is not an abstract one")
}

func TestRegionTable(t *testing.T) {
	f := open(t, Options{})
	r, err := mem.Map(4096)
	require.NoError(t, err)
	defer mem.Unmap(r)
	_, err = f.Register(mem.Region{Addr: r.Addr, Len: 1, Dev: mem.GPU(0)})
	require.ErrorContains(t, err, "gpu 0")
	_, err = f.Register(mem.Region{Addr: ^uintptr(0), Len: 2, Dev: mem.CPU})
	require.ErrorContains(t, err, "not a range")
	// A slot that is used again has another number, and what the old key
	// opened is closed.
	old, err := f.Register(r)
	require.NoError(t, err)
	f.Deregister(old)
	k, err := f.Register(r)
	require.NoError(t, err)
	require.Equal(t, old.ID%link.SlotLimit, k.ID%link.SlotLimit)
	_, err = table(f.Shared).target(old.ID, old.Token, 0, 1)
	require.ErrorIs(t, err, link.ErrNoKey)
	_, err = table(f.Shared).target(0, 0, 0, 0)
	require.ErrorIs(t, err, link.ErrNoKey)
	s, err := table(f.Shared).target(k.ID, k.Token, 4000, 96)
	require.NoError(t, err)
	require.Equal(t, mem.Span{Addr: r.Addr + 4000, Len: 96}, s)
	_, err = table(f.Shared).target(k.ID, k.Token, 4000, 97)
	require.Error(t, err)
}

// TestNoAllocationWithManyConns is for peers that take turns, with writes that
// take the system call.
func TestNoAllocationWithManyConns(t *testing.T) {
	if transporttest.RaceEnabled {
		t.Skip("the race detector allocates")
	}
	a, b := pair(t, Direct, Direct)
	conns := []transport.Conn{a.conn}
	for range 9 {
		join(t, a, b)
		conns = append(conns, a.conn)
	}
	ops := []transport.Op{
		{Kind: transport.OpWrite, Key: b.key, Src: []mem.Span{{Addr: a.out.Addr, Len: 2 * small}}},
		{Kind: transport.OpWrite, Key: b.key, Src: []mem.Span{{Addr: a.out.Addr, Len: small}}},
		{Kind: transport.OpFrame, Frame: make([]byte, 64)},
	}
	count := func(f *Fabric) int {
		n, err := f.Poll(a.ev[:])
		if err != nil {
			t.Error(err)
		}
		return n
	}
	i := 0
	require.Zero(t, testing.AllocsPerRun(1000, func() {
		i++
		if n, err := conns[i%len(conns)].Post(ops); n != len(ops) || err != nil {
			t.Error(n, err)
		}
		for ended, came := 0, 0; ended < len(ops) || came < 1; {
			ended += count(a.f)
			came += count(b.f)
		}
	}))
}

// TestOwnerNeverWaits polls and posts while another goroutine is the owner.
func TestOwnerNeverWaits(t *testing.T) {
	a, _ := pair(t, Direct, Direct)
	a.f.Owner.Lock()
	n, err := a.f.Poll(a.ev[:])
	require.Zero(t, n)
	require.NoError(t, err)
	n, err = a.conn.Post([]transport.Op{{Kind: transport.OpFrame}})
	require.Zero(t, n)
	require.NoError(t, err)
	a.f.Owner.Unlock()

	// The back-pressure is over, which whoever goes to sleep now must hear.
	require.True(t, a.f.Arm())
	_, err = a.poll()
	require.NoError(t, err)
	require.False(t, a.f.Arm())
}
