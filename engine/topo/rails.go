package topo

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
)

// Rail says of one interface whether DMLC_INTERFACE=auto uses it.
type Rail struct {
	Interface string       `json:"interface"`
	Address   netip.Prefix `json:"address"` // that it is used with, and its network
	RDMA      string       `json:"rdma"`    // a device of it that may be opened
	Distance  Distance     `json:"distance"`
	Why       string       `json:"why_not"` // empty: it is used
}

// MaxRails is how many interfaces DMLC_INTERFACE=auto uses at most.
const MaxRails = 4

// slow is how many times faster the fastest interface is than one that is left out: on one of them a part of a tensor
// would hold up the others.
const slow = 4

// Rails says which interfaces a process on a device uses with DMLC_INTERFACE=auto (see Device and Choose): those that
// are used come first, in their order, then the others by their names. Of those that other hosts can reach it uses all
// that are as near to the GPU as the nearest, one for each network and each port, without much slower ones. Where one
// or none is left, Choose decides.
func (h *Host) Rails(device int, visible string, route netip.Addr) []Rail {
	s := sieve{h: h, route: route.Unmap(), gpu: h.Device(device, visible), why: map[*NIC]string{}}
	for i := range h.NICs {
		s.left = append(s.left, &h.NICs[i])
	}
	s.drop(s.unusable)
	s.drop(s.tooSlow())
	turn := s.turn(device)
	s.drop(s.tooFar())
	s.single()
	s.limit(turn)
	if len(s.left) < 2 {
		s.one(h.Choose(device, visible, route))
	}
	all := []Rail{}
	for _, n := range s.left {
		all = append(all, s.rail(n, ""))
	}
	for i := range h.NICs {
		if n := &h.NICs[i]; !slices.Contains(s.left, n) {
			all = append(all, s.rail(n, s.why[n]))
		}
	}
	return all
}

// sieve leaves out one interface after the other, and notes why.
type sieve struct {
	h     *Host
	route netip.Addr
	gpu   *GPU // or nil
	left  []*NIC
	why   map[*NIC]string
}

// drop leaves out those for which no gives a reason.
func (s *sieve) drop(no func(*NIC) string) {
	s.left = slices.DeleteFunc(s.left, func(n *NIC) bool {
		why := no(n)
		if why != "" {
			s.why[n] = why
		}
		return why != ""
	})
}

func (s *sieve) unusable(n *NIC) string {
	switch {
	case s.route.IsLoopback():
		return "the scheduler is on this host's loopback"
	case n.Hidden != "":
		return n.Hidden
	case !n.Up:
		return "it is down, or has no carrier"
	case n.Kind == "virtual" && len(n.Ports) == 0 || n.Kind == "vrf":
		return "there is no hardware below it"
	case n.Kind == "wifi" || n.Kind == "wwan":
		return "it is wireless"
	}
	return ""
}

// tooSlow compares with the fastest. One whose speed is not known counts as fast.
func (s *sieve) tooSlow() func(*NIC) string {
	if len(s.left) == 0 {
		return func(*NIC) string { return "" }
	}
	best := slices.MaxFunc(s.left, func(a, b *NIC) int { return cmp.Compare(a.Speed, b.Speed) })
	return func(n *NIC) string {
		if n.Speed == 0 || n.Speed >= best.Speed/slow {
			return ""
		}
		return fmt.Sprintf("it is slow: %v Gbit/s, and %s has %v Gbit/s", gbits(n), best.Name, gbits(best))
	}
}

func gbits(n *NIC) float64 { return float64(n.Speed) / 1000 }

// tooFar compares with the nearest. Without a GPU all are equally near.
func (s *sieve) tooFar() func(*NIC) string {
	if s.gpu == nil || len(s.left) == 0 {
		return func(*NIC) string { return "" }
	}
	best := s.h.equallyNear(s.gpu, s.left)
	at := s.h.Distance(s.gpu, best[0])
	return func(n *NIC) string {
		if slices.Contains(best, n) {
			return ""
		}
		return fmt.Sprintf("it is farther from GPU %d than %s (%v, not %v)", s.gpu.Index, best[0].Name, s.h.Distance(s.gpu, n), at)
	}
}

