package cudaipc

import (
	"bytes"
	"context"
	"crypto/rand"
	"io"
	"math"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/cudaipc/fakegpu"
	"fserver/engine/transport/transporttest"
)

// A den is a victim with GPU and host memory that hostile peers know all keys of.
type den struct {
	g                            *fakegpu.GPU
	victim                       *side
	good                         *side
	goodAt                       transport.Conn // the victim's end of good's Conn
	all                          mem.Region     // on the GPU; key is of the middle third
	size                         uint64
	key, host, stale, goods      transport.Key
	keyPart, hostPart, goodsPart transport.Key
	hostMemory                   mem.Region
}

func newDen(t *testing.T, under below, share bool) *den {
	d := &den{g: fakegpu.New(), size: 4096}
	d.good, d.victim = pairOf(t, d.g, under, share)
	d.goodAt = d.victim.c
	d.all = onGPU(t, d.g, 3*d.size, 1)
	middle := mem.Region{Addr: d.all.Addr + uintptr(d.size), Len: d.size, Dev: d.all.Dev}
	var err error
	d.hostMemory, err = mem.Map(d.size)
	require.NoError(t, err)
	add := func(r mem.Region) (k, part transport.Key) {
		k, err := d.victim.f.Register(r)
		require.NoError(t, err)
		return k, d.victim.f.regions[k.ID].part
	}
	d.key, d.keyPart = add(middle)
	d.host, d.hostPart = add(d.hostMemory)
	d.stale, _ = add(middle)
	require.NoError(t, d.victim.f.Deregister(d.stale))
	d.goods, d.goodsPart = add(middle)
	require.NoError(t, d.victim.f.Bind(d.goods, d.goodAt))
	t.Cleanup(func() { require.NoError(t, mem.Unmap(d.hostMemory)) })
	return d
}

// join is a new hostile peer of the victim's, which is not polled: what it does by
// itself is up to the test.
func (d *den) join(t *testing.T, under below, share bool) *side {
	in, err := under(transporttest.Options{Gate: transporttest.Gate{Hello: "evil"}})
	require.NoError(t, err)
	f, err := Wrap(in, Options{Device: d.g, Share: share})
	require.NoError(t, err)
	rand.Read(f.secret[:])
	evil := &side{f: f}
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
	holds(t, d.g, d.all, 1)
	require.Equal(t, make([]byte, d.size), d.hostMemory.Span().Bytes(), name)

	src := onGPU(t, d.g, d.size, 5)
	_, err := d.good.c.Post(write(d.goods, src, transport.Point{}))
	require.NoError(t, err)
	d.good.done = nil
	until(t, d.good, d.victim, func() bool { return len(d.victim.writes) == 1 && len(d.good.done) == 1 })
	require.NoError(t, d.good.done[0])
	d.victim.writes = nil
	require.NoError(t, fakegpu.Memory{G: d.g}.Store(d.all.Span(), bytes.Repeat([]byte{1}, int(d.all.Len))))
	require.NoError(t, evil.f.Close())
}

// below is the Conn under one end.
func (s *side) below() *Conn {
	if l, ok := s.c.(lendingConn); ok {
		return l.Conn
	}
	return s.c.(*Conn)
}

// TestHostilePeerStaged writes over the Fabric below, by itself, with all the keys
// that there are.
func TestHostilePeerStaged(t *testing.T) {
	for name, under := range map[string]below{"tcp": overTCP, "cma": overCMA, "cma staged": overStaged} {
		t.Run(name, func(t *testing.T) {
			d := newDen(t, under, false)
			forged := func(k transport.Key) transport.Key { k.Token ^= 1; return k }
			var sources [][]byte
			write := func(k transport.Key, off uint64, text string) transport.Op {
				b := []byte(text)
				sources = append(sources, b)
				return transport.Op{Kind: transport.OpWrite, Key: k, Off: off, Src: []mem.Span{mem.Of(b)}}
			}
			// The first piece goes where it is to.
			piece := write(d.keyPart, 0, strings.Repeat("\x01", 8))
			for _, c := range []struct {
				name, text string
				ops        []transport.Op
			}{
				{"past the end", "out of bounds", []transport.Op{write(d.key, d.size-7, "12345678")}},
				{"behind the end", "out of bounds", []transport.Op{write(d.key, d.size, "1")}},
				{"before the start", "out of bounds", []transport.Op{write(d.key, math.MaxUint64-7, "1234567890")}},
				{"past the end of host memory", "out of bounds", []transport.Op{write(d.host, d.size-7, "12345678")}},
				{"piece past the end", "out of bounds", []transport.Op{write(d.keyPart, d.size-7, "12345678")}},
				{"wrong token", "wrong token", []transport.Op{write(forged(d.key), 0, "1")}},
				{"piece with a wrong token", "wrong token", []transport.Op{write(forged(d.keyPart), 0, "1")}},
				{"stale key", "no such key", []transport.Op{write(d.stale, 0, "1")}},
				{"another peer's key", "another peer", []transport.Op{write(d.goods, 0, "1")}},
				{"piece with another peer's key", "another peer", []transport.Op{write(d.goodsPart, 0, "1")}},
				{"pieces apart", "before the last 8 bytes of another write", []transport.Op{piece, write(d.keyPart, 16, "1")}},
				{"pieces of two writes", "before the last 8 bytes of another write", []transport.Op{piece, write(d.hostPart, 8, "\x00")}},
			} {
				evil := d.join(t, under, false)
				n, err := evil.below().inner.Post(c.ops)
				require.NoError(t, err, c.name)
				require.Len(t, c.ops, n, c.name)
				d.unharmed(t, evil, c.name, c.text)
			}
			runtime.KeepAlive(sources)
		})
	}
}

