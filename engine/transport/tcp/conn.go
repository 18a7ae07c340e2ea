package tcp

import (
	"fmt"

	"golang.org/x/sys/unix"

	"fserver/engine/transport"
)

// Conn is one connection. See transport.Conn.
type Conn struct {
	f      *Fabric
	fd     int
	remote string
	hello  []byte

	// The owner of the Fabric guards all below.
	at       int   // index in Fabric.conns
	queued   bool  // in Fabric.queue
	readable bool  // the socket may have bytes; for the visit that comes next
	announce bool  // EvAccept is still to be given
	hidden   bool  // epoll does not watch for bytes, because Poll looks each time
	armed    bool  // epoll waits for the socket to take bytes
	closed   bool  // by its own user: no EvDown
	txErr    error // why sending ended; what the peer had sent before is still read
	err      error // why all ended; the descriptor is closed
	tx       tx
	rx       rx
	tls      *secure // nil: bytes travel as they are
	in, out  progress
}

// Post implements transport.Conn. It sends at once what the socket takes, in
// one system call; Poll goes on with the rest.
func (c *Conn) Post(ops []transport.Op) (int, error) {
	if !c.f.owner.TryLock() {
		c.f.missed.Store(true)
		return 0, nil // tear-down or set-up in another goroutine: a moment of back-pressure
	}
	defer c.f.owner.Unlock()
	return c.post(ops)
}

func (c *Conn) post(ops []transport.Op) (n int, err error) {
	if c.err != nil {
		return 0, c.err
	}
	if c.txErr != nil {
		return 0, c.because(c.txErr)
	}
	for n < len(ops) {
		taken, bad := c.tx.push(&ops[n])
		if err = bad; !taken {
			break
		}
		n++
	}
	if c.unsent() && !c.armed {
		c.f.send(c)
	}
	if c.due() {
		c.f.queue.push(c)
	}
	return n, err
}

// Close implements transport.Conn.
func (c *Conn) Close() error {
	c.f.owner.Lock()
	defer c.f.owner.Unlock()
	c.close()
	return nil
}

func (c *Conn) close() {
	c.closed = true
	if c.err == nil {
		c.f.fail(c, transport.ErrClosed)
		c.f.wake(c)
	}
}

// Hello implements transport.Conn.
func (c *Conn) Hello() []byte { return c.hello }

// Remote implements transport.Conn.
func (c *Conn) Remote() string { return c.remote }

// due says whether a visit finds something without a system call.
func (c *Conn) due() bool {
	return c.announce || c.err != nil || c.txErr != nil || c.rx.more || c.tls != nil && c.tls.more ||
		c.tx.done != c.tx.sent || c.unsent() && !c.armed
}

// Unsent implements transport.Unsender.
func (c *Conn) Unsent() bool { return c.unsent() }

// unsent says whether the kernel has not taken everything.
func (c *Conn) unsent() bool { return c.tx.unsent() || c.tls != nil && c.tls.unsent() }

// Via says how the bytes travel.
func (c *Conn) Via() string {
	if c.tls != nil {
		return "tcp/tls"
	}
	return "tcp"
}

// Why says why they do not travel in a better way; here nothing is to be said.
func (c *Conn) Why() string { return "" }

// because wraps the reason for which c or a half of it ended.
func (c *Conn) because(reason error) error {
	return fmt.Errorf("tcp: %s: %w", c.remote, reason)
}

// fail ends c: its descriptor is closed here, its events are left to the next
// visit. Outside of a visit, wake must follow.
func (f *Fabric) fail(c *Conn, reason error) {
	if c.err != nil {
		return
	}
	c.err = c.because(reason)
	f.byFD[c.fd] = nil
	unix.EpollCtl(f.epoll, unix.EPOLL_CTL_DEL, c.fd, &unix.EpollEvent{})
	// A child process may hold the socket too, so that closing it alone would
	// not tell the peer.
	if c.closed {
		if !c.unsent() && c.txErr == nil {
			c.sayBye()
		}
		unix.Shutdown(c.fd, unix.SHUT_RDWR)
		discard(c.fd, quantum) // bytes that nobody read would make it a reset
	} else {
		reset(c.fd)
	}
	unix.Close(c.fd)
}

// sayBye sends a goodbye if the socket has room for it.
func (c *Conn) sayBye() {
	var b [headerLen]byte
	h := header{kind: recBye}
	h.put(b[:])
	if c.tls != nil {
		c.tls.bye(b[:])
	} else {
		unix.SendmsgN(c.fd, b[:], nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	}
}
