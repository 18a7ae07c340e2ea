package transporttest

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"

	"github.com/stretchr/testify/require"

	"fserver/engine/mem"
	"fserver/engine/transport"
)

// Memory gives the memory of a test and looks into it. A transport for memory
// that the CPU cannot address brings its own.
type Memory interface {
	// Alloc gives n bytes (n > 0).
	Alloc(n uint64) (mem.Region, error)
	// Free returns what Alloc gave.
	Free(mem.Region) error
	// Load copies the memory of s, which lies in a Region of Alloc, to dst.
	// len(dst) is s.Len.
	Load(dst []byte, s mem.Span) error
	// Store copies src to the memory of s. len(src) is s.Len.
	Store(s mem.Span, src []byte) error
}

// hostMemory is mapped memory of this process.
type hostMemory struct{}

func (hostMemory) Alloc(n uint64) (mem.Region, error) { return mem.Map(n) }
func (hostMemory) Free(r mem.Region) error            { return mem.Unmap(r) }

func (hostMemory) Load(dst []byte, s mem.Span) error {
	copy(dst, s.Bytes())
	return nil
}

func (hostMemory) Store(s mem.Span, src []byte) error {
	copy(s.Bytes(), src)
	return nil
}

// poison is what memory holds where nothing has been written.
const poison = 0xA5

// piece is how much memory a test fills or compares at a time.
const piece = 256 << 10

var poisoned = bytes.Repeat([]byte{poison}, piece)

// alloc gives poisoned memory that lives as long as the test.
func (w *world) alloc(n uint64) mem.Region {
	w.Helper()
	r, err := w.mem.Alloc(n)
	require.NoError(w, err)
	w.regions = append(w.regions, r)
	w.poison(r.Span())
	return r
}

// source is n bytes of pattern seed in memory.
func (w *world) source(seed, n uint64) mem.Span {
	w.Helper()
	s := w.alloc(n).Span()
	w.fill(s, seed)
	return s
}

// pieces calls do for each piece of s.
func pieces(s mem.Span, do func(p mem.Span)) {
	for s.Len > 0 {
		p := mem.Span{Addr: s.Addr, Len: min(s.Len, piece)}
		do(p)
		s.Addr, s.Len = s.Addr+uintptr(p.Len), s.Len-p.Len
	}
}

// poison overwrites s.
func (w *world) poison(s mem.Span) {
	pieces(s, func(p mem.Span) { w.store(p, poisoned[:p.Len]) })
}

// fill writes pattern seed to s.
func (w *world) fill(s mem.Span, seed uint64) {
	g := generator(seed)
	buf := make([]byte, min(s.Len, piece))
	pieces(s, func(p mem.Span) {
		g.Read(buf[:p.Len])
		w.store(p, buf[:p.Len])
	})
}

// holds checks that s holds pattern seed.
func (w *world) holds(what string, s mem.Span, seed uint64) {
	w.Helper()
	g := generator(seed)
	want := make([]byte, min(s.Len, piece))
	w.compare(what, s, func(n uint64) []byte {
		g.Read(want[:n])
		return want[:n]
	})
}

// untouched checks that nothing has been written to s since it was poisoned.
func (w *world) untouched(what string, s mem.Span) {
	w.Helper()
	w.compare(what, s, func(n uint64) []byte { return poisoned[:n] })
}

// reads checks that s holds want.
func (w *world) reads(what string, s mem.Span, want []byte) {
	w.Helper()
	got := make([]byte, s.Len)
	w.load(got, s)
	if d := difference(got, want); d != "" {
		w.Errorf("%s: %s", what, d)
	}
}

// compare checks s against the bytes that next gives piece by piece.
func (w *world) compare(what string, s mem.Span, next func(n uint64) []byte) {
	w.Helper()
	buf := make([]byte, min(s.Len, piece))
	bad := false
	pieces(s, func(p mem.Span) {
		if bad {
			return
		}
		w.load(buf[:p.Len], p)
		if d := difference(buf[:p.Len], next(p.Len)); d != "" {
			bad = true
			w.Errorf("%s of %d bytes, from byte %d: %s", what, s.Len, p.Addr-s.Addr, d)
		}
	})
}

func (w *world) store(s mem.Span, b []byte) {
	if err := w.mem.Store(s, b); err != nil {
		w.Fatalf("store %d bytes: %v", s.Len, err)
	}
}

func (w *world) load(b []byte, s mem.Span) {
	if err := w.mem.Load(b, s); err != nil {
		w.Fatalf("load %d bytes: %v", s.Len, err)
	}
}

// slice is n bytes at off of s, which the test knows to be inside.
func slice(s mem.Span, off, n uint64) mem.Span {
	p, err := mem.Region{Addr: s.Addr, Len: s.Len}.Slice(off, n)
	if err != nil {
		panic(err)
	}
	return p
}

// generator gives the bytes of pattern seed.
func generator(seed uint64) *rand.ChaCha8 {
	var key [32]byte
	binary.LittleEndian.PutUint64(key[:], seed)
	return rand.NewChaCha8(key)
}

// pattern is the first n bytes of pattern seed.
func pattern(seed, n uint64) []byte {
	b := make([]byte, n)
	generator(seed).Read(b)
	return b
}

// difference says where got and want differ, and is empty where they do not.
func difference(got, want []byte) string {
	if len(got) != len(want) {
		return fmt.Sprintf("%d bytes, want %d", len(got), len(want))
	}
	if bytes.Equal(got, want) {
		return ""
	}
	i := 0
	for got[i] == want[i] {
		i++
	}
	return fmt.Sprintf("byte %d of %d is %#x, want %#x", i, len(got), got[i], want[i])
}

// write is an op that writes src at off of t. Its number is for the mark behind it (link.go): it is
// in Loan, which no transport looks at in a write.
func (t target) write(off uint64, number uint32, src ...mem.Span) transport.Op {
	return transport.Op{Kind: transport.OpWrite, Key: t.key, Off: off, Loan: number, Src: src, Dev: t.Dev}
}
