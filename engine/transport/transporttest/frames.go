package transporttest

import (
	"encoding/binary"

	"github.com/stretchr/testify/require"

	"fserver/engine/transport"
)

var frameCases = []testCase{
	{"FramesKeepTheirOrder", testFrameOrder},
	{"FramesOfAllSizes", testFrameSizes},
	{"FrameTooLarge", testFrameTooLarge},
	{"FrameIsCopiedAtPost", testFrameCopied},
	{"OpIsCopiedAtPost", testOpCopied},
	{"OpOfUnknownKind", testUnknownKind},
	{"PostOfNothing", testPostNothing},
	{"PollWithLittleRoom", testLittleRoom},
}

func testFrameOrder(w *world) {
	const count = 5000
	a, b := w.pair()
	var ops []transport.Op
	for i := range count {
		ops = append(ops, frame(binary.LittleEndian.AppendUint32(nil, uint32(i))))
	}
	a.post(ops...)
	w.until("all frames arrive", func() bool { return len(b.frames) == count && a.idle() })
	for i, f := range b.frames {
		require.Equal(w, uint32(i), binary.LittleEndian.Uint32(f))
	}
	require.Zero(w, a.failed())
}

func testFrameSizes(w *world) {
	a, b := w.pair()
	sizes := []uint64{0, 1, 0, 7, 8, 9, 255, 256, 4095, 4096, 4097, 65535, 65536, 65537,
		transport.MaxFrame - 1, transport.MaxFrame, 0, 3}
	for i, n := range sizes {
		a.post(frame(pattern(uint64(i), n)))
	}
	w.until("all frames arrive", func() bool { return len(b.frames) == len(sizes) && a.idle() })
	for i, n := range sizes {
		require.Empty(w, difference(b.frames[i], pattern(uint64(i), n)), "frame of %d bytes", n)
	}
	require.Zero(w, a.failed())
}

func testFrameTooLarge(w *world) {
	a, b := w.pair()
	ops := []transport.Op{frame([]byte("before")), frame(make([]byte, transport.MaxFrame+1)), frame([]byte("after"))}
	var err error
	w.until("post refuses the frame", func() bool {
		var k int
		k, err = a.try(ops...)
		ops = ops[k:]
		return err != nil
	})
	require.Len(w, ops, 2, "post refused another op than the large frame: %v", err)
	a.post(ops[1])
	w.until("the other frames arrive", func() bool { return len(b.frames) == 2 && a.idle() })
	require.Equal(w, "before", string(b.frames[0]))
	require.Equal(w, "after", string(b.frames[1]))
	require.False(w, a.isDown || b.isDown)
}

func testFrameCopied(w *world) {
	const count = 500
	a, b := w.pair()
	b.n.asleep = true // so that many frames wait
	buf := make([]byte, 100)
	sent := 0
	for range count {
		copy(buf, pattern(uint64(sent), 100))
		k, err := a.try(frame(buf))
		require.NoError(w, err)
		sent += k
		clear(buf)
		a.n.poll()
	}
	b.n.asleep = false
	require.NotZero(w, sent)
	w.until("the frames arrive", func() bool { return len(b.frames) == sent && a.idle() })
	for i, f := range b.frames {
		require.Empty(w, difference(f, pattern(uint64(i), 100)), "frame %d", i)
	}
}

func testOpCopied(w *world) {
	a, b := w.pair()
	dst := b.n.target(100)
	src := w.source(1, 100)
	ops := []transport.Op{frame([]byte("first")), dst.write(0, 42, src), frame([]byte("last"))}
	for len(ops) > 0 {
		k, err := a.try(ops...)
		require.NoError(w, err)
		clear(ops[:k])
		ops = ops[k:]
		w.turn()
	}
	w.until("all arrive", func() bool { return len(b.frames) == 2 && len(b.writes) == 1 && a.idle() })
	require.Equal(w, []written{{42, 100}}, b.writes)
	w.holds("target", dst.Span(), 1)
	require.Equal(w, "first", string(b.frames[0]))
	require.Equal(w, "last", string(b.frames[1]))
}

func testUnknownKind(w *world) {
	for _, kind := range []transport.OpKind{0, transport.OpWrite + 1, 255} {
		a, b := w.pair()
		a.refuses(transport.Op{Kind: kind})
		w.echo(a, b)
	}
}

func testPostNothing(w *world) {
	a, b := w.pair()
	k, err := a.try()
	require.NoError(w, err)
	require.Zero(w, k)
	w.echo(a, b)
}

func testLittleRoom(w *world) {
	const count = 20
	a, b := w.pair()
	dst, src := b.n.target(64), w.source(1, 64)
	for room := range 4 {
		a.n.ev, b.n.ev = make([]transport.Event, room), make([]transport.Event, room)
		frames, writes := len(b.frames), len(b.writes)
		if room == 0 { // no room for anything, and nothing is lost by it
			a.post(frame([]byte("kept")))
			w.turns(10)
			require.Empty(w, b.frames)
			continue
		}
		for i := range count {
			a.post(frame([]byte{byte(i)}), dst.write(0, uint32(i), src))
		}
		w.until("all arrive", func() bool {
			return len(b.frames) >= frames+count && len(b.writes) == writes+count && a.idle()
		})
	}
	require.Len(w, b.frames, 3*count+1)
}
