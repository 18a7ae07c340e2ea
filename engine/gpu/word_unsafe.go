package gpu

import (
	"sync/atomic"
	"unsafe"

	"fserver/engine/mem"
)

// wordIn is the word at the start of a region, which stays mapped while it is used.
func wordIn(r mem.Region) *atomic.Uint64 { return (*atomic.Uint64)(unsafe.Pointer(r.Span().Ptr())) }
