package link

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"sync/atomic"

	"fserver/engine/mem"
	"fserver/engine/transport"
)

// Regions is the table of what peers may write into, where a CPU checks that. The number of a
// region is its slot, and above that how often the slot has been used. The owner of the Fabric
// guards it, and the exported methods with a Key make themselves the owner.
type Regions struct {
	f     *Fabric
	slots []region
	free  []uint32
	// Shared, if there is one, is the same for peers that write by themselves, in memory
	// that they can only read.
	Shared []Entry
}

// SlotLimit is how many regions there may be.
const (
	slotBits  = 20
	SlotLimit = 1 << slotBits
)

// An Entry is a region in a table that is shared. Its Fabric alone stores to it, ID last
// when it comes and first when it goes, and no ID is used twice: who finds the same ID
// before and after has read one region.
type Entry struct{ ID, Token, Addr, Len atomic.Uint64 }

type region struct {
	mem.Region
	id, token uint64 // id is 0 when there is none
	uses      uint64
	only      transport.Conn // that may write here; nil: all
}

// Init makes t the table of f.
func (t *Regions) Init(f *Fabric) { t.f = f }

// CheckRegion says what speaks against registering r with f.
func (f *Fabric) CheckRegion(r mem.Region) error {
	if r.Dev != mem.CPU {
		return fmt.Errorf("%s: register %d bytes on %v: want host memory", f.kind.Name, r.Len, r.Dev)
	}
	if _, carry := bits.Add64(uint64(r.Addr), r.Len, 0); carry != 0 || r.Addr == 0 && r.Len > 0 {
		return fmt.Errorf("%s: register %d bytes at %#x: not a range of addresses", f.kind.Name, r.Len, r.Addr)
	}
	return nil
}

// Register implements transport.Fabric.
func (t *Regions) Register(r mem.Region) (transport.Key, error) {
	if err := t.f.CheckRegion(r); err != nil {
		return transport.Key{}, err
	}
	t.f.Owner.Lock()
	defer t.f.Owner.Unlock()
	if t.f.Closing {
		return transport.Key{}, fmt.Errorf("%s: register %d bytes: %w", t.f.kind.Name, r.Len, transport.ErrClosed)
	}
	if len(t.free) == 0 {
		if len(t.slots) == SlotLimit {
			return transport.Key{}, fmt.Errorf("%s: register %d bytes: %d regions are registered, which is the limit (deregister regions that are not used)", t.f.kind.Name, r.Len, SlotLimit)
		}
		t.free = append(t.free, uint32(len(t.slots)))
		t.slots = append(t.slots, region{})
	}
	last := len(t.free) - 1
	slot := t.free[last]
	t.free = t.free[:last]
	var b [8]byte
	rand.Read(b[:]) // never fails
	s := &t.slots[slot]
	s.uses++
	s.Region, s.id, s.token = r, s.uses<<slotBits|uint64(slot), binary.NativeEndian.Uint64(b[:])
	if t.Shared != nil {
		e := &t.Shared[slot]
		e.Token.Store(s.token)
		e.Addr.Store(uint64(r.Addr))
		e.Len.Store(r.Len)
		e.ID.Store(s.id)
	}
	return transport.Key{ID: s.id, Token: s.token}, nil
}

// find is the region of a key, or nil.
func (t *Regions) find(id, token uint64) *region {
	if slot := id % SlotLimit; id != 0 && slot < uint64(len(t.slots)) {
		if s := &t.slots[slot]; s.id == id && s.token == token {
			return s
		}
	}
	return nil
}

// Bind implements transport.Fabric.
func (t *Regions) Bind(k transport.Key, c transport.Conn) error {
	t.f.Owner.Lock()
	defer t.f.Owner.Unlock()
	s := t.find(k.ID, k.Token)
	if s == nil {
		return fmt.Errorf("%s: bind key %d to %s: no such key", t.f.kind.Name, k.ID, c.Peer().Remote)
	}
	s.only = c
	return nil
}

// Remove ends what k allows, if that is a key of an open Fabric. It is for the owner.
func (t *Regions) Remove(k transport.Key) (found bool) {
	s := t.find(k.ID, k.Token)
	if s == nil || t.f.Closing {
		return false
	}
	slot := uint32(s.id % SlotLimit)
	if t.Shared != nil {
		t.Shared[slot].ID.Store(0)
	}
	s.id, s.only = 0, nil
	t.free = append(t.free, slot)
	return true
}

// ErrNoKey is the reason of a write with a key that was never given, or has ended.
var ErrNoKey = errors.New("no such key, or a wrong token")

// ErrNotIts is that of a write with a key that another peer was given.
var ErrNotIts = errors.New("the key was given to another peer")

// ErrNotInUse is that of a write to memory that no operation of ours uses, and that may be gone.
var ErrNotInUse = errors.New("no operation of this process uses the memory")

// Idle reports whether the region of a key, which is registered, is in use for no operation. It is for the owner.
func (t *Regions) Idle(id uint64) bool { return t.slots[id%SlotLimit].Idle() }

// Target is the memory that a write of n bytes from c goes to. It is for the owner.
func (t *Regions) Target(c transport.Conn, id, token, off, n uint64) (mem.Span, error) {
	s := t.find(id, token)
	bad := error(nil)
	switch {
	case s == nil:
		bad = ErrNoKey
	case s.only != nil && s.only != c:
		bad = ErrNotIts
	case s.Idle():
		bad = ErrNotInUse
	}
	if bad != nil {
		return mem.Span{}, fmt.Errorf("the peer wrote %d bytes at offset %d of key %d: %w", n, off, id, bad)
	}
	span, err := s.Slice(off, n)
	if err != nil {
		return mem.Span{}, fmt.Errorf("the peer wrote out of bounds of key %d: %w", id, err)
	}
	return span, nil
}
