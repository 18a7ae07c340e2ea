package progress

import (
	"errors"
	"math"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// errOver is what a Driver is shut with at the end of a test.
var errOver = errors.New("test: the end")

// fake is a Work around a queue of events. As a Fabric may, it makes its descriptor readable only if Arm was
// called since the last Pass.
type fake struct {
	tb     testing.TB
	d      *Driver
	fd     int
	owners atomic.Int32 // that use it now
	ended  int          // events and submissions so far; of the owner, without a lock
	news   bool
	stage  func(at string) // called where a method has just begun, by its name

	looks, passes, all, drains, arms atomic.Int64 // calls
	signals                          atomic.Int64 // calls of Await that a signal has ended
	unsent, held                     atomic.Bool
	shut                             atomic.Pointer[error]
	shuts                            atomic.Int32

	mu        sync.Mutex
	told      bool // Arm has been called since the last Pass
	events    []func()
	submitted []func()
	pending   atomic.Bool
}

// newFake gives a Driver that is not started, and what it drives. A sleeper that is not woken sleeps for an hour.
func newFake(tb testing.TB, s Settings) (*Driver, *fake) {
	f := &fake{tb: tb, stage: func(string) {}}
	var err error
	f.fd, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	require.NoError(tb, err)
	f.d, err = Open(f, s)
	require.NoError(tb, err)
	f.d.longest = time.Hour
	f.d.Schedule(math.MaxInt64)
	require.NoError(tb, f.d.Add(f.fd))
	tb.Cleanup(func() {
		f.d.Shut(errOver)
		f.d.Join(f.take)
		f.d.UnwatchAll()
		f.d.Close()
		unix.Close(f.fd)
		require.EqualValues(tb, 1, f.shuts.Load())
	})
	return f.d, f
}

// enter is how a method for the owner begins.
func (f *fake) enter(at string) (leave func()) {
	if f.owners.Add(1) != 1 {
		f.tb.Errorf("%s: another goroutine has the token too", at)
	}
	f.stage(at)
	return func() { f.owners.Add(-1) }
}

func (f *fake) Look(int64) {
	f.looks.Add(1)
	f.stage("Look")
}

func (f *fake) Pass(_ int64, all bool) (found int, ended bool) {
	defer f.enter("Pass")()
	f.passes.Add(1)
	if all {
		f.all.Add(1)
	}
	f.take()
	f.mu.Lock()
	events := f.events
	f.events, f.told = nil, false
	f.mu.Unlock()
	var buf [8]byte
	_, _ = unix.Read(f.fd, buf[:])
	for _, event := range events {
		event()
		f.ended++
	}
	news := f.News()
	return len(events), len(events) > 0 || news
}

func (f *fake) Next() int64 { return math.MaxInt64 }

func (f *fake) Drain() {
	defer f.enter("Drain")()
	f.drains.Add(1)
	f.take()
}

// take does what was submitted.
func (f *fake) take() {
	f.mu.Lock()
	submitted := f.submitted
	f.submitted = nil
	f.pending.Store(false)
	f.mu.Unlock()
	for _, do := range submitted {
		do()
		f.ended++
		f.news = true
	}
}

func (f *fake) News() bool {
	news := f.news
	f.news = false
	return news
}

func (f *fake) Unsent() bool { return f.unsent.Load() }

func (f *fake) Shut(err error) {
	f.shuts.Add(1)
	f.shut.Store(&err)
}

func (f *fake) Pending() bool { return f.pending.Load() }
func (f *fake) Held() bool    { return f.held.Load() }

func (f *fake) Arm() bool {
	f.arms.Add(1)
	f.stage("Arm")
	f.mu.Lock()
	defer f.mu.Unlock()
	f.told = true
	return len(f.events) > 0
}

// arrives puts an event into the queue, as a peer does.
func (f *fake) arrives(event func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.events = append(f.events, event)
	if f.told {
		f.told = false
		one := [8]byte{1}
		_, _ = unix.Write(f.fd, one[:])
	}
}

// submit hands something to the owner, as a caller does.
func (f *fake) submit(do func()) {
	f.mu.Lock()
	f.submitted = append(f.submitted, do)
	f.pending.Store(true)
	f.mu.Unlock()
	f.d.Submit()
}

// until calls Await until met, and again after a signal.
func (f *fake) until(met func() bool, spin bool) {
	for !f.d.Await(met, time.Hour, spin) {
		f.signals.Add(1)
	}
}

// awaits is a call of Await that waits for a flag.
type awaits struct {
	met  atomic.Bool
	done chan bool
}

// await calls until in a goroutine of its own.
func (f *fake) await(spin bool) *awaits {
	a := &awaits{done: make(chan bool, 1)}
	go func() {
		f.until(func() bool { return a.met.Load() || f.d.Stopped() }, spin)
		a.done <- true
	}()
	return a
}

// ends waits until a call has ended. After a signal the caller that should be woken may be another one than the test
// expects, so all are woken.
func (f *fake) ends(a *awaits) {
	f.tb.Helper()
	for {
		select {
		case <-a.done:
			return
		case <-time.After(100 * time.Millisecond):
			if f.signals.Load() > 0 {
				f.d.Under(func() {})
			}
		}
	}
}

// reaches waits until the Driver is in a state.
func (f *fake) reaches(want State) {
	f.tb.Helper()
	require.Eventually(f.tb, func() bool { return f.d.State() == want }, 30*time.Second, 100*time.Microsecond, "%+v", want)
}

// asleep waits until the one who sleeps has armed the descriptors, and is about to wait for them.
func (f *fake) asleep() {
	f.tb.Helper()
	told := func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		return f.told
	}
	require.Eventually(f.tb, told, 30*time.Second, 100*time.Microsecond)
}
