package tcp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
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

const (
	patience = 30 * time.Second
	scheme   = "tcp:"
)

var magic = [4]byte{'F', 'S', 'R', 'V'}

// open opens a Fabric that is closed at the end of the test, when no goroutine
// and no descriptor may be left.
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

// noLeaks is called before anything is opened.
func noLeaks(t *testing.T) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0") // starts the runtime's poller
	require.NoError(t, err)
	l.Close()
	files := func() int {
		e, err := os.ReadDir("/proc/self/fd")
		require.NoError(t, err)
		return len(e)
	}
	routines, descriptors := runtime.NumGoroutine(), files()
	t.Cleanup(func() {
		for end := time.Now().Add(patience); runtime.NumGoroutine() > routines && time.Now().Before(end); {
			time.Sleep(time.Millisecond)
		}
		require.LessOrEqual(t, runtime.NumGoroutine(), routines)
		require.Equal(t, descriptors, files())
	})
}

// A user polls one Fabric and keeps what came.
type user struct {
	t      *testing.T
	f      *Fabric
	ev     [8]transport.Event
	conns  []transport.Conn // accepted
	done   map[uint64]error
	frames []string
	down   map[transport.Conn]error
}

func newUser(t *testing.T, f *Fabric) *user {
	return &user{t: t, f: f, done: map[uint64]error{}, down: map[transport.Conn]error{}}
}

// poll returns how many events there were.
func (u *user) poll() int {
	n, err := u.f.Poll(u.ev[:])
	require.NoError(u.t, err)
	for _, e := range u.ev[:n] {
		switch e.Kind {
		case transport.EvAccept:
			u.conns = append(u.conns, e.Conn)
		case transport.EvDone:
			u.done[e.User] = e.Err
		case transport.EvFrame:
			u.frames = append(u.frames, string(e.Data))
		case transport.EvDown:
			u.down[e.Conn] = e.Err
			e.Conn.Close()
		}
	}
	return n
}

// post posts ops until all are taken: whoever keeps the Fabric in order may be its owner just then.
func post(t *testing.T, c transport.Conn, ops ...transport.Op) {
	t.Helper()
	for end := time.Now().Add(patience); len(ops) > 0; runtime.Gosched() {
		n, err := c.Post(ops)
		require.NoError(t, err)
		ops = ops[n:]
		require.True(t, time.Now().Before(end), "operations are not taken")
	}
}

func (u *user) until(cond func() bool) {
	u.t.Helper()
	looks := 0
	for end := time.Now().Add(patience); !cond(); looks++ {
		if u.poll() > 0 {
			looks = 0
		}
		if time.Now().After(end) {
			require.Fail(u.t, "it did not happen", "within %v", patience)
		}
		transporttest.Rest(looks)
	}
}

// bare opens a connection to f that passes the Gate, and returns its bare end.
func (u *user) bare() (*net.TCPConn, transport.Conn) {
	u.t.Helper()
	nc := dialBare(u.t, u.f)
	n := len(u.conns)
	u.until(func() bool { return len(u.conns) > n })
	return nc, u.conns[n]
}

func dialBare(t *testing.T, f *Fabric) *net.TCPConn {
	t.Helper()
	nc, err := net.Dial("tcp", strings.TrimPrefix(string(f.Addr()), scheme))
	require.NoError(t, err)
	t.Cleanup(func() { nc.Close() })
	require.NoError(t, nc.SetDeadline(time.Now().Add(patience)))
	shakeBare(t, nc)
	return nc.(*net.TCPConn)
}

// shakeBare passes the Gate as a dialer.
func shakeBare(t *testing.T, c io.ReadWriter) {
	t.Helper()
	hs := transporttest.Gate{Hello: "bare"}.Open(true)
	out, _, _ := hs.Next(nil)
	require.NoError(t, link.SendMessage(c, out))
	in, err := link.ReceiveMessage(c)
	require.NoError(t, err)
	_, done, err := hs.Next(in)
	require.True(t, done)
	require.NoError(t, err)
}

