package verbs

import (
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	rdma "fserver/cshim/verbs"
	"fserver/cshim/verbs/fakeverbs"
	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
	"fserver/engine/transport/transporttest"
)

// two is two Fabrics of the fake, each on its own device, and what they have told.
type two struct {
	t      *testing.T
	f      [2]*Fabric
	frames [2][][]byte
	done   [2]int
	down   [2]map[transport.Conn]error
	fresh  [2][]*Conn
	looks  int // polls in a row without an event
}

func newTwo(t *testing.T) *two {
	if onHardware() {
		t.Skip("verbs: only the fake library can inject this")
	}
	w := &two{t: t}
	lib := library(t)
	for i := range w.f {
		w.down[i] = map[transport.Conn]error{}
		w.f[i] = w.open(Options{Library: lib, Device: [2]string{"fake0", "fake1"}[i]})
	}
	return w
}

func (w *two) open(o Options) *Fabric {
	o.Gate, o.Listen = transporttest.Gate{}, "127.0.0.1:0"
	f, err := Open(o)
	require.NoError(w.t, err)
	w.t.Cleanup(func() { require.NoError(w.t, f.Close()) })
	return f
}

// poll rests where nothing comes.
func (w *two) poll() {
	var ev [16]transport.Event
	w.looks++
	for i, f := range w.f {
		n, err := f.Poll(ev[:])
		require.NoError(w.t, err)
		for _, e := range ev[:n] {
			switch e.Kind {
			case transport.EvAccept:
				w.fresh[i] = append(w.fresh[i], e.Conn.(*Conn))
			case transport.EvFrame:
				w.frames[i] = append(w.frames[i], bytes.Clone(e.Data))
			case transport.EvDone:
				w.done[i]++
			case transport.EvDown:
				w.down[i][e.Conn] = e.Err
				e.Conn.Close()
			}
			w.looks = 0
		}
	}
	transporttest.Rest(w.looks)
}

func (w *two) until(what string, cond func() bool) {
	w.t.Helper()
	for end := time.Now().Add(20 * time.Second); !cond(); w.poll() {
		require.True(w.t, time.Now().Before(end), what)
	}
}

// dial connects the first Fabric to the second.
func (w *two) dial() (*Conn, error) {
	var c transport.Conn
	var err error
	over := make(chan struct{})
	go func() {
		defer close(over)
		c, err = w.f[0].Connect(context.Background(), w.f[1].Addr())
	}()
	w.until("connect returns", func() bool {
		select {
		case <-over:
			return true
		default:
			return false
		}
	})
	if err != nil {
		require.Nil(w.t, c)
		return nil, err
	}
	return c.(*Conn), nil
}

func (w *two) pair() (a, b *Conn) {
	a, err := w.dial()
	require.NoError(w.t, err)
	w.until("the listener hears of it", func() bool { return len(w.fresh[1]) > 0 })
	b, w.fresh[1] = w.fresh[1][0], w.fresh[1][1:]
	return a, b
}

func (w *two) frame(c *Conn, b []byte) {
	w.until("a frame is taken", func() bool {
		n, err := c.Post([]transport.Op{{Kind: transport.OpFrame, Frame: b}})
		require.NoError(w.t, err)
		return n == 1
	})
}

// post posts once, without a Poll: it asks again only while another goroutine, which ends a Conn, has the Fabric.
func (w *two) post(c *Conn, ops ...transport.Op) (n int, err error) {
	w.t.Helper()
	for end := time.Now().Add(20 * time.Second); n == 0 && err == nil; runtime.Gosched() {
		n, err = c.Post(ops)
		require.True(w.t, time.Now().Before(end), "nothing is taken")
	}
	return n, err
}

func (w *two) memory(n uint64) mem.Region {
	r, err := mem.Map(n)
	require.NoError(w.t, err)
	w.t.Cleanup(func() { require.NoError(w.t, mem.Unmap(r)) })
	return r
}

