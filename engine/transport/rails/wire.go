package rails

import (
	"encoding/binary"
	"fmt"
)

// What travels as a frame of a member starts with a byte that says its kind. An item of order has a
// header of headerLen bytes: kind, number, and then acknowledgement and confirmations, or of a statement what
// has come and on which member. All numbers are little-endian.
//
// The first frame of a member is its greeting, of the dialer. If a frame of the user does not fit behind the
// header, its last bytes travel ahead of it, as a piece. A side that ends the Conn because of an error
// says why, and one that has accepted it says over which of its Fabrics nothing can travel.
const (
	greeting kind = 16 + iota
	piece
	broken
	ailing

	headerLen = 1 + 3*8
	version   = 2
	maxReason = 500
)

func putItem(b []byte, it *item) {
	b[0] = byte(it.kind)
	binary.LittleEndian.PutUint64(b[1:], it.num)
	first, second := it.ack, it.got
	if it.kind == stating {
		first, second = it.n, uint64(it.id)
	}
	binary.LittleEndian.PutUint64(b[9:], first)
	binary.LittleEndian.PutUint64(b[17:], second)
}

func parseItem(b []byte) (it item, err error) {
	if len(b) < headerLen {
		return it, fmt.Errorf("rails: an item of %d bytes: at least %d", len(b), headerLen)
	}
	it.kind, it.num = kind(b[0]), binary.LittleEndian.Uint64(b[1:])
	first, second := binary.LittleEndian.Uint64(b[9:]), binary.LittleEndian.Uint64(b[17:])
	switch {
	case len(b) > headerLen && it.kind != frame:
		return it, fmt.Errorf("rails: an item of kind %d and %d bytes: want %d", it.kind, len(b), headerLen)
	case it.kind != stating:
		it.ack, it.got = first, second
	case second > 1<<32-1:
		return it, fmt.Errorf("rails: a statement about member %d, which is no number of a member", second)
	default:
		it.statement = statement{uint32(second), first}
	}
	return it, nil
}

// parting returns what tells the peer why a Conn ends because of an error.
func parting(err error) []byte {
	b := append([]byte{byte(broken)}, err.Error()...)
	return b[:min(len(b), 1+maxReason)]
}

// greet is the first frame of a member.
type greet struct {
	Kind      kind
	Version   uint8
	Conn      [16]byte // that it belongs to
	Member    uint32   // its number
	At, Count uint16   // the dialer's Fabric that it is over, and how many it has
	// Strand is that of the pair of Fabrics that it is between, and Strands how many the dialer makes at most.
	Strand, Strands uint16
}

func (g greet) bytes() []byte {
	g.Kind, g.Version = greeting, version
	b, _ := binary.Append(nil, binary.LittleEndian, &g) // never fails
	return b
}

func parseGreeting(b []byte) (g greet, err error) {
	n, err := binary.Decode(b, binary.LittleEndian, &g)
	if err != nil || n != len(b) || g.Kind != greeting || g.Version != version {
		return g, fmt.Errorf("rails: a member begins with % x: want a greeting of version %d", b[:min(len(b), 8)], version)
	}
	if g.At >= g.Count || g.Count > maxRails || g.Strand >= g.Strands || g.Strands > maxRails {
		return g, fmt.Errorf("rails: a greeting of fabric %d of %d, strand %d of %d: at most %d", g.At, g.Count, g.Strand, g.Strands, maxRails)
	}
	return g, nil
}
