package rails_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/transport/rails"
	"fserver/engine/transport/transporttest"
)

// seeds are those that the tests of faults use, and one of the time, which the names of the tests tell.
func seeds() (all []uint64) {
	for seed := range uint64(20) {
		all = append(all, seed)
	}
	all = append(all, 1<<10, 1<<20, uint64(time.Now().UnixNano()))
	if testing.Short() || transporttest.Quick() {
		return all[len(all)-3:]
	}
	return all
}

var quick = rails.Options{Pause: time.Millisecond, Split: 8 << 10}

// heals lets all members work, and waits until they do.
func (d *duo) heals(members int) {
	d.t.Helper()
	for i := range d.nets {
		d.heal(i)
	}
	d.wait("all members are back", func() bool { return rails.Live(d.a.c) == members && rails.Live(d.b.c) == members })
	d.wait("nothing is kept of those that were lost", func() bool {
		return rails.Unsettled(d.a.c)+rails.Unsettled(d.b.c)+rails.Stating(d.a.c)+rails.Stating(d.b.c) == 0
	})
}

// TestOneEachAtOnce has each side lose another member in the same moment: of two members, each is lost for one side before
// the other side hears of it.
func TestOneEachAtOnce(t *testing.T) {
	for _, seed := range seeds() {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			d := newDuo(t, 3, seed, true, quick)
			for turn := range 3 {
				first, second := fmt.Sprint("a", turn), fmt.Sprint("b", (turn+1)%3)
				n, at := 0, 5+d.r.IntN(20)
				d.traffic(50, func() {
					if n++; n == at {
						d.bad[first].FailNext(errors.New("broken at a"))
						d.bad[second].FailNext(errors.New("broken at b"))
					}
				})
				d.heals(3)
			}
		})
	}
}

// A moment is when a second member is lost. Member 0 was lost before, and member 2 stays.
type moment struct {
	name   string
	is     func(d *duo, last, now known) bool // after a step of a side, of which last was known before
	second int                                // the member that is lost then
}

// known is what a side knows of members that were lost.
type known struct {
	stating, half int
	placed        map[uint64]int
}

func (s *side) known() known { return known{rails.Stating(s.c), rails.Half(s.c), rails.Placed(s.c)} }

var moments = []moment{
	{"a statement is on its way", func(_ *duo, last, now known) bool { return last.stating == 0 && now.stating > 0 }, 1},
	{"frames were posted again", postedAgain, 1},
	{"the dial of the first is half-open", halfOpen, 0},
	{"another one is lost, and the first is half-open", halfOpen, 1},
}

// postedAgain is true when a frame is on another member now.
func postedAgain(_ *duo, last, now known) bool {
	for num, at := range last.placed {
		if on, ok := now.placed[num]; ok && on != at && on >= 0 {
			return true
		}
	}
	return false
}

// halfOpen is true some time after the member has come here, so that the peer may or may not have heard of the member.
func halfOpen(d *duo, _, now known) bool { return now.half > 0 && d.r.IntN(3) == 0 }

// TestSecondLoss loses a member, and at a certain moment of a side another one or the same.
func TestSecondLoss(t *testing.T) {
	for _, m := range moments {
		t.Run(m.name, func(t *testing.T) {
			turns := uint64(0)
			for _, seed := range seeds() {
				t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
					for turn, missed := uint64(0), true; missed; turn++ { // a new Conn, since a member that is lost again and again is dialed late
						require.Less(t, turn, uint64(100), "the moment does not come")
						d := newDuo(t, 3, seed+turn<<32, true, quick)
						missed = d.secondLoss(&m)
						turns++
					}
				})
			}
			t.Logf("%d turns", turns)
		})
	}
}

// secondLoss loses member 0 in the middle of traffic, and the second one at the moment. It reports whether the moment has
// not come. In the end all members are there again.
func (d *duo) secondLoss(m *moment) (missed bool) {
	d.t.Helper()
	missed = true
	d.a.limit, d.b.limit = 40, 40
	cut, n, last := 5+d.r.IntN(10), 0, [2]known{}
	d.until("all messages have come", func() bool {
		if n++; n == cut {
			d.cut(0)
		}
		for i, s := range []*side{d.a, d.b} {
			s.step()
			now := s.known()
			if missed && n >= cut && m.is(d, last[i], now) {
				d.cut(m.second)
				missed = false
			}
			last[i] = now
		}
		if n > cut && missed && !rails.LiveOver(d.a.c, 0) && !rails.LiveOver(d.b.c, 0) {
			d.heal(0)
		}
		return d.a.idle(d.b) && d.b.idle(d.a)
	})
	require.NoError(d.t, errors.Join(d.a.down, d.b.down, d.a.failed, d.b.failed))
	d.heals(3)
	d.traffic(10, func() {})
	return missed
}
