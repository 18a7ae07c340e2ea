package stage

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"time"

	"golang.org/x/sys/unix"

	"fserver/engine/mem"
	"fserver/engine/transport"
)

// region is GPU memory that a key stands for.
type region struct {
	mem.Region
	f      *Fabric
	key    transport.Key // of the shadow, for inner
	shadow mem.Region    // where writes over inner land
	seen   uint64        // the shadow's address for the GPU; 0: it is still to be pinned
	pinned bool
	copied uint64 // the number of the newest copy from the shadow
	only   *Conn  // that may write here; nil: all
	// The shadow is being pinned.
	pinning bool
}

// The Blob of a key of a shadow: a version, ID and Token of the key, the length of the Blob of inner's key, and that
// Blob. All numbers are little-endian. What is behind it belongs to a Fabric over this one.
const (
	blobVersion = 5
	blobLen     = 1 + 2*8 + 2
)

// shadowKey is what a peer is to be told of inner's key of a shadow.
func shadowKey(k transport.Key) transport.Key {
	b := append(make([]byte, 0, blobLen+len(k.Blob)), blobVersion)
	b = binary.LittleEndian.AppendUint64(b, k.ID)
	b = binary.LittleEndian.AppendUint64(b, k.Token)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(k.Blob)))
	k.Blob = string(append(b, k.Blob...))
	return k
}

// innerKey is inner's key of a shadow. False: k is of no shadow.
func innerKey(k transport.Key) (inner transport.Key, ours bool) {
	b := k.Blob
	if len(b) < blobLen || b[0] != blobVersion || u64(b, 1) != k.ID || u64(b, 9) != k.Token {
		return k, false
	}
	n := int(b[17]) | int(b[18])<<8
	if n > len(b)-blobLen {
		return k, false
	}
	k.Blob = b[blobLen : blobLen+n]
	return k, true
}

// ofShadow says whether a key is of GPU memory that has a shadow.
func ofShadow(k transport.Key) bool {
	_, ours := innerKey(k)
	return ours
}

// u64 is the number at b[i:]; the caller has checked the length.
func u64(b string, i int) uint64 { return binary.LittleEndian.Uint64([]byte(b[i : i+8])) }

// Register implements transport.Fabric.
func (f *Fabric) Register(m mem.Region) (transport.Key, error) {
	own := f.Calls.Name()
	switch _, carry := bits.Add64(uint64(m.Addr), m.Len, 0); {
	case m.Dev == mem.CPU:
		return f.register(m)
	case m.Dev != own:
		return transport.Key{}, fmt.Errorf("stage: register %d bytes on %v: this node uses %v (STEPMESH_GPU)", m.Len, m.Dev, own)
	case carry != 0:
		return transport.Key{}, fmt.Errorf("stage: register %d bytes at %#x: not a range of addresses", m.Len, m.Addr)
	}
	if k, taken, err := f.registerDirect(m); taken || err != nil {
		return k, err
	}
	r := &region{Region: m, f: f}
	var err error
	if r.shadow, err = reserve(m.Len); err != nil {
		return transport.Key{}, err
	}
	if r.key, err = f.register(mem.Region{Addr: r.shadow.Addr, Len: m.Len}); err == nil {
		if err = f.admit(r); err != nil {
			f.Fabric.Deregister(r.key)
		}
	}
	if err != nil {
		r.Discard()
		return transport.Key{}, err
	}
	return shadowKey(r.key), nil
}

// spareLimit bounds how long register waits until what it has given up is not locked any more.
const spareLimit = 64 * time.Millisecond

// register registers memory with inner. If no more memory can be locked, it gives up what it can spare, and tries again.
func (f *Fabric) register(m mem.Region) (transport.Key, error) {
	k, err := f.Fabric.Register(m)
	if errors.Is(err, unix.ENOMEM) && f.spare() {
		for wait := time.Millisecond; errors.Is(err, unix.ENOMEM) && wait <= spareLimit; wait *= 2 {
			time.Sleep(wait)
			k, err = f.Fabric.Register(m)
		}
	}
	return k, err
}

// admit notes a region.
func (f *Fabric) admit(r *region) error {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	if f.Closed {
		return fmt.Errorf("stage: register %d bytes: %w", r.Len, transport.ErrClosed)
	}
	f.regions[r.key.ID] = r
	return nil
}

// Remove implements over.Layer.
func (f *Fabric) Remove(k transport.Key) {
	f.direct.drop(k)
	if r := f.regions[k.ID]; r != nil && r.key.Token == k.Token && !f.Closed {
		delete(f.regions, k.ID)
		f.End(k.ID, r)
	}
}

// Quiet implements over.Memory.
func (r *region) Quiet() bool { return !r.pinning && r.f.in.reached(r.copied) }

// Discard implements over.Memory.
func (r *region) Discard() {
	if r.pinned {
		r.f.Calls.Unmap(r.shadow)
	} else {
		_ = mem.Unmap(r.shadow)
	}
}

// reserve gives addresses for n bytes, whole pages of them, which take no memory
// until they are written to.
func reserve(n uint64) (mem.Region, error) {
	n = max(4096, (n+4095)&^4095)
	if n > 1<<46 {
		return mem.Region{}, fmt.Errorf("stage: register %d bytes: want at most 2^46", n)
	}
	b, err := unix.Mmap(-1, 0, int(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return mem.Region{}, fmt.Errorf("stage: reserve %d bytes of host addresses for staging: %w", n, err)
	}
	s := mem.Of(b)
	return mem.Region{Addr: s.Addr, Len: s.Len}, nil
}