func record(h header, payload string) []byte {
	b := make([]byte, headerLen)
	h.put(b)
	return append(b, payload...)
}

func TestPeerEndsTheConnection(t *testing.T) {
	frame := record(header{kind: recFrame, length: 5}, "hello")
	for _, c := range []struct {
		name string
		end  func(nc *net.TCPConn) error
		want error
		text string
	}{
		{"goodbye", func(nc *net.TCPConn) error { _, err := nc.Write(record(header{kind: recBye}, "")); return err },
			io.EOF, "the peer closed the connection: EOF"},
		{"closed without goodbye", (*net.TCPConn).Close, io.ErrUnexpectedEOF, "without a goodbye"},
		{"half-closed", (*net.TCPConn).CloseWrite, io.ErrUnexpectedEOF, "without a goodbye"},
		{"half-closed in a header", func(nc *net.TCPConn) error { nc.Write(frame[:7]); return nc.CloseWrite() },
			io.ErrUnexpectedEOF, "in the middle of a record"},
		{"half-closed in a frame", func(nc *net.TCPConn) error { nc.Write(frame[:headerLen+4]); return nc.CloseWrite() },
			io.ErrUnexpectedEOF, "in the middle of a record"},
		{"reset", func(nc *net.TCPConn) error { nc.SetLinger(0); return nc.Close() },
			syscall.ECONNRESET, "connection reset by peer"},
	} {
		t.Run(c.name, func(t *testing.T) {
			noLeaks(t)
			u := newUser(t, open(t, Options{Listen: "127.0.0.1:0"}))
			other, otherConn := u.bare()
			nc, conn := u.bare()
			remote := nc.LocalAddr().String()
			require.Equal(t, remote, conn.Peer().Remote)
			require.Equal(t, "bare", string(conn.Peer().Hello))
			_, err := nc.Write(frame)
			require.NoError(t, err)
			u.until(func() bool { return len(u.frames) == 1 })

			// The peer takes nothing, so the second is open when it goes. (A
			// socket that is closed with bytes unread ends in a reset.)
			ops := []transport.Op{
				{Kind: transport.OpFrame, User: 1},
				{Kind: transport.OpWrite, Src: []mem.Span{hold(t, 64<<20).Span()}, User: 2},
			}
			if c.name == "closed without goodbye" {
				ops = nil
			}
			post(t, conn, ops...)
			u.until(func() bool { return len(u.done) == len(ops)/2 })
			require.NoError(t, c.end(nc))
			u.until(func() bool { return len(u.down) == 1 })
			down := u.down[conn]
			require.ErrorIs(t, down, c.want)
			require.ErrorContains(t, down, "tcp: "+remote+": ")
			require.ErrorContains(t, down, c.text)
			if len(ops) > 0 {
				require.Equal(t, map[uint64]error{1: nil, 2: down}, u.done)
			}
			_, err = conn.Post([]transport.Op{{Kind: transport.OpFrame}})
			require.Equal(t, down, err)
			conn.Close()

			_, err = other.Write(frame)
			require.NoError(t, err)
			u.until(func() bool { return len(u.frames) == 2 })
			require.NotContains(t, u.down, otherConn)
		})
	}
}

