// Package fakegpu is a GPU for tests: memory that the CPU must not touch, and streams
// that copy late and in order. It can be told to fail.
package fakegpu

import (
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"fserver/cshim/cuda"
	"fserver/engine/mem"
)

// A GPU is a gpu.Device. All processes that a test plays share it.
type GPU struct {
	Delay  time.Duration // of each copy
	Pieces bool          // memory is in pieces, each with a descriptor
	Alone  bool          // memory cannot be shared
	// NIC is what NICs have to know of it.
	NIC cuda.Direct
	// Instant has copies made by whoever enqueues them, without an allocation.
	Instant bool
	// Depth is how many entries the queue of the driver takes, one queue for all streams: one for each copy and each number.
	// The next Enqueue waits until streams move. 0: any number.
	Depth int64

	mu      sync.Mutex
	allocs  []*alloc
	pins    map[uint64]uint64
	next    uint64
	streams map[cuda.Stream]*stream
	left    atomic.Int64 // entries of the queue that have not ended
	events  map[cuda.Event]chan struct{}
	imports int
	fail    map[string]int
	calls   int // that can fail
	failAt  int
	failed  string

	blocks    sync.Map // *block by the call
	kernel    atomic.Pointer[chan struct{}]
	reclaimed atomic.Int32 // calls that wait for it
}

// alloc is memory at an address where nothing can be read, with a second mapping
// where the copies are made.
type alloc struct {
	base, n, id uint64
	whole       uint64 // bytes of the allocation, at its first piece
	fd          int
	alias       []byte
	lent        bool // a NIC may have it, for as long as it likes
}

// pinAt is where pinned memory is for the GPU, from where it is for the host.
const pinAt = 1 << 56

var errFake = errors.New("cuda: injected failure")

// New makes one.
func New() *GPU {
	return &GPU{pins: map[uint64]uint64{}, next: 1, streams: map[cuda.Stream]*stream{}, events: map[cuda.Event]chan struct{}{}, fail: map[string]int{},
		NIC: cuda.Direct{GPUDirect: true, DMABuf: true, Ordering: cuda.OwnerOrdering}}
}

// Mapped is an ImportIPC of what lies where something else of that process is mapped from.
const Mapped = "ImportIPC, of an address that is taken"

// Fail has the next n calls of a method fail; Alloc and Pin for want of memory.
func (g *GPU) Fail(call string, n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.fail[call] = n
}

// FailAt has the n-th call from now on fail, of all that can: those that give something
// back do not, and Idle would mean that nothing runs any more.
func (g *GPU) FailAt(n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.failAt, g.failed = g.calls+n, ""
}

// Failed is the method whose call FailAt has made fail, or empty.
func (g *GPU) Failed() string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.failed
}

// Imports is how many mappings of memory of other processes there are.
func (g *GPU) Imports() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.imports
}

// Kernel has a kernel wait until end is called. As with a driver, who gives memory back
// waits for it, and all who then want something of the GPU wait for that; a test that ends
// ends it.
func (g *GPU) Kernel(t testing.TB) (end func()) {
	over := make(chan struct{})
	g.kernel.Store(&over)
	end = sync.OnceFunc(func() {
		g.kernel.Store(nil)
		close(over)
	})
	t.Cleanup(end)
	return end
}

// Reclaims is how many calls that give memory back wait for a kernel.
func (g *GPU) Reclaims() int { return int(g.reclaimed.Load()) }

// reclaim waits as those do that give memory back.
func (g *GPU) reclaim() {
	if k := g.kernel.Load(); k != nil {
		g.reclaimed.Add(1)
		<-*k
		g.reclaimed.Add(-1)
	}
}

type block struct {
	in, over chan struct{}
}

// Block has the next call of a method wait in the driver until end is called; in is closed
// when it does. A test that ends ends it.
func (g *GPU) Block(t testing.TB, call string) (in <-chan struct{}, end func()) {
	b := &block{in: make(chan struct{}), over: make(chan struct{})}
	g.blocks.Store(call, b)
	end = sync.OnceFunc(func() { close(b.over) })
	t.Cleanup(end)
	return b.in, end
}

