package cma

import (
	"encoding/binary"
	"fmt"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// Two processes of one Conn share a segment, which the dialer makes:
//
//	at        size
//	0         2048        control block of the dialer
//	2048      2048        control block of the acceptor
//	4096      ringStaged  ring from the dialer to the acceptor
//	+staged   ringStaged  ring from the acceptor to the dialer
//
// A ring holds records one behind the other, each aligned to 8 bytes and in
// one piece. The first word of a record is stored last, so it says by itself
// that the record is there, and the reader waits for one cache line alone: the
// writer keeps the word behind its newest record zero. No index of the writer
// is shared. Both rings of a segment begin at startOf, after which they wrap.
// Integers are in the byte order of the host. The word has, from the low bits:
//
//	 8 bits  kind, never 0
//	 8 bits  zero
//	24 bits  bytes of payload in this record
//	24 bits  bytes of the whole frame; zero in other kinds
//
// A frame is the word and its payload, in several records if it is larger than
// framePiece. A skip is a word alone: the next record is at the start of the
// ring. What tells of a write has four more words before its payload: id,
// token, offset, length. What tells of a loan has four more words too:
// number of the shared memory, number of the loan, offset, length; and that shared
// memory is freed, one: its number. lend.go says what numbers they are.
//
// Direct Conns use the first ringDirect bytes of a ring, which stay in a
// core's own cache. Pages that nobody touches take no memory.
const (
	layoutVersion = 4

	controlSize = 2048
	ringsAt     = 2 * controlSize
	ringDirect  = 256 << 10
	ringStaged  = 2 << 20
	segmentSize = ringsAt + 2*ringStaged

	wordLen    = 8
	writeLen   = 5 * wordLen // a write's words
	framePiece = 16 << 10    // the largest payload of a frame's record
	stagePiece = 128 << 10   // and of a staged write's
	maxSize    = 1<<24 - 1   // what 24 bits hold
	_          = uint(maxSize - transport.MaxFrame)
)

// Kinds of records.
const (
	recFrame   = 1 + iota // a frame, or a piece of one
	recWritten            // a write whose bytes are in the region already
	recStaged             // bytes of a write
	recSkip               // go on at the start of the ring
	recLent               // a loan
	recFreed              // no more loans of this shared memory
)

// control is what one side of a Conn tells the other. Groups of fields that
// different sides or paths store to are 128 bytes apart: processors fetch
// cache lines in pairs.
type control struct {
	head atomic.Uint64 // how far this side has read, in bytes since the start
	_    [120]byte

	sleep atomic.Uint32 // asleep* bits; this side sets them, whoever rings for it clears them
	over  atomic.Uint32 // over*: this side has ended the Conn
	_     [120]byte

	busy atomic.Uint64 // odd while this side copies to where iov says; see copy.go
	_    [120]byte

	// Of the peer's shared memory this side has unmapped so many pieces, and
	// bytes, ever.
	views, viewBytes atomic.Uint64
	_                [112]byte

	iov [maxRemote]remoteVec
}

// remoteVec is struct iovec for memory of the peer.
type remoteVec struct{ base, n atomic.Uint64 }

const maxRemote = 64

const (
	asleepData = 1 // ring for anything new
	asleepRoom = 2 // and for room in the ring that this side fills

	overCut = 1 // for an error, or with operations that were not sent
	overBye = 2 // in good order
)

var _ = [controlSize - unsafe.Sizeof(control{})]byte{}

// A segment is the mapped memory of a Conn. Whoever may look into it holds a
// reference; the owner of the Fabric guards the count.
type segment struct {
	mem  []byte
	refs int
}

func (s *segment) drop() {
	if s.refs--; s.refs == 0 {
		unix.Munmap(s.mem)
	}
}

func (s *segment) control(side int) *control {
	return (*control)(unsafe.Pointer(&s.mem[side*controlSize]))
}

func (s *segment) ring(side, size int) []byte {
	at := ringsAt + side*ringStaged
	return s.mem[at : at+size : at+size]
}

// word is the word at a multiple of 8 in a ring.
func word(ring []byte, at uint64) *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(&ring[at : at+wordLen][0]))
}

func makeWord(kind, size, total uint64) uint64 {
	return kind | size<<16 | total<<40
}

func splitWord(w uint64) (kind, zero uint8, size, total uint64) {
	return uint8(w), uint8(w >> 8), w >> 16 & maxSize, w >> 40
}

func put64(b []byte, at int, v uint64) { binary.NativeEndian.PutUint64(b[at*wordLen:], v) }
func get64(b []byte, at int) uint64    { return binary.NativeEndian.Uint64(b[at*wordLen:]) }

const tableSize = link.SlotLimit * int(unsafe.Sizeof(link.Entry{}))

// A table is the regions of a Fabric, by slot. The memory is sparse.
type table []link.Entry

func asTable(b []byte) table {
	return unsafe.Slice((*link.Entry)(unsafe.Pointer(unsafe.SliceData(b))), link.SlotLimit)
}

func (t table) unmap() {
	if t != nil {
		unix.Munmap(unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(t))), tableSize))
	}
}

// mapMemory maps what a peer passed, if it is what mem.NewSealed makes.
func mapMemory(fd, size, prot int) ([]byte, error) {
	n, err := mem.CheckSealed(fd, mem.Seals)
	switch {
	case err != nil:
		return nil, fmt.Errorf("the peer passed no valid shared memory: %w", err)
	case n != uint64(size):
		return nil, fmt.Errorf("the peer passed %d bytes of shared memory, want %d", n, size)
	}
	b, err := unix.Mmap(fd, 0, size, prot, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes of shared memory: %w", size, err)
	}
	return b, nil
}
