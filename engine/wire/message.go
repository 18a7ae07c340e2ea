package wire

import (
	"errors"
	"fmt"
	"math"
	"math/bits"
)

// MaxMessage is the size of the largest message between nodes, in bytes. A frame has room for it.
const MaxMessage = 1_000_000

// Roles is a set of roles; with these numbers in fserver.h.
type Roles uint8

// The sets of one role.
const (
	ToScheduler Roles = 1 << iota
	ToServers
	ToWorkers

	toAll = ToScheduler | ToServers | ToWorkers
)

// Has reports whether a role is in the set.
func (r Roles) Has(role Role) bool {
	return r&map[Role]Roles{RoleScheduler: ToScheduler, RoleServer: ToServers, RoleWorker: ToWorkers}[role] != 0
}

// All is the Rank of a Destination that is all nodes of its roles.
const All = -1

// Destination is whom a message is for: all nodes of some roles, or the one with a rank.
type Destination struct {
	Roles Roles
	Rank  int    // or All
	Run   uint64 // of one node: only this run of it; 0: whichever there is
}

// Check returns what is wrong with a destination.
func (d *Destination) Check() error {
	switch one := bits.OnesCount8(uint8(d.Roles)) == 1; {
	case d.Roles == 0 || d.Roles > toAll:
		return fmt.Errorf("wire: the roles %#x of a message are no set of scheduler (1), servers (2) and workers (4)", uint8(d.Roles))
	case d.Rank != All && !one:
		return fmt.Errorf("wire: a message for rank %d of several roles: want one role, or all ranks (-1)", d.Rank)
	case d.Rank == All && d.Run != 0:
		return errors.New("wire: a message for one run of all ranks: want a rank")
	}
	return nil
}

// Send is a message that the scheduler is to pass on. Seq is the sender's own count of them, from 1.
type Send struct {
	Seq uint64
	To  Destination
	Data
}

func (v *Send) walk(c *codec) {
	number(c, "call", &v.Seq, math.MaxUint64)
	octet(c, "roles", &v.To.Roles, toAll)
	rank := v.To.Rank + 1
	number(c, "rank", &rank, MaxMembers)
	v.To.Rank = rank - 1
	c.word(&v.To.Run)
	if err := v.To.Check(); err != nil {
		c.fail(err)
	}
	v.Data.walk(c)
}

// Message is what one node has sent another.
type Message struct {
	Role Role // of the sender
	Rank int
	Run  uint64
	Data
}

func (v *Message) walk(c *codec) {
	octet(c, "role", &v.Role, RoleServer)
	number(c, "rank", &v.Rank, MaxMembers-1)
	c.word(&v.Run)
	v.Data.walk(c)
}

// Data is what the application has sent.
type Data []byte

func (d *Data) walk(c *codec) {
	if !c.parses {
		c.out = appendBytes(c.out, *d)
	} else {
		*d = append(Data(nil), c.bytes("bytes of a message", MaxMessage)...)
	}
}

// Taken answers a Message; the answers come in the order of the messages.
type Taken struct{ Full bool } // it is dropped: the receiver has as many as it can hold

func (v *Taken) walk(c *codec) { c.flag(&v.Full) }

// Outcome is what has become of a message.
type Outcome uint8

// The outcomes.
const (
	WasTaken Outcome = iota // by all whom it was for
	WasFull                 // one of them does not take more
	WasLost                 // one of them is gone
)

// Sent says what has become of the receiver's message Seq. Of several that have not taken it, it
// names the first.
type Sent struct {
	Seq     uint64
	Outcome Outcome
	Role    Role // who has not taken it
	Rank    int
	Address string // for people
	Reason  string
}

func (v *Sent) walk(c *codec) {
	number(c, "call", &v.Seq, math.MaxUint64)
	octet(c, "outcome", &v.Outcome, WasLost)
	octet(c, "role", &v.Role, RoleServer)
	number(c, "rank", &v.Rank, MaxMembers-1)
	c.reason("bytes of an address", &v.Address, maxReason)
	c.reason("bytes of a reason", &v.Reason, maxReason)
}
