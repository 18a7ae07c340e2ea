package tcp

import (
	"encoding/binary"
	"fmt"

	"fserver/engine/transport"
)

// What travels on a connection, integers little-endian:
//
// First the handshake, in both directions (package link). Then records without end. A record is a header of headerLen bytes and its
// payload:
//
//	at  size
//	 0     1  type: 1 frame, 2 write, 3 goodbye
//	 1     7  zero
//	 8     8  length of the payload in bytes; at most transport.MaxFrame in a frame
//	16     8  key of the region to write into; zero in a frame
//	24     8  token of that key; zero in a frame
//	32     8  offset into the region; zero in a frame
//
// A goodbye is a header with zeros behind the type. It is the last record of a
// connection that its user closed after all before it had gone out. A stream
// that ends without one was cut: a process died, or a connection was ended for
// an error.
//
// The header of all types has one size, so that a receiver needs one look to
// know what follows, and no record is padded: the bytes of a write go to their
// place straight from the socket, wherever they start in the stream.
const headerLen = 40

const (
	recFrame = 1
	recWrite = 2
	recBye   = 3
)

// header is the head of a record.
type header struct {
	kind   uint8
	length uint64
	key    uint64
	token  uint64
	offset uint64
}

// put writes h to b, which has at least headerLen bytes.
func (h *header) put(b []byte) {
	_ = b[headerLen-1]
	binary.LittleEndian.PutUint64(b, uint64(h.kind))
	binary.LittleEndian.PutUint64(b[8:], h.length)
	binary.LittleEndian.PutUint64(b[16:], h.key)
	binary.LittleEndian.PutUint64(b[24:], h.token)
	binary.LittleEndian.PutUint64(b[32:], h.offset)
}

// parse reads h from b, which has at least headerLen bytes, and refuses what
// no peer of ours sends. Key, token and bounds of a write are for the region
// table to check.
func (h *header) parse(b []byte) error {
	_ = b[headerLen-1]
	first := binary.LittleEndian.Uint64(b)
	h.length = binary.LittleEndian.Uint64(b[8:])
	h.key = binary.LittleEndian.Uint64(b[16:])
	h.token = binary.LittleEndian.Uint64(b[24:])
	h.offset = binary.LittleEndian.Uint64(b[32:])
	switch first {
	case recWrite:
	case recFrame, recBye:
		if h.length > transport.MaxFrame {
			return fmt.Errorf("the peer announced a frame of %d bytes: at most %d", h.length, transport.MaxFrame)
		}
		if h.key|h.token|h.offset != 0 {
			return fmt.Errorf("the peer sent a frame whose header names a region")
		}
		if first == recBye && h.length != 0 {
			return fmt.Errorf("the peer sent a goodbye of %d bytes", h.length)
		}
	default:
		return fmt.Errorf("the peer sent a record that starts with % x: not a type of this version", b[:8])
	}
	h.kind = uint8(first)
	return nil
}
