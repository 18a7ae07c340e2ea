package tcp

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
	"fserver/engine/transport/transporttest"
)

// The benchmark bounces a write and a frame between this process and a child,
// each on a processor of its own, both spinning. In turns with it, the same goes
// over TLS, and the same count of bytes bounces between the same two threads
// through bare system calls. On a machine with other work, compare the medians of one run.

const (
	benchFrame = 64 // bytes of the frame that follows the write
	benchExtra = 2*headerLen + benchFrame
	benchMax   = 64 << 20
	peerEnv    = "TCP_BENCH_PEER"
)

var benchConns = []string{"conn", "tls"}

func TestMain(m *testing.M) {
	if os.Getenv(peerEnv) == "" {
		os.Exit(m.Run())
	}
	if err := benchPeer(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "peer of the benchmark:", err)
		os.Exit(1)
	}
}

// An end is one side of the benchmark: a Conn to the other, and one of the two a
// bare socket.
type end struct {
	f      *Fabric
	conn   transport.Conn
	bare   int
	in     mem.Region // the peer writes here
	out    mem.Region // what we send
	key    transport.Key
	remote transport.Key
	ev     []transport.Event
	ops    [2]transport.Op
	span   [1]mem.Span
	vec    vec
}

// newEnd opens an end without its connections. It sends what it received if
// echo is set.
func newEnd(kind string, echo bool) (e *end, err error) {
	e = &end{ev: make([]transport.Event, 16)}
	o := Options{Gate: transporttest.Gate{}}
	if kind == "tls" {
		if o.TLS, err = link.SharedIdentity([]byte("the secret of the benchmark"), "default"); err != nil {
			return nil, err
		}
	}
	if echo {
		o.Listen = "127.0.0.1:0"
	}
	if e.f, err = Open(o); err != nil {
		return nil, err
	}
	if e.in, err = mem.Map(benchMax + benchExtra); err != nil {
		return nil, err
	}
	if e.out = e.in; !echo {
		if e.out, err = mem.Map(benchMax + benchExtra); err != nil {
			return nil, err
		}
	}
	e.ops[0] = transport.Op{Kind: transport.OpWrite, Src: e.span[:]}
	e.ops[1] = transport.Op{Kind: transport.OpFrame, Frame: make([]byte, benchFrame)}
	e.key, err = e.f.Register(e.in)
	return e, err
}

// poll polls once and returns the frame that came, if any.
func (e *end) poll() (frame []byte, err error) {
	n, err := e.f.Poll(e.ev)
	for i := range e.ev[:n] {
		switch ev := &e.ev[i]; ev.Kind {
		case transport.EvAccept:
			e.conn = ev.Conn
		case transport.EvFrame:
			frame = ev.Data
		case transport.EvDown:
			err = ev.Err
		}
	}
	return frame, err
}

func (e *end) waitFrame() ([]byte, error) {
	for {
		if f, err := e.poll(); f != nil || err != nil {
			return f, err
		}
	}
}

// post sends n bytes and a frame.
func (e *end) post(n uint64) error {
	e.span[0] = mem.Span{Addr: e.out.Addr, Len: n}
	e.ops[0].Key = e.remote
	for ops := e.ops[:]; ; {
		k, err := e.conn.Post(ops)
		if ops = ops[k:]; err != nil || len(ops) == 0 {
			return err
		}
		if _, err := e.poll(); err != nil {
			return err
		}
	}
}

// bareAll sends or receives what travels for n bytes and a frame.
func (e *end) bareAll(call func(fd int) (int, unix.Errno), base uintptr, n uint64) error {
	for n += benchExtra; n > 0; {
		e.vec.reset()
		e.vec.add(base, n)
		switch k, errno := call(e.bare); {
		case errno == unix.EAGAIN:
		case errno != 0:
			return errno
		case k == 0:
			return io.EOF
		default:
			base += uintptr(k)
			n -= uint64(k)
		}
	}
	return nil
}

func (e *end) bareSend(n uint64) error { return e.bareAll(e.vec.send, e.out.Addr, n) }
func (e *end) bareRecv(n uint64) error { return e.bareAll(e.vec.recv, e.in.Addr, n) }

// pin binds the calling goroutine to the nth of the processors that it may
// use.
func pin(nth int) error {
	runtime.LockOSThread()
	var all, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &all); err != nil {
		return err
	}
	for cpu := 0; one.Count() == 0; cpu++ {
		if all.IsSet(cpu) {
			if nth == 0 {
				one.Set(cpu)
			}
			nth--
		}
	}
	return unix.SchedSetaffinity(0, &one)
}

