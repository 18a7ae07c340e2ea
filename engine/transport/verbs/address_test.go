package verbs

import (
	"fmt"
	"net/netip"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	rdma "fserver/cshim/verbs"
	"fserver/cshim/verbs/fakeverbs"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// gids makes a table. An entry is "INDEX ADDRESS TYPE LINK": v1, v2 or ib; the link is that of an
// interface.
func gids(t *testing.T, entries ...string) (all []rdma.GID) {
	for i, e := range entries {
		f := strings.Fields(e)
		g := rdma.GID{
			Raw: netip.MustParseAddr(f[0]).As16(), Index: int32(i),
			Type: map[string]rdma.GIDType{"v1": rdma.RoCEv1, "v2": rdma.RoCEv2, "ib": rdma.InfiniBand}[f[1]], Link: int32(f[2][0] - '0'),
		}
		require.NotEqual(t, "empty", f[1])
		all = append(all, g)
	}
	return all
}

// TestOrder says which GID of a table is tried in which order.
func TestOrder(t *testing.T) {
	of := func(link int32) netif { return netif{here: link != 0, bridge: link == 9} }
	for _, c := range []struct {
		name  string
		table []string
		want  string // indexes
	}{
		{"one address", []string{"fe80::1 v1 1", "fe80::1 v2 1", "::ffff:10.0.0.1 v1 1", "::ffff:10.0.0.1 v2 1"}, "31"},
		{"routable before private", []string{"fe80::1 v2 1", "::ffff:10.0.0.1 v2 1", "::ffff:8.8.8.8 v2 1"}, "210"},
		{"routable IPv6 before private IPv4", []string{"::ffff:192.168.1.1 v2 1", "2001:db8::1 v2 1"}, "10"},
		{"IPv4 before IPv6", []string{"fd00::1 v2 1", "::ffff:10.0.0.1 v2 1"}, "10"},
		{"an address of the link is last", []string{"::ffff:169.254.0.1 v2 1", "fe80::1 v2 1", "fd00::1 v2 1"}, "201"},
		{"v1 where there is no v2", []string{"fe80::1 v1 1", "::ffff:10.0.0.1 v1 1"}, "10"},
		{"v2 of the link before v1", []string{"::ffff:10.0.0.1 v1 1", "fe80::1 v2 1"}, "1"},
		{"of a pod: others are of the host", []string{"fe80::1 v2 0", "::ffff:8.8.8.8 v2 0", "::ffff:10.244.1.7 v2 1"}, "210"},
		{"of a pod: v1 here, v2 elsewhere", []string{"::ffff:10.0.0.1 v1 1", "::ffff:8.8.8.8 v2 0"}, "0"},
		{"a bridge is last", []string{"::ffff:172.17.0.1 v2 9", "::ffff:8.8.8.8 v2 9", "fe80::1 v2 1"}, "210"},
		{"a bridge after others' interfaces", []string{"::ffff:172.17.0.1 v2 9", "::ffff:10.0.0.1 v2 0"}, "10"},
		{"equal ones keep the order of the table", []string{"::ffff:10.0.0.1 v2 1", "::ffff:10.0.0.2 v2 1"}, "01"},
		{"none", nil, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := ""
			for _, g := range order(gids(t, c.table...), true, of) {
				got += string(rune('0' + g.Index))
			}
			require.Equal(t, c.want, got)
		})
	}
	table := gids(t, "fe80::2 ib 0", "fe80::1 ib 0", "2001:db8::1 ib 0")
	require.Equal(t, table, order(table, false, of), "InfiniBand keeps its order")
}

