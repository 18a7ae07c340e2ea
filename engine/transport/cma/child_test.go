package cma

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
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

// The tests with a second process start this binary once more. The child
// answers each frame of at least 16 bytes by what its first byte says:
//
//	e  writes the first so many bytes of its region, and sends the frame back
//	r  runs so many bare echoes, of as many bytes
//	s  turns to its other Fabric, if there are two
//
// It lives until its standard input closes.

const (
	childEnv = "CMA_TEST_CHILD" // the modes of its Fabrics: "1", or "12"
	pinEnv   = "CMA_TEST_PIN"
	childMax = 64 << 20
)

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) == "" {
		os.Exit(m.Run())
	}
	go func() {
		io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}()
	fmt.Fprintln(os.Stderr, "child:", child(os.Getenv(childEnv)))
	os.Exit(1)
}

// An end is one side of a Conn between the two processes. Its region holds
// what the peer writes; out is what it sends.
type end struct {
	f       *Fabric
	conn    transport.Conn
	in, out mem.Region
	key     transport.Key
	remote  transport.Key
	ev      [8]transport.Event
	ops     [2]transport.Op
	span    [1]mem.Span

	next, count int      // of ev: ev[next:count] came and has not been looked at
	kept        [][]byte // frames that came while post waited
	freed       int      // keys
	sleeps      bool     // waitFrame does, between polls
}

// here is where a Fabric listens that listens at all.
const here = "here"

func where(listen bool) string {
	if listen {
		return here
	}
	return ""
}

func newEnd(m Mode, listen bool, in, out mem.Region) (e *end, err error) {
	e = &end{in: in, out: out}
	if e.f, err = Open(Options{Options: link.Options{Listen: where(listen), Gate: transporttest.Gate{}}, Mode: m, NoPtracer: noPtracer}); err != nil {
		return nil, err
	}
	e.ops[0] = transport.Op{Kind: transport.OpWrite, Src: e.span[:]}
	e.ops[1] = transport.Op{Kind: transport.OpFrame}
	e.key, err = e.f.Register(in)
	return e, err
}

// poll goes through what came up to the next frame, and polls for more if there
// is nothing left.
func (e *end) poll() (frame []byte, err error) {
	if e.next == e.count {
		e.next = 0
		if e.count, err = e.f.Poll(e.ev[:]); err != nil {
			return nil, err
		}
	}
	for e.next < e.count && frame == nil && err == nil {
		switch ev := &e.ev[e.next]; ev.Kind {
		case transport.EvAccept:
			e.conn = ev.Conn
		case transport.EvFrame:
			frame = ev.Data
		case transport.EvFreed:
			e.freed++
		case transport.EvDown:
			err = ev.Err
		}
		e.next++
	}
	return frame, err
}

// waitFrame polls, and yields now and then if the processor is not its own.
func (e *end) waitFrame(yield bool) ([]byte, error) {
	if len(e.kept) > 0 {
		f := e.kept[0]
		e.kept = e.kept[1:]
		return f, nil
	}
	for i := 1; ; i++ {
		if f, err := e.poll(); f != nil || err != nil {
			return f, err
		}
		if e.sleeps {
			if which, err := transporttest.Woken(patience, e.f); len(which) == 0 {
				return nil, errors.Join(errors.New("nothing wakes a sleeper"), err)
			}
		} else if yield && i%64 == 0 {
			runtime.Gosched()
			syscall.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
		}
	}
}

// post writes n bytes, if any, and sends frame.
func (e *end) post(n uint64, frame []byte) error {
	e.span[0] = mem.Span{Addr: e.out.Addr, Len: n}
	e.ops[0].Key, e.ops[1].Frame = e.remote, frame
	ops := e.ops[:]
	if n == 0 {
		ops = ops[1:]
	}
	for {
		k, err := e.conn.Post(ops)
		if ops = ops[k:]; err != nil || len(ops) == 0 {
			return err
		}
		f, err := e.poll()
		if err != nil {
			return err
		}
		if f != nil {
			e.kept = append(e.kept, bytes.Clone(f))
		}
	}
}

// hello sends the key of e's region.
func (e *end) hello() error {
	b := binary.LittleEndian.AppendUint64(nil, e.key.ID)
	return e.post(0, binary.LittleEndian.AppendUint64(b, e.key.Token))
}

func (e *end) meet(f []byte) {
	e.remote = transport.Key{ID: binary.LittleEndian.Uint64(f), Token: binary.LittleEndian.Uint64(f[8:])}
}

