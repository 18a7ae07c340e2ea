package rails_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/transport/faults"
	"fserver/engine/transport/inproc"
	"fserver/engine/transport/rails"
)

// watched opens a duo of two members whose sides are told by a and b what is away.
func watched(t *testing.T, seed uint64) (d *duo, a, b func(int, error)) {
	d = &duo{t: t, nets: []*inproc.Network{inproc.New(), inproc.New()}, r: rand.New(rand.NewPCG(seed, 1)), bad: map[string]*faults.Fabric{}}
	side := func(name string) (*side, func(int, error)) {
		told := make(chan func(int, error), 1)
		s := d.side(name, seed, true, rails.Options{Pause: time.Millisecond, Split: 8 << 10, Watch: func(ctx context.Context, report func(int, error)) {
			told <- report
			<-ctx.Done()
		}})
		return s, <-told
	}
	d.a, a = side("a")
	d.b, b = side("b")
	return d, a, b
}

func (d *duo) over(at int) bool { return rails.LiveOver(d.a.c, at) && rails.LiveOver(d.b.c, at) }
func (d *duo) none(at int) bool { return !rails.LiveOver(d.a.c, at) && !rails.LiveOver(d.b.c, at) }
func (d *duo) both() bool       { return d.over(0) && d.over(1) }

// TestAway: what Watch tells of one side closes the member on both, and brings it back. Nothing is lost.
func TestAway(t *testing.T) {
	d, a, b := watched(t, 1)
	d.connect(2)
	d.traffic(50, func() {})
	why := errors.New("eth1 is down")
	for _, c := range []struct {
		name string
		tell func(int, error)
		at   int
		says string
	}{
		{"of the dialer", a, 1, "eth1 is down"},
		{"of the other side", b, 0, "nothing can travel over member 0 of the peer, as it says"},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.tell(c.at, why)
			d.traffic(100, func() {})
			d.wait("the member is closed", func() bool { return d.none(c.at) && d.over(1-c.at) })
			require.Contains(t, d.a.c.Peer().Why, c.says)
			d.traffic(50, func() {})
			require.True(t, d.none(c.at))
			c.tell(c.at, nil)
			d.wait("the member is back", d.both)
			d.traffic(50, func() {})
		})
	}
}

// TestAllAreAway: the last member is kept, also if each side says that of another one. Over inproc all goes on.
func TestAllAreAway(t *testing.T) {
	why := errors.New("a link is down")
	for _, c := range []struct {
		name string
		tell func(a, b func(int, error), why error)
	}{
		{"of the dialer", func(a, _ func(int, error), why error) { a(0, why); a(1, why) }},
		{"of the other side", func(_, b func(int, error), why error) { b(0, why); b(1, why) }},
		{"one of each", func(a, b func(int, error), why error) { a(0, why); b(1, why) }},
		{"the other one of each", func(a, b func(int, error), why error) { b(0, why); a(1, why) }},
		{"all", func(a, b func(int, error), why error) { a(1, why); b(0, why); b(1, why); a(0, why) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			for seed := range uint64(3) {
				d, a, b := watched(t, seed)
				d.connect(2)
				d.traffic(10, func() {})
				c.tell(a, b, why)
				d.traffic(50, func() {})
				require.Positive(t, rails.Live(d.a.c))
				c.tell(a, b, nil)
				d.wait("both are back", d.both)
				d.traffic(20, func() {})
			}
		})
	}
}

// TestLinksComeAndGo: all members of both sides go away and come back at random times.
func TestLinksComeAndGo(t *testing.T) {
	seeds := uint64(4)
	if testing.Short() {
		seeds = 1
	}
	for seed := range seeds {
		d, a, b := watched(t, seed+1)
		d.connect(2)
		away, changes := [4]bool{}, 0
		d.traffic(500, func() {
			if d.r.IntN(10) > 0 {
				return
			}
			i := d.r.IntN(4)
			away[i] = !away[i]
			why, tell := error(nil), a
			if away[i] {
				why = errors.New("a link is down")
			}
			if i > 1 {
				tell = b
			}
			tell(i%2, why)
			changes++
		})
		for i := range 2 {
			a(i, nil)
			b(i, nil)
		}
		d.wait("both are back", d.both)
		d.traffic(20, func() {})
		require.Greater(t, changes, 20)
	}
}

// TestAwayFromTheStart: Connect takes a member that works, and the other one comes later.
func TestAwayFromTheStart(t *testing.T) {
	d, a, _ := watched(t, 1)
	a(0, errors.New("eth0 is down"))
	d.connect(1)
	require.True(t, d.none(0))
	d.traffic(50, func() {})
	a(0, nil)
	d.wait("the other one is there", d.both)
}