// enter waits as all others do.
func (g *GPU) enter(call string) {
	if b, ok := g.blocks.LoadAndDelete(call); ok {
		close(b.(*block).in)
		<-b.(*block).over
	}
	if k := g.kernel.Load(); k != nil && g.reclaimed.Load() > 0 {
		<-*k
	}
}

// Put enqueues work of the test's own on a stream, to hold it up.
func (g *GPU) Put(s cuda.Stream, do func()) { g.stream(s).put(do) }

func (g *GPU) fails(call string) error {
	if call != "Idle" {
		g.calls++
	}
	switch {
	case call != "Idle" && g.calls == g.failAt:
		g.failed = call
	case g.fail[call] > 0:
		g.fail[call]--
	default:
		return nil
	}
	switch call {
	case "Alloc", "Pin":
		return &cuda.Error{Code: cuda.OutOfMemory, Text: call + ": " + errFake.Error() + ": out of memory"}
	case Mapped:
		return &cuda.Error{Code: cuda.AlreadyMapped, Text: call + ": " + errFake.Error()}
	}
	return fmt.Errorf("%s: %w", call, errFake)
}

func (g *GPU) number() uint64 {
	g.next++
	return g.next
}

func (g *GPU) Ordinal() int { return 0 }

func (g *GPU) Reach(ordinal int) error {
	g.enter("Reach")
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.fails("Reach"); err != nil {
		return err
	}
	if ordinal != g.Ordinal() {
		return errFake
	}
	return nil
}

func pagesOf(n uint64) uint64 { return (max(n, 1) + 4095) &^ 4095 }

// untouchable gives n bytes of addresses where nothing can be read, at one of them
// if it is not 0.
func untouchable(n, at uint64) uint64 {
	flags := unix.MAP_PRIVATE | unix.MAP_ANONYMOUS
	if at != 0 {
		flags |= unix.MAP_FIXED
	}
	p, _, e := unix.Syscall6(unix.SYS_MMAP, uintptr(at), uintptr(n), unix.PROT_NONE, uintptr(flags), ^uintptr(0), 0)
	if e != 0 {
		panic(e)
	}
	return uint64(p)
}

// show maps fd twice.
func (g *GPU) show(fd int, n, at uint64) *alloc {
	alias, err := unix.Mmap(fd, 0, int(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		panic(err)
	}
	a := &alloc{base: untouchable(n, at), n: n, whole: n, id: g.number(), fd: fd, alias: alias}
	g.allocs = append(g.allocs, a)
	return a
}

func (g *GPU) hide(a *alloc) {
	for i, b := range g.allocs {
		if a == b {
			g.allocs = append(g.allocs[:i], g.allocs[i+1:]...)
			break
		}
	}
	if !a.lent {
		unix.Munmap(a.alias)
	}
	unix.Syscall(unix.SYS_MUNMAP, uintptr(a.base), uintptr(a.n), 0)
	unix.Close(a.fd)
}

func memfd(n uint64) int {
	fd, err := unix.MemfdCreate("gpu", unix.MFD_CLOEXEC)
	if err == nil {
		err = unix.Ftruncate(fd, int64(n))
	}
	if err != nil {
		panic(err)
	}
	return fd
}

const fakePiece = 64 << 10

// What follows is gpu.Device.
func (g *GPU) Alloc(n uint64) (uint64, error) {
	g.enter("Alloc")
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.fails("Alloc"); err != nil {
		return 0, err
	}
	n = pagesOf(n)
	if !g.Pieces {
		return g.show(memfd(n), n, 0).base, nil
	}
	n = (n + fakePiece - 1) / fakePiece * fakePiece
	base := untouchable(n, 0)
	for at := base; at < base+n; at += fakePiece {
		g.show(memfd(fakePiece), fakePiece, at).whole = 0
	}
	g.at(base).whole = n
	return base, nil
}

func (g *GPU) Free(address uint64) error {
	g.reclaim()
	return g.drop(address)
}

func (g *GPU) drop(address uint64) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	a := g.at(address)
	if a == nil || a.base != address {
		return errFake
	}
	for left := a.whole; left > 0; left -= a.n {
		a = g.at(address)
		g.hide(a)
		address += a.n
	}
	return nil
}

