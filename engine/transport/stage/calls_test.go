package stage

import (
	"context"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

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
		call  string
		lands bool
	}{
		{call: "NewStream"},        // of the Conn
		{call: "Pin"},              // of the buffers
		{call: "Pin", lands: true}, // of the shadow
	} {
		name := c.call
		if c.lands {
			name += ", lands"
		}
		t.Run(name, func(t *testing.T) {
			g := fakegpu.New()
			a, b := pairOf(t, g, overTCP)
			src, dst, spare := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1), onGPU(t, g, 4096, 1)
			k, free := b.key(t, dst), b.key(t, spare)
			first, there := a.c, b.c
			waits := a.f
			if c.lands {
				waits = b.f
				a.post(t, write(free, src, transport.Point{})) // a has all it needs
				until(t, a, b, func() bool { return len(b.writes) == 1 && len(a.done) == 1 })
				a.done, b.writes = nil, nil
			}
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
			for _, s := range []*side{a, b} {
				if s.f == waits {
					s.aside(t, mem.Region{Addr: spare.Addr, Len: 1024, Dev: spare.Dev}, b.f.Addr())
				}
			}
			soon(t, "another Conn", func() {
				var err error
				b.c = nil
				a.c, err = a.f.Connect(context.Background(), b.f.Addr())
				require.NoError(t, err)
				until(t, a, b, func() bool { return b.c != nil })
				if !c.lands { // copies of the other Conn land behind that one
					a.post(t, write(free, src, transport.Point{}))
				}
				host := []byte("host")
				text := transport.Op{Kind: transport.OpFrame, Frame: host, Passes: true}
				for _, at := range []transport.Conn{a.c, first} {
					b.frames = nil
					n, err := at.Post([]transport.Op{text})
					require.NoError(t, err)
					require.Equal(t, 1, n)
					if !c.lands || at != first {
						until(t, a, b, func() bool { return len(b.frames) == 1 })
					}
				}
				if !c.lands {
					until(t, a, b, func() bool { return len(b.writes) == 1 })
					holds(t, g, spare, 5)
				}
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
			want := 2
			if c.lands {
				want = 1
			}
			until(t, a, b, func() bool { return len(b.writes) == want })
			holds(t, g, dst, 5)
			b.free(t, k)
			b.free(t, free)
		})
	}
}

// TestDriverWaitsInPost: while a Post waits in the driver, as behind a stream whose queue is
// full, whoever needs no GPU goes on, and a Poll finds nothing.
func TestDriverWaitsInPost(t *testing.T) {
	for _, call := range []string{"Enqueue", "NewEvent", "Record"} {
		t.Run(call, func(t *testing.T) {
			g := fakegpu.New()
			a, b := pairOf(t, g, overTCP)
			a.f.calls.Events = call == "NewEvent" || call == "Record"
			src, dst, spare := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1), onGPU(t, g, 4096, 1)
			k := b.key(t, dst)
			if call != "NewEvent" {
				a.post(t, write(k, src, transport.Point{}))
				until(t, a, b, func() bool { return len(b.writes) == 1 && len(a.done) == 1 })
				a.done, b.writes = nil, nil
			}
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

// panics is a Device that does so.
type panics struct{ gpu.Device }

func (panics) Pin(uint64, uint64) (uint64, error) { panic("a driver's own") }

// TestDriverPanics: Poll tells of a panic beside it, and the Fabric still closes.
func TestDriverPanics(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overTCP)
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
	require.Contains(t, p.Stack, "Pin")
	soon(t, "Close", func() { require.NoError(t, a.f.Close()) })
}
