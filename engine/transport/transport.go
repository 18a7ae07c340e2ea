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

// Point is a point in a device stream, for a Fabric that takes points (Caps.Points). The zero Point
// has always passed.
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
	// delivers Loan there. Only where Lends says yes.
	OpLend
)

// Op is one operation on a Conn. Post copies the Op itself and the bytes of
// Frame; Src and the memory that it names belong to the Fabric until the
// completion event, and so does what the spans' slice holds.
type Op struct {
	Kind  OpKind
	Loan  uint32 // OpLend: what the peer knows it by
	User  uint64 // comes back in the completion event; less than 2^62: the bits above are for Fabrics around others
	Off   uint64 // bytes into the peer's region
	Key   Key
	Frame []byte
	Src   []mem.Span
	Dev   mem.Device // where Src lies
	// After is for writes of device memory, where Caps.Points says so: the source is not read
	// before this has passed.
	After Point
	// Passes is for frames and loans that must not wait for a device: they may arrive
	// before writes of device memory that were posted before them, and before the frames
	// and loans behind those. Among themselves they keep their
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
	// EvDown says that a Conn is unusable. Err is the reason, with io.EOF inside it when the
	// peer closed in good order, and only then. Every frame and loan that had arrived comes
	// before it; completions of open Ops may come after it. The user then calls Close. It
	// comes at most once, and not after the user has called Close.
	EvDown
	// EvFreed says that no peer can touch the memory of the Key with ID User any more, and that the
	// Fabric has let go of it. It comes once for each Key that Deregister has ended, and names no
	// Conn. After Close of the Fabric it need not come.
	EvFreed
	// EvClosed is the last event of a Conn. It comes once, after Close and after every
	// completion. The peer can touch no local memory over this Conn any more. A Conn that was
	// closed before its EvAccept was given gives neither.
	EvClosed
)

// Event is one entry of what Poll found.
type Event struct {
	Kind EventKind
	Loan uint32
	User uint64 // of EvDone and EvFreed
	Len  uint64
	Conn Conn
	Data []byte // valid until the next Poll of the Fabric
	Span mem.Span
	View *mem.View
	Err  error
}

// Caps is what a Fabric can do beyond what all can.
type Caps struct {
	// Lends says that its Conns lend shared memory; see Conn.Lends. So its peers are processes of
	// this host.
	Lends bool
	// LocalKeys says that it reads the sources of writes by their registrations: host memory is
	// registered before it is sent, as memory is that peers write to.
	LocalKeys bool
	// GPU is the GPU whose memory it takes by itself, as it takes host memory; mem.CPU: of none. Register may still
	// refuse some of that memory.
	GPU mem.Device
	// Points says that Op.After may be set for writes of device memory: the device waits for the
	// Point, and no CPU. Any other Fabric is given no Point, and each Op when its source is ready.
	Points bool
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
	// Caps says what the Fabric can do. It does not change.
	Caps() Caps
	// Reaches returns nil if Connect to peer can succeed as far as the address tells, and else why
	// it cannot. It is symmetric and does no I/O.
	Reaches(peer Addr) error
	// Register makes r writable for peers that are given the Key. The memory
	// stays the caller's and must stay mapped until EvFreed or Close. If r.InUse is set, it need be mapped only while
	// that is not 0. While it is 0, this process touches none of the memory, and a write of a peer ends its Conn, as with a
	// wrong token. Only whoever may call Poll makes it 0. Copies to memory of a GPU that were
	// enqueued before that still land. Where a peer, its GPU or a NIC writes by itself, nothing can be
	// refused, as with Bind: the memory is pinned or mapped for it, or the write fails there.
	// A region may be registered more than once; each Key counts for itself. The error is a *DeviceError where the
	// device has failed. It wraps unix.ENOMEM if no more memory can be locked for the device: the caller then gives up what
	// it can spare, and tries again. Its last try for memory of a GPU sets r.Scarce.
	Register(r mem.Region) (Key, error)
	// Deregister starts the end of what a Key allows, and does not wait for it: EvFreed tells when
	// the memory is the caller's again. A write that is under way may still land until then, and
	// one that comes later ends its Conn. A Key that is not registered, or no longer, does nothing.
	Deregister(k Key)
	// Bind keeps k to c. A write that names k on another Conn is refused from then on, and ends that
	// one, as with a wrong token. A later Bind takes the place of an earlier one. A Key that
	// was never bound is good on every Conn of the Fabric. Where the peer, its GPU or a NIC
	// writes into this process by itself, nothing can be refused: the peer's Conn ends if it tells
	// of the write, whose bytes are there by then.
	Bind(k Key, c Conn) error
	// Connect opens a path to the Fabric at peer: it blocks until both sides
	// have passed the Gate, ctx ends or the attempt fails. It needs no Poll of
	// its own Fabric. The error is an *AgainError if the same call may succeed at once.
	Connect(ctx context.Context, peer Addr) (Conn, error)
	// Poll makes progress on everything that is open and fills ev with what
	// was found, in the order in which it happened on each Conn. It never
	// blocks and does a bounded amount of work. An error means that the whole
	// Fabric is unusable: a *PanicError, that a goroutine of it has panicked.
	Poll(ev []Event) (int, error)
	// FD returns a descriptor to sleep on (poll, epoll) after Arm. It is always the same one, and
	// valid until Close.
	FD() int
	// Arm makes FD tell of what comes from now on: until the next Poll it becomes readable when
	// Poll would find something or could make progress, and when back-pressure ends. Call it
	// before each sleep. A Poll undoes it, so whoever polls while another goroutine sleeps on
	// FD calls it after the last Poll. True means that there is something to do already, of
	// which FD need not tell: poll first, or wake the sleeper for that.
	Arm() (again bool)
	// Close ends everything, as Close of every Conn does: open Ops end in ErrClosed in later
	// Polls, and Conns in EvClosed. It is idempotent and returns when no goroutine, descriptor
	// or memory of the Fabric is left, but for events that Poll still has to give. What it
	// waits for is bounded: with an error, a peer may still touch memory of this process.
	Close() error
}

