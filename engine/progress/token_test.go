package progress

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"fserver/engine/transport"
)

// TestOneOwner has goroutines take the token in every way. The fake finds two at a time, and so does the race
// detector. What was submitted is done, and is done once.
func TestOneOwner(t *testing.T) {
	d, f := newFake(t, Settings{})
	const rounds = 500
	var all sync.WaitGroup
	done, under := 0, 0
	for range 4 {
		all.Go(func() {
			for range rounds {
				f.submit(func() { done++ })
				d.Drive(0)
				require.True(t, d.Under(func() { under++ }))
			}
		})
	}
	all.Wait()
	require.True(t, d.Own())
	defer d.GiveBack()
	require.Equal(t, []int{4 * rounds, 4 * rounds}, []int{done, under})
}

// TestSubmittedBesideAPass: who submits while a pass is under way does not wait for it, and the owner takes that
// before it goes.
func TestSubmittedBesideAPass(t *testing.T) {
	for _, by := range []string{"Pass", "Drain"} {
		d, f := newFake(t, Settings{})
		begun, gate := make(chan struct{}), make(chan struct{})
		var once sync.Once
		f.stage = func(at string) {
			if at == by {
				once.Do(func() {
					close(begun)
					<-gate
				})
			}
		}
		over, late := make(chan struct{}), false
		go func() {
			defer close(over)
			if by == "Drain" {
				f.submit(func() {})
			} else {
				d.Drive(0)
			}
		}()
		<-begun
		// The one that is begun takes the first.
		f.mu.Lock()
		f.submitted = append(f.submitted, func() {
			f.submit(func() { late = true }) // and finds the token taken
		})
		f.mu.Unlock()
		close(gate)
		<-over
		require.True(t, late, by)
		require.False(t, f.Pending())
	}
}

// TestOwnWaits: Own waits for the pass that is under way, and the poller sees that somebody wants the token.
func TestOwnWaits(t *testing.T) {
	d, _ := newFake(t, Settings{})
	require.True(t, d.Own())
	owned := make(chan bool)
	go func() { owned <- d.Under(func() {}) }()
	require.Eventually(t, func() bool { return d.wanted.Load() == 1 }, 30*time.Second, time.Millisecond)
	_, mine := d.Drive(0)
	require.False(t, mine)
	d.GiveBack()
	require.True(t, <-owned)
	require.Zero(t, d.wanted.Load())
}

// TestShut: who waits for the token hears of the end, and nobody drives again. Join drains what is still submitted, and
// waits for calls and goroutines.
func TestShut(t *testing.T) {
	d, f := newFake(t, Settings{})
	require.True(t, d.Own())
	owned := make(chan bool)
	go func() { owned <- d.Own() }()
	a := f.await(false)
	f.reaches(State{Callers: 1, Sleeping: true})
	d.shut(errOver)
	require.False(t, <-owned)
	require.True(t, <-a.done)
	require.True(t, d.Stopped())
	require.False(t, d.Under(func() {}))
	_, mine := d.Drive(0)
	require.False(t, mine)
	done := false
	f.submit(func() { done = true })
	require.False(t, done)
	d.Join(f.take)
	require.True(t, done)
	for name, use := range map[string]*atomic.Int32{"Await": &d.callers, "Enter": &d.helpers} {
		use.Add(1)
		looks := 0
		d.Join(func() {
			if looks++; looks == 3 {
				use.Add(-1)
			}
		})
		require.Equal(t, 3, looks, name)
	}
}

const bang = "a fault of the test's own"

// mined has the fake panic where a method begins.
func mined(f *fake, method string) {
	f.stage = func(at string) {
		if at == method {
			panic(bang)
		}
	}
}

// endedBy requires that a panic has shut the work, with the error that it returns.
func endedBy(t *testing.T, f *fake) error {
	t.Helper()
	require.Eventually(t, f.d.Stopped, 30*time.Second, time.Millisecond)
	var e *transport.PanicError
	require.ErrorAs(t, *f.shut.Load(), &e)
	require.Equal(t, bang, e.Value)
	return *f.shut.Load()
}

