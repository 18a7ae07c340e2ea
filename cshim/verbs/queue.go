package verbs

/*
#include "cs_verbs.h"
*/
import "C"

import (
	"errors"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Room is what a queue pair has place for.
type Room struct {
	Send, Recv int32 // requests in each queue
	Port       int32 // of the device, from 1
	Inline     int32 // bytes that a request may carry by itself. A wish: there may be fewer
	Readable   bool  // the peer can read, and not write
}

// A QP is a reliable connected queue pair.
type QP struct {
	Number uint32
	Room   Room // at least what was wanted, but for Inline
	c      C.cs_ib_qp
}

// NewQP makes a queue pair that completes on cq and takes PostRecv.
func (d *Device) NewQP(cq *CQ, want Room) (*QP, error) {
	q := &QP{Room: want}
	rc := C.cs_ib_qp_create(d.c, cq.c, (*C.cs_ib_room)(unsafe.Pointer(&q.Room)), &q.c, (*C.uint32_t)(&q.Number))
	if rc != 0 && want.Inline > 0 { // bnxt_re refuses what is too much without an errno
		want.Inline = 0
		return d.NewQP(cq, want)
	}
	if rc != 0 {
		return nil, failed(rc, "create a queue pair of %d and %d requests on %s", want.Send, want.Recv, d.Name)
	}
	return q, nil
}

// A Path leads to the queue pair of a peer.
type Path struct {
	GID      [16]byte // the peer's
	QP, PSN  uint32   // the peer's
	OwnPSN   uint32   // of our first packet, which the peer's Path names
	GIDIndex int32    // ours
	MTU      int32    // bytes; the smaller one of both ends
	LID      int32    // the peer's, on InfiniBand
	Flow     uint32   // of 20 bits, from which RoCE makes the UDP source port; 0: the device chooses

	Port int32 // ours, from 1

	// When q gives the peer up.
	Timeout  uint8 // 4.096 µs times 2 to this power without an acknowledgement, then again
	Retries  uint8 // 0 to 6; 7 is for ever on some devices
	NotReady uint8 // tries while the peer has posted no receive; 7 is for ever

	TrafficClass uint8 // of the packets, with Global: DSCP and ECN bits of RoCE v2
	ServiceLevel uint8 // 0 to 15: a lane on InfiniBand, the priority of a VLAN on RoCE

	Global bool // by GID: on Ethernet always
}

// Connect takes q to where it receives from the peer and sends to it.
func (q *QP) Connect(p Path) error {
	rc := C.cs_ib_qp_connect(q.c, (*C.cs_ib_path)(unsafe.Pointer(&p)))
	return failed(rc, "join queue pair %d to %d of %v", q.Number, p.QP, GID{Raw: p.GID})
}

// LagPort has a connected q send over one port, from 1, of a bonded mlx5 NIC. It is ErrNoLag where q's
// device is not that.
func (q *QP) LagPort(port int) error {
	rc := C.cs_ib_qp_lag_port(q.c, C.int(port))
	if errno(rc) == unix.EOPNOTSUPP {
		return ErrNoLag
	}
	return failed(rc, "keep queue pair %d to port %d", q.Number, port)
}

// ErrNoLag says that a device's ports are not bonded, or that it is no mlx5 NIC.
var ErrNoLag = errors.New("verbs: the device is not a bonded mlx5 NIC, so its port cannot be chosen")

// Fail ends all traffic of q. What is posted, and what is posted later, completes as
// Flushed; it may have been done all the same.
func (q *QP) Fail() error {
	return failed(C.cs_ib_qp_error(q.c), "end queue pair %d", q.Number)
}

// Destroy destroys q. It may block, and drops completions that were not polled.
func (q *QP) Destroy() error {
	return failed(C.cs_ib_qp_destroy(q.c), "destroy queue pair %d", q.Number)
}

// Op tells requests apart.
type Op uint8

// A Send goes into what the peer has posted with PostRecv, a Write to Remote. A Read is of Remote.
const (
	Send  Op = C.CS_IB_SEND
	Write Op = C.CS_IB_WRITE
	Read  Op = C.CS_IB_READ
)

// Flags of a Request.
type Flags uint8

// A request that is not Signaled completes only if it fails, and is over when a
// later one of its queue pair has completed. PostSend copies what is Inline: the bytes need no key, and the NIC does
// not read them from memory. The CPU must be able to read them.
const (
	Signaled Flags = C.CS_IB_SIGNALED
	Inline   Flags = C.CS_IB_INLINE
)

// A Request is one thing to do for a queue pair.
type Request struct {
	ID     uint64 // comes back in the completion
	Remote uint64 // address at the peer
	RKey   uint32 // that the peer gave
	Op     Op
	Flags  Flags
	From   Piece // of a Read: where it goes. Of 0 bytes: none. A Write without bytes needs no key
}

// A Piece is a part of registered memory.
type Piece struct {
	Address uint64
	Len     uint32
	LKey    uint32
}

// A Slot is memory that takes one Send of the peer.
type Slot struct {
	ID uint64
	To Piece
}

// Chain is how many requests or slots PostSend and PostRecv take at most. One call
// rings one doorbell.
const Chain = C.CS_IB_CHAIN

// ErrFull says that a queue has no room for another request.
var ErrFull = errors.New("verbs: the queue is full")

// errno values of a post without a place: that is no fault, so nothing is allocated.
func full(rc C.int) bool { return errno(rc) == unix.ENOMEM || errno(rc) == unix.ENOSPC }

// PostSend hands over 1 to Chain requests in order and says how many were taken.
// An error is of the first request that was not taken.
func (q *QP) PostSend(requests []Request) (int, error) {
	var n C.int
	rc := C.cs_ib_post_send(q.c, (*C.cs_ib_wr)(unsafe.Pointer(unsafe.SliceData(requests))), C.int(len(requests)), &n)
	return q.posted(rc, n, "send")
}

// PostRecv hands over slots, likewise.
func (q *QP) PostRecv(slots []Slot) (int, error) {
	var n C.int
	rc := C.cs_ib_post_recv(q.c, (*C.cs_ib_recv)(unsafe.Pointer(unsafe.SliceData(slots))), C.int(len(slots)), &n)
	return q.posted(rc, n, "receive")
}

func (q *QP) posted(rc, n C.int, what string) (int, error) {
	switch {
	case rc == 0:
		return int(n), nil
	case full(rc):
		return int(n), ErrFull
	}
	return int(n), failed(rc, "post a request to %s on queue pair %d", what, q.Number)
}

// A Completion is how a request ended.
type Completion struct {
	ID     uint64
	Status Status
	_      [2]uint32
	Len    uint32 // of what a Slot took
	_      uint32
	QP     uint32 // number of our queue pair
	_      [4]uint32
}