// single leaves one of several in one network or on one port: the one that routes to the scheduler, or else the first.
func (s *sieve) single() {
	byRoute := s.h.holder(s.route)
	order := slices.Clone(s.left)
	slices.SortStableFunc(order, func(a, b *NIC) int {
		switch {
		case a == byRoute:
			return -1
		case b == byRoute:
			return 1
		}
		return 0
	})
	for i, n := range order {
		for _, m := range order[:i] {
			switch net := s.network(n).Masked(); {
			case s.why[n] != "" || s.why[m] != "":
			case net == s.network(m).Masked():
				s.why[n] = fmt.Sprintf("it is in the network %v of %s", net, m.Name)
			case s.h.share(n, m):
				s.why[n] = "it uses the same port as " + m.Name
			}
		}
	}
	s.drop(func(n *NIC) string { return s.why[n] })
}

// network is the address of n that is used, with its network.
func (s *sieve) network(n *NIC) netip.Prefix {
	at := n.Address(s.route)
	for _, p := range n.Addresses {
		if p.Addr().Unmap() == at {
			return p
		}
	}
	return netip.Prefix{}
}

// turn is how many processes before this one have the same choice, as far as it can be told. Each begins with another
// interface, so that all are used where there are more than MaxRails.
func (s *sieve) turn(device int) int {
	if s.gpu == nil {
		return device
	}
	return s.h.turn(s.gpu, s.left)
}

// limit puts the interface of this turn first, and leaves MaxRails.
func (s *sieve) limit(turn int) {
	if len(s.left) == 0 {
		return
	}
	turn %= len(s.left)
	s.left = append(slices.Clone(s.left[turn:]), s.left[:turn]...)
	for i, n := range s.left {
		if i >= MaxRails {
			s.why[n] = fmt.Sprintf("there are %d, and auto uses at most %d for each process", len(s.left), MaxRails)
		}
	}
	s.drop(func(n *NIC) string { return s.why[n] })
}

// one leaves the interface that is chosen.
func (s *sieve) one(c Choice) {
	s.drop(func(n *NIC) string {
		if n.Name == c.Interface {
			return ""
		}
		return fmt.Sprintf("one interface is used, %s: %s", c.Interface, c.Why)
	})
	for i := range s.h.NICs {
		if n := &s.h.NICs[i]; n.Name == c.Interface {
			s.left = []*NIC{n}
		}
	}
}

func (s *sieve) rail(n *NIC, why string) Rail {
	r := Rail{Interface: n.Name, Address: s.network(n), Distance: Unknown, Why: why}
	if s.gpu != nil {
		r.Distance = s.h.Distance(s.gpu, n)
	}
	if i := slices.IndexFunc(s.h.RDMA, func(d RDMADevice) bool { return slices.Contains(n.RDMA, d.Name) && d.Active() && d.Usable() }); i >= 0 {
		r.RDMA = s.h.RDMA[i].Name
	}
	return r
}

// share says whether two interfaces lie on one port, as a VLAN does and what it is a VLAN of.
func (h *Host) share(a, b *NIC) bool {
	below := h.below(a, 0)
	return slices.ContainsFunc(h.below(b, 0), func(name string) bool { return slices.Contains(below, name) })
}

// below is the names of the interfaces that n lies on and nothing else does, which may be its own.
func (h *Host) below(n *NIC, depth int) (names []string) {
	if len(n.Ports) == 0 || depth > 8 {
		return []string{n.Name}
	}
	for _, name := range n.Ports {
		i := slices.IndexFunc(h.NICs, func(n NIC) bool { return n.Name == name })
		if i < 0 {
			names = append(names, name)
		} else {
			names = append(names, h.below(&h.NICs[i], depth+1)...)
		}
	}
	return names
}
