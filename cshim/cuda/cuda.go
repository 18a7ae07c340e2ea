// Package cuda is the CUDA driver as Go sees it: cs_cuda.h, opened at run time.
// It is mechanism: each method is one crossing and returns at once, unless it
// says that it waits. Addresses and handles are numbers. All is safe for
// concurrent use.
package cuda

/*
#cgo LDFLAGS: -ldl
#cgo noescape cs_enqueue
#cgo nocallback cs_enqueue
#cgo nocallback cs_event_record
#cgo nocallback cs_event_query
#include "cs_calls.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"unsafe"
)

// An Error is what a call of the driver gave.
type Error struct {
	Code int
	Text string
}

func (e *Error) Error() string { return e.Text }

// Codes of Error that callers tell apart.
const (
	OutOfMemory   = C.CS_CU_OUT_OF_MEMORY
	AlreadyMapped = C.CS_CU_ALREADY_MAPPED
)

// Is says whether err is, or wraps, an Error with a code.
func Is(err error, code int) bool {
	var e *Error
	return errors.As(err, &e) && e.Code == code
}

// failed is the error of a result, nil for success.
func failed(rc C.int, format string, args ...any) error {
	if rc == C.CS_CU_SUCCESS {
		return nil
	}
	var text [256]C.char
	C.cs_cuda_text(C.cs_result(rc), &text[0], C.size_t(len(text)))
	return &Error{int(rc), fmt.Sprintf("cuda: "+format+": ", args...) + C.GoString(&text[0])}
}

// Open opens the driver. It creates no context. The error says what is missing.
func Open() error {
	var why [256]C.char
	if C.cs_cuda_open(&why[0], C.size_t(len(why))) != 0 {
		return errors.New("cuda: " + C.GoString(&why[0]))
	}
	return nil
}

// Count is how many GPUs are visible to the process. The driver must be open.
func Count() (int, error) {
	var n C.int
	err := failed(C.cs_count(&n), "count the GPUs")
	return int(n), err
}

// Direct is what a NIC has to know of a GPU to use its memory.
type Direct struct {
	Domain, Bus, Slot int32 // on PCI
	Ordering          int32 // what of a NIC's writes the GPU sees in order; see OwnerOrdering
	GPUDirect         bool  // NICs can use its memory
	DMABuf            bool  // ExportDMABuf works
	C2C               bool  // it is joined to its CPU by C2C
}

// OwnerOrdering is the Direct.Ordering from which on the GPU itself sees what a NIC has written when the NIC
// has told the CPU of it.
const OwnerOrdering = C.CS_ORDERING_OWNER

// DirectOf says it of visible GPU ordinal. It needs no context.
func DirectOf(ordinal int) (d Direct, err error) {
	err = failed(C.cs_direct_of(C.int(ordinal), (*C.cs_direct)(unsafe.Pointer(&d))), "ask what gpu %d can do", ordinal)
	return d, err
}

// Direct is DirectOf the GPU.
func (d *Device) Direct() (Direct, error) { return DirectOf(d.ordinal) }

// Device is a GPU whose primary context this process holds, from Retain to its end.
type Device struct {
	ordinal int
	context C.uint64_t
}

// Retain holds the primary context of visible GPU ordinal, which is created if it
// was not. It is not given back: receive buffers may outlive whoever holds them.
func Retain(ordinal int) (*Device, error) {
	d := &Device{ordinal: ordinal}
	if err := failed(C.cs_retain(C.int(ordinal), &d.context), "retain the primary context of gpu %d", ordinal); err != nil {
		return nil, err
	}
	return d, nil
}

// Ordinal is the number of the GPU in this process.
func (d *Device) Ordinal() int { return d.ordinal }

// Stream and Event are numbers of the driver's; 0 is the default stream, and no
// event.
type (
	Stream uint64
	Event  uint64
)

// NewStream makes a stream that does not wait for the default stream.
func (d *Device) NewStream() (Stream, error) {
	var s C.uint64_t
	err := failed(C.cs_stream_create(d.context, 0, &s), "create a stream on gpu %d", d.ordinal)
	return Stream(s), err
}

// FreeStream destroys s when what is enqueued has run.
func (d *Device) FreeStream(s Stream) error {
	return failed(C.cs_stream_destroy(d.context, C.uint64_t(s), nil), "destroy a stream on gpu %d", d.ordinal)
}

// Idle says whether all that is enqueued on s has run. An error is one of the
// context's: nothing enqueued will ever run.
func (d *Device) Idle(s Stream) (bool, error) {
	return d.query(C.cs_stream_query(d.context, C.uint64_t(s), nil), "finish the enqueued work")
}

func (d *Device) query(rc C.int, what string) (bool, error) {
	switch rc {
	case C.CS_CU_SUCCESS: // the arguments of failed would be allocated
		return true, nil
	case C.CS_CU_NOT_READY:
		return false, nil
	}
	return false, failed(rc, "%s on gpu %d", what, d.ordinal)
}

// NewEvent makes an event without timing.
func (d *Device) NewEvent() (Event, error) {
	var e C.uint64_t
	err := failed(C.cs_event_create(d.context, 0, &e), "create an event on gpu %d", d.ordinal)
	return Event(e), err
}

// Record makes e stand for what is enqueued on s so far.
func (d *Device) Record(e Event, s Stream) error {
	return failed(C.cs_event_record(d.context, C.uint64_t(e), C.uint64_t(s)), "record an event on a stream of gpu %d", d.ordinal)
}

// Passed says whether e has been reached.
func (d *Device) Passed(e Event) (bool, error) {
	return d.query(C.cs_event_query(d.context, C.uint64_t(e), nil), "wait for an event")
}

// FreeEvent destroys e.
func (d *Device) FreeEvent(e Event) error {
	return failed(C.cs_event_destroy(d.context, C.uint64_t(e), nil), "destroy an event on gpu %d", d.ordinal)
}

// Copy is one copy, between any two addresses that the device knows.
type Copy struct{ To, From, Len uint64 }

// Enqueue has s wait for event (0: for nothing), make the copies and store value
// at flag (as Pin gave it; 0: nowhere), in this order. It does not wait, and the
// copies are read before it returns.
func (d *Device) Enqueue(s Stream, event Event, copies []Copy, flag, value uint64) error {
	rc := C.cs_enqueue(d.context, C.uint64_t(s), C.uint64_t(event),
		(*C.cs_copy)(unsafe.Pointer(unsafe.SliceData(copies))), C.size_t(len(copies)), C.uint64_t(flag), C.uint64_t(value))
	if rc == C.CS_CU_SUCCESS {
		return nil
	}
	return failed(rc, "enqueue %d copies on gpu %d", len(copies), d.ordinal)
}

// Alloc gives n bytes of the GPU's memory, which Free returns.
func (d *Device) Alloc(n uint64) (uint64, error) {
	var address C.uint64_t
	err := failed(C.cs_alloc(d.context, C.uint64_t(n), &address), "allocate %d bytes on gpu %d", n, d.ordinal)
	return uint64(address), err
}

// Free returns what Alloc gave. It may wait for the GPU.
func (d *Device) Free(address uint64) error {
	return failed(C.cs_free(d.context, C.uint64_t(address), nil), "free memory on gpu %d", d.ordinal)
}

// FreeHost returns pinned memory that the driver gave.
func (d *Device) FreeHost(address uint64) error {
	return failed(C.cs_free_host(d.context, C.uint64_t(address), nil), "free pinned memory on gpu %d", d.ordinal)
}

// Unload unloads kernels.
func (d *Device) Unload(module uint64) error {
	return failed(C.cs_unload(d.context, C.uint64_t(module), nil), "unload kernels on gpu %d", d.ordinal)
}

// Destroy ends another context of the GPU than the one that Retain holds. The address is
// that of a pointer to it, which is NULL from then on.
func (d *Device) Destroy(address uint64) error {
	return failed(C.cs_destroy(d.context, C.uint64_t(address)), "destroy a context on gpu %d", d.ordinal)
}

// Pin keeps host memory, whole pages, in place for the GPU and gives its address
// there. Unpin undoes it.
func (d *Device) Pin(address, n uint64) (uint64, error) {
	var seen C.uint64_t
	err := failed(C.cs_pin(d.context, C.uint64_t(address), C.uint64_t(n), &seen), "pin %d bytes for gpu %d", n, d.ordinal)
	return uint64(seen), err
}

// Unpin lets go of what Pin took.
func (d *Device) Unpin(address uint64) error {
	return failed(C.cs_unpin(d.context, C.uint64_t(address), nil), "unpin memory on gpu %d", d.ordinal)
}

// Memory is what the driver knows of an address.
type Memory struct {
	Base, Len  uint64 // the allocation, or the piece that is mapped there
	ID         uint64 // no other allocation of the process ever has it
	OnGPU      bool   // else on the host, or in both
	LegacyIPC  bool   // ExportIPC works
	Descriptor bool   // ExportFD works
}

// Describe says what is at an address. It fails for memory that the driver does
// not know.
func (d *Device) Describe(address uint64) (m Memory, err error) {
	err = failed(C.cs_describe(d.context, C.uint64_t(address), (*C.cs_memory)(unsafe.Pointer(&m))), "describe the memory at %#x", address)
	return m, err
}

// IPCHandle names an allocation for the other processes of the host.
type IPCHandle [64]byte

// ExportIPC names the allocation at base.
func (d *Device) ExportIPC(base uint64) (h IPCHandle, err error) {
	err = failed(C.cs_ipc_get(d.context, C.uint64_t(base), unsafe.Pointer(&h)), "share the memory at %#x", base)
	return h, err
}

// ImportIPC maps another process's allocation. CloseIPC undoes it.
func (d *Device) ImportIPC(h IPCHandle) (uint64, error) {
	var base C.uint64_t
	err := failed(C.cs_ipc_open(d.context, unsafe.Pointer(&h), &base), "map memory of another process on gpu %d", d.ordinal)
	return uint64(base), err
}

// CloseIPC unmaps what ImportIPC gave.
func (d *Device) CloseIPC(base uint64) error {
	return failed(C.cs_ipc_close(d.context, C.uint64_t(base), nil), "unmap memory of another process on gpu %d", d.ordinal)
}

// Reach lets d use the memory of visible GPU ordinal, whose primary context stays held.
func (d *Device) Reach(ordinal int) error {
	if ordinal == d.ordinal {
		return nil
	}
	peer, err := Retain(ordinal)
	if err != nil {
		return err
	}
	return failed(C.cs_peer(d.context, peer.context), "let gpu %d use the memory of gpu %d", d.ordinal, ordinal)
}

// ExportFD gives the mapped piece of memory at address as a descriptor, which is
// the caller's.
func (d *Device) ExportFD(address uint64) (int, error) {
	var fd C.int
	err := failed(C.cs_export_fd(d.context, C.uint64_t(address), &fd), "export the memory at %#x", address)
	return int(fd), err
}

// ExportDMABuf gives n bytes at address as a descriptor for the drivers of NICs, which is the caller's. Both are
// whole pages of the host, of one allocation, or of a reserved range that is mapped there.
func (d *Device) ExportDMABuf(address, n uint64) (int, error) {
	var fd C.int
	err := failed(C.cs_export_dma_buf(d.context, C.uint64_t(address), C.uint64_t(n), &fd), "export %d bytes at %#x of gpu %d as a dma-buf", n, address, d.ordinal)
	return int(fd), err
}

// MapFDs maps pieces of other processes' memory one behind the other. The
// descriptors stay the caller's. UnmapFDs, with the same lengths, undoes it.
func (d *Device) MapFDs(fds []int32, lens []uint64) (uint64, error) {
	var base C.uint64_t
	err := failed(C.cs_map_fds(d.context, C.int(d.ordinal), (*C.int)(unsafe.Pointer(unsafe.SliceData(fds))),
		(*C.uint64_t)(unsafe.Pointer(unsafe.SliceData(lens))), C.size_t(len(lens)), &base), "map %d pieces of memory on gpu %d", len(lens), d.ordinal)
	return uint64(base), err
}

// UnmapFDs undoes MapFDs.
func (d *Device) UnmapFDs(base uint64, lens []uint64) error {
	return failed(C.cs_unmap_fds(d.context, C.uint64_t(base), (*C.uint64_t)(unsafe.Pointer(unsafe.SliceData(lens))), C.size_t(len(lens))),
		"unmap %d pieces of memory on gpu %d", len(lens), d.ordinal)
}
