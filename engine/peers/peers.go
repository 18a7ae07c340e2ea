// Package peers is what one node knows of one peer, a worker or server that it exchanges data
// with, as a state machine without I/O or clock: who it is, whether a connection to it stands,
// who is waited for when it is lost, and when it is dialed again. The scheduler says which run of
// a process has a rank, by its epoch: a worker dials that run, a server takes the connection of
// that run, and of nobody else. A connection that breaks between two that live is opened again by
// the worker.
package peers

import (
	"math"
	"slices"
	"time"

	"fserver/engine/wire"
)

// State is where a peer is in its life.
type State uint8

// The states of a peer. A peer that is Ready, and one that has Left, may be Dialing again when
// the scheduler names a successor, or when its connection breaks.
const (
	Absent  State = iota // nobody is named
	Dialing              // a run is named; the worker connects to it
	Linked               // a connection stands, which not both sides use yet
	Ready                // both sides use it
	Lost                 // the run is gone, or cannot be reached; nobody dials
	Left                 // it has said that it leaves
)

func (s State) String() string {
	return [...]string{"absent", "dialing", "linked", "ready", "lost", "left"}[s]
}

// Kind says what an Input is.
type Kind uint8

// The kinds of Input.
const (
	Named     Kind = iota // the roster says who has the place, and whether the cluster ran before (Late)
	Succeeded             // Member has the place now; Err is why what waits for the last run ends
	Gone                  // the scheduler says that the run is gone; Err
	Again                 // a worker has connected again: the connection that stands, if any, is of no use; Err
	Connected             // there is a connection, of which the first frame has come (Heard) or not
	Heard                 // the first frame of the other side has come: it uses the connection
	Flushed               // this side has posted all that goes before what calls post
	Bye                   // it leaves; Err
	Down                  // the connection has ended; Err
	Failed                // the dial has failed for good; Err; Other: another run answered
	Running               // the cluster runs
	Leaving               // this node leaves the cluster
	Tick                  // time has passed
)

// Input is something that has happened.
type Input struct {
	Kind   Kind
	Member *wire.Member
	Late   bool
	Heard  bool
	Other  bool
	Err    error
}

// Action says what an Output asks for.
type Action uint8

// The actions.
const (
	Dial   Action = iota // Member, in a while (After); the dial under way, if any, is not wanted
	Stop                 // the dial under way, if any, is not wanted
	Close                // the connection, because of Err
	Greet                // the other side over the connection, before anything else is sent over it
	Begin                // to send what calls have for the peer; Again: it was there before
	Part                 // from a peer that has left: its calls end in Err
	Lose                 // the peer because of Err: calls wait for a successor, if that is set
	GiveUp               // waiting: calls end in Err
	SayBye               // over the connection
	Fail                 // the node, because of Err: the cluster cannot come to be
	Warn                 // that the peer cannot be reached: Err
)

// Output is one thing to do, in this order with the others.
type Output struct {
	Do    Action
	After time.Duration
	Again bool
	Err   error
}

// Never is when a machine is due that waits for no time to pass.
const Never = math.MaxInt64

const (
	// steady is how long a connection must have lasted to be dialed again at once.
	steady = int64(time.Second)
	// pause is the time before another attempt after one that did not last; it doubles five times.
	pause = 20 * time.Millisecond
)

// Config is what a Peer is told.
type Config struct {
	Dials bool          // this node is the worker of the two
	Waits bool          // calls wait for the successor of a peer that is lost,
	Limit time.Duration // for so long
}

// Peer is the machine. Make it with New.
type Peer struct {
	cfg    Config
	member wire.Member
	state  State
	late   bool // the cluster ran before this node came
	ran    bool // the cluster runs
	leaves bool // this node leaves

	linked bool     // a connection stands; of a peer that has Left, too
	heard  bool     // the other side uses it
	begun  bool     // so do the calls of this one
	since  int64    // when it came
	breaks int      // connections in turn that did not last
	known  bool     // a connection, or an earlier run, has been there before
	past   []uint64 // epochs that are over
	until  int64    // when calls do not wait any more,
	why    error    // and the loss that they end in

	out []Output
}

// New makes a Peer that is Absent.
func New(cfg Config) Peer { return Peer{cfg: cfg, until: Never} }

// State is where the peer is.
func (p *Peer) State() State { return p.state }

// Member is the run that has the place. It is valid once the peer is named.
func (p *Peer) Member() *wire.Member { return &p.member }

// Heard reports whether the other side uses the connection that stands.
func (p *Peer) Heard() bool { return p.linked && p.heard }

// Missing reports whether the cluster cannot run yet because of this peer.
func (p *Peer) Missing() bool {
	return p.state != Absent && p.member.State == wire.Present && !p.Heard()
}

// Lost reports whether the scheduler has said that the run is gone.
func (p *Peer) Lost() bool { return p.state != Absent && p.member.State == wire.Gone }

