package verbs

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"fserver/cshim/cuda"
	rdma "fserver/cshim/verbs"
	"fserver/cshim/verbs/fakeverbs"
	"fserver/engine/gpu/fakegpu"
	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
	"fserver/engine/transport/transporttest"
)

// withoutModule has this host look as if no module gave peer memory, and withModule as if one did.
func withoutModule(t testing.TB) string {
	folder, old, list := t.TempDir(), sysModule, procModules
	sysModule, procModules = folder, filepath.Join(folder, "modules")
	t.Cleanup(func() { sysModule, procModules = old, list })
	return folder
}

func withModule(t testing.TB) {
	require.NoError(t, os.Mkdir(filepath.Join(withoutModule(t), "nvidia_peermem"), 0o700))
}

// known is memory of a GPU that is registered with all Fabrics before it is sent.
type known struct {
	fakegpu.Memory
	fabrics []*Fabric
	peers   bool // peer memory is told of it
}

func (k *known) Alloc(n uint64) (mem.Region, error) {
	r, err := k.Memory.Alloc(n)
	if err == nil && k.peers {
		tell(k.G, r)
	}
	for _, f := range k.fabrics {
		_, _ = f.Register(r) // of one that is closed
	}
	return r, err
}

// Free implements transporttest.Memory.
func (k *known) Free(r mem.Region) error {
	if k.peers {
		fakeverbs.Unpeer(uint64(r.Addr), r.Len)
	}
	return k.Memory.Free(r)
}

// tell tells peer memory of memory of the GPU, in whole pages.
func tell(g *fakegpu.GPU, r mem.Region) {
	list, err := g.Seen(uint64(r.Addr), (r.Len+4095)&^4095)
	if err != nil {
		panic(err)
	}
	for _, p := range list {
		fakeverbs.Peer(p.Start, p.Alias, p.Len)
	}
}

// TestContractGPU: the whole suite with memory of a GPU, which sees what NICs write to it only after a read.
func TestContractGPU(t *testing.T) { contractGPU(t, false) }

// TestContractPeermem: likewise by peer memory, of a GPU that orders what NICs write.
func TestContractPeermem(t *testing.T) {
	if transporttest.Quick() {
		t.Skip("TestContractGPU stands for both: they differ in how memory is found")
	}
	contractGPU(t, true)
}

func contractGPU(t *testing.T, peers bool) {
	if onHardware() {
		t.Skip("verbs: the GPU is that of tests, which only the fake library reaches")
	}
	withModule(t)
	transporttest.Run(t, func(tb testing.TB) transporttest.Bed {
		lib, g, opened := library(tb), fakegpu.New(), 0
		if peers {
			g.NIC.DMABuf = false
		} else {
			g.NIC.Ordering = 0
			fakeverbs.Set("late", 1)
		}
		all := &known{Memory: fakegpu.Memory{G: g}, peers: peers}
		return transporttest.Bed{
			Memory: all,
			Open: func(o transporttest.Options) (transport.Fabric, error) {
				opts := Options{Options: link.Options{Gate: o.Gate, Limits: o.Limits}, Library: lib, Device: fakeverbs.Devices()[opened%2], GPU: g}
				if o.Listen {
					opts.Listen = "127.0.0.1:0"
				}
				f, err := Open(opts)
				if err != nil {
					return nil, err
				}
				require.Equal(tb, mem.GPU(0), f.Caps().GPU, f.direct.why)
				opened++
				all.fabrics = append(all.fabrics, f)
				return f, nil
			},
			Kill:     func(f transport.Fabric) { require.NoError(tb, kill(f.(*Fabric))) },
			Offloads: true,
			Alone:    true,
		}
	})
}

// gpuPair is two Fabrics with one GPU, and memory of it that both have registered.
type gpuPair struct {
	*two
	g    *fakegpu.GPU
	a, b *Conn
	read int // reads before the test
}

// reads is how many there were in this test.
func (w *gpuPair) reads() int { return fakeverbs.Count("reads") - w.read }

