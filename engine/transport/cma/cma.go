// Package cma is the transport between processes of one host (and between
// Fabrics of one process). A write is one copy: the sender's process_vm_writev
// ("cross memory attach") puts it straight into the peer's region. Frames, and
// the news of writes, go through a ring in memory that both map.
//
// # Parts
//
// Connections are set up over an abstract Unix socket, which leaves nothing on
// disk. What passed the Gate exchanges a segment of shared memory (memfd),
// tries in both directions whether each side can write into the other
// (attach.go), and passes the table of its regions if so. From then on the
// socket carries only the byte that wakes a sleeper, now and then with the
// descriptor of shared memory, and tells of the peer's death. layout_unsafe.go has the layout of what is shared, ring.go the rings,
// copy.go the one-copy writes, settle.go the end of a region, lend.go shared memory.
//
// Small writes go through the ring as well: two copies cost less than a system
// call there. Where one side cannot write into the other (Yama, another user, seccomp, a
// PID namespace), both stage: the sender copies into the ring, the receiver
// copies to the region. Conn.Why has the reason.
//
// A Conn takes about 60 KiB of memory, and of the segment what its rings have
// touched: up to 512 KiB, or 4 MiB if it is staged. Large frames take up to
// 2 MiB more while they travel.
//
// # Waiting
//
// Poll looks at one word of each Conn and makes no system call, but for a look
// at the sockets now and then. FD, which is asked before each wait, tells all
// peers to ring; who finds that said rings once, with one byte on the socket. So
// a pair that spins makes no system calls but the copies, and an idle one none
// at all.
//
// # Whom we trust
//
// Nothing that a peer sends or stores in shared memory is trusted. A word is
// loaded once and then checked, frames are copied out of the ring before they
// are parsed, lengths are bounded by the ring, and a broken record ends its
// Conn alone. Memory that a peer passes cannot shrink under us (seals). No
// descriptor of a peer is ever written to or waited on. Shared memory that it
// lends (lend.go) is mapped for reading alone, and no more than a bound of it.
//
// Keys are checked before a byte lands: by the receiver if writes are staged,
// and by the sender if they are direct. A peer that may write into a process
// directly is, to the kernel, one that may do anything to it; that it goes by
// the table of regions guards against mistakes, not against malice. The table
// is given to no other peer. So whoever must not have that power has to be
// another user, or kept out by the Gate. A key that is kept to one Conn (Bind) is
// so by the receiver alone: it refuses what comes through the ring, staged or
// small. Of another peer's direct write it hears, if at all, when the bytes have
// landed, and ends that peer's Conn then.
//
// Two limits are the kernel's. It knows the target of a copy by its process
// number: a peer that dies, and whose number is used again before its socket is
// looked at (within 1024 Polls), leaves a moment in which a copy meets another
// process of the same user, and fails there unless the same addresses are
// mapped. And a sender can be starved for seconds in the middle of a copy;
// Deregister and Close then fail and say so.
package cma

import (
	"context"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"fserver/engine/mem"
	"fserver/engine/transport"
)

// Mode says how writes travel.
type Mode uint8

const (
	Auto   Mode = iota // direct where both sides can, else staged
	Direct             // one copy, or ErrUnavailable
	Staged             // two copies
)

// Options say what Open opens.
type Options struct {
	// Name is what Fabric.Name gives; empty means "cma".
	Name string
	// Listen asks for connections to be taken; without it Addr is empty.
	Listen bool
	// Gate decides who may talk, on both sides.
	Gate transport.Gate
	// Limits are the bounds to keep.
	Limits transport.Limits
	// Refused, if set, is told once of each connection that was taken and did
	// not become a Conn, and of failures to take one. It is called by several
	// goroutines at once and must not call the Fabric.
	Refused func(remote string, err error)
	// Mode is the zero value, Auto, but for those who know.
	Mode Mode
	// NoPtracer keeps Open from calling prctl(PR_SET_PTRACER_ANY), which lets
	// processes of the same user write into this one where Yama
	// (kernel.yama.ptrace_scope=1) would let only its parents.
	NoPtracer bool
}

