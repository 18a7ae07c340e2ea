package transporttest

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/transport"
)

var closingCases = []testCase{
	{"ConnCloseTellsThePeer", testConnClose},
	{"ConnCloseEndsOpenOps", testConnCloseOpen},
	{"FabricCloseTellsThePeers", testFabricClose},
	{"FabricCloseEndsOpenOps", testFabricCloseOpen},
	{"FabricCloseReleasesConnect", testCloseReleasesConnect},
	{"FabricCloseWhileInUse", testCloseInUse},
	{"CallsAfterClose", testAfterClose},
	{"CloseTwice", testCloseTwice},
	{"LossEndsOpenOps", testLoss},
	{"DeathOfPeer", testDeath},
	{"StalledPeer", testStall},
}

func testConnClose(w *world) {
	a, b := w.pair()
	w.echo(a, b)
	w.until("all is quiet", func() bool { return a.idle() && b.idle() })
	a.close()
	w.until("the peer hears", func() bool { return b.isDown })
	require.ErrorIs(w, b.down, io.EOF)
	w.turns(50) // no further event comes: take checks it
	b.refuses(frame(nil))
	require.ErrorIs(w, a.refuses(frame(nil)), transport.ErrClosed)
	b.close()
	w.transfer(w.connect(a.n, b.n))
}

// refuses waits until Post gives the reason why op is never taken: a moment of
// back-pressure may come before it.
func (l *link) refuses(op transport.Op) (err error) {
	l.n.w.Helper()
	l.n.w.until("post refuses the op", func() bool {
		var k int
		k, err = l.try(op)
		require.Zero(l.n.w, k)
		return err != nil
	})
	return err
}

// flood posts frames and writes until Post takes no more for a while and for many tries, which is
// longer than another goroutine can be in the way, or the Conn pauses, or the Conn ends.
func (l *link) flood(dst target) {
	w := l.n.w
	w.Helper()
	src := w.source(3, dst.Len)
	pause := max(w.bed.Pause, 100*time.Millisecond)
	refused := 0
	for taken := time.Now(); time.Since(taken) < pause || refused < 200; refused++ {
		k, err := l.try(frame(pattern(1, 1000)), dst.write(0, 1, src), frame(nil))
		if err != nil {
			return
		}
		if k > 0 {
			taken, refused = time.Now(), 0
		}
		l.n.poll()
	}
}

// endedIn checks that every op has ended, each either well or in want.
func (l *link) endedIn(want error) {
	l.n.w.Helper()
	for _, d := range l.done {
		if d.err != nil {
			require.ErrorIs(l.n.w, d.err, want)
		}
	}
	require.True(l.n.w, l.idle())
}

func testConnCloseOpen(w *world) {
	a, b := w.pair()
	b.n.asleep = true
	a.flood(b.n.target(1 << 20))
	require.False(w, a.idle())
	a.close()
	w.until("the open ops end", a.idle)
	a.endedIn(transport.ErrClosed)
	require.NotZero(w, a.failed())
	b.n.asleep = false
	w.until("the peer hears", func() bool { return b.isDown })
}

func testFabricClose(w *world) {
	a := w.open("a")
	b, c := w.open("b"), w.open("c")
	ab, ba := w.connect(a, b)
	ca, ac := w.connect(c, a)
	w.echo(ab, ba)
	w.echo(ca, ac)
	bc, cb := w.connect(b, c)
	w.until("all is quiet", func() bool { return ab.idle() && ba.idle() && ca.idle() && ac.idle() })
	a.close()
	w.until("the peers hear", func() bool { return ba.isDown && ca.isDown })
	require.ErrorIs(w, ba.down, io.EOF)
	require.ErrorIs(w, ca.down, io.EOF)
	w.echo(bc, cb)
}

func testFabricCloseOpen(w *world) {
	a, b := w.pair()
	b.n.asleep = true
	a.flood(b.n.target(1 << 20))
	require.False(w, a.idle())
	a.n.close()
	a.n.drain()
	a.endedIn(transport.ErrClosed)
	require.NotZero(w, a.failed())
	b.n.asleep = false
	w.until("the peer hears", func() bool { return b.isDown })
}

func testCloseReleasesConnect(w *world) {
	a, b := w.open("a"), w.mute(transport.Limits{})
	var ds []*dialing
	for range 5 {
		ds = append(ds, a.dial(context.Background(), b.f.Addr()))
	}
	w.turns(100)
	a.close()
	for _, d := range ds {
		w.until("close releases connect", d.over)
		require.ErrorIs(w, d.got.err, transport.ErrClosed)
	}

	c := w.open("c")
	d := c.dial(context.Background(), b.f.Addr())
	w.turns(100)
	b.close()
	w.until("close of the listener releases connect", d.over)
	require.Error(w, d.got.err)
}