func newGPUPair(t *testing.T, set func(g *fakegpu.GPU)) *gpuPair {
	if onHardware() {
		t.Skip("verbs: the GPU is that of tests, which only the fake library reaches")
	}
	lib := library(t)
	w := &gpuPair{two: &two{t: t}, g: fakegpu.New(), read: fakeverbs.Count("reads")}
	if set != nil {
		set(w.g)
	}
	t.Cleanup(func() { w.g.Empty(t) })
	for i := range w.f {
		w.down[i] = map[transport.Conn]error{}
		w.f[i] = w.open(Options{Library: lib, Device: fakeverbs.Devices()[i], GPU: w.g})
		require.Equal(t, mem.GPU(0), w.f[i].Caps().GPU, w.f[i].direct.why)
	}
	w.a, w.b = w.pair()
	return w
}

// alloc gives memory of the GPU, and its key at Fabric i.
func (w *gpuPair) alloc(i int, n uint64) (mem.Region, transport.Key) {
	r, err := fakegpu.Memory{G: w.g}.Alloc(n)
	require.NoError(w.t, err)
	w.t.Cleanup(func() { _ = w.g.Free(uint64(r.Addr)) })
	k, err := w.f[i].Register(r)
	require.NoError(w.t, err)
	return r, k
}

func (w *gpuPair) load(r mem.Region) []byte {
	b := make([]byte, r.Len)
	require.NoError(w.t, fakegpu.Memory{G: w.g}.Load(b, r.Span()))
	return b
}

func (w *gpuPair) store(r mem.Region, b []byte) {
	require.NoError(w.t, fakegpu.Memory{G: w.g}.Store(r.Span(), b))
}

func (w *gpuPair) write(c *Conn, from mem.Region, key transport.Key) {
	w.until("a write is taken", func() bool {
		n, err := c.Post([]transport.Op{{Kind: transport.OpWrite, Key: key, Src: []mem.Span{from.Span()}, Dev: from.Dev}})
		require.NoError(w.t, err)
		return n == 1
	})
}

// send sends what from holds to memory with a key, and a frame, and waits for that.
func (w *gpuPair) send(from mem.Region, key transport.Key) {
	n := len(w.frames[1])
	w.write(w.a, from, key)
	w.frame(w.a, []byte("written"))
	w.until("the frame arrives", func() bool { return len(w.frames[1]) > n })
}

func pattern(n uint64, seed byte) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i)*7 + byte(i>>8) + seed
	}
	return b
}

// unordered is a GPU that does not order what NICs write, before a fake that writes late.
func unordered(g *fakegpu.GPU) {
	g.NIC.Ordering = 0
	fakeverbs.Set("late", 1)
}

// TestReadback: where the GPU does not order a NIC's writes, the frame behind them comes when the GPU has them. One
// read is enough for all frames that have come, and frames behind other writes need none.
func TestReadback(t *testing.T) {
	w := newGPUPair(t, unordered)
	from, _ := w.alloc(0, 1<<20)
	to, key := w.alloc(1, 1<<20)
	for seed := range byte(5) {
		w.store(from, pattern(from.Len, seed))
		w.send(from, key)
		require.True(t, bytes.Equal(w.load(from), w.load(to)), "the frame came before the data")
		require.Equal(t, int(seed)+1, w.reads())
	}
	host := w.memory(4096)
	hostKey, err := w.f[1].Register(host)
	require.NoError(t, err)
	part := from
	part.Len = 4096
	w.send(part, hostKey)
	require.Equal(t, w.load(part), host.Span().Bytes())
	w.echo(w.a)
	require.Equal(t, 5, w.reads(), "host memory needs none, and frames behind nothing neither")

	before, frames := w.reads(), len(w.frames[1])
	for range 8 {
		w.mustPost(part, key)
	}
	w.until("all frames come", func() bool { return len(w.frames[1]) == frames+8 })
	require.Equal(t, before+1, w.reads())
	require.EqualValues(t, w.reads(), w.f[1].Counts().Readbacks)
}

// mustPost posts a write and a frame without a Poll.
func (w *gpuPair) mustPost(from mem.Region, key transport.Key) {
	n, err := w.post(w.a,
		transport.Op{Kind: transport.OpWrite, Key: key, Src: []mem.Span{from.Span()}, Dev: from.Dev},
		transport.Op{Kind: transport.OpFrame, Frame: []byte("behind")},
	)
	require.NoError(w.t, err)
	require.Equal(w.t, 2, n)
}

