package verbs

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"

	rdma "fserver/cshim/verbs"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// The address of a Fabric is that of the set-up over TCP. An InfiniBand port adds its subnet, the first half of its
// GIDs: "verbs:HOST:PORT/fe80000000000000".

// networks are those of the interface of a device. They are read anew when the port has changed.
type networks struct {
	list atomic.Pointer[[]netip.Prefix]
}

// target makes that of a Kind take addresses with a subnet.
func target(of func(transport.Addr) (string, error)) func(transport.Addr) (string, error) {
	return func(peer transport.Addr) (string, error) {
		at, _, _ := strings.Cut(string(peer), "/")
		return of(transport.Addr(at))
	}
}

// locate notes in which network the device is; common says that Reaches asks for it.
func (f *Fabric) locate(common bool) {
	g := f.at.gid()
	if !f.at.port.Ethernet {
		f.subnet = fmt.Sprintf("%x", g.Raw[:8])
	}
	if common {
		f.common = new(networks)
		f.common.read(g)
	}
}

// read reads the addresses of the interface of a GID. It has none if that is gone.
func (n *networks) read(g rdma.GID) {
	var list []netip.Prefix
	if i, err := net.InterfaceByIndex(int(g.Link)); err == nil {
		all, _ := i.Addrs()
		for _, a := range all {
			if p, err := netip.ParsePrefix(a.String()); err == nil {
				list = append(list, p)
			}
		}
	}
	n.list.Store(&list)
}

// Addr implements transport.Fabric.
func (f *Fabric) Addr() transport.Addr {
	a := f.Fabric.Addr()
	if a != "" && f.subnet != "" {
		a += transport.Addr("/" + f.subnet)
	}
	return a
}

// Reaches implements transport.Fabric.
func (f *Fabric) Reaches(peer transport.Addr) error {
	if err := f.Fabric.Reaches(peer); err != nil {
		return err
	}
	_, subnet, _ := strings.Cut(string(peer), "/")
	switch {
	case (subnet == "") != (f.subnet == ""):
		return fmt.Errorf("the device of one side is InfiniBand and that of the other is Ethernet (FSERVER_RDMA_DEVICE names devices)")
	case f.common == nil:
		return nil
	case f.subnet != "":
		if subnet != f.subnet {
			return fmt.Errorf("%s is in the InfiniBand subnet %s, and the peer in %s (if a router joins them, name the devices: FSERVER_RDMA_DEVICE)", f.Name(), f.subnet, subnet)
		}
		return nil
	}
	if at, list := link.HostOf(peer), *f.common.list.Load(); link.Longest(list, at) < 0 {
		return fmt.Errorf("%s has the networks %v, and the peer's address %v is in none of them (if a router joins them, name the devices: FSERVER_RDMA_DEVICE)", f.Name(), list, at)
	}
	return nil
}

// journey names both ends of c for people.
func (c *Conn) journey() string {
	own, peer := c.at.gid(), rdma.GID{Raw: c.peer.GID}
	return fmt.Sprintf("%s port %d, GID %d %v (%v) to GID %v, packets of %d bytes, traffic class %d",
		c.f.dev.Name, c.at.number, own.Index, own, own.Type, peer, min(c.peer.MTU, uint32(c.at.port.MTU)), c.f.path.TrafficClass)
}
