package verbs

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	rdma "fserver/cshim/verbs"
	"fserver/engine/transport"
)

// Path says how packets travel from a device. The zero Path is the default.
type Path struct {
	// GID is the entry of the port's table that is used, if Fixed is set; else it is chosen.
	GID   int32
	Fixed bool
	// MTU bounds the bytes of a packet; 0: the port does.
	MTU int32
	// TrafficClass is that of RoCE v2 packets and of InfiniBand packets across subnets, ServiceLevel the lane of
	// InfiniBand or the priority of a VLAN.
	TrafficClass, ServiceLevel uint8
	// What is not acknowledged within 4.096 µs times 2 to the power of Timeout is sent again, Retries times. 0: 16 and 6.
	// In an emulated machine under load 14 was too short: queue pairs with large writes both ways ended (ADR 23).
	Timeout, Retries uint8
}

// maxProbes is how many GIDs are given up for the next one because the device refuses them.
const maxProbes = 2

// address is where queue pairs of a Fabric can be reached.
type address struct {
	port   rdma.Port
	number int32      // of the port, from 1
	gids   []rdma.GID // of one type, the first is used
}

func (a *address) gid() rdma.GID { return a.gids[0] }

// family tells addresses apart that do not reach each other: of IPv4, and of IPv6 inside and beyond a link.
func family(g rdma.GID) int {
	switch a := g.Addr(); {
	case a.Is4():
		return 0
	case a.IsLinkLocalUnicast():
		return 1
	}
	return 2
}

// toward returns the address with a GID of the peer's family in front, if there is one.
func (a address) toward(peer rdma.GID) address {
	if i := slices.IndexFunc(a.gids, func(g rdma.GID) bool { return family(g) == family(peer) }); i > 0 && a.port.Ethernet {
		a.gids = append([]rdma.GID{a.gids[i]}, slices.Delete(slices.Clone(a.gids), i, i+1)...)
	}
	return a
}

// netif is what counts of the network interface of a GID.
type netif struct {
	here   bool // it is in the namespace of this process; a packet from another one's is refused
	bridge bool // it joins containers of this host
}

// order gives the GIDs of a RoCE port that can be used, in the order in which they are tried: those of interfaces of
// this namespace before others, bridges last, then routable addresses before private ones before those of a link,
// IPv4 before IPv6, and the order of the table. All are RoCE v2 if any is. The GIDs of an InfiniBand port keep their order.
func order(gids []rdma.GID, ethernet bool, of func(link int32) netif) []rdma.GID {
	if !ethernet || len(gids) == 0 {
		return gids
	}
	rank := func(g rdma.GID) (r int) {
		if n := of(g.Link); n.bridge {
			r += 1000
		} else if !n.here {
			r += 500
		}
		if g.Type != rdma.RoCEv2 {
			r += 100
		}
		switch a := g.Addr(); {
		case a.IsPrivate() || a.IsLoopback():
			r += 10
		case !a.IsGlobalUnicast():
			r += 20
		}
		return r + family(g)
	}
	list := slices.Clone(gids)
	slices.SortStableFunc(list, func(a, b rdma.GID) int { return cmp.Compare(rank(a), rank(b)) })
	return slices.DeleteFunc(list, func(g rdma.GID) bool { return g.Type != list[0].Type })
}

// interfaceOf looks at the network interface with an index.
func interfaceOf(link int32) netif {
	i, err := net.InterfaceByIndex(int(link))
	if err != nil {
		return netif{}
	}
	_, err = os.Stat(filepath.Join("/sys/class/net", i.Name, "bridge"))
	return netif{here: true, bridge: err == nil}
}

// addressOf is the address of a port, or why there is none. near, if it is valid, has to be the address of a GID.
func addressOf(dev *rdma.Device, number int32, p Path, near netip.Addr) (a address, err error) {
	a.number = number
	if a.port, err = dev.Port(int(number)); err == nil && !a.port.Active {
		err = fmt.Errorf("port %d of %s is not active", number, dev.Name)
	}
	var all []rdma.GID
	if err == nil {
		all, err = dev.GIDs(int(number))
	}
	if err != nil {
		return a, err
	}
	a.gids = order(all, a.port.Ethernet, interfaceOf)
	switch {
	case len(all) == 0:
		err = fmt.Errorf("port %d of %s has no GID (give its network interface an address)", number, dev.Name)
	case p.Fixed:
		a.gids = keep(all, func(g rdma.GID) bool { return g.Index == p.GID })
		if len(a.gids) == 0 {
			err = fmt.Errorf("port %d of %s has no GID with the index %d (%s)", number, dev.Name, p.GID, list(all))
		}
	case near.IsValid():
		a.gids = keep(a.gids, func(g rdma.GID) bool { return g.Addr() == near })
		if len(a.gids) == 0 {
			err = fmt.Errorf("port %d of %s does not have the address %s", number, dev.Name, near)
		}
	}
	if p.MTU != 0 {
		a.port.MTU = min(a.port.MTU, p.MTU)
	}
	return a, err
}

