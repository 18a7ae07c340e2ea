package cudaipc

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"fserver/engine/mem"
	"fserver/engine/transport"
)

// region is GPU memory that a key stands for.
type region struct {
	mem.Region
	key    transport.Key // of the shadow, for inner
	shadow mem.Region    // where writes over inner land
	seen   uint64        // the shadow's address for the GPU; 0: it is still to be pinned
	pinned bool
	slot   uint32
	copied uint64 // the number of the newest copy from the shadow
	only   *Conn  // that may write here; nil: all
	fds    []int
	// When the key is gone, the region is in f.ending until it is quiet.
	pinning bool
	freed   bool     // inner has let go of the shadow
	writers []writer // who may be about to write here by mapping
}

// How the memory of a key can be reached.
const (
	reachStaged = iota // it cannot be mapped
	reachIPC           // by an IPC handle
	reachFDs           // by descriptors, piece by piece
)

// A remote is a key of GPU memory as a writer sees it: Key.Blob. If the memory cannot be mapped, the Blob of inner's key
// is behind it. All numbers are little-endian.
type remote struct {
	reach        uint8
	key          transport.Key
	n            uint64 // bytes of the region
	fabric       uint64
	slot         uint64
	addr         uint64 // for the owner
	base, size   uint64 // of the allocation, for the owner
	id           uint64 // of the allocation
	pid          uint64 // reachFDs
	handle       string // reachIPC: 64 bytes
	fdsAndPieces string // 12 bytes each: number in process pid, length
}

// pieceMost bounds the pieces of mapped memory that a region may lie in.
const (
	pieceMost = 256
	pieceLen  = 12
)

// numbers are the 64-bit numbers of a Blob, in order. Those after the first three, and what follows
// them, are there only if the memory can be mapped.
func (r *remote) numbers() [10]*uint64 {
	return [...]*uint64{&r.key.ID, &r.key.Token, &r.n, &r.fabric, &r.slot, &r.addr, &r.base, &r.size, &r.id, &r.pid}
}

const (
	blobVersion = 4
	blobShort   = 2 + 3*8
	blobLong    = blobShort + 7*8
)

func (r *remote) encode() string {
	b := append(make([]byte, 0, 256), blobVersion, r.reach)
	for i, v := range r.numbers() {
		if i == 3 && r.reach == reachStaged {
			return string(append(b, r.key.Blob...))
		}
		b = binary.LittleEndian.AppendUint64(b, *v)
	}
	return string(append(append(b, r.handle...), r.fdsAndPieces...))
}

// decode reads the Blob of k. False: it is of no wrapped Fabric, or not of k.
func (r *remote) decode(k transport.Key) bool {
	b := k.Blob
	if len(b) < blobShort || b[0] != blobVersion || b[1] > reachFDs || b[1] > reachStaged && len(b) <= blobLong {
		return false
	}
	*r = remote{reach: b[1]}
	at := 2
	for i, v := range r.numbers() {
		if i == 3 && r.reach == reachStaged {
			break
		}
		*v = u64(b, at)
		at += 8
	}
	if r.key.ID != k.ID || r.key.Token != k.Token {
		return false
	}
	switch rest := b[at:]; r.reach {
	case reachStaged:
		r.key.Blob = rest
		return true
	case reachIPC:
		if r.handle = rest; len(rest) != 64 {
			return false
		}
	case reachFDs:
		if r.fdsAndPieces = rest; !piecesOf(rest, r.size) {
			return false
		}
	}
	end, carry := bits.Add64(r.addr, r.n, 0)
	return r.slot < maxRegions && carry == 0 && r.addr >= r.base && end-r.base <= r.size
}

// piecesOf reports whether pieces are all of an allocation of some size: writes are checked against
// that.
func piecesOf(pieces string, size uint64) bool {
	if len(pieces)%pieceLen != 0 || len(pieces) > pieceMost*pieceLen {
		return false
	}
	for ; pieces != ""; pieces = pieces[pieceLen:] {
		n := u64(pieces, 4)
		if n > size {
			return false
		}
		size -= n
	}
	return size == 0
}

// ofGPU says whether a key is of GPU memory.
func ofGPU(k transport.Key) bool {
	var r remote
	return k.Blob != "" && r.decode(k)
}