// testCloseInUse closes Fabrics from other goroutines while their user polls
// and posts.
func testCloseInUse(w *world) {
	for range 10 {
		a, b := w.pair()
		dst, src := b.n.target(1<<20), w.source(1, 1<<20)
		for range 20 {
			_, err := a.try(dst.write(0, 1, src), frame(nil))
			require.NoError(w, err)
		}
		start := make(chan struct{})
		var closers sync.WaitGroup
		for range 3 {
			closers.Go(func() {
				<-start
				if err := a.n.f.Close(); err != nil {
					w.Errorf("close: %v", err)
				}
			})
		}
		a.n.closed = true
		close(start)
		var err error
		w.until("close is seen", func() bool {
			_, err = a.try(dst.write(0, 1, src))
			return err != nil
		})
		require.ErrorIs(w, err, transport.ErrClosed)
		closers.Wait()
		w.until("the open ops end", a.idle)
		a.endedIn(transport.ErrClosed)
		w.until("the peer hears", func() bool { return b.isDown })
	}
}

func testAfterClose(w *world) {
	a, b := w.pair()
	r := w.alloc(10)
	k := a.n.register(r)
	addr := b.n.f.Addr()
	a.n.close()
	require.ErrorIs(w, w.refused(context.Background(), a.n, addr), transport.ErrClosed)
	_, err := a.try(frame(nil))
	require.ErrorIs(w, err, transport.ErrClosed)
	_, err = a.n.f.Register(r)
	require.Error(w, err)
	// What these say is open. They must do no harm.
	a.n.f.Deregister(k)
	_ = a.n.f.Reaches(addr)
	a.c.Close()
	require.NotEmpty(w, a.n.f.Name())
}

func testCloseTwice(w *world) {
	a, b := w.pair()
	a.close()
	a.close()
	a.n.close()
	a.n.close()
	a.close()
	w.until("the peer hears", func() bool { return b.isDown })
}

// testLoss ends a connection by a forbidden write, with ops open both ways.
func testLoss(w *world) {
	a, b := w.pair()
	ta, tb := a.n.target(1<<20), b.n.target(1<<20)
	bad := tb
	bad.key.Token ^= 1
	a.post(bad.write(0, 1, w.source(1, 1000)))
	for _, p := range []struct {
		l *link
		t target
	}{{a, tb}, {b, ta}} {
		src := w.source(2, 1<<20)
		for {
			k, err := p.l.try(p.t.write(0, 2, src), frame(pattern(1, 5000)))
			if k == 0 || err != nil || len(p.l.open) > 1000 {
				break
			}
		}
	}
	w.until("both ends go down", func() bool { return a.isDown && b.isDown })
	require.Empty(w, b.writes)
	for _, l := range []*link{a, b} {
		l.refuses(frame(nil))
		l.close()
	}
	w.until("all open ops end", func() bool { return a.idle() && b.idle() })
	w.transfer(w.connect(a.n, b.n))
}

func testDeath(w *world) {
	if w.bed.Kill == nil {
		w.Skip("the bed has no way to kill a fabric")
	}
	a, b := w.pair()
	c, _ := w.connect(w.open("c"), b.n)
	b.n.asleep = true
	a.flood(b.n.target(1 << 20))
	require.False(w, a.idle())
	b.n.killed = true
	w.bed.Kill(b.n.f)
	w.until("the peers find out", func() bool { return a.isDown && c.isDown })
	require.NotErrorIs(w, a.down, io.EOF)
	require.NotErrorIs(w, c.down, io.EOF)
	w.until("the open ops end", a.idle)
	require.NotZero(w, a.failed())
	for _, o := range a.done {
		require.False(w, errors.Is(o.err, transport.ErrClosed), "the peer's death is no close of our own")
	}
	w.transfer(w.connect(a.n, c.n))
}

// testStall owes bytes to a peer that takes nothing.
func testStall(w *world) {
	const limit = 400 * time.Millisecond
	a := w.openWith(Options{Gate: Gate{Hello: "a"}, Listen: true, Limits: transport.Limits{Stall: limit}})
	b, c := w.open("b"), w.open("c")
	ab, ba := w.connect(a, b)
	ac, ca := w.connect(a, c)
	b.asleep = true
	start := time.Now()
	ab.flood(b.target(1 << 20))
	w.until("the stalled connection ends", func() bool {
		_, _ = ab.try(frame(nil)) // on a machine under load the flood ends before anything is owed
		return ab.isDown
	})
	require.GreaterOrEqual(w, time.Since(start), limit)
	require.NotErrorIs(w, ab.down, io.EOF)
	w.until("an open op ends", func() bool { return ab.failed() > 0 })
	b.asleep = false
	w.until("the peer hears", func() bool { return ba.isDown })
	w.echo(ac, ca) // a connection that owes nothing is not stalled
}
