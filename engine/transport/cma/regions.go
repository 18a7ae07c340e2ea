package cma

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"

	"fserver/engine/mem"
	"fserver/engine/transport"
)

// regions is what peers may write into. The owner of the Fabric guards it.
// slots is what this side checks by; shared is the same for peers that write by
// themselves, in memory that they can only read. The number of a region is its
// slot, and above that how often the slot has been used.
type regions struct {
	slots  []region
	free   []uint32
	shared table
}

type region struct {
	mem.Region
	id, token uint64 // id is 0 when there is none
	uses      uint64
	only      transport.Conn // that may write here; nil: all
}

func (t *regions) add(r mem.Region) (transport.Key, error) {
	if r.Dev != mem.CPU {
		return transport.Key{}, fmt.Errorf("cma: register %d bytes on %v: want host memory", r.Len, r.Dev)
	}
	if _, carry := bits.Add64(uint64(r.Addr), r.Len, 0); carry != 0 || r.Addr == 0 && r.Len > 0 {
		return transport.Key{}, fmt.Errorf("cma: register %d bytes at %#x: not a range of addresses", r.Len, r.Addr)
	}
	if len(t.free) == 0 {
		if len(t.slots) == maxSlots {
			return transport.Key{}, fmt.Errorf("cma: register %d bytes: %d regions are registered, which is the limit (deregister regions that are not used)", r.Len, maxSlots)
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
	e := &t.shared[slot]
	e.token.Store(s.token)
	e.addr.Store(uint64(r.Addr))
	e.n.Store(r.Len)
	e.id.Store(s.id)
	return transport.Key{ID: s.id, Token: s.token}, nil
}

// find is the region of a key, or nil.
func (t *regions) find(id, token uint64) *region {
	if slot := id % maxSlots; id != 0 && slot < uint64(len(t.slots)) {
		if s := &t.slots[slot]; s.id == id && s.token == token {
			return s
		}
	}
	return nil
}

func (t *regions) bind(k transport.Key, c transport.Conn) error {
	s := t.find(k.ID, k.Token)
	if s == nil {
		return fmt.Errorf("cma: bind key %d to %s: no such key", k.ID, c.Remote())
	}
	s.only = c
	return nil
}

func (t *regions) remove(k transport.Key) error {
	s := t.find(k.ID, k.Token)
	if s == nil {
		return fmt.Errorf("cma: deregister key %d: no such key", k.ID)
	}
	slot := uint32(s.id % maxSlots)
	t.shared[slot].id.Store(0)
	s.id, s.only = 0, nil
	t.free = append(t.free, slot)
	return nil
}

var (
	errNoKey  = errors.New("no such key, or a wrong token")
	errNotIts = errors.New("the key was given to another peer")
)

// target is the memory that a write from c goes to.
func (t *regions) target(c transport.Conn, id, token, off, n uint64) (mem.Span, error) {
	s := t.find(id, token)
	bad := error(nil)
	switch {
	case s == nil:
		bad = errNoKey
	case s.only != nil && s.only != c:
		bad = errNotIts
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

// target is where n bytes at off of a key are in the memory of the peer whose
// table t is. It holds for as long as the entry keeps its id.
func (t table) target(id, token, off, n uint64) (mem.Span, error) {
	e := &t[id%maxSlots]
	if id == 0 || e.id.Load() != id || e.token.Load() != token {
		return mem.Span{}, fmt.Errorf("write %d bytes at offset %d of the peer's key %d: %w", n, off, id, errNoKey)
	}
	span, err := (mem.Region{Addr: uintptr(e.addr.Load()), Len: e.n.Load()}).Slice(off, n)
	if err != nil {
		return mem.Span{}, fmt.Errorf("write out of bounds of the peer's key %d: %w", id, err)
	}
	return span, nil
}
