package link

import (
	"context"
	"crypto/ed25519"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/transporttest"
)

const patience = 30 * time.Second

// plain is a transport whose Conns move nothing: each has a message of the dialer's, and its
// session as its life.
type plain struct {
	Fabric
	conns Conns[*plainConn]
	queue Queue[*plainConn]
}

type plainConn struct {
	Conn
	f       *plain
	session *Session
	said    string
}

func (c *plainConn) Post([]transport.Op) (int, error) { return 0, c.Err }
func (c *plainConn) Unsent() bool                     { return false }

func (c *plainConn) end(why error) {
	if c.Err == nil {
		c.Err = c.Because(why)
		if c.Closed || errors.Is(why, io.EOF) {
			why = nil
		}
		c.session.End(why)
	}
	c.f.queue.Push(c)
	c.f.Ring()
}

func newPlain(t *testing.T, o Options) *plain {
	t.Helper()
	if o.Gate == nil {
		o.Gate = transporttest.Gate{}
	}
	f := &plain{}
	require.NoError(t, f.Fabric.Open(TCP("plain", f.adopt), o))
	t.Cleanup(f.close)
	return f
}

func (f *plain) adopt(s *Session) (transport.Conn, error) {
	c := &plainConn{f: f, session: s}
	c.Open(s, c.end)
	var err error
	if s.Dialer {
		err = s.Tell([]byte("good day"))
	} else {
		var m []byte
		m, err = s.Hear()
		c.said = string(m)
	}
	if err != nil {
		return nil, err
	}
	f.Owned(func() {
		f.conns.Add(c)
		f.queue.Push(c)
		s.Keep(c.end)
		f.Ring()
	})
	return c, nil
}

func (f *plain) Poll(ev []transport.Event) (n int, err error) {
	if owner, err := f.Enter(); !owner {
		return 0, err
	}
	defer f.Owner.Unlock()
	for f.queue.Len() > 0 && n < len(ev)-1 {
		c := f.queue.Pop()
		n += c.Accept(c, ev[n:])
		if c.Err != nil {
			k, _ := f.conns.End(c, true, ev[n:])
			n += k
		}
	}
	return n, nil
}

func (f *plain) close() {
	f.Shut(f.conns.Leave, func() {})
}

// event sleeps until there is an event, and returns it.
func (f *plain) event(t *testing.T) transport.Event {
	t.Helper()
	var ev [2]transport.Event
	for end := time.Now().Add(patience); time.Now().Before(end); {
		_, _ = unix.Poll([]unix.PollFd{{Fd: int32(f.Epoll), Events: unix.POLLIN}}, 10_000)
		n, err := f.Poll(ev[:])
		require.NoError(t, err)
		if n > 0 {
			return ev[0]
		}
	}
	t.Fatal("no event")
	return transport.Event{}
}

// TestLife: the end of one side's session is the end of the other's Conn, with its reason.
func TestLife(t *testing.T) {
	for name, id := range map[string]*Identity{"plain": nil, "TLS": shared(t, "one")} {
		t.Run(name, func(t *testing.T) {
			b := newPlain(t, Options{Listen: "127.0.0.1:0", TLS: id})
			b.Start(func(time.Time, bool) {})
			a := newPlain(t, Options{TLS: id, Limits: transport.Limits{Handshake: 2 * time.Second}})
			for i, c := range []struct {
				end  func(c *plainConn)
				want error
				text string
			}{
				{func(c *plainConn) { c.Close() }, io.EOF, "the peer closed the connection"},
				{func(c *plainConn) { c.f.Owned(func() { c.end(errors.New("no more room")) }) }, nil, "the peer: no more room"},
				{func(c *plainConn) { c.session.Socket.Close() }, io.ErrUnexpectedEOF, "cut the connection"},
				{func(c *plainConn) { require.NoError(t, c.session.Tell([]byte("hello"))) }, nil, "out of turn"},
			} {
				tc, err := a.Connect(context.Background(), b.Addr())
				require.NoError(t, err)
				accepted := b.event(t).Conn.(*plainConn)
				require.Equal(t, "good day", accepted.said)
				require.Equal(t, string(transporttest.Gate{}.Hello), string(accepted.Peer().Hello))
				if i == 0 {
					time.Sleep(2200 * time.Millisecond) // the time of the set-up does not end it
				}
				require.Len(t, b.conns.All, 1)
				c.end(tc.(*plainConn))
				down := b.event(t)
				require.Equal(t, transport.EvDown, down.Kind)
				require.ErrorContains(t, down.Err, "plain: "+accepted.Peer().Remote+": ")
				require.ErrorContains(t, down.Err, c.text)
				require.Equal(t, c.want == io.EOF, errors.Is(down.Err, io.EOF))
				if c.want != nil {
					require.ErrorIs(t, down.Err, c.want)
				}
				require.Len(t, b.conns.All, 1)
				accepted.Close()
				accepted.Close()
				require.Equal(t, transport.EvClosed, b.event(t).Kind)
				require.Empty(t, b.conns.All)
			}
		})
	}
}

