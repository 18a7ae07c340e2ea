package cudaipc

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/gpu"
	"fserver/engine/gpu/fakegpu"
	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/transporttest"
)

// A side is one end of a Conn, and what it has seen.
type side struct {
	f      *Fabric
	c      transport.Conn
	owed   []transport.Op // marks that were not taken
	done   []error        // of all but marks
	writes []landed
	frames []string // all but marks, and loans
	down   error
	freed  []uint64 // keys
}

// landed is a write that a mark has told of, a frame right behind it. Its number is what the
// test has put into the Op's Loan.
type landed struct {
	Key, Off, Len uint64
	Number        uint32
}

// aMark is the User of a mark.
const aMark = 1 << 61

const markText = "\x01a write has landed:"

func markOf(op *transport.Op) transport.Op {
	v := landed{Key: op.Key.ID, Off: op.Off, Number: op.Loan}
	for _, s := range op.Src {
		v.Len += s.Len
	}
	b, err := binary.Append([]byte(markText), binary.LittleEndian, v)
	if err != nil {
		panic(err)
	}
	return transport.Op{Kind: transport.OpFrame, User: aMark, Frame: b}
}

// try hands operations over, each write with a mark behind it, and says how many were taken,
// without marks.
func (s *side) try(ops []transport.Op) (taken int, err error) {
	all := s.owed
	for i := range ops {
		all = append(all, ops[i])
		if ops[i].Kind == transport.OpWrite {
			all = append(all, markOf(&ops[i]))
		}
	}
	k, err := s.c.Post(all)
	for _, op := range all[:k] {
		if op.User != aMark {
			taken++
		}
	}
	s.owed = nil
	if k < len(all) && all[k].User == aMark && err == nil {
		s.owed = all[k : k+1 : k+1]
	}
	return taken, err
}

// post hands operations over that are taken. The mark behind them may see the end of the Conn.
func (s *side) post(t *testing.T, ops []transport.Op) {
	t.Helper()
	n, err := s.try(ops)
	require.Len(t, ops, n, "%v", err)
}

// key registers memory.
func (s *side) key(t *testing.T, r mem.Region) transport.Key {
	k, err := s.f.Register(r)
	require.NoError(t, err)
	return k
}

// free ends a key.
func (s *side) free(t *testing.T, k transport.Key) {
	t.Helper()
	s.f.Deregister(k)
	until(t, s, s, func() bool { return slices.Contains(s.freed, k.ID) })
}

func (s *side) poll(t *testing.T) {
	if len(s.owed) > 0 {
		_, _ = s.try(nil)
	}
	var ev [16]transport.Event
	n, err := s.f.Poll(ev[:])
	require.NoError(t, err)
	for _, e := range ev[:n] {
		switch e.Kind {
		case transport.EvAccept:
			s.c = e.Conn
		case transport.EvDone:
			if e.User != aMark {
				s.done = append(s.done, e.Err)
			}
		case transport.EvFrame:
			if text, ok := strings.CutPrefix(string(e.Data), markText); ok {
				var v landed
				_, err := binary.Decode([]byte(text), binary.LittleEndian, &v)
				require.NoError(t, err)
				s.writes = append(s.writes, v)
			} else {
				s.frames = append(s.frames, string(e.Data))
			}
		case transport.EvLent:
			require.NoError(t, e.View.Drop())
			s.frames = append(s.frames, fmt.Sprintf("loan %d", e.Loan))
		case transport.EvFreed:
			s.freed = append(s.freed, e.User)
		case transport.EvDown:
			s.down, s.owed = e.Err, nil
		}
	}
}

// pairOf is a Conn between two Fabrics over one GPU.
func pairOf(t *testing.T, g *fakegpu.GPU, under below) (a, b *side) { return pairAs(t, g, under, g, g) }

// pairWith is pairOf, where each side sees the GPU as a Device of its own.
func pairWith(t *testing.T, g *fakegpu.GPU, da, db gpu.Device) (a, b *side) {
	return pairAs(t, g, overCMA, da, db)
}