// TestLyingFabric: what the Fabric below lets through does not leave GPU memory.
func TestLyingFabric(t *testing.T) {
	d := newDen(t, overTCP, false)
	for _, off := range []uint64{math.MaxUint64 - 7, d.size - 7, d.size, 1 << 63} {
		evil := d.join(t, overTCP, false)
		f, c := d.victim.f, d.victim.below()
		f.mu.Lock()
		f.event(&transport.Event{Kind: transport.EvWritten, Conn: c.inner, Key: d.key.ID, Off: off, Len: 16}, &poll{})
		f.mu.Unlock()
		d.unharmed(t, evil, "", "out of bounds")
	}
}

// TestHostilePeerMapped says in its segment what no peer of ours says.
func TestHostilePeerMapped(t *testing.T) {
	d := newDen(t, overCMA, true)
	for _, c := range []struct {
		name, text string
		rec        record
		ahead      uint64 // of what it says to have made
	}{
		{"past the end", "which has 4096", record{key: d.key.ID, off: d.size - 7, n: 8}, 1},
		{"behind the end", "which has 4096", record{key: d.key.ID, off: d.size, n: 1}, 1},
		{"before the start", "which has 4096", record{key: d.key.ID, off: math.MaxUint64 - 7, n: 16}, 1},
		{"2^63 bytes", "which has 4096", record{key: d.key.ID, n: 1 << 63}, 1},
		{"stale key", "does not exist", record{key: d.stale.ID, n: 8}, 1},
		{"key of nothing", "does not exist", record{n: 8}, 1},
		{"key of all ones", "does not exist", record{key: math.MaxUint64, n: 8}, 1},
		{"key of host memory", "does not exist", record{key: d.host.ID, n: 8}, 1},
		{"key of pieces", "does not exist", record{key: d.keyPart.ID, n: 8}, 1},
		{"another peer's key", "another peer", record{key: d.goods.ID, n: 8}, 1},
		{"more than there is room for", "reports that it has made", record{}, depth + 1},
		{"less than before", "reports that it has made", record{}, math.MaxUint64},
	} {
		evil := d.join(t, overCMA, true)
		src := onGPU(t, d.g, d.size, 1)
		evil.post(t, write(d.key, src, transport.Point{}))
		until(t, evil, d.victim, func() bool { return len(d.victim.writes) == 1 && len(evil.done) == 1 })
		require.Equal(t, "cudaipc", evil.below().Via())
		d.victim.writes = nil

		s := evil.below().lane.seg
		number := s.begun.Load() + 1
		s.records[number%depth] = c.rec
		s.begun.Store(number)
		s.done.Store(number - 1 + c.ahead)
		until(t, evil, d.victim, func() bool { return d.victim.down != nil })
		if c.ahead > depth+1 { // its own side waits for that, and keeps the segment
			s.done.Store(number)
		}
		d.unharmed(t, evil, c.name, c.text)
	}
}

// TestBrokenIntroduction shows memory that is no segment.
func TestBrokenIntroduction(t *testing.T) {
	d := newDen(t, overCMA, true)
	var r remote
	require.True(t, r.decode(d.key))
	for _, size := range []uint64{4096, tableSize} { // too small, and without the magic
		evil := d.join(t, overCMA, true)
		shared, err := mem.NewNamed("fserver-cudaipc", size)
		require.NoError(t, err)
		inner := evil.below().inner
		require.True(t, inner.(transport.Lender).Lends(shared.Region().Span()))
		loan := transport.Op{Kind: transport.OpLend, Src: []mem.Span{shared.Region().Span()}}
		n, err := inner.Post([]transport.Op{{Kind: transport.OpWrite, Key: r.box}, loan, loan})
		require.NoError(t, err)
		require.Equal(t, 3, n)
		d.unharmed(t, evil, "", "lent a table of")
		require.NoError(t, mem.FreeShared(shared.ID()))
	}
}
