package verbs

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	rdma "fserver/cshim/verbs"
	"fserver/engine/mem"
	"fserver/engine/transport"
)

// A key of ours: ID is the number of the region, Token the NIC's rkey, mixed with ID so that
// no key works with another's number. Blob is the address. Of memory of a GPU, and of a region in parts, a byte of flags
// follows. Of parts, their length and the rkeys of all but the first one follow, mixed likewise. All is little-endian.

const (
	onGPU   = 1
	inParts = 2

	blobPlain = 8
	blobParts = blobPlain + 1 + 8
	partsMost = 128
	partLeast = 4096 // bytes; shorter ones that a peer tells of would make many requests
)

// mixed is what joins number and rkey of a key.
func mixed(id uint64) uint32 {
	hi, lo := bits.Mul64(id^0x9e3779b97f4a7c15, 0xbf58476d1ce4e5b9)
	return uint32(hi^lo) ^ uint32((hi^lo)>>32)
}

// A remote is what the NIC is to be told of a key.
type remote struct {
	address uint64
	id      uint64
	token   uint32
	gpu     bool
	part    uint64 // bytes of each part but the last
	more    string // the tokens of the second part and those behind it
}

// remoteOf reads a key. Of one that no Fabric like this has made it is nonsense, which the peer's NIC refuses.
func remoteOf(k *transport.Key) (r remote) {
	r = remote{id: k.ID, token: uint32(k.Token), part: math.MaxUint64}
	b := k.Blob
	if len(b) < blobPlain {
		return r
	}
	r.address = number(b)
	if len(b) > blobPlain {
		r.gpu = b[blobPlain]&onGPU != 0
	}
	if n := len(b) - blobParts; n >= 0 && n%4 == 0 && b[blobPlain]&inParts != 0 {
		r.part, r.more = max(number(b[blobPlain+1:]), partLeast), b[blobParts:]
	}
	return r
}

// at returns the rkey for an offset, and how many bytes from there on it is good for.
func (r *remote) at(off uint64) (rkey uint32, n uint64) {
	token, i := r.token, off/r.part
	if i > 0 && i <= uint64(len(r.more)/4) {
		var b [4]byte
		copy(b[:], r.more[4*(i-1):])
		token = binary.LittleEndian.Uint32(b[:])
	}
	return token ^ mixed(r.id), r.part - off%r.part
}

func number(b string) uint64 {
	var to [8]byte
	copy(to[:], b)
	return binary.LittleEndian.Uint64(to[:])
}

// A region is registered memory, or none where start is end.
type region struct {
	start, end uint64
	reach      uint64 // the largest end of this one and those before it
	id, token  uint64
	cut        uint64 // bytes of each part but the last
	mrs        []rdma.Region
}

// deregister blocks until the NIC does not touch the memory any more.
func (g *region) deregister() (err error) {
	for _, mr := range g.mrs {
		err = errors.Join(err, mr.Deregister())
	}
	g.mrs = nil
	return err
}

// key is what a peer is given.
func (g *region) key(dev mem.Device) transport.Key {
	b := binary.LittleEndian.AppendUint64(nil, g.start)
	flags := byte(0)
	if dev != mem.CPU {
		flags = onGPU
	}
	if len(g.mrs) > 1 {
		flags |= inParts
	}
	if flags != 0 {
		b = append(b, flags)
	}
	if len(g.mrs) > 1 {
		b = binary.LittleEndian.AppendUint64(b, g.cut)
		for _, mr := range g.mrs[1:] {
			b = binary.LittleEndian.AppendUint32(b, mr.RKey^mixed(g.id))
		}
	}
	return transport.Key{ID: g.id, Token: g.token, Blob: string(b)}
}