// u64 is the number at b[i:]; the caller has checked the length.
func u64(b string, i int) uint64 { return binary.LittleEndian.Uint64([]byte(b[i : i+8])) }

// Register implements transport.Fabric.
func (f *Fabric) Register(m mem.Region) (transport.Key, error) {
	switch _, carry := bits.Add64(uint64(m.Addr), m.Len, 0); {
	case m.Dev == mem.CPU:
		return f.Fabric.Register(m)
	case m.Dev != f.name():
		return transport.Key{}, fmt.Errorf("cudaipc: register %d bytes on %v: this node uses %v (STEPMESH_GPU)", m.Len, m.Dev, f.name())
	case carry != 0:
		return transport.Key{}, fmt.Errorf("cudaipc: register %d bytes at %#x: not a range of addresses", m.Len, m.Addr)
	}
	if k, taken := f.registerDirect(m); taken {
		return k, nil
	}
	r := &region{Region: m}
	var err error
	if r.shadow, err = reserve(m.Len); err != nil {
		return transport.Key{}, err
	}
	var v remote
	if r.key, err = f.Fabric.Register(mem.Region{Addr: r.shadow.Addr, Len: m.Len}); err == nil {
		v = f.share(r)
		if err = f.admit(r, &v); err != nil {
			f.Fabric.Deregister(r.key)
		}
	}
	if err != nil {
		f.discard(r)
		return transport.Key{}, err
	}
	return transport.Key{ID: r.key.ID, Token: r.key.Token, Blob: v.encode()}, nil
}

// admit puts r into the table.
func (f *Fabric) admit(r *region, v *remote) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case f.closed:
		return fmt.Errorf("cudaipc: register %d bytes: %w", r.Len, transport.ErrClosed)
	case len(f.free) > 0:
		r.slot, f.free = f.free[len(f.free)-1], f.free[:len(f.free)-1]
	case f.used+1 == maxRegions:
		return fmt.Errorf("cudaipc: register %d bytes: %d regions of GPU memory are registered, which is the limit", r.Len, maxRegions-1)
	default:
		f.used++
		r.slot = f.used // 0 is none
	}
	v.slot = uint64(r.slot)
	f.own.Store(ownKey{f.id, r.key.ID, r.key.Token}, [3]uint64{uint64(r.Addr), r.Len, uint64(f.dev.Ordinal())})
	f.regions[r.key.ID] = r
	f.slot(r).Store(r.key.ID)
	return nil
}

// slot is the place of r in the table.
func (f *Fabric) slot(r *region) *atomic.Uint64 { return &tableIn(f.table.Region())[r.slot] }

// registered is where the regions of this process's Fabrics are, {address, length, number of the
// GPU} by ownKey: a Fabric cannot map their memory, and need not.
var registered sync.Map

type ownKey struct{ fabric, id, token uint64 }

// ours reports whether a key is of this process and tells the truth of it, and the number of the
// GPU whose memory it is of.
func (f *Fabric) ours(r *remote) (ordinal int, ours bool) {
	own, _ := f.own.Load(ownKey{r.fabric, r.key.ID, r.key.Token})
	at, ok := own.([3]uint64)
	return int(at[2]), ok && at[0] == r.addr && at[1] == r.n
}

// share says how a peer can map r. What cannot be mapped is staged.
func (f *Fabric) share(r *region) (v remote) {
	v = remote{key: r.key, n: r.Len, fabric: f.id, addr: uint64(r.Addr)}
	if !f.o.Share || r.Len == 0 {
		return v
	}
	m, err := f.dev.Describe(uint64(r.Addr))
	if err != nil || !m.OnGPU || m.ID == 0 {
		return v
	}
	if m.LegacyIPC {
		h, err := f.dev.ExportIPC(m.Base)
		if err != nil || uint64(r.Addr)-m.Base+r.Len > m.Len {
			return v
		}
		v.reach, v.base, v.size, v.id, v.handle = reachIPC, m.Base, m.Len, m.ID, string(h[:])
		return v
	}
	if !m.Descriptor {
		return v
	}
	defer func() {
		if v.reach == reachStaged { // descriptors may be what is short
			r.closeFDs()
		}
	}()
	v.base, v.id, v.pid = m.Base, m.ID, uint64(os.Getpid())
	end := uint64(r.Addr) + r.Len
	var list []byte
	for at := m.Base; at < end; at += m.Len {
		if m, err = f.dev.Describe(at); err != nil || !m.Descriptor || m.Base != at || m.Len == 0 || len(r.fds) == pieceMost {
			return v
		}
		fd, err := f.dev.ExportFD(at)
		if err != nil {
			return v
		}
		r.fds = append(r.fds, fd)
		list = binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint32(list, uint32(fd)), m.Len)
		v.size += m.Len
		v.id = v.id*1099511628211 ^ m.ID
	}
	v.reach, v.fdsAndPieces = reachFDs, string(list)
	return v
}

