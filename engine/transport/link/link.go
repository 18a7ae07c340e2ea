// Package link is what all transports with connections share: the Fabric's lock and
// life, its goroutines, how connections are dialed, taken and pass the Gate (over TLS
// where that is wanted), the table of regions, the operations that are open on a Conn, and
// the events that begin and end it.
//
// A transport embeds Fabric in its Fabric and Conn in its Conn. No piece of data takes a call
// through an interface here.
package link

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"fserver/engine/transport"
)

// Options say what a transport opens. Those over TCP take all of them.
type Options struct {
	// Name is what Fabric.Name gives; empty means the name of the transport.
	Name string
	// Listen is where connections are taken, "host:port"; port 0 is any free
	// one. Empty means that none are taken.
	Listen string
	// Bind is the local address, without a port, that Connect dials from;
	// empty leaves it to the system.
	Bind string
	// Gate decides who may talk, on both sides.
	Gate transport.Gate
	// TLS is who we are to peers over TLS 1.3, which both sides then must speak;
	// nil means that bytes travel as they are.
	TLS *Identity
	// Limits are the bounds to keep; Stall bounds also how long the peer's
	// kernel may leave bytes without an answer.
	Limits transport.Limits
	// Refused, if set, is told once of each connection that was taken and did
	// not become a Conn, and of failures to take one. It is called by several
	// goroutines at once and must not call the Fabric.
	Refused func(remote string, err error)
}

// From is what the settings say.
func From(e *transport.Env) (Options, error) {
	id, err := IdentityOf(e.Config)
	limits := transport.Limits{Stall: e.Config.StallTimeout}
	return Options{Gate: e.Gate, Limits: limits, Refused: e.Refused, Listen: e.Listen, Bind: e.Bind, TLS: id}, err
}

// Fabric is the part of a Fabric that does not depend on how bytes travel.
type Fabric struct {
	Options
	kind     Kind
	addr     transport.Addr
	bind     net.Addr     // or nil
	tls      *tls.Config  // or nil
	Listener net.Listener // or nil
	door     door
	ctx      context.Context // ends with Close
	cancel   context.CancelFunc
	tasks    sync.WaitGroup                       // goroutines, and calls that Close waits for; added to by the owner
	once     sync.Once                            // Close
	broken   atomic.Pointer[transport.PanicError] // of a task

	// Owner guards all below, and what the transport says. Post and Poll only try to lock it
	// and do nothing if they cannot, so they never wait; what waits for them is set-up
	// and tear-down. Being the owner is what keeps descriptors open, and regions registered
	// and mapped, while they are used.
	Owner   sync.Mutex
	Closing bool   // nothing new is taken
	Closed  bool   // all has ended but for events to give
	Seq     uint64 // number of the Poll
	Epoll   int
	bell    int      // an eventfd in Epoll
	freed   []uint64 // keys of which EvFreed is to be given
	ready   [64]unix.EpollEvent

	// Rung says that the bell may be readable, until the next Poll. It is set after the bell and
	// cleared before the bell is, so that no ring is lost or left over.
	Rung atomic.Bool
	// Missed says that Post took nothing because it was not the owner.
	Missed atomic.Bool
}

// Open acquires what Release gives back, and takes connections from Start on.
func (f *Fabric) Open(k Kind, o Options) error {
	f.Options, f.kind, f.Epoll, f.bell = o, k, -1, -1
	f.ctx, f.cancel = context.WithCancel(context.Background())
	if o.Gate == nil {
		return fmt.Errorf("%s: open: no gate (Options.Gate is nil)", k.Name)
	}
	if o.Name == "" {
		f.Options.Name = k.Name
	}
	if o.TLS != nil {
		f.tls = o.TLS.Config()
	}
	f.Limits.Handshake = orElse(o.Limits.Handshake, 10*time.Second)
	f.Limits.Stall = orElse(o.Limits.Stall, 30*time.Second)
	f.Limits.Pending = orElse(o.Limits.Pending, 256)
	err := f.open()
	if err != nil {
		f.Release()
	}
	return err
}

func orElse[T int | time.Duration](v, otherwise T) T {
	if v <= 0 {
		return otherwise
	}
	return v
}

func (f *Fabric) open() (err error) {
	if f.Bind != "" {
		if f.bind, err = f.localAddr(); err != nil {
			return err
		}
	}
	if f.Listen != "" {
		if err = f.listen(); err != nil {
			return err
		}
	}
	if f.Epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return fmt.Errorf("%s: open an epoll descriptor: %w (raise ulimit -n)", f.kind.Name, err)
	}
	if f.bell, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return fmt.Errorf("%s: open an event descriptor: %w (raise ulimit -n)", f.kind.Name, err)
	}
	return f.Watch(f.bell, unix.EPOLLIN)
}

// Watch adds a descriptor to Epoll.
func (f *Fabric) Watch(fd int, events uint32) error {
	ev := unix.EpollEvent{Events: events, Fd: int32(fd)}
	if err := unix.EpollCtl(f.Epoll, unix.EPOLL_CTL_ADD, fd, &ev); err != nil {
		return fmt.Errorf("%s: watch a descriptor: %w", f.kind.Name, err)
	}
	return nil
}

