package cudaipc

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"os"
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
	seen   uint64        // the shadow's address for the GPU, when it is pinned
	pinned bool
	slot   uint32
	copied uint64 // the number of the newest copy from the shadow
	only   *Conn  // that may write here; nil: all
	fds    []int
}

// How the memory of a key can be reached.
const (
	reachStaged = iota // it cannot be mapped
	reachIPC           // by an IPC handle
	reachFDs           // by descriptors, piece by piece
)

// A remote is a key of GPU memory as a writer sees it: Key.Blob. That of host memory has no
// Blob. All numbers are little-endian.
type remote struct {
	reach        uint8
	key          transport.Key
	n            uint64 // bytes of the region
	proof        string // 16 bytes: that it is of this process
	fabric       uint64
	uuid         string // 16 bytes
	slot         uint32
	addr         uint64 // for the owner
	base, size   uint64 // of the allocation, for the owner
	id           uint64 // of the allocation
	handle       string // reachIPC: 64 bytes
	pid          uint32 // reachFDs
	fdsAndPieces string // 12 bytes each: number in process pid, length
}

// pieceMost bounds the pieces of mapped memory that a region may lie in.
const (
	pieceMost = 256
	pieceLen  = 12
)

func (r *remote) encode() string {
	b := make([]byte, 0, 256)
	u64 := func(v ...uint64) {
		for _, x := range v {
			b = binary.LittleEndian.AppendUint64(b, x)
		}
	}
	b = append(b, blobVersion, r.reach)
	u64(r.key.ID, r.key.Token, r.n)
	if r.reach > reachStaged {
		b = append(append(b, r.proof...), r.uuid...)
		u64(r.fabric, uint64(r.slot), r.addr, r.base, r.size, r.id, uint64(r.pid))
		b = append(append(b, r.handle...), r.fdsAndPieces...)
	}
	return string(b)
}

const (
	blobVersion = 2
	blobShort   = 2 + 3*8
	blobLong    = blobShort + 32 + 7*8
)

// decode reads the Blob of k. False: it is of no wrapped Fabric, or not of k.
func (r *remote) decode(k transport.Key) bool {
	b := k.Blob
	if len(b) < blobShort || b[0] != blobVersion || b[1] > reachFDs {
		return false
	}
	*r = remote{
		reach: b[1],
		key:   transport.Key{ID: u64(b, 2), Token: u64(b, 10)},
		n:     u64(b, 18),
	}
	if r.key.ID != k.ID || r.key.Token != k.Token {
		return false
	}
	if r.reach == reachStaged {
		return true
	}
	rest := len(b) - blobLong
	if r.reach == reachIPC && rest != 64 || r.reach == reachFDs && (rest <= 0 || rest%pieceLen != 0 || rest > pieceMost*pieceLen) {
		return false
	}
	const at = blobShort + 32
	r.proof, r.uuid = b[blobShort:blobShort+16], b[blobShort+16:at]
	r.fabric, r.slot, r.addr = u64(b, at), uint32(u64(b, at+8)), u64(b, at+16)
	r.base, r.size, r.id, r.pid = u64(b, at+24), u64(b, at+32), u64(b, at+40), uint32(u64(b, at+48))
	if r.reach == reachIPC {
		r.handle = b[blobLong:]
	} else {
		// They have to be all of the allocation: writes are checked against size.
		r.fdsAndPieces = b[blobLong:]
		left := r.size
		for p := r.fdsAndPieces; p != ""; p = p[pieceLen:] {
			n := u64(p, 4)
			if n > left {
				return false
			}
			left -= n
		}
		if left != 0 {
			return false
		}
	}
	end, carry := bits.Add64(r.addr, r.n, 0)
	return r.slot < maxRegions && carry == 0 && r.addr >= r.base && end-r.base <= r.size
}

// ofGPU says whether a key is of GPU memory.
func ofGPU(k transport.Key) bool {
	var r remote
	return k.Blob != "" && r.decode(k)
}

// u64 is the number at b[i:]; the caller has checked the length.
func u64(b string, i int) uint64 {
	_ = b[i+7]
	return uint64(b[i]) | uint64(b[i+1])<<8 | uint64(b[i+2])<<16 | uint64(b[i+3])<<24 |
		uint64(b[i+4])<<32 | uint64(b[i+5])<<40 | uint64(b[i+6])<<48 | uint64(b[i+7])<<56
}

