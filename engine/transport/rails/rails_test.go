package rails

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/transport"
)

// named is a Fabric of which only the address is asked.
type named struct {
	transport.Fabric
	addr transport.Addr
}

func (n named) Addr() transport.Addr { return n.addr }

func TestAddress(t *testing.T) {
	for want, of := range map[transport.Addr][]transport.Addr{
		"rails:tcp:1.2.3.4:5,tcp:[::1]:6": {"tcp:1.2.3.4:5", "tcp:[::1]:6"},
		"rails:,tcp:a:1":                  {"", "tcp:a:1"},
		"rails:x:a%2Cb,x:%252C%25":        {"x:a,b", "x:%2C%"},
		"rails:3*x:1*y,3*z":               {"x:1*y", "3*z"},
		"":                                {"", ""},
	} {
		var members []transport.Fabric
		for _, a := range of {
			members = append(members, named{addr: a})
		}
		strands := 1
		if strings.HasPrefix(string(want), "rails:3*") {
			strands = 3
		}
		got := join(members, strands)
		require.Equal(t, want, got)
		if want != "" {
			back, n, err := split(got)
			require.NoError(t, err)
			require.Equal(t, strands, n)
			require.Equal(t, of, back)
		}
	}
	for _, c := range []struct{ address, want string }{
		{prefix + strings.Repeat("x,", maxRails), "rails: address of 65 fabrics: at most 64"},
		{prefix + "65*x", `rails: address of "65" connections over each fabric: want 1 to 64`},
		{prefix + "0*x", `rails: address of "0" connections over each fabric: want 1 to 64`},
		{prefix + "99999999999999999999*x", `rails: address of "99999999999999999999" connections over each fabric: want 1 to 64`},
		{"tcp:1.2.3.4:5", `rails: "tcp:1.2.3.4:5" is the address of one interface or device`},
	} {
		_, _, err := split(transport.Addr(c.address))
		require.EqualError(t, err, c.want)
	}
	require.True(t, Joined("rails:2*,tcp:1.2.3.4:5", "tcp"))
	require.False(t, Joined("rails:tcp:1.2.3.4:5", "verbs") || Joined("tcp:1.2.3.4:5", "tcp"))
}

func TestOneFabricIsNotWrapped(t *testing.T) {
	one := named{addr: "x:1"}
	f, err := New([]transport.Fabric{one}, Options{})
	require.NoError(t, err)
	require.Equal(t, transport.Fabric(one), f)
	_, err = New(nil, Options{})
	require.EqualError(t, err, "rails: 0 fabrics: want 1 to 64")
	_, err = New(make([]transport.Fabric, 65), Options{})
	require.EqualError(t, err, "rails: 65 fabrics: want 1 to 64")
	_, err = New(make([]transport.Fabric, 4), Options{Networks: make([][]netip.Prefix, 3)})
	require.EqualError(t, err, "rails: networks of 3 fabrics, of which there are 4")
	_, err = New(make([]transport.Fabric, 4), Options{Strands: 17})
	require.EqualError(t, err, "rails: 17 connections over each of 4 fabrics: at most 64 in all")
}

func TestKeys(t *testing.T) {
	members := []transport.Key{{ID: 7, Token: 1 << 63, Blob: "memory"}, {ID: 1 << 40, Token: 5}, {}}
	k := transport.Key{ID: 9, Token: 0x1234}
	k.Blob = blob(&k, members)
	for i, want := range members {
		got, err := memberKey(&k, i, 3)
		require.NoError(t, err)
		require.Equal(t, want, got)
		other := k
		other.ID++
		got, _ = memberKey(&other, i, 3)
		require.NotEqual(t, want.ID, got.ID, "another ID is another one for each member")
		other = k
		other.Token ^= 2
		got, _ = memberKey(&other, i, 3)
		require.NotEqual(t, want.Token, got.Token)
	}
	for _, bad := range []string{"", "\x00", "\x01", k.Blob[:len(k.Blob)-1], k.Blob[:20], k.Blob + "x", "\x02" + k.Blob[1:], "\xff" + k.Blob[1:]} {
		_, err := memberKey(&transport.Key{Blob: bad}, 0, 1)
		require.ErrorContains(t, err, "rails: post: key 0", "%q", bad)
	}
	_, err := memberKey(&k, 3, 4)
	require.EqualError(t, err, "rails: post: key 9 is for 3 fabrics: the peer has at least 4")
	require.Zero(t, testing.AllocsPerRun(100, func() { _, _ = memberKey(&k, 1, 3) }))
}

func TestItems(t *testing.T) {
	for _, it := range []item{
		{kind: frame, num: 1 << 60, ack: 1 << 61, got: 1 << 62},
		{kind: bare, ack: 5},
		{kind: stating, num: 3, statement: statement{1<<32 - 1, 1 << 63}},
	} {
		var b [headerLen]byte
		putItem(b[:], &it)
		got, err := parseItem(b[:])
		require.NoError(t, err)
		require.Equal(t, it, got)
	}
}

func TestPool(t *testing.T) {
	var p pool
	for _, n := range []int{0, 1, 63, 64, 65, 4096, 4097, transport.MaxFrame + headerLen} {
		b := p.get(n)
		require.Len(t, b, n)
		p.put(b)
		again := p.get(n)
		require.Same(t, &b[:1][0], &again[:1][0])
		require.Zero(t, p.bytes)
	}
	for range 100 {
		p.put(make([]byte, 1<<20))
	}
	require.LessOrEqual(t, p.bytes, poolBytes)
}
