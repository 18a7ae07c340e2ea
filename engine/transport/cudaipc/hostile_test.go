package cudaipc

import (
	"bytes"
	"context"
	"io"
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/gpu/fakegpu"
	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
	"fserver/engine/transport/transporttest"
)

// A den is a victim with GPU and host memory that hostile peers know all keys of.
type den struct {
	g                       *fakegpu.GPU
	victim                  *side
	good                    *side
	goodAt                  transport.Conn // the victim's end of good's Conn
	all                     mem.Region     // on the GPU; key is of the middle third
	size                    uint64
	key, host, stale, goods transport.Key
	hostMemory              mem.Region
}

func newDen(t *testing.T, under below) *den {
	d := &den{g: fakegpu.New(), size: 4096}
	d.good, d.victim = pairOf(t, d.g, under)
	d.goodAt = d.victim.c
	d.all = onGPU(t, d.g, 3*d.size, 1)
	middle := mem.Region{Addr: d.all.Addr + uintptr(d.size), Len: d.size, Dev: d.all.Dev}
	var err error
	d.hostMemory, err = mem.Map(d.size)
	require.NoError(t, err)
	d.key = d.victim.key(t, middle)
	d.host = d.victim.key(t, d.hostMemory)
	d.stale = d.victim.key(t, middle)
	d.victim.f.Deregister(d.stale)
	d.goods = d.victim.key(t, middle)
	require.NoError(t, d.victim.f.Bind(d.goods, d.goodAt))
	t.Cleanup(func() { require.NoError(t, mem.Unmap(d.hostMemory)) })
	return d
}

// join is a new hostile peer of the victim's, which is not polled: what it does by
// itself is up to the test.
func (d *den) join(t *testing.T, under below) *side {
	f, err := opens(d.g, under, true, true)(transporttest.Options{Gate: transporttest.Gate{Hello: "evil"}})
	require.NoError(t, err)
	evil := &side{f: f.(*Fabric)}
	d.victim.c, d.victim.down = nil, nil
	evil.c, err = f.Connect(context.Background(), d.victim.f.Addr())
	require.NoError(t, err)
	until(t, evil, d.victim, func() bool { return d.victim.c != nil })
	return evil
}

// unharmed checks that the peer has lost its Conn, that nothing has landed, and that
// good still gets in.
func (d *den) unharmed(t *testing.T, evil *side, name, text string) {
	t.Helper()
	until(t, evil, d.victim, func() bool { return d.victim.down != nil })
	require.ErrorContains(t, d.victim.down, text, name)
	require.NotErrorIs(t, d.victim.down, io.EOF, name)
	require.Empty(t, d.victim.writes, name)
	require.Empty(t, d.victim.frames, name)
	holds(t, d.g, d.all, 1)
	require.Equal(t, make([]byte, d.size), d.hostMemory.Span().Bytes(), name)

	src := onGPU(t, d.g, d.size, 5)
	d.good.done = nil
	d.good.post(t, write(d.goods, src, transport.Point{}))
	until(t, d.good, d.victim, func() bool { return len(d.victim.writes) == 1 && len(d.good.done) == 1 })
	require.NoError(t, d.good.done[0])
	d.victim.writes = nil
	require.NoError(t, fakegpu.Memory{G: d.g}.Store(d.all.Span(), bytes.Repeat([]byte{1}, int(d.all.Len))))
	require.NoError(t, evil.f.Close())
}

func message(b []byte) transport.Op { return transport.Op{Kind: transport.OpFrame, Frame: b} }

// TestHostileMessages sends frames that start as those of this package do.
func TestHostileMessages(t *testing.T) {
	d := newDen(t, overCMA)
	head := func(kind uint8, number uint64) []byte { return appendHead(nil, kind, number) }
	for _, c := range []struct {
		name, text string
		frame      []byte
	}{
		{"one byte", "kind 0 and 1 bytes", []byte{escape}},
		{"no number", "9 bytes", head(kindFrame, 0)[:headLen-1]},
		{"kind 0", "kind 0", head(0, 0)},
		{"unknown kind", "kind 5", head(kindIntroduction+1, 0)},
		{"last kind", "kind 255", head(255, 0)},
		{"long word", "kind 3 and 11 bytes", append(head(kindLoan, 0), 0)},
		{"write that never was", "write 1", head(kindFrame, 1)},
		{"write that never was, before the frame", "write 1", head(kindNext, 1)},
		{"2^64-2 writes that never were", "write 18446744073709551614", head(kindFrame, math.MaxUint64-1)},
		{"no loan", "did not lend", head(kindLoan, 0)},
		{"no loan that passes", "did not lend", head(kindLoan, passes)},
	} {
		evil := d.join(t, overCMA)
		evil.raw(t, message(c.frame))
		d.unharmed(t, evil, c.name, c.text)
	}
}

// TestHostileLoans lends memory without the words that this needs.
func TestHostileLoans(t *testing.T) {
	d := newDen(t, overCMA)
	shared, err := mem.NewShared(4096)
	require.NoError(t, err)
	defer func() { require.NoError(t, mem.FreeShared(shared.ID())) }()
	loan := transport.Op{Kind: transport.OpLend, Src: []mem.Span{shared.Region().Span()}}
	meets := message(meeting)
	for _, c := range []struct {
		name, text string
		met        bool
		ops        []transport.Op
	}{
		{"two loans, announced once", "lent memory twice", true, []transport.Op{loan, loan}},
		{"introduces itself twice", "introduced itself", false, []transport.Op{meets, meets}},
		{"introduces itself again", "introduced itself", true, []transport.Op{meets}},
	} {
		evil := d.join(t, overCMA)
		if c.met {
			evil.post(t, write(d.key, onGPU(t, d.g, d.size, 1), transport.Point{}))
			until(t, evil, d.victim, func() bool { return len(d.victim.writes) == 1 && len(evil.done) == 1 })
			d.victim.writes = nil
		}
		require.True(t, evil.below().Conn.Lends(loan.Src[0]))
		evil.raw(t, c.ops...)
		d.unharmed(t, evil, c.name, c.text)
	}
}

