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