// TestReadbackHeld: as long as the read has not completed, the frame is held, and all behind it on its Conn; another Conn
// goes on. The Fabric has nothing to do meanwhile, and who sleeps is woken by the read.
func TestReadbackHeld(t *testing.T) {
	w := newGPUPair(t, unordered)
	other, _ := w.two.pair()
	from, _ := w.alloc(0, 8192)
	to, key := w.alloc(1, 8192)
	w.store(from, pattern(from.Len, 1))
	fakeverbs.Set("hold", 2)
	w.mustPost(from, key)
	w.frame(w.a, []byte("next"))
	w.frame(other, []byte("other"))
	w.until("the other Conn's frame comes", func() bool { return len(w.frames[1]) > 0 })
	for range 100 {
		w.poll()
	}
	require.Equal(t, [][]byte{[]byte("other")}, w.frames[1])
	require.NotEqual(t, w.load(from), w.load(to), "the fake wrote early: the test shows nothing")
	require.False(t, w.f[1].Arm())
	require.False(t, readable(t, w.f[1].FD()))
	fakeverbs.Set("hold", 0)
	require.True(t, readable(t, w.f[1].FD()))
	w.until("the frames come", func() bool { return len(w.frames[1]) == 3 })
	require.Equal(t, "behind next", string(bytes.Join(w.frames[1][1:], []byte(" "))))
	require.Equal(t, w.load(from), w.load(to))
}

func readable(t *testing.T, fd int) bool {
	p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	n, err := unix.Poll(p, 0)
	require.NoError(t, err)
	return n > 0
}

// TestNoReadback: a GPU that orders what NICs write needs no read, and no queue pair for it.
func TestNoReadback(t *testing.T) {
	w := newGPUPair(t, nil)
	require.Nil(t, w.f[1].back)
	from, _ := w.alloc(0, 1<<20)
	to, key := w.alloc(1, 1<<20)
	w.store(from, pattern(from.Len, 1))
	w.send(from, key)
	require.Equal(t, w.load(from), w.load(to))
	require.Zero(t, w.reads())
}

// TestReadbackFails: a GPU that does not answer ends the Conns whose frames wait for it, with words, and others when
// a marked frame comes. Frames behind host memory are given. The next Conn has the reads made anew.
func TestReadbackFails(t *testing.T) {
	w := newGPUPair(t, unordered)
	from, _ := w.alloc(0, 4096)
	to, key := w.alloc(1, 4096)
	w.store(from, pattern(from.Len, 1))
	other, far := w.two.pair()
	fakeverbs.Status(fakeverbs.Read, 0, 11)
	w.mustPost(from, key)
	w.frame(w.a, []byte("behind what is dropped"))
	w.until("the Conn goes down", func() bool { return w.down[1][w.b] != nil && w.down[0][w.a] != nil })
	const words = "read back what was written to gpu 0 by GPUDirect: the peer could not complete the request (check the GPU with nvidia-smi; FSERVER_RDMA_GPUDIRECT=0 does without GPUDirect)"
	require.ErrorContains(t, w.down[1][w.b], words)
	require.Empty(t, w.frames[1])
	w.echo(other)
	w.a, w.b = other, far
	frames := len(w.frames[1])
	w.mustPost(from, key)
	w.frame(w.a, []byte("behind what is dropped"))
	w.until("the other Conn goes down", func() bool { return w.down[1][far] != nil && w.down[0][other] != nil })
	require.ErrorContains(t, w.down[1][far], words)
	require.Len(t, w.frames[1], frames)

	pairs := fakeverbs.Count("pairs")
	w.a, w.b = w.pair()
	w.until("the queue pairs of the Conns that have ended are destroyed", func() bool { return fakeverbs.Count("pairs") <= pairs+2 })
	w.send(from, key)
	require.Equal(t, w.load(from), w.load(to))
}

