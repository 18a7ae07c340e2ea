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

// Map gives n bytes (n > 0) of zeroed, page-aligned host memory outside the Go
// heap. Unmap returns it.
func Map(n uint64) (Region, error) {
	if n == 0 || n > maxMap {
		return Region{}, fmt.Errorf("mem: map %d bytes: want 1 to 2^46", n)
	}
	b, err := unix.Mmap(-1, 0, int(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return Region{}, fmt.Errorf("mem: map %d bytes: %w", n, err)
	}
	s := Of(b)
	return Region{s.Addr, s.Len, CPU}, nil
}

// Unmap returns memory that Map gave.
func Unmap(r Region) error {
	if err := unix.Munmap(r.Span().Bytes()); err != nil {
		return fmt.Errorf("mem: unmap %d bytes: %w", r.Len, err)
	}
	return nil
}
