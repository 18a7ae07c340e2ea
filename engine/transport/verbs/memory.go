package verbs

import (
	"encoding/binary"
	"fmt"
	"math/bits"

	rdma "fserver/cshim/verbs"
	"fserver/engine/mem"
	"fserver/engine/transport"
)

// A key of ours: ID is the number of the region, Token the NIC's rkey, mixed with ID so that
// no key works with another's number, and Blob the address.

// mixed is what joins number and rkey of a key.
func mixed(id uint64) uint32 {
	hi, lo := bits.Mul64(id^0x9e3779b97f4a7c15, 0xbf58476d1ce4e5b9)
	return uint32(hi^lo) ^ uint32((hi^lo)>>32)
}

// remote is what the NIC is to be told of a key. Of one that no Fabric like this has made
// it is nonsense, which the peer's NIC refuses.
func remote(k *transport.Key) (address uint64, rkey uint32) {
	if len(k.Blob) == 8 {
		var b [8]byte
		copy(b[:], k.Blob)
		address = binary.LittleEndian.Uint64(b[:])
	}
	return address, uint32(k.Token) ^ mixed(k.ID)
}

// Register implements transport.Fabric. It may take milliseconds.
func (f *Fabric) Register(r mem.Region) (transport.Key, error) {
	if r.Dev != mem.CPU {
		return transport.Key{}, fmt.Errorf("verbs: register %d bytes on %v: want host memory", r.Len, r.Dev)
	}
	if _, carry := bits.Add64(uint64(r.Addr), r.Len, 0); carry != 0 || r.Addr == 0 && r.Len > 0 {
		return transport.Key{}, fmt.Errorf("verbs: register %d bytes at %#x: not a range of addresses", r.Len, r.Addr)
	}
	if !f.begin() {
		return transport.Key{}, fmt.Errorf("verbs: register %d bytes: %w", r.Len, transport.ErrClosed)
	}
	defer f.tasks.Done()
	g := region{empty: r.Len == 0}
	if !g.empty {
		var err error
		if g.mr, err = f.dev.Register(uint64(r.Addr), r.Len, rdma.LocalWrite|rdma.RemoteWrite|rdma.RelaxedOrdering); err != nil {
			return transport.Key{}, err
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.last++
	g.token = uint64(g.mr.RKey ^ mixed(f.last))
	f.regions[f.last] = g
	blob := binary.LittleEndian.AppendUint64(nil, uint64(r.Addr))
	return transport.Key{ID: f.last, Token: g.token, Blob: string(blob)}, nil
}

// Deregister implements transport.Fabric. A peer's later write ends its Conn.
func (f *Fabric) Deregister(k transport.Key) error {
	if !f.begin() {
		return fmt.Errorf("verbs: deregister key %d: %w", k.ID, transport.ErrClosed)
	}
	defer f.tasks.Done()
	f.mu.Lock()
	g, ok := f.regions[k.ID]
	if ok = ok && g.token == k.Token; ok {
		delete(f.regions, k.ID)
	}
	f.mu.Unlock()
	switch {
	case !ok:
		return fmt.Errorf("verbs: deregister key %d: no such key", k.ID)
	case g.empty:
		return nil
	}
	return g.mr.Deregister() // blocks until the NIC does not touch it any more
}

// drop forgets a region at the end of the Fabric.
func (f *Fabric) drop(id uint64) error {
	g := f.regions[id]
	delete(f.regions, id)
	if g.empty {
		return nil
	}
	return g.mr.Deregister()
}

// begin holds off Close until tasks.Done; it is false after Close.
func (f *Fabric) begin() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.closing {
		f.tasks.Add(1)
	}
	return !f.closing
}
