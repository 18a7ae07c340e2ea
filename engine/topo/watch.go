package topo

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// WatchLinks reports when one of the interfaces goes down, with the reason, and when it is up again, with
// nil. All are up at first, and one without a name stays so. It returns when ctx ends, or with an error if the kernel does not
// tell. Then nobody knows what is down, so all count as up.
func WatchLinks(ctx context.Context, names []string, report func(i int, why error)) (err error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("topo: open a netlink socket: %w", err)
	}
	news := os.NewFile(uintptr(fd), "netlink")
	defer news.Close()
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: unix.RTMGRP_LINK}); err != nil {
		return fmt.Errorf("topo: bind a netlink socket: %w", err)
	}
	defer context.AfterFunc(ctx, func() { _ = news.Close() })()
	down, message := make([]bool, len(names)), make([]byte, 1<<16)
	tell := func(i int, why error) {
		if (why != nil) != down[i] {
			down[i] = why != nil
			report(i, why)
		}
	}
	defer func() {
		if err != nil {
			for i := range names {
				tell(i, nil)
			}
		}
	}()
	for {
		for i, name := range names {
			if name != "" {
				tell(i, linkDown(fd, name))
			}
		}
		// What a message says is not read: the interfaces are asked anew. ENOBUFS says that some were lost.
		if _, err := news.Read(message); err != nil && !errors.Is(err, unix.ENOBUFS) {
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("topo: read a netlink socket: %w", err)
		}
	}
}

// linkDown says why nothing can travel over an interface, or nil. It asks through a socket that is open, so that it fails for
// want of nothing.
func linkDown(fd int, name string) error {
	i, err := unix.NewIfreq(name)
	if err == nil {
		err = unix.IoctlIfreq(fd, unix.SIOCGIFFLAGS, i)
	}
	switch {
	case err != nil:
		return fmt.Errorf("interface %s is gone: %w", name, err)
	case i.Uint16()&unix.IFF_UP == 0:
		return fmt.Errorf("interface %s is down", name)
	case i.Uint16()&unix.IFF_RUNNING == 0:
		return fmt.Errorf("interface %s has no carrier", name)
	}
	return nil
}