// at is the memory of the GPU at an address.
func (g *GPU) at(address uint64) *alloc {
	for _, a := range g.allocs {
		if address-a.base < a.n {
			return a
		}
	}
	return nil
}

// bytes is up to n bytes at an address of any kind.
func (g *GPU) bytes(address, n uint64) []byte {
	if a := g.at(address); a != nil {
		off := address - a.base
		return a.alias[off:min(a.n, off+n)]
	}
	if address >= pinAt {
		address -= pinAt
		for p, k := range g.pins {
			if address >= p && address+n <= p+k {
				return mem.Span{Addr: uintptr(address), Len: n}.Bytes()
			}
		}
		panic(fmt.Sprintf("%d bytes at %#x are not pinned", n, address))
	}
	return mem.Span{Addr: uintptr(address), Len: n}.Bytes()
}

func (g *GPU) copy(c cuda.Copy) {
	for c.Len > 0 {
		g.mu.Lock()
		to, from := g.bytes(c.To, c.Len), g.bytes(c.From, c.Len)
		k := uint64(copy(to, from))
		g.mu.Unlock()
		c.To, c.From, c.Len = c.To+k, c.From+k, c.Len-k
	}
}

func (g *GPU) Pin(address, n uint64) (uint64, error) {
	g.enter("Pin")
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.fails("Pin"); err != nil {
		return 0, err
	}
	g.pins[address] = n
	return address + pinAt, nil
}

func (g *GPU) Unpin(address uint64) error {
	g.reclaim()
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.pins[address] == 0 {
		panic("unpinned what is not pinned")
	}
	delete(g.pins, address)
	return nil
}

func (g *GPU) Describe(address uint64) (cuda.Memory, error) {
	g.enter("Describe")
	g.mu.Lock()
	defer g.mu.Unlock()
	a := g.at(address)
	if err := g.fails("Describe"); err != nil || a == nil {
		return cuda.Memory{}, errors.Join(err, errFake)
	}
	return cuda.Memory{Base: a.base, Len: a.n, ID: a.id, OnGPU: true, LegacyIPC: !g.Pieces && !g.Alone, Descriptor: g.Pieces && !g.Alone}, nil
}

func (g *GPU) ExportIPC(base uint64) (h cuda.IPCHandle, err error) {
	g.enter("ExportIPC")
	g.mu.Lock()
	defer g.mu.Unlock()
	binary.LittleEndian.PutUint64(h[:], base)
	return h, g.fails("ExportIPC")
}

func (g *GPU) ImportIPC(h cuda.IPCHandle) (uint64, error) {
	g.enter("ImportIPC")
	g.mu.Lock()
	defer g.mu.Unlock()
	a := g.at(binary.LittleEndian.Uint64(h[:]))
	if g.fail[Mapped] > 0 {
		return 0, g.fails(Mapped)
	}
	if err := g.fails("ImportIPC"); err != nil || a == nil {
		return 0, errors.Join(err, errFake)
	}
	fd, err := unix.Dup(a.fd)
	if err != nil {
		return 0, err
	}
	g.imports++
	return g.show(fd, a.n, 0).base, nil
}

func (g *GPU) CloseIPC(base uint64) error {
	g.reclaim()
	g.unimport()
	return g.drop(base)
}

func (g *GPU) unimport() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.imports--
}

func (g *GPU) ExportFD(address uint64) (int, error) {
	g.enter("ExportFD")
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.fails("ExportFD"); err != nil {
		return 0, err
	}
	return unix.Dup(g.at(address).fd)
}

