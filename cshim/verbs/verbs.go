// Package verbs is RDMA verbs as Go sees them: cs_verbs.h, whose library is opened
// at run time. It is mechanism: each method is one crossing. Memory is named by
// address, because none of it is Go's.
//
// At a time one goroutine may be inside PostSend and PostRecv of all queue pairs of
// a Device. Everything else is safe for concurrent use, as long as nothing is used
// after its Destroy or Close.
package verbs

/*
#cgo LDFLAGS: -ldl
#cgo noescape cs_ib_post_send
#cgo nocallback cs_ib_post_send
#cgo noescape cs_ib_post_recv
#cgo nocallback cs_ib_post_recv
#cgo noescape cs_ib_poll
#cgo nocallback cs_ib_poll
#cgo noescape cs_ib_quiet
#cgo nocallback cs_ib_quiet
#cgo nocallback cs_ib_arm
#cgo noescape cs_ib_async
#cgo nocallback cs_ib_async
#include <stdlib.h>
#include "cs_verbs.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Open opens the library with that name. The first one that opens is the process's, and
// another name is an error from then on. Empty means the one that is open, or else
// libibverbs.so.1. The error says what is missing.
func Open(library string) error {
	name := C.CString(library)
	defer C.free(unsafe.Pointer(name))
	var why [512]C.char
	if rc := C.cs_ib_open(name, &why[0], C.size_t(len(why))); rc != 0 {
		return errors.New("verbs: " + C.GoString(&why[0]))
	}
	return nil
}

// Names lists the devices that can be opened. The library must be open.
func Names() ([]string, error) {
	var found [64]C.cs_ib_name
	var n C.int
	if rc := C.cs_ib_list(&found[0], C.int(len(found)), &n); rc != 0 {
		return nil, failed(rc, "list the devices")
	}
	var names []string
	for _, d := range found[:min(int(n), len(found))] {
		names = append(names, C.GoString(&d.name[0]))
	}
	return names, nil
}

// A Device is an open device with a protection domain, in which everything that is
// made of it lies.
type Device struct {
	Name string
	Facts
	c *C.cs_ib_device
}

// Facts are what opening a device tells of it.
type Facts struct {
	MaxMR         uint64 // bytes that one registration may have; 0: any
	MaxQP, MaxCQE int32
	Ports         int32 // numbered from 1
	FD            int32 // readable when Async has something; the device's
	LockFree      bool  // posting takes no lock of the library
}

// OpenDevice opens the device with a name.
func OpenDevice(name string) (*Device, error) {
	d := &Device{Name: name}
	s := C.CString(name)
	defer C.free(unsafe.Pointer(s))
	if rc := C.cs_ib_device_open(s, &d.c, (*C.cs_ib_facts)(unsafe.Pointer(&d.Facts))); rc != 0 {
		return nil, failed(rc, "open %s", name)
	}
	return d, nil
}

// Close closes the device. All that was made of it must be destroyed.
func (d *Device) Close() error { return failed(C.cs_ib_device_close(d.c), "close %s", d.Name) }

// A Port is the state of one port.
type Port struct {
	MTU      int32 // bytes that a packet carries at most now
	GIDs     int32 // length of the GID table
	LID      int32 // InfiniBand
	Active   bool
	Ethernet bool // RoCE; else InfiniBand
	Global   bool // each way is by GID: Ethernet, and InfiniBand ports that require it
}

// Port asks for port number, from 1.
func (d *Device) Port(number int) (p Port, err error) {
	rc := C.cs_ib_port_of(d.c, C.int(number), (*C.cs_ib_port)(unsafe.Pointer(&p)))
	return p, failed(rc, "ask for port %d of %s", number, d.Name)
}

// GIDs are the valid entries of the GID table of a port, in the order of the table.
func (d *Device) GIDs(port int) ([]GID, error) {
	var n C.int
	found := make([]GID, 256)
	rc := C.cs_ib_gids(d.c, C.int(port), (*C.cs_ib_gid)(unsafe.Pointer(&found[0])), C.int(len(found)), &n)
	return found[:n], failed(rc, "read the GID table of port %d of %s", port, d.Name)
}

// Async takes one asynchronous event; false means that there is none.
func (d *Device) Async() (Event, bool, error) {
	var e C.cs_ib_event
	rc := C.cs_ib_async(d.c, &e)
	switch {
	case rc == 0:
		return Event{EventType(e._type), uint32(e.qp)}, true, nil
	case again(rc): // as a rule, so nothing is made of it
		return Event{}, false, nil
	}
	return Event{}, false, failed(rc, "take an event of %s", d.Name)
}

// Access says what a registration allows.
type Access int

// The bits of Access. A peer can write only where we can.
const (
	LocalWrite      Access = C.CS_IB_LOCAL_WRITE
	RemoteWrite     Access = C.CS_IB_REMOTE_WRITE
	RelaxedOrdering Access = C.CS_IB_RELAXED_ORDERING // where the device knows it
	RemoteRead      Access = C.CS_IB_REMOTE_READ      // over a queue pair that is Readable
)

// A Region is registered memory.
type Region struct {
	LKey, RKey uint32
	c          *C.cs_ib_mr
}

// Register pins n bytes at address and makes them known to the device, which may
// take milliseconds.
func (d *Device) Register(address, n uint64, access Access) (Region, error) {
	var r Region
	rc := C.cs_ib_register(d.c, C.uint64_t(address), C.uint64_t(n), C.int(access), &r.c, (*C.uint32_t)(&r.LKey), (*C.uint32_t)(&r.RKey))
	if rc == 0 {
		return r, nil
	}
	err := failed(rc, "register %d bytes at %#x on %s", n, address, d.Name)
	return Region{}, fmt.Errorf("%w%s", err, lockedMemory(errno(rc)))
}

// DMABuf says why RegisterDMABuf cannot work with the device; nil: it can.
func (d *Device) DMABuf() error {
	switch rc := C.cs_ib_dma_buf(d.c); errno(rc) {
	case 0:
		return nil
	case unix.ENOSYS:
		return errors.New("verbs: libibverbs has no function ibv_reg_dmabuf_mr (want rdma-core 34 or later)")
	case unix.EOPNOTSUPP:
		return fmt.Errorf("verbs: the driver of %s takes no dma-buf (want Linux 5.12 or later, and a NIC whose driver has it, such as mlx5)", d.Name)
	default:
		return failed(rc, "ask whether %s takes a dma-buf", d.Name)
	}
}

// RegisterDMABuf is Register of n bytes at an offset of a dma-buf, whose descriptor stays the caller's. Requests
// name the bytes from address on, which has the same place in its page as the offset.
func (d *Device) RegisterDMABuf(fd int, offset, n, address uint64, access Access) (Region, error) {
	var r Region
	rc := C.cs_ib_register_dma_buf(d.c, C.int(fd), C.uint64_t(offset), C.uint64_t(n), C.uint64_t(address), C.int(access), &r.c, (*C.uint32_t)(&r.LKey), (*C.uint32_t)(&r.RKey))
	if rc == 0 {
		return r, nil
	}
	return Region{}, failed(rc, "register %d bytes at offset %d of a dma-buf on %s", n, offset, d.Name)
}

// Deregister lets go of the memory. It may block.
func (r Region) Deregister() error { return failed(C.cs_ib_deregister(r.c), "deregister memory") }

// A CQ is a queue of completions.
type CQ struct {
	Entries int // how many completions there is room for
	FD      int // readable when a completion has come since Arm, until Quiet
	c       C.cs_ib_cq
}

// NewCQ makes a queue with room for at least entries completions. It is for its
// users to see that there are never more.
func (d *Device) NewCQ(entries int) (*CQ, error) {
	n, fd := C.int(entries), C.int(0)
	q := &CQ{}
	if rc := C.cs_ib_cq_create(d.c, &n, &q.c, &fd); rc != 0 {
		return nil, failed(rc, "create a completion queue of %d entries on %s", entries, d.Name)
	}
	q.Entries, q.FD = int(n), int(fd)
	return q, nil
}

// Destroy destroys the queue. All queue pairs that complete on it must be gone.
func (q *CQ) Destroy() error { return failed(C.cs_ib_cq_destroy(q.c), "destroy a completion queue") }

// Arm asks for FD to become readable with the next completion. One that has come
// before does not count, so poll again after it.
func (q *CQ) Arm() error { return failed(C.cs_ib_arm(q.c), "arm a completion queue") }

// Quiet takes what makes FD readable, and says how many events there were.
func (q *CQ) Quiet() (int, error) {
	var n C.int
	rc := C.cs_ib_quiet(q.c, &n)
	return int(n), failed(rc, "take the events of a completion queue")
}

// Poll fills completions with what has come, and says how many there are.
func (q *CQ) Poll(completions []Completion) (int, error) {
	var n C.int
	rc := C.cs_ib_poll(q.c, (*C.cs_ib_wc)(unsafe.Pointer(unsafe.SliceData(completions))), C.int(len(completions)), &n)
	if rc != 0 {
		return int(n), failed(rc, "poll a completion queue")
	}
	return int(n), nil
}
