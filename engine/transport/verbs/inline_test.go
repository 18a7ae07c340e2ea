package verbs

import (
	"testing"

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

// TestInlineLess: a device that cannot carry so much is asked for nothing of the kind.
func TestInlineLess(t *testing.T) {
	for _, most := range []int{0, inlined - 1} {
		w := newTwo(t)
		fakeverbs.Set("inline", most)
		a, _ := w.pair()
		require.Equal(t, most > 0, w.carried(a, 1, 1) > 0)
		require.Equal(t, 0, w.carried(a, inlined, inlined-headLen))
	}
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
