package topo

import (
	"regexp"
	"strings"
)

// Distance is how far two PCI devices are from each other, with the names that
// `nvidia-smi topo` gives. A smaller one is nearer.
type Distance uint8

// The distances.
const (
	PIX     Distance = iota // at most one PCIe switch between them
	PXB                     // several switches, and no host bridge
	PHB                     // the same root complex, through its host bridge
	NODE                    // another root complex of the same NUMA node
	SYS                     // another NUMA node
	Unknown                 // sysfs does not show where one of them is
)

var distances = [...]string{"PIX", "PXB", "PHB", "NODE", "SYS", "?"}

func (d Distance) String() string { return distances[min(d, Unknown)] }

// MarshalText implements encoding.TextMarshaler.
func (d Distance) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// place is where a device hangs: the root complex, the bridges below it, the
// device itself. Empty: not known.
type place struct {
	path []string
	dir  string // in sysfs
	numa int    // -1: not known
}

var (
	pciAddress = regexp.MustCompile(`^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$`)
	pciRoot    = regexp.MustCompile(`^pci[0-9a-f]{4,8}:[0-9a-f]{2}$`)
)

// address is the PCI address of the device, or empty.
func (p place) address() string {
	if len(p.path) == 0 {
		return ""
	}
	return p.path[len(p.path)-1]
}

// pci is the place of the device with a PCI address.
func (r *reader) pci(address string) place {
	if !pciAddress.MatchString(address) {
		return place{numa: -1}
	}
	return r.placeOf("/sys/bus/pci/devices/" + address)
}

// placeOf is the place of the last PCI device on the way to what name links to.
func (r *reader) placeOf(name string) place {
	p := place{numa: -1}
	var path []string
	dir := ""
	for _, element := range strings.Split(strings.TrimPrefix(r.target(name), "/"), "/") {
		dir += "/" + element
		switch {
		case pciRoot.MatchString(element):
			path = []string{element}
		case path != nil && pciAddress.MatchString(element):
			path = append(path, element)
			p.path, p.dir = path, dir
		}
	}
	if p.dir != "" {
		p.numa = r.number(p.dir+"/numa_node", -1)
	}
	return p
}

// distance is how far a is from b on a host with so many NUMA nodes.
func distance(a, b place, nodes int) Distance {
	switch {
	case len(a.path) == 0 || len(b.path) == 0:
		return Unknown
	case a.path[0] != b.path[0]:
		if nodes <= 1 || a.numa >= 0 && a.numa == b.numa {
			return NODE
		}
		return SYS
	}
	common := 0
	for common < min(len(a.path), len(b.path)) && a.path[common] == b.path[common] {
		common++
	}
	if common == 1 {
		return PHB // no bridge in common but the root itself
	}
	// Below what they share, a switch has one port to each of them.
	if max(len(a.path), len(b.path))-common <= 2 {
		return PIX
	}
	return PXB
}

// Distance is how far a GPU is from a NIC; of a bond, from its nearest port.
func (h *Host) Distance(g *GPU, n *NIC) Distance {
	nearest := Unknown
	for _, at := range n.at {
		nearest = min(nearest, distance(g.at, at, h.NUMA))
	}
	return nearest
}

// Between is how far two GPUs are from each other over PCIe.
func (h *Host) Between(a, b *GPU) Distance { return distance(a.at, b.at, h.NUMA) }
