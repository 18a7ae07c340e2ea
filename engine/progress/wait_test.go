package progress

import (
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/trace"
)

// TestAwait drives until met, or until the limit. What is met already needs no pass.
func TestAwait(t *testing.T) {
	d, f := newFake(t, Settings{Spin: time.Hour})
	require.True(t, d.Await(func() bool { return true }, 0, true))
	require.Zero(t, f.passes.Load())
	asked := 0
	require.True(t, d.Await(func() bool { asked++; return asked == 10 }, time.Hour, true))
	require.EqualValues(t, 9, f.passes.Load())
	require.False(t, d.Await(never, 0, true))
	require.EqualValues(t, 10, f.passes.Load())
	require.False(t, d.Await(never, time.Millisecond, true))
	require.Zero(t, d.Sleeps())
	require.Zero(t, d.callers.Load())
}

// TestTurn: calls that follow each other end their turn now and then, and so does a long one. A call after a pause
// does not.
func TestTurn(t *testing.T) {
	d, _ := newFake(t, Settings{Spin: time.Hour})
	require.False(t, d.Await(never, turn/5, true))
	given := d.turned.Load()
	next := func() bool { return d.turned.Load() > given }
	require.Eventually(t, func() bool { return !d.Await(never, turn/5, true) && next() }, time.Minute, 1)
	given = d.turned.Load()
	require.True(t, d.Await(next, time.Minute, true))

	last := int64(turn)
	d.driven.Store(last)
	d.turned.Store(0)
	require.True(t, d.endTurn(3*last, 2*last), "a call that follows the one before")
	require.False(t, d.endTurn(4*last, 2*last), "too soon")
	require.False(t, d.endTurn(6*last, 5*last), "a call after a pause")
	require.True(t, d.endTurn(8*last, 5*last), "a long one")
}

// TestSleep: a caller without spin sleeps at once, is woken by the descriptors, and then has everything looked at.
func TestSleep(t *testing.T) {
	d, f := newFake(t, Settings{Spin: time.Hour})
	a := f.await(false)
	f.reaches(State{Callers: 1, Sleeping: true})
	f.asleep()
	all := f.all.Load() // 0, but for signals, which end a sleep too
	require.Less(t, all, int64(d.Sleeps()))
	f.arrives(func() { a.met.Store(true) })
	f.ends(a)
	require.GreaterOrEqual(t, int64(d.Sleeps()), all+1)
	require.EqualValues(t, d.Sleeps(), f.all.Load())
	d.Drive(0)
	require.EqualValues(t, d.Sleeps(), f.all.Load())
}

// TestSleepEnds: a sleeper sleeps no longer than its limit, or until Due.
func TestSleepEnds(t *testing.T) {
	d, f := newFake(t, Settings{})
	require.False(t, d.Await(never, time.Millisecond, false))
	require.NotZero(t, d.Sleeps())
	d.Schedule(0)
	sleeps := d.Sleeps()
	f.until(func() bool { return d.Sleeps() > sleeps+10 }, false)
}

// TestNoSleep: who is about to sleep does not if that has come meanwhile what it waits for, if something was
// submitted, if Arm says that something has come, or while a stream is to be looked at all the time. Nor does a caller
// park if the sleeper has gone.
func TestNoSleep(t *testing.T) {
	d, f := newFake(t, Settings{})
	require.False(t, d.rest(func() bool { return true }, time.Hour))
	f.pending.Store(true)
	require.False(t, d.rest(never, time.Hour))
	f.pending.Store(false)
	f.arrives(func() {})
	require.False(t, d.rest(never, time.Hour))
	require.EqualValues(t, 3, d.Sleeps())
	require.False(t, d.sleeping())
	d.park(never, time.Hour) // nobody sleeps
	d.sleeper.Store(aCaller)
	d.park(func() bool { return true }, time.Hour)
	d.sleeper.Store(nobody)
	d.Streams(1)
	d.Stirred(trace.Now() + int64(time.Hour))
	require.False(t, d.rest(never, time.Hour))
	require.EqualValues(t, 3, d.Sleeps())
}

// TestRelay: a caller that leaves has one that is parked take over the descriptors, and wakes nobody else.
func TestRelay(t *testing.T) {
	d, f := newFake(t, Settings{})
	first := f.await(false)
	f.reaches(State{Callers: 1, Sleeping: true})
	f.asleep()
	second, third := f.await(false), f.await(false)
	f.reaches(State{Callers: 3, Parked: 2, Sleeping: true})
	first.met.Store(true)
	d.kick.ring() // nothing has ended, so nobody else is woken
	f.ends(first)
	f.reaches(State{Callers: 2, Parked: 1, Sleeping: true})
	for _, a := range []*awaits{second, third} {
		require.True(t, d.Under(func() { a.met.Store(true) })) // wakes all
		f.ends(a)
	}
	f.reaches(State{})
}

