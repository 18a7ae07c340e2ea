package transporttest

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

var endCases = []testCase{
	{"ClosedIsLast", testClosedLast},
	{"QuietAfterClosed", testQuietClosed},
	{"QuietAfterFreed", testQuietFreed},
	{"SourceFreedWhileSent", testSourceFreed},
	{"CloseDuringConnect", testCloseConnect},
	{"DeathBetweenDownAndClosed", testDeathInEnd},
}

// testClosedLast: a Conn that its user closed and one that went down end in EvClosed, with ops open,
// also where Close is called several times. take and settled check that it comes once and last.
func testClosedLast(w *world) {
	for _, idle := range []bool{false, true} {
		a, b := w.pair()
		if !idle {
			b.n.asleep = true
			a.flood(b.n.target(1 << 16))
			b.n.asleep = false
		}
		a.close()
		a.close()
		w.until("the conn that was closed has ended", func() bool { return a.isOver })
		a.close()
		w.until("the peer hears", func() bool { return b.isDown })
		w.turns(50)
		b.close()
		w.until("the conn that went down has ended", func() bool { return b.isOver })
		b.close()
		w.turns(50)
	}
}

// testQuietClosed: a peer writes all the time, and from EvClosed on nothing of it lands.
func testQuietClosed(w *world) {
	w.quiet(func(b *link, _ target) (begin func(), over func() bool) {
		return b.close, func() bool { return b.isOver }
	})
}

// testQuietFreed is the same for EvFreed.
func testQuietFreed(w *world) {
	w.quiet(func(b *link, dst target) (begin func(), over func() bool) {
		return func() { b.n.deregister(dst.key) }, func() bool { return b.n.freed(dst.key) }
	})
}

// quiet has a peer write all the time to memory of b, and has an end begin at any time. Nothing lands
// when it is over.
func (w *world) quiet(end func(b *link, dst target) (begin func(), over func() bool)) {
	const size = 1 << 20
	for round := range 20 {
		a, b := w.pair()
		dst, src := b.n.target(size), w.source(1, size)
		begin, over := end(b, dst)
		var stop atomic.Bool
		var writer sync.WaitGroup
		writer.Go(func() {
			for !stop.Load() {
				_, _ = a.try(dst.write(0, 1, src)) // the Conn may have ended
				a.n.poll()
				runtime.Gosched()
			}
		})
		for range round {
			b.n.poll()
			runtime.Gosched()
		}
		begin()
		looks := 0
		for limit := time.Now().Add(patience); !over() && time.Now().Before(limit); looks++ {
			b.n.poll()
			Rest(looks)
		}
		ended := over()
		w.poison(dst.Span())
		for range 200 {
			b.n.poll()
			runtime.Gosched()
		}
		w.untouched("target", dst.Span())
		stop.Store(true)
		writer.Wait()
		w.untouched("target", dst.Span())
		a.n.close()
		b.n.close()
		if !ended {
			w.Fatalf("the end has not come within %v", patience)
		}
	}
}

// testSourceFreed ends the key of memory while it is being sent. The write ends, well or not, and the
// memory is free after that.
func testSourceFreed(w *world) {
	const size = 4 << 20
	for round := range 5 {
		a, b := w.pair()
		src := a.n.target(size)
		a.post(b.n.target(size).write(0, 1, src.Span()))
		w.turns(round)
		a.n.free(src.key)
		w.until("the write has ended", func() bool { return a.idle() || a.isDown })
		a.close()
		w.until("the conn has ended", func() bool { return a.isOver })
	}
}

// testCloseConnect gives up Connects at any time, and closes Fabrics beside them. Each Conn that
// came of it ends in EvClosed.
func testCloseConnect(w *world) {
	b := w.open("b")
	for round := range 20 {
		a := w.open("a")
		ctx, stop := context.WithCancel(context.Background())
		ds := []*dialing{a.dial(ctx, b.f.Addr()), a.dial(ctx, b.f.Addr()), a.dial(context.Background(), b.f.Addr())}
		w.turns(round)
		stop()
		w.turns(round / 2)
		var closing sync.WaitGroup
		closing.Go(func() { _ = a.f.Close() })
		a.closed = true
		for _, d := range ds {
			w.until("connect returns", d.over)
		}
		closing.Wait()
		w.until("the conns have ended", func() bool {
			for _, l := range a.links {
				if !l.isOver {
					return false
				}
			}
			return true
		})
	}
	w.until("the listener hears of their ends", func() bool {
		for _, l := range b.links {
			if !l.isDown {
				return false
			}
		}
		return true
	})
}

// testDeathInEnd kills a peer whose Conn has gone down and was closed.
func testDeathInEnd(w *world) {
	if w.bed.Kill == nil {
		w.Skip("the bed has no way to kill a fabric")
	}
	a, b := w.pair()
	dst := a.n.target(1 << 20)
	for range 100 {
		if k, err := b.try(dst.write(0, 1, w.source(1, 1<<20))); k == 0 || err != nil {
			break
		}
	}
	bad := b.n.target(8)
	bad.key.Token ^= 1
	a.post(bad.write(0, 1, w.source(1, 8)))
	w.until("the conn goes down", func() bool { return a.isDown })
	a.close()
	b.n.killed = true
	w.bed.Kill(b.n.f)
	w.until("the conn has ended", func() bool { return a.isOver })
	w.poison(dst.Span())
	w.turns(200)
	w.untouched("target", dst.Span())
}