// TestParts: regions that exceed what the device registers at a time are registered in parts, and writes
// are cut where those of either end meet: host memory, and a GPU's by both ways.
func TestParts(t *testing.T) {
	withModule(t)
	for _, pieces := range []bool{false, true} {
		w := newGPUPair(t, func(g *fakegpu.GPU) {
			g.Pieces = pieces
			fakeverbs.Set("mr_size", 600<<10) // not below what a Conn takes
		})
		n := uint64(2<<20 + 8192)
		from, _ := w.alloc(0, n)
		to, key := w.alloc(1, n)
		require.Len(t, key.Blob, blobParts+4*3)
		w.store(from, pattern(n, 3))
		for _, cut := range []uint64{0, 1, 599<<10 + 5, 600 << 10} {
			part, at := from, key
			part.Addr, part.Len = part.Addr+uintptr(cut), part.Len-cut-1
			w.send(part, at)
			got := w.load(to)
			require.True(t, bytes.Equal(got[:part.Len], w.load(part)), "from %d on", cut)
		}
		host := w.memory(n)
		hostKey, err := w.f[1].Register(host)
		require.NoError(t, err)
		w.send(from, hostKey)
		require.True(t, bytes.Equal(w.load(from), host.Span().Bytes()))
		before := fakeverbs.Count("regions")
		w.f[1].Deregister(hostKey)
		w.until("all parts are let go of", func() bool { return fakeverbs.Count("regions") == before-4 })
	}
}

func TestTooManyParts(t *testing.T) {
	w := newGPUPair(t, func(*fakegpu.GPU) { fakeverbs.Set("mr_size", 1<<20) })
	_, err := w.f[0].Register(mem.Region{Addr: w.memory(4096).Addr, Len: 129 << 20})
	require.ErrorContains(t, err, "verbs: register 135266304 bytes: fake0 registers at most 1048576 bytes at a time, so that takes 129 parts, and there are at most 128")
}

// TestDescriptors: none stays open when memory has been registered, nor after an error.
func TestDescriptors(t *testing.T) {
	w := newGPUPair(t, nil)
	r, _ := w.alloc(0, 100)
	before := descriptors(t)
	k, err := w.f[0].Register(r)
	require.NoError(t, err)
	fakeverbs.Fail("ibv_reg_dmabuf_mr", unix.EINVAL, 0, 1)
	_, err = w.f[0].Register(r)
	require.Error(t, err)
	w.f[0].Deregister(k)
	require.Equal(t, before, descriptors(t))
}

func descriptors(t *testing.T) int {
	list, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(list)
}

// TestWays: dma-buf first, then peer memory where its module is loaded, and by neither in words.
func TestWays(t *testing.T) {
	withoutModule(t)
	w := newGPUPair(t, nil)
	before, relaxed := fakeverbs.Count("dmabufs"), fakeverbs.Count("relaxed")
	r, _ := w.alloc(0, 4096)
	require.Equal(t, before+1, fakeverbs.Count("dmabufs"))
	require.Equal(t, relaxed+1, fakeverbs.Count("relaxed"))
	fakeverbs.Fail("ibv_reg_dmabuf_mr", unix.EINVAL, 0, 1)
	var why *DirectError
	_, err := w.f[0].Register(r)
	require.ErrorAs(t, err, &why)
	require.ErrorIs(t, why.DMABuf, unix.EINVAL)
	require.ErrorContains(t, err, "of gpu 0 for GPUDirect: by dma-buf: register 4096 bytes at offset 0 of a dma-buf on fake0: invalid argument; by nvidia-peermem: the kernel module nvidia-peermem is not loaded")
	_, err = w.f[0].Register(mem.Region{Addr: r.Addr, Len: 4096, Dev: mem.GPU(1)})
	require.ErrorContains(t, err, "on gpu 1: want host memory")

	withModule(t)
	w = newGPUPair(t, nil)
	r, err = fakegpu.Memory{G: w.g}.Alloc(4096)
	require.NoError(t, err)
	t.Cleanup(func() { _ = w.g.Free(uint64(r.Addr)) })
	fakeverbs.Fail("ibv_reg_dmabuf_mr", unix.EINVAL, 0, 1)
	_, err = w.f[0].Register(r)
	require.ErrorContains(t, err, "by nvidia-peermem: register 4096 bytes")
	tell(w.g, r)
	fakeverbs.Fail("ibv_reg_dmabuf_mr", unix.EINVAL, 0, 1)
	_, err = w.f[0].Register(r)
	require.NoError(t, err)
	fakeverbs.Unpeer(uint64(r.Addr), 4096)
}

