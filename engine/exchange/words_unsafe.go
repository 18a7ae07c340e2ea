package exchange

import (
	"sync/atomic"
	"unsafe"

	"fserver/engine/mem"
)

// WordsIn lays n words over memory that C can watch.
func WordsIn(r mem.Region, n int) []atomic.Uint64 {
	return unsafe.Slice((*atomic.Uint64)(unsafe.Pointer(r.Span().Ptr())), n)
}

// WordsAt lays WatchWords words over memory that C has given, at an address that 4 divides;
// nil for address 0.
func WordsAt(address uintptr) []atomic.Uint32 {
	if address == 0 {
		return nil
	}
	return unsafe.Slice((*atomic.Uint32)(unsafe.Pointer(mem.Span{Addr: address, Len: 4 * WatchWords}.Ptr())), WatchWords)
}
