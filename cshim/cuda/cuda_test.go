package cuda

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"
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
	return d
}

// pinned is n bytes of host memory and their address for d, until the test ends.
func pinned(t *testing.T, d *Device, n int) ([]byte, uint64) {
	t.Helper()
	b, err := syscall.Mmap(-1, 0, n, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON)
	require.NoError(t, err)
	address := uint64(uintptr(unsafe.Pointer(&b[0])))
	seen, err := d.Pin(address, uint64(n))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, errors.Join(d.Unpin(address), syscall.Munmap(b))) })
	return b, seen
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

// TestMemoryLayout: Memory is laid out as cs_memory of cs_calls.h, which C fills.
func TestMemoryLayout(t *testing.T) {
	var m Memory
	require.Equal(t, [...]uintptr{0, 8, 16, 24, 25, 26, 32}, [...]uintptr{
		unsafe.Offsetof(m.Base), unsafe.Offsetof(m.Len), unsafe.Offsetof(m.ID),
		unsafe.Offsetof(m.OnGPU), unsafe.Offsetof(m.LegacyIPC), unsafe.Offsetof(m.Descriptor), unsafe.Sizeof(m),
	})
}

// TestDirectLayout: Direct is laid out as cs_direct.
func TestDirectLayout(t *testing.T) {
	var d Direct
	require.Equal(t, [...]uintptr{0, 4, 8, 12, 16, 17, 18, 20}, [...]uintptr{
		unsafe.Offsetof(d.Domain), unsafe.Offsetof(d.Bus), unsafe.Offsetof(d.Slot), unsafe.Offsetof(d.Ordering),
		unsafe.Offsetof(d.GPUDirect), unsafe.Offsetof(d.DMABuf), unsafe.Offsetof(d.C2C), unsafe.Sizeof(d),
	})
}

// inChild runs the test in a child over testdata/driver.c, and reports whether this is the child.
func inChild(t *testing.T) bool {
	if os.Getenv("FAKE_SEES") != "" {
		return true
	}
	folder := t.TempDir()
	out, err := exec.Command(cmp.Or(os.Getenv("CC"), "cc"), "-shared", "-fPIC", "-o", filepath.Join(folder, "libcuda.so.1"), "testdata/driver.c").CombinedOutput()
	require.NoError(t, err, string(out))
	child := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
	child.Env = append(os.Environ(), "LD_LIBRARY_PATH="+folder, "FAKE_SEES=0")
	out, err = child.CombinedOutput()
	require.NoError(t, err, string(out))
	require.Contains(t, string(out), "--- PASS: "+t.Name())
	return false
}

// TestDirect: the attributes are asked of the GPU with the number, by the numbers of CUDA, without a context; a
// descriptor is made in the GPU's context, which the thread loses again.
func TestDirect(t *testing.T) {
	if !inChild(t) {
		return
	}
	require.NoError(t, Open())
	t.Setenv("FAKE_SEES", "31")
	for i, number := range []int32{3, 1} {
		d, err := DirectOf(i)
		require.NoError(t, err)
		require.Equal(t, Direct{Domain: number*1000 + 50, Bus: number*1000 + 33, Slot: number*1000 + 34, Ordering: number*1000 + 118, GPUDirect: true, DMABuf: true, C2C: true}, d)
	}
	_, err := DirectOf(2)
	require.ErrorContains(t, err, "cuda: ask what gpu 2 can do: ")
	d, err := Retain(1)
	require.NoError(t, err)
	fd, err := d.ExportDMABuf(0x7000, 0x2000)
	require.NoError(t, err)
	require.Equal(t, 101, fd, "the context is that of GPU 1 of the host")
	_, err = Count()
	require.NoError(t, err, "no call leaves its context to the thread")
	_, err = d.ExportDMABuf(0x7008, 0x2000)
	require.ErrorContains(t, err, "cuda: export 8192 bytes at 0x7008 of gpu 1 as a dma-buf: ")
}

// TestReach: the memory that is used is that of the GPU which has the number in this process,
// whatever number it has in the host. It runs in a child, over a driver of its own.
func TestReach(t *testing.T) {
	if !inChild(t) {
		return
	}
	require.NoError(t, Open())
	for _, sees := range []string{"012", "210", "120", "21", "20", "0"} {
		t.Setenv("FAKE_SEES", sees)
		for own := range sees {
			d, err := Retain(own)
			require.NoError(t, err)
			require.Equal(t, own, d.Ordinal())
			for peer, number := range sees + "x" {
				t.Setenv("FAKE_PEER", string(number))
				err := d.Reach(peer)
				_, left := Count()
				require.NoError(t, left, "no call leaves its context to the thread")
				if peer < len(sees) {
					require.NoError(t, err, "from %d to %d of %s", own, peer, sees)
				} else {
					require.ErrorContains(t, err, fmt.Sprintf("cuda: retain the primary context of gpu %d: ", peer))
				}
			}
		}
	}
}

// TestCopies goes through every call that a GPU answers: memory of the host and of
// the device, streams, events, flags.
func TestCopies(t *testing.T) {
	d := device(t)
	a, err := d.Alloc(1 << 20)
	require.NoError(t, err)
	b, err := d.Alloc(1 << 20)
	require.NoError(t, err)
	m, err := d.Describe(a + 12345)
	require.NoError(t, err)
	require.True(t, m.OnGPU && m.LegacyIPC)
	require.Equal(t, a, m.Base)
	require.NotZero(t, m.ID)
	host, hostSeen := pinned(t, d, 1<<20)
	got, gotSeen := pinned(t, d, 1<<20)
	for i := range host {
		host[i] = byte(i * 7)
	}
	s, err := d.NewStream()
	require.NoError(t, err)
	e, err := d.NewEvent()
	require.NoError(t, err)
	require.NoError(t, d.Record(e, 0))
	copies := []Copy{{a, hostSeen, 1 << 20}, {b, a, 1 << 19}, {b + 1<<19, a + 1<<19, 1 << 19}, {gotSeen, b, 1 << 20}}
	require.NoError(t, d.Enqueue(s, e, copies, 0, 0))
	require.Eventually(t, func() bool {
		idle, err := d.Idle(s)
		require.NoError(t, err)
		return idle
	}, 10*time.Second, time.Millisecond)
	passed, err := d.Passed(e)
	require.NoError(t, err)
	require.True(t, passed)
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
