package topo

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// Choice is what DMLC_INTERFACE=auto comes to.
type Choice struct {
	Interface string     `json:"interface"` // empty: nothing fits
	Address   netip.Addr `json:"address"`
	RDMA      string     `json:"rdma"`
	GPU       int        `json:"gpu"`      // index of the driver's; -1: none
	Distance  Distance   `json:"distance"` // from that GPU
	Why       string     `json:"why"`
}

// Device is the GPU that CUDA calls number device, where visible is the value
// of CUDA_VISIBLE_DEVICES; nil if it cannot be told.
func (h *Host) Device(device int, visible string) *GPU {
	id := strconv.Itoa(device)
	if visible = strings.TrimSpace(visible); visible != "" {
		list := strings.Split(visible, ",")
		if device >= len(list) {
			return nil
		}
		id = strings.TrimSpace(list[device])
	}
	for i := range h.GPUs {
		g := &h.GPUs[i]
		if id == strconv.Itoa(g.Index) || strings.HasPrefix(id, "GPU-") && strings.HasPrefix(g.UUID, id) {
			return g
		}
	}
	return nil
}

// Choose picks the interface for a process on a device (see Device): the one
// nearest the GPU among those with an RDMA device, else the one that routes to
// the scheduler, which has the address route (not valid: not known).
func (h *Host) Choose(device int, visible string, route netip.Addr) Choice {
	route = route.Unmap()
	gpu := h.Device(device, visible)
	if route.IsLoopback() {
		return h.choice(h.holder(route), gpu, route, "the scheduler is on this host's loopback")
	}
	var near []*NIC
	for i := range h.NICs {
		if n := &h.NICs[i]; n.Up && h.usable(n) && n.Address(route).IsValid() {
			near = append(near, n)
		}
	}
	switch {
	case len(near) == 0:
	case gpu != nil:
		n := h.nearest(gpu, near)
		why := fmt.Sprintf("of %d interfaces with an RDMA device it is the nearest to GPU %d (%v)", len(near), gpu.Index, h.Distance(gpu, n))
		return h.choice(n, gpu, n.Address(route), why)
	default:
		n, why := near[device%len(near)], "it has an RDMA device, and there is no GPU to be near to"
		if by := h.holder(route); slices.Contains(near, by) {
			n, why = by, "it has an RDMA device and routes to the scheduler"
		}
		return h.choice(n, nil, n.Address(route), why)
	}
	if n := h.holder(route); n != nil {
		return h.choice(n, gpu, route, "no interface has a usable RDMA device, and this one routes to the scheduler")
	}
	for i := range h.NICs {
		if n := &h.NICs[i]; n.Up && n.Address(route).IsValid() {
			return h.choice(n, gpu, n.Address(route), "no interface has a usable RDMA device, no route to a scheduler is known, and this is the first interface with an address")
		}
	}
	return Choice{GPU: -1, Distance: Unknown, Why: "no interface has an address that other hosts can use"}
}

func (h *Host) choice(n *NIC, g *GPU, a netip.Addr, why string) Choice {
	c := Choice{Address: a, GPU: -1, Distance: Unknown, Why: why}
	if n != nil {
		c.Interface = n.Name
		if len(n.RDMA) > 0 {
			c.RDMA = n.RDMA[0]
		}
		if g != nil {
			c.GPU, c.Distance = g.Index, h.Distance(g, n)
		}
	}
	return c
}

// nearest is the NIC for a GPU. Where several are equally near, the GPUs that
// have the same choice take turns, so that each gets one of its own if there
// are enough.
func (h *Host) nearest(g *GPU, nics []*NIC) *NIC {
	best := h.equallyNear(g, nics)
	return best[h.turn(g, nics)%len(best)]
}

// turn is how many GPUs before g have the same NICs nearest.
func (h *Host) turn(g *GPU, nics []*NIC) (turn int) {
	best := h.equallyNear(g, nics)
	for i := range h.GPUs {
		if h.GPUs[i].Index < g.Index && slices.Equal(best, h.equallyNear(&h.GPUs[i], nics)) {
			turn++
		}
	}
	return turn
}

func (h *Host) equallyNear(g *GPU, nics []*NIC) []*NIC {
	var best []*NIC
	at := Unknown
	for _, n := range nics {
		d := h.Distance(g, n)
		if d < at {
			best, at = best[:0], d
		}
		if d == at {
			best = append(best, n)
		}
	}
	return best
}

// Devices gives the names of RDMA devices in the order in which a process on a GPU (see Device) tries them: the nearest
// first. Of those that are equally near and have a link, the GPUs that have the same ones nearest take turns. Names
// that Read has not found come last, in their order. Without a GPU the order stays.
func (h *Host) Devices(device int, visible string, names []string) []string {
	gpu, list := h.Device(device, visible), slices.Clone(names)
	if gpu == nil {
		return list
	}
	slices.SortStableFunc(list, func(a, b string) int { return cmp.Compare(h.deviceDistance(gpu, a), h.deviceDistance(gpu, b)) })
	near := h.nearDevices(gpu, names)
	turn := 0
	for i := range h.GPUs {
		if g := &h.GPUs[i]; g.Index < gpu.Index && slices.Equal(near, h.nearDevices(g, names)) {
			turn++
		}
	}
	if len(near) > 0 {
		turn %= len(near)
	}
	for i, name := range slices.Concat(near[turn:], near[:turn]) {
		at := slices.Index(list, name)
		list = slices.Insert(slices.Delete(list, at, at+1), i, name)
	}
	return list
}

// nearDevices are those of names with a link that may be opened and that are as near to g as the nearest of them.
func (h *Host) nearDevices(g *GPU, names []string) (best []string) {
	at := Unknown
	for _, name := range names {
		i := slices.IndexFunc(h.RDMA, func(d RDMADevice) bool { return d.Name == name })
		if i < 0 || !h.RDMA[i].Active() || !h.RDMA[i].Usable() {
			continue
		}
		d := h.deviceDistance(g, name)
		if d < at {
			best, at = nil, d
		}
		if d == at {
			best = append(best, name)
		}
	}
	return best
}

// deviceDistance is how far the RDMA device with a name is from g.
func (h *Host) deviceDistance(g *GPU, name string) Distance {
	for i := range h.RDMA {
		if h.RDMA[i].Name == name {
			return distance(g.at, h.RDMA[i].at, h.NUMA)
		}
	}
	return Unknown
}

// holder is the interface with an address, or nil.
func (h *Host) holder(a netip.Addr) *NIC {
	for i := range h.NICs {
		for _, p := range h.NICs[i].Addresses {
			if p.Addr().Unmap() == a {
				return &h.NICs[i]
			}
		}
	}
	return nil
}

// usable says whether n has an RDMA device with a link that may be opened.
func (h *Host) usable(n *NIC) bool {
	for i := range h.RDMA {
		if d := &h.RDMA[i]; slices.Contains(n.RDMA, d.Name) && d.Active() && d.Usable() {
			return true
		}
	}
	return false
}