// echo shows that a Conn works.
func (w *two) echo(a *Conn) {
	n := len(w.frames[1])
	w.frame(a, []byte("still here"))
	w.until("a frame arrives", func() bool { return len(w.frames[1]) > n })
	require.Equal(w.t, "still here", string(w.frames[1][n]))
}

// TestEveryStatus: whatever the NIC says of a request, its Conn ends at both sides, with the
// NIC's words where they were seen, and nothing else does.
func TestEveryStatus(t *testing.T) {
	w := newTwo(t)
	other, _ := w.pair()
	for s := rdma.Status(1); s <= 23; s++ {
		for _, op := range []fakeverbs.Op{fakeverbs.Send, fakeverbs.Recv} {
			a, b := w.pair()
			fakeverbs.Status(op, 0, uint32(s))
			w.frame(a, []byte("lost"))
			w.until("both ends go down", func() bool { return w.down[0][a] != nil && w.down[1][b] != nil })
			require.NotErrorIs(t, w.down[0][a], io.EOF)
			require.NotErrorIs(t, w.down[1][b], io.EOF)
			if op == fakeverbs.Send && s != rdma.Flushed {
				require.ErrorContains(t, w.down[0][a], s.String())
			}
			w.echo(other)
		}
	}
	w.until("only one Conn is left", func() bool { return fakeverbs.Count("pairs") == 2 })
}

// TestVanish: a device that is taken away ends its Conns, with the reason, and a new one
// is refused.
func TestVanish(t *testing.T) {
	w := newTwo(t)
	a, b := w.pair()
	w.frame(a, []byte("on its way"))
	w.frame(b, []byte("and back"))
	fakeverbs.Vanish(0)
	w.f[0].Arm() // as who sleeps does
	w.until("both ends go down", func() bool { return w.down[0][a] != nil && w.down[1][b] != nil })
	require.NotErrorIs(t, w.down[0][a], io.EOF)
	require.Len(t, w.frames[1], 1, "what had come is given")
	require.Len(t, w.frames[0], 1)
	_, err := w.dial()
	require.ErrorContains(t, err, "input/output error (the device has failed; dmesg says why)")
}

// TestConnectFails: each call that a Conn needs can fail at either side. Connect says so, and
// nothing is left of it.
func TestConnectFails(t *testing.T) {
	w := newTwo(t)
	refused := make(chan error, 1)
	w.f[1] = w.open(Options{
		Options: link.Options{Refused: func(_ string, err error) { refused <- err }}, Library: library2(t), Device: "fake1",
	})
	for _, call := range []string{"ibv_reg_mr", "ibv_create_qp", "INIT", "RTR", "RTS", "ibv_post_recv"} {
		for after := range 2 { // the dialer's or the listener's
			times := 1
			if call == "ibv_create_qp" || call == "INIT" { // which NewQP calls
				times = 2 // the second time without inline data
			}
			fakeverbs.Fail(call, syscall.ENOMEM, after, times)
			_, err := w.dial()
			require.ErrorContains(t, err, "verbs: connect to ", call)
			require.Error(t, <-refused, call) // it makes no more calls
			w.until("nothing is left after "+call, func() bool { return fakeverbs.Count("pairs") == 0 })
			require.Empty(t, w.fresh[0])
			require.Empty(t, w.fresh[1], call)
		}
	}
	a, _ := w.pair()
	w.echo(a)
}

// TestRoom: a Fabric takes as many Conns as its completion queue has room for.
func TestRoom(t *testing.T) {
	w := newTwo(t)
	fakeverbs.Set("cqe", 2*(sendRoom+slots+spare))
	w.f[0] = w.open(Options{Library: library2(t), Device: "fake0"})
	a, _ := w.pair()
	_, _ = w.pair()
	_, err := w.dial()
	require.ErrorContains(t, err, "verbs/fake0:1 has room for 2 connections, and all are in use")
	a.Close()
	w.until("the place is free", func() bool { return a.retired })
	_, _ = w.pair()
}

