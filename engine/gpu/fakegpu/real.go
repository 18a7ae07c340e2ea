package fakegpu

import (
	"runtime"
	"sync"
	"testing"

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
