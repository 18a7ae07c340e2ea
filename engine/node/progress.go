package node

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/cpu"
	"golang.org/x/sys/unix"

	"fserver/engine/trace"
)

// Progress and waiting. One goroutine at a time holds the token and makes a
// pass over everything that the node owns. Nobody holds the token while asleep.
//
// That is a caller inside a waiting call, who polls, then yields between polls,
// then sleeps: what he waits for needs no hand-over, which takes 1 to 2 µs each. When
// no caller drives, the background goroutine steps in: in caller mode a millisecond
// later, for what must not stand still; in thread mode, where it is called the poller,
// at once, and it polls as a caller does. Who submits something posts it himself if the
// token is free.
//
// At most one goroutine sleeps on the descriptors; the others park on channels
// and are woken when something has ended, or to take over.
type progress struct {
	_     cpu.CacheLinePad
	token atomic.Bool // held: somebody makes a pass
	// The poller looks at what follows, and whoever drives writes the token all the time.
	_       cpu.CacheLinePad
	wanted  atomic.Int32 // who waits for the token; the poller lets them go first
	callers atomic.Int32 // inside await
	driven  atomic.Int64 // when the last caller left await, nanoseconds
	_       cpu.CacheLinePad

	sleeping atomic.Bool // somebody sleeps on the descriptors, or is about to
	resting  atomic.Bool // it is the background goroutine
	dozing   atomic.Bool // the background goroutine naps for long, while a caller sleeps

	mu     sync.Mutex
	parked []*parking
	spare  []*parking
	count  atomic.Int32 // of parked

	epoll int
	kick  bell  // wakes whoever sleeps on the descriptors
	nudge bell  // ends a nap of the background goroutine
	soon  timer // likewise, in a while

	watches
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

// Waiting callers and the background goroutine look at the clock and at each
// other at these intervals.
const (
	yieldAfter = 20 * time.Microsecond // of polling; then every poll is followed by a yield, see yields
	restTick   = time.Millisecond      // without callers, until the background goroutine drives
	// At most between its looks while callers drive. Where a goroutine has its turn for
	// 10 ms, or is in a system call for that long, Go's monitor takes the P from it and
	// then wakes every 20 µs for a while: 3,400 times a second, 9 % of the core if the
	// callers have but one. So no nap is that long, and before each the turn is ended.
	busyTick  = 8 * time.Millisecond
	longSleep = time.Second // and while one of them sleeps; see nudge
)

func (p *progress) open() error {
	p.all = map[uint64]*watch{}
	p.unpark(p.parking(0)) // one caller at a time then parks without an allocation
	var err error
	p.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err = errors.Join(err, p.kick.open(), p.nudge.open(), p.soon.open()); err == nil {
		err = p.watch(p.kick.fd)
	}
	if err != nil {
		p.close()
	}
	return err
}

// watch makes a sleeper wake when fd is readable.
func (p *progress) watch(fd int) error {
	return unix.EpollCtl(p.epoll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)})
}

// unwatched undoes watch.
func (p *progress) unwatched(fd int) { _ = unix.EpollCtl(p.epoll, unix.EPOLL_CTL_DEL, fd, nil) }

// close closes the descriptors; those that could not be opened are -1.
func (p *progress) close() {
	unix.Close(p.soon.fd)
	unix.Close(p.nudge.fd)
	unix.Close(p.kick.fd)
	unix.Close(p.epoll)
}

// others reports whether a caller sleeps or is parked, or a watch is armed. The caller who asks
// does not sleep.
func (p *progress) others() bool {
	return p.count.Load() > 0 || p.armed.Load() > 0 || p.sleeping.Load() && !p.resting.Load()
}