// library2 is the fake, as it is set.
func library2(t *testing.T) string {
	path, err := fakeverbs.Library()
	require.NoError(t, err)
	return path
}

// TestLockedMemory: Register raises the error that names the limit; a source that is not
// registered is copied.
func TestLockedMemory(t *testing.T) {
	w := newTwo(t)
	a, _ := w.pair()
	const size = 1 << 20
	src, dst := w.memory(size), w.memory(size)
	k, err := w.f[1].Register(dst)
	require.NoError(t, err)
	fakeverbs.Set("locked", 0)
	_, err = w.f[1].Register(dst)
	require.ErrorContains(t, err, "ulimit -l")
	for i, b := 0, src.Span().Bytes(); i < size; i++ {
		b[i] = byte(i * 7)
	}
	posted, err := w.post(a, transport.Op{Kind: transport.OpWrite, Key: k, Src: []mem.Span{src.Span()}})
	require.NoError(t, err)
	require.Equal(t, 1, posted)
	w.until("the write ends", func() bool { return w.done[0] == 1 })
	require.Equal(t, src.Span().Bytes(), dst.Span().Bytes())
}

// TestUnavailable: the reason is named.
func TestUnavailable(t *testing.T) {
	newTwo(t)
	open := func(device string) error {
		_, err := Open(Options{Options: link.Options{Gate: transporttest.Gate{}}, Library: library2(t), Device: device})
		return err
	}
	fails := func(device, reason string) {
		err := open(device)
		var no *transport.ErrUnavailable
		require.ErrorAs(t, err, &no)
		require.ErrorContains(t, err, reason)
	}
	fails("mlx5_9", "no RDMA device mlx5_9")
	fakeverbs.Set("gids", 0)
	fails("", "port 1 of fake1 has no GID")
	fakeverbs.Set("down", 1)
	fails("fake0", "port 1 of fake0 is not active")
	fakeverbs.Set("devices", 0)
	fails("", "no RDMA device (/sys/class/infiniband is empty)")
	fakeverbs.Reset()
	fakeverbs.Set("cqe", sendRoom)
	require.ErrorContains(t, open("fake0"), "too little for one connection")
	fakeverbs.Fail("ibv_create_cq", unix.ENOMEM, 0, 1)
	require.ErrorIs(t, open("fake0"), unix.ENOMEM)
	fakeverbs.Set("devices", 0)
	require.Equal(t, []transport.Finding{{What: "devices", State: transport.No, Text: "no RDMA device", Remedy: "/sys/class/infiniband is empty"}}, probe(nil))
}

// TestHostileMessages: what a peer sends that makes no sense ends its Conn alone, and what comes behind it is not given.
func TestHostileMessages(t *testing.T) {
	w := newTwo(t)
	other, _ := w.pair()
	for name, message := range map[string][]byte{
		"short":              {1, 2, 3},
		"of unknown kind":    {0, 0, 9, 0, 0, 0, 0, 0},
		"too many credits":   {255, 255, kindData, 0, 0, 0, 0, 0},
		"credits of nothing": {},
		"a frame too long":   {0, 0, kindData, 0, 0, 0, 0, 255, 1},
		"no piece of it":     {0, 0, kindData, 0, 0, 0, 1, 0},
		"more than it tells": {0, 0, kindData, 0, 1, 0, 0, 0, 1, 2},
	} {
		a, b := w.pair()
		frames := len(w.frames[1])
		var requests []rdma.Request
		for slot, m := range [][]byte{message, {0, 0, kindData, 0, 1, 0, 0, 0, 7}} {
			copy(a.send(uint32(slot)), m)
			requests = append(requests, rdma.Request{Op: rdma.Send, From: rdma.Piece{Address: uint64(a.buf.Addr) + uint64(slot)*slotBytes, Len: uint32(len(m)), LKey: a.mr.LKey}})
		}
		n, err := a.qp.PostSend(requests)
		require.NoError(t, err)
		require.Equal(t, 2, n)
		w.until(name, func() bool { return w.down[0][a] != nil && w.down[1][b] != nil })
		require.ErrorContains(t, w.down[1][b], "the peer", name)
		require.NotErrorIs(t, w.down[0][a], io.EOF)
		require.Len(t, w.frames[1], frames, name)
		w.echo(other)
	}
}

