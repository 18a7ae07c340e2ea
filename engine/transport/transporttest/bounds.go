package transporttest

import (
	"bytes"
	"io"
	"math"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/stretchr/testify/require"

	"fserver/engine/mem"
	"fserver/engine/transport"
)

var boundsCases = []testCase{
	{"WriteOutOfBounds", testOutOfBounds},
	{"WriteAfterDeregister", testAfterDeregister},
	{"DeregisterStopsWrite", testDeregisterStops},
	{"DeregisterFromAnotherGoroutine", testDeregisterAside},
	{"DeregisterTwice", testDeregisterTwice},
	{"BoundKeyIsOnePeers", testBind},
	{"WriteToMemoryNotInUse", testNotInUse},
}

// testOutOfBounds posts writes that the peer did not allow. Each ends its own
// connection at both ends and nothing else.
func testOutOfBounds(w *world) {
	const size = 4096
	offender, victim, other := w.open("offender"), w.open("victim"), w.open("other")
	lo, lv := w.connect(other, victim)
	dst := victim.target(size)
	decoy := victim.target(size) // has another token
	foreign := other.target(size)
	src := w.source(1, size)
	from := func(n uint64) mem.Span { return slice(src, 0, n) }
	with := func(change func(k *transport.Key)) target {
		t := dst
		change(&t.key)
		return t
	}
	for _, c := range []struct {
		name string
		op   transport.Op
	}{
		{"wrong token", with(func(k *transport.Key) { k.Token ^= 1 }).write(0, 1, from(8))},
		{"no token", with(func(k *transport.Key) { k.Token = 0 }).write(0, 1, from(8))},
		{"token of another region", with(func(k *transport.Key) { k.Token = decoy.key.Token }).write(0, 1, from(8))},
		{"unknown number", with(func(k *transport.Key) { k.ID += 1 << 40 }).write(0, 1, from(8))},
		{"largest number", with(func(k *transport.Key) { k.ID = math.MaxUint64 }).write(0, 1, from(8))},
		{"key of another fabric", foreign.write(0, 1, from(8))},
		{"one byte past the end", dst.write(1, 1, from(size))},
		{"wholly past the end", dst.write(size, 1, from(1))},
		{"far past the end", dst.write(1<<40, 1, from(1))},
		{"offset and length overflow", dst.write(math.MaxUint64-7, 1, from(8))},
		{"offset and length overflow to inside", dst.write(math.MaxUint64-7, 1, from(16))},
		{"large and one byte past the end", dst.write(size/2, 1, from(size/2+1))},
	} {
		a, b := w.connect(offender, victim)
		a.post(c.op)
		w.until(c.name+": both ends go down", func() bool { return a.isDown && b.isDown })
		require.NotErrorIs(w, b.down, io.EOF, c.name)
		require.NotErrorIs(w, a.down, io.EOF, c.name)
		require.Empty(w, b.writes, c.name)
		w.untouched(c.name, dst.Span())
		w.untouched(c.name, decoy.Span())
		w.untouched(c.name, foreign.Span())
		require.False(w, lo.isDown || lv.isDown, c.name)
		w.echo(lo, lv)
	}
	w.transfer(lo, lv)
	w.transfer(w.connect(offender, victim))
}

func testAfterDeregister(w *world) {
	a, b := w.pair()
	dst, src := b.n.target(1000), w.source(1, 1000)
	a.post(dst.write(0, 1, src))
	w.until("the write arrives", func() bool { return len(b.writes) == 1 && a.idle() })
	b.n.free(dst.key)
	w.poison(dst.Span())
	a.post(dst.write(0, 2, src))
	w.until("both ends go down", func() bool { return a.isDown && b.isDown })
	w.untouched("target", dst.Span())
	require.Len(w, b.writes, 1)
}

// testDeregisterStops takes the key away in the middle of a large write. What has landed
// whole before EvFreed may still arrive.
func testDeregisterStops(w *world) {
	const size = 32 << 20
	a, b := w.pair()
	dst, src := b.n.target(size), w.source(1, size)
	first, start, got := slice(dst.Span(), 0, 64), pattern(1, 64), make([]byte, 64)
	a.post(dst.write(0, 1, src))
	w.until("the write has begun", func() bool {
		w.load(got, first)
		return difference(got, start) == ""
	})
	b.n.free(dst.key)
	whole := true
	if len(b.writes) == 0 {
		end := make([]byte, 64)
		w.load(end, slice(dst.Span(), size-64, 64))
		whole = bytes.Equal(end, pattern(1, size)[size-64:])
	}
	w.poison(dst.Span())
	if !whole {
		w.until("both ends go down", func() bool { return a.isDown && b.isDown })
		require.Empty(w, b.writes)
	}
	w.until("the write ends", a.idle)
	w.turns(100)
	w.untouched("target", dst.Span())
}

