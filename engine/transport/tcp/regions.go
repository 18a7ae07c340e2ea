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
}

func (t *regions) add(r mem.Region) (transport.Key, error) {
	if r.Dev != mem.CPU {
		return transport.Key{}, fmt.Errorf("tcp: register %d bytes on %v: only host memory can be reached", r.Len, r.Dev)
	}
	if _, carry := bits.Add64(uint64(r.Addr), r.Len, 0); carry != 0 || r.Addr == 0 && r.Len > 0 {
		return transport.Key{}, fmt.Errorf("tcp: register %d bytes at %#x: not a range of addresses", r.Len, r.Addr)
	}
	var b [8]byte
	rand.Read(b[:]) // never fails
	t.last++
	k := transport.Key{ID: t.last, Token: binary.LittleEndian.Uint64(b[:])}
	t.byID[k.ID] = region{r, k.Token}
	return k, nil
}

func (t *regions) remove(k transport.Key) error {
	if r, ok := t.byID[k.ID]; !ok || r.token != k.Token {
		return fmt.Errorf("tcp: deregister key %d: no such key", k.ID)
	}
	delete(t.byID, k.ID)
	return nil
}

var errNoKey = errors.New("no such key, or a wrong token")

// target is the memory that a write with header h goes to.
func (t *regions) target(h *header) (mem.Span, error) {
	r, ok := t.byID[h.key]
	if !ok || r.token != h.token {
		return mem.Span{}, fmt.Errorf("the peer wrote %d bytes at offset %d of key %d: %w", h.length, h.offset, h.key, errNoKey)
	}
	s, err := r.Slice(h.offset, h.length)
	if err != nil {
		return mem.Span{}, fmt.Errorf("the peer wrote out of bounds of key %d: %w", h.key, err)
	}
	return s, nil
}