// TestHostilePeerMapped says in its segment, and in the frames beside it, what no peer of
// ours says.
func TestHostilePeerMapped(t *testing.T) {
	d := newDen(t, overCMA)
	begin := func() (evil *side, s *segment) {
		evil = d.join(t, overCMA)
		src := onGPU(t, d.g, d.size, 1)
		evil.post(t, write(d.key, src, transport.Point{}))
		until(t, evil, d.victim, func() bool { return len(d.victim.writes) == 1 && len(evil.done) == 1 })
		require.Equal(t, "cudaipc", evil.below().Peer().Via)
		d.victim.writes = nil
		return evil, evil.below().lane.seg
	}
	evil, _ := begin()
	evil.raw(t, message(appendHead(nil, kindFrame, 2)))
	d.unharmed(t, evil, "not begun", "waits for its write 2, which it has not begun")

	// Numbers that never come hold back this peer's own frames, up to a limit.
	evil, s := begin()
	s.begun.Store(math.MaxUint64)
	late := []transport.Op{message(appendHead(nil, kindFrame, 1<<40))}
	until(t, evil, d.victim, func() bool {
		n, err := evil.below().Conn.Post(late)
		for n == 1 && err == nil {
			n, err = evil.below().Conn.Post(late)
		}
		return d.victim.down != nil
	})
	s.begun.Store(1) // its own side waits for that
	d.unharmed(t, evil, "too many", "behind writes that have not landed")

	evil, s = begin()
	s.begun.Store(2)
	evil.raw(t, message(append(appendHead(nil, kindFrame, 2), "held"...)))
	for range 100 {
		d.victim.poll(t)
	}
	require.True(t, d.victim.below().held.Len() > 0)
	evil.c.Close()
	s.begun.Store(1)
	until(t, evil, d.victim, func() bool { return d.victim.down != nil })
	require.ErrorIs(t, d.victim.down, io.EOF)
	require.Empty(t, d.victim.frames)
	require.NoError(t, evil.f.Close())
}

// TestBrokenIntroduction shows memory that is no segment.
func TestBrokenIntroduction(t *testing.T) {
	d := newDen(t, overCMA)
	for _, size := range []uint64{4096, tableSize} { // too small, and without the magic
		evil := d.join(t, overCMA)
		shared, err := mem.NewNamed("fserver-cudaipc", size)
		require.NoError(t, err)
		require.True(t, evil.below().Conn.Lends(shared.Region().Span()))
		loan := transport.Op{Kind: transport.OpLend, Src: []mem.Span{shared.Region().Span()}}
		evil.raw(t, message(meeting), loan, loan)
		d.unharmed(t, evil, "", "lent a table of")
		require.NoError(t, mem.FreeShared(shared.ID()))
	}
}

// TestPlainFrames: what starts as our messages do, or is as large as a frame can be, arrives
// as it was, with and without writes in front of it.
func TestPlainFrames(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overCMA)
	src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1)
	k := b.key(t, dst)
	large := strings.Repeat("\xfe", transport.MaxFrame)
	for i := range 3 {
		for _, f := range []string{"", "\xfe", "\xfe\x04", "\xff", large, large[:transport.MaxFrame-headLen], large[:transport.MaxFrame-headLen+1], "\x00" + large[1:], "\xff" + large[1:]} {
			for _, passes := range []bool{false, true} {
				b.frames = nil
				if i > 0 {
					a.post(t, write(k, src, transport.Point{}))
				}
				op := message([]byte(f))
				op.Passes = passes
				until(t, a, b, func() bool { n, _ := a.try([]transport.Op{op}); return n == 1 })
				until(t, a, b, func() bool { return len(b.frames) == 1 })
				require.True(t, f == b.frames[0], "a frame of %d bytes", len(f))
				until(t, a, b, func() bool { return i == 0 || len(b.writes) == 1 })
				b.writes = nil
			}
		}
	}
	_, err := a.try([]transport.Op{message([]byte(large + "1"))})
	require.ErrorContains(t, err, "at most")
}

// FuzzMessage feeds two random frames to a Conn. Each makes one event at most, and what the
// user gets of a message is what follows its head.
func FuzzMessage(f *testing.F) {
	for kind := range uint8(kindIntroduction + 2) {
		f.Add(append(appendHead(nil, kind, 0), "frame"...), appendHead(nil, kindFrame, 1))
		f.Add(appendHead(nil, kind, 0), []byte("frame"))
		f.Add(appendHead(nil, kind, passes), []byte("frame"))
	}
	f.Fuzz(func(t *testing.T, one, two []byte) {
		c := &Conn{f: &Fabric{}}
		p := link.Found{Events: make([]transport.Event, 2)}
		for i, b := range [][]byte{one, two} {
			if c.message(b, &p) != nil {
				return
			}
			require.LessOrEqual(t, p.N, i+1)
		}
		for _, e := range p.Events[:p.N] {
			require.Equal(t, transport.EvFrame, e.Kind)
			require.True(t, bytes.HasSuffix(one, e.Data) || bytes.HasSuffix(two, e.Data))
		}
	})
}