// keep returns the GIDs that are to be kept.
func keep(gids []rdma.GID, is func(rdma.GID) bool) []rdma.GID {
	return slices.DeleteFunc(slices.Clone(gids), func(g rdma.GID) bool { return !is(g) })
}

// list names GIDs for people.
func list(gids []rdma.GID) string {
	var text []string
	for _, g := range gids {
		text = append(text, fmt.Sprintf("GID %d %s (%s)", g.Index, g, g.Type))
	}
	return strings.Join(text, ", ")
}

// among reports whether a device is one of names, and which of its ports is; 0: any. No names are all. A name may be
// NAME:PORT. One that ends in * stands for all that start so. With ^ before the first name, all others are meant.
func among(names []string, device string) (port int32, is bool) {
	if len(names) == 0 {
		return 0, true
	}
	not := strings.HasPrefix(names[0], "^")
	for _, n := range names {
		name, number, _ := strings.Cut(strings.TrimPrefix(n, "^"), ":")
		start, many := strings.CutSuffix(name, "*")
		if name == device || many && strings.HasPrefix(device, start) {
			p, _ := strconv.Atoi(number)
			return int32(p), !not
		}
	}
	return 0, not
}

// several reports whether names are devices that are all used; else one of those that they stand for is.
func several(names []string) bool {
	return !slices.ContainsFunc(names, func(n string) bool { return strings.ContainsAny(n, "*^") })
}

// checkNames refuses names that can stand for no device.
func checkNames(names []string) error {
	for i, n := range names {
		name, number, named := strings.Cut(n, ":")
		if p, err := strconv.ParseUint(number, 10, 8); named && (err != nil || p == 0) {
			return fmt.Errorf("%q names no port of a device (NAME or NAME:PORT, with ports from 1)", n)
		}
		if i == 0 {
			name = strings.TrimPrefix(name, "^")
		}
		if name == "" || strings.Contains(name, "^") || strings.Contains(strings.TrimSuffix(name, "*"), "*") {
			return fmt.Errorf("%q names no device (NAME, NAME* for all that start so, and ^ before the first name for all others)", n)
		}
	}
	return nil
}

// fromNCCL translates a value of NCCL_IB_HCA, where a name stands for all devices that start so unless = comes first.
func fromNCCL(v string) (string, bool) {
	v, not := strings.CutPrefix(v, "^")
	v, exact := strings.CutPrefix(v, "=")
	names := strings.Split(v, ",")
	for i, n := range names {
		name, port, named := strings.Cut(n, ":")
		if name == "" {
			return "", false
		}
		if !exact {
			name += "*"
		}
		if named {
			name += ":" + port
		}
		names[i] = name
	}
	if not {
		names[0] = "^" + names[0]
	}
	return strings.Join(names, ","), true
}

// refresh looks at the port again if something has happened to it. It may block.
func (f *Fabric) refresh() {
	f.looking.Lock() // what is read first is not to be kept last
	defer f.looking.Unlock()
	stale, number := false, int32(0)
	f.Owned(func() { stale, number, f.stale = f.stale, f.at.number, false })
	if !stale {
		return
	}
	a, err := addressOf(f.dev, number, f.path, f.nearTo)
	if err != nil {
		f.Owned(func() { f.stale = true })
		return
	}
	f.Owned(func() { f.at, f.probes = a, 0 })
	if f.common != nil {
		f.common.read(a.gid())
	}
}

// refused takes why a queue pair with a GID could not be joined. If the device refuses the GID, the next
// connection is tried with the next one, and the error is an AgainError.
func (f *Fabric) refused(g rdma.GID, why error) error {
	if !errors.Is(why, unix.EINVAL) {
		return why
	}
	f.Owned(func() {
		if f.at.gid() == g && len(f.at.gids) > 1 && f.probes < maxProbes {
			f.at.gids = f.at.gids[1:]
			f.probes++
		}
		if !slices.Contains(f.at.gids, g) { // also if another attempt has given it up meanwhile
			why = &transport.AgainError{Err: fmt.Errorf("%w; the next attempt uses GID %v", why, f.at.gid())}
		}
	})
	return why
}

// across reports whether the way to a peer is by GID.
func (a *address) across(peer [16]byte) bool {
	own := a.gid().Raw
	return a.port.Global || [8]byte(own[:8]) != [8]byte(peer[:8])
}