// TestLastWordsAreRead sends into a connection that the peer has reset behind
// its last frame.
func TestLastWordsAreRead(t *testing.T) {
	noLeaks(t)
	u := newUser(t, open(t, Options{Listen: "127.0.0.1:0"}))
	nc, conn := u.bare()
	_, err := nc.Write(record(header{kind: recFrame, length: 3}, "why"))
	require.NoError(t, err)
	require.NoError(t, nc.Close())
	for range 100 { // until the kernel refuses
		conn.Post([]transport.Op{{Kind: transport.OpFrame}})
		if conn.(*Conn).txErr != nil {
			break
		}
		time.Sleep(time.Millisecond)
	}
	require.Error(t, conn.(*Conn).txErr)
	_, err = conn.Post([]transport.Op{{Kind: transport.OpFrame}})
	require.ErrorContains(t, err, "tcp: "+conn.Peer().Remote+": ")
	u.until(func() bool { return len(u.down) == 1 })
	require.Equal(t, []string{"why"}, u.frames)
	require.NotErrorIs(t, u.down[conn], io.EOF)
}

func TestBrokenStreamEndsItsConnection(t *testing.T) {
	for _, c := range []struct {
		name string
		send []byte
		text string
	}{
		{"unknown type", record(header{kind: 9}, ""), "not a type of this version"},
		{"text", []byte("GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\n\r\n"), "not a type of this version"},
		{"frame too large", record(header{kind: recFrame, length: transport.MaxFrame + 1}, ""), "at most 1048576"},
		{"absurd length", record(header{kind: recFrame, length: 1<<64 - 1}, ""), "at most 1048576"},
		{"unknown key", record(header{kind: recWrite, length: 8, key: 77}, ""), "key 77: no such key"},
	} {
		t.Run(c.name, func(t *testing.T) {
			noLeaks(t)
			u := newUser(t, open(t, Options{Listen: "127.0.0.1:0"}))
			nc, conn := u.bare()
			good := record(header{kind: recFrame, length: 4}, "good")
			_, err := nc.Write(append(good, c.send...))
			require.NoError(t, err)
			u.until(func() bool { return len(u.down) == 1 })
			require.Equal(t, []string{"good"}, u.frames)
			require.ErrorContains(t, u.down[conn], c.text)
			_, err = nc.Read(make([]byte, 1))
			require.ErrorIs(t, err, syscall.ECONNRESET, "the peer must not take it for a good end")
		})
	}
}

func TestStall(t *testing.T) {
	const stall = 200 * time.Millisecond
	for _, c := range []struct {
		name string
		send []byte
		post bool
	}{
		{name: "in a header", send: record(header{kind: recFrame, length: 5}, "")[:9]},
		{name: "in a frame", send: record(header{kind: recFrame, length: 5}, "hell")},
		{name: "in a large frame", send: record(header{kind: recFrame, length: 1 << 20}, "hell")},
		{name: "peer takes nothing", post: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			noLeaks(t)
			u := newUser(t, open(t, Options{Listen: "127.0.0.1:0", Limits: transport.Limits{Stall: stall}}))
			idle, idleConn := u.bare()
			nc, conn := u.bare()
			start := time.Now()
			_, err := nc.Write(c.send)
			require.NoError(t, err)
			if c.post {
				post(t, conn, transport.Op{Kind: transport.OpWrite, Src: []mem.Span{hold(t, 64<<20).Span()}, User: 1})
			}
			u.until(func() bool { return len(u.down) == 1 })
			require.GreaterOrEqual(t, time.Since(start), stall)
			require.ErrorIs(t, u.down[conn], syscall.ETIMEDOUT)
			if c.post {
				require.Equal(t, map[uint64]error{1: u.down[conn]}, u.done)
			}
			_, err = idle.Write(record(header{kind: recFrame, length: 2}, "ok"))
			require.NoError(t, err)
			u.until(func() bool { return len(u.frames) == 1 })
			require.NotContains(t, u.down, idleConn)
		})
	}
}

// TestOwnPauseIsNoStall leaves a peer's bytes in the socket for longer than
// the limit.
func TestOwnPauseIsNoStall(t *testing.T) {
	const stall = 80 * time.Millisecond
	u := newUser(t, open(t, Options{Listen: "127.0.0.1:0", Limits: transport.Limits{Stall: stall}}))
	nc, conn := u.bare()
	frame := record(header{kind: recFrame, length: 5}, "hello")
	_, err := nc.Write(frame[:20])
	require.NoError(t, err)
	u.until(func() bool { return conn.(*Conn).rx.inside() })
	_, err = nc.Write(frame[20:])
	require.NoError(t, err)
	time.Sleep(3 * stall) // what is tested is that nothing happens
	u.until(func() bool { return len(u.frames) == 1 })
	require.Empty(t, u.down)
}

