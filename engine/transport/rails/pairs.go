package rails

import (
	"cmp"
	"net/netip"
	"slices"

	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// pair is a Fabric of ours and one of the peer's, by their places.
type pair struct{ ours, theirs int }

// match returns which Fabric of ours connects with which of the peer's, where reaches reports whether one can at all.
// No Fabric is in two pairs, and no address, so that a Key that is bound to a Conn is bound to one member Conn.
//
// networks are those of the interface of each of ours. The peer's address decides: the pair with the longest prefix
// comes first, because the kernel routes like that; then two in the same place; then the order of the lists. Unless
// common is set, Fabrics without a network in common follow: two in the same place, then each that is left with the
// first that is left.
func match(networks [][]netip.Prefix, theirs []transport.Addr, common bool, reaches func(i int, a transport.Addr) bool) (pairs []pair) {
	type candidate struct {
		pair
		bits int // of the prefix that both are in; -1: none
	}
	var all []candidate
	for j, a := range theirs {
		at := link.HostOf(a)
		for i, list := range networks {
			if bits := link.Longest(list, at); bits >= 0 || !common {
				all = append(all, candidate{pair{i, j}, bits})
			}
		}
	}
	slices.SortFunc(all, func(a, b candidate) int {
		return cmp.Or(b.bits-a.bits, apart(a.pair)-apart(b.pair), a.ours-b.ours, a.theirs-b.theirs)
	})
	taken, used := make([]bool, len(networks)), map[transport.Addr]bool{"": true}
	for _, c := range all {
		if a := theirs[c.theirs]; !taken[c.ours] && !used[a] && reaches(c.ours, a) {
			taken[c.ours], used[a] = true, true
			pairs = append(pairs, c.pair)
		}
	}
	return pairs
}

// apart is 0 for two Fabrics in the same place, and 1 for others.
func apart(p pair) int {
	if p.ours == p.theirs {
		return 0
	}
	return 1
}