// Release gives back what Open acquired.
func (f *Fabric) Release() {
	f.cancel()
	if f.Listener != nil {
		f.Listener.Close()
	}
	for _, fd := range []int{f.Epoll, f.bell} {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}

// Start takes connections, and has inspect called as the owner eight times within
// Limits.Stall, to end what stalls and to free what is idle. polled says whether the
// Fabric was polled since the last time.
func (f *Fabric) Start(inspect func(now time.Time, polled bool)) {
	f.Task(func() { f.keep(inspect) })
	if f.Listener != nil {
		f.Task(f.accept)
	}
}

func (f *Fabric) keep(inspect func(now time.Time, polled bool)) {
	tick := time.NewTicker(max(f.Limits.Stall/8, time.Millisecond))
	defer tick.Stop()
	for seq := uint64(0); ; {
		select {
		case <-f.ctx.Done():
			return
		case <-tick.C:
		}
		f.Owned(func() {
			inspect(time.Now(), f.Seq != seq)
			seq = f.Seq
		})
	}
}

// Shut ends everything, once. Tasks end by themselves after stop, which the owner calls if it is
// not nil; they may need to be the owner. Then the owner calls end, which leaves nothing but
// events to give.
func (f *Fabric) Shut(stop, end func()) {
	f.once.Do(func() {
		f.cancel()
		f.Owned(func() {
			f.Closing = true
			if stop != nil {
				stop()
			}
		})
		if f.Listener != nil {
			f.Listener.Close()
		}
		f.tasks.Wait()
		f.Owned(func() {
			f.Closed = true
			end()
			f.Release()
		})
	})
}

// Name implements transport.Fabric.
func (f *Fabric) Name() string { return f.Options.Name }

// Addr implements transport.Fabric.
func (f *Fabric) Addr() transport.Addr { return f.addr }

// FD implements transport.Fabric: an epoll descriptor.
func (f *Fabric) FD() int { return f.Epoll }

// Caps implements transport.Fabric.
func (f *Fabric) Caps() transport.Caps { return f.kind.Caps }

// Reaches implements transport.Fabric.
func (f *Fabric) Reaches(peer transport.Addr) error {
	_, err := f.kind.Target(peer)
	return err
}

// Try makes its caller the owner for a Post, unless another goroutine is: that sets something
// up or tears it down, which is a moment of back-pressure.
func (f *Fabric) Try() bool {
	if f.Owner.TryLock() {
		return true
	}
	f.Missed.Store(true)
	return false
}

// Enter is Try for a Poll. An error means that the Fabric is unusable.
func (f *Fabric) Enter() (owner bool, err error) {
	if !f.Owner.TryLock() {
		return false, nil
	}
	if e := f.broken.Load(); e != nil && !f.Closed {
		f.Owner.Unlock()
		return false, e
	}
	f.Seq++
	if f.Rung.Load() && !f.Closed {
		f.quiet()
	}
	return true, nil
}

// Free queues EvFreed of a key. The owner calls it, and not after Shut.
func (f *Fabric) Free(id uint64) {
	f.freed = append(f.freed, id)
	f.Ring()
}

// Freed gives the EvFreeds that are due.
func (f *Fabric) Freed(ev []transport.Event) (n int) {
	for ; n < min(len(f.freed), len(ev)); n++ {
		ev[n] = transport.Event{Kind: transport.EvFreed, User: f.freed[n]}
	}
	if n > 0 {
		f.freed = f.freed[:copy(f.freed, f.freed[n:])]
	}
	if len(f.freed) > 0 && !f.Closed {
		f.Ring()
	}
	return n
}

// Ending is closed when Close has begun.
func (f *Fabric) Ending() <-chan struct{} { return f.ctx.Done() }

// Owned calls do as the owner.
func (f *Fabric) Owned(do func()) {
	f.Owner.Lock()
	defer f.Owner.Unlock()
	do()
}

// Task starts a goroutine of the Fabric, which is open or runs a task already. A panic in it
// makes the Fabric unusable, as Poll says.
func (f *Fabric) Task(run func()) {
	f.tasks.Go(func() {
		defer func() {
			if e := transport.Caught(recover()); e != nil {
				f.broken.Store(e)
				f.Ring()
			}
		}()
		run()
	})
}

// Begin holds off Close until End; it is false after Close.
func (f *Fabric) Begin() bool {
	f.Owner.Lock()
	defer f.Owner.Unlock()
	if !f.Closing {
		f.tasks.Add(1)
	}
	return !f.Closing
}

// End ends what Begin began.
func (f *Fabric) End() { f.tasks.Done() }

// Ring wakes whoever sleeps on Epoll.
func (f *Fabric) Ring() {
	unix.Write(f.bell, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	f.Rung.Store(true)
}

// quiet ends a Ring.
func (f *Fabric) quiet() {
	f.Rung.Store(false)
	var b [8]byte
	unix.Read(f.bell, b[:])
}

// Ready is what Epoll has to tell, but for the bell.
func (f *Fabric) Ready() ([]unix.EpollEvent, error) {
	n, e := epollNow(f.Epoll, f.ready[:])
	if e != 0 && e != unix.EINTR {
		return nil, fmt.Errorf("%s: poll: ask epoll: %w", f.kind.Name, e)
	}
	return f.ready[:max(n, 0)], nil
}
