package cudaipc

import (
	"context"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/cshim/cuda"
	"fserver/engine/gpu"
	"fserver/engine/gpu/fakegpu"
	"fserver/engine/mem"
	"fserver/engine/transport"
)

// soon fails the test if do does not return: it waits for somebody who is in the driver.
func soon(t *testing.T, what string, do func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		do()
	}()
	select {
	case <-done:
	case <-time.After(10 * time.Second):
		t.Fatal(what + " waits for a call of the driver")
	}
}

// aside does what needs no GPU, while somebody is in the driver.
func (s *side) aside(t *testing.T, spare mem.Region, to transport.Addr) {
	t.Helper()
	soon(t, "Register", func() {
		k, err := s.f.Register(spare)
		require.NoError(t, err)
		s.f.Deregister(k)
	})
	soon(t, "Connect", func() {
		c, err := s.f.Connect(context.Background(), to)
		require.NoError(t, err)
		c.Close()
	})
	soon(t, "Arm", func() { s.f.FD(); s.f.Arm() })
	soon(t, "Peer", func() { _ = s.c.Peer() })
}

// TestDriverWaits: while a call waits in the driver that prepares the memory of one Conn,
// all others go on, and so does the Conn itself with what needs no GPU.
func TestDriverWaits(t *testing.T) {
	for _, c := range []struct {
		call        string
		pieces, own bool
	}{
		{call: "Pin"},       // of the segment
		{call: "NewStream"}, // of the Conn
		{call: "ImportIPC"},
		{call: "Describe"},
		{call: "MapFDs", pieces: true},
		{call: "Reach", own: true},
	} {
		t.Run(c.call, func(t *testing.T) {
			g := fakegpu.New()
			g.Pieces = c.pieces
			a, b := pairOf(t, g, overCMA)
			if c.own {
				b.f.own = a.f.own
			}
			src, dst, spare := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1), onGPU(t, g, 4096, 1)
			k, free := b.key(t, dst), b.key(t, spare)
			first, there := a.c, b.c
			in, end := g.Block(t, c.call)
			soon(t, "Post", func() { a.post(t, write(k, src, transport.Point{})) })
			soon(t, "Poll", func() {
				for blocked := false; !blocked; {
					a.poll(t)
					b.poll(t)
					select {
					case <-in:
						blocked = true
					default:
					}
				}
			})
			a.aside(t, mem.Region{Addr: spare.Addr, Len: 1024, Dev: spare.Dev}, b.f.Addr())
			soon(t, "another Conn", func() {
				var err error
				b.c = nil
				a.c, err = a.f.Connect(context.Background(), b.f.Addr())
				require.NoError(t, err)
				until(t, a, b, func() bool { return b.c != nil })
				a.post(t, write(free, src, transport.Point{}))
				host := []byte("host")
				text := transport.Op{Kind: transport.OpFrame, Frame: host, Passes: true}
				for _, at := range []transport.Conn{a.c, first} {
					b.frames = nil
					n, err := at.Post([]transport.Op{text})
					require.NoError(t, err)
					require.Equal(t, 1, n)
					until(t, a, b, func() bool { return len(b.frames) == 1 })
				}
				until(t, a, b, func() bool { return len(b.writes) == 1 })
				holds(t, g, spare, 5)
				a.c.Close()
				runtime.KeepAlive(host)
			})
			require.False(t, func() bool {
				b := make([]byte, 1)
				_ = (fakegpu.Memory{G: g}).Load(b, mem.Span{Addr: dst.Addr, Len: 1})
				return b[0] == 5
			}())
			end()
			a.c, b.c = first, there
			until(t, a, b, func() bool { return len(b.writes) == 2 })
			holds(t, g, dst, 5)
			b.free(t, k)
			b.free(t, free)
		})
	}
}

