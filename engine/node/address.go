package node

import (
	"fmt"
	"net"
	"strings"

	"fserver/engine/conf"
)

func isLoopback(hostport string) bool {
	h, _, err := net.SplitHostPort(hostport)
	ip := net.ParseIP(h)
	return err == nil && ip != nil && ip.IsLoopback()
}

// address turns the settings' wish into one address of this host.
func address(l conf.Listen) (string, error) {
	switch l.Kind {
	case conf.ListenHost:
		if ip := net.ParseIP(l.Name); ip != nil && ip.IsUnspecified() {
			return "", badSetting("node: DMLC_NODE_HOST=%s is not an address that peers can connect to (name one of this host's, or set DMLC_INTERFACE)", l.Name)
		}
		return l.Name, nil
	case conf.ListenInterface:
		return interfaceAddress(l.Name)
	case conf.ListenRoute:
		// Connecting a UDP socket sends nothing; it asks the routing table.
		c, err := net.Dial("udp", net.JoinHostPort(l.Name, "9"))
		if err != nil {
			return "", badSetting("node: no route to the scheduler's host %s: %v (DMLC_PS_ROOT_URI)", l.Name, err)
		}
		defer c.Close()
		h, _, err := net.SplitHostPort(c.LocalAddr().String())
		return h, err
	}
	if strings.Contains(l.Name, ":") {
		return "::1", nil
	}
	return "127.0.0.1", nil
}

func interfaceAddress(name string) (string, error) {
	i, err := net.InterfaceByName(name)
	if err != nil {
		all, _ := net.Interfaces()
		names := make([]string, len(all))
		for j := range all {
			names[j] = all[j].Name
		}
		return "", badSetting("node: DMLC_INTERFACE=%s: %v (this host has %s)", name, err, strings.Join(names, ", "))
	}
	addrs, err := i.Addrs()
	if err != nil {
		return "", fmt.Errorf("node: DMLC_INTERFACE=%s: %w", name, err)
	}
	var found string
	for _, a := range addrs {
		p, ok := a.(*net.IPNet)
		if !ok || p.IP.IsLinkLocalUnicast() {
			continue
		}
		if p.IP.To4() != nil {
			return p.IP.String(), nil
		}
		if found == "" {
			found = p.IP.String()
		}
	}
	if found == "" {
		return "", badSetting("node: DMLC_INTERFACE=%s has no address", name)
	}
	return found, nil
}