// wakeAll makes everybody who sleeps look again, and the event loops that have armed a watch.
func (p *progress) wakeAll() {
	if p.sleeping.Load() {
		p.kick.ring()
	}
	if p.armed.Load() > 0 {
		p.alarm(false)
	}
	if p.count.Load() == 0 {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, k := range p.parked {
		k.rouse()
	}
}

// drive makes a pass if nobody else does; false if somebody else does. now is
// the time, give or take what a pass takes.
func (n *Node) drive(now int64) (found int, mine bool) {
	if n.gpu != nil && n.failure.Load() == nil {
		if err := n.gpu.look(now); err != nil {
			n.under(func() { n.fail(fmt.Errorf("node: %v does not work any more: %w", n.gpu.device(), err)) })
		}
	}
	for n.token.CompareAndSwap(false, true) {
		found, mine = found+n.owned(now), true
		// What was submitted after the pass looked, by somebody who then
		// found the token taken, is ours.
		if !n.tickets().Pending() {
			break
		}
	}
	return found, mine
}

// owned is a pass of whoever has just taken the token.
func (n *Node) owned(now int64) int {
	defer n.giveBack()
	return n.pass(now)
}

// submit takes what the caller has just put into a queue of the exchange. What
// the transport cannot send at once is left to a caller, who most likely comes at once. If none
// does, the background goroutine drives.
func (n *Node) submit() {
	for n.tickets().Pending() && n.token.CompareAndSwap(false, true) {
		n.post()
	}
}

// post is submit for whoever has just taken the token.
func (n *Node) post() {
	defer n.giveBack()
	n.side.Drain()
	if n.armed.Load() > 0 && n.tickets().News() {
		n.alarm(false)
	}
	switch sleeps := n.sleeping.Load(); {
	case !sleeps && (n.callers.Load() > 0 || n.threaded) || !n.unsent() && !n.tickets().Held():
	case sleeps:
		n.kick.ring()
	default:
		n.soon.set(callerComes)
	}
}

// stir has somebody make a pass soon: the sleeper, or else the background goroutine. For the
// owner. Whoever goes to sleep after this has looked for a sleeper asks the descriptors first.
func (n *Node) stir() {
	if n.sleeping.Load() {
		n.kick.ring()
	} else {
		n.nudge.ring()
	}
}

// unsent reports whether somebody has to poll before everything that was submitted gets out.
func (n *Node) unsent() bool {
	if n.side.Backlog() {
		return true
	}
	for _, p := range n.peers {
		if p.link != nil && p.link.conn.Unsent() {
			return true
		}
	}
	return false
}

// await drives or waits until met, which is asked without the token, or until limit has passed.
// spin says whether to poll before sleeping. False means that the time is up.
func (n *Node) await(met func() bool, limit time.Duration, spin bool) bool {
	if met() {
		return true
	}
	n.callers.Add(1)
	n.soon.stop()
	now := trace.Now()
	defer func() {
		n.driven.Store(now)
		n.rearm()
		if !n.threaded && n.tickets().Held() {
			n.soon.set(callerComes)
		}
		if n.callers.Add(-1) > 0 {
			n.relay()
		} else if n.dozing.Load() || n.unattended() {
			n.rouse()
		}
	}()
	end := now + int64(max(0, min(limit, 1<<61)))
	quiet := now // since when nothing was found
	if !spin {
		quiet = now - int64(n.spin)
	}
	for {
		found, mine := n.drive(now)
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
		case idle < int64(n.yields) && mine:
		case idle < int64(n.spin):
			yield()
		default:
			if n.rest(met, time.Duration(end-now)) {
				return false // a signal: the caller wants to look at it
			}
			now = trace.Now()
			quiet = now - int64(n.spin) + int64(yieldAfter)
		}
	}
}

// yield gives the core to whoever else wants it, another process above all.
func yield() { syscall.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0) }

// rest sleeps until there may be something to do, at most limit. True means
// that a signal came.
func (n *Node) rest(met func() bool, limit time.Duration) (interrupted bool) {
	if n.proxies.lull() == 0 {
		yield()
		return false
	}
	n.counters.Sleeps.Add(1)
	if n.sleeping.CompareAndSwap(false, true) {
		defer n.sleeping.Store(false)
		// Between our pass and the line above, somebody else may have ended
		// what we wait for without seeing us sleep.
		if met() || n.tickets().Pending() {
			return false
		}
		return n.sleep(limit)
	}
	n.rearm()
	if n.resting.Load() { // the background goroutine has the descriptors: take them over
		n.kick.ring()
		runtime.Gosched()
		yield()
		return false
	}
	n.park(met, limit)
	return false
}

// arm makes the descriptors tell of what comes from now on. It reports whether something has
// come already.
func (n *Node) arm() (again bool) {
	for _, p := range n.planes {
		again = !p.lost.Load() && p.Arm() || again
	}
	return again
}

// rearm is arm for a sleeper. A Fabric that is polled tells nobody, so whoever has polled
// while somebody slept calls it when he stops.
func (n *Node) rearm() {
	if n.sleeping.Load() && n.arm() {
		n.ring(&n.kick)
	}
}

// heldEvery is how often a sleeper looks whether a stream has come to what waits for it: a stream rings no bell.
const heldEvery = 50 * time.Microsecond

// lull is how long a sleeper may sleep before he looks at the words of streams.
func (n *Node) lull() time.Duration {
	lull := n.proxies.lull()
	if n.tickets().Held() {
		lull = min(lull, heldEvery)
	}
	return lull
}

// sleep waits on the descriptors, for at most limit or until the next timer.
func (n *Node) sleep(limit time.Duration) (interrupted bool) {
	defer n.woken.Store(true)
	if n.arm() {
		return false
	}
	var err error
	lull := n.lull()
	ms := min(limit, lull, time.Duration(n.timer.Load()-trace.Now()))
	if lull < time.Millisecond {
		err = n.doze(ms)
	} else {
		var ev [4]unix.EpollEvent
		_, err = unix.EpollWait(n.epoll, ev[:], int(max(0, (ms+time.Millisecond-1)/time.Millisecond)))
	}
	n.kick.hush()
	return err == unix.EINTR
}

