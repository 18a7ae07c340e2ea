package rails

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/transport"
)

// TestMatchByReach: without a network in common, who reaches whom and the places decide.
func TestMatchByReach(t *testing.T) {
	for _, c := range []struct {
		name   string
		theirs string
		ours   string // of each of ours, the nets that it reaches
		want   []pair
	}{
		{"by place", "a b", "a b", []pair{{0, 0}, {1, 1}}},
		{"all reach all", "a b", "ab ab", []pair{{0, 0}, {1, 1}}},
		{"crossed", "a b", "b a", []pair{{0, 1}, {1, 0}}},
		{"the place comes first", "a b c", "abc b abc", []pair{{0, 0}, {1, 1}, {2, 2}}},
		{"the place comes before the order", "a b", "b ab", []pair{{1, 1}}},
		{"more of theirs", "a b c", "abc abc", []pair{{0, 0}, {1, 1}}},
		{"more of ours", "a", "a a a", []pair{{0, 0}}},
		{"more of ours, of which the last fits", "a", "b b a", []pair{{2, 0}}},
		{"one of theirs takes no connections", "- b", "ab ab", []pair{{1, 1}}},
		{"one of theirs stands there twice", "a a", "a a", []pair{{0, 0}}},
		{"no way", "a b", "c c", nil},
		{"some ways", "a b c d", "d x c", []pair{{2, 2}, {0, 3}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var theirs []transport.Addr
			for _, a := range strings.Fields(c.theirs) {
				theirs = append(theirs, transport.Addr(strings.Trim(a, "-")))
			}
			ours := strings.Fields(c.ours)
			reaches := func(i int, a transport.Addr) bool { return strings.Contains(ours[i], string(a)) }
			require.Equal(t, c.want, match(make([][]netip.Prefix, len(ours)), theirs, false, reaches))
			require.Empty(t, match(make([][]netip.Prefix, len(ours)), theirs, true, reaches))
		})
	}
}

