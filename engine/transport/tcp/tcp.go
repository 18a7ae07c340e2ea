// Package tcp is the transport over TCP. Writes into registered memory are
// emulated: the receiver puts what comes straight from the socket to its place
// and reports it when it is complete.
//
// Connections are set up with package net, each in a goroutine of its own.
// What passed the Gate becomes a bare descriptor: Post and Poll do their own
// system calls, without the runtime's poller, and copy no payload in user
// space (see rxStage for the one exception). record.go describes the stream.
//
// A Conn takes about 60 KiB of memory, and up to 2 MiB more while frames
// travel that are larger than its buffers.
package tcp

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"fserver/engine/mem"
	"fserver/engine/transport"
)

// Options say what Open opens.
type Options struct {
	// Name is what Fabric.Name gives; empty means "tcp".
	Name string
	// Listen is where connections are taken, "host:port"; port 0 is any free
	// one. Empty means that none are taken.
	Listen string
	// Host is the host that Addr names; empty means the address that is
	// listened on. It is needed when that is a wildcard and peers are on other
	// hosts.
	Host string
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
	// not pass the Gate, and of failures to take one. It is called by several
	// goroutines at once and must not call the Fabric.
	Refused func(remote string, err error)
}

// Fabric is the TCP transport of one host address. See transport.Fabric.
type Fabric struct {
	opts Options
	addr transport.Addr
	bind *net.TCPAddr // or nil

	listener net.Listener // or nil
	tls      *tls.Config  // or nil
	door     transport.Door
	ctx      context.Context // ends with Close
	cancel   context.CancelFunc
	tasks    sync.WaitGroup                       // goroutines, and calls of Connect; added to by the owner
	once     sync.Once                            // Close
	broken   atomic.Pointer[transport.PanicError] // of a task

	// owner guards all below. Post and Poll only try to lock it and do nothing
	// if they cannot, so they never wait; what waits for them is set-up and
	// tear-down. Being the owner is what keeps a descriptor open and a region
	// registered while a system call uses them.
	owner   sync.Mutex
	closing bool // nothing new is taken
	closed  bool // all has ended but for events to give
	regions regions
	conns   []*Conn // those with events to come; Conn.at is the index
	byFD    []*Conn // by descriptor, which is a small number
	queue   queue   // what the next Poll visits at least
	recent  *Conn   // from which bytes came last
	streak  int     // reads in a row that brought bytes from recent
	seq     uint64  // number of the Poll
	vec     vec
	ready   [64]unix.EpollEvent
	epoll   int
	bell    int // an eventfd in epoll

	// rung says that bell may be readable. It is set after bell and cleared
	// before bell is, so that no ring is lost or left over.
	rung atomic.Bool
	// missed says that Post took nothing because it was not the owner.
	missed atomic.Bool
}

// Open opens a Fabric.
func Open(o Options) (*Fabric, error) {
	if o.Gate == nil {
		return nil, fmt.Errorf("tcp: open: no gate (Options.Gate is nil)")
	}
	if o.Name == "" {
		o.Name = "tcp"
	}
	if o.Limits.Handshake <= 0 {
		o.Limits.Handshake = 10 * time.Second
	}
	if o.Limits.Stall <= 0 {
		o.Limits.Stall = 30 * time.Second
	}
	if o.Limits.Pending <= 0 {
		o.Limits.Pending = 256
	}
	f := &Fabric{
		opts:    o,
		regions: regions{byID: map[uint64]region{}},
		epoll:   -1,
		bell:    -1,
	}
	if o.TLS != nil {
		f.tls = o.TLS.config()
	}
	f.ctx, f.cancel = context.WithCancel(context.Background())
	if err := f.open(); err != nil {
		f.release()
		return nil, err
	}
	f.task(f.keep)
	if f.listener != nil {
		f.task(f.accept)
	}
	return f, nil
}

// open acquires what release gives back.
func (f *Fabric) open() (err error) {
	if f.opts.Bind != "" {
		if f.bind, err = localAddr(f.ctx, f.opts.Bind); err != nil {
			return err
		}
	}
	if f.opts.Listen != "" {
		if err = f.listen(); err != nil {
			return err
		}
	}
	if f.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return fmt.Errorf("tcp: open an epoll descriptor: %w (see ulimit -n)", err)
	}
	if f.bell, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return fmt.Errorf("tcp: open an event descriptor: %w (see ulimit -n)", err)
	}
	ev := unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(f.bell)}
	if err = unix.EpollCtl(f.epoll, unix.EPOLL_CTL_ADD, f.bell, &ev); err != nil {
		return fmt.Errorf("tcp: watch an event descriptor: %w", err)
	}
	f.watchSlot(f.bell)
	return nil
}

