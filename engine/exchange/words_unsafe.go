package exchange

import (
	"sync/atomic"
	"unsafe"

	"fserver/engine/mem"
)

// wordsIn lays n words over memory that C can watch.
func wordsIn(r mem.Region, n int) []atomic.Uint64 {
	return unsafe.Slice((*atomic.Uint64)(unsafe.Pointer(r.Span().Ptr())), n)
}

// WordAt lays a word over memory that C has given, at an address that 4 divides; nil
// for address 0.
func WordAt(address uintptr) *atomic.Uint32 {
	return (*atomic.Uint32)(unsafe.Pointer(mem.Span{Addr: address, Len: 4}.Ptr()))
}
