package verbs

import (
	"bytes"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/cshim/verbs/fakeverbs"
	"fserver/engine/mem"
	"fserver/engine/transport"
)

// carried is how many requests carry their bytes by themselves, of a write of n bytes of host memory and a frame of
// m bytes. It compares what arrives.
func (w *two) carried(c *Conn, n, m uint64) int {
	w.t.Helper()
	before, frames := fakeverbs.Count("inlined"), len(w.frames[1])
	from, to := w.memory(4096), w.memory(4096)
	key, err := w.f[1].Register(to)
	require.NoError(w.t, err)
	copy(from.Span().Bytes(), pattern(4096, byte(n)))
	frame := pattern(m, 9)
	source := mem.Span{Addr: from.Addr, Len: n}
	taken, err := w.post(c,
		transport.Op{Kind: transport.OpWrite, Key: key, Off: 8, Src: []mem.Span{source}},
		transport.Op{Kind: transport.OpFrame, Frame: frame})
	require.NoError(w.t, err)
	require.Equal(w.t, 2, taken)
	w.until("the frame comes", func() bool { return len(w.frames[1]) > frames })
	require.Equal(w.t, frame, w.frames[1][frames])
	require.Equal(w.t, source.Bytes(), to.Span().Bytes()[8:8+n])
	require.Zero(w.t, to.Span().Bytes()[8+n])
	return fakeverbs.Count("inlined") - before
}

// TestInline: short writes of host memory and short frames go to the NIC with their bytes. So they need no registration
// and no slot.
func TestInline(t *testing.T) {
	w := newTwo(t)
	a, _ := w.pair()
	require.Equal(t, 2, w.carried(a, 1, 1))
	require.Equal(t, 2, w.carried(a, inlined, inlined-headLen))
	require.Equal(t, 1, w.carried(a, inlined+1, inlined-headLen))
	require.Equal(t, 1, w.carried(a, inlined, inlined-headLen+1))
	require.Equal(t, 0, w.carried(a, 4000, 2*(slotBytes-headLen)))
}

// TestInlineLess: a device that cannot carry so much is asked for nothing of the kind, also if it does not say what it
// refuses.
func TestInlineLess(t *testing.T) {
	for _, mute := range []int{0, 1} {
		w := newTwo(t)
		fakeverbs.Set("inline", inlined-1)
		fakeverbs.Set("mute", mute)
		a, _ := w.pair()
		require.Equal(t, 0, w.carried(a, inlined, inlined-headLen))
	}
}

// TestInlineParts: a write that crosses from one part of a region of the peer's to the next is two requests. Those that
// are short enough carry their bytes.
func TestInlineParts(t *testing.T) {
	w := newTwo(t)
	const border = 600 << 10
	fakeverbs.Set("mr_size", border)
	for i := range w.f {
		w.f[i] = w.open(Options{Library: library2(t), Device: fakeverbs.Devices()[i]})
	}
	a, _ := w.pair()
	from, to := w.memory(border), w.memory(2*border)
	copy(from.Span().Bytes(), pattern(from.Len, 4))
	for _, r := range []mem.Region{from, to} {
		_, err := w.f[0].Register(r)
		require.NoError(t, err)
	}
	key, err := w.f[1].Register(to)
	require.NoError(t, err)
	for _, c := range []struct{ before, behind, carried uint64 }{{100, 200, 2}, {1, 1, 2}, {border - 9, 9, 1}, {9, border - 9, 1}} {
		carried, frames := fakeverbs.Count("inlined"), len(w.frames[1])
		source := mem.Span{Addr: from.Addr, Len: c.before + c.behind}
		off := border - c.before
		_, err = w.post(a,
			transport.Op{Kind: transport.OpWrite, Key: key, Off: off, Src: []mem.Span{source}},
			transport.Op{Kind: transport.OpFrame, Frame: pattern(1000, 1)})
		require.NoError(t, err)
		w.until("the frame comes", func() bool { return len(w.frames[1]) > frames })
		require.True(t, bytes.Equal(source.Bytes(), to.Span().Bytes()[off:off+source.Len]))
		require.EqualValues(t, c.carried, fakeverbs.Count("inlined")-carried)
	}
}

// TestInlineLate: a short write that waits behind a frame without credit has not ended.
func TestInlineLate(t *testing.T) {
	w := newTwo(t)
	a, _ := w.pair()
	from, to := w.memory(4096), w.memory(4096)
	key, err := w.f[1].Register(to)
	require.NoError(t, err)
	poll := func() { // the first Fabric alone: the second returns no credit
		var ev [16]transport.Event
		n, err := w.f[0].Poll(ev[:])
		require.NoError(t, err)
		for _, e := range ev[:n] {
			require.Equal(t, transport.EvDone, e.Kind)
			w.done[0]++
		}
	}
	before := w.done[0]
	frame := transport.Op{Kind: transport.OpFrame, Frame: pattern(1000, 1)}
	for i := range slots {
		_, err = w.post(a, frame)
		require.NoError(t, err)
		require.Eventually(t, func() bool { poll(); return w.done[0] == before+i+1 }, 20*time.Second, time.Millisecond)
	}
	source := mem.Span{Addr: from.Addr, Len: 100}
	n, err := w.post(a, frame, transport.Op{Kind: transport.OpWrite, Key: key, Src: []mem.Span{source}}, frame)
	require.NoError(t, err)
	require.Equal(t, 3, n)
	for range 1000 {
		poll()
	}
	require.Equal(t, before+slots, w.done[0])
	copy(from.Span().Bytes(), pattern(100, 7)) // it is read when it is posted
	w.until("all frames come", func() bool { return len(w.frames[1]) == slots+2 })
	require.Equal(t, pattern(100, 7), to.Span().Bytes()[:100])
	w.until("all operations end", func() bool { return w.done[0] == before+slots+3 })
}

// TestInlineGPU: the CPU cannot read a GPU's memory, so the NIC fetches the shortest write of it.
func TestInlineGPU(t *testing.T) {
	w := newGPUPair(t, unordered)
	from, _ := w.alloc(0, 4096)
	to, key := w.alloc(1, 4096)
	w.store(from, pattern(from.Len, 3))
	before := fakeverbs.Count("inlined")
	short := from
	short.Len = 1
	w.send(short, key)
	require.Equal(t, w.load(short), w.load(to)[:1])
	require.Equal(t, before+1, fakeverbs.Count("inlined"), "the frame alone is carried")
}
