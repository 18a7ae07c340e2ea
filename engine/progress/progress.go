// Package progress says which thread drives a node, and when. One goroutine at a time holds the
// token, and makes passes over everything that the node owns. Nobody holds the token while asleep.
//
// The holder, called the owner, is a caller inside a waiting call. It polls, then yields between
// polls, then sleeps: what it waits for needs no hand-over, which takes 1 to 2 µs each. When no caller
// drives, the background goroutine steps in: in caller mode a millisecond later, for what must not
// stand still; in thread mode, where it is called the poller, at once, and it polls as a caller
// does. A thread that submits something posts it itself if the token is free.
//
// At most one goroutine sleeps on the descriptors. The others park on channels, and are woken when
// something has ended, or to take over.
package progress

import (
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/cpu"
	"golang.org/x/sys/unix"
)

// Work is what a Driver drives. Methods that are for the owner are called under the token, the others
// from any goroutine.
type Work interface {
	// Look is called before each pass, without the token: for what may take long.
	Look(now int64)
	// Pass makes one round over everything and returns how much it found, and whether something may
	// have ended that others wait for. all: also over what is looked at seldom, because somebody has
	// slept meanwhile. For the owner.
	Pass(now int64, all bool) (found int, ended bool)
	// Next returns when Pass must look at the clock; see Driver.Schedule. For the owner.
	Next() int64
	// Drain takes what was submitted, and posts what can be posted. For the owner.
	Drain()
	// News reports whether something has ended since it was last asked. For the owner.
	News() bool
	// Unsent reports whether a pass has to come before everything that was submitted gets out. For the owner.
	Unsent() bool
	// Shut ends the work for good, with err for everything that waits. For the owner.
	Shut(err error)
	// Pending reports whether something was submitted that no Drain has taken.
	Pending() bool
	// Held reports whether something that was submitted waits for a stream.
	Held() bool
	// Arm makes the descriptors tell of what comes from now on. It reports whether something has come already.
	Arm() (again bool)
}

// Settings are how a Driver waits.
type Settings struct {
	Spin   time.Duration // how long a waiting call polls before it sleeps
	Yield  time.Duration // how long it polls before polls are followed by yields, if that is more than yieldAfter
	Thread bool          // a poller drives when no caller does
	Bind   func()        // called first by the goroutine of the poller
}

// Driver drives one Work. All methods are safe from any goroutine, and those that are for the owner
// under the token.
type Driver struct {
	work     Work
	settings Settings
	longest  time.Duration // LongSleep, but in tests

	_     cpu.CacheLinePad
	token atomic.Bool // held: somebody makes a pass
	// The poller looks at what follows, and the threads that drive write the token all the time.
	_       cpu.CacheLinePad
	wanted  atomic.Int32 // threads that wait for the token; the poller lets them go first
	callers atomic.Int32 // inside Await
	driven  atomic.Int64 // when the last caller left Await, nanoseconds
	turned  atomic.Int64 // when the turn of callers last ended or began, nanoseconds
	_       cpu.CacheLinePad
	timer   atomic.Int64 // see Schedule
	woken   atomic.Bool  // somebody has slept: the next pass looks at everything
	helpers atomic.Int32 // goroutines of help, and calls between Enter and Leave
	_       cpu.CacheLinePad

	sleeper atomic.Int32 // who sleeps on the descriptors, or is about to: nobody, aCaller or atRest
	dozing  atomic.Bool  // the background goroutine naps for long, while a caller sleeps
	stopped atomic.Bool
	sleeps  atomic.Uint64

	mu     sync.Mutex
	parked []*parking
	spare  []*parking
	count  atomic.Int32 // of parked

	epoll int
	kick  bell  // wakes the thread that sleeps on the descriptors
	nudge bell  // ends a nap of the background goroutine
	soon  timer // likewise, in a while

	streams
	watches
}