// benchPeer answers in the child. Its commands are lines "KIND BYTES COUNT".
func benchPeer(in io.Reader, out io.Writer) error {
	if err := pin(1); err != nil {
		return err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	ends := map[string]*end{}
	for _, kind := range benchConns {
		e, err := newEnd(kind, true)
		if err != nil {
			return err
		}
		ends[kind] = e
		fmt.Fprintln(out, e.f.Addr(), l.Addr())
		f, err := e.waitFrame()
		if err != nil {
			return err
		}
		e.remote = transport.Key{ID: binary.LittleEndian.Uint64(f), Token: binary.LittleEndian.Uint64(f[8:])}
		fmt.Fprintln(out, e.key.ID, e.key.Token)
	}
	nc, err := l.Accept()
	if err != nil {
		return err
	}
	ends["bare"] = ends["conn"]
	if ends["bare"].bare, err = link.Descriptor(nc); err != nil {
		return err
	}
	for lines := bufio.NewScanner(in); lines.Scan(); {
		var kind string
		var n uint64
		var count int
		if _, err := fmt.Sscan(lines.Text(), &kind, &n, &count); err != nil {
			return err
		}
		e := ends[kind]
		for range count {
			if kind == "bare" {
				if err = e.bareRecv(n); err == nil {
					err = e.bareSend(n)
				}
			} else if _, err = e.waitFrame(); err == nil {
				err = e.post(n)
			}
			if err != nil {
				return err
			}
		}
		for c := e.conn.(*Conn); c.tx.Done != c.tx.End || c.Unsent(); {
			if _, err := e.poll(); err != nil {
				return err
			}
		}
	}
	return nil
}

// dialPeer starts the child and connects to it.
func dialPeer(b *testing.B) (ends map[string]*end, commands io.Writer) {
	self, err := os.Executable()
	require.NoError(b, err)
	child := exec.Command(self)
	child.Env = append(os.Environ(), peerEnv+"=1")
	child.Stderr = os.Stderr
	stdin, err := child.StdinPipe()
	require.NoError(b, err)
	stdout, err := child.StdoutPipe()
	require.NoError(b, err)
	require.NoError(b, child.Start())
	b.Cleanup(func() {
		stdin.Close()
		child.Wait()
	})

	var addr, bare string
	ends = map[string]*end{}
	for _, kind := range benchConns {
		e, err := newEnd(kind, false)
		require.NoError(b, err)
		b.Cleanup(func() {
			require.NoError(b, e.f.Close())
			require.NoError(b, mem.Unmap(e.in))
			require.NoError(b, mem.Unmap(e.out))
		})
		ends[kind] = e
		out := e.out.Span().Bytes()
		for i := range out {
			out[i] = byte(i * 7)
		}
		_, err = fmt.Fscan(stdout, &addr, &bare)
		require.NoError(b, err)
		e.conn, err = e.f.Connect(context.Background(), transport.Addr(addr))
		require.NoError(b, err)
		k := binary.LittleEndian.AppendUint64(nil, e.key.ID)
		k = binary.LittleEndian.AppendUint64(k, e.key.Token)
		_, err = e.conn.Post([]transport.Op{{Kind: transport.OpFrame, Frame: k}})
		require.NoError(b, err)
		_, err = fmt.Fscan(stdout, &e.remote.ID, &e.remote.Token)
		require.NoError(b, err)
	}
	ends["bare"] = ends["conn"]
	nc, err := net.Dial("tcp", bare)
	require.NoError(b, err)
	ends["bare"].bare, err = link.Descriptor(nc)
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, unix.Close(ends["bare"].bare)) })
	require.NoError(b, nc.Close())
	return ends, stdin
}

func BenchmarkEcho(b *testing.B) {
	if runtime.NumCPU() < 2 {
		b.Skip("needs two processors")
	}
	ends, commands := dialPeer(b)
	echo := func(kind string, e *end, n uint64) error {
		if kind == "bare" {
			if err := e.bareSend(n); err != nil {
				return err
			}
			return e.bareRecv(n)
		}
		if err := e.post(n); err != nil {
			return err
		}
		_, err := e.waitFrame()
		return err
	}
	kinds := append([]string{"bare"}, benchConns...)
	for _, n := range []uint64{64, 4 << 10, 64 << 10, 1 << 20, 64 << 20} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			// The thread ends with the goroutine, and its binding with it.
			require.NoError(b, pin(0))
			times := map[string][]time.Duration{}
			count := max(2, int(min(1000, (16<<20)/n)))
			for range b.N {
				for _, kind := range kinds {
					e := ends[kind]
					fmt.Fprintln(commands, kind, n, count)
					for j := range count {
						start := time.Now()
						require.NoError(b, echo(kind, e, n))
						if j > 0 { // the first waits for the command
							times[kind] = append(times[kind], time.Since(start))
						}
					}
					in := e.in.Span().Bytes()[:n]
					require.True(b, bytes.Equal(in, e.out.Span().Bytes()[:n]), "%s: other bytes came back", kind)
					clear(in)
				}
			}
			at := func(kind string, percent int) float64 {
				slices.Sort(times[kind])
				return float64(times[kind][len(times[kind])*percent/100].Nanoseconds()) / 1e3
			}
			b.ReportMetric(0, "ns/op")
			for _, kind := range kinds {
				b.ReportMetric(at(kind, 50), kind+"-p50-µs")
				b.ReportMetric(at(kind, 99), kind+"-p99-µs")
			}
			b.ReportMetric(at("conn", 50)/at("bare", 50), "ratio")
			b.ReportMetric(at("tls", 50)/at("conn", 50), "tls-ratio")
		})
	}
}