// park waits until somebody calls wakeAll or relay.
func (n *Node) park(met func() bool, limit time.Duration) {
	k := n.parking(limit)
	defer n.unpark(k)
	if met() || !n.sleeping.Load() {
		return
	}
	select {
	case <-k.wake:
	case <-k.timer.C:
	}
}

func (p *progress) parking(limit time.Duration) *parking {
	p.mu.Lock()
	defer p.mu.Unlock()
	var k *parking
	if i := len(p.spare) - 1; i >= 0 {
		k, p.spare = p.spare[i], p.spare[:i]
		k.timer.Reset(limit)
	} else {
		k = &parking{make(chan struct{}, 1), time.NewTimer(limit)}
	}
	p.parked = append(p.parked, k)
	p.count.Add(1)
	return k
}

func (p *progress) unpark(k *parking) {
	k.timer.Stop()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.parked = slices.DeleteFunc(p.parked, func(o *parking) bool { return o == k })
	p.count.Add(-1)
	select {
	case <-k.wake:
	default:
	}
	p.spare = append(p.spare, k)
}

// relay wakes one parked caller, to take over from one who leaves.
func (p *progress) relay() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.parked) > 0 {
		p.parked[0].rouse()
	}
}

// background drives when no caller does: heartbeats, timers, what is left to
// be sent. While callers drive it looks on, less and less often: where all
// threads share a core, each look takes 10 µs from them. It drives at once where a watch
// is armed, a proxy runs, or something waits for a stream: then nobody else does before an event loop is told, or
// the word of a stream is seen. If the token stays taken, it naps as well: a
// post may take many milliseconds, and whoever makes it may need this core.
func (n *Node) background() {
	tick, failed := restTick, int64(0) // failed: since when the token is taken
	for !n.stopped.Load() {
		now := trace.Now()
		idle := time.Duration(now - n.driven.Load())
		switch {
		case n.callers.Load() > 0 && n.sleeping.Load():
			tick = restTick
			n.stepAside()
		case n.callers.Load() > 0 || idle < restTick && !n.watched() && !n.tickets().Held():
			runtime.Gosched() // see busyTick
			if n.nap(tick) {
				tick = restTick
			} else {
				tick = min(2*tick, busyTick)
			}
		default:
			found, mine := n.drive(now)
			if mine {
				tick, failed = restTick, 0
			} else if failed == 0 {
				tick, failed = restTick, now
			}
			switch {
			case !mine && now-failed < int64(yieldAfter):
				yield() // who holds the token may need this core
			case !mine:
				n.nap(tick)
				tick = min(2*tick, busyTick)
			case found == 0:
				n.resting.Store(true)
				n.rest(never, longSleep)
				n.resting.Store(false)
			}
		}
	}
}

// The poller leaves the node to callers for so long after the last of them has left:
// one who calls again soon finds the token free. It looks for them no more often than
// lookTick, as each look takes a cache line from whoever drives.
const (
	grace    = 20 * time.Microsecond
	lookTick = 2 * time.Microsecond
)

// poller drives whenever no caller does: thread mode. It sleeps when it has found
// nothing, or callers have driven, for as long as a caller would spin.
func (n *Node) poller() {
	addProcs(1)
	defer addProcs(-1)
	n.bind()
	now := trace.Now()
	quiet, aside := now, now // since when nothing was found, since when callers drive
	for !n.stopped.Load() {
		callers := n.callers.Load() > 0
		if callers || n.wanted.Load() > 0 || now-n.driven.Load() < int64(grace) {
			switch idle := now - aside; {
			case idle < int64(n.yields):
				for end := now + int64(lookTick); now < end; now = trace.Now() {
				}
			case idle < int64(n.spin) || !callers:
				yield()
			default:
				n.stepAside()
				aside = trace.Now()
			}
			now = trace.Now()
			quiet = now
			continue
		}
		found, mine := n.drive(now)
		now = trace.Now()
		aside = now
		switch idle := now - quiet; {
		case found > 0:
			quiet = now
		case idle < int64(n.yields) && mine:
		case idle < int64(n.spin):
			yield()
		default:
			n.resting.Store(true)
			n.rest(never, longSleep)
			n.resting.Store(false)
			now = trace.Now()
			quiet = now - int64(n.spin) + int64(yieldAfter)
		}
	}
}

// stepAside naps for long, while there are callers: whoever leaves last ends the nap.
func (n *Node) stepAside() {
	n.dozing.Store(true)
	n.rearm() // our last pass may have taken what was to wake a caller who sleeps
	if n.callers.Load() > 0 {
		n.nap(longSleep)
	}
	n.dozing.Store(false)
}

func never() bool { return false }