// TestToward: whoever answers uses a GID of the family of the one who asks, if it has one.
func TestToward(t *testing.T) {
	a := address{port: rdma.Port{Ethernet: true}, gids: gids(t, "::ffff:10.0.0.1 v2 1", "fd00::1 v2 1", "fe80::1 v2 1")}
	for peer, want := range map[string]int32{"::ffff:8.8.8.8": 0, "2001:db8::7": 1, "fe80::7": 2} {
		got := a.toward(rdma.GID{Raw: netip.MustParseAddr(peer).As16()})
		require.Equal(t, want, got.gid().Index, peer)
		require.Len(t, got.gids, 3)
		require.Equal(t, int32(0), a.gid().Index, "the Fabric keeps its order")
	}
	a.gids = a.gids[:1]
	only := a.toward(rdma.GID{Raw: netip.MustParseAddr("fe80::7").As16()})
	require.Equal(t, int32(0), only.gid().Index)
}

// TestAmong says which devices, and which ports of them, names stand for.
func TestAmong(t *testing.T) {
	for _, c := range []struct{ names, nccl, want string }{
		{"mlx5_0", "=mlx5_0", "mlx5_0"},
		{"mlx5_0:2", "=mlx5_0:2", "mlx5_0:2"},
		{"mlx5_1*", "mlx5_1", "mlx5_1 mlx5_10"},
		{"mlx5_1*:1", "mlx5_1:1", "mlx5_1:1 mlx5_10:1"},
		{"mlx5_1,mlx4_0", "=mlx5_1,mlx4_0", "mlx5_1 mlx4_0"},
		{"^mlx5_1", "^=mlx5_1", "mlx5_0 mlx5_10 mlx4_0"},
		{"^mlx5_1*,mlx4*", "^mlx5_1,mlx4", "mlx5_0"},
		{"", "", "mlx5_0 mlx5_1 mlx5_10 mlx4_0"},
		{"none", "=none", ""},
	} {
		var names, got []string
		if c.names != "" {
			names = strings.Split(c.names, ",")
			translated, ok := fromNCCL(c.nccl)
			require.True(t, ok)
			require.Equal(t, c.names, translated)
		}
		for _, d := range []string{"mlx5_0", "mlx5_1", "mlx5_10", "mlx4_0"} {
			switch port, is := among(names, d); {
			case is && port != 0:
				got = append(got, fmt.Sprintf("%s:%d", d, port))
			case is:
				got = append(got, d)
			}
		}
		require.Equal(t, c.want, strings.Join(got, " "), c.names)
		require.Equal(t, !strings.ContainsAny(c.names, "^*"), several(names))
	}
	for _, bad := range []string{"mlx5_0:0", "mlx5_0:x", "a:", "a:256"} {
		require.ErrorContains(t, checkNames([]string{"mlx5_1:1", bad}), fmt.Sprintf("%q names no port of a device", bad))
	}
	for _, bad := range []string{"", "^", "mlx5_0,^mlx5_1", "mlx*5", ":1"} {
		require.ErrorContains(t, checkNames(strings.Split(bad, ",")), "names no device")
	}
	require.NoError(t, checkNames([]string{"^mlx5_0", "mlx4*:1"}))
	_, ok := fromNCCL("^=")
	require.False(t, ok)
}

// TestOneOfSeveral: of the devices that a pattern stands for, the first with a port that is up is used.
func TestOneOfSeveral(t *testing.T) {
	w := newTwo(t)
	fakeverbs.Set("down", 2) // fake0
	require.Equal(t, "verbs/fake1:1", w.open(Options{Library: library2(t), Device: "fake*"}).Name())
	fakeverbs.Set("down", 0)
	require.Equal(t, "verbs/fake1:1", w.open(Options{Library: library2(t), Device: "^fake0"}).Name())
	_, err := Open(Options{Library: library2(t), Device: "mlx5*,mlx4*"})
	require.ErrorContains(t, err, "no RDMA device mlx5*,mlx4*")
}

// reopen opens both Fabrics anew.
func (w *two) reopen(o Options) {
	for i := range w.f {
		o.Library, o.Device = library2(w.t), fakeverbs.Devices()[i]
		w.f[i] = w.open(o)
	}
}