// matchCases are interfaces of ours and addresses of the peer, and which go together.
var matchCases = []struct {
	name   string
	ours   string // the prefixes of each interface, with + between them; - is one that does not work
	theirs string // addresses; - takes no connections
	want   []pair // of names that are given
	common int    // how many of them are in a common network, which are the first
}{
	{"the same order", "10.0.0.1/24 10.1.0.1/24", "10.0.0.2 10.1.0.2", []pair{{0, 0}, {1, 1}}, 2},
	{"crossed", "10.0.0.1/24 10.1.0.1/24", "10.1.0.2 10.0.0.2", []pair{{0, 1}, {1, 0}}, 2},
	{"three in a circle", "10.0.0.1/24 10.1.0.1/24 10.2.0.1/24", "10.1.0.2 10.2.0.2 10.0.0.2", []pair{{0, 2}, {1, 0}, {2, 1}}, 3},
	{"one network", "10.0.0.1/24 10.0.0.3/24", "10.0.0.2 10.0.0.4", []pair{{0, 0}, {1, 1}}, 2},
	{"one network, and another one between", "10.0.0.1/24 10.1.0.1/24 10.0.0.3/24", "10.0.0.2 10.0.0.4 10.1.0.2", []pair{{0, 0}, {1, 2}, {2, 1}}, 3},
	{"each has networks that the other has not", "10.0.0.1/24 10.1.0.1/24 10.2.0.1/24", "10.3.0.2 10.1.0.2 10.0.0.2", []pair{{1, 1}, {0, 2}, {2, 0}}, 2},
	{"the peer has fewer", "10.0.0.1/24 10.1.0.1/24 10.2.0.1/24", "10.2.0.2", []pair{{2, 0}}, 1},
	{"the peer has more", "10.2.0.1/24", "10.0.0.2 10.1.0.2 10.2.0.2", []pair{{0, 2}}, 1},
	{"routers between", "10.0.0.0/31 10.0.0.2/31", "10.9.0.0 10.9.0.2", []pair{{0, 0}, {1, 1}}, 0},
	{"host routes", "10.0.0.1/32 10.0.0.2/32", "10.0.0.3 10.0.0.4", []pair{{0, 0}, {1, 1}}, 0},
	{"a router for one of them", "10.0.0.1/24 10.1.0.1/24", "10.9.0.2 10.0.0.2", []pair{{0, 1}, {1, 0}}, 1},
	{"nothing is known of one", "10.0.0.1/24 .", "10.1.0.2 10.0.0.2", []pair{{0, 1}, {1, 0}}, 1},
	{"nothing is known", ". .", "10.0.0.2 10.1.0.2", []pair{{0, 0}, {1, 1}}, 0},
	{"the longest prefix", "10.0.0.1/8 10.1.0.1/16 10.1.2.1/24", "10.1.2.2 10.1.0.2 10.9.0.2", []pair{{2, 0}, {1, 1}, {0, 2}}, 3},
	{"IPv6", "fd00:a::1/64 fd00:b::1/64", "fd00:b::2 fd00:a::2", []pair{{0, 1}, {1, 0}}, 2},
	{"one family each", "10.0.0.1/24 fd00:b::1/64", "fd00:b::2 10.0.0.2", []pair{{1, 0}, {0, 1}}, 2},
	{"IPv4 in IPv6", "10.0.0.1/24 10.1.0.1/24", "::ffff:10.1.0.2 ::ffff:10.0.0.2", []pair{{0, 1}, {1, 0}}, 2},
	{"two addresses on one", "10.0.0.1/24+fd00:b::1/64 10.1.0.1/24", "10.1.0.2 fd00:b::2", []pair{{0, 1}, {1, 0}}, 2},
	{"link-local is no network", "fe80::1/64+169.254.0.1/16 10.1.0.1/24", "10.1.0.2 fe80::2", []pair{{1, 0}, {0, 1}}, 1},
	{"link-local is no network, of IPv4", "169.254.0.1/16 10.1.0.1/24", "10.1.0.2 169.254.0.2", []pair{{1, 0}, {0, 1}}, 1},
	{"one of ours does not work", "- 10.1.0.1/24", "10.0.0.2 10.1.0.2", []pair{{1, 1}}, 1},
	{"one of ours does not work, and they are crossed", "- 10.1.0.1/24", "10.1.0.2 10.0.0.2", []pair{{1, 0}}, 1},
	{"one of theirs does not work", "10.0.0.1/24 10.1.0.1/24", "- 10.1.0.2", []pair{{1, 1}}, 1},
	{"another one at each side, and a router", "- 10.1.0.1/24", "10.0.0.2 -", []pair{{1, 0}}, 0},
	{"the same address twice", "10.0.0.1/24 10.0.0.3/24", "10.0.0.2 10.0.0.2", []pair{{0, 0}}, 1},
	{"a name, which is in no network", "10.0.0.1/24 10.1.0.1/24", "host 10.0.0.2", []pair{{0, 1}, {1, 0}}, 1},
	{"none of theirs", "10.0.0.1/24", "-", nil, 0},
}

// TestMatch: networks in common come first, then the places.
func TestMatch(t *testing.T) {
	for _, c := range matchCases {
		t.Run(c.name, func(t *testing.T) {
			var ours [][]netip.Prefix
			var broken []bool
			for _, list := range strings.Fields(c.ours) {
				var all []netip.Prefix
				for p := range strings.SplitSeq(strings.Trim(list, "-."), "+") {
					if p != "" {
						all = append(all, netip.MustParsePrefix(p))
					}
				}
				ours, broken = append(ours, all), append(broken, list == "-")
			}
			var theirs []transport.Addr
			for _, host := range strings.Fields(c.theirs) {
				a := transport.Addr("")
				if strings.Contains(host, ":") {
					host = "[" + host + "]"
				}
				if host != "-" {
					a = transport.Addr("tcp:" + host + ":4000")
				}
				theirs = append(theirs, a)
			}
			reaches := func(i int, a transport.Addr) bool { return !broken[i] }
			require.Equal(t, c.want, match(ours, theirs, false, reaches))
			require.Len(t, match(ours, theirs, true, reaches), c.common)
			require.ElementsMatch(t, c.want[:c.common], match(ours, theirs, true, reaches))
		})
	}
}
