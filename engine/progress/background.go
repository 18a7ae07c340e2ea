package progress

import (
	"runtime"
	"sync"
	"time"

	"fserver/engine/trace"
)

// background drives when no caller does: heartbeats, timers, what is left to
// be sent. While callers drive it only checks in, less and less often: where all
// threads share a core, each check takes 10 µs from them. It drives at once where a watch
// is armed, or a stream writes words that Pass looks at, or something waits for a stream: nobody else does
// before an event loop is told, or the word of a stream is seen. If the token stays taken, it naps as well: a
// post may take many milliseconds, and the thread that makes it may need this core.
func (d *Driver) background() {
	tick, failed := restTick, int64(0) // failed: since when the token is taken
	for !d.stopped.Load() {
		now := trace.Now()
		idle := time.Duration(now - d.driven.Load())
		switch {
		case d.callers.Load() > 0 && d.sleeping():
			tick = restTick
			d.stepAside()
		case d.callers.Load() > 0 || idle < restTick && !d.watched() && !d.work.Held():
			runtime.Gosched() // see busyTick
			if d.nap(tick) {
				tick = restTick
			} else {
				tick = min(2*tick, busyTick)
			}
		default:
			found, mine := d.Drive(now)
			if mine {
				tick, failed = restTick, 0
			} else if failed == 0 {
				tick, failed = restTick, now
			}
			switch {
			case !mine && now-failed < int64(yieldAfter):
				yield() // the owner may need this core
			case !mine:
				d.nap(tick)
				tick = min(2*tick, busyTick)
			case found == 0:
				d.idle()
			}
		}
	}
}

// The poller leaves the work to callers for so long after the last of them has left:
// one that calls again soon finds the token free. The poller looks for them no more often than
// lookTick, as each look takes a cache line from the thread that drives.
const (
	grace    = 20 * time.Microsecond
	lookTick = 2 * time.Microsecond
)

// poller drives whenever no caller does: thread mode. It sleeps when it has found
// nothing, or callers have driven, for as long as a caller would spin.
func (d *Driver) poller() {
	addProcs(1)
	defer addProcs(-1)
	if d.settings.Bind != nil {
		d.settings.Bind()
	}
	now := trace.Now()
	quiet, aside := now, now // since when nothing was found, since when callers drive
	for !d.stopped.Load() {
		callers := d.callers.Load() > 0
		if callers || d.wanted.Load() > 0 || now-d.driven.Load() < int64(grace) {
			switch idle := now - aside; {
			case idle < int64(d.settings.Yield):
				for end := now + int64(lookTick); now < end; now = trace.Now() {
				}
			case idle < int64(d.settings.Spin) || !callers:
				yield()
			default:
				d.stepAside()
				aside = trace.Now()
			}
			now = trace.Now()
			quiet = now
			continue
		}
		found, mine := d.Drive(now)
		now = trace.Now()
		aside = now
		switch idle := now - quiet; {
		case found > 0:
			quiet = now
		case idle < int64(d.settings.Yield) && mine:
		case idle < int64(d.settings.Spin):
			yield()
		default:
			d.idle()
			now = trace.Now()
			quiet = now - int64(d.settings.Spin) + int64(yieldAfter)
		}
	}
}

// stepAside naps for long, while there are callers: the last one that leaves ends the nap.
func (d *Driver) stepAside() {
	d.dozing.Store(true)
	d.rearm() // our last pass may have taken what was to wake a caller that sleeps
	if d.callers.Load() > 0 {
		d.nap(d.longest)
	}
	d.dozing.Store(false)
}

// idle sleeps on the descriptors, as the background goroutine or the poller. It returns if a caller sleeps on
// them already: parked, it would not see the last caller leave.
func (d *Driver) idle() {
	if d.busy() {
		return
	}
	if d.sleeper.CompareAndSwap(nobody, atRest) {
		d.asleep(never, d.longest)
	} else {
		d.rearm() // our last pass may have taken what was to wake the caller
	}
}

func never() bool { return false }

// A poller holds a P for as long as there is traffic. So many more there are,
// that callers never wait for one to enter Go.
var moreProcs sync.Mutex

func addProcs(n int) {
	moreProcs.Lock()
	defer moreProcs.Unlock()
	runtime.GOMAXPROCS(runtime.GOMAXPROCS(0) + n)
}
