package tcp

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"fserver/engine/transport"
)

// keepalive finds a host that is gone while no bytes are under way.
var keepalive = net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second, Count: 3}

// listen opens the listener and derives addr.
func (f *Fabric) listen() error {
	lc := net.ListenConfig{KeepAliveConfig: keepalive}
	lc.SetMultipathTCP(false) // its sockets know fewer options
	l, err := lc.Listen(f.ctx, "tcp", f.opts.Listen)
	if err != nil {
		return fmt.Errorf("tcp: listen on %s: %w", f.opts.Listen, remedy(err))
	}
	f.listener = l
	host, port, err := net.SplitHostPort(l.Addr().String())
	if err != nil {
		return fmt.Errorf("tcp: listen on %s: %w", f.opts.Listen, err)
	}
	if f.opts.Host != "" {
		host = strings.Trim(f.opts.Host, "[]")
	}
	f.addr = transport.Addr(scheme + net.JoinHostPort(host, port))
	return nil
}

// localAddr is the address that host names, which must be of this host.
func localAddr(ctx context.Context, host string) (*net.TCPAddr, error) {
	a, err := net.ResolveTCPAddr("tcp", net.JoinHostPort(strings.Trim(host, "[]"), "0"))
	if err == nil {
		var l net.Listener
		if l, err = (&net.ListenConfig{}).Listen(ctx, "tcp", a.String()); err == nil {
			return a, l.Close()
		}
	}
	return nil, fmt.Errorf("tcp: dial from %s: %w", host, remedy(err))
}

// remedy strips what package net puts around the cause of err and adds what
// the user can do.
func remedy(err error) error {
	err = cause(err)
	var dns *net.DNSError
	var addr *net.AddrError
	switch {
	case errors.Is(err, unix.EADDRINUSE):
		return fmt.Errorf("%w (choose another port, or 0 for a free one; ss -ltnp shows the process that uses it)", err)
	case errors.Is(err, unix.EADDRNOTAVAIL):
		return fmt.Errorf("%w (it must be an address of this host: DMLC_NODE_HOST, DMLC_INTERFACE)", err)
	case errors.Is(err, unix.EACCES):
		return fmt.Errorf("%w (use a port from 1024, or run with the privilege for lower ones)", err)
	case errors.Is(err, unix.ECONNREFUSED):
		return fmt.Errorf("%w (no process listens at this address)", err)
	case errors.As(err, &dns):
		return fmt.Errorf("%w (give an address, or a name that this host can resolve)", err)
	case errors.As(err, &addr):
		return fmt.Errorf("%w (want HOST:PORT, with brackets around an IPv6 host)", err)
	}
	return err
}

// cause is what is inside of package net's description of an operation.
func cause(err error) error {
	var op *net.OpError
	for errors.As(err, &op) {
		err = op.Err
	}
	var call *os.SyscallError
	if errors.As(err, &call) {
		err = call.Err
	}
	return err
}

// accept takes connections until Close. At most Limits.Pending are inside the
// Gate; one more waits for a place, and the rest in the kernel's queue.
func (f *Fabric) accept() {
	wait := time.Duration(0)
	for {
		nc, err := f.listener.Accept()
		if err == nil {
			wait = 0
			g := f.door.Enter(f.ctx, f.opts.Limits.Pending, f.opts.Limits.Handshake/8)
			if g == nil {
				nc.Close()
				return
			}
			f.task(func() {
				defer f.door.Leave(g)
				f.welcome(nc.(*net.TCPConn), g)
			})
			continue
		}
		if f.ctx.Err() != nil {
			return
		}
		// Most likely no descriptor is free; one that is closed helps.
		f.refused(f.listener.Addr().String(), fmt.Errorf("tcp: take a connection on %s: %w", f.listener.Addr(), cause(err)))
		wait = min(max(2*wait, 5*time.Millisecond), time.Second)
		select {
		case <-time.After(wait):
		case <-f.ctx.Done():
			return
		}
	}
}

// ErrLooked is what Options.Refused is told of a connection that its peer has
// closed before it said anything, as who only looks whether the port is open.
var ErrLooked = errors.New("the peer closed the connection before it sent anything")

