package link

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"fserver/engine/transport"
)

// A Kind is how transports differ when they set connections up.
type Kind struct {
	Caps    transport.Caps
	Name    string // starts addresses, with a colon behind it, and errors
	Network string // of package net
	Gone    string // what a connection that is refused means
	// Target is what package net is to dial for an address.
	Target func(peer transport.Addr) (string, error)
	// Remote, if set, names the other end of a connection better than its address.
	Remote func(nc net.Conn) string
	// Carry, if set, is what carries TLS over a connection.
	Carry func(nc net.Conn) net.Conn
	// Adopt makes a Conn of what has passed the Gate; it may go on to talk before that, within
	// Limits.Handshake.
	Adopt func(s *Session) (transport.Conn, error)
}

// TCP is a Kind whose connections are set up over TCP. Whatever is written like an address of
// it can be tried.
func TCP(name string, adopt func(*Session) (transport.Conn, error)) Kind {
	return Kind{
		Name: name, Network: "tcp", Gone: "no process listens at this address",
		Target: func(peer transport.Addr) (string, error) { return hostPort(name+":", peer) },
		Adopt:  adopt,
	}
}

// hostPort is the part of peer that package net understands.
func hostPort(scheme string, peer transport.Addr) (string, error) {
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

// keepalive finds a host that is gone while no bytes are under way.
var keepalive = net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second, Count: 3}

// listen opens the listener over TCP that the Options ask for.
func (f *Fabric) listen() error {
	lc := net.ListenConfig{KeepAliveConfig: keepalive}
	lc.SetMultipathTCP(false) // its sockets know fewer options
	l, err := lc.Listen(f.ctx, "tcp", f.Listen)
	if err != nil {
		return fmt.Errorf("%s: listen on %s: %w", f.kind.Name, f.Listen, f.remedy(err))
	}
	f.Serve(l, l.Addr().String())
	return nil
}

// Serve has connections taken from l, which peers know by its name.
func (f *Fabric) Serve(l net.Listener, name string) {
	f.Listener = l
	f.addr = transport.Addr(f.kind.Name + ":" + name)
}

// localAddr is the address that Bind names, which must be of this host.
func (f *Fabric) localAddr() (net.Addr, error) {
	a, err := net.ResolveTCPAddr("tcp", net.JoinHostPort(strings.Trim(f.Bind, "[]"), "0"))
	if err == nil {
		var l net.Listener
		if l, err = (&net.ListenConfig{}).Listen(f.ctx, "tcp", a.String()); err == nil {
			return a, l.Close()
		}
	}
	return nil, fmt.Errorf("%s: dial from %s: %w", f.kind.Name, f.Bind, f.remedy(err))
}

// remedy strips what package net puts around the cause of err and adds what
// the user can do.
func (f *Fabric) remedy(err error) error {
	err = Cause(err)
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
		return fmt.Errorf("%w (%s)", err, f.kind.Gone)
	case errors.As(err, &dns):
		return fmt.Errorf("%w (give an address, or a name that this host can resolve)", err)
	case errors.As(err, &addr):
		return fmt.Errorf("%w (want HOST:PORT, with brackets around an IPv6 host)", err)
	}
	return err
}

// Cause is what is inside of package net's description of an operation.
func Cause(err error) error {
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
		nc, err := f.Listener.Accept()
		if err == nil {
			wait = 0
			g := f.door.enter(f.ctx, f.Limits.Pending, f.Limits.Handshake/8)
			if g == nil {
				nc.Close()
				return
			}
			f.Task(func() {
				defer f.door.leave(g)
				f.welcome(nc, g)
			})
			continue
		}
		if f.ctx.Err() != nil {
			return
		}
		// Most likely no descriptor is free; one that is closed helps.
		at := f.Listener.Addr().String()
		f.refuse(at, fmt.Errorf("%s: take a connection on %s: %w", f.kind.Name, at, Cause(err)))
		wait = min(max(2*wait, 5*time.Millisecond), time.Second)
		select {
		case <-time.After(wait):
		case <-f.ctx.Done():
			return
		}
	}
}

