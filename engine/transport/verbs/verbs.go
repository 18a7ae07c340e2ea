// Package verbs is the transport over an RDMA NIC, for host memory. A Conn is one
// reliable connected queue pair: a write is an RDMA WRITE, a frame is a SEND into
// one of the slots that the peer has posted, and the NIC keeps the order of both, so a
// frame comes after the writes before it. The receiver sees a frame by its completion
// alone; it never looks at memory.
//
// Another Fabric, of sockets, sets the Conns up: it dials and listens, runs the Gate
// and TLS, and carries the numbers of the queue pairs (setup.go). Its Conn stays open for as
// long as ours, and its end is the end of ours: a queue pair that is idle does not
// notice that its peer was killed.
//
// # Memory
//
// A region is registered with the NIC by Register, and its key carries what the NIC
// calls it. The source of a write needs a registration, too. What is small is copied into
// a slot, which is registered; the rest is registered for as long as the write
// takes: nothing tells this Fabric that memory is gone, so it cannot keep a
// registration, which would go on to name the old pages.
//
// # The end
//
// A queue pair that ends goes into its error state, and everything that was posted on it
// comes back. When the last of that has come, no byte of the peer can arrive any more.
// The frames that had come are given first.
package verbs

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	rdma "fserver/cshim/verbs"
	"fserver/engine/transport"
)

// Options say what Open opens.
type Options struct {
	// Inner sets connections up. It is a Sleeper, and closed by the Fabric's Close.
	Inner transport.Fabric
	// Library is the file of libibverbs; empty means the system's.
	Library string
	// Device is the name of the device, of which port 1 is used; empty means the first
	// one whose port is up.
	Device string
	// Limits are the bounds to keep.
	Limits transport.Limits
}

// Fabric is one port of an RDMA device. See transport.Fabric.
type Fabric struct {
	name   string
	limits transport.Limits
	inner  transport.Fabric
	sleep  transport.Sleeper
	dev    *rdma.Device
	cq     *rdma.CQ
	port   rdma.Port
	gid    rdma.GID
	most   int // Conns
	ctx    context.Context
	cancel context.CancelFunc
	tasks  sync.WaitGroup
	once   sync.Once
	broken atomic.Pointer[transport.PanicError] // of a task

	// mu guards the rest. Post and Poll only try to lock it, and nobody calls what may
	// block with it.
	mu      sync.Mutex
	closing bool // nothing new is taken
	closed  bool // all has ended but for events to give
	made    int  // queue pairs that exist or are being made
	regions map[uint64]region
	last    uint64                   // the newest key
	conns   map[uint32]*Conn         // by the number of the queue pair
	inners  map[transport.Conn]*Conn // by Inner's
	queue   queue                    // what the next Poll visits
	polls   uint64
	slept   bool // FD was asked for, and no Poll since
	rung    bool // bell is readable
	epoll   int
	bell    int
	told    [16]transport.Event // of Inner
	found   [64]rdma.Completion
	batch   batch
	frames  []byte // what events of the last Poll point to

	counts Counts

	missed atomic.Bool // Post took nothing because it was not the owner
}

type region struct {
	mr    rdma.Region
	token uint64
	empty bool // no memory, no registration
}

// Open opens a Fabric. With an error, Inner is still the caller's.
func Open(o Options) (*Fabric, error) {
	sleeper, ok := o.Inner.(transport.Sleeper)
	if !ok {
		return nil, fmt.Errorf("verbs: open: the fabric that sets connections up has no descriptor to wait on")
	}
	if o.Limits.Stall <= 0 {
		o.Limits.Stall = 30 * time.Second
	}
	if o.Limits.Handshake <= 0 {
		o.Limits.Handshake = 10 * time.Second
	}
	f := &Fabric{
		limits: o.Limits, inner: o.Inner, sleep: sleeper, epoll: -1, bell: -1,
		regions: map[uint64]region{}, conns: map[uint32]*Conn{}, inners: map[transport.Conn]*Conn{},
		frames: make([]byte, 0, frameRoom),
	}
	f.ctx, f.cancel = context.WithCancel(context.Background())
	if err := f.open(o); err != nil {
		f.release()
		return nil, err
	}
	f.task(f.keep)
	return f, nil
}

func (f *Fabric) open(o Options) (err error) {
	if err = f.openDevice(o); err != nil {
		return err
	}
	f.name = fmt.Sprintf("verbs/%s:1", f.dev.Name())
	limits, err := f.dev.Limits()
	if err != nil {
		return err
	}
	entries := min(limits.MaxCQE, 1<<15)
	if f.cq, err = f.dev.NewCQ(entries); err != nil {
		return err
	}
	if f.most = min(f.cq.Entries()/(sendRoom+slots+spare), limits.MaxQP); f.most == 0 {
		return fmt.Errorf("verbs: %s: room for %d completions and %d queue pairs, which is too little for one connection", f.name, f.cq.Entries(), limits.MaxQP)
	}
	if f.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return fmt.Errorf("verbs: open an epoll descriptor: %w (see ulimit -n)", err)
	}
	if f.bell, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return fmt.Errorf("verbs: open an event descriptor: %w (see ulimit -n)", err)
	}
	for _, fd := range []int{f.sleep.FD(), f.cq.FD(), f.dev.AsyncFD(), f.bell} {
		ev := unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)}
		if err = unix.EpollCtl(f.epoll, unix.EPOLL_CTL_ADD, fd, &ev); err != nil {
			return fmt.Errorf("verbs: watch a descriptor: %w", err)
		}
	}
	return nil
}