// welcome runs the Gate over a connection that a peer opened.
func (f *Fabric) welcome(nc *net.TCPConn, g *transport.Guest) {
	defer nc.Close()
	remote := nc.RemoteAddr().String()
	s, hello, err := f.shake(g.Ctx, nc, false, func() { f.door.Heard(g) })
	if err == nil {
		_, err = f.adopt(nc, s, remote, hello, true)
	} else if g.Ctx.Err() != nil {
		err = context.Cause(g.Ctx)
	}
	if f.tls == nil && errors.Is(err, io.EOF) && f.door.Silent(g) {
		err = ErrLooked
	}
	if err != nil && f.ctx.Err() == nil {
		f.refused(remote, fmt.Errorf("tcp: refuse %s: %w", remote, err))
	}
}

func (f *Fabric) refused(remote string, err error) {
	if f.opts.Refused != nil {
		f.opts.Refused(remote, err)
	}
}

// Connect implements transport.Fabric.
func (f *Fabric) Connect(ctx context.Context, peer transport.Addr) (transport.Conn, error) {
	c, err := f.connect(ctx, peer)
	if err != nil {
		return nil, fmt.Errorf("tcp: connect to %s: %w", strings.TrimPrefix(string(peer), scheme), err)
	}
	return c, nil
}

func (f *Fabric) connect(ctx context.Context, peer transport.Addr) (*Conn, error) {
	remote, err := hostPort(peer)
	if err != nil {
		return nil, err
	}
	if !f.begin() {
		return nil, transport.ErrClosed
	}
	defer f.tasks.Done()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(f.ctx, func() { cancel(transport.ErrClosed) })()

	d := net.Dialer{KeepAliveConfig: keepalive}
	d.SetMultipathTCP(false)
	if f.bind != nil {
		d.LocalAddr = f.bind
	}
	nc, err := d.DialContext(ctx, "tcp", remote)
	if err == nil {
		defer nc.Close()
		var s *secure
		var hello []byte
		if s, hello, err = f.shake(ctx, nc.(*net.TCPConn), true, func() {}); err == nil {
			return f.adopt(nc.(*net.TCPConn), s, remote, hello, false)
		}
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	return nil, remedy(err)
}

// shake starts TLS on nc, if that is wanted, and runs the Gate, within
// Limits.Handshake and ctx. It returns what the Gate verified about the peer,
// and calls heard when that has said something.
func (f *Fabric) shake(ctx context.Context, nc *net.TCPConn, dialer bool, heard func()) (*secure, []byte, error) {
	nc.SetDeadline(time.Now().Add(f.opts.Limits.Handshake))
	defer context.AfterFunc(ctx, func() { nc.SetDeadline(time.Unix(1, 0)) })()

	var s *secure
	var hello []byte
	var err error
	if f.tls == nil {
		hello, err = f.passGate(nc, dialer, heard)
	} else {
		s = newSecure(nc, f.tls, dialer)
		if err = s.conn.Handshake(); err == nil {
			hello, err = f.passGate(s.conn, dialer, heard)
		} else {
			err = fmt.Errorf("TLS handshake: %w", cause(explain(err)))
		}
	}
	if mismatch := (*TLSError)(nil); errors.As(err, &mismatch) {
		part(nc, mismatch.answer)
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = fmt.Errorf("handshake: not finished within %v: %w", f.opts.Limits.Handshake, os.ErrDeadlineExceeded)
	}
	return s, hello, err
}

// part ends a connection whose two sides do not agree about TLS. What the peer
// has sent is read, within the limits, for closing before that could destroy our
// last words.
func part(nc *net.TCPConn, answer []byte) {
	nc.Write(answer)
	nc.CloseWrite()
	io.CopyN(io.Discard, nc, 64<<10)
}

// passGate runs the Gate over nc and returns what it verified about the peer.
func (f *Fabric) passGate(nc net.Conn, dialer bool, heard func()) ([]byte, error) {
	hs := f.opts.Gate.Open(dialer)
	var in []byte
	var err error
	for first := dialer; ; first = false {
		if !first {
			if in, err = receiveMessage(nc); err != nil {
				break
			}
			heard()
		}
		out, done, bad := hs.Next(in)
		if out != nil {
			err = sendMessage(nc, out)
		}
		if bad != nil {
			return nil, bad
		}
		if err != nil {
			break
		}
		if done {
			return hs.Hello(), nil
		}
	}
	return nil, fmt.Errorf("handshake: %w", cause(explain(err)))
}

func sendMessage(w io.Writer, m []byte) error {
	if len(m) > transport.MaxHandshake {
		return fmt.Errorf("message of %d bytes to the peer: at most %d", len(m), transport.MaxHandshake)
	}
	b := append(make([]byte, 0, preambleLen+len(m)), magic[:]...)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(m)))
	_, err := w.Write(append(b, m...))
	return err
}