// Register implements transport.Fabric.
func (f *Fabric) Register(m mem.Region) (transport.Key, error) {
	switch _, carry := bits.Add64(uint64(m.Addr), m.Len, 0); {
	case m.Dev == mem.CPU:
		return f.inner.Register(m)
	case m.Dev != f.name():
		return transport.Key{}, fmt.Errorf("cudaipc: register %d bytes on %v: this node uses %v (STEPMESH_GPU)", m.Len, m.Dev, f.name())
	case carry != 0:
		return transport.Key{}, fmt.Errorf("cudaipc: register %d bytes at %#x: not a range of addresses", m.Len, m.Addr)
	}
	r := &region{Region: m}
	var err error
	if r.shadow, err = reserve(m.Len); err != nil {
		return transport.Key{}, err
	}
	uuid := f.dev.UUID()
	v := remote{n: m.Len, fabric: f.id, addr: uint64(m.Addr), uuid: string(uuid[:])}
	if err = f.admit(r); err == nil {
		f.share(r, &v)
	}
	v.key, v.slot = r.key, r.slot
	v.proof = f.prove(&v)
	f.mu.Lock()
	defer f.mu.Unlock()
	if err == nil && f.closed {
		err = fmt.Errorf("cudaipc: register %d bytes: %w", m.Len, transport.ErrClosed)
	}
	if err != nil {
		f.discard(r)
		return transport.Key{}, err
	}
	f.regions[r.key.ID] = r
	tableIn(f.table.Region())[r.slot].Store(r.key.ID)
	return transport.Key{ID: r.key.ID, Token: r.key.Token, Blob: v.encode()}, nil
}

// prove is what nobody who does not know the secret can say of a key: where its
// memory is, by addresses of this process.
func (f *Fabric) prove(r *remote) string {
	h := hmac.New(sha256.New, f.secret[:])
	for _, v := range [...]uint64{r.key.ID, r.key.Token, r.n, uint64(r.slot), r.addr, r.base, r.size, r.id} {
		_ = binary.Write(h, binary.LittleEndian, v) // never fails
	}
	return string(h.Sum(nil)[:16])
}

// admit registers the shadow of r with inner and gives r a slot.
func (f *Fabric) admit(r *region) (err error) {
	if r.key, err = f.inner.Register(mem.Region{Addr: r.shadow.Addr, Len: r.Len}); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case len(f.free) > 0:
		r.slot, f.free = f.free[len(f.free)-1], f.free[:len(f.free)-1]
	case f.used+1 == maxRegions:
		return fmt.Errorf("cudaipc: register %d bytes: %d regions of GPU memory are registered, which is the limit", r.Len, maxRegions-1)
	default:
		f.used++
		r.slot = f.used // 0 is none
	}
	return nil
}

// share says in v how a peer can map r. What cannot be mapped is staged.
func (f *Fabric) share(r *region, v *remote) {
	v.reach = reachStaged
	if !f.o.Share || r.Len == 0 {
		return
	}
	m, err := f.dev.Describe(uint64(r.Addr))
	if err != nil || !m.OnGPU || m.ID == 0 {
		return
	}
	if m.LegacyIPC {
		h, err := f.dev.ExportIPC(m.Base)
		if err != nil || uint64(r.Addr)-m.Base+r.Len > m.Len {
			return
		}
		v.reach, v.base, v.size, v.id, v.handle = reachIPC, m.Base, m.Len, m.ID, string(h[:])
		return
	}
	if !m.Descriptor {
		return
	}
	defer func() {
		if v.reach == reachStaged { // descriptors may be what is short
			r.closeFDs()
		}
	}()
	v.base, v.id, v.pid = m.Base, m.ID, uint32(os.Getpid())
	end := uint64(r.Addr) + r.Len
	var list []byte
	for at := m.Base; at < end; at += m.Len {
		if m, err = f.dev.Describe(at); err != nil || !m.Descriptor || m.Base != at || m.Len == 0 || len(r.fds) == pieceMost {
			return
		}
		fd, err := f.dev.ExportFD(at)
		if err != nil {
			return
		}
		r.fds = append(r.fds, fd)
		list = binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint32(list, uint32(fd)), m.Len)
		v.size += m.Len
		v.id = v.id*1099511628211 ^ m.ID
	}
	v.reach, v.fdsAndPieces = reachFDs, string(list)
}