// Wants reports whether the run with an epoch is to be connected.
func (p *Peer) Wants(epoch uint64) bool { return p.member.Epoch == epoch && !p.Lost() }

// Next is when a Tick is due, in the time of Step.
func (p *Peer) Next() int64 { return p.until }

// Verdict is what becomes of a connection of a worker, see Judge.
type Verdict uint8

// The verdicts.
const (
	Wait   Verdict = iota // the scheduler has not named the run
	Admit                 // it is the one
	Past                  // another process has taken its place
	Missed                // it was taken for lost
)

// Judge says what becomes of a connection of a worker with the rank of this peer: of the run with
// an epoch.
func (p *Peer) Judge(epoch uint64) Verdict {
	switch {
	case slices.Contains(p.past, epoch):
		return Past
	case p.member.Epoch != epoch:
		return Wait
	case p.Lost():
		return Missed
	}
	return Admit
}

// Step takes one input at a time in nanoseconds. What it returns is the caller's: to do it may call Step again.
func (p *Peer) Step(now int64, in Input) []Output {
	p.out = nil
	switch in.Kind {
	case Named:
		p.named(now, in)
	case Succeeded:
		p.known = true
		p.hangUp(now, in.Err)
		if p.member.Epoch != in.Member.Epoch {
			p.past = append(p.past, p.member.Epoch)
		}
		p.member, p.breaks = *in.Member, 0
		p.expect(0)
	case Gone:
		p.member.State = wire.Gone
		p.do(Output{Do: Stop})
		p.hangUp(now, in.Err)
		if p.state != Left {
			p.state = Lost
		}
	case Again:
		if p.linked {
			p.hangUp(now, in.Err)
		}
	case Connected:
		p.state, p.linked, p.heard, p.begun, p.since = Linked, true, in.Heard, false, now
		p.do(Output{Do: Greet})
	case Heard:
		p.heard = true
	case Flushed:
		p.begin()
	case Bye:
		p.state = Left
		p.do(Output{Do: Part, Err: in.Err})
	case Down:
		p.linked = false
		p.down(now, in.Err)
	case Failed:
		p.failed(in.Other, in.Err)
	case Running:
		p.ran = true
		if p.state == Dialing { // for dials of the bring-up have ended with it
			p.expect(0)
		}
	case Leaving:
		p.leaves = true
		if p.linked && p.begun { // else begin says it
			p.do(Output{Do: SayBye})
		}
	case Tick:
		if now >= p.until {
			p.until = Never
			p.do(Output{Do: GiveUp, Err: p.why})
		}
	}
	return p.out
}

func (p *Peer) do(o Output) { p.out = append(p.out, o) }

// named takes what the roster says.
func (p *Peer) named(now int64, in Input) {
	p.member, p.late = *in.Member, in.Late
	switch p.member.State {
	case wire.Present:
		p.expect(0)
	case wire.Gone:
		p.state = Lost
		p.lose(now, in.Err)
	default:
		p.state = Left
		p.do(Output{Do: Part, Err: in.Err})
	}
}

// expect has the worker of the two dial after a while.
func (p *Peer) expect(after time.Duration) {
	p.state = Dialing
	if p.cfg.Dials {
		p.do(Output{Do: Dial, After: after})
	}
}

// begin lets calls use a connection that both sides use.
func (p *Peer) begin() {
	if p.state != Linked || !p.heard {
		return
	}
	p.state, p.begun, p.until = Ready, true, Never
	p.do(Output{Do: Begin, Again: p.known})
	p.known = true
	if p.leaves {
		p.do(Output{Do: SayBye})
	}
}

// hangUp ends the connection, if one stands, and loses the peer.
func (p *Peer) hangUp(now int64, err error) {
	if p.linked {
		p.linked = false
		p.do(Output{Do: Close, Err: err})
	}
	p.lose(now, err)
}

func (p *Peer) lose(now int64, err error) {
	p.do(Output{Do: Lose, Err: err})
	if p.cfg.Waits && p.until == Never {
		p.until, p.why = now+int64(p.cfg.Limit), err
	}
}

// down takes the end of the connection. The run may live. If not, the scheduler says so.
func (p *Peer) down(now int64, err error) {
	if !p.ran && !p.leaves && !p.late {
		p.state = Lost
		p.do(Output{Do: Fail, Err: err})
		return
	}
	p.lose(now, err)
	if p.state == Left {
		return
	}
	after := time.Duration(0)
	if now-p.since < steady {
		after = pause << min(p.breaks, 5)
		p.breaks++
	} else {
		p.breaks = 0
	}
	if p.state = Lost; !p.leaves {
		p.expect(after)
	}
}

// failed takes the end of all attempts to connect. other: another run has answered. If the cluster ran before this node came, the
// scheduler has yet to tell of that run.
func (p *Peer) failed(other bool, err error) {
	p.state = Lost
	if p.ran || p.leaves || p.late && other {
		p.do(Output{Do: Warn, Err: err})
	} else {
		p.do(Output{Do: Fail, Err: err})
	}
}