func child(modes string) error {
	yield := true
	if nth, err := strconv.Atoi(os.Getenv(pinEnv)); err == nil {
		yield = false
		if err := pin(nth); err != nil {
			return err
		}
	}
	region, err := mem.Map(childMax)
	if err != nil {
		return err
	}
	bare, err := newBare(3, 1, region, region)
	if err != nil {
		return err
	}
	var ends []*end
	for _, m := range modes {
		e, err := newEnd(Mode(m-'0'), true, region, region)
		if err != nil {
			return err
		}
		ends = append(ends, e)
		fmt.Println(e.f.Addr())
	}
	for _, e := range ends {
		f, err := e.waitFrame(true)
		if err != nil {
			return err
		}
		e.meet(f)
		if err = e.hello(); err != nil {
			return err
		}
	}
	for at := 0; ; {
		e := ends[at]
		f, err := e.waitFrame(yield)
		if errors.Is(err, io.EOF) {
			select {} // until standard input ends
		}
		if err != nil {
			return err
		}
		n := binary.LittleEndian.Uint64(f[8:])
		switch f[0] {
		case 'e':
			err = e.post(n, f)
		case 'r':
			for range binary.LittleEndian.Uint32(f[4:]) {
				if bare.wait(); err == nil {
					err = bare.send(n)
				}
			}
		case 's':
			at = (at + 1) % len(ends)
		}
		if err != nil {
			return err
		}
	}
}

// command is a frame for the child.
func command(kind byte, count uint32, n uint64) []byte {
	b := make([]byte, 64)
	b[0] = kind
	binary.LittleEndian.PutUint32(b[4:], count)
	binary.LittleEndian.PutUint64(b[8:], n)
	return b
}

// childAttr is how the children are started; nil is as this process was.
var childAttr *syscall.SysProcAttr

// noPtracer is that of the Options of this process.
var noPtracer bool

// A family is this process and a child, with a Conn for each mode.
type family struct {
	child *exec.Cmd
	ends  []*end
	bare  *bare
}

func newFamily(tb testing.TB, modes, pinned string) *family {
	tb.Helper()
	in, err := mem.Map(childMax)
	require.NoError(tb, err)
	out, err := mem.Map(childMax)
	require.NoError(tb, err)
	for i, b := 0, out.Span().Bytes(); i < len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], uint64(i)*0x9E3779B97F4A7C15)
	}
	fd, err := unix.MemfdCreate("bare", unix.MFD_CLOEXEC)
	require.NoError(tb, err)
	require.NoError(tb, unix.Ftruncate(fd, bareSize))
	file := os.NewFile(uintptr(fd), "bare")
	fam := &family{}
	fam.bare, err = newBare(fd, 0, in, out)
	require.NoError(tb, err)

	fam.child = exec.Command("/proc/self/exe")
	fam.child.Env = append(os.Environ(), childEnv+"="+modes, pinEnv+"="+pinned)
	fam.child.Stderr = os.Stderr
	fam.child.ExtraFiles = []*os.File{file}
	fam.child.SysProcAttr = childAttr
	stdin, err := fam.child.StdinPipe()
	require.NoError(tb, err)
	stdout, err := fam.child.StdoutPipe()
	require.NoError(tb, err)
	require.NoError(tb, fam.child.Start())
	require.NoError(tb, file.Close())
	tb.Cleanup(func() {
		for _, e := range fam.ends {
			require.NoError(tb, e.f.Close())
		}
		stdin.Close()
		fam.child.Wait()
		require.NoError(tb, mem.Unmap(in))
		require.NoError(tb, mem.Unmap(out))
		require.NoError(tb, unix.Munmap(fam.bare.mem))
	})
	for _, m := range modes {
		e, err := newEnd(Mode(m-'0'), false, in, out)
		require.NoError(tb, err)
		fam.ends = append(fam.ends, e)
		var addr string
		_, err = fmt.Fscan(stdout, &addr)
		require.NoError(tb, err)
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		e.conn, err = e.f.Connect(ctx, transport.Addr(addr))
		cancel()
		require.NoError(tb, err)
		require.NoError(tb, e.hello())
	}
	for _, e := range fam.ends {
		f, err := e.waitFrame(true)
		require.NoError(tb, err)
		e.meet(f)
	}
	return fam
}

// pin binds the calling goroutine to the nth of the processors that it may
// use.
func pin(nth int) error {
	runtime.LockOSThread()
	var all, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &all); err != nil {
		return err
	}
	for cpu := 0; one.Count() == 0 && cpu < 1024; cpu++ {
		if all.IsSet(cpu) {
			if nth == 0 {
				one.Set(cpu)
			}
			nth--
		}
	}
	return unix.SchedSetaffinity(0, &one)
}

const patience = 30 * time.Second