// TestCloseEndsSetUp: neither a silent listener nor a silent dialer holds up Close.
func TestCloseEndsSetUp(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	f := newPlain(t, Options{Listen: "127.0.0.1:0"})
	f.Start(func(time.Time, bool) {})
	nc, err := net.Dial("tcp", strings.TrimPrefix(string(f.Addr()), "plain:"))
	require.NoError(t, err)
	defer nc.Close()
	ended := make(chan error, 1)
	go func() {
		_, err := f.Connect(context.Background(), transport.Addr("plain:"+l.Addr().String()))
		ended <- err
	}()
	_, err = l.Accept()
	require.NoError(t, err)
	start := time.Now()
	f.close()
	require.Less(t, time.Since(start), 5*time.Second)
	require.ErrorIs(t, <-ended, transport.ErrClosed)
	_, err = f.Connect(context.Background(), transport.Addr("plain:"+l.Addr().String()))
	require.ErrorIs(t, err, transport.ErrClosed)
}

// faultyGate panics at the side that takes connections.
type faultyGate struct{ transport.Gate }

func (g faultyGate) Open(dialer bool) transport.Handshake {
	if !dialer {
		panic("a faulty gate")
	}
	return g.Gate.Open(dialer)
}

// broke waits for the error of Poll after a sleep on the descriptor, and closes the Fabric.
func broke(t *testing.T, f *plain, where string) {
	t.Helper()
	var err error
	for end := time.Now().Add(10 * time.Second); err == nil && time.Now().Before(end); {
		_, _ = unix.Poll([]unix.PollFd{{Fd: int32(f.Epoll), Events: unix.POLLIN}}, 10_000)
		_, err = f.Poll(make([]transport.Event, 4))
	}
	var e *transport.PanicError
	require.ErrorAs(t, err, &e)
	require.Contains(t, e.Stack, where)
	f.close()
}

// TestPanics has each goroutine of a Fabric panic. Poll says so, whoever sleeps is woken,
// and Close ends all the same.
func TestPanics(t *testing.T) {
	idle := func(time.Time, bool) {}
	t.Run("welcome", func(t *testing.T) {
		f := newPlain(t, Options{Listen: "127.0.0.1:0", Gate: faultyGate{transporttest.Gate{}}})
		f.Start(idle)
		_, err := newPlain(t, Options{}).Connect(context.Background(), f.Addr())
		require.Error(t, err)
		broke(t, f, "(*Fabric).welcome")
	})
	t.Run("accept", func(t *testing.T) {
		f := newPlain(t, Options{Listen: "127.0.0.1:0", Refused: func(string, error) { panic("told of a refusal") }})
		require.NoError(t, f.Listener.Close())
		f.Start(idle)
		broke(t, f, "(*Fabric).accept")
	})
	t.Run("keep", func(t *testing.T) {
		f := newPlain(t, Options{Limits: transport.Limits{Stall: 8 * time.Millisecond}})
		f.Start(func(time.Time, bool) { panic("in a look") })
		broke(t, f, "(*Fabric).keep")
	})
	t.Run("session", func(t *testing.T) {
		f := newPlain(t, Options{Listen: "127.0.0.1:0"})
		f.Start(idle)
		c, err := newPlain(t, Options{}).Connect(context.Background(), f.Addr())
		require.NoError(t, err)
		f.event(t).Conn.(*plainConn).session = nil
		c.Close()
		broke(t, f, "(*Session).Keep")
	})
}

func TestRegions(t *testing.T) {
	f := newPlain(t, Options{})
	var rs Regions
	rs.Init(&f.Fabric)
	for text, r := range map[string]mem.Region{
		"on gpu 0":    {Addr: 4096, Len: 1, Dev: mem.GPU(0)},
		"at 0x0":      {Addr: 0, Len: 1, Dev: mem.CPU},
		"not a range": {Addr: 1 << 63, Len: 1<<63 + 1, Dev: mem.CPU},
	} {
		_, err := rs.Register(r)
		require.ErrorContains(t, err, text)
		require.ErrorContains(t, err, "plain: register ")
	}
	k, err := rs.Register(mem.Region{Dev: mem.CPU})
	require.NoError(t, err, "a tensor of no rows")
	_, err = rs.Target(nil, k.ID, k.Token, 0, 0)
	require.NoError(t, err)
	_, err = rs.Target(nil, k.ID, k.Token, 0, 1)
	require.ErrorContains(t, err, "leave the region of 0 bytes")
	_, err = rs.Target(nil, k.ID, k.Token+1, 0, 0)
	require.ErrorIs(t, err, ErrNoKey)
	one, other := &plainConn{}, &plainConn{}
	require.NoError(t, rs.Bind(k, one))
	_, err = rs.Target(one, k.ID, k.Token, 0, 0)
	require.NoError(t, err)
	_, err = rs.Target(other, k.ID, k.Token, 0, 0)
	require.ErrorIs(t, err, ErrNotIts)
	require.False(t, rs.Remove(transport.Key{ID: k.ID, Token: k.Token + 1}))
	require.True(t, rs.Remove(k))
	require.False(t, rs.Remove(k))
	again, err := rs.Register(mem.Region{Dev: mem.CPU})
	require.NoError(t, err)
	require.NotEqual(t, k.ID, again.ID, "the slot is the same")
	_, err = rs.Target(other, again.ID, again.Token, 0, 0)
	require.NoError(t, err, "it was not bound")
	f.close()
	_, err = rs.Register(mem.Region{Dev: mem.CPU})
	require.ErrorIs(t, err, transport.ErrClosed)
}