// welcome makes a Conn of a connection that a peer opened, if it passes.
func (f *Fabric) welcome(nc net.Conn, g *guest) {
	remote := f.remote(nc, nc.RemoteAddr().String())
	_, err := f.meet(g.ctx, nc, &Session{f: f, Remote: remote, heard: func() { g.spoke.Store(true) }})
	if err != nil && g.ctx.Err() != nil {
		err = context.Cause(g.ctx)
	}
	if f.tls == nil && errors.Is(err, io.EOF) && !g.spoke.Load() {
		err = transport.ErrLooked
	}
	if err != nil && f.ctx.Err() == nil {
		f.refuse(remote, fmt.Errorf("%s: refuse %s: %w", f.kind.Name, remote, err))
	}
}

func (f *Fabric) remote(nc net.Conn, address string) string {
	if f.kind.Remote != nil {
		return f.kind.Remote(nc)
	}
	return address
}

func (f *Fabric) refuse(remote string, err error) {
	if f.Refused != nil {
		f.Refused(remote, err)
	}
}

// Connect implements transport.Fabric.
func (f *Fabric) Connect(ctx context.Context, peer transport.Addr) (transport.Conn, error) {
	c, err := f.connect(ctx, peer)
	if err != nil {
		at := strings.TrimPrefix(string(peer), f.kind.Name+":")
		return nil, fmt.Errorf("%s: connect to %s: %w", f.kind.Name, at, err)
	}
	return c, nil
}

func (f *Fabric) connect(ctx context.Context, peer transport.Addr) (transport.Conn, error) {
	target, err := f.kind.Target(peer)
	if err != nil {
		return nil, err
	}
	if !f.Begin() {
		return nil, transport.ErrClosed
	}
	defer f.End()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(f.ctx, func() { cancel(transport.ErrClosed) })()

	d := net.Dialer{KeepAliveConfig: keepalive, LocalAddr: f.bind}
	d.SetMultipathTCP(false)
	nc, err := d.DialContext(ctx, f.kind.Network, target)
	if err == nil {
		s := &Session{f: f, Dialer: true, Remote: f.remote(nc, target), heard: func() {}}
		c, bad := f.meet(ctx, nc, s)
		if bad == nil {
			return c, nil
		}
		err = bad
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	return nil, f.remedy(err)
}

// meet starts TLS on nc, if that is wanted, runs the Gate, and makes a Conn, all within
// Limits.Handshake and ctx. It closes nc, unless the Conn keeps it.
func (f *Fabric) meet(ctx context.Context, nc net.Conn, s *Session) (c transport.Conn, err error) {
	s.Socket, s.stream = nc, nc
	defer func() {
		if !s.kept {
			nc.Close()
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, f.Limits.Handshake)
	defer cancel()
	defer context.AfterFunc(ctx, s.interrupt)()

	if err = s.secure(); err == nil {
		err = s.passGate()
	}
	if mismatch := (*transport.TLSError)(nil); errors.As(err, &mismatch) {
		part(nc, mismatch.Sides)
	}
	if err == nil {
		if c, err = f.kind.Adopt(s); err == nil {
			return c, nil
		}
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = fmt.Errorf("handshake: not finished within %v: %w", f.Limits.Handshake, os.ErrDeadlineExceeded)
	}
	return nil, err
}

// part ends a connection whose two sides do not agree about TLS. What the peer
// has sent is read, within the limits, for closing before that could destroy our
// last words.
func part(nc net.Conn, sides string) {
	switch sides {
	case transport.OnlyThere:
		nc.Write(emptyMessage)
	case transport.Both: // crypto/tls has told it
	default:
		nc.Write(alertVersion)
	}
	if half, ok := nc.(interface{ CloseWrite() error }); ok {
		half.CloseWrite()
	}
	io.CopyN(io.Discard, nc, 64<<10)
}

// secure starts TLS, if that is wanted.
func (s *Session) secure() error {
	if s.f.tls == nil {
		return nil
	}
	s.Carrier = s.Socket
	if s.f.kind.Carry != nil {
		s.Carrier = s.f.kind.Carry(s.Socket)
	}
	if s.Dialer {
		s.TLS = tls.Client(s.Carrier, s.f.tls)
	} else {
		config := s.f.tls.Clone()
		config.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
			s.heard() // its hello has come
			return nil, nil
		}
		s.TLS = tls.Server(s.Carrier, config)
	}
	s.stream = s.TLS
	if err := s.TLS.Handshake(); err != nil {
		return fmt.Errorf("TLS handshake: %w", Cause(explain(err)))
	}
	return nil
}