// TestPanicInCall: a panic under the token shuts the work and goes on, and a caller that waits hears of it.
func TestPanicInCall(t *testing.T) {
	for name, c := range map[string]struct {
		method string
		call   func(d *Driver, f *fake)
	}{
		"drive":  {"Pass", func(d *Driver, _ *fake) { d.Drive(0) }},
		"await":  {"Pass", func(d *Driver, _ *fake) { d.Await(never, time.Hour, true) }},
		"spin":   {"Pass", func(d *Driver, _ *fake) { d.Spin(never, time.Hour) }},
		"submit": {"Drain", func(_ *Driver, f *fake) { f.submit(func() {}) }},
		"under":  {"", func(d *Driver, _ *fake) { d.Under(func() { panic(bang) }) }},
	} {
		t.Run(name, func(t *testing.T) {
			d, f := newFake(t, Settings{})
			a := f.await(false)
			f.reaches(State{Callers: 1, Sleeping: true})
			f.asleep()
			mined(f, c.method)
			defer func() {
				require.Equal(t, endedBy(t, f), recover())
				require.True(t, <-a.done)
				require.Zero(t, d.callers.Load())
			}()
			c.call(d, f)
		})
	}
}

// TestPanicInGoroutine: a panic in a goroutine of the Driver, with the token or without, shuts the work.
func TestPanicInGoroutine(t *testing.T) {
	start := func(d *Driver, _ *fake) { d.Start() }
	for name, c := range map[string]struct {
		method string
		thread bool
		call   func(d *Driver, f *fake)
	}{
		"job":              {call: func(d *Driver, _ *fake) { d.Aside(func() { panic(bang) }) }},
		"what it submits":  {"Drain", false, func(d *Driver, f *fake) { d.Aside(func() { f.submit(func() {}) }) }},
		"other":            {call: func(d *Driver, _ *fake) { d.Spawn(func() { panic(bang) }, func() {}) }},
		"background, look": {"Look", false, start},
		"background, pass": {"Pass", false, start},
		"background, arm":  {"Arm", false, start},
		"poller, look":     {"Look", true, start},
		"poller, pass":     {"Pass", true, start},
		"poller, arm":      {"Arm", true, start},
	} {
		t.Run(name, func(t *testing.T) {
			d, f := newFake(t, Settings{Thread: c.thread})
			mined(f, c.method)
			c.call(d, f)
			_ = endedBy(t, f)
		})
	}
}

// TestPanicked: the error of a panic in a call without the token is that of the work, and not a second time.
func TestPanicked(t *testing.T) {
	d, f := newFake(t, Settings{})
	var e *transport.PanicError
	require.ErrorAs(t, d.Panicked("first"), &e)
	require.ErrorAs(t, d.Panicked("second"), &e)
	require.ErrorContains(t, *f.shut.Load(), "first")
}

// TestAside: a job runs without the token, and what it has submitted is taken. Join waits for it.
func TestAside(t *testing.T) {
	d, f := newFake(t, Settings{})
	require.True(t, d.Own())
	ran, gate := make(chan struct{}), make(chan struct{})
	d.Aside(func() { close(ran); <-gate })
	<-ran
	d.GiveBack()
	close(gate)
	var taken atomic.Bool
	d.Aside(func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.submitted = append(f.submitted, func() { taken.Store(true) })
		f.pending.Store(true)
	})
	require.Eventually(t, taken.Load, 30*time.Second, time.Millisecond)
	d.Shut(errOver)
	d.Join(f.take)
	require.Zero(t, d.helpers.Load())
}

