package tcp

import (
	"golang.org/x/sys/unix"

	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// Conn is one connection. See transport.Conn.
type Conn struct {
	link.Conn
	f *Fabric

	// The owner of the Fabric guards all below.
	readable bool  // the socket may have bytes; for the visit that comes next
	hidden   bool  // epoll does not watch for bytes, because Poll looks each time
	outside  bool  // epoll does not watch for anything
	armed    bool  // epoll waits for the socket to take bytes
	txErr    error // why sending ended; what the peer had sent before is still read
	tx       tx
	rx       rx
	tls      *secure // nil: bytes travel as they are
}

// Post implements transport.Conn. It sends at once what the socket takes, in
// one system call; Poll goes on with the rest.
func (c *Conn) Post(ops []transport.Op) (n int, err error) {
	if !c.f.Try() {
		return 0, nil
	}
	defer c.f.Owner.Unlock()
	if c.Err != nil {
		return 0, c.Err
	}
	if c.txErr != nil {
		return 0, c.Because(c.txErr)
	}
	n, err = link.Take(ops, c.tx.push)
	if c.Unsent() && !c.armed {
		c.f.send(c)
	}
	if c.due() {
		c.f.push(c)
	}
	return n, err
}

// due says whether a visit finds something without a system call.
func (c *Conn) due() bool {
	if c.Err != nil {
		return c.Ends(true) || c.tx.Done != c.tx.End
	}
	return c.Fresh || c.txErr != nil || c.rx.more || c.tls != nil && c.tls.more ||
		c.tx.Done != c.tx.Sent || c.Unsent() && !c.armed
}

// Unsent implements transport.Conn: the kernel has not taken everything.
func (c *Conn) Unsent() bool { return c.tx.unsent() || c.tls != nil && c.tls.unsent() }

// end is fail where no visit of c is under way, or need be.
func (c *Conn) end(reason error) {
	c.f.fail(c, reason)
	c.f.wake(c)
}

// fail ends c: its descriptor is closed here, its events are left to the next
// visit.
func (f *Fabric) fail(c *Conn, reason error) {
	if c.Err != nil {
		return
	}
	c.Err = c.Because(reason)
	f.conns.Unwatch(&f.Fabric, c)
	// A child process may hold the socket too, so that closing it alone would
	// not tell the peer.
	if c.Closed && !c.Cut {
		if !c.Unsent() && c.txErr == nil {
			c.sayBye()
		}
		unix.Shutdown(c.FD, unix.SHUT_RDWR)
		discard(c.FD, quantum) // bytes that nobody read would make it a reset
	} else {
		reset(c.FD)
	}
	unix.Close(c.FD)
}

// sayBye sends a goodbye if the socket has room for it.
func (c *Conn) sayBye() {
	var b [headerLen]byte
	h := header{kind: recBye}
	h.put(b[:])
	if c.tls != nil {
		c.tls.bye(b[:])
	} else {
		unix.SendmsgN(c.FD, b[:], nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	}
}