func receiveMessage(r io.Reader) ([]byte, error) {
	var p [preambleLen]byte
	n, err := io.ReadFull(r, p[:])
	if speaksTLS(p[:n]) {
		return nil, &TLSError{"the peer speaks TLS (set FSERVER_TLS=on, which must be the same on all nodes)", OnlyThere, emptyMessage}
	}
	if err != nil {
		if err == io.EOF {
			return nil, fmt.Errorf("the peer closed the connection: %w", err)
		}
		return nil, err
	}
	if !bytes.Equal(p[:len(magic)], magic[:]) {
		return nil, fmt.Errorf("the peer sent % x: not a message of fserver", p)
	}
	length := binary.LittleEndian.Uint32(p[len(magic):])
	if length > transport.MaxHandshake {
		return nil, fmt.Errorf("the peer announced a message of %d bytes: at most %d", length, transport.MaxHandshake)
	}
	m := make([]byte, length)
	if _, err := io.ReadFull(r, m); err != nil {
		return nil, fmt.Errorf("the peer announced a message of %d bytes: %w", length, err)
	}
	return m, nil
}

// adopt takes the socket out of nc, which the caller still closes, and makes
// it a Conn, with the TLS that was started on it, if any.
func (f *Fabric) adopt(nc *net.TCPConn, s *secure, remote string, hello []byte, accepted bool) (*Conn, error) {
	fd, err := f.detach(nc)
	if err != nil {
		return nil, fmt.Errorf("take over the socket: %w", err)
	}
	now := progress{since: time.Now()}
	c := &Conn{f: f, fd: fd, remote: remote, hello: hello, announce: accepted, tls: s, in: now, out: now}
	if s != nil {
		s.detach(fd)
	}
	c.tx.init()
	c.rx.init(&f.regions)

	f.owner.Lock()
	defer f.owner.Unlock()
	if f.closing {
		unix.Close(fd)
		return nil, transport.ErrClosed
	}
	ev := unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)}
	if err := unix.EpollCtl(f.epoll, unix.EPOLL_CTL_ADD, fd, &ev); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("watch the socket: %w", err)
	}
	f.watchSlot(fd)
	f.byFD[fd] = c
	c.at = len(f.conns)
	f.conns = append(f.conns, c)
	f.queue.reserve(len(f.conns))
	if c.due() {
		f.wake(c)
	}
	return c, nil
}

// watchSlot makes room in byFD for a descriptor.
func (f *Fabric) watchSlot(fd int) {
	for len(f.byFD) <= fd {
		f.byFD = append(f.byFD, nil)
	}
}

// detach is a descriptor of nc's socket that the runtime's poller does not
// know. It stays non-blocking.
func (f *Fabric) detach(nc *net.TCPConn) (fd int, err error) {
	raw, err := nc.SyscallConn()
	if err != nil {
		return -1, err
	}
	e := raw.Control(func(s uintptr) {
		if fd, err = unix.FcntlInt(s, unix.F_DUPFD_CLOEXEC, 0); err != nil {
			return
		}
		ms := int(max(f.opts.Limits.Stall.Milliseconds(), 1))
		if err = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, ms); err != nil {
			unix.Close(fd)
			return
		}
		if ofThisHost(nc) {
			// It is no fault if it cannot be chosen.
			_ = unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, unpaced)
		}
	})
	if e != nil {
		return -1, e
	}
	return fd, err
}

// unpaced is the congestion control of connections inside a host. Every kernel
// has it and lets everybody choose it. Where BBR is the default, which paces
// what it sends by timers, 1 MiB each way over loopback takes twice as long.
const unpaced = "reno"

// ofThisHost says whether what nc sends stays in this host.
func ofThisHost(nc *net.TCPConn) bool {
	local, ok := nc.LocalAddr().(*net.TCPAddr)
	remote, too := nc.RemoteAddr().(*net.TCPAddr)
	return ok && too && (remote.IP.IsLoopback() || remote.IP.Equal(local.IP))
}
