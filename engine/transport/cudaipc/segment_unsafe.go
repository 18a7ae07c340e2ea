package cudaipc

import (
	"sync/atomic"
	"unsafe"

	"fserver/engine/mem"
	"fserver/engine/transport/link"
)

// Each side of a Conn has a segment of shared memory, which the other maps for
// reading alone: what is in it belongs to the side that made it. Groups of words
// that are stored to by different parties are 128 bytes apart.
//
// A write that goes by mapping has a number, from 1 in its Conn. The sender puts its key
// into keys[number%depth], then the number into begun. Then it looks whether the key is
// still in the receiver's table, and whether the receiver's Conn has ended (over). Then it
// enqueues the copy and the store of the number to done. The GPU stores done after the
// copy, and a barrier. It writes nothing before the receiver knows its segment (met), and
// can wait for it.
type segment struct {
	magic  uint64
	fabric uint64        // of its owner
	spaces spaces        // of the owner
	met    atomic.Uint32 // the owner knows the peer's segment
	over   atomic.Uint32 // the owner's Conn has ended: the peer starts no write
	_      [80]byte

	done atomic.Uint64 // stored by the GPU
	_    [120]byte

	begun atomic.Uint64
	_     [120]byte

	keys [depth]uint64 // that the last writes go to
}

const (
	depth        = link.LineMost // mapped writes of a Conn that have not ended
	segmentMagic = 0x6673_6375_6461_0007
	segmentSize  = unsafe.Sizeof(segment{})
	doneAt       = unsafe.Offsetof(segment{}.done)

	maxRegions = 1 << 16
	tableSize  = maxRegions * 8
)

// segmentIn is the segment at the start of a region, which stays mapped while it
// is used.
func segmentIn(r mem.Region) *segment { return (*segment)(unsafe.Pointer(r.Span().Ptr())) }

// tableIn is the keys of a Fabric by slot, 0 where there is none. No key has the
// same number as an earlier one.
func tableIn(r mem.Region) []atomic.Uint64 {
	return unsafe.Slice((*atomic.Uint64)(unsafe.Pointer(r.Span().Ptr())), maxRegions)
}