func TestListenerRefuses(t *testing.T) {
	noise := bytes.Repeat([]byte("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"), 100)
	long := append(magic[:], 0xff, 0xff, 0xff, 0xff)
	for _, c := range []struct {
		name string
		send []byte
		text string
	}{
		{"TLS", noise, "the peer speaks TLS (set FSERVER_TLS=on"},
		{"noise", noise[1:], "the peer sent 03 01 02 00 01 00 01 fc"},
		{"eight bytes of noise", noise[1:9], "not a message of fserver"},
		{"absurd length", long, "a message of 4294967295 bytes: at most 4096"},
		{"one byte too long", append(magic[:], 1, 16, 0, 0), "a message of 4097 bytes: at most 4096"},
		{"gate says no", append(magic[:], 1, 0, 0, 0, '?'), "unknown kind 0x3f"},
		{"empty message", append(magic[:], 0, 0, 0, 0), "gate: empty message"},
		{"half a preamble, then silence", magic[:2], "not finished within 1s"},
		{"half a message, then silence", append(magic[:], 9, 0, 0, 0, '+'), "not finished within 1s"},
		{"silence", nil, "not finished within 1s"},
	} {
		t.Run(c.name, func(t *testing.T) {
			noLeaks(t)
			var mu sync.Mutex
			var told []string
			var limits transport.Limits
			if strings.Contains(c.name, "silence") {
				limits.Handshake = time.Second
			}
			u := newUser(t, open(t, Options{
				Listen: "127.0.0.1:0",
				Limits: limits,
				Refused: func(remote string, err error) {
					mu.Lock()
					defer mu.Unlock()
					told = append(told, fmt.Sprintf("%s | %v", remote, err))
				},
			}))
			good, _ := u.bare()
			nc, err := net.Dial("tcp", strings.TrimPrefix(string(u.f.Addr()), scheme))
			require.NoError(t, err)
			defer nc.Close()
			_, err = nc.Write(c.send)
			require.NoError(t, err)
			require.NoError(t, nc.SetDeadline(time.Now().Add(patience)))
			_, err = io.Copy(io.Discard, nc)
			require.False(t, errors.Is(err, os.ErrDeadlineExceeded), "the connection stays open")
			u.until(func() bool {
				mu.Lock()
				defer mu.Unlock()
				return len(told) > 0
			})
			_, err = good.Write(record(header{kind: recFrame, length: 2}, "ok"))
			require.NoError(t, err)
			u.until(func() bool { return len(u.frames) == 1 })
			require.Len(t, told, 1)
			require.Contains(t, told[0], nc.LocalAddr().String()+" | tcp: refuse "+nc.LocalAddr().String()+": ")
			require.Contains(t, told[0], c.text)
			require.Len(t, u.conns, 1)
		})
	}
}

// TestNotWatched: a Conn whose socket epoll does not take says that it has ended, though nobody visits it at that time.
func TestNotWatched(t *testing.T) {
	u := newUser(t, open(t, Options{Listen: "127.0.0.1:0"}))
	_, conn := u.bare()
	c := conn.(*Conn)
	u.f.recent, c.hidden = c, true
	require.NoError(t, unix.EpollCtl(u.f.Epoll, unix.EPOLL_CTL_DEL, c.FD, &unix.EpollEvent{}))
	require.True(t, u.f.Arm())
	u.poll()
	require.ErrorContains(t, u.down[conn], "watch the socket")
}