// TestPlace: a place is read as it was written, in 44 bytes, and one that cannot be is refused.
func TestPlace(t *testing.T) {
	good := place{[16]byte{1, 15: 2}, 0x30405, 6, 1024, 7, slots, slotBytes, 2}
	b, err := binary.Append(nil, binary.LittleEndian, good)
	require.NoError(t, err)
	require.Equal(t, []byte{1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 5, 4, 3, 0, 6, 0, 0, 0, 0, 4, 0, 0, 7, 0, 0, 0, slots, 0, 0, 0, 0, 0x20, 0, 0, 2, 0, 0, 0}, b)
	got, err := parsePlace(b)
	require.NoError(t, err)
	require.Equal(t, good, got)
	_, err = parsePlace(b[1:])
	require.EqualError(t, err, "the peer told of its queue pair in 43 bytes, want 44")
	for at, value := range map[int]byte{40: 3, 19: 1, 23: 1, 25: 0, 32: 1, 34: 1, 37: 0} {
		bad := bytes.Clone(b)
		bad[at] = value
		_, err = parsePlace(bad)
		require.ErrorContains(t, err, "which cannot be", at)
	}
}

// TestStallIsCounted: a Conn that is new when the Fabric looks at it has not stalled.
func TestStallIsCounted(t *testing.T) {
	w := newTwo(t)
	a, _ := w.pair()
	fakeverbs.Set("hold", 1)
	w.frame(a, []byte("on its way"))
	f := w.f[0]
	f.Owned(func() {
		a.inspect(time.Now(), true)
		require.NoError(t, a.Err)
		a.inspect(time.Now().Add(f.Limits.Stall), true)
		require.ErrorIs(t, a.Err, unix.ETIMEDOUT)
	})
	fakeverbs.Set("hold", 0)
}

// TestPanics: a panic of a goroutine is Poll's error, and Close ends all the same.
func TestPanics(t *testing.T) {
	w := newTwo(t)
	f := w.open(Options{Library: library2(t)})
	f.Task(func() { panic("a fault") })
	var err error
	for end := time.Now().Add(10 * time.Second); err == nil && time.Now().Before(end); {
		_, _ = transporttest.Woken(10*time.Second, f)
		_, err = f.Poll(make([]transport.Event, 4))
	}
	var e *transport.PanicError
	require.ErrorAs(t, err, &e)
	require.NoError(t, f.Close())
}

// TestLocal: the registration of a source is that of the newest region that contains it.
func TestLocal(t *testing.T) {
	w := newTwo(t)
	f := w.f[0]
	m := w.memory(1 << 20)
	part := func(off, n uint64) mem.Region {
		r, err := m.Slice(off, n)
		require.NoError(t, err)
		return mem.Region{Addr: r.Addr, Len: r.Len}
	}
	register := func(r mem.Region) (transport.Key, uint32) {
		k, err := f.Register(r)
		require.NoError(t, err)
		return k, uint32(k.Token) ^ mixed(k.ID) // the fake has one key for both
	}
	is := func(want uint32, off, n uint64) {
		t.Helper()
		got, good := f.local(part(off, n).Span())
		require.Equal(t, want != 0, good == n)
		require.Equal(t, want, got)
	}
	is(0, 0, 16)
	whole, all := register(m)
	_, low := register(part(4096, 4096))
	again, same := register(part(4096, 4096))
	_, high := register(part(8192, 4096))
	register(mem.Region{})
	is(all, 0, 1<<20)
	is(all, 0, 16)
	is(same, 4096, 4096)
	is(same, 8191, 1)
	is(all, 8191, 2)
	is(high, 8192, 4096)
	is(all, 1<<20-1, 1)
	f.Deregister(again)
	is(low, 4096, 4096)
	f.Deregister(whole)
	is(0, 0, 16)
	is(0, 8191, 2)
	is(low, 4100, 8)
	_, newest := register(m)
	is(newest, 4100, 8)
	f.Deregister(whole)
}