func (r *region) closeFDs() {
	for _, fd := range r.fds {
		unix.Close(fd)
	}
	r.fds = nil
}

// settleLimit bounds how long Close waits for copies that are under
// way. The wire needs microseconds; a copy may wait behind a kernel though.
const settleLimit = 5 * time.Second

// Deregister implements transport.Fabric. A region of the GPU is in f.ending until the copies to it
// have ended and inner has let go of its shadow.
func (f *Fabric) Deregister(k transport.Key) {
	f.remove(k)
	f.Fabric.Deregister(k)
}

// remove takes a key of GPU memory, if it is one, out of the table, and notes who may be about to
// write there.
func (f *Fabric) remove(k transport.Key) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.direct.drop(k)
	r := f.regions[k.ID]
	if r == nil || r.key.Token != k.Token || f.closed {
		return
	}
	delete(f.regions, k.ID)
	f.slot(r).Store(0)
	f.free = append(f.free, r.slot)
	for _, c := range f.conns {
		if c.theirs != nil && !c.quiet() {
			r.writers = append(r.writers, writer{c, c.theirs.begun.Load()})
		}
	}
	f.ending[r.key.ID] = r
	f.rouse()
}

// A writer is a peer that may be about to write by mapping.
type writer struct {
	c     *Conn
	begun uint64
}

// over says that nothing of the peer's is on its way to a key that is gone. Its other
// writes may wait behind a kernel for long.
func (w *writer) over(key uint64) bool {
	seg := w.c.theirs
	if seg == nil || w.c.quiet() { // released, so all is over
		return true
	}
	// It takes the newest back if it finds the key gone. Those before have been enqueued.
	begun := min(w.begun, seg.begun.Load())
	done := seg.done.Load()
	if done < begun && begun-done > depth { // no peer of ours says that
		return false
	}
	for ; done < begun; done++ {
		if seg.keys[(done+1)%depth] == key {
			return false
		}
	}
	return true
}

// quiet reports whether nobody touches the memory of a region any more whose key is gone.
func (f *Fabric) quiet(r *region) bool {
	r.writers = slices.DeleteFunc(r.writers, func(w writer) bool { return w.over(r.key.ID) })
	return len(r.writers) == 0 && !r.pinning && f.in.reached(r.copied) && (r.freed || f.closed)
}

// settle gives back a region in f.ending, if it is quiet. Here, and nowhere else, the end of a key
// is complete.
func (f *Fabric) settle(r *region) {
	if f.quiet(r) {
		delete(f.ending, r.key.ID)
		f.discard(r)
		f.told = append(f.told, transport.Event{Kind: transport.EvFreed, User: r.key.ID})
	}
}

// discard gives back what r holds; nobody writes to it any more.
func (f *Fabric) discard(r *region) {
	f.own.Delete(ownKey{f.id, r.key.ID, r.key.Token})
	if r.pinned {
		f.unmapPinned(r.shadow)
	} else {
		_ = mem.Unmap(r.shadow)
	}
	r.closeFDs()
}

// reserve gives addresses for n bytes, whole pages of them, which take no memory
// until they are written to.
func reserve(n uint64) (mem.Region, error) {
	n = max(4096, (n+4095)&^4095)
	if n > 1<<46 {
		return mem.Region{}, fmt.Errorf("cudaipc: register %d bytes: want at most 2^46", n)
	}
	b, err := unix.Mmap(-1, 0, int(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return mem.Region{}, fmt.Errorf("cudaipc: reserve %d bytes of host addresses for staging: %w", n, err)
	}
	s := mem.Of(b)
	return mem.Region{Addr: s.Addr, Len: s.Len}, nil
}