// Open makes a Driver. It drives when it has been started.
func Open(work Work, settings Settings) (*Driver, error) {
	settings.Yield = max(settings.Yield, yieldAfter)
	d := &Driver{work: work, settings: settings, longest: LongSleep, watches: watches{all: map[uint64]*watch{}}}
	d.unpark(d.parking(0)) // one caller at a time then parks without an allocation
	var err error
	d.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err = errors.Join(err, d.kick.open(), d.nudge.open(), d.soon.open()); err == nil {
		err = d.Add(d.kick.fd)
	}
	if err != nil {
		d.Close()
		return nil, err
	}
	return d, nil
}

// Start lets the background goroutine or the poller run.
func (d *Driver) Start() {
	drive := d.background
	if d.settings.Thread {
		drive = d.poller
	}
	d.help(drive)
}

// Add makes a sleeper wake when fd is readable.
func (d *Driver) Add(fd int) error {
	return unix.EpollCtl(d.epoll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)})
}

// Remove undoes Add.
func (d *Driver) Remove(fd int) { _ = unix.EpollCtl(d.epoll, unix.EPOLL_CTL_DEL, fd, nil) }

// Schedule sets when Pass must look at the clock, nanoseconds. It is Due then, and nobody sleeps for longer.
func (d *Driver) Schedule(at int64) { d.timer.Store(at) }

// Due reports whether the time of Schedule has come.
func (d *Driver) Due(now int64) bool { return now >= d.timer.Load() }

// Shut shuts the work, unless that has been done. Calls that wait, and all later ones, get err.
func (d *Driver) Shut(err error) {
	if d.Own() {
		d.shut(err)
	}
}

// shut is Shut for the owner. The token stays taken: nobody drives again.
func (d *Driver) shut(err error) {
	d.work.Shut(err)
	d.stopped.Store(true)
	d.wakeAll()
	d.alarm(true)
	d.nudge.ring()
}

// Stopped reports whether the work has been shut.
func (d *Driver) Stopped() bool { return d.stopped.Load() }

// Join waits, after Shut, until no call and no goroutine of the Driver is under way. It calls drain meanwhile,
// which takes what is still submitted.
func (d *Driver) Join(drain func()) {
	for d.callers.Load() > 0 || d.helpers.Load() > 0 || d.work.Pending() {
		drain()
		d.kick.ring()
		d.nudge.ring()
		d.wakeAll()
		time.Sleep(100 * time.Microsecond)
	}
}

// Close closes the descriptors; those that could not be opened are -1. It comes after Join, if it was started.
func (d *Driver) Close() {
	unix.Close(d.soon.fd)
	unix.Close(d.nudge.fd)
	unix.Close(d.kick.fd)
	unix.Close(d.epoll)
}

// State is who waits at a moment.
type State struct {
	Callers  int  // inside Await
	Parked   int  // of these
	Streams  int  // whose words Pass looks at
	Sleeping bool // somebody sleeps on the descriptors, or is about to
	Resting  bool // it is the background goroutine, or the poller
}

// State returns who waits.
func (d *Driver) State() State {
	sleeper := d.sleeper.Load()
	return State{int(d.callers.Load()), int(d.count.Load()), int(d.running.Load()), sleeper != nobody, sleeper == atRest}
}

// The values of sleeper. One word says whether somebody sleeps and who, so the two never differ. A caller that finds the
// background goroutine wakes it and takes its place. A caller that finds another caller parks until that one leaves.
const (
	nobody  int32 = iota
	aCaller       // inside Await
	atRest        // the background goroutine, or the poller
)

// sleeping reports whether somebody sleeps on the descriptors, or is about to.
func (d *Driver) sleeping() bool { return d.sleeper.Load() != nobody }

// Settings returns how the Driver waits.
func (d *Driver) Settings() Settings { return d.settings }

// Sleeps returns how often a waiting thread has gone to sleep.
func (d *Driver) Sleeps() uint64 { return d.sleeps.Load() }