// TestLooks: a connection that is closed before it says anything is told from one that breaks off.
func TestLooks(t *testing.T) {
	noLeaks(t)
	told := make(chan error, 10)
	f := open(t, Options{Listen: "127.0.0.1:0", Refused: func(_ string, err error) { told <- err }})
	for _, send := range [][]byte{nil, magic[:3]} {
		nc, err := net.Dial("tcp", strings.TrimPrefix(string(f.Addr()), scheme))
		require.NoError(t, err)
		_, err = nc.Write(send)
		require.NoError(t, err)
		require.NoError(t, nc.(*net.TCPConn).CloseWrite())
		_, err = io.Copy(io.Discard, nc) // until it has been shown out
		require.NoError(t, err)
		require.NoError(t, nc.Close())
		select {
		case err := <-told:
			require.Equal(t, send == nil, errors.Is(err, transport.ErrLooked), err)
		case <-time.After(patience):
			t.Fatal("nothing is told")
		}
	}
	require.Empty(t, told)
}

// TestFloodOfSilentPeers opens more connections than may be in the Gate at
// once; the others give way to a good one.
func TestFloodOfSilentPeers(t *testing.T) {
	noLeaks(t)
	u := newUser(t, open(t, Options{Listen: "127.0.0.1:0", Limits: transport.Limits{Pending: 4}}))
	for range 20 {
		nc, err := net.Dial("tcp", strings.TrimPrefix(string(u.f.Addr()), scheme))
		require.NoError(t, err)
		defer nc.Close()
	}
	u.bare()
}

func TestDialerRefuses(t *testing.T) {
	noLeaks(t)
	f := open(t, Options{})
	for text, answer := range map[string]string{
		"not a message of fserver": "SSH-2.0-OpenSSH\r\n",
		"at most 4096":             string(magic[:]) + "\xff\xff\xff\xff",
		"the peer closed":          "",
		"unexpected EOF":           string(magic[:]) + "\x05\x00\x00\x00+",
		"gate: refused by the pee": string(magic[:]) + "\x05\x00\x00\x00-busy",
	} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		var served sync.WaitGroup
		served.Go(func() {
			nc, err := l.Accept()
			if err == nil {
				link.ReceiveMessage(nc)
				io.WriteString(nc, answer)
				nc.Close()
			}
		})
		c, err := f.Connect(context.Background(), transport.Addr(scheme+l.Addr().String()))
		require.Nil(t, c)
		require.ErrorContains(t, err, text)
		require.ErrorContains(t, err, "tcp: connect to "+l.Addr().String()+": ")
		l.Close()
		served.Wait()
	}
}

func TestOpenSaysWhatIsWrong(t *testing.T) {
	noLeaks(t)
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer taken.Close()
	gate := transporttest.Gate{}
	for _, c := range []struct {
		opts  Options
		texts []string
	}{
		{Options{Listen: "127.0.0.1:0"}, []string{"tcp: open: no gate"}},
		{Options{Gate: gate, Listen: taken.Addr().String()},
			[]string{"tcp: listen on " + taken.Addr().String(), "address already in use", "choose another port"}},
		{Options{Gate: gate, Listen: "192.0.2.1:7000"},
			[]string{"tcp: listen on 192.0.2.1:7000: ", "cannot assign requested address", "an address of this host"}},
		{Options{Gate: gate, Listen: "127.0.0.1"}, []string{"tcp: listen on 127.0.0.1: ", "missing port", "want HOST:PORT"}},
		{Options{Gate: gate, Listen: "::1:0"}, []string{"tcp: listen on ::1:0: ", "brackets"}},
		{Options{Gate: gate, Listen: "127.0.0.1:99999"}, []string{"tcp: listen on 127.0.0.1:99999: ", "invalid port"}},
		{Options{Gate: gate, Listen: "no-such-host.invalid:1"}, []string{"tcp: listen on no-such-host.invalid:1: ", "resolve"}},
		{Options{Gate: gate, Bind: "192.0.2.1"}, []string{"tcp: dial from 192.0.2.1: ", "an address of this host"}},
		{Options{Gate: gate, Bind: "no-such-host.invalid"}, []string{"tcp: dial from no-such-host.invalid: ", "resolve"}},
	} {
		f, err := Open(c.opts)
		require.Nil(t, f)
		for _, text := range c.texts {
			require.ErrorContains(t, err, text)
		}
	}
}