// TestParkedHear: a parked caller is woken when something has ended, whoever drove, and ends at its limit.
func TestParkedHear(t *testing.T) {
	d, f := newFake(t, Settings{})
	first := f.await(false)
	f.reaches(State{Callers: 1, Sleeping: true})
	f.asleep()
	require.False(t, d.Await(never, time.Millisecond, false))
	require.GreaterOrEqual(t, d.Sleeps(), uint64(2))
	second := f.await(false)
	f.reaches(State{Callers: 2, Parked: 1, Sleeping: true})
	f.arrives(func() { second.met.Store(true) }) // the sleeper finds it
	f.ends(second)
	f.reaches(State{Callers: 1, Sleeping: true})
	f.asleep()
	second = f.await(false)
	f.reaches(State{Callers: 2, Parked: 1, Sleeping: true})
	f.arrives(func() { second.met.Store(true); first.met.Store(true) })
	f.ends(first)
	f.ends(second)
	require.Len(t, d.spare, 1) // it was used again
}

// TestTakesOver: a caller takes the descriptors over from the background goroutine, which then leaves it alone, and
// has them back.
func TestTakesOver(t *testing.T) {
	for _, thread := range []bool{false, true} {
		d, f := newFake(t, Settings{Thread: thread})
		d.Start()
		for range 3 {
			f.reaches(State{Sleeping: true, Resting: true})
			a := f.await(false)
			f.reaches(State{Callers: 1, Sleeping: true})
			require.Eventually(t, d.dozing.Load, 30*time.Second, time.Millisecond)
			require.True(t, d.Under(func() { a.met.Store(true) }))
			f.ends(a)
		}
		f.reaches(State{Sleeping: true, Resting: true})
	}
}

// TestRearm: who has polled while another one sleeps arms the descriptors before it goes, and wakes the sleeper if
// something has come.
func TestRearm(t *testing.T) {
	d, f := newFake(t, Settings{Spin: time.Hour})
	a := f.await(false)
	f.reaches(State{Callers: 1, Sleeping: true})
	f.asleep()
	for name, polls := range map[string]func(){
		"Await": func() { require.False(t, d.Await(never, 0, true)) },
		"Spin":  func() { d.Spin(never, time.Millisecond) },
	} {
		arms := f.arms.Load()
		polls()
		require.Greater(t, f.arms.Load(), arms, name)
		f.asleep()
	}
	// It has come between the last pass and Arm.
	f.stage = func(at string) {
		if at == "Arm" {
			f.stage = func(string) {}
			f.mu.Lock()
			f.events = append(f.events, func() { a.met.Store(true) })
			f.mu.Unlock()
		}
	}
	require.False(t, d.Await(never, 0, true))
	f.ends(a)
}

// TestLeaving says whom a caller that leaves tells: the background goroutine, if it naps and has to drive.
func TestLeaving(t *testing.T) {
	type told struct{ nudge, soon, kick bool }
	for _, c := range []struct {
		name                  string
		dozing, held, watched bool
		sleeper               int32
		thread, others        bool
		want                  told
	}{
		{name: "nothing to do"},
		{name: "it naps for long", dozing: true, want: told{nudge: true}},
		{name: "another caller drives", dozing: true, watched: true, others: true},
		{name: "a watch is armed", watched: true, want: told{nudge: true}},
		{name: "a watch is armed, and it sleeps", watched: true, sleeper: atRest},
		{name: "a watch is armed, and the poller drives", watched: true, thread: true},
		{name: "something waits for a stream", held: true, want: told{soon: true}},
		{name: "something waits for a stream, and another sleeps", held: true, sleeper: aCaller, want: told{soon: true, kick: true}},
		{name: "something waits for a stream, and the poller drives", held: true, thread: true},
		{name: "something waits for a stream, and the poller sleeps", held: true, thread: true, sleeper: atRest, want: told{kick: true}},
	} {
		d, f := newFake(t, Settings{Thread: c.thread})
		d.dozing.Store(c.dozing)
		f.held.Store(c.held)
		d.sleeper.Store(c.sleeper)
		if c.watched {
			d.Streams(1)
		}
		if c.others {
			d.callers.Add(1)
		}
		require.False(t, d.Await(never, 0, true))
		require.Equal(t, c.want, told{d.nudge.rung.Load(), d.soon.pending.Load(), d.kick.rung.Load()}, c.name)
		d.callers.Store(0)
		d.sleeper.Store(nobody)
	}
}