// TestReadOnlySource: memory that the process cannot write to is registered as a source alone.
func TestReadOnlySource(t *testing.T) {
	w := newTwo(t)
	fakeverbs.Fail("ibv_reg_mr", syscall.EFAULT, 0, 1)
	r := w.memory(4096)
	_, err := w.f[0].Register(r)
	require.NoError(t, err)
	_, n := w.f[0].local(r.Span())
	require.Equal(t, r.Len, n)
}

// TestRelaxedOrdering: memory that travels is registered so that the PCI bus may reorder its bytes, as a source alone too.
func TestRelaxedOrdering(t *testing.T) {
	w := newTwo(t)
	before := fakeverbs.Count("relaxed")
	_, err := w.f[0].Register(w.memory(4096))
	require.NoError(t, err)
	require.Equal(t, before+1, fakeverbs.Count("relaxed"))
	fakeverbs.Fail("ibv_reg_mr", syscall.EFAULT, 0, 1)
	_, err = w.f[0].Register(w.memory(4096))
	require.NoError(t, err)
	require.Equal(t, before+2, fakeverbs.Count("relaxed"))
}

// TestListenerSendsFirst: the listener, whose queue pair is joined first, sends nothing before the dialer's is joined too, and
// what it sends then arrives, also before the dialer has polled.
func TestListenerSendsFirst(t *testing.T) {
	w := newTwo(t)
	fakeverbs.Set("hold", 1) // what the dialer greets with
	before := fakeverbs.Count("requests")
	var a transport.Conn
	over := make(chan error, 1)
	go func() {
		var err error
		a, err = w.f[0].Connect(context.Background(), w.f[1].Addr())
		over <- err
	}()
	w.until("both are joined", func() bool { return fakeverbs.Count("requests") > before })
	for range 100 {
		w.poll()
		time.Sleep(100 * time.Microsecond)
	}
	require.Empty(t, w.fresh[1], "the dialer is not ready")
	fakeverbs.Set("hold", 0)
	dialer := w.f[0]
	w.f[0] = w.f[1] // nobody polls the dialer
	w.until("the listener hears of it", func() bool { return len(w.fresh[0])+len(w.fresh[1]) > 0 })
	w.frame(append(w.fresh[0], w.fresh[1]...)[0], []byte("at once"))
	require.NoError(t, <-over)
	w.f[0] = dialer
	w.until("it arrives", func() bool { return len(w.frames[0]) == 1 })
	require.Equal(t, "at once", string(w.frames[0][0]))
	w.echo(a.(*Conn))
}

// TestEvents: what the device tells of a queue pair ends its Conn, and of the completion queue all Conns of the Fabric, with
// the reason, whether the user polls or sleeps.
func TestEvents(t *testing.T) {
	for _, kind := range []rdma.EventType{rdma.CQError, rdma.QPFatal, rdma.QPRequest, rdma.QPAccess} {
		for _, sleeps := range []bool{false, true} {
			w := newTwo(t)
			a, b := w.pair()
			other, _ := w.pair()
			w.echo(a)
			fakeverbs.Event(0, int(kind), 0, a.number)
			if sleeps {
				woken, err := transporttest.Woken(10*time.Second, w.f[0])
				require.NoError(t, err)
				require.Len(t, woken, 1)
			}
			w.until("both ends go down", func() bool { return w.down[0][a] != nil && w.down[1][b] != nil })
			require.ErrorContains(t, w.down[0][a], kind.String())
			require.ErrorContains(t, w.down[1][b], "the peer: ")
			require.ErrorContains(t, w.down[1][b], kind.String())
			if kind == rdma.CQError {
				w.until("the other one too", func() bool { return w.down[0][other] != nil })
				require.ErrorContains(t, w.down[0][other], kind.String())
			} else {
				require.Empty(t, w.down[0][other])
				w.echo(other)
			}
		}
	}
}

