package transporttest

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"

	"github.com/stretchr/testify/require"

	"fserver/engine/mem"
	"fserver/engine/transport"
)

var writeCases = []testCase{
	{"WriteTouchesItsRangeOnly", testWriteRange},
	{"WriteGathersSpans", testGather},
	{"WriteGathersManySpans", testGatherMany},
	{"WriteOfNoBytes", testWriteNothing},
	{"WriteOfSixtyFourMegabytes", testWriteLarge},
	{"SourceIsFreeAfterDone", testSourceFree},
	{"TargetIsCompleteAtItsFrame", testTargetComplete},
	{"WritesBothWaysAtOnce", testBothWays},
	{"FrameComesAfterTheWritesBeforeIt", testFrameAfterWrites},
	{"TwoKeysOfOneRegion", testTwoKeys},
	{"KeysAreNeverUsedTwice", testKeysUnique},
}

func testWriteRange(w *world) {
	a, b := w.pair()
	dst := b.n.target(1000)
	image := bytes.Repeat([]byte{poison}, 1000)
	for i, at := range [][2]uint64{{0, 1}, {999, 1}, {3, 5}, {17, 100}, {501, 499}, {200, 256}} {
		src := w.source(uint64(i), at[1])
		a.post(dst.write(at[0], uint32(i), src))
		w.until("the write arrives", func() bool { return len(b.writes) == i+1 })
		copy(image[at[0]:], pattern(uint64(i), at[1]))
		w.reads("target", dst.Span(), image)
		require.Equal(w, written{uint32(i), at[1]}, b.writes[i])
	}
}

// spans cuts s into pieces of the sizes in cuts, the last of which is what is
// left.
func spans(s mem.Span, cuts ...uint64) []mem.Span {
	var out []mem.Span
	for _, n := range cuts {
		out = append(out, slice(s, 0, n))
		s.Addr, s.Len = s.Addr+uintptr(n), s.Len-n
	}
	return append(out, s)
}

func testGather(w *world) {
	const size = 10000
	a, b := w.pair()
	for i, cuts := range [][]uint64{{}, {0}, {1}, {size}, {0, 0, 5, 0, 4096, 1}, {size - 1}} {
		dst, src := b.n.target(size), w.source(uint64(i), size)
		a.post(dst.write(0, 1, spans(src, cuts...)...))
		w.until("the write arrives", func() bool { return len(b.writes) == i+1 && a.idle() })
		require.Equal(w, uint64(size), b.writes[i].n)
		w.holds("target", dst.Span(), uint64(i))
	}
	// Pieces in another order than they lie in.
	dst, src := b.n.target(10), w.source(99, 10)
	parts, want := spans(src, 4), pattern(99, 10)
	a.post(dst.write(0, 1, parts[1], parts[0]))
	w.until("the write ends", a.idle)
	w.until("the write arrives", func() bool { return len(b.writes) == 7 })
	w.reads("target", dst.Span(), append(want[4:10:10], want[:4]...))
}

func testGatherMany(w *world) {
	const count, each = 3000, 7 // more than one system call takes
	a, b := w.pair()
	dst, src := b.n.target(count*each), w.source(5, count*each)
	cuts := make([]uint64, count-1)
	for i := range cuts {
		cuts[i] = each
	}
	a.post(dst.write(0, 1, spans(src, cuts...)...))
	w.until("the write arrives", func() bool { return len(b.writes) == 1 && a.idle() })
	w.holds("target", dst.Span(), 5)
}

func testWriteNothing(w *world) {
	a, b := w.pair()
	dst := b.n.target(100)
	empty := w.alloc(1).Span()
	empty.Len = 0
	a.post(dst.write(0, 1), dst.write(50, 2, empty), dst.write(100, 3, empty, empty))
	w.until("the writes arrive", func() bool { return len(b.writes) == 3 && a.idle() })
	require.ElementsMatch(w, []written{{1, 0}, {2, 0}, {3, 0}}, b.writes)
	for _, src := range [][]mem.Span{nil, {empty, empty}} { // on a Conn at rest, with no frame behind it
		a.n.user++
		op := dst.write(0, 4, src...)
		op.User = a.n.user
		w.until("post takes the write", func() bool {
			n, err := a.c.Post([]transport.Op{op})
			require.NoError(w, err)
			return n == 1
		})
		a.open[op.User] = true
		w.until("the write ends", a.idle)
	}
	w.untouched("target", dst.Span())
	require.Zero(w, a.failed())
	w.echo(a, b)
}

func testWriteLarge(w *world) {
	const size = 64<<20 + 3
	a, b := w.pair()
	dst, src := b.n.target(size+2), w.source(1, size)
	a.post(dst.write(1, 9, spans(src, 5<<20, 1)...))
	w.until("the write arrives", func() bool { return len(b.writes) == 1 && a.idle() })
	require.Equal(w, []written{{9, size}}, b.writes)
	w.holds("target", slice(dst.Span(), 1, size), 1)
	w.untouched("byte before", slice(dst.Span(), 0, 1))
	w.untouched("byte after", slice(dst.Span(), size+1, 1))
}