func (g *GPU) MapFDs(fds []int32, lens []uint64) (uint64, error) {
	g.enter("MapFDs")
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.fails("MapFDs"); err != nil {
		return 0, err
	}
	total := uint64(0)
	for _, n := range lens {
		total += n
	}
	base := untouchable(total, 0)
	at := base
	for i, fd := range fds {
		own, err := unix.Dup(int(fd))
		if err != nil {
			return 0, err
		}
		g.show(own, lens[i], at)
		at += lens[i]
	}
	g.imports++
	return base, nil
}

func (g *GPU) UnmapFDs(base uint64, lens []uint64) error {
	g.unimport()
	for _, n := range lens {
		if err := g.drop(base); err != nil {
			return err
		}
		base += n
	}
	return nil
}

// Direct implements gpu.Device.
func (g *GPU) Direct() (cuda.Direct, error) {
	g.enter("Direct")
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.NIC, g.fails("Direct")
}

// ExportDMABuf gives a descriptor that package fakeverbs understands: of each piece, where the CPU sees it,
// and its length. Memory that has been exported stays there when it is freed, as a dma-buf keeps it.
func (g *GPU) ExportDMABuf(address, n uint64) (int, error) {
	g.enter("ExportDMABuf")
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.fails("ExportDMABuf"); err != nil {
		return 0, err
	}
	var table []byte
	list, err := g.seen(address, n)
	for _, p := range list {
		table = binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(table, p.Alias), p.Len)
	}
	if err != nil || address%4096 != 0 || n%4096 != 0 {
		return 0, errors.Join(err, errFake)
	}
	fd, err := unix.MemfdCreate("dma-buf", unix.MFD_CLOEXEC)
	if err == nil {
		_, err = unix.Write(fd, table)
	}
	return fd, err
}

// A Piece is memory of the GPU and where the CPU sees it.
type Piece struct{ Start, Alias, Len uint64 }

// Seen returns the pieces of n bytes at an address, for fakeverbs.Peer.
func (g *GPU) Seen(address, n uint64) ([]Piece, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.seen(address, n)
}

func (g *GPU) seen(address, n uint64) (list []Piece, err error) {
	for n > 0 {
		a := g.at(address)
		if a == nil {
			return nil, errFake
		}
		a.lent = true
		b := g.bytes(address, n)
		list = append(list, Piece{address, uint64(mem.Of(b).Addr), uint64(len(b))})
		address, n = address+uint64(len(b)), n-uint64(len(b))
	}
	return list, nil
}

// stream runs what is enqueued in a goroutine.
type stream struct {
	work chan func()
	left atomic.Int64
	over chan struct{}
}

func (g *GPU) newStream() *stream {
	s := &stream{work: make(chan func(), 1<<16), over: make(chan struct{})}
	go func() {
		defer close(s.over)
		for do := range s.work {
			do()
			s.left.Add(-1)
		}
	}()
	return s
}

func (s *stream) put(do func()) {
	s.left.Add(1)
	s.work <- do
}

func (g *GPU) NewStream() (cuda.Stream, error) {
	g.enter("NewStream")
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.fails("NewStream"); err != nil {
		return 0, err
	}
	n := cuda.Stream(g.number())
	g.streams[n] = g.newStream()
	return n, nil
}

func (g *GPU) FreeStream(n cuda.Stream) error {
	g.enter("FreeStream")
	g.mu.Lock()
	s := g.streams[n]
	delete(g.streams, n)
	g.mu.Unlock()
	close(s.work)
	<-s.over
	return nil
}

func (g *GPU) stream(n cuda.Stream) *stream {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.streams[n]
}

func (g *GPU) Idle(n cuda.Stream) (bool, error) {
	g.enter("Idle")
	g.mu.Lock()
	err := g.fails("Idle")
	g.mu.Unlock()
	return g.stream(n).left.Load() == 0, err
}

// reached is that of an event that has passed.
var reached = func() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

