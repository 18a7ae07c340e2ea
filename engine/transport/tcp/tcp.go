// Package tcp is the transport over TCP. Writes into registered memory are
// emulated: the receiver puts what comes straight from the socket to its place
// and reports it when it is complete.
//
// Connections are set up by package link, each in a goroutine of its own.
// What passed the Gate becomes a bare descriptor: Post and Poll do their own
// system calls, without the runtime's poller, and copy no payload in user
// space (see rxStage for the one exception). record.go describes the stream.
//
// A Conn takes about 60 KiB of memory, and up to 2 MiB more while frames
// travel that are larger than its buffers.
package tcp

import (
	"fmt"
	"net"
	"time"

	"golang.org/x/sys/unix"

	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// Options say what Open opens.
type Options = link.Options

// Fabric is the TCP transport of one host address. See transport.Fabric.
type Fabric struct {
	link.Fabric
	link.Regions
	// The owner guards all below.
	conns  link.Conns[*Conn]
	queue  link.Queue[*Conn] // what the next Poll visits at least
	recent *Conn             // from which bytes came last
	streak int               // reads in a row that brought bytes from recent
	vec    vec
}

// Open opens a Fabric.
func Open(o Options) (*Fabric, error) {
	f := &Fabric{}
	kind := link.TCP("tcp", f.adopt)
	kind.Carry = func(nc net.Conn) net.Conn { return &cipherLink{Conn: nc} }
	f.Regions.Init(&f.Fabric)
	if err := f.Fabric.Open(kind, o); err != nil {
		return nil, err
	}
	f.Start(f.inspect)
	return f, nil
}

// adopt takes the socket out of s, with the TLS that was started on it, if any.
func (f *Fabric) adopt(s *link.Session) (transport.Conn, error) {
	c := &Conn{f: f}
	c.Open(s, c.end)
	c.tx.init()
	c.rx.init(&f.Regions)
	var err error
	if c.FD, err = link.Descriptor(s.Socket); err != nil {
		return nil, err
	}
	if s.TLS != nil {
		c.tls = newSecure(s.TLS, s.Carrier.(*cipherLink), c.FD)
		c.About.Via = "tcp/tls"
	}
	if err = f.choose(c.FD, s.Socket); err == nil {
		f.Owned(func() { err = f.add(c) })
	}
	if err != nil {
		unix.Close(c.FD)
		return nil, err
	}
	return c, nil
}

// choose sets what the kernel is to do for a connection.
func (f *Fabric) choose(fd int, nc net.Conn) error {
	ms := int(max(f.Limits.Stall.Milliseconds(), 1))
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, ms); err != nil {
		return fmt.Errorf("take over the socket: %w", err)
	}
	if ofThisHost(nc) {
		// It is no fault if it cannot be chosen.
		_ = unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, unpaced)
	}
	return nil
}

// unpaced is the congestion control of connections inside a host. Every kernel
// has it and lets everybody choose it. Where BBR is the default, which paces
// what it sends by timers, 1 MiB each way over loopback takes twice as long.
const unpaced = "reno"

// ofThisHost says whether what nc sends stays in this host.
func ofThisHost(nc net.Conn) bool {
	local, ok := nc.LocalAddr().(*net.TCPAddr)
	remote, too := nc.RemoteAddr().(*net.TCPAddr)
	return ok && too && (remote.IP.IsLoopback() || remote.IP.Equal(local.IP))
}

// add makes c one of the Fabric's.
func (f *Fabric) add(c *Conn) error {
	err := f.conns.Watch(&f.Fabric, unix.EPOLLIN, c)
	if err == nil && c.due() {
		f.wake(c)
	}
	return err
}

// Arm implements transport.Fabric. What Post has completed is told here: to ring in Post
// would cost 0.7 µs each time.
func (f *Fabric) Arm() bool {
	f.Owner.Lock()
	defer f.Owner.Unlock()
	if f.recent != nil && f.recent.hidden {
		f.hide(f.recent, false)
		f.streak = 2 // as guess wants it
	}
	return f.Missed.Swap(false) || f.queue.Len() > 0
}

// Deregister implements transport.Fabric. A Conn that is in the middle of a
// write into the region goes down.
func (f *Fabric) Deregister(k transport.Key) {
	f.Owner.Lock()
	defer f.Owner.Unlock()
	if !f.Remove(k) {
		return
	}
	for _, c := range f.conns.All {
		if c.Err == nil && c.rx.writes(k.ID) {
			c.end(fmt.Errorf("key %d was deregistered in the middle of a write of the peer, of which %d bytes are missing", k.ID, c.rx.rest.Len))
		}
	}
	f.Free(k.ID)
}

// Close implements transport.Fabric.
func (f *Fabric) Close() error {
	f.Shut(nil, f.conns.Leave)
	return nil
}

// inspect ends what stalls and frees what is idle. See link.Fabric.
func (f *Fabric) inspect(now time.Time, polled bool) {
	// What our own user leaves here, or in a socket, is no fault of a peer.
	polled = polled || f.queue.Len() == 0 && !readable(f.Epoll) && !f.hides()
	limit := f.Limits.Stall
	for _, c := range f.conns.All {
		if c.Err != nil {
			continue
		}
		came, inside, taken := c.rx.came, c.rx.inside(), c.tx.taken
		if c.tls != nil {
			came, inside, taken = c.tls.link.moved[0], inside || c.tls.inside(), c.tls.link.moved[1]
			c.tls.trim()
		}
		in := c.In.Stalled(now, polled && inside, came)
		out := c.Out.Stalled(now, polled && c.Unsent(), taken)
		if max(in, out) >= limit {
			c.end(fmt.Errorf("no progress in the middle of a record for %v: %w", limit, unix.ETIMEDOUT))
			continue
		}
		c.rx.trim()
		c.tx.heads.Trim(txHeads)
	}
}

// hides says whether bytes wait that epoll does not watch for.
func (f *Fabric) hides() bool {
	c := f.recent
	return c != nil && c.hidden && c.Err == nil && readable(c.FD)
}

// readable says whether a wait on fd would end at once.
func readable(fd int) bool {
	p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	n, err := unix.Poll(p, 0)
	return err == nil && n > 0
}