func (r *region) closeFDs() {
	for _, fd := range r.fds {
		unix.Close(fd)
	}
	r.fds = nil
}

// Deregister implements transport.Fabric.
func (f *Fabric) Deregister(k transport.Key) error {
	r, writers := f.remove(k)
	if r == nil {
		return f.inner.Deregister(k) // host memory, or no key
	}
	err := f.inner.Deregister(r.key)
	r.key = transport.Key{}
	err = errors.Join(err, f.settle(writers, r, k.ID))
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, w := range writers {
		_ = w.view.Drop() // our own mapping
	}
	if err != nil {
		return fmt.Errorf("cudaipc: deregister key %d: %w", k.ID, err) // its memory stays, for who may still use it
	}
	f.discard(r)
	return nil
}

// remove takes a key of GPU memory out of the table, and returns those who may be about to
// write there; nil: there is no such key.
func (f *Fabric) remove(k transport.Key) (r *region, writers []writer) {
	f.mu.Lock()
	defer f.mu.Unlock()
	r = f.regions[k.ID]
	if r == nil || r.key.Token != k.Token {
		return nil, nil
	}
	delete(f.regions, r.key.ID)
	if f.closed {
		return r, nil
	}
	tableIn(f.table.Region())[r.slot].Store(0)
	for _, c := range f.conns {
		if w, ok := c.writer(); ok {
			writers = append(writers, w)
		}
	}
	return r, writers
}

// A writer is a peer that may be about to write by mapping.
type writer struct {
	c     *Conn
	view  *mem.View // held
	seg   *segment  // the peer's
	begun uint64
}

// over says that nothing of the peer's is on its way to a key that is gone. Its other
// writes may wait behind a kernel for long.
func (w *writer) over(key uint64) bool {
	// It takes the newest back if it finds the key gone. Those before have been enqueued.
	begun := min(w.begun, w.seg.begun.Load())
	done := w.seg.done.Load()
	if done < begun && begun-done > depth { // no peer of ours says that
		return false
	}
	for ; done < begun; done++ {
		if w.seg.keys[(done+1)%depth] == key {
			return false
		}
	}
	return true
}

// settle waits for what had begun before the key with an id, of r, was gone. Behind a
// Conn it waits once in vain: who loses a peer has many keys to end.
func (f *Fabric) settle(writers []writer, r *region, id uint64) error {
	end := time.Now().Add(settleLimit)
	wait := func(end time.Time, over func() bool) error {
		for turn := 1; !over(); turn++ {
			if turn > 1000 {
				time.Sleep(20 * time.Microsecond)
			}
			if time.Now().After(end) {
				return fmt.Errorf("a copy to this memory has not finished within %v: keep the memory until it has", settleLimit)
			}
		}
		return nil
	}
	for _, w := range writers {
		until := end
		if w.c.late.Load() {
			until = time.Time{}
		}
		err := wait(until, func() bool { return w.over(id) || w.c.quiet() })
		if err != nil {
			w.c.late.Store(w.c.asks.Load() != 0)
			return err
		}
	}
	return wait(end, func() bool {
		f.mu.Lock() // beside Close
		defer f.mu.Unlock()
		f.look() // nobody may poll meanwhile
		f.tick()
		return f.in.reached(r.copied)
	})
}

// discard gives back what r holds; nobody writes to it any more. The caller holds
// f.mu.
func (f *Fabric) discard(r *region) {
	if r.key.ID != 0 && !f.closed {
		_ = f.inner.Deregister(r.key)
	}
	if shadow := r.shadow; r.pinned {
		f.unpinMapped(shadow)
	} else if shadow.Len != 0 {
		_ = mem.Unmap(shadow)
	}
	r.closeFDs()
	if r.slot != 0 {
		f.free = append(f.free, r.slot)
	}
	r.shadow, r.slot, r.pinned = mem.Region{}, 0, false
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
