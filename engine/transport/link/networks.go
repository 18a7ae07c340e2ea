package link

import (
	"net"
	"net/netip"
	"strings"

	"fserver/engine/transport"
)

// Longest returns how many bits the longest of networks has that contains at, or -1. Link-local addresses are those of
// one link, which nobody can tell from another one by the address, so they are in no network.
func Longest(networks []netip.Prefix, at netip.Addr) (bits int) {
	bits = -1
	for _, p := range networks {
		if p.Contains(at) && !at.IsLinkLocalUnicast() {
			bits = max(bits, p.Bits())
		}
	}
	return bits
}

// HostOf returns the IP address in "tcp:HOST:PORT". It is not valid if there is none.
func HostOf(a transport.Addr) netip.Addr {
	_, at, _ := strings.Cut(string(a), ":")
	host, _, err := net.SplitHostPort(at)
	if err != nil {
		return netip.Addr{}
	}
	ip, _ := netip.ParseAddr(host)
	return ip.Unmap()
}
