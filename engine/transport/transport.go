// Package transport is the seam between push-pull and the ways that bytes can
// travel. It holds interfaces, plain values and errors; each transport is a
// package below this one and imports none of its siblings.
//
// The contracts that are written here are tested by package transporttest,
// which every transport runs.
package transport

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"fserver/engine/mem"
)

// MaxFrame is the largest control frame, in bytes. A Fabric refuses a larger
// one at Post, and ends a connection whose peer announces one.
const MaxFrame = 1 << 20

// Addr is where a Fabric can be reached. It is opaque to everybody but the
// Fabrics of one transport; the scheduler carries it. It starts with the name
// of the transport and a colon: "tcp:10.0.0.1:7000".
type Addr string

// Key lets a peer write into a registered region. It is a plain value: the
// owner sends it, the peer names it in an Op.
type Key struct {
	ID    uint64 // number of the region in its Fabric; never used twice
	Token uint64 // what proves that the owner gave the key, or the NIC's rkey
	Blob  string // what a peer needs once to reach the memory; may be empty
}

// Point is a point in a device stream. The zero Point has always passed.
type Point struct {
	Dev   mem.Device
	Event uint64
}

// OpKind tells the two operations apart.
type OpKind uint8

const (
	// OpFrame sends Frame as one control frame.
	OpFrame OpKind = iota + 1
	// OpWrite gathers Src and writes it into the peer's region Key at offset
	// Off. The peer learns of it from the next frame alone.
	OpWrite
	// OpLend shows the peer the memory of Src, one span, where it is, and
	// delivers Loan there. For a Conn that is a Lender.
	OpLend
)

// Op is one operation on a Conn. Post copies the Op itself and the bytes of
// Frame; Src and the memory that it names belong to the Fabric until the
// completion event, and so does what the spans' slice holds.
type Op struct {
	Kind  OpKind
	Loan  uint32 // OpLend: what the peer knows it by
	User  uint64 // comes back in the completion event
	Off   uint64 // bytes into the peer's region
	Key   Key
	Frame []byte
	Src   []mem.Span
	Dev   mem.Device // where Src lies
	After Point      // the source is not read before this has passed
	// Passes is for frames and loans that must not wait for a device: they may arrive
	// before writes of device memory and writes behind a Point that were posted before
	// them, and before the frames and loans behind those. Among themselves they keep their
	// order, and they arrive after all other writes that were posted before them.
	Passes bool
}

// EventKind says what an Event reports.
type EventKind uint8

const (
	// EvDone ends an accepted Op: User is the Op's, Err is nil when the source
	// may be used again because its bytes are on their way. That the peer has
	// them is for the protocol above to say.
	EvDone EventKind = iota + 1
	// EvFrame brings a control frame in Data. All writes that were posted before it on its
	// Conn are complete in local memory.
	EvFrame
	// EvAccept brings a new Conn that a peer opened and that passed the Gate.
	EvAccept
	// EvLent says that a peer lends Len bytes as number Loan: they are at Span, for
	// reading alone, and stay mapped until View is dropped. Whoever is handed the event
	// owes one Drop.
	EvLent
	// EvDown is the last event of a Conn: it is unusable, and Err says why
	// (io.EOF inside it when the peer closed in good order, and only then). The completions
	// of its open Ops come before it. A Conn that its own user closed gives
	// none.
	EvDown
)

// Event is one entry of what Poll found.
type Event struct {
	Kind EventKind
	Loan uint32
	User uint64
	Len  uint64
	Conn Conn
	Data []byte // valid until the next Poll of the Fabric
	Span mem.Span
	View *mem.View
	Err  error
}

// A Fabric is one transport on one device: a NIC port, a GPU, the host.
//
// One goroutine at a time may be inside Poll or any Conn's Post; which one
// may change between calls. Register, Deregister, Connect, Close and the rest
// are safe from any goroutine at any time. A Fabric never calls its user back.
type Fabric interface {
	// Name is for people: "tcp/eth0", "verbs/mlx5_0:1".
	Name() string
	// Addr is where peers find this Fabric; empty if it takes no connections.
	Addr() Addr
	// Reaches says whether Connect to peer can succeed as far as the address
	// tells. It is symmetric and does no I/O.
	Reaches(peer Addr) bool
	// Register makes r writable for peers that are given the Key. The memory
	// stays the caller's and must stay mapped until Deregister or Close. A
	// region may be registered more than once; each Key counts for itself.
	Register(r mem.Region) (Key, error)
	// Deregister ends what Key allows. When it has returned, no write of a
	// peer that names this Key touches the memory any more.
	Deregister(k Key) error
	// Connect opens a path to the Fabric at peer: it blocks until both sides
	// have passed the Gate, ctx ends or the attempt fails. It needs no Poll of
	// its own Fabric.
	Connect(ctx context.Context, peer Addr) (Conn, error)
	// Poll makes progress on everything that is open and fills ev with what
	// was found, in the order in which it happened on each Conn. It never
	// blocks and does a bounded amount of work. An error means that the whole
	// Fabric is unusable: a *PanicError, that a goroutine of it has panicked.
	Poll(ev []Event) (int, error)
	// Close ends everything: open Ops end in ErrClosed in later Polls. It is
	// idempotent and returns when no goroutine, descriptor or memory of the
	// Fabric is left, but for events that Poll still has to give.
	Close() error
}

