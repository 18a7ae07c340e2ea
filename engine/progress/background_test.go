package progress

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/trace"
)

// TestNap: a nap ends when somebody nudges, when the time for callers to come is over, or by itself.
func TestNap(t *testing.T) {
	d, _ := newFake(t, Settings{})
	require.False(t, d.nap(time.Millisecond))
	d.driven.Store(1)
	d.nudge.ring()
	require.True(t, d.nap(time.Hour))
	require.EqualValues(t, 1, d.driven.Load())
	d.soon.set(time.Microsecond)
	require.True(t, d.nap(time.Hour))
	require.Zero(t, d.driven.Load(), "the goroutine drives at once")
	require.False(t, d.nap(time.Millisecond))
}

// TestBackgroundDrives: while no caller drives, what comes is taken, and what was left unsent or waits for a stream is
// driven.
func TestBackgroundDrives(t *testing.T) {
	for _, thread := range []bool{false, true} {
		var bound atomic.Int32
		d, f := newFake(t, Settings{Thread: thread, Bind: func() { bound.Add(1) }})
		d.Start()
		f.reaches(State{Sleeping: true, Resting: true})
		require.Equal(t, thread, bound.Load() == 1)
		came := make(chan struct{})
		f.asleep()
		f.arrives(func() { close(came) })
		<-came
		f.reaches(State{Sleeping: true, Resting: true})
		f.asleep()
		f.unsent.Store(true)
		passes := f.passes.Load()
		require.Eventually(t, func() bool { // it may wake by itself once more, and then sees no submission
			f.submit(func() {})
			return f.passes.Load() > passes
		}, 30*time.Second, time.Millisecond)
		f.unsent.Store(false)
		f.held.Store(true)
		f.submit(func() {})
		passes = f.passes.Load()
		require.Eventually(t, func() bool { return f.passes.Load() > passes+10 }, 30*time.Second, time.Millisecond)
	}
}

// TestBackgroundStandsAside: while a caller polls, the background goroutine makes no pass but the one that it may
// have begun.
func TestBackgroundStandsAside(t *testing.T) {
	for _, thread := range []bool{false, true} {
		d, f := newFake(t, Settings{Spin: time.Hour, Yield: time.Hour, Thread: thread})
		d.Start()
		var asked, before int64
		f.until(func() bool {
			if asked++; asked == 2 { // the caller counts, and has made a pass
				before = f.looks.Load()
			}
			return asked > 20_000
		}, true)
		require.LessOrEqual(t, f.looks.Load()-before, asked-2+1)
	}
}

// TestBackgroundLooks: just after a caller has left, the background goroutine naps, unless a stream runs or something
// waits for one.
func TestBackgroundLooks(t *testing.T) {
	for _, held := range []bool{false, true} {
		d, f := newFake(t, Settings{})
		d.driven.Store(trace.Now() + int64(time.Hour))
		d.Start()
		time.Sleep(20 * time.Millisecond)
		require.Zero(t, f.looks.Load())
		if f.held.Store(held); !held {
			d.Streams(1)
		}
		require.Eventually(t, func() bool { return f.passes.Load() > 10 }, 30*time.Second, time.Millisecond)
	}
}

// TestStepAside: while a caller sleeps, who steps aside arms the descriptors for it, as its own last pass may have
// taken what was to wake it. Without callers there is nobody to step aside for.
func TestStepAside(t *testing.T) {
	d, f := newFake(t, Settings{})
	d.stepAside()
	require.Zero(t, f.arms.Load())
	d.sleeper.Store(aCaller)
	d.callers.Add(1)
	d.nudge.ring() // it does not nap
	d.stepAside()
	require.EqualValues(t, 1, f.arms.Load())
	require.False(t, d.dozing.Load())
	d.sleeper.Store(nobody)
	d.callers.Store(0)
}

// TestIdleBesideACaller: while a caller sleeps on the descriptors, the background goroutine does not say that it is
// the one who does, as nobody would wake the caller then; and it does not park, where it would not see the caller leave.
func TestIdleBesideACaller(t *testing.T) {
	d, f := newFake(t, Settings{})
	d.sleeper.Store(aCaller)
	f.stage = func(at string) {
		if at == "Arm" {
			require.True(t, d.others(), "it is woken when something has ended")
		}
	}
	d.idle()
	require.EqualValues(t, 1, f.arms.Load())
	require.Equal(t, State{Sleeping: true}, d.State())
	d.sleeper.Store(nobody)
}

// TestBackgroundNapsBesideAPost: while somebody has the token for long, as a thread that posts to a NIC that does its
// work in the system call, the background goroutine leaves the core to others. It called sched_yield all that time.
func TestBackgroundNapsBesideAPost(t *testing.T) {
	d, f := newFake(t, Settings{})
	d.Start()
	f.reaches(State{Sleeping: true, Resting: true})
	require.True(t, d.Own())
	d.Stir() // its sleep ends, and it finds the token taken
	require.Eventually(t, func() bool { return !d.sleeping() }, 30*time.Second, time.Millisecond)
	time.Sleep(10 * time.Millisecond) // it yields for 20 µs
	looks := f.looks.Load()
	time.Sleep(200 * time.Millisecond)
	require.Less(t, f.looks.Load()-looks, int64(1000), "it looks once a millisecond at first")
	d.Disown()
	f.reaches(State{Sleeping: true, Resting: true})
}

// TestPollerPolls: a poller polls for as long as a caller would, and then sleeps.
func TestPollerPolls(t *testing.T) {
	d, f := newFake(t, Settings{Spin: time.Hour, Thread: true})
	d.Start()
	require.Eventually(t, func() bool { return f.passes.Load() > 1000 }, 30*time.Second, time.Millisecond)
	require.Zero(t, d.Sleeps())
}
