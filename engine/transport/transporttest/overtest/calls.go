package overtest

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

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

// Aside does what needs no GPU, while somebody is in the driver.
func (s *Side[F]) Aside(t *testing.T, spare mem.Region, to transport.Addr) {
	t.Helper()
	soon(t, "Register", func() {
		k, err := s.F.Register(spare)
		require.NoError(t, err)
		s.F.Deregister(k)
	})
	soon(t, "Connect", func() {
		c, err := s.F.Connect(context.Background(), to)
		require.NoError(t, err)
		c.Close()
	})
	soon(t, "Arm", func() { s.F.FD(); s.F.Arm() })
	soon(t, "Peer", func() { _ = s.C.Peer() })
}

// DriverWaits: while a call waits in the driver that prepares the memory of one Conn,
// all others go on, and so does the Conn itself with what needs no GPU. If lands, it is b that waits, after a write.
func DriverWaits[F Fabric](t *testing.T, g *fakegpu.GPU, a, b *Side[F], call string, lands bool) {
	src, dst, spare := OnGPU(t, g, 4096, 5), OnGPU(t, g, 4096, 1), OnGPU(t, g, 4096, 1)
	k, free := b.Key(t, dst), b.Key(t, spare)
	first, there, waits := a.C, b.C, a
	if lands {
		waits = b
		a.Post(t, Write(free, src, transport.Point{})) // a has all it needs
		Until(t, a, b, func() bool { return len(b.Writes) == 1 && len(a.Done) == 1 })
		a.Done, b.Writes = nil, nil
	}
	in, end := g.Block(t, call)
	soon(t, "Post", func() { a.Post(t, Write(k, src, transport.Point{})) })
	soon(t, "Poll", func() {
		for blocked := false; !blocked; {
			a.Poll(t)
			b.Poll(t)
			select {
			case <-in:
				blocked = true
			default:
			}
		}
	})
	waits.Aside(t, mem.Region{Addr: spare.Addr, Len: 1024, Dev: spare.Dev}, b.F.Addr())
	soon(t, "another Conn", func() {
		Connect(t, a, b)
		if !lands { // copies of the other Conn land behind that one
			a.Post(t, Write(free, src, transport.Point{}))
		}
		for _, at := range []transport.Conn{a.C, first} {
			b.Frames = nil
			n, err := at.Post([]transport.Op{Text("host", true)})
			require.NoError(t, err)
			require.Equal(t, 1, n)
			if !lands || at != first {
				Until(t, a, b, func() bool { return len(b.Frames) == 1 })
			}
		}
		if !lands {
			Until(t, a, b, func() bool { return len(b.Writes) == 1 })
			Holds(t, g, spare, 5)
		}
		a.C.Close()
	})
	var byte1 [1]byte
	require.NoError(t, fakegpu.Memory{G: g}.Load(byte1[:], mem.Span{Addr: dst.Addr, Len: 1}))
	require.Equal(t, byte(1), byte1[0])
	end()
	a.C, b.C = first, there
	want := 2
	if lands {
		want = 1
	}
	Until(t, a, b, func() bool { return len(b.Writes) == want })
	Holds(t, g, dst, 5)
	b.Free(t, k)
	b.Free(t, free)
}

// DriverWaitsInPost: while a Post waits in a call of the driver, as behind a stream whose queue is
// full, whoever needs no GPU goes on, and a Poll finds nothing. If warm, a write has been made before.
func DriverWaitsInPost[F Fabric](t *testing.T, g *fakegpu.GPU, a, b *Side[F], call string, warm bool) {
	src, dst, spare := OnGPU(t, g, 4096, 5), OnGPU(t, g, 4096, 1), OnGPU(t, g, 4096, 1)
	k := b.Key(t, dst)
	if warm {
		a.Post(t, Write(k, src, transport.Point{}))
		Until(t, a, b, func() bool { return len(b.Writes) == 1 && len(a.Done) == 1 })
		a.Done, b.Writes = nil, nil
	}
	ops := Write(k, src, transport.Point{})
	other, err := a.F.Connect(context.Background(), b.F.Addr())
	require.NoError(t, err)
	in, end := g.Block(t, call)
	over := make(chan struct{})
	go func() {
		defer close(over)
		Until(t, a, b, func() bool { k, _ := a.Try(ops); return k == 1 })
		Until(t, a, b, func() bool { return len(b.Writes) == 1 && len(a.Done) == 1 })
	}()
	<-in
	a.Aside(t, spare, b.F.Addr())
	soon(t, "Close", other.Close)
	soon(t, "Poll", func() {
		var ev [1]transport.Event
		n, err := a.F.Poll(ev[:])
		require.NoError(t, err)
		require.Zero(t, n)
	})
	soon(t, "Post", func() {
		n, err := a.C.Post(nil)
		require.NoError(t, err)
		require.Zero(t, n)
	})
	end()
	<-over
	b.Free(t, k)
	require.NoError(t, a.F.Close())
}

// DriverPanics: Poll tells of a panic in a call that a write of a makes aside, and the Fabric still closes.
func DriverPanics[F Fabric](t *testing.T, g *fakegpu.GPU, a, b *Side[F], call string) {
	src, dst := OnGPU(t, g, 4096, 5), OnGPU(t, g, 4096, 1)
	a.Post(t, Write(b.Key(t, dst), src, transport.Point{}))
	var err error
	for end := time.Now().Add(20 * time.Second); err == nil && time.Now().Before(end); b.Poll(t) {
		_, err = a.F.Poll(make([]transport.Event, 4))
	}
	var p *transport.PanicError
	require.ErrorAs(t, err, &p)
	require.Equal(t, PanicValue, p.Value)
	require.Contains(t, p.Stack, call)
	soon(t, "Close", func() { require.NoError(t, a.F.Close()) })
}

// PanicValue is what the Device of DriverPanics panics with.
const PanicValue = "a driver's own"
