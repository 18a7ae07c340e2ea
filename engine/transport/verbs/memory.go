package verbs

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"slices"

	"golang.org/x/sys/unix"

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

// A region is registered memory, or none where start is end.
type region struct {
	start, end uint64
	reach      uint64 // the largest end of this one and those before it
	id, token  uint64
	mr         rdma.Region
}

func (g *region) deregister() error {
	if g.start == g.end {
		return nil
	}
	return g.mr.Deregister() // blocks until the NIC does not touch it any more
}

// local returns the NIC's key for a source: that of the newest region that contains it, because
// the memory of an older one may be gone.
func (f *Fabric) local(s mem.Span) (lkey uint32, ok bool) {
	start := uint64(s.Addr)
	end, newest := start+s.Len, uint64(0)
	i, _ := slices.BinarySearchFunc(f.regions, start+1, byStart)
	for i--; i >= 0 && f.regions[i].reach >= end; i-- {
		if g := &f.regions[i]; g.end >= end && g.id > newest {
			lkey, newest = g.mr.LKey, g.id
		}
	}
	return lkey, newest != 0
}

func byStart(g region, start uint64) int { return cmp.Compare(g.start, start) }

// reaches works out the reach of regions from i on.
func (f *Fabric) reaches(i int) {
	for ; i < len(f.regions); i++ {
		g := &f.regions[i]
		if g.reach = g.end; i > 0 {
			g.reach = max(g.end, f.regions[i-1].reach)
		}
	}
}

// Register implements transport.Fabric. It may take milliseconds.
func (f *Fabric) Register(r mem.Region) (transport.Key, error) {
	if err := f.CheckRegion(r); err != nil {
		return transport.Key{}, err
	}
	if !f.Begin() {
		return transport.Key{}, fmt.Errorf("verbs: register %d bytes: %w", r.Len, transport.ErrClosed)
	}
	defer f.End()
	g := region{start: uint64(r.Addr), end: uint64(r.Addr) + r.Len}
	if r.Len != 0 {
		var err error
		g.mr, err = f.dev.Register(g.start, r.Len, rdma.LocalWrite|rdma.RemoteWrite|rdma.RelaxedOrdering)
		if errors.Is(err, unix.EFAULT) { // memory that can only be read is good as a source
			g.mr, err = f.dev.Register(g.start, r.Len, rdma.RelaxedOrdering)
		}
		if errors.Is(err, unix.EIO) || errors.Is(err, unix.ENODEV) {
			err = &transport.DeviceError{Err: err}
		}
		if err != nil {
			return transport.Key{}, err
		}
	}
	f.Owner.Lock()
	defer f.Owner.Unlock()
	f.last++
	g.id, g.token = f.last, uint64(g.mr.RKey^mixed(f.last))
	i, _ := slices.BinarySearchFunc(f.regions, g.start, byStart)
	f.regions = slices.Insert(f.regions, i, g)
	f.reaches(i)
	blob := binary.LittleEndian.AppendUint64(nil, uint64(r.Addr))
	return transport.Key{ID: f.last, Token: g.token, Blob: string(blob)}, nil
}

// Deregister implements transport.Fabric. A peer's later write ends its Conn.
func (f *Fabric) Deregister(k transport.Key) {
	f.Owner.Lock()
	defer f.Owner.Unlock()
	i := slices.IndexFunc(f.regions, func(g region) bool { return g.id == k.ID && g.token == k.Token })
	if i < 0 || f.Closing {
		return
	}
	g := f.regions[i]
	f.regions = slices.Delete(f.regions, i, i+1)
	f.reaches(i)
	f.Task(func() {
		_ = g.deregister() // of a device that is gone
		f.Owned(func() { f.Free(k.ID) })
	})
}
