// Package rails makes one Fabric out of several: NICs, ports, queue pairs. A Conn of it is made of
// member Conns, and survives the loss of all but one. Between a Fabric of ours and one of the peer's there is
// at most one member, or one in each strand (Options.Strands).
//
// The protocol between the two sides of a Conn is in order.go, send.go and recv.go: numbers,
// acknowledgements, and what is posted again when a member is lost. It does no I/O and has no clock,
// and a test searches its states. The other files put it to work: fabric.go and poll.go are the
// Fabric, conn.go and post.go the Conn, rail.go a member of it, wire.go what travels, dial.go how
// members come and come back, keys.go the memory.
//
// # What a member must be
//
// The protocol counts what has come on a member, so a member must keep the order of its frames. Rails
// therefore does not hand Op.Passes on: a frame that may pass others keeps its place. That is within the
// contract as long as nothing waits for a device. So rails takes no Op with a Point, and it belongs below
// whatever makes writes wait for a device, not above it.
//
// # What is posted again
//
// If a member is lost, a batch that has not come is posted again on another one: the same writes, to
// the same places, and the same frame. Until its EvDone a source belongs to the Fabric, so the bytes are the
// same too. The contract lets writes land in any order before their frame, so that a part of them may
// have landed before does no harm: the peer's user has not been given the frame.
package rails

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"fserver/engine/transport"
)

// Options say how Conns use their members. All fields may be zero.
type Options struct {
	// Strands is how many members a Conn has between two Fabrics, such as queue pairs of two NICs; 0 means 1. If the two
	// sides differ, the lower number counts. More than one needs Fabrics that keep no key to a Conn (Fabric.Bind):
	// those whose NIC writes by itself.
	Strands int
	// Split is the size from which on a write is cut over all members; 0 means 128 KiB.
	Split uint64
	// Stall is how long a peer may take to say what has come on a member that was lost. Then the Conn ends.
	// 0 means 30 s.
	Stall time.Duration
	// Pause is how long a lost member is not dialed again. It doubles, up to MaxPause, if the next one does
	// not last longer than that. 0 means 100 ms.
	Pause time.Duration
	// Dial bounds an attempt to dial a lost member. A Conn that has no other member ends when the attempt fails. 0 means 10 s.
	Dial time.Duration
	// Names are what Peer calls the members; nil: the names of the Fabrics.
	Names []string
	// Networks are those that the interface of each member is in; nil, or none for a member: not known. A member connects
	// to that of the peer whose address is in one of them, as match says.
	Networks [][]netip.Prefix
	// Common says that a member connects only where it has a network in common with the peer's. Else two in the same
	// place are tried too, because a router may join their networks.
	Common bool
	// Same reports whether what the Gate verified on two connections is of one peer; nil: if it is equal.
	Same func(a, b []byte) bool
	// News, if set, is told of each member Conn: that it is used, or why it is not any more. It runs in a goroutine.
	News func(peer transport.Peer, member transport.Member)
	// Failed, if set, is told once of each member Fabric that has failed: it is not used any more. It runs in a
	// goroutine.
	Failed func(member int, why error)
	// Watch, if set, reports when nothing can travel over a member Fabric, with the reason, and when it works
	// again, with nil. It runs in a goroutine, and returns when ctx ends. What is told of no member works.
	Watch func(ctx context.Context, report func(member int, why error))
}

// MaxPause bounds the time for which a member that fails is mistrusted.
const MaxPause = 30 * time.Second

const (
	window    = 256     // numbers of one direction that are not acknowledged
	mostBytes = 4 << 20 // of the frames among them, or one larger one
	mostOps   = 1024    // writes of one Conn, or parts of them, that have not ended
	maxTries  = 8       // how often a batch is posted again
	// mostQueued is more than can wait for a member, as long as the peer confirms only statements that it has read.
	mostQueued = 4 << 10
	ackPolls   = 8   // Polls until an acknowledgement travels alone,
	agePolls   = 4   // each so many of which look whether it is due
	sealPolls  = 2   // Polls until writes that no frame follows get a fence
	calmPolls  = 64  // without an event, until a member is asked less often than others that have some:
	askBusy    = 64  // only in one of so many Polls that find something,
	askIdle    = 16  // and of so many that find nothing
	maxRails   = 64  // member Fabrics of one side
	maxFresh   = 256 // members that have not said which Conn they belong to
	// quietPolls is how many Polls of a member that find nothing tell that no EvDown is to come for an op that it has
	// refused. A single one does not: a Poll does a bounded amount of work, and may end in the middle of a frame.
	quietPolls = 64
)

