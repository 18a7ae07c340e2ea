package rails_test

import (
	"context"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/transport"
	"fserver/engine/transport/rails"
	"fserver/engine/transport/tcp"
	"fserver/engine/transport/transporttest"
)

// overTCP is a Fabric of a tcp member at each address, which has a prefix length.
func overTCP(t *testing.T, listen, common bool, at ...string) *rails.Fabric {
	var members []transport.Fabric
	o := rails.Options{Names: at, Common: common}
	for _, a := range at {
		p := netip.MustParsePrefix(a)
		member := tcp.Options{Gate: transporttest.Gate{}, Bind: p.Addr().String()}
		if listen {
			member.Listen, member.Bind = net.JoinHostPort(p.Addr().String(), "0"), ""
		}
		f, err := tcp.Open(member)
		require.NoError(t, err)
		members, o.Networks = append(members, f), append(o.Networks, []netip.Prefix{p})
	}
	f, err := rails.New(members, o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, f.Close()) })
	return f.(*rails.Fabric)
}

// TestCrossed: over real sockets each member finds the peer's address in its own network, whatever the order. All
// addresses are of this host and reach each other, so that any pairs would work.
func TestCrossed(t *testing.T) {
	for _, c := range []struct {
		name         string
		common       bool
		ours, theirs []string
		want         []string // the host that each of ours is connected to, or why not
	}{
		{"two", false, []string{"127.1.0.1/16", "127.2.0.1/16"}, []string{"127.2.0.2/16", "127.1.0.2/16"}, []string{"127.1.0.2", "127.2.0.2"}},
		{"each has one more", true, []string{"127.9.0.1/16", "127.1.0.1/16", "127.2.0.1/16"}, []string{"127.2.0.2/16", "127.1.0.2/16", "127.8.0.2/16"},
			[]string{"the peer has no interface in its network", "127.1.0.2", "127.2.0.2"}},
		{"each has one more, that a router may join", false, []string{"127.9.0.1/16", "127.1.0.1/16", "127.2.0.1/16"}, []string{"127.2.0.2/16", "127.1.0.2/16", "127.8.0.2/16"},
			[]string{"127.8.0.2", "127.1.0.2", "127.2.0.2"}},
		{"routers", false, []string{"127.1.0.0/31", "127.2.0.0/31"}, []string{"127.3.0.0/31", "127.4.0.0/31"}, []string{"127.3.0.0", "127.4.0.0"}},
		{"one of ours is left", false, []string{"127.1.0.1/16", "127.2.0.1/16", "127.3.0.1/16"}, []string{"127.3.0.2/16", "127.1.0.2/16"},
			[]string{"127.1.0.2", "the peer has no interface left for it", "127.3.0.2"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			a, b := overTCP(t, false, c.common, c.ours...), overTCP(t, true, false, c.theirs...)
			conn, err := a.Connect(context.Background(), b.Addr())
			require.NoError(t, err)
			var got []string
			end := time.Now().Add(patience)
			for ev := make([]transport.Event, 64); ; {
				for _, f := range []transport.Fabric{a, b} {
					n, err := f.Poll(ev)
					require.NoError(t, err)
					for _, e := range ev[:n] {
						require.NotEqual(t, transport.EvDown, e.Kind, "%v", e.Err)
					}
				}
				got = nil
				for _, m := range conn.Peer().Members {
					host, _, _ := net.SplitHostPort(m.Remote)
					got = append(got, host+m.Why)
				}
				if slices.Equal(got, c.want) {
					break
				}
				require.True(t, time.Now().Before(end), "got %q, want %q", got, c.want)
			}
			require.Empty(t, conn.Peer().Why)
		})
	}
}

// TestNothingInCommon: a Fabric that connects only inside a network reaches no peer of another one.
func TestNothingInCommon(t *testing.T) {
	a, b := overTCP(t, false, true, "127.1.0.1/16", "127.2.0.1/16"), overTCP(t, true, false, "127.3.0.2/16", "127.4.0.2/16")
	require.ErrorContains(t, a.Reaches(b.Addr()), "none of them is in a network of ours")
	_, err := a.Connect(context.Background(), b.Addr())
	require.ErrorContains(t, err, "none of them is in a network of ours")
}