// TestLull: who sleeps looks at the words of streams all the time at first, then ever more seldom.
func TestLull(t *testing.T) {
	d, f := newFake(t, Settings{})
	require.Equal(t, time.Hour, d.lull())
	f.held.Store(true)
	require.Equal(t, heldEvery, d.lull())
	f.held.Store(false)
	d.Streams(1)
	d.Stirred(trace.Now() - int64(time.Hour))
	require.Equal(t, lookAtLast, d.lull())
	d.Stirred(trace.Now() - int64(8*time.Millisecond))
	require.GreaterOrEqual(t, d.lull(), 500*time.Microsecond)
	d.Stirred(trace.Now() + int64(time.Hour))
	require.Zero(t, d.lull())
	d.settings.Spin = 20 * time.Millisecond
	d.Stirred(trace.Now() - int64(time.Millisecond))
	require.Zero(t, d.lull(), "a caller would poll")
	d.Stirred(trace.Now() - int64(time.Hour))
	require.Equal(t, lookAtLast, d.lull())
	d.Streams(-1)
	require.Equal(t, time.Hour, d.lull())
}

// TestLooksWhileItSleeps: a sleeper makes passes while a stream runs, or something waits for one.
func TestLooksWhileItSleeps(t *testing.T) {
	for _, held := range []bool{false, true} {
		d, f := newFake(t, Settings{})
		f.held.Store(held)
		if !held {
			d.Streams(1)
			d.Stirred(trace.Now() - int64(time.Hour))
		}
		f.until(func() bool { return d.Sleeps() > 10 }, false)
	}
}

// TestNothingIsMissed has callers and an event loop wait, in both modes, for what comes from a peer, from calls and
// from what they submit themselves. If one of them were not woken, it would sleep for an hour.
func TestNothingIsMissed(t *testing.T) {
	for name, s := range map[string]Settings{
		"caller":        {Spin: 50 * time.Microsecond},
		"caller, spin":  {Spin: time.Millisecond, Yield: time.Millisecond},
		"caller, sleep": {},
		"thread":        {Spin: 50 * time.Microsecond, Thread: true},
		"thread, sleep": {Thread: true},
	} {
		t.Run(name, func(t *testing.T) {
			d, f := newFake(t, s)
			d.Start()
			peer := make(chan func(), 64)
			var all sync.WaitGroup
			for range 5 {
				all.Go(func() {
					for range 300 {
						waitsOnce(t, f, peer)
					}
				})
			}
			all.Go(func() { loops(t, f, peer) })
			over := make(chan struct{})
			go func() { all.Wait(); close(over) }()
			for limit := time.After(2 * time.Minute); ; {
				select {
				case event := <-peer:
					if rand.IntN(2) == 0 {
						yield()
					}
					f.arrives(event)
					continue
				case <-over:
				case <-limit:
					require.Fail(t, "somebody was not woken", "%+v", d.State())
				}
				break
			}
		})
	}
}

// waitsOnce waits for something that is on its way.
func waitsOnce(t *testing.T, f *fake, peer chan<- func()) {
	a := &awaits{}
	met := func() { a.met.Store(true) }
	switch rand.IntN(4) {
	case 0:
		f.submit(met)
	case 1:
		go f.d.Under(met)
	case 2:
		f.d.Aside(func() { f.submit(met) })
	default:
		peer <- met
	}
	if rand.IntN(4) == 0 { // and goes
		f.d.Await(a.met.Load, time.Duration(rand.IntN(100))*time.Microsecond, true)
	}
	for !f.d.Await(a.met.Load, time.Hour, rand.IntN(2) == 0) {
		if f.d.Stopped() { // else a signal of the runtime's
			t.Error("the work has been shut")
			return
		}
	}
}

// loops is an event loop that waits for something from a peer, again and again.
func loops(t *testing.T, f *fake, peer chan<- func()) {
	id, fd := newWatch(t, f.d)
	for range 300 {
		a := &awaits{}
		peer <- func() { a.met.Store(true) }
		for f.d.Arm(id) && !a.met.Load() && !f.d.Stopped() {
			_ = alarmed(fd, time.Hour)
		}
	}
}
