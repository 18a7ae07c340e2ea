package peers

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/transport/transporttest"
	"fserver/engine/wire"
)

// world is what a machine is to see of its peer and its node, and what it has asked for.
type world struct {
	p       Peer
	worker  bool
	dialing bool // a dial is under way
	link    bool // a connection stands
	heard   bool
	begun   bool // calls use it
	left    bool // the peer has said so
	gone    bool // so has the scheduler
	ran     bool
	leaving bool
	failed  bool
	lost    bool // calls wait for the peer
	byes    int  // over this connection
	epoch   uint64
	now     int64
}

// inputs are what can happen next.
func (w *world) inputs() (list []Input) {
	err := errors.New("the test says so")
	next := &wire.Member{Epoch: w.epoch + 1}
	switch {
	case w.failed:
		return nil
	case w.p.State() == Absent:
		for _, state := range []wire.State{wire.Present, wire.Gone, wire.Parting} {
			for _, late := range []bool{false, true} {
				if state == wire.Present || late { // who is not there was there before
					list = append(list, Input{Kind: Named, Member: &wire.Member{State: state, Epoch: 1}, Late: late, Err: err})
				}
			}
		}
		return list
	case w.link:
		list = append(list, Input{Kind: Flushed}, Input{Kind: Down, Err: err})
		if !w.heard {
			list = append(list, Input{Kind: Heard})
		} else {
			list = append(list, Input{Kind: Bye, Err: err})
		}
	}
	if w.worker && w.dialing {
		list = append(list, Input{Kind: Connected}, Input{Kind: Failed, Err: err})
	}
	if !w.worker && w.p.Judge(w.epoch) == Admit {
		list = append(list, Input{Kind: Connected, Heard: true})
	}
	if !w.ran {
		list = append(list, Input{Kind: Running})
	} else if !w.gone {
		list = append(list, Input{Kind: Gone, Err: err})
	}
	if !w.leaving {
		list = append(list, Input{Kind: Leaving})
	}
	return append(list, Input{Kind: Succeeded, Member: next, Err: err}, Input{Kind: Tick})
}

// step gives the machine an input, and checks what it asks for.
func (w *world) step(in Input) error {
	w.now += int64(100 * time.Millisecond)
	switch in.Kind {
	case Named:
		w.epoch, w.gone, w.left = 1, in.Member.State == wire.Gone, in.Member.State == wire.Parting
	case Succeeded:
		w.epoch, w.gone, w.left = in.Member.Epoch, false, false
	case Gone:
		w.gone = true
	case Connected:
		out := w.p.Step(w.now, Input{Kind: Again, Err: errors.New("again")})
		if !w.link && len(out) != 0 {
			return errors.New("no connection stood")
		}
		if err := w.outputs(out); err != nil {
			return err
		}
		w.link, w.heard, w.begun, w.left, w.dialing, w.byes = true, in.Heard, false, false, false, 0
	case Heard:
		w.heard = true
	case Bye:
		w.left = true
	case Down:
		w.link = false
	case Failed:
		w.dialing = false
	case Running:
		w.ran, w.dialing = true, false // the dials of the bring-up end
	case Leaving:
		w.leaving = true
	case Tick:
		w.now = max(w.now, min(w.p.Next(), w.now+int64(time.Hour)))
	}
	if err := w.outputs(w.p.Step(w.now, in)); err != nil {
		return err
	}
	return w.check(in)
}

func (w *world) outputs(out []Output) error {
	for _, o := range out {
		bad := false
		switch o.Do {
		case Dial:
			bad = !w.worker || w.gone || w.link
			w.dialing = true
		case Stop:
			w.dialing = false
		case Close:
			bad = !w.link
			w.link = false
		case Greet:
			bad = !w.link || w.begun
		case Begin:
			bad = !w.link || !w.heard || w.begun || w.left
			w.begun, w.lost = true, false
		case Part:
			bad, w.lost = !w.left, false
		case Lose:
			w.lost = w.p.cfg.Waits
		case GiveUp:
			bad, w.lost = !w.lost && !w.left, false
		case SayBye:
			w.byes++
			bad = !w.link || !w.begun || w.byes > 1 || !w.leaving
		case Fail:
			bad = w.ran
			w.failed = true
		}
		if bad {
			return fmt.Errorf("%s was wrong to do", describe(o))
		}
	}
	return nil
}

// check looks at what holds between inputs.
func (w *world) check(in Input) error {
	p := &w.p
	switch {
	case w.failed:
	case p.linked != w.link:
		return fmt.Errorf("linked is %v, and a connection stands: %v", p.linked, w.link)
	case (p.State() == Linked || p.State() == Ready) && !w.link:
		return fmt.Errorf("%v without a connection", p.State())
	case p.State() == Ready && !w.begun:
		return errors.New("ready before calls use it")
	case in.Kind == Flushed && w.heard && !w.left && !w.begun:
		return errors.New("calls do not use a connection that both sides use")
	case w.left && !w.gone && p.State() != Left:
		return fmt.Errorf("%v, and it has left", p.State())
	case w.lost && p.Next() == Never:
		return errors.New("calls wait for ever")
	case w.worker && w.ran && !w.leaving && p.State() == Dialing && !w.dialing:
		return errors.New("nobody dials")
	case w.dialing && (p.State() == Left || p.State() == Lost):
		return fmt.Errorf("%v, and somebody dials", p.State())
	case w.leaving && w.begun && w.link && w.byes == 0:
		return errors.New("it leaves and has not said so")
	}
	return nil
}

// search gives the machine every sequence of inputs, and returns how many there were.
func search(t *testing.T, w world, depth int, path []Kind) (count int) {
	if depth == 0 {
		return 1
	}
	for _, in := range w.inputs() {
		next := w
		next.p.past = append([]uint64(nil), w.p.past...)
		trail := append(path[:len(path):len(path)], in.Kind)
		if err := next.step(in); err != nil {
			require.NoError(t, err, "after the inputs %v", trail)
		}
		count += search(t, next, depth-1, trail)
	}
	return max(count, 1)
}

// TestEverySequence gives a machine each sequence of inputs that can come, up to a length. It
// never dials a peer that is gone or connected, says goodbye once and only over a connection that calls use,
// has no call wait for ever, and always knows whether a connection stands.
func TestEverySequence(t *testing.T) {
	depth := 9
	if testing.Short() || transporttest.Quick() {
		depth = 7
	}
	for _, worker := range []bool{true, false} {
		for _, waits := range []bool{true, false} {
			w := world{p: New(Config{Dials: worker, Waits: waits, Limit: time.Minute}), worker: worker, now: int64(time.Hour)}
			count := search(t, w, depth, nil)
			require.Greater(t, count, 10000)
			t.Logf("worker %v, waits %v: %d sequences", worker, waits, count)
		}
	}
}