// TestNoWay: a Fabric that can take no memory of the GPU opens all the same, and its Conns say why and what helps.
func TestNoWay(t *testing.T) {
	folder := withoutModule(t)
	fails := func(g *fakegpu.GPU) { g.Fail("Direct", 1) }
	for _, c := range []struct {
		allowed Ways
		set     func(g *fakegpu.GPU)
		why     string
	}{
		{AnyWay, func(*fakegpu.GPU) { fakeverbs.Set("dmabuf", 0) }, "by dma-buf: the driver of fake0 takes no dma-buf (want Linux 5.12 or later, and a NIC whose driver has it, such as mlx5); by nvidia-peermem: the kernel module nvidia-peermem is not loaded (run modprobe nvidia-peermem, or install"},
		{AnyWay, func(g *fakegpu.GPU) { g.NIC.DMABuf = false }, "by dma-buf: the GPU's driver gives no dma-buf; by nvidia-peermem: the kernel"},
		{AnyWay, func(g *fakegpu.GPU) { g.NIC.GPUDirect = false }, "by dma-buf: this GPU has no GPUDirect RDMA; by nvidia-peermem: this GPU has no GPUDirect RDMA"},
		{NoWay, nil, "by dma-buf: FSERVER_RDMA_GPUDIRECT excludes it; by nvidia-peermem: FSERVER_RDMA_GPUDIRECT excludes it"},
		{ByPeermem, nil, "by nvidia-peermem: the kernel module nvidia-peermem is not loaded"},
		{AnyWay, fails, "injected failure (check the GPU with nvidia-smi)"},
		{AnyWay, func(g *fakegpu.GPU) { g.NIC.Ordering = 0; g.Fail("Alloc", 1) }, "set up reads of its memory: Alloc: "},
		{AnyWay, func(g *fakegpu.GPU) { g.NIC.Ordering = 0; fakeverbs.Fail("RTR", unix.EINVAL, 0, 1) }, "set up reads of its memory: join queue pair"},
	} {
		w, g, lib := newTwo(t), fakegpu.New(), library(t)
		if c.set != nil {
			c.set(g)
		}
		before := fakeverbs.Count("regions")
		f := w.open(Options{Library: lib, Device: "fake0", GPU: g, GPUDirect: c.allowed})
		w.f[0] = f
		require.Equal(t, mem.CPU, f.Caps().GPU)
		require.Equal(t, before, fakeverbs.Count("regions"), c.why)
		a, _ := w.pair()
		require.Contains(t, a.Peer().Why, "no GPUDirect between the NIC and gpu 0, so its tensors go through host memory: ")
		require.Contains(t, a.Peer().Why, c.why)
		_, err := f.Register(mem.Region{Addr: 4096, Len: 4096, Dev: mem.GPU(0)})
		require.ErrorContains(t, err, "want host memory")
		_, err = w.post(a, transport.Op{Kind: transport.OpWrite, Src: []mem.Span{{Addr: 4096, Len: 1}}, Dev: mem.GPU(0)})
		require.ErrorContains(t, err, "this NIC takes no such memory by itself")
		w.echo(a)
		g.Empty(t)
		fakeverbs.Reset()
	}
	require.NoError(t, os.WriteFile(filepath.Join(folder, "modules"), []byte("x 1 2\nnv_peer_mem 16384 0 - Live 0x0\n"), 0o600))
	require.NoError(t, peermem())
}