// TestPath: what Path says is what queue pairs are joined with.
func TestPath(t *testing.T) {
	w := newTwo(t)
	a, _ := w.pair()
	for name, want := range map[string]int{"tc": 0, "sl": 0, "mtu": 1024, "timeout": 16, "retries": 6} {
		require.Equal(t, want, fakeverbs.Count(name), name)
	}
	w.echo(a)
	w.reopen(Options{Path: Path{MTU: 512, TrafficClass: 106, ServiceLevel: 3, Timeout: 18, Retries: 2}})
	a, _ = w.pair()
	for name, want := range map[string]int{"tc": 106, "sl": 3, "mtu": 512, "timeout": 18, "retries": 2} {
		require.Equal(t, want, fakeverbs.Count(name), name)
	}
	w.echo(a)
}

// TestFixedGID: the GID with an index is used, and an index that there is not is an error with those that there are.
func TestFixedGID(t *testing.T) {
	w := newTwo(t)
	w.reopen(Options{Path: Path{Fixed: true, GID: 5}})
	require.Equal(t, "fd00:77::1", w.f[0].at.gid().String())
	a, _ := w.pair()
	w.echo(a)
	_, err := Open(Options{Library: library2(t), Device: fakeverbs.Devices()[0], Path: Path{Fixed: true, GID: 4}})
	require.ErrorContains(t, err, "port 1 of fake0 has no GID with the index 4 (GID 0 fe80::1 (RoCE v1), GID 1 fe80::1 (RoCE v2), ")
}

// TestRefusedGID: a GID that the device refuses is given up for the next one, twice at most. A GID of another
// namespace is not tried first.
func TestRefusedGID(t *testing.T) {
	w := newTwo(t)
	fakeverbs.Set("away", 3)
	attempts := 0
	w.until("a GID is found that the devices take", func() bool {
		attempts++
		_, err := w.dial()
		if err != nil {
			require.ErrorAs(t, err, new(*transport.AgainError))
			require.ErrorContains(t, err, "invalid argument; the next attempt uses GID fd00:77::")
		}
		return err == nil
	})
	require.Equal(t, 3, attempts, "one for each side")
	w.fresh[1] = nil
	a, _ := w.pair()
	require.Equal(t, "fd00:77::1", w.f[0].at.gid().String())
	w.echo(a)
	w.reopen(Options{})
	require.Equal(t, "fd00:77::1", w.f[0].at.gid().String())
	a, _ = w.pair()
	w.echo(a)

	fakeverbs.Reset()
	w.reopen(Options{})
	fakeverbs.Fail("RTR", unix.EINVAL, 0, 100)
	seen := []string{w.f[0].at.gid().String()}
	for range 4 {
		_, err := w.dial()
		require.ErrorContains(t, err, "no path from GID")
		if at := w.f[0].at.gid().String(); at != seen[len(seen)-1] {
			seen = append(seen, at)
		}
	}
	require.LessOrEqual(t, len(seen), 1+maxProbes)
	_, err := w.dial()
	require.NotErrorAs(t, err, new(*transport.AgainError), "no other GID is tried")
}

// TestChangedGID: after an event of the device the GID table is read again, and connections from then on use what it says.
func TestChangedGID(t *testing.T) {
	w := newTwo(t)
	a, _ := w.pair()
	w.echo(a)
	fakeverbs.Set("gids", 1) // the IPv4 addresses are gone
	for i := range w.f {
		fakeverbs.Event(i, int(rdma.GIDChange), 1, 0)
	}
	w.until("the devices' events are taken", func() bool {
		both := true
		for _, f := range w.f {
			f.Owned(func() { both = both && f.stale })
		}
		return both
	})
	a, _ = w.pair()
	require.Equal(t, "fd00:77::1", w.f[0].at.gid().String())
	w.echo(a)
}

