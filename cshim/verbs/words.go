package verbs

/*
#include "cs_verbs.h"
*/
import "C"

import (
	"cmp"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

func errno(rc C.int) unix.Errno {
	if rc < 0 {
		rc = -rc // as some providers give it
	}
	return unix.Errno(rc)
}

func again(rc C.int) bool { return errno(rc) == unix.EAGAIN || errno(rc) == unix.EINTR }

// failed is the error of a result, nil for success.
func failed(rc C.int, format string, args ...any) error {
	if rc == 0 {
		return nil
	}
	e := errno(rc)
	return fmt.Errorf("verbs: "+format+": %w%s", append(args, e, remedies[e])...)
}

var remedies = map[unix.Errno]string{
	unix.EACCES: " (the process needs read and write access to /dev/infiniband/uverbs*)",
	unix.EPERM:  " (the process needs read and write access to /dev/infiniband/uverbs*)",
	unix.ENODEV: " (the device is gone, or its name is wrong: ibv_devinfo -l lists the names)",
	unix.EMFILE: " (raise the limit of open files: ulimit -n)",
	unix.EIO:    " (the device has failed; dmesg says why)",
}

// lockedMemory is what helps where memory cannot be pinned.
func lockedMemory(e unix.Errno) string {
	var l unix.Rlimit
	if e != unix.ENOMEM && e != unix.EAGAIN && e != unix.EPERM || unix.Getrlimit(unix.RLIMIT_MEMLOCK, &l) != nil {
		return ""
	}
	if l.Cur == unix.RLIM_INFINITY {
		return " (the locked-memory limit, ulimit -l, is unlimited: the host or the device has no memory left)"
	}
	return fmt.Sprintf(" (raise the locked-memory limit: ulimit -l, now %d KiB)", l.Cur>>10)
}

// GIDType is what a GID can be used for.
type GIDType int32

// The kinds of GID.
const (
	InfiniBand GIDType = C.CS_IB_GID_IB
	RoCEv1     GIDType = C.CS_IB_GID_ROCE_V1
	RoCEv2     GIDType = C.CS_IB_GID_ROCE_V2
)

func (t GIDType) String() string {
	return [...]string{"InfiniBand", "RoCE v1", "RoCE v2", "unknown type"}[min(uint(t), 3)]
}

// A GID is an address of a port.
type GID struct {
	Raw   [16]byte
	Index int32 // in the table of its port
	Type  GIDType
	Link  int32 // index of its network interface, or 0
}

// Addr is the GID as an IP address, which it is with RoCE v2.
func (g GID) Addr() netip.Addr { return netip.AddrFrom16(g.Raw).Unmap() }

func (g GID) String() string { return g.Addr().String() }

// Status is how a request ended, by the numbers of the specification. Only Success and Flushed can
// be relied on to say what happened: devices differ in the others.
type Status uint32

// What a Status is compared with.
const (
	Success Status = 0
	Flushed Status = 5
)

// Statuses that a reliable connected queue pair has for sends and writes.
var statuses = [...]string{
	0:  "success",
	1:  "a message was longer than the memory for it, or than the device allows",
	2:  "the queue pair refused the operation",
	4:  "local memory is not registered for this (protection error)",
	5:  "flushed: the queue pair had ended before",
	7:  "the peer's answer made no sense",
	8:  "a peer's request was refused by local memory (access error)",
	9:  "the peer found the request invalid",
	10: "the peer refused the access: a wrong key, or an address out of bounds",
	11: "the peer could not complete the request",
	12: "the peer did not acknowledge in time (retries exceeded)",
	13: "the peer had posted no receive for too long (receiver not ready, retries exceeded)",
	16: "the peer aborted the request",
	19: "the device reported a fatal error",
	21: "the device reported an error without more to say",
}

func (s Status) String() string {
	if int(s) < len(statuses) && statuses[s] != "" {
		return statuses[s]
	}
	return fmt.Sprintf("completion status %d", uint32(s))
}

// EventType is what an Event is.
type EventType int

// Asynchronous events that end queue pairs, by the numbers of the specification.
const (
	CQError     EventType = 0
	QPFatal     EventType = 1
	QPRequest   EventType = 2
	QPAccess    EventType = 3
	DeviceFatal EventType = 8
)

// Asynchronous events after which the addresses of a port may be others.
const (
	PortActive EventType = 9
	LIDChange  EventType = 11
	GIDChange  EventType = 18
)

var events = map[EventType]string{
	CQError:     "a completion queue overran, and is lost",
	QPFatal:     "a queue pair failed",
	QPRequest:   "a peer's request was invalid",
	QPAccess:    "a peer's request was refused by local memory",
	DeviceFatal: "the device failed, or was taken away",
}

func (t EventType) String() string {
	return cmp.Or(events[t], fmt.Sprintf("asynchronous event %d", int(t)))
}

// An Event is something that happened to a device.
type Event struct {
	Type EventType
	QP   uint32 // number of the queue pair of QPFatal, QPRequest and QPAccess, else 0
}