func TestConnectSaysWhatIsWrong(t *testing.T) {
	f := open(t, Options{})
	gone, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	gone.Close()
	_, err = f.Connect(context.Background(), transport.Addr(scheme+gone.Addr().String()))
	require.ErrorIs(t, err, syscall.ECONNREFUSED)
	require.ErrorContains(t, err, "tcp: connect to "+gone.Addr().String()+": connection refused (no process listens at this address)")
	for _, addr := range []transport.Addr{"", "inproc:1", "tcp:", "tcp:host", "tcp::1", "tcp:::1:5", "tcp:h:0", "tcp:h:65536", "tcp:h:http", "tcp:[::1]"} {
		require.Error(t, f.Reaches(addr), addr)
		_, err = f.Connect(context.Background(), addr)
		require.ErrorContains(t, err, "tcp: connect to ", addr)
	}
	for _, addr := range []transport.Addr{"tcp:h:1", "tcp:10.0.0.1:65535", "tcp:[::1]:7000", "tcp:[fe80::1%eth0]:7000"} {
		require.NoError(t, f.Reaches(addr), addr)
	}
}

func TestAddresses(t *testing.T) {
	for _, c := range []struct{ listen, bind, addr string }{
		{"127.0.0.1:0", "127.0.0.1", "tcp:127.0.0.1:"},
		{"127.0.0.2:0", "127.0.0.3", "tcp:127.0.0.2:"},
		{"[::1]:0", "::1", "tcp:[::1]:"},
		{"localhost:0", "", "tcp:"},
	} {
		t.Run(c.listen, func(t *testing.T) {
			if strings.Contains(c.listen, "::") {
				l, err := net.Listen("tcp", "[::1]:0")
				if err != nil {
					t.Skip("no IPv6 here: ", err)
				}
				l.Close()
			}
			noLeaks(t)
			a := newUser(t, open(t, Options{Bind: c.bind}))
			b := newUser(t, open(t, Options{Listen: c.listen, Name: "tcp/lo"}))
			require.Equal(t, "tcp", a.f.Name())
			require.Equal(t, "tcp/lo", b.f.Name())
			require.Empty(t, a.f.Addr())
			require.Regexp(t, "^"+strings.NewReplacer("[", `\[`, "]", `\]`, ".", `\.`).Replace(c.addr)+".*[1-9][0-9]*$", string(b.f.Addr()))
			conn, err := a.f.Connect(context.Background(), b.f.Addr())
			require.NoError(t, err)
			require.Equal(t, strings.TrimPrefix(string(b.f.Addr()), scheme), conn.Peer().Remote)
			const size = 8 << 20
			dst, src := hold(t, size), hold(t, size)
			for i := range src.Span().Bytes() {
				src.Span().Bytes()[i] = byte(i * 31 >> 3)
			}
			key, err := b.f.Register(dst)
			require.NoError(t, err)
			post(t, conn, transport.Op{Kind: transport.OpWrite, Key: key, Src: []mem.Span{src.Span()}},
				transport.Op{Kind: transport.OpFrame, Frame: []byte("done")})
			b.until(func() bool { a.poll(); return len(b.frames) == 1 })
			require.True(t, bytes.Equal(src.Span().Bytes(), dst.Span().Bytes()))
			for _, end := range []transport.Conn{conn, b.conns[0]} {
				name, err := unix.GetsockoptString(end.(*Conn).FD, unix.IPPROTO_TCP, unix.TCP_CONGESTION)
				require.NoError(t, err)
				require.Equal(t, unpaced, name)
			}
			if c.bind != "" {
				host, _, err := net.SplitHostPort(b.conns[0].Peer().Remote)
				require.NoError(t, err)
				require.Equal(t, strings.Trim(c.bind, "[]"), host)
			}
		})
	}
}