// TestUnreadableGID: an entry that cannot be read, as one of another namespace on old kernels, hides no other. None that
// can be read is an error.
func TestUnreadableGID(t *testing.T) {
	w := newTwo(t)
	fakeverbs.Fail("ibv_query_gid_ex", syscall.ENODEV, 0, 2)
	w.reopen(Options{})
	a, _ := w.pair()
	w.echo(a)
	fakeverbs.Fail("ibv_query_gid_ex", syscall.ENODEV, 0, 1000)
	_, err := Open(Options{Library: library2(t), Device: "fake0"})
	require.ErrorContains(t, err, "read the GID table of port 1 of fake0: no such device")
}

// TestInfiniBand joins ports of one subnet by LID, and those of two, or that require it, by GID.
func TestInfiniBand(t *testing.T) {
	for kind, global := range map[int]bool{1: false, 2: true, 3: true} {
		w := newTwo(t)
		fakeverbs.Set("infiniband", kind)
		w.reopen(Options{})
		a, _ := w.pair()
		w.echo(a)
		require.Equal(t, global, w.f[0].at.across(w.f[1].at.gid().Raw))
	}
}

// TestSecondPort: of a device with two ports the one that is up is used, and one can be named.
func TestSecondPort(t *testing.T) {
	w := newTwo(t)
	fakeverbs.Set("ports", 2)
	w.reopen(Options{})
	require.Equal(t, "verbs/fake0:2", w.f[0].Name())
	a, _ := w.pair()
	w.echo(a)
	_, err := Open(Options{Library: library2(t), Device: "fake0:1"})
	require.ErrorContains(t, err, "port 1 of fake0 is not active")
	_, err = Open(Options{Library: library2(t), Device: "fake0:3"})
	require.ErrorContains(t, err, "ask for port 3 of fake0")
	_, err = Open(Options{Library: library2(t), Device: "fake0:none"})
	require.ErrorContains(t, err, "names no port of a device")
	require.Equal(t, "verbs/fake0:2", w.open(Options{Library: library2(t), Device: "fake0:2"}).Name())
}

// TestCommonNetwork: Reaches refuses a peer that has no network in common, if it is asked to.
func TestCommonNetwork(t *testing.T) {
	ethernet := &Fabric{common: new(networks)}
	ethernet.common.list.Store(&[]netip.Prefix{netip.MustParsePrefix("10.0.0.1/24")})
	other := &Fabric{}
	band := &Fabric{subnet: "fe80000000000000", common: new(networks)}
	for _, f := range []*Fabric{ethernet, other, band} {
		f.Gate = gate{}
		kind := linkKind()
		require.NoError(t, f.Fabric.Open(kind, f.Options))
		defer f.Release()
	}
	for _, c := range []struct {
		f    *Fabric
		peer transport.Addr
		why  string
	}{
		{ethernet, "verbs:10.0.0.7:700", ""},
		{ethernet, "verbs:10.0.1.7:700", "the peer's address 10.0.1.7 is in none of them"},
		{ethernet, "verbs:10.0.0.7:700/fe80000000000000", "InfiniBand and that of the other is Ethernet"},
		{ethernet, "tcp:10.0.0.7:700", "want verbs:HOST:PORT"},
		{other, "verbs:10.0.1.7:700", ""},
		{band, "verbs:10.0.1.7:700/fe80000000000000", ""},
		{band, "verbs:10.0.1.7:700/fe80000000000001", "is in the InfiniBand subnet fe80000000000000, and the peer in fe80000000000001"},
		{band, "verbs:10.0.1.7:700", "InfiniBand and that of the other is Ethernet"},
	} {
		err := c.f.Reaches(c.peer)
		if c.why == "" {
			require.NoError(t, err, c.peer)
		} else {
			require.ErrorContains(t, err, c.why)
		}
	}
}

type gate struct{ transport.Gate }

func linkKind() link.Kind {
	k := link.TCP("verbs", nil)
	k.Target = target(k.Target)
	return k
}
