package topo

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// WatchLinks reports when one of the interfaces goes down, with the reason, and when it is up again, with
// nil. All are up at first, and one without a name stays so. It returns when ctx ends, or with an error if the kernel does not tell.
func WatchLinks(ctx context.Context, names []string, report func(i int, why error)) error {
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
	for {
		for i, name := range names {
			if name == "" {
				continue
			}
			if why := linkDown(name); (why != nil) != down[i] {
				down[i] = why != nil
				report(i, why)
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

// linkDown says why nothing can travel over an interface, or nil.
func linkDown(name string) error {
	i, err := net.InterfaceByName(name)
	switch {
	case err != nil:
		return fmt.Errorf("interface %s is gone", name)
	case i.Flags&net.FlagUp == 0:
		return fmt.Errorf("interface %s is down", name)
	case i.Flags&net.FlagRunning == 0:
		return fmt.Errorf("interface %s has no carrier", name)
	}
	return nil
}
