package cma

import (
	"fmt"

	"fserver/engine/mem"
	"fserver/engine/transport/link"
)

// target is where n bytes at off of a key are in the memory of the peer whose
// table t is. It holds for as long as the entry keeps its id.
func (t table) target(id, token, off, n uint64) (mem.Span, error) {
	e := &t[id%link.SlotLimit]
	if id == 0 || e.ID.Load() != id || e.Token.Load() != token {
		return mem.Span{}, fmt.Errorf("write %d bytes at offset %d of the peer's key %d: %w", n, off, id, link.ErrNoKey)
	}
	span, err := (mem.Region{Addr: uintptr(e.Addr.Load()), Len: e.Len.Load()}).Slice(off, n)
	if err != nil {
		return mem.Span{}, fmt.Errorf("write out of bounds of the peer's key %d: %w", id, err)
	}
	return span, nil
}