// testSourceFree overwrites each source as soon as its op has ended, while the
// peer is slow to take what was sent.
func testSourceFree(w *world) {
	const count, size = 64, 50000
	a, b := w.pair()
	dst := b.n.target(count * size)
	src := map[uint64]mem.Span{}
	a.onDone = func(user uint64, _ error) { w.poison(src[user]) }
	for i := range uint64(count) {
		s := w.source(i, size)
		w.until("post takes the op", func() bool {
			src[a.n.user+1] = s
			k, err := a.try(dst.write(i*size, uint32(i), s))
			require.NoError(w, err)
			b.n.asleep = b.n.asleep && k == 1
			return k == 1
		})
		b.n.asleep = i%8 != 0
	}
	b.n.asleep = false
	w.until("the writes arrive", func() bool { return len(b.writes) == count && a.idle() })
	for i := range uint64(count) {
		w.holds("target", slice(dst.Span(), i*size, size), i)
	}
}

// testTargetComplete looks at the target in the very event, and writes again
// over the same memory.
func testTargetComplete(w *world) {
	const count = 60
	a, b := w.pair()
	dst := b.n.target(3 << 20)
	sizes := rand.New(rand.NewPCG(1, 1))
	var n uint64
	var i uint32
	b.onWritten = func(imm uint32, got uint64) {
		require.Equal(w, written{i, n}, written{imm, got})
		w.holds("target", slice(dst.Span(), 0, n), uint64(i))
		w.poison(slice(dst.Span(), 0, n))
	}
	src := w.alloc(dst.Len)
	for ; i < count; i++ {
		n = sizes.Uint64N(1 << (1 + sizes.IntN(21)))
		s := slice(src.Span(), 0, n)
		w.fill(s, uint64(i))
		a.post(dst.write(0, i, s))
		w.until("the write arrives", func() bool { return len(b.writes) == int(i)+1 && a.idle() })
	}
}

func testBothWays(w *world) {
	const count, size = 4, 8 << 20
	a, b := w.pair()
	ta, tb := a.n.target(count*size), b.n.target(count*size)
	sa, sb := w.source(1, count*size), w.source(2, count*size)
	var toA, toB []transport.Op
	for i := range uint64(count) {
		toB = append(toB, tb.write(i*size, uint32(i), slice(sa, i*size, size)), frame([]byte{byte(i)}))
		toA = append(toA, ta.write(i*size, uint32(i), slice(sb, i*size, size)), frame([]byte{byte(i)}))
	}
	w.until("all is posted", func() bool {
		for _, p := range []struct {
			l   *link
			ops *[]transport.Op
		}{{a, &toB}, {b, &toA}} {
			k, err := p.l.try(*p.ops...)
			require.NoError(w, err)
			*p.ops = (*p.ops)[k:]
		}
		return len(toA)+len(toB) == 0
	})
	w.until("all arrives", func() bool {
		return len(a.writes) == count && len(b.writes) == count && len(a.frames) == count &&
			len(b.frames) == count && a.idle() && b.idle()
	})
	w.holds("target at b", tb.Span(), 1)
	w.holds("target at a", ta.Span(), 2)
}

// testFrameAfterWrites posts writes of all sizes with few frames between, and looks at each
// frame whether all writes before it are whole.
func testFrameAfterWrites(w *world) {
	const rounds, each, size = 40, 10, 100 << 10
	a, b := w.pair()
	dst, src := b.n.target(rounds*each*size), w.alloc(rounds*each*size)
	pick := rand.New(rand.NewPCG(2, 2))
	lens := make([]uint64, rounds*each)
	seen := 0
	b.onFrame = func(data []byte) {
		for upto := int(binary.LittleEndian.Uint32(data)); seen < upto; seen++ {
			w.holds("target", slice(dst.Span(), uint64(seen)*size, lens[seen]), uint64(seen))
		}
	}
	b.n.asleep = true
	for i := range rounds * each {
		lens[i] = pick.Uint64N(1 + size>>pick.IntN(16))
		s := slice(src.Span(), uint64(i)*size, lens[i])
		w.fill(s, uint64(i))
		write := dst.write(uint64(i)*size, 0, s)
		w.until("post takes the write", func() bool { // without the mark of the suite
			write.User = a.n.user + 1
			k, err := a.c.Post([]transport.Op{write})
			require.NoError(w, err)
			b.n.asleep = b.n.asleep && k == 1
			if k == 1 {
				a.n.user++
				a.open[write.User] = true
			}
			return k == 1
		})
		if i%each == each-1 {
			a.post(frame(binary.LittleEndian.AppendUint32(nil, uint32(i+1))))
			b.n.asleep = i%3 != 0
		}
	}
	b.n.asleep = false
	w.until("all arrives", func() bool { return len(b.frames) == rounds })
}

func testTwoKeys(w *world) {
	a, b := w.pair()
	r := w.alloc(100)
	first, second := target{r, b.n.register(r)}, target{r, b.n.register(r)}
	require.NotEqual(w, first.key.ID, second.key.ID)
	b.n.free(first.key)
	a.post(second.write(0, 2, w.source(1, 100)))
	w.until("the write arrives", func() bool { return len(b.writes) == 1 })
	w.holds("target", r.Span(), 1)
}

func testKeysUnique(w *world) {
	n := w.open("a")
	r := w.alloc(100)
	seen := map[uint64]bool{}
	for range 1000 {
		k := n.register(r)
		require.False(w, seen[k.ID], "number %d was given twice", k.ID)
		seen[k.ID] = true
		n.free(k)
	}
}
