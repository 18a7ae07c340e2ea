// Package overtest has what tests of Fabrics share that embed an over.Base: two ends of a Conn over one GPU that are
// driven in turn, and the tests that hold for each of them.
package overtest

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

	"fserver/engine/gpu/fakegpu"
	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/link/over"
	"fserver/engine/transport/transporttest"
)

// Below opens the Fabric that is wrapped.
type Below func(o transporttest.Options) (transport.Fabric, error)

// A Fabric embeds an over.Base.
type Fabric interface {
	transport.Fabric
	It() *over.Base
}

// A Side is one end of a Conn, and what it has seen.
type Side[F Fabric] struct {
	F      F
	C      transport.Conn
	owed   []transport.Op // marks that were not taken
	Done   []error        // of all but marks
	Writes []Landed
	Frames []string // all but marks, and loans
	Down   error
	Freed  []uint64 // keys
}

// Landed is a write that a mark has told of, a frame right behind it. Its Number is what the
// test has put into the Op's Loan.
type Landed struct {
	Key, Off, Len uint64
	Number        uint32
}

// aMark is the User of a mark.
const aMark = 1 << 61

const markText = "\x01a write has landed:"

func markOf(op *transport.Op) transport.Op {
	v := Landed{Key: op.Key.ID, Off: op.Off, Number: op.Loan}
	for _, s := range op.Src {
		v.Len += s.Len
	}
	b, err := binary.Append([]byte(markText), binary.LittleEndian, v)
	if err != nil {
		panic(err)
	}
	return transport.Op{Kind: transport.OpFrame, User: aMark, Frame: b}
}

// Try hands operations over, each write with a mark behind it, and says how many were taken,
// without marks.
func (s *Side[F]) Try(ops []transport.Op) (taken int, err error) {
	all := s.owed
	for i := range ops {
		all = append(all, ops[i])
		if ops[i].Kind == transport.OpWrite {
			all = append(all, markOf(&ops[i]))
		}
	}
	k, err := s.C.Post(all)
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

// Post hands operations over that are taken. The mark behind them may see the end of the Conn.
func (s *Side[F]) Post(t *testing.T, ops []transport.Op) {
	t.Helper()
	n, err := s.Try(ops)
	require.Len(t, ops, n, "%v", err)
}

// Key registers memory.
func (s *Side[F]) Key(t *testing.T, r mem.Region) transport.Key {
	k, err := s.F.Register(r)
	require.NoError(t, err)
	return k
}

// Free ends a key.
func (s *Side[F]) Free(t *testing.T, k transport.Key) {
	t.Helper()
	s.F.Deregister(k)
	Until(t, s, s, func() bool { return slices.Contains(s.Freed, k.ID) })
}

// Poll takes what there is.
func (s *Side[F]) Poll(t *testing.T) {
	if len(s.owed) > 0 {
		_, _ = s.Try(nil)
	}
	var ev [16]transport.Event
	n, err := s.F.Poll(ev[:])
	require.NoError(t, err)
	for _, e := range ev[:n] {
		switch e.Kind {
		case transport.EvAccept:
			s.C = e.Conn
		case transport.EvDone:
			if e.User != aMark {
				s.Done = append(s.Done, e.Err)
			}
		case transport.EvFrame:
			if text, ok := strings.CutPrefix(string(e.Data), markText); ok {
				var v Landed
				_, err := binary.Decode([]byte(text), binary.LittleEndian, &v)
				require.NoError(t, err)
				s.Writes = append(s.Writes, v)
			} else {
				s.Frames = append(s.Frames, string(e.Data))
			}
		case transport.EvLent:
			require.NoError(t, e.View.Drop())
			s.Frames = append(s.Frames, fmt.Sprintf("loan %d", e.Loan))
		case transport.EvFreed:
			s.Freed = append(s.Freed, e.User)
		case transport.EvDown:
			s.Down, s.owed = e.Err, nil
		}
	}
}

// Raw posts operations on the Conn of the Fabric below.
func (s *Side[F]) Raw(t *testing.T, ops ...transport.Op) {
	t.Helper()
	for in, c := range s.F.It().Conns {
		if c == s.C {
			n, err := in.Post(ops)
			require.NoError(t, err)
			require.Len(t, ops, n)
			return
		}
	}
	t.Fatal("the Fabric does not wrap this Conn")
}

// Look has the next Poll look at the device.
func (s *Side[F]) Look() {
	s.F.It().Looked = time.Time{}
	s.F.Arm()
}

// Open is a side without a Conn, whose peers see a name.
func Open[F Fabric](t *testing.T, name string, open func(transporttest.Options) (F, error)) *Side[F] {
	f, err := open(transporttest.Options{Listen: true, Gate: transporttest.Gate{Hello: name}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, f.Close()) })
	return &Side[F]{F: f}
}

// Connect makes a Conn from a to b.
func Connect[F Fabric](t *testing.T, a, b *Side[F]) {
	t.Helper()
	b.C = nil
	c, err := a.F.Connect(context.Background(), b.F.Addr())
	require.NoError(t, err)
	Until(t, a, b, func() bool { return b.C != nil })
	a.C = c      // and not the Conn of an EvAccept
	a.owed = nil // those are of another Conn
}

// Until polls both sides until something has happened.
func Until[F Fabric](t *testing.T, a, b *Side[F], met func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !met(); {
		require.True(t, time.Now().Before(end), "did not happen")
		a.Poll(t)
		b.Poll(t)
	}
}

// Polls gives both sides time to do what they should not.
func Polls[F Fabric](t *testing.T, a, b *Side[F]) {
	for range 300 {
		a.Poll(t)
		b.Poll(t)
	}
}

// OnGPU is memory of a GPU.
func OnGPU(t *testing.T, g *fakegpu.GPU, n uint64, fill byte) mem.Region {
	m := fakegpu.Memory{G: g}
	r, err := m.Alloc(n)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Free(r)) })
	require.NoError(t, m.Store(r.Span(), bytes.Repeat([]byte{fill}, int(n))))
	return r
}

// Write is one write.
func Write(k transport.Key, src mem.Region, after transport.Point) []transport.Op {
	return []transport.Op{{Kind: transport.OpWrite, Key: k, Src: []mem.Span{src.Span()}, Dev: src.Dev, After: after}}
}

// Holds asserts what memory of a GPU holds.
func Holds(t *testing.T, g *fakegpu.GPU, r mem.Region, fill byte) {
	t.Helper()
	b := make([]byte, r.Len)
	require.NoError(t, fakegpu.Memory{G: g}.Load(b, r.Span()))
	require.Equal(t, bytes.Repeat([]byte{fill}, int(r.Len)), b)
}

// HeldUp is a point that a GPU has not passed before the func is called. What f has
// behind it is over before memory from before this call is freed.
func HeldUp(t *testing.T, g *fakegpu.GPU, f transport.Fabric) (transport.Point, func()) {
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

// Text is a frame.
func Text(s string, passes bool) transport.Op {
	return transport.Op{Kind: transport.OpFrame, Frame: []byte(s), Passes: passes}
}

// Message is a frame that does not pass.
func Message(b []byte) transport.Op { return transport.Op{Kind: transport.OpFrame, Frame: b} }