// testDeregisterAside takes the key away while another goroutine polls.
func testDeregisterAside(w *world) {
	const size = 4 << 20
	for i := range 20 {
		a, b := w.pair()
		dst, src := b.n.target(size), w.source(1, size)
		var begun atomic.Bool
		var aside sync.WaitGroup
		aside.Go(func() {
			for !begun.Load() {
				runtime.Gosched()
			}
			b.n.deregister(dst.key)
		})
		a.post(dst.write(0, 1, src), dst.write(0, 2, src), dst.write(0, 3, src))
		w.turns(i)
		begun.Store(true)
		aside.Wait()
		w.until("the key is freed", func() bool { return b.n.freed(dst.key) })
		w.poison(dst.Span())
		w.until("the writes are refused, or have arrived before", func() bool {
			return a.isDown && b.isDown || len(b.writes) == 3
		})
		w.untouched("target", dst.Span())
		a.n.close()
		b.n.close()
	}
}

func testDeregisterTwice(w *world) {
	a, b := w.pair()
	dst := b.n.target(10)
	b.n.deregister(dst.key)
	b.n.f.Deregister(dst.key)
	b.n.f.Deregister(transport.Key{})
	w.until("the key is freed", func() bool { return b.n.freed(dst.key) })
	b.n.f.Deregister(dst.key)
	w.turns(50)
	w.transfer(a, b)
}

// testBind keeps a key to one peer, then to another.
func testBind(w *world) {
	victim := w.open("victim")
	if w.bed.Alone {
		w.Skip("nobody stands between a peer and memory that it has been shown")
	}
	first, second, third := w.open("first"), w.open("second"), w.open("third")
	a, atA := w.connect(first, victim)
	b, atB := w.connect(second, victim)
	dst, src, evil := victim.target(8), w.source(1, 8), w.source(2, 8)
	arrives := func(from, to *link) {
		n := len(to.writes)
		from.post(dst.write(0, 1, src))
		w.until("the write arrives", func() bool { return len(to.writes) > n && from.idle() })
		require.Zero(w, from.failed())
	}
	arrives(a, atA) // good everywhere until it is bound
	arrives(b, atB)
	require.NoError(w, victim.f.Bind(dst.key, atA.c))
	arrives(a, atA)
	c, atC := w.connect(third, victim)
	c.post(dst.write(0, 1, evil))
	w.until("both ends go down", func() bool { return c.isDown && atC.isDown })
	require.NotErrorIs(w, atC.down, io.EOF)
	require.Empty(w, atC.writes)
	w.holds("target", dst.Span(), 1)

	require.NoError(w, victim.f.Bind(dst.key, atB.c))
	arrives(b, atB)
	n := len(atA.writes)
	a.post(dst.write(0, 1, evil))
	w.until("both ends go down", func() bool { return a.isDown && atA.isDown })
	require.Len(w, atA.writes, n)
	w.holds("target", dst.Span(), 1)
	arrives(b, atB)
}

// testNotInUse has a peer write to a key whose memory is not in use: it may be gone.
func testNotInUse(w *world) {
	if w.bed.Alone {
		w.Skip("nobody stands between a peer and memory that it has been shown")
	}
	victim := w.open("victim")
	var uses atomic.Int32
	r := w.alloc(8)
	r.InUse = &uses
	dst := target{r, victim.register(r)}
	src, evil := w.source(1, 8), w.source(2, 8)
	for range 2 {
		a, atA := w.connect(w.open("peer"), victim)
		uses.Store(2)
		a.post(dst.write(0, 1, src))
		w.until("the write arrives", func() bool { return len(atA.writes) == 1 && a.idle() })
		uses.Store(0)
		a.post(dst.write(0, 1, evil))
		w.until("both ends go down", func() bool { return a.isDown && atA.isDown })
		require.NotErrorIs(w, atA.down, io.EOF)
		require.Len(w, atA.writes, 1)
		w.holds("target", dst.Span(), 1)
	}
}
