package node

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"fserver/engine/conf"
	"fserver/engine/topo"
)

// address is the host that this node listens on: what the user named (DMLC_NODE_HOST, then
// the first one of DMLC_INTERFACE); else the address of this host that routes to a scheduler elsewhere; else loopback.
// A scheduler follows the same rule: the address that routes to its own address is that address.
func address(cfg *conf.Config) (string, error) {
	switch {
	case cfg.NodeHost != "":
		return ownHost(cfg, cfg.NodeHost)
	case len(cfg.Interfaces) > 0:
		return interfaceAddress(cfg.Interfaces[0])
	case conf.Loopback(cfg.SchedulerHost):
		return "127.0.0.1", nil
	}
	to := cfg.SchedulerHost
	if own, err := ownHost(cfg, to); err == nil { // the one that a scheduler on this host listens on
		to = own
	}
	// Connecting a UDP socket sends nothing; it asks the routing table.
	c, err := net.Dial("udp", net.JoinHostPort(to, "9"))
	if err != nil {
		return "", badSetting("node: no route to the scheduler's host %s: %v (DMLC_PS_ROOT_URI)", cfg.SchedulerHost, err)
	}
	defer c.Close()
	h, _, err := net.SplitHostPort(c.LocalAddr().String())
	return h, err
}

// schedulerAddress is the host that a scheduler with these settings listens on.
func schedulerAddress(cfg *conf.Config) (string, error) {
	return ownHost(cfg, cmp.Or(cfg.NodeHost, cfg.SchedulerHost))
}

// lookupLimit bounds the time in which a name is resolved.
const lookupLimit = 10 * time.Second

// ownHost is the address of this host that the name of a setting means. A name that cannot be resolved stays: what
// listens there or dials from there says why it cannot.
func ownHost(cfg *conf.Config, name string) (string, error) {
	if _, err := netip.ParseAddr(name); err == nil || conf.Loopback(name) {
		return name, nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), lookupLimit)
	defer cancel()
	found, err := net.DefaultResolver.LookupNetIP(ctx, "ip", name)
	if err != nil {
		return name, nil
	}
	all, err := topo.Local().Addresses()
	if err != nil {
		return name, nil
	}
	if at := ownAddress(found, slices.Concat(slices.Collect(maps.Values(all))...)); at.IsValid() {
		return at.String(), nil
	}
	setting, remedy := "DMLC_PS_ROOT_URI", "start the scheduler on the host that has one, or set DMLC_NODE_HOST to an address of this host"
	if name == cfg.NodeHost {
		setting, remedy = "DMLC_NODE_HOST", "give an address of this host"
	}
	return "", badSetting("node: %s=%s is %s, and this host has none of these addresses (%s)",
		setting, name, strings.Join(texts(found), ", "), remedy)
}

// ownAddress picks that of the addresses of a name which is of this host, and which other hosts are the most likely to
// reach. It is not valid if none is of this host. here: the addresses of the interfaces.
func ownAddress(found []netip.Addr, here []netip.Prefix) (best netip.Addr) {
	rank := func(a netip.Addr) int {
		switch {
		case a.IsLoopback():
			return 4
		case !slices.ContainsFunc(here, func(p netip.Prefix) bool { return p.Addr().Unmap() == a.WithZone("") }):
			return 5
		case a.IsLinkLocalUnicast():
			return 3
		case a.Is6():
			return 2
		}
		return 1
	}
	for _, a := range found {
		if a = a.Unmap(); rank(a) < 5 && (!best.IsValid() || rank(a) < rank(best)) {
			best = a
		}
	}
	return best
}

func texts(found []netip.Addr) (list []string) {
	for _, a := range found {
		list = append(list, a.Unmap().String())
	}
	return list
}

// onlyHere says why other hosts cannot connect to a node that listens on host; empty: they can, or are not meant to, or
// it listens nowhere. In /etc/hosts a host often gives its own name to a loopback address.
func onlyHere(cfg *conf.Config, host string) string {
	name := cmp.Or(cfg.NodeHost, cfg.SchedulerHost)
	if cfg.Role == conf.Worker || conf.Loopback(name) || !conf.Loopback(host) || len(cfg.Interfaces) > 0 && cfg.Role != conf.Scheduler {
		return ""
	}
	return fmt.Sprintf("%s is %s here, so other hosts cannot connect (give an address in place of the name, or correct /etc/hosts)", name, host)
}

func interfaceAddress(name string) (string, error) {
	all, err := topo.Local().Addresses()
	list, found := all[name]
	switch {
	case !found && err != nil:
		return "", fmt.Errorf("node: DMLC_INTERFACE=%s: %w", name, err)
	case !found:
		return "", badSetting("node: DMLC_INTERFACE=%s: no such network interface (this host has %s)", name, strings.Join(slices.Sorted(maps.Keys(all)), ", "))
	}
	for _, any := range []bool{false, true} { // IPv4 comes first
		for _, p := range list {
			if a := p.Addr(); !a.IsLinkLocalUnicast() && (any || a.Is4()) {
				return a.String(), nil
			}
		}
	}
	return "", badSetting("node: DMLC_INTERFACE=%s has no address", name)
}
