// Package cluster makes nodes a cluster: who is there, where each of them
// listens, barriers, who is gone and who takes its place, and leaving together.
// A Scheduler serves Members; between the time that all are running and the time
// that they leave, nothing that push-pull does needs either, and the scheduler
// itself may be replaced.
//
// Both are state machines without I/O, clock or goroutine: an Input goes in,
// Outputs come out. Times are nanoseconds of any clock that does not go
// backwards. Neither is safe for concurrent use.
package cluster

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"fserver/engine/wire"
)

// brokeProtocol returns the reason of a loss by a message that no node of this version sends.
func brokeProtocol(err error) string {
	return "it broke the protocol: " + err.Error() +
		" (run the same version of fserver on all nodes, see fserver --version; if it is the same, report this)"
}

// InputKind says what an Input reports.
type InputKind uint8

// The inputs.
const (
	Tick  InputKind = iota // time has passed
	Up                     // Conn is open; Remote is its other end
	Frame                  // Data came on Conn
	Down                   // Conn is gone, and Err says why
)

// Input is one thing that has happened. Conn is a number of the caller's for a
// connection, never used twice; a Member has one connection, that to the
// scheduler, and ignores Conn and Remote. Data is not kept.
type Input struct {
	Kind   InputKind
	Conn   int64
	Remote string
	Data   []byte
	Err    error
}

// OutputKind says what an Output asks for or reports.
type OutputKind uint8

// The outputs.
const (
	Send     OutputKind = iota + 1 // send Frame on Conn
	Close                          // close Conn; no Down is needed for it
	Log                            // Text is worth a line
	Warn                           // Text is worth a line of warning
	Redial                         // Member: connect to the scheduler again, then give another Up
	Roster                         // Member: connect to the Peers, then call Connected
	Running                        // all members are connected
	Released                       // Member: the barrier call Seq is over
	Lost                           // a node is gone, and so are the barriers in Seqs: Err is a *LostError
	Overdue                        // Member: a lost one has no successor in time, and the barriers in Seqs end in Err
	Mail                           // a message has come; see Mail and Received
	Sent                           // message Seq has been taken by all whom it was for, or Err
	Joined                         // Member has the place of one that is gone
	Ended                          // the last output, but Close of what comes later: close everything; Err is nil after an orderly end
)

// Output is one thing to do, in this order with the others.
type Output struct {
	Kind   OutputKind
	Conn   int64
	Frame  []byte // never changed again: it may be kept
	Text   string
	Seq    uint64
	Seqs   []uint64      // barrier calls that Err ends
	Member *wire.Member  // of Joined
	Peers  []wire.Member // of Roster: those of this member's rail, by group
	Late   bool          // likewise: the cluster runs already
	Err    error
}

// Timing holds the limits that a Scheduler and its Members keep to.
type Timing struct {
	Interval time.Duration // between heartbeats; 0: none are sent or expected
	Timeout  time.Duration // a node that is silent for so long is lost; 0: never
	Leave    time.Duration // of a Member: how long it waits for the others to leave
	Rejoin   time.Duration // how long the successor of a lost member is waited for
}

// Never is the deadline of a machine that waits for no time to pass.
const Never = math.MaxInt64

// patience is how long a connection may stay that has nothing to say: that has
// not registered yet, or was told to go.
const patience = 10 * time.Second

// maxCalls bounds the barrier calls of one member that are pending at once.
const maxCalls = 256

// LostError says that a node is gone.
type LostError struct {
	Role    wire.Role
	Rank    int
	Address string
	Reason  string
}

func (e *LostError) Error() string {
	at := ""
	if e.Address != "" {
		at = " at " + e.Address
	}
	return fmt.Sprintf("cluster: %s%s is gone: %s", who(e.Role, e.Rank), at, e.Reason)
}

// RefusedError says why the scheduler does not take this member.
type RefusedError struct{ Reason string }

func (e *RefusedError) Error() string {
	return "cluster: refused by the scheduler: " + e.Reason
}

// EndedError says that a member's part has ended otherwise than by the wish of all.
type EndedError struct{ Reason string }

func (e *EndedError) Error() string { return "cluster: ended: " + e.Reason }

// ErrNotRunning is what Barrier gives before Running and after Leave.
var ErrNotRunning = errors.New("cluster: not running")

// seatOf is the place of a member in the list by role and rank; -1: it has none.
func seatOf(s wire.Shape, r wire.Role, rank int) int {
	workers := s.Workers * s.GroupSize
	switch {
	case r == wire.RoleWorker && rank < workers:
		return rank
	case r == wire.RoleServer && rank < s.Servers*s.GroupSize:
		return workers + rank
	}
	return -1
}

// NoRank is the rank of a member that the scheduler is to assign one.
const NoRank = -1

// who names a node for people.
func who(r wire.Role, rank int) string {
	switch {
	case r == wire.RoleScheduler:
		return "the scheduler"
	case rank == NoRank:
		return fmt.Sprintf("a %v without a rank", r)
	}
	return fmt.Sprintf("%v %d", r, rank)
}

// beat is the frame of a heartbeat: the same one every time, so that none allocates.
var beat = wire.AppendSignal(nil, wire.TypeHeartbeat)

// place is where a member listens, for people: the address that everybody can use,
// which is the last one, without the name of its transport. Empty: nowhere.
func place(m *wire.Member) string {
	if len(m.Addrs) == 0 {
		return ""
	}
	last := m.Addrs[len(m.Addrs)-1]
	if _, rest, ok := strings.Cut(last, ":"); ok {
		return rest
	}
	return last
}

// heartbeat is the timing of heartbeats, the same on both sides.
type heartbeat struct {
	interval, timeout int64 // 0: off
	last              int64 // the last step
	beat              int64 // when the next is to be sent; 0: no step yet
}

func newHeartbeat(t Timing) heartbeat {
	if t.Interval == 0 {
		return heartbeat{beat: Never}
	}
	return heartbeat{interval: int64(t.Interval), timeout: int64(t.Timeout)}
}

// step is to be called at each step. late is for how long nobody called it who
// should have: this process was stopped, or its host was. What came in during
// that time has not been read yet, so it does not count as silence.
func (h *heartbeat) step(now int64) (late int64) {
	if h.interval == 0 {
		return 0
	}
	if h.beat == 0 {
		h.beat = now + h.interval
	} else if now-h.last > 2*h.interval {
		late = now - h.last - h.interval
	}
	h.last = now
	return late
}

// due says whether a heartbeat is to be sent now.
func (h *heartbeat) due(now int64) bool {
	if now < h.beat {
		return false
	}
	h.beat = now + h.interval
	return true
}

// silence is when a node that was last heard at that time is lost.
func (h *heartbeat) silence(heard int64) int64 {
	if h.timeout == 0 {
		return Never
	}
	return heard + h.timeout
}

// machine is what both state machines have.
type machine struct {
	inbox
	hb  heartbeat
	now int64
	out []Output
}

// begin starts a call at time now.
func (m *machine) begin(now int64) { m.now, m.out = now, m.out[:0] }

func (m *machine) emit(o Output) { m.out = append(m.out, o) }

func (h *heartbeat) reason() string {
	return fmt.Sprintf("nothing was heard of it for %v", time.Duration(h.timeout))
}
