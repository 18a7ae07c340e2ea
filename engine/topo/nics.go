package topo

import (
	"net/netip"
	"os"
	"slices"
	"strings"
)

// NIC is a network interface, also one without hardware.
type NIC struct {
	Name      string         `json:"name"`
	Kind      string         `json:"kind"` // see kind
	Up        bool           `json:"up"`
	MTU       int            `json:"mtu"`
	Speed     int            `json:"mbit_s"` // 0: not known
	Driver    string         `json:"driver"`
	PCI       string         `json:"pci"` // of a bond: of its first port
	NUMA      int            `json:"numa"`
	Ports     []string       `json:"ports"` // what a bond, bridge or VLAN lies on
	RDMA      []string       `json:"rdma"`
	Addresses []netip.Prefix `json:"addresses"`
	// Hidden says why its addresses are not announced to other hosts; empty:
	// they are.
	Hidden string `json:"not_announced"`

	at []place // more than one for a bond
}

// Address is the address that other hosts are told: of the wanted family if it
// has one, else IPv4 first. It is not valid where none is announced.
func (n *NIC) Address(like netip.Addr) netip.Addr {
	var best netip.Addr
	if n.Hidden != "" {
		return best
	}
	want4 := !like.IsValid() || like.Unmap().Is4()
	for _, p := range n.Addresses {
		a := p.Addr().Unmap()
		if public(a) && (!best.IsValid() || a.Is4() == want4 && best.Is4() != want4) {
			best = a
		}
	}
	return best
}

// public says whether a can mean the same host to another host.
func public(a netip.Addr) bool {
	return a.IsGlobalUnicast() // neither loopback, link-local, multicast nor unspecified
}

const netClass = "/sys/class/net"

// nics lists the interfaces that sysfs or the address list knows.
func (r *reader) nics(rdma []RDMADevice, addrs map[string][]netip.Prefix) []NIC {
	names := r.list(netClass)
	for name := range addrs {
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	nics := []NIC{}
	for _, name := range names {
		if dir := netClass + "/" + name; !r.exists(dir) || r.exists(dir+"/ifindex") { // else bonding_masters
			nics = append(nics, r.nic(name, addrs[name]))
		}
	}
	for i := range nics {
		n := &nics[i]
		n.at = lowest(nics, n, 0)
		if len(n.at) > 0 {
			n.PCI, n.NUMA = n.at[0].address(), n.at[0].numa
		}
		n.RDMA = rdmaOf(rdma, n)
		n.Hidden = r.hidden(n)
	}
	return nics
}

func (r *reader) nic(name string, addrs []netip.Prefix) NIC {
	dir := netClass + "/" + name
	n := NIC{
		Name: name, Kind: r.kind(dir), MTU: r.number(dir+"/mtu", 0), NUMA: -1,
		Driver: r.base(dir + "/device/driver"), Ports: []string{}, RDMA: []string{}, Addresses: append([]netip.Prefix{}, addrs...),
	}
	state, known := r.text(dir + "/operstate")
	n.Up = state == "up" || state == "unknown" && r.number(dir+"/flags", 0)&1 != 0 || !known && len(addrs) > 0
	if b, err := os.ReadFile(r.root + dir + "/speed"); err == nil { // an error: no link
		n.Speed = max(0, atoi(string(b)))
	}
	for _, entry := range r.list(dir) {
		if lower, ok := strings.CutPrefix(entry, "lower_"); ok {
			n.Ports = append(n.Ports, lower)
		}
	}
	if r.exists(dir + "/device") {
		n.at = []place{r.placeOf(dir + "/device")}
	}
	return n
}

// The numbers in the file "type", ARPHRD_* of the kernel.
const (
	typeInfiniband = 32
	typeLoopback   = 772
)

// tunnels are the types of interfaces that carry packets inside of others.
var tunnels = []int{768, 769, 776, 778, 823, 65534}

// kind tells interfaces apart by what the kernel shows of them, since anybody
// can name them as they like.
func (r *reader) kind(dir string) string {
	typ := r.number(dir+"/type", -1)
	event, _ := r.text(dir + "/uevent")
	dev := ""
	for _, line := range strings.Fields(event) {
		if v, ok := strings.CutPrefix(line, "DEVTYPE="); ok {
			dev = v
		}
	}
	switch {
	case typ < 0:
		return "unknown"
	case typ == typeLoopback:
		return "loopback"
	case r.exists(dir + "/bridge"):
		return "bridge"
	case r.exists(dir + "/bonding"):
		return "bond"
	case r.exists(dir+"/phy80211") || r.exists(dir+"/wireless"):
		return "wifi"
	case r.exists(dir+"/tun_flags") || slices.Contains(tunnels, typ):
		return "tunnel"
	case typ == typeInfiniband:
		return "infiniband"
	case dev != "":
		return dev // vlan, vxlan, macvlan, geneve, wwan, ...
	case r.exists(dir + "/device"):
		return "ethernet"
	case r.number(dir+"/iflink", 0) != r.number(dir+"/ifindex", 0):
		return "veth" // one end of a pair, whose other end is elsewhere
	}
	return "virtual"
}

// lowest is where the hardware under an interface is. Interfaces lie on each
// other at most a few deep.
func lowest(nics []NIC, n *NIC, depth int) []place {
	if len(n.Ports) == 0 || depth > 8 {
		return n.at
	}
	var all []place
	for i := range nics {
		if slices.Contains(n.Ports, nics[i].Name) {
			all = append(all, lowest(nics, &nics[i], depth+1)...)
		}
	}
	return all
}

// rdmaOf is the RDMA devices of an interface: those whose GID tables name it,
// and, of those that name none, as InfiniBand does, those of the same card.
func rdmaOf(rdma []RDMADevice, n *NIC) []string {
	found := []string{}
	for i := range rdma {
		d := &rdma[i]
		card := func(p place) bool { return d.PCI != "" && p.address() == d.PCI }
		if slices.Contains(d.NICs, n.Name) || len(d.NICs) == 0 && slices.ContainsFunc(n.at, card) {
			found = append(found, d.Name)
		}
	}
	return found
}

// bridges are names that software gives to bridges and overlays of containers,
// for where sysfs does not show what an interface is.
var bridges = []string{"docker", "cni", "br-", "veth", "virbr", "flannel", "cali", "cilium", "lxc", "vxlan", "podman"}

// hidden says why the addresses of n mean nothing to other hosts, or nothing.
func (r *reader) hidden(n *NIC) string {
	switch n.Kind {
	case "loopback":
		return "it is the loopback interface"
	case "bridge":
		if len(n.at) == 0 {
			return "it is a bridge without hardware, of containers or virtual machines"
		}
	case "vxlan", "geneve", "tunnel", "wireguard":
		return "it is a tunnel"
	case "unknown":
		prefixed := func(b string) bool { return strings.HasPrefix(n.Name, b) }
		if n.Name == "lo" {
			return "it is the loopback interface"
		}
		if slices.ContainsFunc(bridges, prefixed) {
			return "it has the name of a bridge or overlay of containers"
		}
	}
	if master := r.base(netClass + "/" + n.Name + "/master"); master != "" {
		switch kind := r.kind(netClass + "/" + master); kind {
		case "vrf": // its ports have their own addresses
		case "bridge", "bond":
			return "it is a port of the " + kind + " " + master
		default:
			return "it is a port of " + master
		}
	}
	if !slices.ContainsFunc(n.Addresses, func(p netip.Prefix) bool { return public(p.Addr().Unmap()) }) {
		return "it has no address that other hosts can use"
	}
	return ""
}