const prefix = "rails:"

// New returns a Fabric made of members, or the only one as it is if it has one strand. Its Close closes them. With
// an error they are still the caller's. A member that is a *transport.Absent keeps its place, and is not used.
func New(members []transport.Fabric, o Options) (transport.Fabric, error) {
	o.Strands = max(o.Strands, 1)
	switch {
	case len(members) == 1 && o.Strands == 1:
		return members[0], nil
	case len(members) == 0 || len(members) > maxRails:
		return nil, fmt.Errorf("rails: %d fabrics: want 1 to %d", len(members), maxRails)
	case o.Networks != nil && len(o.Networks) != len(members):
		return nil, fmt.Errorf("rails: networks of %d fabrics, of which there are %d", len(o.Networks), len(members))
	case len(members)*o.Strands > maxRails:
		return nil, fmt.Errorf("rails: %d connections over each of %d fabrics: at most %d in all", o.Strands, len(members), maxRails)
	}
	if o.Split == 0 {
		o.Split = 128 << 10
	}
	if o.Stall <= 0 {
		o.Stall = 30 * time.Second
	}
	if o.Pause <= 0 {
		o.Pause = 100 * time.Millisecond
	}
	if o.Dial <= 0 {
		o.Dial = 10 * time.Second
	}
	if o.Names == nil {
		o.Names = names(members)
	}
	if o.Networks == nil {
		o.Networks = make([][]netip.Prefix, len(members))
	}
	if o.Same == nil {
		o.Same = bytes.Equal
	}
	return open(members, o)
}

// join makes one address of those of the members. One that takes no connections has an empty place. More
// than one strand is said in front of them.
func join(members []transport.Fabric, strands int) transport.Addr {
	escaped, listens := make([]string, len(members)), false
	for i, m := range members {
		listens = listens || m.Addr() != ""
		escaped[i] = escape.Replace(string(m.Addr()))
	}
	if !listens {
		return ""
	}
	front := prefix
	if strands > 1 {
		front += strconv.Itoa(strands) + "*"
	}
	return transport.Addr(front + strings.Join(escaped, ","))
}

var (
	escape   = strings.NewReplacer("%", "%25", ",", "%2C")
	unescape = strings.NewReplacer("%2C", ",", "%25", "%")
)

// Joined reports whether a is the address of several Fabrics, of which one has addresses of that scheme ("tcp").
func Joined(a, scheme string) bool {
	return strings.HasPrefix(a, prefix) && strings.Contains(a, scheme+":")
}

// split returns what join was given.
func split(a transport.Addr) (all []transport.Addr, strands int, err error) {
	rest, ok := strings.CutPrefix(string(a), prefix)
	if !ok || rest == "" {
		return nil, 0, fmt.Errorf("rails: %q is the address of one interface or device", a)
	}
	strands = 1
	if count, more, found := strings.Cut(rest, "*"); found && rest[0] >= '0' && rest[0] <= '9' {
		if strands, err = strconv.Atoi(count); err != nil || strands < 1 || strands > maxRails {
			return nil, 0, fmt.Errorf("rails: address of %q connections over each fabric: want 1 to %d", count, maxRails)
		}
		rest = more
	}
	parts := strings.Split(rest, ",")
	if len(parts) > maxRails {
		return nil, 0, fmt.Errorf("rails: address of %d fabrics: at most %d", len(parts), maxRails)
	}
	for _, p := range parts {
		all = append(all, transport.Addr(unescape.Replace(p)))
	}
	return all, strands, nil
}

// way is where a member of a Conn may be.
type way struct {
	pair
	strand int
	to     transport.Addr
}

// routes are the ways to a peer, the first strand of each pair of Fabrics before the second of any.
type routes struct {
	ways             []way
	fabrics, strands int // of the peer
}

// first are those of the first strand.
func (r *routes) first() []way {
	n := 0
	for n < len(r.ways) && r.ways[n].strand == 0 {
		n++
	}
	return r.ways[:n]
}
