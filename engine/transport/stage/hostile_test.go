package stage

import (
	"bytes"
	"encoding/binary"
	"math"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/gpu/fakegpu"
	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
	"fserver/engine/transport/transporttest/overtest"
)

func newDen(t *testing.T, under overtest.Below) *overtest.Den[*Fabric] {
	g := fakegpu.New()
	good, victim := pairOf(t, g, under)
	return overtest.NewDen(t, g, good, victim)
}

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
	for name, under := range map[string]overtest.Below{"tcp": overTCP, "cma": overCMA, "cma staged": overStaged} {
		t.Run(name, func(t *testing.T) {
			d := newDen(t, under)
			for _, c := range []struct {
				name, text string
				key        transport.Key
				off        uint64
				n          int
			}{
				{"past the end", "out of bounds", d.Key, d.Size - 7, 8},
				{"behind the end", "out of bounds", d.Key, d.Size, 1},
				{"before the start", "out of bounds", d.Key, math.MaxUint64 - 7, 10},
				{"past the end of host memory", "out of bounds", d.Host, d.Size - 7, 8},
				{"wrong token", "wrong token", forged(d.Key), 0, 1},
				{"stale key", "no such key", d.Stale, 0, 1},
				{"another peer's key", "another peer", d.Goods, 0, 1},
			} {
				evil := d.Join(t, wraps(under, Options{Device: d.G}))
				src := bytes.Repeat([]byte{9}, c.n)
				evil.Raw(t, transport.Op{Kind: transport.OpWrite, Key: c.key, Off: c.off, Src: []mem.Span{mem.Of(src)}},
					liftOf(c.key, c.off, uint64(c.n)), message(nil))
				d.Unharmed(t, evil, c.name, c.text)
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
		{"past the end", "out of bounds", d.Key, d.Size - 7, 8},
		{"behind the end", "out of bounds", d.Key, d.Size, 1},
		{"before the start", "out of bounds", d.Key, math.MaxUint64 - 7, 16},
		{"2^63 bytes", "out of bounds", d.Key, 0, 1 << 63},
		{"no bytes", "out of bounds", d.Key, 0, 0},
		{"wrong token", "wrong token", forged(d.Key), 0, 8},
		{"no token", "wrong token", transport.Key{ID: d.Key.ID}, 0, 8},
		{"stale key", "no longer", d.Stale, 0, 8},
		{"key of nothing", "not registered", transport.Key{}, 0, 8},
		{"key of all ones", "not registered", transport.Key{ID: math.MaxUint64}, 0, 8},
		{"key of host memory", "not registered", d.Host, 0, 8},
		{"another peer's key", "another peer", d.Goods, 0, 8},
	} {
		evil := d.Join(t, wraps(overTCP, Options{Device: d.G}))
		evil.Raw(t, liftOf(c.key, c.off, c.n), message(nil))
		d.Unharmed(t, evil, c.name, c.text)
	}
}

// TestLiftsOfOnePeer: a peer whose copies wait for the driver takes no room from another.
func TestLiftsOfOnePeer(t *testing.T) {
	a, b := pairOf(t, fakegpu.New(), overTCP)
	k := b.Key(t, onGPU(t, b.F.Calls.Dev.(*fakegpu.GPU), 4096, 1))
	r := b.F.regions[k.ID]
	c, other := ours(b), &Conn{f: b.F}
	r.pinning = true // the driver takes long
	for range link.HeldMost {
		require.NoError(t, c.lift(k, 0, 1))
	}
	require.ErrorContains(t, c.lift(k, 0, 1), "while 8192 copies to gpu 0 wait")
	require.NoError(t, other.lift(k, 0, 1))
	r.pinning = false
	b.F.Lock()
	b.F.land()
	b.F.Mu.Unlock()
	until(t, a, b, func() bool { return !b.F.in.waiting() })
	require.Zero(t, c.lifts+other.lifts)
}

// TestHostileMessages sends frames that start as those of this package do.
func TestHostileMessages(t *testing.T) {
	for name, under := range map[string]overtest.Below{"tcp": overTCP, "cma": overCMA} {
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
				{"short lift", "kind 1 and 33 bytes", liftOf(d.Key, 0, 8).Frame[:liftLen-1]},
				{"long lift", "kind 1 and 35 bytes", append(liftOf(d.Key, 0, 8).Frame, 0)},
				{"long word", "kind 2 and 3 bytes", []byte{escape, kindBare, 0}},
			} {
				evil := d.Join(t, wraps(under, Options{Device: d.G}))
				evil.Raw(t, message(c.frame))
				d.Unharmed(t, evil, c.name, c.text)
			}
		})
	}
}

// TestUseEnds: what waits to be copied to GPU memory is not when that is not in use any more.
func TestUseEnds(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overTCP)
	dst := onGPU(t, g, 4096, 1)
	var uses atomic.Int32
	uses.Store(1)
	r := dst
	r.InUse = &uses
	k := b.Key(t, r)
	_, end := g.Block(t, "Pin")
	src := bytes.Repeat([]byte{5}, 4096)
	a.Post(t, []transport.Op{{Kind: transport.OpWrite, Key: k, Src: []mem.Span{mem.Of(src)}}})
	until(t, a, b, func() bool { return ours(b).Held.Len() == 1 })
	uses.Store(0)
	end()
	until(t, a, b, func() bool { return b.Down != nil && a.Down != nil })
	require.ErrorIs(t, b.Down, link.ErrNotInUse)
	require.Empty(t, b.Writes)
	b.Free(t, k)
	holds(t, g, dst, 1)
	runtime.KeepAlive(src)
}

func TestPlainFrames(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overTCP)
	overtest.PlainFrames(t, g, a, b, "\xff", "\xff\x01", strings.Repeat("\xff", transport.MaxFrame-1))
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
		f := &Fabric{regions: map[uint64]*region{}}
		c := f.Wrap(nil).(*Conn)
		p := link.Found{Events: make([]transport.Event, 2)}
		for i, b := range [][]byte{one, two} {
			if c.Frame(b, &p) != nil {
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
