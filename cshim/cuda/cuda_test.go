package cuda

import (
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
)

// device is GPU 0, or the test is skipped.
func device(t *testing.T) *Device {
	t.Helper()
	if err := Open(); err != nil {
		t.Skip(err)
	}
	n, err := Count()
	require.NoError(t, err)
	if n == 0 {
		t.Skip("cuda: no GPU is visible")
	}
	d, err := Retain(0)
	require.NoError(t, err)
	t.Cleanup(d.Release)
	return d
}

// TestOpen: without a driver the reason names the library, every time.
func TestOpen(t *testing.T) {
	err := Open()
	require.Equal(t, err, Open())
	if err != nil {
		require.ErrorContains(t, err, "cuda: ")
		require.ErrorContains(t, err, "libcuda.so.1")
	}
}

func TestErrorText(t *testing.T) {
	require.NoError(t, failed(0, "x"))
	err := failed(2, "allocate %d bytes", 7)
	require.ErrorContains(t, err, "cuda: allocate 7 bytes: ")
	require.Equal(t, OutOfMemory, err.(*Error).Code)
}

func TestCopyLayout(t *testing.T) { require.Equal(t, uintptr(24), unsafe.Sizeof(Copy{})) }

// TestCopies goes through every call that a GPU answers: memory of the host and of
// the device, streams, events, flags.
func TestCopies(t *testing.T) {
	d := device(t)
	require.NotZero(t, d.UUID())
	t.Log(d.Name(), d.UUID())
	a, err := d.Alloc(1 << 20)
	require.NoError(t, err)
	b, err := d.Alloc(1 << 20)
	require.NoError(t, err)
	m, err := d.Describe(a + 12345)
	require.NoError(t, err)
	require.True(t, m.OnGPU && m.LegacyIPC)
	require.Equal(t, a, m.Base)
	require.Equal(t, m.ID, d.BufferID(a))
	host := make([]byte, 1<<20)
	for i := range host {
		host[i] = byte(i * 7)
	}
	require.NoError(t, d.Write(a, host))
	s, err := d.NewStream()
	require.NoError(t, err)
	e, err := d.NewEvent()
	require.NoError(t, err)
	require.NoError(t, d.Record(e, 0))
	require.NoError(t, d.Enqueue(s, e, []Copy{{b, a, 1 << 19}, {b + 1<<19, a + 1<<19, 1 << 19}}, 0, 0))
	require.NoError(t, d.Synchronize(s))
	idle, err := d.Idle(s)
	require.NoError(t, err)
	require.True(t, idle)
	passed, err := d.Passed(e)
	require.NoError(t, err)
	require.True(t, passed)
	capturing, err := d.Capturing(s)
	require.NoError(t, err)
	require.False(t, capturing)
	got := make([]byte, len(host))
	require.NoError(t, d.Read(got, b))
	require.Equal(t, host, got)
	_, err = d.ExportIPC(a)
	require.NoError(t, err)
	require.NoError(t, d.FreeEvent(e))
	require.NoError(t, d.FreeStream(s))
	require.NoError(t, d.Free(a))
	require.NoError(t, d.Free(b))
	_, err = d.Alloc(1 << 50)
	require.ErrorContains(t, err, "out of memory")
}