// openDevice opens the library and the device.
func (f *Fabric) openDevice(o Options) error {
	unavailable := func(reason, remedy string) error {
		return &transport.ErrUnavailable{Transport: "verbs", Reason: reason, Remedy: remedy}
	}
	if err := rdma.Open(o.Library); err != nil {
		return unavailable(strings.TrimPrefix(err.Error(), "verbs: "), "")
	}
	names, err := rdma.Names()
	if err != nil {
		return unavailable(strings.TrimPrefix(err.Error(), "verbs: "), "load the kernel's modules: modprobe ib_uverbs")
	}
	why := "no RDMA device (/sys/class/infiniband is empty)"
	for _, n := range names {
		if o.Device != "" && n.Name != o.Device {
			continue
		}
		if err = f.tryDevice(n.Name); err == nil {
			return nil
		}
		why = strings.TrimPrefix(err.Error(), "verbs: ")
	}
	if o.Device != "" && err == nil && len(names) > 0 {
		why = fmt.Sprintf("no RDMA device %s", o.Device)
	}
	return unavailable(why, "ibv_devinfo shows the devices and their ports")
}

func (f *Fabric) tryDevice(name string) error {
	dev, err := rdma.OpenDevice(name)
	if err != nil {
		return err
	}
	if f.port, err = dev.Port(1); err == nil && !f.port.Active {
		err = fmt.Errorf("port 1 of %s is not active", name)
	}
	var gids []rdma.GID
	if err == nil {
		gids, err = dev.GIDs(1)
	}
	if err == nil && len(gids) == 0 {
		err = fmt.Errorf("port 1 of %s has no GID (give its network interface an address)", name)
	}
	if err != nil {
		_ = dev.Close() // nothing was made of it
		return err
	}
	f.dev, f.gid = dev, gids[0]
	for _, g := range gids {
		if f.port.Ethernet && g.Better(f.gid) {
			f.gid = g
		}
	}
	return nil
}

// release gives back what open acquired.
func (f *Fabric) release() {
	f.cancel()
	if f.cq != nil {
		_ = f.cq.Destroy()
	}
	if f.dev != nil {
		_ = f.dev.Close()
	}
	for _, fd := range []int{f.epoll, f.bell} {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}

// Name implements transport.Fabric.
func (f *Fabric) Name() string { return f.name }

const scheme = "verbs:"

// Addr implements transport.Fabric: that of Inner, with another name.
func (f *Fabric) Addr() transport.Addr {
	_, at, ok := strings.Cut(string(f.inner.Addr()), ":")
	if !ok {
		return ""
	}
	return transport.Addr(scheme + at)
}

// innerAddr is the address of Inner that peer stands for.
func (f *Fabric) innerAddr(peer transport.Addr) (transport.Addr, bool) {
	at, ok := strings.CutPrefix(string(peer), scheme)
	kind, _, _ := strings.Cut(f.inner.Name(), "/")
	in := transport.Addr(kind + ":" + at)
	return in, ok && f.inner.Reaches(in)
}

// Reaches implements transport.Fabric.
func (f *Fabric) Reaches(peer transport.Addr) bool {
	_, ok := f.innerAddr(peer)
	return ok
}

// Close implements transport.Fabric.
func (f *Fabric) Close() error {
	f.once.Do(func() {
		f.cancel()
		f.mu.Lock()
		f.closing = true
		for _, c := range f.inners {
			c.closed = true
			c.end(transport.ErrClosed) // tells the peer
		}
		f.mu.Unlock()
		_ = f.inner.Close()
		f.tasks.Wait()
		f.mu.Lock()
		defer f.mu.Unlock()
		for _, c := range f.inners {
			c.closed = true
			c.end(transport.ErrClosed) // one that was being set up
			c.destroy()
			f.queue.push(c)
		}
		for id := range f.regions {
			_ = f.drop(id)
		}
		f.closed = true
		f.release()
	})
	return nil
}

// task starts a goroutine of the Fabric; a panic in it makes the Fabric unusable. The
// caller knows that Close does not wait yet: it is open itself, or a task.
func (f *Fabric) task(run func()) {
	f.tasks.Go(func() {
		defer func() {
			if e := transport.Caught(recover()); e != nil {
				f.broken.Store(e)
				unix.Write(f.bell, one[:])
			}
		}()
		run()
	})
}

// keep ends what stalls. It looks eight times within Limits.Stall.
func (f *Fabric) keep() {
	tick := time.NewTicker(max(f.limits.Stall/8, time.Millisecond))
	defer tick.Stop()
	for polls := uint64(0); ; {
		select {
		case now := <-tick.C:
			f.mu.Lock()
			for _, c := range f.inners {
				c.inspect(now, f.polls != polls)
			}
			polls = f.polls
			f.mu.Unlock()
		case <-f.ctx.Done():
			return
		}
	}
}
