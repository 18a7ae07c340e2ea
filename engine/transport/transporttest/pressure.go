package transporttest

import (
	"encoding/binary"

	"github.com/stretchr/testify/require"

	"fserver/engine/transport"
)

var pressureCases = []testCase{
	{"FramesToPeerThatDoesNotPoll", testPressureFrames},
	{"WritesToPeerThatDoesNotPoll", testPressureWrites},
	{"SmallFrameBesideLargeWrite", testFair},
	{"SmallFrameBesideFlood", testFlood},
}

// Bounds on what a Fabric takes for a peer that does not poll: the kernel's
// buffers and its own together.
const (
	pressureBytes = 256 << 20
	pressureOps   = 1 << 20
)

// fill posts the ops that next makes until Post has taken nothing for many
// polls of its own node, and returns how many were taken.
func (l *link) fill(limit int, next func(i int) transport.Op) int {
	w := l.n.w
	w.Helper()
	l.onDone = func(_ uint64, err error) { require.NoError(w, err) }
	taken := 0
	for refused := 0; refused < 200; {
		k, err := l.try(next(taken))
		require.NoError(w, err)
		taken += k
		if k == 0 {
			refused++
			l.n.poll()
		} else {
			refused = 0
		}
		if taken > limit {
			w.Fatalf("%d ops taken for a peer that does not poll", taken)
		}
	}
	return taken
}

func testPressureFrames(w *world) {
	for _, size := range []int{4, 1000, transport.MaxFrame} {
		a, b := w.pair()
		b.n.asleep = true
		buf := make([]byte, size)
		taken := a.fill(min(pressureOps, pressureBytes/size), func(i int) transport.Op {
			binary.LittleEndian.PutUint32(buf, uint32(i))
			return frame(buf)
		})
		next := 0
		b.onFrame = func(data []byte) {
			require.Len(w, data, size)
			require.Equal(w, uint32(next), binary.LittleEndian.Uint32(data))
			next++
			b.frames = b.frames[:0]
		}
		b.n.asleep = false
		w.until("all that was taken arrives", func() bool { return next == taken && a.idle() })
		b.onFrame = nil
		w.echo(a, b)
	}
}

func testPressureWrites(w *world) {
	for _, size := range []uint64{0, 100, 1 << 20} {
		a, b := w.pair()
		b.n.asleep = true
		dst, src := b.n.target(1<<20), w.source(1, 1<<20)
		taken := a.fill(pressureOps, func(i int) transport.Op {
			return dst.write(0, uint32(i), slice(src, 0, size))
		})
		got := map[uint32]bool{}
		b.onWritten = func(number uint32, n uint64) {
			if n != size || got[number] || int(number) >= taken {
				w.Errorf("write %d of %d bytes came twice or was never posted", number, n)
			}
			got[number] = true
		}
		b.n.asleep = false
		w.until("all that was taken arrives", func() bool { return len(got) == taken && a.idle() })
		w.holds("target", slice(dst.Span(), 0, size), 1)
	}
}

// testFair has peers exchange small frames while a large write of another peer
// is under way: the rounds must be over before the write is.
func testFair(w *world) {
	if w.bed.Offloads {
		w.Skip("the writes of this transport take no time of the CPU")
	}
	const size, rounds = 64 << 20, 4
	s := w.open("server")
	big, sBig := w.connect(w.open("big"), s)
	small, sSmall := w.connect(w.open("small"), s)
	dst, src := s.target(size), w.source(1, size)
	big.post(dst.write(0, 1, src))
	for i := range rounds {
		small.post(frame([]byte("ping")))
		w.until("the server hears a small peer", func() bool { return len(sSmall.frames) > i })
		sSmall.post(frame([]byte("pong")))
		w.until("the small peer hears the server", func() bool { return len(small.frames) > i })
	}
	require.Empty(w, sBig.writes, "%d small rounds took longer than a write of %d bytes", rounds, size)
	w.until("the large write arrives", func() bool { return len(sBig.writes) == 1 && big.idle() })
	w.holds("target", dst.Span(), 1)
}

// testFlood keeps one peer's Conn as full as it gets, with little room in each
// Poll of the receiver, and counts the Polls until another peer is heard.
func testFlood(w *world) {
	const rounds, polls = 20, 2000
	s := w.open("server")
	loud, _ := w.connect(w.open("loud"), s)
	quiet, sQuiet := w.connect(w.open("quiet"), s)
	s.ev = s.ev[:2]
	for i := range rounds {
		posted := false
		from := s.polls
		for len(sQuiet.frames) <= i {
			for {
				if k, err := loud.try(frame(nil), frame([]byte("me"))); err != nil || k < 2 {
					require.NoError(w, err)
					break
				}
			}
			if !posted {
				k, err := quiet.try(frame([]byte("and me")))
				require.NoError(w, err)
				posted = k == 1
			}
			w.turn()
			if s.polls-from > polls {
				w.Fatalf("a frame waits for %d polls of its receiver behind another peer's", polls)
			}
		}
	}
}
