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