// Fabric is the transport of one process. See transport.Fabric.
type Fabric struct {
	opts Options
	host string // identity of what Unix sockets and processes can be seen
	addr transport.Addr

	listener *net.UnixListener // or nil
	door     transport.Door
	ctx      context.Context // ends with Close
	cancel   context.CancelFunc
	tasks    sync.WaitGroup                       // goroutines, and calls of Connect; added to by the owner
	once     sync.Once                            // Close
	broken   atomic.Pointer[transport.PanicError] // of a task
	ended    error                                // of Close

	// owner guards all below. Post and Poll only try to lock it and do nothing
	// if they cannot, so they never wait; what waits for them is set-up and
	// tear-down. Being the owner is what keeps memory mapped while it is used.
	owner   sync.Mutex
	closing bool // nothing new is taken
	closed  bool // all has ended but for events to give
	slept   bool // FD was asked for, and no Poll since
	regions regions
	tableFD int     // of regions.shared
	conns   []*Conn // those with events to come; Conn.at is the index
	next    int     // in conns: where the next Poll begins
	byFD    map[int]*Conn
	writers []writer // of Conns that have ended
	seq     uint64   // number of the Poll
	arena   []byte
	vec     vec
	letter  letter
	freed   uint64 // mem.SharedFreed when it was last looked at
	ready   [64]unix.EpollEvent
	epoll   int
	bell    int // an eventfd in epoll

	missed atomic.Bool // Post took nothing because it was not the owner
}

// Open opens a Fabric. With Mode Direct it is an ErrUnavailable if this process
// cannot even copy into itself.
func Open(o Options) (*Fabric, error) {
	if o.Gate == nil {
		return nil, fmt.Errorf("cma: open: no gate (Options.Gate is nil)")
	}
	if o.Name == "" {
		o.Name = "cma"
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
	if o.Mode > Staged {
		return nil, fmt.Errorf("cma: open: mode %d is unknown", o.Mode)
	}
	host, err := identity()
	if err != nil {
		return nil, &transport.ErrUnavailable{Transport: "cma", Reason: err.Error(), Remedy: "mount /proc"}
	}
	if o.Mode == Direct {
		if v := tryPeer(unix.Getpid(), newProbe()); v.kind != tryDone {
			return nil, &transport.ErrUnavailable{Transport: "cma", Reason: v.reason("this process", "itself"), Remedy: v.remedy()}
		}
	}
	f := &Fabric{
		opts:    o,
		host:    host,
		byFD:    map[int]*Conn{},
		arena:   make([]byte, 0, arenaSize),
		epoll:   -1,
		bell:    -1,
		tableFD: -1,
	}
	f.ctx, f.cancel = context.WithCancel(context.Background())
	if err := f.open(); err != nil {
		f.release()
		return nil, fmt.Errorf("cma: open: %w", err)
	}
	f.task(f.keep)
	if f.listener != nil {
		f.task(f.accept)
	}
	return f, nil
}

// open acquires what release gives back.
func (f *Fabric) open() (err error) {
	if !f.opts.NoPtracer && f.opts.Mode != Staged {
		// Yama takes one process or all, and there are many peers. With all,
		// what may attach is what could without Yama: processes of the same
		// user, and root. Without Yama this fails, which is as well.
		_ = unix.Prctl(unix.PR_SET_PTRACER, unix.PR_SET_PTRACER_ANY, 0, 0, 0)
	}
	var b []byte
	if b, f.tableFD, err = mem.NewSealed("fserver-cma", tableSize, mem.Seals|unix.F_SEAL_FUTURE_WRITE); err != nil {
		return fmt.Errorf("create the table of regions: %w", err)
	}
	f.regions.shared = asTable(b)
	if f.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return fmt.Errorf("create an epoll descriptor: %w (raise ulimit -n)", err)
	}
	if f.bell, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return fmt.Errorf("create an event descriptor: %w (raise ulimit -n)", err)
	}
	ev := unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(f.bell)}
	if err = unix.EpollCtl(f.epoll, unix.EPOLL_CTL_ADD, f.bell, &ev); err != nil {
		return fmt.Errorf("watch an event descriptor: %w", err)
	}
	if f.opts.Listen {
		return f.listen()
	}
	return nil
}