// TestGPUErrors: memory that is gone, a process without a context, and a GPU that has fallen off end in errors of a type,
// at once; the Fabric goes on.
func TestGPUErrors(t *testing.T) {
	withoutModule(t)
	w := newGPUPair(t, nil)
	var why *DirectError
	fails := func(r mem.Region, part string) {
		t.Helper()
		_, err := w.f[0].Register(r)
		require.ErrorAs(t, err, &why)
		require.False(t, errors.As(err, new(*transport.DeviceError)))
		require.ErrorContains(t, err, part)
	}
	r, _ := w.alloc(0, 8192)
	long := r
	long.Len += 4096
	fails(long, "the allocation ends after 8192 bytes")
	w.g.Fail("Describe", 1) // as the driver says of a context or a GPU that is gone
	fails(r, "Describe: cuda: injected failure")
	w.g.Fail("ExportDMABuf", 1)
	fails(r, "ExportDMABuf: cuda: injected failure")
	require.NoError(t, w.g.Free(uint64(r.Addr)))
	fails(r, "injected failure")
	w.echo(w.a)

	r, _ = w.alloc(0, 8192)
	fakeverbs.Vanish(0)
	_, err := w.f[0].Register(r)
	require.ErrorAs(t, err, new(*transport.DeviceError), "the NIC is gone")
	fakeverbs.Reset()
}

// TestFreedWhileRegistered: memory that is freed stays as long as its dma-buf does; with peer memory its registration is
// void, so that a write from it or to it ends its Conn. Either can be deregistered.
func TestFreedWhileRegistered(t *testing.T) {
	withModule(t)
	for _, peers := range []bool{false, true} {
		for _, at := range []int{0, 1} {
			w := newGPUPair(t, func(g *fakegpu.GPU) { g.NIC.DMABuf = !peers })
			var r [2]mem.Region
			var k [2]transport.Key
			for i := range r {
				var err error
				r[i], err = fakegpu.Memory{G: w.g}.Alloc(8192)
				require.NoError(t, err)
				if peers {
					tell(w.g, r[i])
				}
				k[i], err = w.f[i].Register(r[i])
				require.NoError(t, err)
			}
			require.NoError(t, w.g.Free(uint64(r[at].Addr)))
			if peers {
				fakeverbs.Unpeer(uint64(r[at].Addr), 8192)
				w.write(w.a, r[0], k[1])
				w.until("both ends go down", func() bool { return w.down[0][w.a] != nil && w.down[1][w.b] != nil })
			} else {
				w.send(r[0], k[1])
			}
			w.f[at].Deregister(k[at])
			w.a, w.b = w.pair()
			w.echo(w.a)
			require.NoError(t, w.g.Free(uint64(r[1-at].Addr)))
			if peers {
				fakeverbs.Unpeer(uint64(r[1-at].Addr), 8192)
			}
		}
	}
}

// TestSourceGone: a source on the GPU is never copied by the CPU. Without a key it is refused, and one whose key
// goes while it is sent ends its Conn.
func TestSourceGone(t *testing.T) {
	w := newGPUPair(t, nil)
	stays, _ := w.alloc(0, 4096)
	from, k := w.alloc(0, 4096)
	_, key := w.alloc(1, 2<<20)
	spans := slices.Repeat([]mem.Span{stays.Span()}, wrDepth+1)
	spans = append(spans, from.Span())
	fakeverbs.Set("hold", 1)
	n, err := w.post(w.a, transport.Op{Kind: transport.OpWrite, Key: key, Src: spans, Dev: from.Dev})
	require.NoError(t, err)
	require.Equal(t, 1, n)
	require.True(t, w.a.tx.cur.active)
	w.f[0].Deregister(k)
	fakeverbs.Set("hold", 0)
	w.until("the Conn goes down", func() bool { return w.down[0][w.a] != nil })
	why := w.down[0][w.a]
	w.a, w.b = w.pair()
	require.ErrorContains(t, why, "which are not registered, or no longer")
	_, err = w.post(w.a, transport.Op{Kind: transport.OpWrite, Key: key, Src: []mem.Span{from.Span()}, Dev: from.Dev})
	require.ErrorContains(t, err, "which are not registered, or no longer")
	w.echo(w.a)
}