// TestUnreachable: Connect notices that the queue pair does not reach the peer's, and says by which
// addresses.
func TestUnreachable(t *testing.T) {
	w := newTwo(t)
	fails := func(reason string) {
		t.Helper()
		_, err := w.dial()
		require.ErrorContains(t, err, reason)
		require.ErrorContains(t, err, "no path from GID "+w.f[0].at.gid().String()+" of verbs/fake0:1 to GID "+w.f[1].at.gid().String()+" of the peer: ")
		w.until("nothing is left", func() bool { return fakeverbs.Count("pairs") == 0 })
		require.Empty(t, w.fresh[1])
	}
	const retryExceeded = 12
	fakeverbs.Status(fakeverbs.Write, 0, retryExceeded)
	fails("the peer did not acknowledge in time (retries exceeded)")
	good := w.f[1].at
	w.f[1].at.gids = []rdma.GID{{Raw: [16]byte{15: 0xff}, Index: good.gid().Index, Type: rdma.RoCEv2}} // of nobody
	fails("join queue pair")
	w.f[1].at = good
	fakeverbs.Set("hold", 1)
	w.f[0].Limits.Handshake = time.Second
	fails("nothing was acknowledged in ")
	w.f[0].Limits.Handshake = time.Hour
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	_, err := w.f[0].Connect(ctx, w.f[1].Addr())
	require.ErrorIs(t, err, context.DeadlineExceeded)
	w.until("nothing is left", func() bool { return fakeverbs.Count("pairs") == 0 })
	fakeverbs.Set("hold", 0)
	a, _ := w.pair()
	w.echo(a)
}

// TestIPv6: a port without an IPv4 address is used by its global IPv6 GID.
func TestIPv6(t *testing.T) {
	w := newTwo(t)
	fakeverbs.Set("gids", 1)
	for i := range w.f {
		w.f[i] = w.open(Options{Library: library2(t), Device: fakeverbs.Devices()[i]})
		require.Equal(t, []string{"fd00:77::1", "fd00:77::2"}[i], w.f[i].at.gid().String())
	}
	a, _ := w.pair()
	w.echo(a)
}

// TestNumberUsedAgain: a device gives the number of a queue pair that is gone to the next one, also
// before the end of its Conn has been told.
func TestNumberUsedAgain(t *testing.T) {
	w := newTwo(t)
	f := w.f[0]
	old, _ := w.pair()
	old.Close()
	is := func(what *bool) (v bool) {
		f.Owned(func() { v = *what })
		return v
	}
	w.until("the queue pair is being destroyed", func() bool { return is(&old.destroying) })
	require.Eventually(t, func() bool { return is(&old.gone) }, 10*time.Second, time.Millisecond)
	c, err := f.Connect(context.Background(), w.f[1].Addr())
	require.NoError(t, err)
	next := c.(*Conn)
	require.Equal(t, old.number, next.number)
	w.until("the end of the old one is told", func() bool { return is(&old.retired) })
	w.echo(next)
	w.until("its frame is acknowledged", func() bool { return w.done[0] == 1 })
}

// TestNotFlushed: the end of a Conn is told in bounded time, however long Limits.Stall is, if the device does not give back
// what was posted.
func TestNotFlushed(t *testing.T) {
	w := newTwo(t)
	for i := range w.f {
		o := Options{Library: library2(t), Device: fakeverbs.Devices()[i]}
		o.Limits.Stall = time.Hour
		w.f[i] = w.open(o)
	}
	a, b := w.pair()
	fakeverbs.Fail("ibv_modify_qp", syscall.EIO, 0, 2) // what the queue pairs have posted stays there
	a.Close()
	for i, c := range []*Conn{a, b} {
		w.until("the end is told", func() (v bool) {
			w.f[i].Owned(func() { v = c.retired })
			return v
		})
	}
	require.Zero(t, fakeverbs.Count("pairs"))
}
