package transporttest

import (
	"bytes"
	"encoding/binary"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/mem"
	"fserver/engine/transport"
)

var lendCases = []testCase{
	{"LoanIsReadInPlace", testLoan},
	{"LoanComesBeforeLaterFrames", testLoanOrder},
	{"LoanWhileOthersWrite", testLoanAmongWrites},
	{"LoanOutlivesAll", testLoanOutlives},
	{"FreedMemoryIsUnmapped", testLoanFreed},
	{"OnlySharedMemoryIsLent", testLoanRefused},
	{"LendsEndsWithTheConn", testLendsDown},
	{"LendAllocatesNothing", testLendAllocs},
}

// lenders is a pair whose first end lends.
func (w *world) lenders() (a, b *link) {
	w.Helper()
	a, b = w.pair()
	if !a.n.f.Caps().Lends {
		require.False(w, a.c.Lends(w.source(1, 8)))
		w.Skip("the fabric lends nothing")
	}
	return a, b
}

// shared gives shared memory, and a function that frees it, at the end of the
// test if not before.
func (w *world) shared(n uint64) (mem.Region, func()) {
	w.Helper()
	s, err := mem.NewShared(n)
	require.NoError(w, err)
	freed := false
	free := func() {
		if !freed {
			freed = true
			require.NoError(w, mem.FreeShared(s.ID()))
		}
	}
	w.Cleanup(free)
	return mem.Region{Addr: s.Region().Addr, Len: n, Dev: mem.CPU}, free
}

func (l *link) lends(s mem.Span) bool { return l.c.Lends(s) }

func lend(number uint32, s mem.Span) transport.Op {
	return transport.Op{Kind: transport.OpLend, Loan: number, Src: []mem.Span{s}}
}

// give lends s and waits until it is there; the test owes a Drop.
func (w *world) give(a, b *link, number uint32, s mem.Span) loan {
	w.Helper()
	require.True(w, a.lends(s))
	k := len(b.loans)
	a.post(lend(number, s))
	w.until("a loan arrives", func() bool { return len(b.loans) == k+1 && a.idle() })
	require.Zero(w, a.failed())
	require.Equal(w, number, b.loans[k].number)
	require.Equal(w, s.Len, b.loans[k].span.Len)
	return b.loans[k]
}

// mappings is how often shared memory is mapped in this process.
func (w *world) mappings() int {
	b, err := os.ReadFile("/proc/self/maps")
	require.NoError(w, err)
	return bytes.Count(b, []byte("memfd:fserver-shared"))
}

func testLoan(w *world) {
	a, b := w.lenders()
	r, _ := w.shared(3<<20 + 5)
	w.fill(r.Span(), 1)
	for i, at := range [][2]uint64{{0, r.Len}, {0, 1}, {r.Len - 1, 1}, {4095, 2}, {12345, 1 << 20}} {
		s := slice(r.Span(), at[0], at[1])
		l := w.give(a, b, uint32(i)<<30+7, s)
		require.NotEqual(w, s.Addr, l.span.Addr, "the memory of the peer, not ours")
		w.reads("loan", l.span, s.Bytes())
		s.Bytes()[0]++ // what the owner writes is seen, also later
		w.reads("loan after a change", l.span, s.Bytes())
		require.NoError(w, l.view.Drop())
	}
	require.Equal(w, 2, w.mappings(), "one mapping at each side, whatever was lent")
	for range 3 { // the other way, and more pieces
		r, _ := w.shared(5000)
		w.fill(r.Span(), 2)
		l := w.give(b, a, 1, r.Span())
		w.holds("loan", l.span, 2)
		require.NoError(w, l.view.Drop())
	}
	w.transfer(a, b)
}

func testLoanOrder(w *world) {
	const count = 100
	a, b := w.lenders()
	for i := range uint32(count) {
		r, _ := w.shared(100)
		require.True(w, a.lends(r.Span()))
		a.post(lend(i, r.Span()), frame([]byte{byte(i)}))
	}
	w.until("all arrives", func() bool { return len(b.loans) == count && len(b.frames) == count && a.idle() })
	for i, l := range b.loans {
		require.Equal(w, uint32(i), l.number)
		require.LessOrEqual(w, l.frames, i)
		require.NoError(w, l.view.Drop())
	}
}