// TestSpin drives without sleeping until met, or until the limit.
func TestSpin(t *testing.T) {
	d, f := newFake(t, Settings{})
	met := 0
	d.Spin(func() bool { met++; return met == 10 }, time.Hour)
	require.Equal(t, 10, met)
	require.EqualValues(t, 10, f.passes.Load())
	d.Spin(func() bool { met++; return false }, time.Millisecond)
	require.Greater(t, met, 10)
	require.Zero(t, d.Sleeps())
	require.Zero(t, f.arms.Load())
}

// TestPost says who has to drive what a submission leaves unsent: whoever does already, a sleeper, or else the
// background goroutine after a while.
func TestPost(t *testing.T) {
	type left struct{ kick, soon bool }
	for _, c := range []struct {
		name                                    string
		unsent, held, thread, sleeping, calling bool
		want                                    left
	}{
		{name: "all sent", sleeping: true},
		{name: "unsent", unsent: true, want: left{soon: true}},
		{name: "held", held: true, want: left{soon: true}},
		{name: "unsent, a caller drives", unsent: true, calling: true},
		{name: "unsent, a poller drives", unsent: true, thread: true},
		{name: "unsent, somebody sleeps", unsent: true, sleeping: true, want: left{kick: true}},
		{name: "held, a caller sleeps", held: true, sleeping: true, calling: true, want: left{kick: true}},
		{name: "held, the poller sleeps", held: true, sleeping: true, thread: true, want: left{kick: true}},
	} {
		d, f := newFake(t, Settings{Thread: c.thread})
		f.unsent.Store(c.unsent)
		f.held.Store(c.held)
		if c.sleeping {
			d.sleeper.Store(aCaller)
		}
		if c.calling {
			d.callers.Add(1)
		}
		f.submit(func() {})
		require.Equal(t, c.want, left{d.kick.rung.Load(), d.soon.pending.Load()}, c.name)
		d.sleeper.Store(nobody)
		d.callers.Store(0)
	}
}

// TestStir rings for the sleeper, or else for the background goroutine.
func TestStir(t *testing.T) {
	d, _ := newFake(t, Settings{})
	d.Stir()
	require.Equal(t, []bool{false, true}, []bool{d.kick.hush(), d.nudge.hush()})
	d.sleeper.Store(aCaller)
	d.Stir()
	require.Equal(t, []bool{true, false}, []bool{d.kick.hush(), d.nudge.hush()})
	d.sleeper.Store(nobody)
}

// TestDue: the time of Schedule comes, and Disown asks for the next.
func TestDue(t *testing.T) {
	d, _ := newFake(t, Settings{})
	d.Schedule(10)
	require.Equal(t, []bool{false, true, true}, []bool{d.Due(9), d.Due(10), d.Due(11)})
	require.True(t, d.Under(func() {}))
	require.False(t, d.Due(11))
}

// TestAfterJoin: a call that comes when Join is over touches nothing that Close has closed. Join waits for one that has just
// given the token back and is about to wake others.
func TestAfterJoin(t *testing.T) {
	d, f := newFake(t, Settings{})
	k := d.parking(time.Hour)
	d.mu.Lock()
	over := make(chan bool)
	go func() { over <- d.Under(func() {}) }() // waits for d.mu when it wakes who is parked
	counted := assert.Eventually(t, func() bool { return d.helpers.Load() == 1 && !d.token.Load() }, 5*time.Second, time.Millisecond)
	d.mu.Unlock()
	require.True(t, counted)
	require.True(t, <-over)
	require.Zero(t, d.helpers.Load())
	d.unpark(k)
	d.Shut(errOver)
	d.Join(f.take)
	arms, looks := f.arms.Load(), f.looks.Load()
	require.False(t, d.Await(never, time.Millisecond, false))
	require.True(t, d.Await(func() bool { return true }, time.Millisecond, false))
	require.Equal(t, arms, f.arms.Load(), "it has tried to sleep")
	require.Equal(t, looks, f.looks.Load())
	require.Zero(t, d.callers.Load())
}