// TestWindow: operations complete in order; those that had ended have no error.
func TestWindow(t *testing.T) {
	var w Window[string]
	w.Init(4)
	w.Done, w.Sent, w.End = 1<<32-2, 1<<32-2, 1<<32-2 // numbers wrap
	for user := range uint64(4) {
		require.False(t, w.Full())
		*w.Push(user) = "held"
	}
	require.True(t, w.Full())
	ev := make([]transport.Event, 3)
	require.Zero(t, w.Complete(nil, nil, ev))
	w.Sent += 2
	require.Equal(t, 1, w.Complete(nil, nil, ev[:1]))
	require.Equal(t, 3, w.Complete(nil, io.EOF, ev))
	require.Equal(t, []transport.Event{{Kind: transport.EvDone, User: 1}, {Kind: transport.EvDone, User: 2, Err: io.EOF}, {Kind: transport.EvDone, User: 3, Err: io.EOF}}, ev)
	require.Zero(t, w.Complete(nil, io.EOF, ev))
	for i := range uint32(4) {
		require.Empty(t, *w.At(i), "it is let go of")
	}
}

// TestQueue: each Conn is in it once, in the order in which they came.
func TestQueue(t *testing.T) {
	var q Queue[*plainConn]
	all := make([]plainConn, 20)
	for round := range 3 {
		for i := range all[:7*(round+1)-1] {
			q.Push(&all[i])
			q.Push(&all[i])
		}
		for i := range q.Len() {
			require.True(t, all[i].Queued())
			require.Same(t, &all[i], q.Pop())
			require.False(t, all[i].Queued())
		}
	}
}

// TestDoor: of those inside, the silent give way first, and those who have spoken after a while.
func TestDoor(t *testing.T) {
	var d door
	ctx, cancel := context.WithCancel(context.Background())
	spoke := d.enter(ctx, 2, time.Minute)
	spoke.spoke.Store(true)
	silent := d.enter(ctx, 2, time.Minute)
	next := make(chan *guest, 1)
	go func() { next <- d.enter(ctx, 2, time.Minute) }()
	<-silent.ctx.Done()
	require.ErrorIs(t, context.Cause(silent.ctx), errPushedOut)
	require.NoError(t, spoke.ctx.Err())
	require.Len(t, d.guests, 2, "it has not left yet")
	d.leave(silent)
	third := <-next
	require.False(t, third.spoke.Load())
	third.spoke.Store(true)
	go func() { next <- d.enter(ctx, 2, time.Millisecond) }()
	<-spoke.ctx.Done()
	cancel()
	require.Nil(t, <-next)
	d.leave(spoke)
	d.leave(third)
	require.Empty(t, d.guests)
}

func shared(t *testing.T, secret string) *Identity {
	t.Helper()
	id, err := SharedIdentity([]byte(secret), "default")
	require.NoError(t, err)
	return id
}

// TestSharedIdentity holds the derivation fast: nodes of different builds must
// come to the same key.
func TestSharedIdentity(t *testing.T) {
	key := func(secret, cluster string) string {
		id, err := SharedIdentity([]byte(secret), cluster)
		require.NoError(t, err)
		c, err := x509.ParseCertificate(id.cert.Certificate[0])
		require.NoError(t, err)
		require.NoError(t, c.CheckSignature(x509.PureEd25519, c.RawTBSCertificate, c.Signature))
		require.Equal(t, id.cert.PrivateKey.(ed25519.PrivateKey).Public(), c.PublicKey)
		return hex.EncodeToString(c.PublicKey.(ed25519.PublicKey))
	}
	golden := key("correct horse battery staple", "default")
	require.Equal(t, "bdeb89cf2787a577c5a9bf53fed28eb42b53164604661a8e3648bfcb1be95563", golden)
	require.Equal(t, shared(t, "a").cert, shared(t, "a").cert)
	for _, other := range []string{
		key("correct horse battery staplf", "default"), key("correct horse battery staple", "default2"),
		key("correct horse battery stapledefault", ""), key("correct horse battery staple ", "default"),
	} {
		require.NotEqual(t, golden, other)
	}
}

// TestSaid: a peer's reason cannot change a terminal or a log, and is short.
func TestSaid(t *testing.T) {
	require.EqualError(t, said([]byte("no\x1b[2J\nroom\xff für")), "the peer: no?[2J?room? für")
	require.Len(t, said(make([]byte, 4000)).Error(), len("the peer: ")+maxSaid)
}