func pairAs(t *testing.T, g *fakegpu.GPU, under below, da, db gpu.Device) (a, b *side) {
	t.Cleanup(func() { g.Empty(t) })
	open := func(name string, d gpu.Device) *side {
		f, err := opens(d, under, true, true)(transporttest.Options{Listen: true, Gate: transporttest.Gate{Hello: name}})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, f.Close()) })
		return &side{f: f.(*Fabric)}
	}
	a, b = open("a", da), open("b", db)
	connect(t, a, b)
	// A write waits for the introductions for as long as this machine takes, and is not staged meanwhile.
	a.below().asked = time.Now().Add(time.Hour)
	return a, b
}

func connect(t *testing.T, a, b *side) {
	var err error
	a.c, err = a.f.Connect(context.Background(), b.f.Addr())
	require.NoError(t, err)
	until(t, a, b, func() bool { return b.c != nil })
}

func until(t *testing.T, a, b *side, met func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !met(); {
		require.True(t, time.Now().Before(end), "did not happen")
		a.poll(t)
		b.poll(t)
	}
}

func onGPU(t *testing.T, g *fakegpu.GPU, n uint64, fill byte) mem.Region {
	m := fakegpu.Memory{G: g}
	r, err := m.Alloc(n)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Free(r)) })
	require.NoError(t, m.Store(r.Span(), bytes.Repeat([]byte{fill}, int(n))))
	return r
}

func write(k transport.Key, src mem.Region, after transport.Point) []transport.Op {
	return []transport.Op{{Kind: transport.OpWrite, Key: k, Src: []mem.Span{src.Span()}, Dev: src.Dev, After: after}}
}

func holds(t *testing.T, g *fakegpu.GPU, r mem.Region, fill byte) {
	t.Helper()
	b := make([]byte, r.Len)
	require.NoError(t, fakegpu.Memory{G: g}.Load(b, r.Span()))
	require.Equal(t, bytes.Repeat([]byte{fill}, int(r.Len)), b)
}

// heldUp is a point that a GPU has not passed before the func is called. What f has
// behind it is over before memory from before this call is freed.
func heldUp(t *testing.T, g *fakegpu.GPU, f *Fabric) (transport.Point, func()) {
	stream, err := g.NewStream()
	require.NoError(t, err)
	e, err := g.NewEvent()
	require.NoError(t, err)
	gate := make(chan struct{})
	open := sync.OnceFunc(func() { close(gate) })
	g.Put(stream, func() { <-gate })
	require.NoError(t, g.Record(e, stream))
	t.Cleanup(func() {
		open()
		require.NoError(t, errors.Join(f.Close(), g.FreeStream(stream), g.FreeEvent(e)))
	})
	return transport.Point{Dev: mem.GPU(0), Event: uint64(e)}, open
}

// below is the Conn of one end; nil if it is inner's.
func (s *side) below() *Conn {
	c, _ := s.c.(*Conn)
	return c
}

// raw posts operations of the Fabric below.
func (s *side) raw(t *testing.T, ops ...transport.Op) {
	t.Helper()
	n, err := s.below().Conn.Post(ops)
	require.NoError(t, err)
	require.Len(t, ops, n)
}

// underWay is two sides of which a has begun a write of 4 KiB to a key of b's, whose copy
// waits until open is called. s is a's segment.
func underWay(t *testing.T, g *fakegpu.GPU) (a, b *side, dst mem.Region, k transport.Key, s *segment, open func()) {
	a, b = pairOf(t, g, overCMA)
	src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1)
	point, open := heldUp(t, g, a.f)
	k = b.key(t, dst)
	a.post(t, write(k, src, point))
	s = a.segment(t, b)
	until(t, a, b, func() bool { return s.begun.Load() == 1 })
	return a, b, dst, k, s, open
}

// segment is that of a side which has posted a write of GPU memory to b.
func (a *side) segment(t *testing.T, b *side) *segment {
	l := &a.below().lane
	until(t, a, b, func() bool { return l.seg != nil })
	return l.seg
}
