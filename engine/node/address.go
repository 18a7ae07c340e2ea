package node

import (
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"

	"fserver/engine/conf"
	"fserver/engine/topo"
)

// address is the host that this node listens on: what the user named (DMLC_NODE_HOST, then
// the first one of DMLC_INTERFACE); else the address of this host that routes to a scheduler elsewhere; else loopback.
// A scheduler follows the same rule: the address that routes to its own address is that address.
func address(cfg *conf.Config) (string, error) {
	switch {
	case cfg.NodeHost != "":
		return cfg.NodeHost, nil
	case len(cfg.Interfaces) > 0:
		return interfaceAddress(cfg.Interfaces[0])
	case conf.Loopback(cfg.SchedulerHost):
		return "127.0.0.1", nil
	}
	// Connecting a UDP socket sends nothing; it asks the routing table.
	c, err := net.Dial("udp", net.JoinHostPort(cfg.SchedulerHost, "9"))
	if err != nil {
		return "", badSetting("node: no route to the scheduler's host %s: %v (DMLC_PS_ROOT_URI)", cfg.SchedulerHost, err)
	}
	defer c.Close()
	h, _, err := net.SplitHostPort(c.LocalAddr().String())
	return h, err
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