// A Conn is a reliable path to one peer Fabric. Frames arrive in the order in
// which they were posted, each after every write that was posted before it has landed whole;
// for the exception see Op.Passes. That frame is the only word of a write's arrival: writes
// may land in any order, and before frames that were posted before them.
type Conn interface {
	// Post hands over ops in order and returns how many were taken; fewer
	// than len(ops) with a nil error is back-pressure: post the rest after a
	// Poll, before sleeping, also where that Poll found nothing. Every Op that is
	// taken ends in exactly one EvDone, in any order. An error means
	// that the next Op can never be taken, and why: it is wrong in itself, or the
	// Conn has ended, as EvDown is to say too.
	Post(ops []Op) (int, error)
	// Unsent reports whether an Op that was taken needs further Polls to get on its way. Only
	// whoever may Post may call it.
	Unsent() bool
	// Lends reports whether Post takes an OpLend of s: s lies in shared memory (mem.Shared), and
	// the peer can be shown that memory. Only whoever may Post may call it. Yes holds until the
	// memory is freed or the Conn ends; no may change. If the Fabric lends nothing (Caps), it is
	// always no.
	//
	// A loan arrives before the frames that are posted after it, and loans arrive in their order;
	// Op.Passes says what may overtake them. EvDone says that the peer is being told. The protocol
	// above has to say that the peer looks no longer; until then the bytes must not change. The
	// peer may look even longer, also after the Conn has ended and the memory was freed: what it
	// finds then is not specified, but it is there. A View that nobody holds is unmapped when
	// the memory is freed or the Conn ends.
	Lends(s mem.Span) bool
	// Close starts the end of the Conn, and does not wait for it: EvClosed tells when it has
	// ended. Open Ops end in ErrClosed, and no frame and no loan is given any more. It is
	// idempotent. What has been posted before may or may not reach the peer.
	Close()
	// CloseFor is Close because of an error: the peer's EvDown has no io.EOF. For Fabrics around others, which end
	// Conns that their users have not closed.
	CloseFor(why error)
	// Peer says who the peer is and how bytes travel to it. It is for any goroutine, also when
	// the Conn has ended. Via and Why may change while the Conn is used.
	Peer() Peer
}

// Peer describes the other end of a Conn.
type Peer struct {
	Hello  []byte // what the Gate verified
	Remote string // its address, for messages
	Via    string // how bytes travel: "cma/staged"
	Why    string // what spoke against a better way, or empty
	Path   string // devices and addresses at both ends, for people; empty: Remote says all
	// Members are the connections that the Conn is made of, one for each Fabric of ours that it may use; nil: it
	// is one connection.
	Members []Member
	// Process is the number of the peer's process, as the system says and not the peer; 0: it is not known.
	Process int
	// Dead reports whether the peer's process has ended, so that nothing it had begun goes on. It asks
	// the system, so it is not for every Poll. It is nil where that cannot be seen.
	Dead func() bool
}

// Member is a connection that a Conn is made of, or the place of one.
type Member struct {
	Name   string // of our Fabric that it is over
	Remote string // the peer's address; empty: it is not connected
	Via    string // as in Peer
	Path   string // as in Peer
	Sent   uint64 // bytes of writes and frames that were given to it and those before it
	Why    string // why it is not used, or empty
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

// DeviceError is the error of a call because the device of the Fabric has failed. The whole Fabric is unusable: its Conns end,
// and no call makes another.
type DeviceError struct{ Err error }

func (e *DeviceError) Error() string { return e.Err.Error() }

// Unwrap returns what the device has said.
func (e *DeviceError) Unwrap() error { return e.Err }

// Limits are the bounds that a Fabric with connections keeps to.
type Limits struct {
	Handshake time.Duration // to pass the Gate; 0 means 10 s
	Stall     time.Duration // without progress while bytes are owed; 0 means 30 s
	Pending   int           // connections inside the Gate at once, the silent ones giving way; 0 means 256
}
