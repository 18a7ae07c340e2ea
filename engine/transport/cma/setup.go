package cma

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
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

// An address is "cma:BOOT-NET/NAME": BOOT stands for this boot of this kernel, NET
// for the network namespace, NAME is the abstract socket's.
const (
	scheme = "cma:"
	prefix = "fserver-" // of NAME; 32 hexadecimal digits follow
)

// identity is BOOT-NET: what all processes have in common that can see each other's
// abstract sockets.
func identity() (string, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("identify this host: %w", err)
	}
	space, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		return "", fmt.Errorf("identify this network namespace: %w", err)
	}
	both := append(bytes.Clone(boot), space...)
	host, net := sha256.Sum256(boot), sha256.Sum256(both)
	return hex.EncodeToString(host[:8]) + "-" + hex.EncodeToString(net[:8]), nil
}

// socketName is the name of peer's socket.
func (f *Fabric) socketName(peer transport.Addr) (string, error) {
	s, ok := strings.CutPrefix(string(peer), scheme)
	host, name, cut := strings.Cut(s, "/")
	random, known := strings.CutPrefix(name, prefix)
	if raw, err := hex.DecodeString(random); !ok || !cut || !known || err != nil || len(raw) != 16 {
		return "", fmt.Errorf("the address is malformed: want %sBOOT-NET/%s and 32 hexadecimal digits", scheme, prefix)
	}
	theirs, _, _ := strings.Cut(host, "-")
	ours, _, _ := strings.Cut(f.host, "-")
	switch {
	case host == f.host:
		return name, nil
	case theirs == ours:
		return "", errors.New("the two processes are in different network namespaces of one host (let the containers share one: docker run --network=host)")
	}
	return "", errors.New("the two processes are on different hosts")
}

// listen opens the listener and derives addr.
func (f *Fabric) listen() error {
	var b [16]byte
	rand.Read(b[:]) // never fails
	name := prefix + hex.EncodeToString(b[:])
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: "@" + name, Net: "unix"})
	if err != nil {
		return fmt.Errorf("listen on a Unix socket: %w", cause(err))
	}
	f.listener = l
	f.addr = transport.Addr(scheme + f.host + "/" + name)
	return nil
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
		nc, err := f.listener.AcceptUnix()
		if err == nil {
			wait = 0
			g := f.door.Enter(f.ctx, f.opts.Limits.Pending, f.opts.Limits.Handshake/8)
			if g == nil {
				nc.Close()
				return
			}
			f.task(func() {
				defer f.door.Leave(g)
				f.welcome(nc, g)
			})
			continue
		}
		if f.ctx.Err() != nil {
			return
		}
		// Most likely no descriptor is free; one that is closed helps.
		f.refused("a process of this host", fmt.Errorf("cma: accept a connection: %w", cause(err)))
		wait = min(max(2*wait, 5*time.Millisecond), time.Second)
		select {
		case <-time.After(wait):
		case <-f.ctx.Done():
			return
		}
	}
}

// welcome makes a Conn of a connection that a peer opened, if it passes.
func (f *Fabric) welcome(nc *net.UnixConn, g *transport.Guest) {
	defer nc.Close()
	c, err := f.meet(g.Ctx, nc, false, func() { f.door.Heard(g) })
	if err == nil {
		err = f.adopt(c, nc)
	} else if g.Ctx.Err() != nil {
		err = context.Cause(g.Ctx)
	}
	if err != nil && f.ctx.Err() == nil {
		remote := "a process of this host"
		if who, e := credentials(nc); e == nil {
			remote = who.String()
		}
		f.refused(remote, fmt.Errorf("cma: refuse %s: %w", remote, err))
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
		return nil, fmt.Errorf("cma: connect: %w", err)
	}
	return c, nil
}