// release gives back what open acquired.
func (f *Fabric) release() {
	f.cancel()
	if f.listener != nil {
		f.listener.Close()
	}
	for _, fd := range []int{f.epoll, f.bell, f.tableFD} {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
	f.regions.shared.unmap()
	f.regions = regions{}
}

// Name implements transport.Fabric.
func (f *Fabric) Name() string { return f.opts.Name }

// Addr implements transport.Fabric.
func (f *Fabric) Addr() transport.Addr { return f.addr }

// Reaches implements transport.Fabric: the peer must be of the same host and
// network namespace, which abstract sockets belong to.
func (f *Fabric) Reaches(peer transport.Addr) bool {
	_, err := f.socketName(peer)
	return err == nil
}

// Beyond implements transport.Explainer.
func (f *Fabric) Beyond(peer transport.Addr) string {
	if _, err := f.socketName(peer); err != nil {
		return err.Error()
	}
	return ""
}

// FD implements transport.Sleeper: an epoll descriptor. Ask for it before each
// wait: it is here that peers are told to ring.
func (f *Fabric) FD() int {
	f.owner.Lock()
	defer f.owner.Unlock()
	if !f.closed {
		f.slept = true
		found := f.missed.Swap(false)
		for _, c := range f.conns {
			found = c.rest() || found
		}
		if found {
			f.ring()
		}
	}
	return f.epoll
}

// Register implements transport.Fabric.
func (f *Fabric) Register(r mem.Region) (transport.Key, error) {
	f.owner.Lock()
	defer f.owner.Unlock()
	if f.closing {
		return transport.Key{}, fmt.Errorf("cma: register %d bytes: %w", r.Len, transport.ErrClosed)
	}
	return f.regions.add(r)
}

// Bind implements transport.Binder. It cannot keep a peer that writes directly
// from doing so: see the package's text.
func (f *Fabric) Bind(k transport.Key, c transport.Conn) error {
	f.owner.Lock()
	defer f.owner.Unlock()
	return f.regions.bind(k, c)
}

// Deregister implements transport.Fabric. A peer that goes on writing to the
// key loses its Conn. It waits while a peer is in the middle of a copy,
// whatever that goes to: well below a millisecond, as a rule.
func (f *Fabric) Deregister(k transport.Key) error {
	var err error
	var busy []writer
	f.owned(func() {
		if err = f.regions.remove(k); err == nil {
			busy = f.busy()
		}
	})
	if len(busy) == 0 {
		return err
	}
	if err = settle(busy, settleLimit); err != nil {
		err = fmt.Errorf("cma: deregister key %d: %w", k.ID, err)
	}
	f.owned(func() { drop(busy) })
	return err
}

// busy is the peers that are in the middle of a copy.
func (f *Fabric) busy() (all []writer) {
	for _, c := range f.conns {
		if c.err == nil {
			if w, found := c.revoke(); found {
				all = append(all, w)
			}
		}
	}
	f.reap()
	for _, w := range f.writers {
		w.seg.refs++
		all = append(all, w)
	}
	return all
}

// reap forgets the writers of ended Conns that are through.
func (f *Fabric) reap() {
	left := f.writers[:0]
	for _, w := range f.writers {
		if w.through() {
			w.seg.drop()
		} else {
			left = append(left, w)
		}
	}
	clear(f.writers[len(left):])
	f.writers = left
}

func drop(all []writer) {
	for _, w := range all {
		w.seg.drop()
	}
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

		var busy []writer
		f.owned(func() {
			f.closed = true
			for _, c := range f.conns {
				c.close()
			}
			busy, f.writers = f.writers, nil
			f.release()
		})
		if err := settle(busy, settleLimit); err != nil {
			f.ended = fmt.Errorf("cma: close: %w", err)
		}
		f.owned(func() { drop(busy) })
	})
	return f.ended
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
	for {
		select {
		case <-f.ctx.Done():
			return
		case <-tick.C:
		}
		f.owned(func() { f.inspect(time.Now(), limit) })
	}
}

// inspect is one look of keep.
func (f *Fabric) inspect(now time.Time, limit time.Duration) {
	for _, c := range f.conns {
		if c.err != nil {
			continue
		}
		if c.stalled(now) >= limit {
			f.fail(c, fmt.Errorf("the peer has read nothing for %v: %w", limit, unix.ETIMEDOUT))
			f.ring()
			continue
		}
		c.rx.trim()
		c.tx.trim()
	}
	f.reap()
}
