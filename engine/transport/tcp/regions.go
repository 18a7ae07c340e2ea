package tcp

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"

	"fserver/engine/mem"
	"fserver/engine/transport"
)

// regions is the table of what peers may write into. The owner of the Fabric
// guards it.
type regions struct {
	last uint64 // the newest ID
	byID map[uint64]region
}

type region struct {
	mem.Region
	token uint64
	only  transport.Conn // that may write here; nil: all
}

func (t *regions) add(r mem.Region) (transport.Key, error) {
	if r.Dev != mem.CPU {
		return transport.Key{}, fmt.Errorf("tcp: register %d bytes on %v: want host memory", r.Len, r.Dev)
	}
	if _, carry := bits.Add64(uint64(r.Addr), r.Len, 0); carry != 0 || r.Addr == 0 && r.Len > 0 {
		return transport.Key{}, fmt.Errorf("tcp: register %d bytes at %#x: not a range of addresses", r.Len, r.Addr)
	}
	var b [8]byte
	rand.Read(b[:]) // never fails
	t.last++
	k := transport.Key{ID: t.last, Token: binary.LittleEndian.Uint64(b[:])}
	t.byID[k.ID] = region{Region: r, token: k.Token}
	return k, nil
}

func (t *regions) bind(k transport.Key, c transport.Conn) error {
	r, ok := t.byID[k.ID]
	if !ok || r.token != k.Token {
		return fmt.Errorf("tcp: bind key %d to %s: no such key", k.ID, c.Remote())
	}
	r.only = c
	t.byID[k.ID] = r
	return nil
}

func (t *regions) remove(k transport.Key) error {
	if r, ok := t.byID[k.ID]; !ok || r.token != k.Token {
		return fmt.Errorf("tcp: deregister key %d: no such key", k.ID)
	}
	delete(t.byID, k.ID)
	return nil
}

var (
	errNoKey  = errors.New("no such key, or a wrong token")
	errNotIts = errors.New("the key was given to another peer")
)

// target is the memory that a write with header h from c goes to.
func (t *regions) target(h *header, c transport.Conn) (mem.Span, error) {
	r, ok := t.byID[h.key]
	bad := error(nil)
	switch {
	case !ok || r.token != h.token:
		bad = errNoKey
	case r.only != nil && r.only != c:
		bad = errNotIts
	}
	if bad != nil {
		return mem.Span{}, fmt.Errorf("the peer wrote %d bytes at offset %d of key %d: %w", h.length, h.offset, h.key, bad)
	}
	s, err := r.Slice(h.offset, h.length)
	if err != nil {
		return mem.Span{}, fmt.Errorf("the peer wrote out of bounds of key %d: %w", h.key, err)
	}
	return s, nil
}