func (g *GPU) NewEvent() (cuda.Event, error) {
	g.enter("NewEvent")
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.fails("NewEvent"); err != nil {
		return 0, err
	}
	n := cuda.Event(g.number())
	g.events[n] = reached
	return n, nil
}

func (g *GPU) FreeEvent(e cuda.Event) error {
	g.enter("FreeEvent")
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.events, e)
	return nil
}

func (g *GPU) Record(e cuda.Event, n cuda.Stream) error {
	g.enter("Record")
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.fails("Record"); err != nil {
		return err
	}
	if g.events[e] = reached; !g.Instant {
		passed := make(chan struct{})
		g.events[e] = passed
		g.streams[n].put(func() { close(passed) })
	}
	return nil
}

func (g *GPU) Passed(e cuda.Event) (bool, error) {
	g.enter("Passed")
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.fails("Passed"); err != nil {
		return false, err
	}
	select {
	case <-g.events[e]:
		return true, nil
	default:
		return false, nil
	}
}

func (g *GPU) Enqueue(n cuda.Stream, e cuda.Event, copies []cuda.Copy, flag, value uint64) error {
	g.enter("Enqueue")
	g.mu.Lock()
	s, passed, err := g.streams[n], g.events[e], g.fails("Enqueue")
	g.mu.Unlock()
	if err != nil {
		flag = 0 // that is what fails; the copies are under way
	}
	if g.Instant {
		for _, c := range copies {
			g.copy(c)
		}
		g.store(flag, value)
		return err
	}
	entries := int64(len(copies) + 1)
	for g.Depth > 0 && g.left.Load()+entries > g.Depth {
		time.Sleep(100 * time.Microsecond)
	}
	g.left.Add(entries)
	if e != 0 {
		s.put(func() { <-passed })
	}
	list := append([]cuda.Copy(nil), copies...)
	s.put(func() {
		for _, c := range list {
			if g.Delay > 0 {
				time.Sleep(g.Delay)
			}
			g.copy(c)
		}
		g.store(flag, value)
		g.left.Add(-entries)
	})
	return err
}

// store stores value at flag, if that is not 0.
func (g *GPU) store(flag, value uint64) {
	if flag == 0 {
		return
	}
	g.mu.Lock()
	b := g.bytes(flag, 8)
	g.mu.Unlock()
	(*atomic.Uint64)(unsafe.Pointer(&b[0])).Store(value)
}

// Memory is that of a GPU, for the contract suite and for receive buffers.
type Memory struct{ G *GPU }

// Alloc gives n bytes.
func (m Memory) Alloc(n uint64) (mem.Region, error) {
	a, err := m.G.Alloc(n)
	return mem.Region{Addr: uintptr(a), Len: n, Dev: mem.GPU(0)}, err
}

// Free returns what Alloc gave.
func (m Memory) Free(r mem.Region) error { return m.G.Free(uint64(r.Addr)) }

// Load reads memory of any kind.
func (m Memory) Load(dst []byte, s mem.Span) error {
	m.G.copy(cuda.Copy{To: uint64(mem.Of(dst).Addr), From: uint64(s.Addr), Len: s.Len})
	runtime.KeepAlive(dst)
	return nil
}

// Store writes to it.
func (m Memory) Store(s mem.Span, src []byte) error {
	m.G.copy(cuda.Copy{To: uint64(s.Addr), From: uint64(mem.Of(src).Addr), Len: s.Len})
	runtime.KeepAlive(src)
	return nil
}

// Empty checks that everything has been given back, or soon is.
func (g *GPU) Empty(t testing.TB) {
	for end := time.Now().Add(5 * time.Second); g.kept() && time.Now().Before(end); {
		time.Sleep(100 * time.Microsecond)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	require.Empty(t, g.streams)
	require.Empty(t, g.events)
	require.Empty(t, g.pins)
	require.Zero(t, g.imports)
	require.Empty(t, g.allocs)
}

func (g *GPU) kept() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.streams)+len(g.events)+len(g.pins)+g.imports+len(g.allocs) > 0
}
