package tcp

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/transporttest"
)

// The benchmark bounces a write and a frame between this process and a child,
// each on a processor of its own, both spinning. In turns with it, the same
// count of bytes bounces between the same two threads through bare system
// calls, from and to one buffer.

const (
	benchFrame = 64 // bytes of the frame that follows the write
	benchExtra = 2*headerLen + benchFrame
	benchMax   = 64 << 20
	peerEnv    = "TCP_BENCH_PEER"
)

func TestMain(m *testing.M) {
	if os.Getenv(peerEnv) != "" {
		if err := benchPeer(os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// An end is one side of the benchmark: a Conn and a bare socket to the other.
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

func newEnd(listen string) (*end, error) {
	e := &end{ev: make([]transport.Event, 16)}
	var err error
	if e.f, err = Open(Options{Listen: listen, Gate: transporttest.Gate{}}); err != nil {
		return nil, err
	}
	if e.in, err = mem.Map(benchMax + benchExtra); err != nil {
		return nil, err
	}
	e.key, err = e.f.Register(e.in)
	e.out = e.in
	e.ops[0] = transport.Op{Kind: transport.OpWrite, Src: e.span[:]}
	e.ops[1] = transport.Op{Kind: transport.OpFrame, Frame: make([]byte, benchFrame)}
	return e, err
}

// poll takes all events that are there and says whether a frame has come.
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

func (e *end) bareSend(n uint64) error {
	return e.bareAll(e.out.Addr, n+benchExtra, e.vec.send)
}

func (e *end) bareRecv(n uint64) error {
	return e.bareAll(e.in.Addr, n+benchExtra, e.vec.recv)
}

func (e *end) bareAll(base uintptr, n uint64, call func(int) (int, unix.Errno)) error {
	for n > 0 {
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

// pin binds the calling goroutine to a processor.
func pin(cpu int) error {
	runtime.LockOSThread()
	var set unix.CPUSet
	set.Set(cpu)
	return unix.SchedSetaffinity(0, &set)
}

// benchPeer answers in the child. Its commands are lines "KIND BYTES COUNT".
func benchPeer(in io.Reader, out io.Writer) error {
	if err := pin(1); err != nil {
		return err
	}
	e, err := newEnd("127.0.0.1:0")
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	fmt.Fprintln(out, e.f.Addr(), l.Addr())
	nc, err := l.Accept()
	if err != nil {
		return err
	}
	if e.bare, err = e.f.detach(nc.(*net.TCPConn)); err != nil {
		return err
	}
	f, err := e.waitFrame()
	if err != nil {
		return err
	}
	e.remote = transport.Key{ID: binary.LittleEndian.Uint64(f), Token: binary.LittleEndian.Uint64(f[8:])}
	fmt.Fprintln(out, e.key.ID, e.key.Token)
	for lines := bufio.NewScanner(in); lines.Scan(); {
		var kind string
		var n uint64
		var count int
		if _, err := fmt.Sscan(lines.Text(), &kind, &n, &count); err != nil {
			return err
		}
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
		for kind == "conn" && e.conn.(*Conn).tx.done != e.conn.(*Conn).tx.tail {
			if _, err := e.poll(); err != nil {
				return err
			}
		}
	}
	return nil
}

func BenchmarkEcho(b *testing.B) {
	if runtime.NumCPU() < 2 {
		b.Skip("needs two processors")
	}
	self, err := os.Executable()
	if err != nil {
		b.Fatal(err)
	}
	child := exec.Command(self)
	child.Env = append(os.Environ(), peerEnv+"=1")
	child.Stderr = os.Stderr
	stdin, _ := child.StdinPipe()
	stdout, _ := child.StdoutPipe()
	if err := child.Start(); err != nil {
		b.Fatal(err)
	}
	defer func() {
		stdin.Close()
		child.Wait()
	}()
	must := func(err error) {
		if err != nil {
			b.Helper()
			b.Fatal(err)
		}
	}
	must(pin(0))
	defer runtime.UnlockOSThread()
	e, err := newEnd("")
	must(err)
	defer e.f.Close()
	e.out, err = mem.Map(benchMax + benchExtra)
	must(err)
	for i := range e.out.Span().Bytes() {
		e.out.Span().Bytes()[i] = byte(i * 7)
	}
	var addr, bare string
	fmt.Fscan(stdout, &addr, &bare)
	e.conn, err = e.f.Connect(context.Background(), transport.Addr(addr))
	must(err)
	nc, err := net.Dial("tcp", bare)
	must(err)
	e.bare, err = e.f.detach(nc.(*net.TCPConn))
	must(err)
	k := binary.LittleEndian.AppendUint64(nil, e.key.ID)
	k = binary.LittleEndian.AppendUint64(k, e.key.Token)
	_, err = e.conn.Post([]transport.Op{{Kind: transport.OpFrame, Frame: k}})
	must(err)
	fmt.Fscan(stdout, &e.remote.ID, &e.remote.Token)

	echo := map[string]func(n uint64) error{
		"bare": func(n uint64) error {
			if err := e.bareSend(n); err != nil {
				return err
			}
			return e.bareRecv(n)
		},
		"conn": func(n uint64) error {
			if err := e.post(n); err != nil {
				return err
			}
			_, err := e.waitFrame()
			return err
		},
	}
	for _, n := range []uint64{64, 4 << 10, 64 << 10, 1 << 20, 64 << 20} {
		b.Run(strings.TrimSuffix(fmt.Sprint(n), ""), func(b *testing.B) {
			times := map[string][]time.Duration{}
			count := max(2, int(min(1000, (16<<20)/n)))
			for i := 0; i < b.N; i++ {
				for _, kind := range []string{"bare", "conn"} {
					fmt.Fprintln(stdin, kind, n, count)
					for j := range count {
						start := time.Now()
						must(echo[kind](n))
						if j > 0 {
							times[kind] = append(times[kind], time.Since(start))
						}
					}
					if got, want := e.in.Span().Bytes()[:n], e.out.Span().Bytes()[:n]; !slices.Equal(got, want) {
						b.Fatalf("%s: other bytes came back", kind)
					}
					clear(e.in.Span().Bytes()[:n])
				}
			}
			median := func(kind string) float64 {
				slices.Sort(times[kind])
				return float64(times[kind][len(times[kind])/2].Nanoseconds()) / 1e3
			}
			p99 := func(kind string) float64 {
				return float64(times[kind][len(times[kind])*99/100].Nanoseconds()) / 1e3
			}
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(median("bare"), "bare-µs")
			b.ReportMetric(median("conn"), "conn-µs")
			b.ReportMetric(p99("bare"), "bare-p99-µs")
			b.ReportMetric(p99("conn"), "conn-p99-µs")
			b.ReportMetric(median("conn")/median("bare"), "ratio")
			p10 := func(kind string) float64 {
				return float64(times[kind][len(times[kind])/20].Nanoseconds()) / 1e3
			}
			fmt.Printf("p5 bare %.2f conn %.2f ratio %.3f\n", p10("bare"), p10("conn"), p10("conn")/p10("bare"))
		})
	}
}
