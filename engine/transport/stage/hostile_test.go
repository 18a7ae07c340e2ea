package stage

import (
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"math"
	"runtime"
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
	in, err := under(transporttest.Options{Gate: transporttest.Gate{Hello: "evil"}})
	require.NoError(t, err)
	f, err := Wrap(in, Options{Device: d.g})
	require.NoError(t, err)
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

// liftOf tells of a write.
func liftOf(k transport.Key, off, n uint64) transport.Op {
	b := []byte{escape, kindLift}
	for _, v := range []uint64{k.ID, k.Token, off, n} {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	return message(b)
}

func forged(k transport.Key) transport.Key { k.Token ^= 1; return k }

// TestHostilePeerStaged writes over the Fabric below, by itself, with all the keys
// that there are.
func TestHostilePeerStaged(t *testing.T) {
	for name, under := range map[string]below{"tcp": overTCP, "cma": overCMA, "cma staged": overStaged} {
		t.Run(name, func(t *testing.T) {
			d := newDen(t, under)
			for _, c := range []struct {
				name, text string
				key        transport.Key
				off        uint64
				n          int
			}{
				{"past the end", "out of bounds", d.key, d.size - 7, 8},
				{"behind the end", "out of bounds", d.key, d.size, 1},
				{"before the start", "out of bounds", d.key, math.MaxUint64 - 7, 10},
				{"past the end of host memory", "out of bounds", d.host, d.size - 7, 8},
				{"wrong token", "wrong token", forged(d.key), 0, 1},
				{"stale key", "no such key", d.stale, 0, 1},
				{"another peer's key", "another peer", d.goods, 0, 1},
			} {
				evil := d.join(t, under)
				src := bytes.Repeat([]byte{9}, c.n)
				evil.raw(t, transport.Op{Kind: transport.OpWrite, Key: c.key, Off: c.off, Src: []mem.Span{mem.Of(src)}},
					liftOf(c.key, c.off, uint64(c.n)), message(nil))
				d.unharmed(t, evil, c.name, c.text)
				runtime.KeepAlive(src)
			}
		})
	}
}

// TestHostileLift tells of writes that have not been made: what the GPU would copy is
// checked by itself.
func TestHostileLift(t *testing.T) {
	d := newDen(t, overTCP)
	for _, c := range []struct {
		name, text string
		key        transport.Key
		off, n     uint64
	}{
		{"past the end", "out of bounds", d.key, d.size - 7, 8},
		{"behind the end", "out of bounds", d.key, d.size, 1},
		{"before the start", "out of bounds", d.key, math.MaxUint64 - 7, 16},
		{"2^63 bytes", "out of bounds", d.key, 0, 1 << 63},
		{"no bytes", "out of bounds", d.key, 0, 0},
		{"wrong token", "wrong token", forged(d.key), 0, 8},
		{"no token", "wrong token", transport.Key{ID: d.key.ID}, 0, 8},
		{"stale key", "no longer", d.stale, 0, 8},
		{"key of nothing", "not registered", transport.Key{}, 0, 8},
		{"key of all ones", "not registered", transport.Key{ID: math.MaxUint64}, 0, 8},
		{"key of host memory", "not registered", d.host, 0, 8},
		{"another peer's key", "another peer", d.goods, 0, 8},
	} {
		evil := d.join(t, overTCP)
		evil.raw(t, liftOf(c.key, c.off, c.n), message(nil))
		d.unharmed(t, evil, c.name, c.text)
	}
}

// TestHostileMessages sends frames that start as those of this package do.
func TestHostileMessages(t *testing.T) {
	for name, under := range map[string]below{"tcp": overTCP, "cma": overCMA} {
		t.Run(name, func(t *testing.T) {
			d := newDen(t, under)
			for _, c := range []struct {
				name, text string
				frame      []byte
			}{
				{"one byte", "kind 0 and 1 bytes", []byte{escape}},
				{"kind 0", "kind 0", []byte{escape, 0}},
				{"unknown kind", "kind 3", []byte{escape, kindBare + 1}},
				{"last kind", "kind 255", []byte{escape, 255}},
				{"no lift", "kind 1 and 2 bytes", []byte{escape, kindLift}},
				{"short lift", "kind 1 and 33 bytes", liftOf(d.key, 0, 8).Frame[:liftLen-1]},
				{"long lift", "kind 1 and 35 bytes", append(liftOf(d.key, 0, 8).Frame, 0)},
				{"long word", "kind 2 and 3 bytes", []byte{escape, kindBare, 0}},
			} {
				evil := d.join(t, under)
				evil.raw(t, message(c.frame))
				d.unharmed(t, evil, c.name, c.text)
			}
		})
	}
}

// TestPlainFrames: what starts as our messages do, or is as large as a frame can be, arrives
// as it was, with and without writes in front of it.
func TestPlainFrames(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overTCP)
	src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1)
	k := b.key(t, dst)
	large := strings.Repeat("\xff", transport.MaxFrame)
	for i := range 3 {
		for _, f := range []string{"", "\xff", "\xff\x01", "\xfe", large, large[1:], "\x00" + large[1:]} {
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
// user gets is a frame as it came.
func FuzzMessage(f *testing.F) {
	for kind := range uint8(kindBare + 2) {
		f.Add([]byte{escape, kind}, []byte("frame"))
		f.Add([]byte{escape, kind}, []byte{escape, kind})
	}
	f.Add(liftOf(transport.Key{ID: 1}, 0, 8).Frame, []byte{escape})
	f.Fuzz(func(t *testing.T, one, two []byte) {
		c := &Conn{f: &Fabric{regions: map[uint64]*region{}}}
		p := link.Found{Events: make([]transport.Event, 2)}
		for i, b := range [][]byte{one, two} {
			if c.message(b, &p) != nil {
				return
			}
			require.LessOrEqual(t, p.N, i+1)
		}
		for _, e := range p.Events[:p.N] {
			require.Equal(t, transport.EvFrame, e.Kind)
			require.True(t, bytes.Equal(one, e.Data) || bytes.Equal(two, e.Data))
		}
	})
}
