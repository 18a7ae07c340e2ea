package cma

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"fserver/engine/transport"
	"fserver/engine/transport/link"
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

// socketName is the name of peer's socket, as package net knows it.
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
		return "@" + name, nil
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
		return fmt.Errorf("listen on a Unix socket: %w", link.Cause(err))
	}
	f.Serve(l, f.host+"/"+name)
	return nil
}

// remote names the process at the other end of a connection.
func remote(nc net.Conn) string {
	if who, err := credentials(nc.(*net.UnixConn)); err == nil {
		return who.String()
	}
	return "a process of this host"
}

// adopt agrees with the peer on how to talk, and opens a Conn on the socket of s.
func (f *Fabric) adopt(s *link.Session) (transport.Conn, error) {
	nc := s.Socket.(*net.UnixConn)
	c, err := f.attach(nc, s)
	if err != nil {
		return nil, fmt.Errorf("attach: %w", link.Cause(err))
	}
	c.FD, err = link.Descriptor(nc)
	f.Owned(func() {
		if err == nil {
			err = f.conns.Watch(&f.Fabric, unix.EPOLLIN|unix.EPOLLRDHUP, c)
		}
		if err != nil {
			c.discard()
			unix.Close(c.FD)
		}
	})
	if err != nil {
		return nil, err
	}
	return c, nil
}