// TestOwnerNeverWaits polls and posts while another goroutine is the owner.
func TestOwnerNeverWaits(t *testing.T) {
	u := newUser(t, open(t, Options{Listen: "127.0.0.1:0"}))
	_, conn := u.bare()
	u.f.Owner.Lock()
	n, err := u.f.Poll(u.ev[:])
	require.Zero(t, n)
	require.NoError(t, err)
	n, err = conn.Post([]transport.Op{{Kind: transport.OpFrame}})
	require.Zero(t, n)
	require.NoError(t, err)
	u.f.Owner.Unlock()

	// The back-pressure is over, which whoever goes to sleep now must hear.
	require.False(t, readable(u.f.Epoll))
	require.True(t, u.f.Arm())
	u.poll()
	require.False(t, u.f.Arm())
}

// TestLargeBuffersAreGivenBack sends frames of the largest size and waits for
// the buffers to go.
func TestLargeBuffersAreGivenBack(t *testing.T) {
	a := newUser(t, open(t, Options{Limits: transport.Limits{Stall: time.Second}}))
	b := newUser(t, open(t, Options{Listen: "127.0.0.1:0", Limits: transport.Limits{Stall: time.Second}}))
	conn, err := a.f.Connect(context.Background(), b.f.Addr())
	require.NoError(t, err)
	frame := bytes.Repeat([]byte("x"), transport.MaxFrame)
	post(t, conn, transport.Op{Kind: transport.OpFrame, Frame: frame, User: 1})
	b.until(func() bool { a.poll(); return len(b.frames) == 1 && len(a.done) == 1 })
	require.Equal(t, string(frame), b.frames[0])
	held := func(c transport.Conn) bool {
		f := c.(*Conn).f
		f.Owner.Lock()
		defer f.Owner.Unlock()
		return c.(*Conn).rx.big != nil || cap(c.(*Conn).tx.heads) > txHeads
	}
	b.until(func() bool { return !held(conn) && !held(b.conns[0]) })
}

// TestNoAllocationWithManyConns is for peers that take turns, so that Poll asks
// epoll; the contract tests one peer.
func TestNoAllocationWithManyConns(t *testing.T) {
	if transporttest.RaceEnabled {
		t.Skip("the race detector allocates")
	}
	a := newUser(t, open(t, Options{}))
	b := newUser(t, open(t, Options{Listen: "127.0.0.1:0"}))
	var conns []transport.Conn
	for range 10 {
		c, err := a.f.Connect(context.Background(), b.f.Addr())
		require.NoError(t, err)
		conns = append(conns, c)
	}
	b.until(func() bool { return len(b.conns) == len(conns) })
	key, err := b.f.Register(hold(t, 4096))
	require.NoError(t, err)
	ops := []transport.Op{
		{Kind: transport.OpWrite, Key: key, Src: []mem.Span{hold(t, 4096).Span()}},
		{Kind: transport.OpFrame, Frame: make([]byte, 64)},
	}
	count := func(f *Fabric) (n int) {
		n, err := f.Poll(a.ev[:])
		if err != nil {
			t.Error(err)
		}
		return n
	}
	i := 0
	require.Zero(t, testing.AllocsPerRun(1000, func() {
		i++
		if n, err := conns[i%len(conns)].Post(ops); n != 2 || err != nil {
			t.Error(n, err)
		}
		for ended, came := 0, 0; ended < 2 || came < 1; {
			ended += count(a.f)
			came += count(b.f)
		}
	}))
}
