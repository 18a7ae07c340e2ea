package cudaipc

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/cshim/cuda"
	"fserver/engine/gpu"
	"fserver/engine/gpu/fakegpu"
	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/transporttest"
)

// realGPU is a GPU of this host, or the test is skipped.
func realGPU(tb testing.TB) *fakegpu.RealGPU {
	d := fakegpu.Real(tb)
	warmUp(tb, d)
	return d
}

// warmUp has the driver open what it keeps open, so that no test counts that as left.
func warmUp(tb testing.TB, d gpu.Device) {
	s, err := d.NewStream()
	require.NoError(tb, err)
	r, err := mem.Map(4096)
	require.NoError(tb, err)
	seen, err := d.Pin(uint64(r.Addr), r.Len)
	require.NoError(tb, err)
	a, err := d.Alloc(4096)
	require.NoError(tb, err)
	require.NoError(tb, d.Enqueue(s, 0, []cuda.Copy{{To: a, From: seen, Len: 2048}}, seen, 1))
	require.Eventually(tb, func() bool { return wordIn(r).Load() == 1 }, 10*time.Second, time.Millisecond)
	require.NoError(tb, errors.Join(d.Free(a), d.Unpin(uint64(r.Addr)), mem.Unmap(r), d.FreeStream(s)))
}

// realMemory is that of a GPU.
type realMemory struct{ d *fakegpu.RealGPU }

func (m realMemory) Alloc(n uint64) (mem.Region, error) {
	a, err := m.d.Alloc(max(n, 1)) // the driver has nothing of 0 bytes
	return mem.Region{Addr: uintptr(a), Len: n, Dev: mem.GPU(m.d.Ordinal())}, err
}

func (m realMemory) Free(r mem.Region) error { return m.d.Free(uint64(r.Addr)) }

// host says whether s is memory of the CPU, as what is lent is.
func (m realMemory) host(s mem.Span) bool {
	k, err := m.d.Describe(uint64(s.Addr))
	return err != nil || !k.OnGPU
}

func (m realMemory) Load(dst []byte, s mem.Span) error {
	switch {
	case len(dst) == 0:
		return nil
	case m.host(s):
		copy(dst, s.Bytes())
		return nil
	}
	return m.d.Read(dst, uint64(s.Addr))
}

func (m realMemory) Store(s mem.Span, src []byte) error {
	switch {
	case len(src) == 0:
		return nil
	case m.host(s):
		copy(s.Bytes(), src)
		return nil
	}
	return m.d.Write(uint64(s.Addr), src)
}

func realBed(tb testing.TB, under below, share bool) transporttest.Bed {
	d := realGPU(tb)
	return transporttest.Bed{
		Memory: realMemory{d}, Offloads: true, Alone: share, Pause: 2 * answerLimit,
		Open: func(o transporttest.Options) (transport.Fabric, error) {
			in, err := under(o)
			if err != nil {
				return nil, err
			}
			return Wrap(in, Options{Device: d.Device, Share: share})
		},
	}
}

// TestGPUContractOwn: memory of one process, by its own addresses.
func TestGPUContractOwn(t *testing.T) {
	realGPU(t)
	transporttest.Run(t, func(tb testing.TB) transporttest.Bed { return realBed(tb, overCMA, true) })
}

// TestGPUContractTCP: staged.
func TestGPUContractTCP(t *testing.T) {
	realGPU(t)
	transporttest.Run(t, func(tb testing.TB) transporttest.Bed { return realBed(tb, overTCP, false) })
}

var _ gpu.Device = (*cuda.Device)(nil)
