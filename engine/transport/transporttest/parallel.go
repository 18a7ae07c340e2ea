package transporttest

import (
	"encoding/binary"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/mem"
)

var parallelCases = []testCase{
	{"EachFabricInItsOwnGoroutine", testOwnGoroutines},
	{"PollMovesBetweenThreads", testPollMoves},
	{"CallsFromOtherGoroutines", testCallsAround},
}

// testOwnGoroutines lets two Fabrics talk while each has its own driver.
func testOwnGoroutines(w *world) {
	const rounds, size = 300, 30000
	a, b := w.pair()
	ta, tb := a.n.target(size), b.n.target(size)
	sa, sb := w.source(1, size), w.source(2, size)
	end := time.Now().Add(patience)
	// ball plays rounds on l: it writes src to the peer, sends the number of
	// the round, and waits for the same from the peer.
	ball := func(l *link, peer target, src mem.Span) {
		for i := range uint32(rounds) {
			for k := 0; k < 2; {
				op := peer.write(0, i, src)
				if k == 1 {
					op = frame(binary.LittleEndian.AppendUint32(nil, i))
				}
				n, err := l.try(op)
				if err != nil {
					w.Errorf("post: %v", err)
					return
				}
				k += n
				l.n.poll()
			}
			for len(l.frames) <= int(i) || len(l.writes) <= int(i) || !l.idle() {
				if l.n.poll(); w.Failed() || time.Now().After(end) {
					w.Errorf("round %d was not answered", i)
					return
				}
				runtime.Gosched()
			}
		}
	}
	var both sync.WaitGroup
	both.Go(func() { ball(a, tb, sa) })
	both.Go(func() { ball(b, ta, sb) })
	both.Wait()
	w.holds("target at a", ta.Span(), 2)
	w.holds("target at b", tb.Span(), 1)
	for i := range a.frames {
		require.Equal(w, uint32(i), binary.LittleEndian.Uint32(a.frames[i]))
		require.Equal(w, uint32(i), binary.LittleEndian.Uint32(b.frames[i]))
	}
}

// testPollMoves hands the driving from one locked thread to the next.
func testPollMoves(w *world) {
	a, b := w.pair()
	taken := 0
	for range 20 {
		done := make(chan struct{})
		go func() {
			defer close(done)
			runtime.LockOSThread() // and end the thread with the goroutine
			w.turn()
			k, err := a.try(frame([]byte("moved")))
			if err != nil {
				w.Errorf("post: %v", err)
			}
			taken += k
			w.turn()
		}()
		<-done
	}
	w.until("the frames arrive", func() bool { return len(b.frames) == taken && a.idle() })
	w.echo(a, b)
}

// testCallsAround registers, connects and closes conns while the Fabrics are
// driven.
func testCallsAround(w *world) {
	a, b := w.pair()
	spare := w.alloc(1 << 16)
	addr := b.n.f.Addr()
	var stop atomic.Bool
	var around sync.WaitGroup
	for _, n := range []*node{a.n, b.n} {
		for range 2 {
			around.Go(func() {
				for !stop.Load() {
					k, err := n.f.Register(spare)
					if err != nil {
						w.Errorf("register: %v", err)
						return
					}
					n.deregister(k)
					_ = n.f.Reaches(addr)
					n.f.Arm()
					for !n.freed(k) && !stop.Load() {
						runtime.Gosched()
					}
				}
			})
		}
	}
	dst, src := b.n.target(1<<16), w.source(1, 1<<16)
	for i := range 100 {
		a.post(frame([]byte{byte(i)}), dst.write(0, uint32(i), src))
	}
	w.until("all arrives", func() bool { return len(b.frames) == 100 && len(b.writes) == 100 && a.idle() })
	stop.Store(true)
	around.Wait()
	w.holds("target", dst.Span(), 1)

	// Conns of the same Fabrics come and go from several goroutines.
	c := w.open("c")
	var ds []*dialing
	for range 16 {
		ds = append(ds, c.dial(w.Context(), addr))
	}
	for _, d := range ds {
		w.until("connect returns", d.over)
		require.NoError(w, d.got.err)
	}
	w.until("the listener hears of all", func() bool { return len(b.n.fresh) == len(ds) })
	for _, d := range ds {
		l := c.link(d.got.c)
		l.closed = true
		around.Go(l.c.Close)
	}
	w.until("the listener hears that they are closed", func() bool {
		for _, l := range b.n.fresh {
			if !l.isDown {
				return false
			}
		}
		return true
	})
	around.Wait()
	w.echo(a, b)
}