// TestNeedsReadback: the order that the GPU keeps, and, on chips joined by C2C, where the NIC is on PCI.
func TestNeedsReadback(t *testing.T) {
	old := sysRoot
	sysRoot = t.TempDir()
	t.Cleanup(func() { sysRoot = old })
	at := func(link, to string) {
		require.NoError(t, os.MkdirAll(filepath.Join(sysRoot, to), 0o700))
		require.NoError(t, os.MkdirAll(filepath.Dir(filepath.Join(sysRoot, link)), 0o700))
		require.NoError(t, os.Symlink(filepath.Join(sysRoot, to), filepath.Join(sysRoot, link)))
	}
	at("bus/pci/devices/0009:01:00.0", "devices/pci0009:00/0009:00:00.0/0009:01:00.0")
	at("class/infiniband/near/device", "devices/pci0009:00/0009:00:00.0/0009:02:00.0")
	at("class/infiniband/port/device", "devices/pci0009:00/0009:00:01.0/0009:03:00.0")
	at("class/infiniband/far/device", "devices/pci0000:00/0000:00:00.0/0000:01:00.0")
	for _, c := range []struct {
		d    cuda.Direct
		nic  string
		want bool
	}{
		{cuda.Direct{Ordering: 0}, "far", true},
		{cuda.Direct{Ordering: 99}, "far", true},
		{cuda.Direct{Ordering: 100}, "near", false},
		{cuda.Direct{Ordering: 200}, "near", false},
		{cuda.Direct{Ordering: 100, C2C: true, Domain: 9, Bus: 1}, "near", true},
		{cuda.Direct{Ordering: 100, C2C: true, Domain: 9, Bus: 1}, "far", false},
		{cuda.Direct{Ordering: 100, C2C: true, Domain: 9, Bus: 1}, "port", false},
		{cuda.Direct{Ordering: 100, C2C: true, Domain: 9, Bus: 1}, "unknown", true},
		{cuda.Direct{Ordering: 100, C2C: true, Domain: 8, Bus: 1}, "far", true},
		{cuda.Direct{Ordering: 0, C2C: true, Domain: 9, Bus: 1}, "far", true},
	} {
		require.Equal(t, c.want, needsReadback(c.d, c.nic), "%+v and %s", c.d, c.nic)
	}
}

// TestProbeGPU: the doctor says of each device how it reaches each GPU, or why not and what helps.
func TestProbeGPU(t *testing.T) {
	folder, old := withoutModule(t), gpus
	t.Cleanup(func() { gpus = old })
	if err := withLibrary(t); err != nil {
		t.Skip(err)
	}
	find := func(what string) (f transport.Finding, found bool) {
		for _, f := range probe(nil) {
			if f.What == what {
				return f, true
			}
		}
		return f, false
	}
	whole := cuda.Direct{GPUDirect: true, DMABuf: true, Ordering: cuda.OwnerOrdering}
	closed := whole
	closed.DMABuf, closed.Ordering = false, 0
	gpus = func() []cuda.Direct { return nil }
	_, found := find("fake0 GPUDirect")
	require.False(t, found)
	gpus = func() []cuda.Direct { return []cuda.Direct{whole, closed, {}} }
	f, _ := find("fake0 GPUDirect")
	require.Equal(t, transport.Finding{
		What: "fake0 GPUDirect", State: transport.Note, Remedy: directRemedy,
		Text: "gpu 0: by dma-buf; gpu 1: through host memory (by dma-buf: the GPU's driver gives no dma-buf; by nvidia-peermem: the kernel module nvidia-peermem is not loaded); " +
			"gpu 2: through host memory (by dma-buf: this GPU has no GPUDirect RDMA; by nvidia-peermem: this GPU has no GPUDirect RDMA)",
	}, f)
	fakeverbs.Set("dmabuf", 0)
	require.NoError(t, os.Mkdir(filepath.Join(folder, "nvidia_peermem"), 0o700))
	gpus = func() []cuda.Direct { return []cuda.Direct{whole, whole, whole, closed} }
	f, _ = find("fake1 GPUDirect")
	require.Equal(t, transport.Finding{What: "fake1 GPUDirect", State: transport.Yes, Text: "gpu 0 to 2: by nvidia-peermem; gpu 3: by nvidia-peermem, with a read behind writes"}, f)
}

// withLibrary opens the fake, as the first library of the process.
func withLibrary(t *testing.T) error {
	if onHardware() {
		return errors.New("verbs: only the fake library can imitate this")
	}
	return rdma.Open(library(t))
}