// testLoanAmongWrites frees memory while large frames and writes are under way.
func testLoanAmongWrites(w *world) {
	const count = 40
	a, b := w.lenders()
	dst, src := b.n.target(1<<20), w.source(9, 1<<20)
	large := bytes.Repeat([]byte{3}, transport.MaxFrame)
	for i := range uint32(count) {
		r, free := w.shared(1000)
		binary.LittleEndian.PutUint32(r.Span().Bytes(), i)
		l := w.give(a, b, i, r.Span())
		require.Equal(w, i, binary.LittleEndian.Uint32(l.span.Bytes()))
		require.NoError(w, l.view.Drop())
		a.post(dst.write(0, i, src), frame(large))
		free()
	}
	w.until("all arrives", func() bool { return len(b.writes) == count && len(b.frames) == count && a.idle() })
	w.holds("target", dst.Span(), 9)
	for _, f := range b.frames {
		require.True(w, bytes.Equal(large, f))
	}
	w.until("the views are unmapped", func() bool { return w.mappings() == 0 })
}

func testLoanOutlives(w *world) {
	a, b := w.lenders()
	r, free := w.shared(10000)
	w.fill(r.Span(), 4)
	one, two := w.give(a, b, 1, r.Span()), w.give(a, b, 2, r.Span())
	free()
	w.echo(a, b)
	w.holds("loan of freed memory", one.span, 4)
	a.close()
	w.until("the peer hears of it", func() bool { return b.isDown })
	w.holds("loan of a conn that has ended", one.span, 4)
	require.NoError(w, one.view.Drop())
	b.n.close()
	w.holds("loan of a fabric that is closed", two.span, 4)
	require.Equal(w, 1, w.mappings())
	require.NoError(w, two.view.Drop())
	require.Zero(w, w.mappings())
}

func testLoanFreed(w *world) {
	a, b := w.lenders()
	for i := range uint32(2000) { // more than a side takes at a time
		r, free := w.shared(1 << 20)
		l := w.give(a, b, i, r.Span())
		require.NoError(w, l.view.Drop())
		free()
	}
	w.until("the last view is unmapped", func() bool { return w.mappings() == 0 })
	r, _ := w.shared(1)
	require.NoError(w, w.give(a, b, 1, r.Span()).view.Drop())
	require.Equal(w, 2, w.mappings())
	b.close()
	w.until("the owner hears of it", func() bool { return a.isDown })
	require.Equal(w, 1, w.mappings(), "the view went with the conn")
}

func testLoanRefused(w *world) {
	a, b := w.lenders()
	r, _ := w.shared(5000)
	own := w.alloc(100).Span()
	beyond := mem.Span{Addr: r.Addr, Len: 3 * 4096}
	for _, s := range []mem.Span{own, beyond, {Addr: r.Addr}, {}} {
		require.False(w, a.lends(s))
		a.refuses(lend(1, s))
	}
	a.refuses(lend(1, r.Span())) // nobody asked Lends
	require.True(w, a.lends(r.Span()))
	a.refuses(transport.Op{Kind: transport.OpLend, Src: []mem.Span{r.Span(), r.Span()}})
	w.transfer(a, b)
}

func testLendsDown(w *world) {
	a, b := w.lenders()
	r, _ := w.shared(5000)
	b.close()
	w.until("the conn ends", func() bool { return a.isDown })
	require.False(w, a.lends(r.Span()))
}

func testLendAllocs(w *world) {
	if RaceEnabled {
		w.Skip("the race detector allocates")
	}
	if w.bed.Allocates != "" {
		w.Skip(w.bed.Allocates)
	}
	a, b := w.lenders()
	r, _ := w.shared(1 << 20)
	ops := []transport.Op{lend(1, r.Span()), frame(make([]byte, 64))}
	ev := make([]transport.Event, 16)
	round := func() {
		if !a.lends(r.Span()) {
			w.Fatal("it lends no longer")
		}
		for posted, left := 0, 2*len(ops); left > 0; {
			k, err := a.c.Post(ops[posted:])
			require.NoError(w, err)
			posted += k
			for _, n := range [...]*node{a.n, b.n} {
				k, err := n.f.Poll(ev)
				if err != nil {
					w.Fatalf("poll: %v", err)
				}
				for i := range ev[:k] {
					if ev[i].View != nil {
						ev[i].View.Drop()
					}
				}
				left -= k
			}
		}
	}
	for range 1000 {
		round()
	}
	require.Zero(w, testing.AllocsPerRun(1000, round))
}
