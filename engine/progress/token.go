package progress

import (
	"runtime"
	"time"

	"fserver/engine/trace"
	"fserver/engine/transport"
)

// Drive makes a pass if nobody else does, and reports whether it did. now is the time, give or take what a
// pass takes.
func (d *Driver) Drive(now int64) (found int, mine bool) {
	d.work.Look(now)
	for d.token.CompareAndSwap(false, true) {
		found, mine = found+d.owned(now), true
		// What was submitted after the pass looked, by a thread that then found the token
		// taken, is ours.
		if !d.work.Pending() {
			break
		}
	}
	return found, mine
}

// owned is a pass. Its caller has just taken the token.
func (d *Driver) owned(now int64) int {
	defer d.GiveBack()
	all := d.woken.Load()
	if all {
		d.woken.Store(false)
	}
	found, ended := d.work.Pass(now, all)
	if ended && d.others() {
		d.wakeAll()
	}
	return found
}

// Spin drives until met, at most for limit, and does not sleep. It is for a caller that waits for no peer.
func (d *Driver) Spin(met func() bool, limit time.Duration) {
	for end := trace.Now() + int64(limit); trace.Now() < end; {
		if found, _ := d.Drive(trace.Now()); found == 0 {
			yield()
		}
		if met() {
			break
		}
	}
	d.rearm()
}

// Submit takes what has just been submitted, if the token is free; else the owner does. What the
// transport cannot send at once is left to a caller, which most likely comes at once. If none does,
// the background goroutine drives.
func (d *Driver) Submit() {
	for d.work.Pending() && d.token.CompareAndSwap(false, true) {
		d.post()
	}
}

// post is Submit. Its caller has just taken the token.
func (d *Driver) post() {
	defer d.GiveBack()
	d.work.Drain()
	if d.armed.Load() > 0 && d.work.News() {
		d.alarm(false)
	}
	switch sleeps := d.sleeping(); {
	case !sleeps && (d.callers.Load() > 0 || d.settings.Thread) || !d.work.Unsent() && !d.work.Held():
	case sleeps:
		d.kick.ring()
	default:
		d.soon.set(callerComes)
	}
}

// Stir has another thread make a pass soon: the one that sleeps, or else the background goroutine. For the
// owner. A thread that goes to sleep after Stir has looked for a sleeper asks the descriptors first.
func (d *Driver) Stir() {
	if d.sleeping() {
		d.kick.ring()
	} else {
		d.nudge.ring()
	}
}

// Own takes the token, waiting for the pass that is under way. False means that the work has been
// shut. Its caller defers Disown or GiveBack.
func (d *Driver) Own() bool {
	if d.token.CompareAndSwap(false, true) {
		return true
	}
	d.wanted.Add(1)
	defer d.wanted.Add(-1)
	for looks := 1; !d.token.CompareAndSwap(false, true); looks++ {
		if d.stopped.Load() {
			return false
		}
		if looks%1000 == 0 { // 1 to 2 ns each: the thread that holds it does not run
			runtime.Gosched()
			yield()
		}
	}
	return true
}

// GiveBack gives the token back. It is to be deferred.
func (d *Driver) GiveBack() {
	if p := recover(); p != nil {
		panic(d.crashed(p))
	}
	d.token.Store(false)
}

// Disown gives the token back after something may have ended that others wait for. It wakes them, and
// takes what was submitted meanwhile. It is to be deferred.
func (d *Driver) Disown() {
	if p := recover(); p != nil {
		panic(d.crashed(p))
	}
	d.Schedule(d.work.Next())
	d.Enter() // Join waits for what follows
	defer d.Leave()
	d.token.Store(false)
	d.wakeAll()
	d.Submit()
}

// Under calls f while it holds the token, and reports whether it could: else the work has been shut.
func (d *Driver) Under(f func()) bool {
	if !d.Own() {
		return false
	}
	defer d.Disown()
	f()
	return true
}

// crashed is Panicked for the owner. The token stays taken, and the panic goes on with the error
// that crashed returns.
func (d *Driver) crashed(p any) error {
	err := transport.Caught(p)
	d.shut(err)
	return err
}

// Panicked shuts the work because of a panic in a call or goroutine of it that does not hold the
// token: p is what recover returned. It returns the error that all calls get from now on.
func (d *Driver) Panicked(p any) error {
	err := transport.Caught(p)
	d.callers.Add(1) // Join waits for this
	defer d.callers.Add(-1)
	d.Shut(err)
	return err
}

// Aside calls f, which may block, in a goroutine that does not hold the token. What f submits is
// taken then. Join waits for it.
func (d *Driver) Aside(f func()) {
	d.help(func() { f(); d.Submit() })
}

// help calls f in a goroutine that Join waits for.
func (d *Driver) help(f func()) {
	d.Enter()
	d.Spawn(f, d.Leave)
}

// Enter has Join wait until Leave, for a call that does not hold the token.
func (d *Driver) Enter() { d.helpers.Add(1) }

// Leave undoes Enter.
func (d *Driver) Leave() { d.helpers.Add(-1) }

// Spawn starts a goroutine that calls f and then done. A panic in f shuts the work.
func (d *Driver) Spawn(f, done func()) {
	go func() {
		defer done()
		defer func() {
			if p := recover(); p != nil {
				_ = d.Panicked(p)
			}
		}()
		f()
	}()
}
