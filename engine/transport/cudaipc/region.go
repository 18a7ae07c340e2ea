package cudaipc

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"os"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"fserver/engine/mem"
	"fserver/engine/transport"
)

// region is GPU memory that a key stands for, and that can be mapped.
type region struct {
	mem.Region
	f    *Fabric
	key  transport.Key // without its Blob
	slot uint32
	fds  []int
	// When the key is gone: who may be about to write here.
	writers []writer
}

// How the memory of a key can be reached.
const (
	reachNone = iota // it cannot be mapped
	reachIPC         // by an IPC handle
	reachFDs         // by descriptors, piece by piece
)

// A remote is a key of GPU memory as a writer sees it: what is behind inner's in Key.Blob. All numbers are little-endian.
// Its length, as 2 bytes, and a version are behind it.
type remote struct {
	reach        uint8
	key          transport.Key // without its Blob
	n            uint64        // bytes of the region
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

// numbers are the 64-bit numbers of a remote, in order. Those after the first two, and what follows
// them, are there only if the memory can be mapped.
func (r *remote) numbers() [10]*uint64 {
	return [...]*uint64{&r.key.ID, &r.key.Token, &r.n, &r.fabric, &r.slot, &r.addr, &r.base, &r.size, &r.id, &r.pid}
}

const (
	blobVersion = 5
	blobShort   = 1 + 2*8
	blobLong    = blobShort + 8*8
	blobEnd     = 2 + 1
)

// encode returns inner's Blob with r behind it.
func (r *remote) encode(inner string) string {
	b := append(append(make([]byte, 0, 256), inner...), r.reach)
	for i, v := range r.numbers() {
		if i == 2 && r.reach == reachNone {
			break
		}
		b = binary.LittleEndian.AppendUint64(b, *v)
	}
	b = append(append(b, r.handle...), r.fdsAndPieces...)
	return string(append(binary.LittleEndian.AppendUint16(b, uint16(len(b)-len(inner))), blobVersion))
}

// decode reads what is in the Blob of k. False: it is of no Fabric of this package, or not of k.
func (r *remote) decode(k transport.Key) bool {
	b := k.Blob
	end := len(b) - blobEnd
	if end < 0 || b[end+2] != blobVersion {
		return false
	}
	n := int(b[end]) | int(b[end+1])<<8
	if n < blobShort || n > end {
		return false
	}
	b = b[end-n : end]
	if b[0] > reachFDs || b[0] == reachNone && n != blobShort || b[0] > reachNone && n <= blobLong {
		return false
	}
	*r = remote{reach: b[0]}
	at := 1
	for i, v := range r.numbers() {
		if i == 2 && r.reach == reachNone {
			break
		}
		*v = u64(b, at)
		at += 8
	}
	if r.key.ID != k.ID || r.key.Token != k.Token {
		return false
	}
	switch rest := b[at:]; r.reach {
	case reachNone:
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
	last, carry := bits.Add64(r.addr, r.n, 0)
	return r.slot < maxRegions && carry == 0 && r.addr >= r.base && last-r.base <= r.size
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

// u64 is the number at b[i:]; the caller has checked the length.
func u64(b string, i int) uint64 { return binary.LittleEndian.Uint64([]byte(b[i : i+8])) }

// Register implements transport.Fabric.
func (f *Fabric) Register(m mem.Region) (transport.Key, error) {
	k, err := f.Fabric.Register(m)
	if err != nil || m.Dev == mem.CPU {
		return k, err
	}
	r := &region{Region: m, f: f, key: transport.Key{ID: k.ID, Token: k.Token}}
	v := f.share(r)
	if v.reach != reachNone {
		if err = f.admit(r, &v); err != nil {
			f.Fabric.Deregister(k)
			r.closeFDs()
			return transport.Key{}, err
		}
	}
	k.Blob = v.encode(k.Blob)
	return k, nil
}

// admit puts r into the table.
func (f *Fabric) admit(r *region, v *remote) error {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	switch {
	case f.Closed:
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
	f.own.Store(ownKey{f.id, r.key.ID, r.key.Token}, [3]uint64{uint64(r.Addr), r.Len, uint64(f.Calls.Dev.Ordinal())})
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
	if r.Len == 0 {
		return v
	}
	m, err := f.Calls.Dev.Describe(uint64(r.Addr))
	if err != nil || !m.OnGPU || m.ID == 0 {
		return v
	}
	if m.LegacyIPC {
		h, err := f.Calls.Dev.ExportIPC(m.Base)
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
		if v.reach == reachNone { // descriptors may be what is short
			r.closeFDs()
		}
	}()
	v.base, v.id, v.pid = m.Base, m.ID, uint64(os.Getpid())
	end := uint64(r.Addr) + r.Len
	var list []byte
	for at := m.Base; at < end; at += m.Len {
		if m, err = f.Calls.Dev.Describe(at); err != nil || !m.Descriptor || m.Base != at || m.Len == 0 || len(r.fds) == pieceMost {
			return v
		}
		fd, err := f.Calls.Dev.ExportFD(at)
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

// Remove implements over.Layer. It takes a key out of the table, and notes who may be about to write there.
func (f *Fabric) Remove(k transport.Key) {
	r := f.regions[k.ID]
	if r == nil || r.key.Token != k.Token || f.Closed {
		return
	}
	delete(f.regions, k.ID)
	f.slot(r).Store(0)
	f.free = append(f.free, r.slot)
	for _, c := range f.Conns {
		if c := c.(*Conn); c.theirs != nil && !c.quiet() {
			r.writers = append(r.writers, writer{c, c.theirs.begun.Load()})
		}
	}
	f.End(r.key.ID, r)
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

// Quiet implements over.Memory.
func (r *region) Quiet() bool {
	r.writers = slices.DeleteFunc(r.writers, func(w writer) bool { return w.over(r.key.ID) })
	return len(r.writers) == 0
}

// Discard implements over.Memory.
func (r *region) Discard() {
	r.f.own.Delete(ownKey{r.f.id, r.key.ID, r.key.Token})
	r.closeFDs()
}