// release gives back what open acquired.
func (f *Fabric) release() {
	f.cancel()
	if f.listener != nil {
		f.listener.Close()
	}
	for _, fd := range []int{f.epoll, f.bell} {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}

// Name implements transport.Fabric.
func (f *Fabric) Name() string { return f.opts.Name }

// Addr implements transport.Fabric.
func (f *Fabric) Addr() transport.Addr { return f.addr }

// Reaches implements transport.Fabric: whatever is written like an address of
// this transport can be tried.
func (f *Fabric) Reaches(peer transport.Addr) bool {
	_, err := hostPort(peer)
	return err == nil
}

// scheme starts an address.
const scheme = "tcp:"

// hostPort is the part of peer that package net understands.
func hostPort(peer transport.Addr) (string, error) {
	s, ok := strings.CutPrefix(string(peer), scheme)
	if !ok {
		return "", fmt.Errorf("want %sHOST:PORT", scheme)
	}
	host, port, err := net.SplitHostPort(s)
	if err != nil || host == "" {
		return "", fmt.Errorf("want %sHOST:PORT, with brackets around an IPv6 host", scheme)
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return "", fmt.Errorf("port %q: want 1 to 65535", port)
	}
	return s, nil
}

// FD implements transport.Sleeper: an epoll descriptor. Ask for it before each
// wait: what Post has completed rings here, not in Post, where it would cost
// 0.7 µs each time.
func (f *Fabric) FD() int {
	f.owner.Lock()
	defer f.owner.Unlock()
	if f.recent != nil && f.recent.hidden {
		f.hide(f.recent, false)
		f.streak = 2 // as guess wants it
	}
	if missed := f.missed.Swap(false); !f.closed && (missed || f.queue.n > 0) {
		f.ring()
	}
	return f.epoll
}

// Register implements transport.Fabric.
func (f *Fabric) Register(r mem.Region) (transport.Key, error) {
	f.owner.Lock()
	defer f.owner.Unlock()
	if f.closing {
		return transport.Key{}, fmt.Errorf("tcp: register %d bytes: %w", r.Len, transport.ErrClosed)
	}
	return f.regions.add(r)
}

// Bind implements transport.Binder.
func (f *Fabric) Bind(k transport.Key, c transport.Conn) error {
	f.owner.Lock()
	defer f.owner.Unlock()
	return f.regions.bind(k, c)
}

// Deregister implements transport.Fabric. A Conn that is in the middle of a
// write into the region goes down.
func (f *Fabric) Deregister(k transport.Key) error {
	f.owner.Lock()
	defer f.owner.Unlock()
	if err := f.regions.remove(k); err != nil {
		return err
	}
	for _, c := range f.conns {
		if c.err == nil && c.rx.writes(k.ID) {
			f.fail(c, fmt.Errorf("key %d was deregistered in the middle of a write of the peer, of which %d bytes are missing", k.ID, c.rx.rest.Len))
			f.wake(c)
		}
	}
	return nil
}

// Close implements transport.Fabric.
func (f *Fabric) Close() error {
	f.once.Do(func() {
		// All tasks end by themselves from here on, and none begins. They may
		// need to be the owner.
		f.cancel()
		f.owned(func() { f.closing = true })
		if f.listener != nil {
			f.listener.Close()
		}
		f.tasks.Wait()

		f.owned(func() {
			f.closed = true
			for _, c := range f.conns {
				c.close()
			}
			f.release()
		})
	})
	return nil
}

// owned calls do as the owner.
func (f *Fabric) owned(do func()) {
	f.owner.Lock()
	defer f.owner.Unlock()
	do()
}

// task starts a goroutine of the Fabric. A panic in it makes the Fabric unusable, as
// Poll says.
func (f *Fabric) task(run func()) {
	f.tasks.Go(func() {
		defer func() {
			if e := transport.Caught(recover()); e != nil {
				f.broken.Store(e)
				f.ring()
			}
		}()
		run()
	})
}

// begin starts a task, which Close waits for; it is false after Close.
func (f *Fabric) begin() bool {
	f.owner.Lock()
	defer f.owner.Unlock()
	if !f.closing {
		f.tasks.Add(1)
	}
	return !f.closing
}

// keep ends what stalls and frees what is idle. It looks eight times within
// Limits.Stall.
func (f *Fabric) keep() {
	limit := f.opts.Limits.Stall
	tick := time.NewTicker(max(limit/8, time.Millisecond))
	defer tick.Stop()
	seq := uint64(0)
	for {
		select {
		case <-f.ctx.Done():
			return
		case <-tick.C:
		}
		f.owned(func() { seq = f.inspect(time.Now(), limit, seq) })
	}
}

// inspect is one look of keep. The Fabric was polled last for the seq-th time when keep
// looked before; inspect returns that number of now.
func (f *Fabric) inspect(now time.Time, limit time.Duration, seq uint64) uint64 {
	// Bytes that our own user leaves in the socket are no fault of a peer.
	polled := seq != f.seq || !readable(f.epoll)
	for _, c := range f.conns {
		if c.err != nil {
			continue
		}
		came, inside, taken := c.rx.came, c.rx.inside(), c.tx.taken
		if c.tls != nil {
			came, inside, taken = c.tls.link.moved[0], inside || c.tls.inside(), c.tls.link.moved[1]
			c.tls.trim()
		}
		in := c.in.stalled(now, polled && inside, came)
		out := c.out.stalled(now, polled && c.unsent(), taken)
		if max(in, out) >= limit {
			f.fail(c, fmt.Errorf("no progress in the middle of a record for %v: %w", limit, unix.ETIMEDOUT))
			f.wake(c)
			continue
		}
		c.rx.trim()
		c.tx.trim()
	}
	return f.seq
}

// progress watches one direction of a Conn.
type progress struct {
	seen  uint64
	since time.Time // when seen was new, or nothing was owed
}

// stalled is for how long bytes have been owed while their count did not
// change.
func (p *progress) stalled(now time.Time, owed bool, count uint64) time.Duration {
	if !owed || count != p.seen {
		p.seen, p.since = count, now
	}
	return now.Sub(p.since)
}

// readable says whether a wait on fd would end at once.
func readable(fd int) bool {
	p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	n, err := unix.Poll(p, 0)
	return err == nil && n > 0
}