// local returns the NIC's key for the beginning of a source, and for how many bytes it is good: that of the newest region
// that contains the source, because the memory of an older one may be gone.
func (f *Fabric) local(s mem.Span) (lkey uint32, n uint64) {
	start := uint64(s.Addr)
	end, newest := start+s.Len, (*region)(nil)
	i, _ := slices.BinarySearchFunc(f.regions, start+1, byStart)
	for i--; i >= 0 && f.regions[i].reach >= end; i-- {
		if g := &f.regions[i]; g.end >= end && (newest == nil || g.id > newest.id) && len(g.mrs) > 0 {
			newest = g
		}
	}
	if newest == nil || s.Len == 0 {
		return 0, 0
	}
	off := start - newest.start
	return newest.mrs[off/newest.cut].LKey, min(s.Len, newest.cut-off%newest.cut)
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

// registerParts registers a region in as many parts as the device needs.
func (f *Fabric) registerParts(g *region, register func(at, n uint64) (rdma.Region, error)) error {
	for at := g.start; at < g.end; at += g.cut {
		mr, err := register(at, min(g.cut, g.end-at))
		if err != nil {
			_ = g.deregister()
			return err
		}
		g.mrs = append(g.mrs, mr)
	}
	return nil
}

// regionOf is that of r, not registered yet.
func (f *Fabric) regionOf(r mem.Region) (region, error) {
	g := region{start: uint64(r.Addr), end: uint64(r.Addr) + r.Len, cut: max(r.Len, 1)}
	if most := f.dev.MaxMR; most != 0 && r.Len > most {
		page := uint64(os.Getpagesize())
		g.cut = max(most&^(page-1), page)
	}
	if n := (r.Len + g.cut - 1) / g.cut; n > partsMost {
		return g, fmt.Errorf("verbs: register %d bytes: %s registers at most %d bytes at a time, so that takes %d parts, and there are at most %d (send smaller tensors)", r.Len, f.dev.Name, f.dev.MaxMR, n, partsMost)
	}
	return g, nil
}

// register registers r with the NIC, which may take milliseconds.
func (f *Fabric) register(r mem.Region) (g region, err error) {
	if g, err = f.regionOf(r); err != nil || r.Len == 0 {
		return g, err
	}
	access := rdma.LocalWrite | rdma.RemoteWrite | rdma.RelaxedOrdering
	host := func(at, n uint64) (rdma.Region, error) { return f.dev.Register(at, n, access) }
	if r.Dev != mem.CPU {
		err = f.registerGPU(&g, r, access)
	} else if err = f.registerParts(&g, host); errors.Is(err, unix.EFAULT) { // memory that can only be read is good as a source
		access = rdma.RelaxedOrdering
		err = f.registerParts(&g, host)
	}
	return g, deviceError(err)
}

// deviceError marks an error with which the kernel says that the device is gone.
func deviceError(err error) error {
	if errors.Is(err, unix.EIO) || errors.Is(err, unix.ENODEV) {
		return &transport.DeviceError{Err: err}
	}
	return err
}

// Register implements transport.Fabric. It may take milliseconds. Memory of the GPU of Caps that the NIC does not take is
// a *DirectError.
func (f *Fabric) Register(r mem.Region) (transport.Key, error) {
	where := r
	if where.Dev == f.direct.at {
		where.Dev = mem.CPU
	}
	if err := f.CheckRegion(where); err != nil {
		return transport.Key{}, err
	}
	if !f.Begin() {
		return transport.Key{}, fmt.Errorf("verbs: register %d bytes: %w", r.Len, transport.ErrClosed)
	}
	defer f.End()
	g, err := f.register(r)
	if err != nil {
		return transport.Key{}, err
	}
	f.Owner.Lock()
	defer f.Owner.Unlock()
	f.last++
	g.id, g.token = f.last, uint64(mixed(f.last))
	if len(g.mrs) > 0 {
		g.token ^= uint64(g.mrs[0].RKey)
	}
	i, _ := slices.BinarySearchFunc(f.regions, g.start, byStart)
	f.regions = slices.Insert(f.regions, i, g)
	f.reaches(i)
	return g.key(r.Dev), nil
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
