package channel

import (
	"sync/atomic"
	"unsafe"

	"fserver/engine/mem"
)

// WordsAt lays WatchWords words over memory that C has given, at an address that 4 divides;
// nil for address 0.
func WordsAt(address uintptr) []atomic.Uint32 {
	if address == 0 {
		return nil
	}
	return unsafe.Slice((*atomic.Uint32)(unsafe.Pointer(mem.Span{Addr: address, Len: 4 * WatchWords}.Ptr())), WatchWords)
}

// ProxyWordsAt lays the words of a proxy over memory that C has given, at an address that 64 divides.
func ProxyWordsAt(address uintptr) []atomic.Int64 {
	return unsafe.Slice((*atomic.Int64)(unsafe.Pointer(mem.Span{Addr: address, Len: 8 * ProxyWords}.Ptr())), ProxyWords)
}

// CountsAt lays n counts of 64 bits over memory that C has given, at an address that 8 divides.
func CountsAt(address uintptr, n int) []atomic.Int64 {
	if n == 0 || address == 0 {
		return nil
	}
	return unsafe.Slice((*atomic.Int64)(unsafe.Pointer(mem.Span{Addr: address, Len: 8 * uint64(n)}.Ptr())), n)
}
