package progress

import (
	"runtime"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"fserver/engine/trace"
)

// Waiting callers and the background goroutine look at the clock and at each
// other at these intervals.
const (
	yieldAfter = 20 * time.Microsecond // of polling; then every poll is followed by a yield; see Settings
	restTick   = time.Millisecond      // without callers, until the background goroutine drives
	// At most between its looks while callers drive. Where a goroutine has its turn for
	// 10 ms, or is in a system call for that long, Go's monitor takes the P from it and
	// then wakes every 20 µs for a while: 3,400 times a second, 9 % of the core if the
	// callers have but one. So no nap is that long, and before each the turn is ended.
	busyTick = 8 * time.Millisecond
	// turn is how long callers that poll keep their turn, for the same reason. It goes on over calls
	// that follow each other. Callers that poll at the same time share one clock.
	turn = 5 * time.Millisecond
	// LongSleep is how long a sleeper sleeps at most, and a nap while a caller sleeps; see nudge.
	LongSleep = time.Second
)

// Await drives or waits until met, which is asked without the token, or until limit has passed.
// spin says whether to poll before sleeping. False means that the time is up, or that the work has been shut.
func (d *Driver) Await(met func() bool, limit time.Duration, spin bool) bool {
	if met() {
		return true
	}
	d.callers.Add(1)
	if d.stopped.Load() { // Join and Close may be over
		d.callers.Add(-1)
		return met()
	}
	d.soon.stop()
	now := trace.Now()
	defer func() { d.depart(now) }()
	began, end := now, now+int64(max(0, min(limit, 1<<61)))
	quiet := now // since when nothing was found
	if !spin {
		quiet = now - int64(d.settings.Spin)
	}
	for {
		found, mine := d.Drive(now)
		if met() {
			return true
		}
		now = trace.Now()
		if now >= end {
			return false
		}
		if found > 0 {
			quiet = now
			continue
		}
		switch idle := now - quiet; {
		case idle < int64(d.settings.Spin) && d.endTurn(now, began):
			now = trace.Now()
		case idle < int64(d.settings.Yield) && mine:
		case idle < int64(d.settings.Spin):
			yield()
		default:
			if d.rest(met, time.Duration(end-now)) {
				return false // a signal: the caller wants to look at it
			}
			now = trace.Now()
			began, quiet = now, now-int64(d.settings.Spin)+int64(yieldAfter)
		}
	}
}

// depart is how a caller leaves Await, which has looked at the clock at now.
func (d *Driver) depart(now int64) {
	d.driven.Store(now)
	d.rearm()
	if d.work.Held() {
		if !d.settings.Thread {
			d.soon.set(callerComes)
		}
		if d.sleeping() { // the sleeper does not know of this work
			d.kick.ring()
		}
	}
	if d.callers.Add(-1) > 0 {
		d.relay()
	} else if d.dozing.Load() || d.unattended() {
		d.rouse()
	}
}

// endTurn lets other goroutines run if the callers' turn is over, and says whether it has. A turn begins
// with a call after a pause, and after a sleep.
func (d *Driver) endTurn(now, began int64) bool {
	if now-d.turned.Load() <= int64(turn) {
		return false
	}
	d.turned.Store(now)
	if now-began <= int64(turn) && began-d.driven.Load() > int64(turn) {
		return false
	}
	runtime.Gosched()
	return true
}

// yield gives the core to whoever else wants it, another process above all.
func yield() { syscall.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0) }

// rest sleeps until there may be something to do, at most for limit. True means
// that a signal came.
func (d *Driver) rest(met func() bool, limit time.Duration) (interrupted bool) {
	if d.busy() {
		return false
	}
	if d.sleeper.CompareAndSwap(nobody, aCaller) {
		return d.asleep(met, limit)
	}
	d.rearm()
	if d.sleeper.Load() == atRest { // the background goroutine has the descriptors: take them over
		d.kick.ring()
		runtime.Gosched()
		yield()
		return false
	}
	d.park(met, limit)
	return false
}

// busy reports whether streams write words so often that nobody sleeps.
func (d *Driver) busy() bool {
	if d.streams.lull(d.settings.Spin) != 0 {
		d.sleeps.Add(1)
		return false
	}
	if d.streams.idle() >= d.settings.Yield {
		yield()
	}
	return true
}

// asleep sleeps on the descriptors. Its caller is the sleeper.
func (d *Driver) asleep(met func() bool, limit time.Duration) (interrupted bool) {
	defer d.sleeper.Store(nobody)
	// Before there was a sleeper, another thread may have ended what we wait for without seeing us sleep.
	if met() || d.work.Pending() {
		return false
	}
	return d.sleep(limit)
}

// rearm arms the descriptors for a sleeper. A Fabric that is polled tells nobody, so a thread that has
// polled while somebody slept calls rearm when it stops.
func (d *Driver) rearm() {
	if d.sleeping() && d.work.Arm() {
		d.ring(&d.kick)
	}
}

// sleep waits on the descriptors, for at most limit or until the next timer.
func (d *Driver) sleep(limit time.Duration) (interrupted bool) {
	defer d.woken.Store(true)
	if d.work.Arm() {
		return false
	}
	var err error
	lull := d.lull()
	ms := min(limit, lull, time.Duration(d.timer.Load()-trace.Now()))
	if lull < time.Millisecond {
		err = d.doze(ms)
	} else {
		var ev [4]unix.EpollEvent
		_, err = unix.EpollWait(d.epoll, ev[:], int(max(0, (ms+time.Millisecond-1)/time.Millisecond)))
	}
	d.kick.hush()
	return err == unix.EINTR
}

// park waits until somebody calls wakeAll or relay.
func (d *Driver) park(met func() bool, limit time.Duration) {
	k := d.parking(limit)
	defer d.unpark(k)
	if met() || d.sleeper.Load() != aCaller { // only a caller that leaves wakes who is parked
		return
	}
	select {
	case <-k.wake:
	case <-k.timer.C:
	}
}

func (d *Driver) parking(limit time.Duration) *parking {
	d.mu.Lock()
	defer d.mu.Unlock()
	var k *parking
	if i := len(d.spare) - 1; i >= 0 {
		k, d.spare = d.spare[i], d.spare[:i]
		k.timer.Reset(limit)
	} else {
		k = &parking{make(chan struct{}, 1), time.NewTimer(limit)}
	}
	d.parked = append(d.parked, k)
	d.count.Add(1)
	return k
}

func (d *Driver) unpark(k *parking) {
	k.timer.Stop()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.parked = slices.DeleteFunc(d.parked, func(o *parking) bool { return o == k })
	d.count.Add(-1)
	select {
	case <-k.wake:
	default:
	}
	d.spare = append(d.spare, k)
}

// relay wakes one parked caller, to take over from one that leaves.
func (d *Driver) relay() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.parked) > 0 {
		d.parked[0].rouse()
	}
}

// parking is where one caller waits without descriptors.
type parking struct {
	wake  chan struct{} // of size 1
	timer *time.Timer
}

func (k *parking) rouse() {
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// others reports whether a caller sleeps or is parked, or a watch is armed. The caller that asks
// does not sleep.
func (d *Driver) others() bool {
	return d.count.Load() > 0 || d.armed.Load() > 0 || d.sleeper.Load() == aCaller
}

// wakeAll makes each thread that sleeps look again, and each event loop that has armed a watch.
func (d *Driver) wakeAll() {
	if d.sleeping() {
		d.kick.ring()
	}
	if d.armed.Load() > 0 {
		d.alarm(false)
	}
	if d.count.Load() == 0 {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, k := range d.parked {
		k.rouse()
	}
}
