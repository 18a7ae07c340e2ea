package cudaipc

import (
	"bytes"
	"encoding/binary"
	"io"
	"math"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"fserver/engine/gpu/fakegpu"
	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
	"fserver/engine/transport/transporttest/overtest"
)

func newDen(t *testing.T) *overtest.Den[*Fabric] {
	g := fakegpu.New()
	good, victim := pairOf(t, g, overCMA)
	return overtest.NewDen(t, g, good, victim)
}

// join is a hostile peer of the victim's.
func join(t *testing.T, d *overtest.Den[*Fabric]) *side { return d.Join(t, shares(d.G, overCMA, true)) }

// TestHostileMessages sends frames that start as those of this package do.
func TestHostileMessages(t *testing.T) {
	d := newDen(t)
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
		evil := join(t, d)
		evil.Raw(t, message(c.frame))
		d.Unharmed(t, evil, c.name, c.text)
	}
}

// TestHostileLoans lends memory without the words that this needs.
func TestHostileLoans(t *testing.T) {
	d := newDen(t)
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
		evil := join(t, d)
		if c.met {
			evil.Post(t, write(d.Key, onGPU(t, d.G, d.Size, 1), transport.Point{}))
			until(t, evil, d.Victim, func() bool { return len(d.Victim.Writes) == 1 && len(evil.Done) == 1 })
			d.Victim.Writes = nil
		}
		require.True(t, ours(evil).Conn.Lends(loan.Src[0]))
		evil.Raw(t, c.ops...)
		d.Unharmed(t, evil, c.name, c.text)
	}
}

// TestHostilePeerMapped says in its segment, and in the frames beside it, what no peer of
// ours says.
func TestHostilePeerMapped(t *testing.T) {
	d := newDen(t)
	begin := func() (evil *side, s *segment) {
		evil = join(t, d)
		src := onGPU(t, d.G, d.Size, 1)
		evil.Post(t, write(d.Key, src, transport.Point{}))
		until(t, evil, d.Victim, func() bool { return len(d.Victim.Writes) == 1 && len(evil.Done) == 1 })
		require.Equal(t, "cudaipc", ours(evil).Peer().Via)
		d.Victim.Writes = nil
		return evil, ours(evil).sender.seg
	}
	evil, _ := begin()
	evil.Raw(t, message(appendHead(nil, kindFrame, 2)))
	d.Unharmed(t, evil, "not begun", "waits for its write 2, which it has not begun")

	// Numbers that never come hold back this peer's own frames, up to a limit.
	evil, s := begin()
	s.begun.Store(math.MaxUint64)
	late := []transport.Op{message(appendHead(nil, kindFrame, 1<<40))}
	until(t, evil, d.Victim, func() bool {
		n, err := ours(evil).Conn.Post(late)
		for n == 1 && err == nil {
			n, err = ours(evil).Conn.Post(late)
		}
		return d.Victim.Down != nil
	})
	s.begun.Store(1) // its own side waits for that
	d.Unharmed(t, evil, "too many", "behind writes that have not landed")

	evil, s = begin()
	s.begun.Store(2)
	evil.Raw(t, message(append(appendHead(nil, kindFrame, 2), "held"...)))
	for range 100 {
		d.Victim.Poll(t)
	}
	require.True(t, ours(d.Victim).Held.Len() > 0)
	evil.C.Close()
	s.begun.Store(1)
	until(t, evil, d.Victim, func() bool { return d.Victim.Down != nil })
	require.ErrorIs(t, d.Victim.Down, io.EOF)
	require.Empty(t, d.Victim.Frames)
	require.NoError(t, evil.F.Close())
}

// TestBrokenIntroduction shows memory that is no segment.
func TestBrokenIntroduction(t *testing.T) {
	d := newDen(t)
	for _, size := range []uint64{4096, tableSize} { // too small, and without the magic
		evil := join(t, d)
		shared, err := mem.NewNamed("fserver-cudaipc", size)
		require.NoError(t, err)
		require.True(t, ours(evil).Conn.Lends(shared.Region().Span()))
		loan := transport.Op{Kind: transport.OpLend, Src: []mem.Span{shared.Region().Span()}}
		evil.Raw(t, message(meeting), loan, loan)
		d.Unharmed(t, evil, "", "lent a table of")
		require.NoError(t, mem.FreeShared(shared.ID()))
	}
}

// forge returns k with what change has made of it behind its Blob.
func forge(t *testing.T, k transport.Key, change func(r *remote)) transport.Key {
	var r remote
	require.True(t, r.decode(k))
	change(&r)
	k.Blob = r.encode(k.Blob)
	require.True(t, r.decode(k))
	return k
}

// TestTwoBlobs: of a key whose memory is mapped, another Blob says that it has more. Nothing is copied behind the mapping,
// which would cost us our context.
func TestTwoBlobs(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overCMA)
	src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1)
	k := b.Key(t, dst)
	more := write(forge(t, k, func(r *remote) { r.n, r.size = 1<<30, 1<<30 }), src, transport.Point{})
	a.Post(t, write(k, src, transport.Point{}))
	until(t, a, b, func() bool { return len(b.Writes) == 1 && len(a.Done) == 1 })
	require.Equal(t, "cudaipc", a.C.Peer().Via)
	more[0].Off = 1 << 29
	a.Post(t, more)
	until(t, a, b, func() bool { return a.Down != nil && b.Down != nil && len(a.Done) == 2 })
	require.ErrorContains(t, b.Down, "out of bounds")
	require.Len(t, b.Writes, 1)
	holds(t, g, dst, 5)
}

// TestOtherProcess: memory of a process that is not the peer is not mapped, though we may do what we like with that process.
func TestOtherProcess(t *testing.T) {
	g := fakegpu.New()
	g.Pieces = true
	a, b := pairOf(t, g, overCMA)
	src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1)
	k := b.Key(t, dst)
	fd, err := unix.Dup(b.F.regions[k.ID].fds[0])
	require.NoError(t, err)
	other := exec.Command("sleep", "60")
	other.ExtraFiles = []*os.File{os.NewFile(uintptr(fd), "memory")} // its descriptor 3
	require.NoError(t, other.Start())
	t.Cleanup(func() {
		require.NoError(t, other.Process.Kill())
		require.Error(t, other.Wait())
		require.NoError(t, other.ExtraFiles[0].Close())
	})
	forged := forge(t, k, func(r *remote) {
		r.pid = uint64(other.Process.Pid)
		b := []byte(r.fdsAndPieces)
		binary.LittleEndian.PutUint32(b, 3)
		r.fdsAndPieces = string(b)
	})
	a.Post(t, write(forged, src, transport.Point{}))
	until(t, a, b, func() bool { return len(b.Writes) == 1 && len(a.Done) == 1 })
	require.Zero(t, g.Imports())
	require.Contains(t, a.C.Peer().Why, "the peer is process")
	holds(t, g, dst, 5)
}

func TestPlainFrames(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overCMA)
	large := strings.Repeat("\xfe", transport.MaxFrame-headLen+1)
	overtest.PlainFrames(t, g, a, b, "\xfe", "\xfe\x04", large, large[1:])
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
		c := new(Fabric).Wrap(nil).(*Conn)
		p := link.Found{Events: make([]transport.Event, 2)}
		for i, b := range [][]byte{one, two} {
			if c.Frame(b, &p) != nil {
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
