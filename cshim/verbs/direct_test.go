package verbs

import (
	"encoding/binary"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"fserver/cshim/verbs/fakeverbs"
)

const gpuAt = 0x7f00_0000_0000 // where the GPU of these tests has its memory: nothing is mapped there

// buffer is a dma-buf of pieces of memory, as the fake takes it.
func buffer(t *testing.T, pieces ...[]byte) int {
	fd, err := unix.MemfdCreate("dma-buf", unix.MFD_CLOEXEC)
	require.NoError(t, err)
	t.Cleanup(func() { unix.Close(fd) })
	for _, p := range pieces {
		b := binary.LittleEndian.AppendUint64(nil, uint64(uintptr(unsafe.Pointer(&p[0]))))
		_, err = unix.Write(fd, binary.LittleEndian.AppendUint64(b, uint64(len(p))))
		require.NoError(t, err)
	}
	return fd
}

// TestDMABuf: memory that no CPU sees is written and read by its descriptor, across its pieces, and only there.
func TestDMABuf(t *testing.T) {
	onFake(t)
	a, b := pair(t)
	b.receive(1, 64)
	require.NoError(t, b.d.DMABuf())
	first, second := pages(t, 1), pages(t, 2)
	r, err := b.d.RegisterDMABuf(buffer(t, first, second), 100, 8192, gpuAt+100, LocalWrite|RemoteWrite|RelaxedOrdering)
	require.NoError(t, err)
	defer func() { require.NoError(t, r.Deregister()) }()
	fill(a.mem[:8192], 3)
	_, err = a.qp.PostSend([]Request{{ID: 1, Remote: gpuAt + 100, RKey: r.RKey, Op: Write, Flags: Signaled, From: a.piece(0, 8192)}})
	require.NoError(t, err)
	require.Equal(t, Success, a.take(1)[0].Status)
	require.Equal(t, a.mem[:3996], first[100:])
	require.Equal(t, a.mem[3996:8192], second[:4196])
	require.Zero(t, second[4196])

	_, err = b.qp.PostSend([]Request{{ID: 2, Remote: a.base + 65536, RKey: a.mr.RKey, Op: Write, Flags: Signaled, From: Piece{gpuAt + 1000, 6000, r.LKey}}})
	require.NoError(t, err)
	require.Equal(t, Success, b.take(1)[0].Status)
	require.Equal(t, a.mem[900:6900], a.mem[65536:65536+6000])

	_, err = b.d.RegisterDMABuf(buffer(t, first), 8, 100, gpuAt, LocalWrite)
	require.ErrorIs(t, err, unix.EINVAL, "another place in the page")
	_, err = b.d.RegisterDMABuf(buffer(t, first), 0, 4097, gpuAt, LocalWrite)
	require.ErrorIs(t, err, unix.EINVAL, "more than there is")
	_, err = b.d.RegisterDMABuf(-1, 0, 100, gpuAt, LocalWrite)
	require.ErrorContains(t, err, "verbs: register 100 bytes at offset 0 of a dma-buf on fake1: bad file descriptor")
	_, err = b.d.Register(gpuAt, 4096, LocalWrite)
	require.ErrorIs(t, err, unix.EFAULT, "no peer memory knows it")
	fakeverbs.Set("dmabuf", 0)
	require.ErrorContains(t, b.d.DMABuf(), "verbs: the driver of fake1 takes no dma-buf (want Linux 5.12 or later")
	_, err = b.d.RegisterDMABuf(buffer(t, first), 0, 100, gpuAt, LocalWrite)
	require.ErrorIs(t, err, unix.EOPNOTSUPP)
}

// TestRead: a queue pair that is joined to itself reads memory, behind the writes to it; one that peers write
// over cannot be read over.
func TestRead(t *testing.T) {
	onFake(t)
	a, b := pair(t)
	alias := pages(t, 1)
	r, err := b.d.RegisterDMABuf(buffer(t, alias), 0, 4096, gpuAt, LocalWrite|RemoteWrite|RemoteRead)
	require.NoError(t, err)
	defer func() { require.NoError(t, r.Deregister()) }()
	fakeverbs.Set("late", 1)
	fill(a.mem[:64], 5)
	_, err = a.qp.PostSend([]Request{{ID: 1, Remote: gpuAt, RKey: r.RKey, Op: Write, Flags: Signaled, From: a.piece(0, 64)}})
	require.NoError(t, err)
	require.Equal(t, Success, a.take(1)[0].Status)
	require.Zero(t, alias[1], "it is still on its way")

	loop, err := b.d.NewQP(b.cq, Room{Send: 4, Recv: 1, Port: 1, Readable: true})
	require.NoError(t, err)
	defer func() { require.NoError(t, loop.Destroy()) }()
	require.NoError(t, loop.Connect(Path{GID: b.gid.Raw, QP: loop.Number, GIDIndex: b.gid.Index, MTU: b.mtu, Global: true, Port: 1, Timeout: 12, Retries: 2}))
	_, err = loop.PostSend([]Request{{ID: 7, Remote: gpuAt, RKey: r.RKey, Op: Read, Flags: Signaled, From: b.piece(0, 8)}})
	require.NoError(t, err)
	got := clean(b.take(1)[0])
	got.Len = 0
	require.Equal(t, Completion{ID: 7, QP: loop.Number}, got)
	require.Equal(t, a.mem[:64], alias[:64])
	require.Equal(t, a.mem[:8], b.mem[:8])

	_, err = a.qp.PostSend([]Request{{ID: 2, Remote: gpuAt, RKey: r.RKey, Op: Read, Flags: Signaled, From: a.piece(0, 8)}})
	require.NoError(t, err)
	require.Equal(t, Status(10), a.take(1)[0].Status)
}

func pages(t *testing.T, n int) []byte {
	b, err := unix.Mmap(-1, 0, n*4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, unix.Munmap(b)) })
	return b
}