func (f *Fabric) connect(ctx context.Context, peer transport.Addr) (*Conn, error) {
	name, err := f.socketName(peer)
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

	nc, err := (&net.Dialer{}).DialContext(ctx, "unix", "@"+name)
	if err == nil {
		defer nc.Close()
		var c *Conn
		if c, err = f.meet(ctx, nc.(*net.UnixConn), true, func() {}); err == nil {
			if err = f.adopt(c, nc.(*net.UnixConn)); err == nil {
				return c, nil
			}
		}
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if err = cause(err); errors.Is(err, unix.ECONNREFUSED) {
		err = fmt.Errorf("%w (the peer has ended, or closed its node)", err)
	}
	return nil, err
}

// meet runs the Gate over nc and then agrees on how to talk, within
// Limits.Handshake and ctx.
func (f *Fabric) meet(ctx context.Context, nc *net.UnixConn, dialer bool, heard func()) (*Conn, error) {
	nc.SetDeadline(time.Now().Add(f.opts.Limits.Handshake))
	defer context.AfterFunc(ctx, func() { nc.SetDeadline(time.Unix(1, 0)) })()
	hello, err := f.shake(nc, dialer, heard)
	if err != nil {
		return nil, late(err, "handshake", f.opts.Limits.Handshake)
	}
	c, err := f.attach(nc, dialer)
	if err != nil {
		return nil, late(err, "attach", f.opts.Limits.Handshake)
	}
	c.hello = hello
	return c, nil
}

// late says which step failed, and names the limit if that was the reason.
func late(err error, step string, limit time.Duration) error {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return fmt.Errorf("%s: not finished within %v", step, limit)
	}
	return fmt.Errorf("%s: %w", step, cause(err))
}

// shake runs the Gate and returns what it verified about the peer. heard is called
// when that has said something.
func (f *Fabric) shake(nc *net.UnixConn, dialer bool, heard func()) ([]byte, error) {
	hs := f.opts.Gate.Open(dialer)
	var in []byte
	for first := dialer; ; first = false {
		if !first {
			var err error
			if in, err = receiveMessage(nc); err != nil {
				return nil, err
			}
			heard()
		}
		out, done, err := hs.Next(in)
		if out != nil {
			if e := sendMessage(nc, out); err == nil {
				err = e
			}
		}
		if err != nil {
			return nil, err
		}
		if done {
			return hs.Hello(), nil
		}
	}
}

// A message of the Gate travels behind 4 bytes of magic and its length.
const preambleLen = 8

var magic = [4]byte{'F', 'C', 'M', 'A'}

func sendMessage(w io.Writer, m []byte) error {
	if len(m) > transport.MaxHandshake {
		return fmt.Errorf("a handshake message has %d bytes, want at most %d", len(m), transport.MaxHandshake)
	}
	b := append(make([]byte, 0, preambleLen+len(m)), magic[:]...)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(m)))
	_, err := w.Write(append(b, m...))
	return err
}

func receiveMessage(r io.Reader) ([]byte, error) {
	var p [preambleLen]byte
	if _, err := io.ReadFull(r, p[:]); err != nil {
		if err == io.EOF {
			return nil, fmt.Errorf("the peer closed the connection: %w", err)
		}
		return nil, err
	}
	n := binary.LittleEndian.Uint32(p[len(magic):])
	if !bytes.Equal(p[:len(magic)], magic[:]) {
		return nil, fmt.Errorf("the peer sent % x: not a message of fserver", p)
	}
	if n > transport.MaxHandshake {
		return nil, fmt.Errorf("the peer announced a message of %d bytes: at most %d", n, transport.MaxHandshake)
	}
	m := make([]byte, n)
	if _, err := io.ReadFull(r, m); err != nil {
		return nil, fmt.Errorf("read a message of %d bytes from the peer: %w", n, err)
	}
	return m, nil
}

// adopt takes the socket out of nc, which the caller still closes, and opens c
// on it. Without success it gives back what c holds.
func (f *Fabric) adopt(c *Conn, nc *net.UnixConn) (err error) {
	f.owner.Lock()
	defer f.owner.Unlock()
	defer func() {
		if err != nil {
			c.discard()
		}
	}()
	if f.closing {
		return transport.ErrClosed
	}
	raw, err := nc.SyscallConn()
	if err != nil {
		return err
	}
	if e := raw.Control(func(fd uintptr) { c.fd, err = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0) }); err == nil {
		err = e
	}
	if err != nil {
		return fmt.Errorf("duplicate the socket: %w", err)
	}
	if err = f.watch(c); err != nil {
		unix.Close(c.fd)
		return err
	}
	c.at = len(f.conns)
	f.conns = append(f.conns, c)
	if c.announce {
		f.ring()
	}
	return nil
}