// A Conn is a reliable path to one peer Fabric. Frames arrive in the order in
// which they were posted, each after every write that was posted before it has landed whole;
// for the exception see Op.Passes. That frame is the only word of a write's arrival: writes
// may land in any order, and before frames that were posted before them.
type Conn interface {
	// Post hands over ops in order and returns how many were taken; fewer
	// than len(ops) with a nil error is back-pressure: post the rest after a
	// Poll. Every Op that is taken ends in exactly one EvDone. An error means
	// that the next Op can never be taken, and why: it is wrong in itself, or the
	// Conn has ended, as EvDown is to say too.
	Post(ops []Op) (int, error)
	// Close ends the Conn; open Ops end in ErrClosed. It is idempotent. What
	// has been posted before may or may not reach the peer.
	Close() error
	// Hello is what the Gate verified about the peer.
	Hello() []byte
	// Remote is the peer's address, for messages.
	Remote() string
}

// Unsender is a Conn on which Ops that were taken may need further Polls to get
// on their way. Unsent says whether that is so now; for whoever may Post.
type Unsender interface{ Unsent() bool }

// Sleeper is a Fabric whose user need not spin. FD is readable (for poll,
// epoll) whenever Poll would find something or could make progress, and when
// back-pressure ends. Ask for it
// before each wait, and after the last Poll if somebody else waits meanwhile:
// what Post has completed may show only then, and a Fabric that is polled may
// tell nobody of what comes. It is always the same descriptor, and stays valid
// until Close.
type Sleeper interface{ FD() int }

// Lender is a Conn over which shared memory (mem.Shared) can be lent.
//
// Lends says whether an OpLend of s would be taken: s lies in shared memory,
// and the peer can be shown that. It is for whoever may Post, and holds until
// that memory is freed or the Conn ends; a later no may turn into a yes.
//
// A loan arrives before the frames that are posted after it, and loans arrive
// in their order; see Op.Passes for both. Its EvDone says that the peer is being told. That it looks no
// longer is for the protocol above to say; until then the bytes must not
// change. The peer may look even longer, also after the Conn has ended and the
// memory was freed: what it finds then is not specified, but it is there. A View
// that nobody holds is unmapped when the memory is freed or the Conn ends.
type Lender interface{ Lends(s mem.Span) bool }

// Mortal is a Conn whose peer is a process of this host.
//
// Dead says whether that process has ended, so that nothing it had begun goes on;
// known is false where that cannot be seen. It is for any goroutine, also when the
// Conn has ended, and not for every Poll: it asks the system.
type Mortal interface{ Dead() (dead, known bool) }

// Binder is a Fabric that can keep a Key to one Conn. After Bind a write that
// names k on another Conn is refused and ends that one, as with a wrong token; a
// later Bind takes the place of an earlier one. A Key that was never bound is
// good on every Conn of its Fabric. Where a peer writes into this process by
// itself, no CPU of ours is in the path and nothing can be refused: its Conn ends
// if it tells of the write, whose bytes are there by then.
type Binder interface{ Bind(k Key, c Conn) error }

// Teller is a Conn whose Fabric can carry it in more than one way. Via is how
// this one travels ("cma/staged"), Why what spoke against a better way, or empty.
type Teller interface {
	Via() string
	Why() string
}

// Explainer is a Fabric that can say why Reaches is false. Beyond returns that for an
// address of its own transport, and an empty text where Reaches is true.
type Explainer interface{ Beyond(peer Addr) string }

// Beyond returns what f says as an Explainer; an empty text if it is none.
func Beyond(f Fabric, peer Addr) string {
	if e, ok := f.(Explainer); ok {
		return e.Beyond(peer)
	}
	return ""
}

// Via is what a Conn of the Fabric with a name says as a Teller; for one that is
// none, the kind of the Fabric and nothing.
func Via(c Conn, fabric string) (via, why string) {
	if t, ok := c.(Teller); ok {
		return t.Via(), t.Why()
	}
	via, _, _ = strings.Cut(fabric, "/")
	return via, ""
}

// A Gate decides who may talk: it runs over each new connection before the
// first frame. Implementations are safe for concurrent use.
type Gate interface {
	// Open begins the exchange on a connection; dialer says which side we are.
	Open(dialer bool) Handshake
}

// Handshake is one run of a Gate: it turns messages of the peer into messages
// to it and does no I/O. The dialer moves first.
type Handshake interface {
	// Next takes the peer's next message (nil at the dialer's start) and
	// returns the message to send, if any. When done is true the peer is
	// trusted once out has been sent. With an error, out (if any) is still to
	// be sent, as the reason for the peer, and the connection closed.
	// in is not kept.
	Next(in []byte) (out []byte, done bool, err error)
	// Hello is what was verified about the peer; valid when done.
	Hello() []byte
}

// MaxHandshake bounds one message of a Handshake, in bytes.
const MaxHandshake = 4096

// ErrClosed ends operations of a Fabric or Conn that its own user closed.
var ErrClosed = errors.New("transport: closed")

// ErrUnavailable says that a transport cannot run here.
type ErrUnavailable struct {
	Transport string // "verbs"
	Reason    string // "no device: /sys/class/infiniband is empty"
	Remedy    string // what the user can do, or empty
}

func (e *ErrUnavailable) Error() string {
	s := fmt.Sprintf("%s: not available: %s", e.Transport, e.Reason)
	if e.Remedy != "" {
		s += " (" + e.Remedy + ")"
	}
	return s
}

// Limits are the bounds that a Fabric with connections keeps to.
type Limits struct {
	Handshake time.Duration // to pass the Gate; 0 means 10 s
	Stall     time.Duration // without progress while bytes are owed; 0 means 30 s
	Pending   int           // connections inside the Gate at once, the silent ones giving way; 0 means 256
}
