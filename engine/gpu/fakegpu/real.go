package fakegpu

import (
	"errors"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/cshim/cuda"
	"fserver/engine/mem"
)

// RealGPU is a GPU of this host whose memory a test can read and write, by way of pinned memory
// and a stream that are kept for good.
type RealGPU struct {
	*cuda.Device
	mu     sync.Mutex // guards pinned
	pinned mem.Region
	seen   uint64 // the address of pinned for the GPU
	stream cuda.Stream
}

// pinnedLen is how much of a transfer goes through pinned memory at a time.
const pinnedLen = 1 << 20

var realGPU = sync.OnceValues(func() (*RealGPU, error) {
	g := &RealGPU{}
	var err error
	if g.Device, err = cuda.Retain(0); err != nil {
		return nil, err
	}
	if g.pinned, err = mem.Map(pinnedLen); err != nil {
		return nil, err
	}
	if g.seen, err = g.Pin(uint64(g.pinned.Addr), g.pinned.Len); err != nil {
		return nil, err
	}
	g.stream, err = g.NewStream()
	return g, err
})

// Real returns GPU 0, or skips the test where there is none. The GPU stays open.
func Real(tb testing.TB) *RealGPU {
	if err := cuda.Open(); err != nil {
		tb.Skip(err)
	}
	n, err := cuda.Count()
	require.NoError(tb, err)
	if n == 0 {
		tb.Skip("cuda: no GPU is visible")
	}
	g, err := realGPU()
	require.NoError(tb, err)
	return g
}

// Read copies from the GPU and waits for the copy.
func (g *RealGPU) Read(to []byte, from uint64) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	for len(to) > 0 {
		n := min(len(to), pinnedLen)
		if err := g.copy(cuda.Copy{To: g.seen, From: from, Len: uint64(n)}); err != nil {
			return err
		}
		copy(to[:n], g.pinned.Span().Bytes())
		to, from = to[n:], from+uint64(n)
	}
	return nil
}

// Write copies to the GPU and waits for the copy.
func (g *RealGPU) Write(to uint64, from []byte) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	for len(from) > 0 {
		n := copy(g.pinned.Span().Bytes(), from)
		if err := g.copy(cuda.Copy{To: to, From: g.seen, Len: uint64(n)}); err != nil {
			return err
		}
		to, from = to+uint64(n), from[n:]
	}
	return nil
}

func (g *RealGPU) copy(c cuda.Copy) error {
	err := g.Enqueue(g.stream, 0, []cuda.Copy{c}, 0, 0)
	for idle := false; err == nil && !idle; runtime.Gosched() {
		idle, err = g.Idle(g.stream)
	}
	return err
}

// WarmUp has the driver open what it keeps open, so that no test counts that as left.
func (g *RealGPU) WarmUp(tb testing.TB) {
	s, err := g.NewStream()
	require.NoError(tb, err)
	r, err := mem.Map(4096)
	require.NoError(tb, err)
	seen, err := g.Pin(uint64(r.Addr), r.Len)
	require.NoError(tb, err)
	a, err := g.Alloc(4096)
	require.NoError(tb, err)
	require.NoError(tb, g.Enqueue(s, 0, []cuda.Copy{{To: a, From: seen, Len: 2048}}, seen, 1))
	require.Eventually(tb, func() bool { idle, err := g.Idle(s); return idle && err == nil }, 10*time.Second, time.Millisecond)
	require.Equal(tb, byte(1), r.Span().Bytes()[0])
	require.NoError(tb, errors.Join(g.Free(a), g.Unpin(uint64(r.Addr)), mem.Unmap(r), g.FreeStream(s)))
}

// RealMemory is that of a RealGPU, and of the CPU.
type RealMemory struct{ G *RealGPU }

// Alloc gives memory of the GPU.
func (m RealMemory) Alloc(n uint64) (mem.Region, error) {
	a, err := m.G.Alloc(max(n, 1)) // the driver has nothing of 0 bytes
	return mem.Region{Addr: uintptr(a), Len: n, Dev: mem.GPU(m.G.Ordinal())}, err
}

// Free returns what Alloc gave.
func (m RealMemory) Free(r mem.Region) error { return m.G.Free(uint64(r.Addr)) }

// host says whether s is memory of the CPU, as what is lent is.
func (m RealMemory) host(s mem.Span) bool {
	k, err := m.G.Describe(uint64(s.Addr))
	return err != nil || !k.OnGPU
}

// Load reads memory of both kinds.
func (m RealMemory) Load(dst []byte, s mem.Span) error {
	switch {
	case len(dst) == 0:
		return nil
	case m.host(s):
		copy(dst, s.Bytes())
		return nil
	}
	return m.G.Read(dst, uint64(s.Addr))
}

// Store writes to it.
func (m RealMemory) Store(s mem.Span, src []byte) error {
	switch {
	case len(src) == 0:
		return nil
	case m.host(s):
		copy(s.Bytes(), src)
		return nil
	}
	return m.G.Write(uint64(s.Addr), src)
}