// TestDriverWaitsInPost: while a Post waits in the driver, as behind a stream whose queue is
// full, whoever needs no GPU goes on, and a Poll finds nothing.
func TestDriverWaitsInPost(t *testing.T) {
	for name, alone := range map[string]bool{"mapped": false, "staged": true} { // the call is ours, or that of the Fabric below
		t.Run(name, func(t *testing.T) {
			const call = "Enqueue"
			g := fakegpu.New()
			g.Alone = alone
			a, b := pairOf(t, g, overCMA)
			src, dst, spare := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1), onGPU(t, g, 4096, 1)
			k := b.key(t, dst)
			a.post(t, write(k, src, transport.Point{}))
			until(t, a, b, func() bool { return len(b.writes) == 1 && len(a.done) == 1 })
			a.done, b.writes = nil, nil
			ops := write(k, src, transport.Point{})
			other, err := a.f.Connect(context.Background(), b.f.Addr())
			require.NoError(t, err)
			in, end := g.Block(t, call)
			over := make(chan struct{})
			go func() {
				defer close(over)
				until(t, a, b, func() bool { k, _ := a.try(ops); return k == 1 })
				until(t, a, b, func() bool { return len(b.writes) == 1 && len(a.done) == 1 })
			}()
			<-in
			a.aside(t, spare, b.f.Addr())
			soon(t, "Close", other.Close)
			soon(t, "Poll", func() {
				var ev [1]transport.Event
				n, err := a.f.Poll(ev[:])
				require.NoError(t, err)
				require.Zero(t, n)
			})
			soon(t, "Post", func() {
				n, err := a.c.Post(nil)
				require.NoError(t, err)
				require.Zero(t, n)
			})
			end()
			<-over
			b.free(t, k)
			require.NoError(t, a.f.Close())
		})
	}
}

// TestDeregisterWaitsAlone: a key whose end has to wait for a lost peer that lives, and for its
// GPU, keeps nobody else. When its memory is quiet, the next Poll gives the region back.
func TestDeregisterWaitsAlone(t *testing.T) {
	g := fakegpu.New()
	a, b, dst, k, _, open := underWay(t, g)
	spare := onGPU(t, g, 4096, 1)
	stuck := b.c
	stuck.Close()
	b.f.Deregister(k)
	ending := func() int {
		b.f.mu.Lock()
		defer b.f.mu.Unlock()
		return len(b.f.ending)
	}
	until(t, a, b, func() bool { return ending() == 1 })
	b.aside(t, spare, a.f.Addr())
	soon(t, "another Conn", func() {
		b.c = nil
		c, err := a.f.Connect(context.Background(), b.f.Addr())
		require.NoError(t, err)
		until(t, a, b, func() bool { return b.c != nil })
		a.c = c // and not the Conn that b has opened
		to := b.key(t, spare)
		src := onGPU(t, g, 4096, 6)
		a.post(t, write(to, src, transport.Point{}))
		until(t, a, b, func() bool { return len(b.writes) == 1 && len(a.done) >= 1 })
		b.free(t, to)
		holds(t, g, spare, 6)
	})
	require.Equal(t, 1, ending())
	holds(t, g, dst, 1)
	open()
	until(t, a, b, func() bool { return ending() == 0 })
	holds(t, g, dst, 5)
}

// panics is a Device that does so.
type panics struct{ gpu.Device }

func (panics) ImportIPC(cuda.IPCHandle) (uint64, error) { panic("a driver's own") }

// TestDriverPanics: Poll tells of a panic beside it, and the Fabric still closes.
func TestDriverPanics(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overCMA)
	a.f.calls.Dev = panics{g}
	src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1)
	a.post(t, write(b.key(t, dst), src, transport.Point{}))
	var err error
	for end := time.Now().Add(20 * time.Second); err == nil && time.Now().Before(end); b.poll(t) {
		_, err = a.f.Poll(make([]transport.Event, 4))
	}
	var p *transport.PanicError
	require.ErrorAs(t, err, &p)
	require.Equal(t, "a driver's own", p.Value)
	require.Contains(t, p.Stack, "ImportIPC")
	soon(t, "Close", func() { require.NoError(t, a.f.Close()) })
}
