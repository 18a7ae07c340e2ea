package topo

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Where a GPU is, and other devices in the order of their distance from it.
var (
	gpuPlace = place{path: []string{"pci0000:10", "port", "up", "down1", "gpu"}}
	pix      = place{path: []string{"pci0000:10", "port", "up", "down2", "nic"}}
	pix2     = place{path: []string{"pci0000:10", "port", "up", "down3", "nic"}}
	phb      = place{path: []string{"pci0000:10", "port2", "nic"}}
	sys      = place{path: []string{"pci0000:80", "port", "nic"}, numa: 1}
)

// ethernet is a NIC that can be used, and but one with a change.
func ethernet(name string, gbits int, at place, addresses ...string) NIC {
	n := NIC{Name: name, Kind: "ethernet", Up: true, Speed: 1000 * gbits, at: []place{at}}
	for _, a := range addresses {
		n.Addresses = append(n.Addresses, netip.MustParsePrefix(a))
	}
	return n
}

func but(n NIC, change func(*NIC)) NIC {
	change(&n)
	return n
}

// two are the interfaces of a plain host.
var two = []NIC{ethernet("eth0", 100, pix, "10.0.0.1/24"), ethernet("eth1", 100, pix2, "10.1.0.1/24")}

// railsCases are hosts, and what DMLC_INTERFACE=auto uses of them, in which order, and why not the others.
var railsCases = []struct {
	name   string
	gpus   int // at gpuPlace
	device int
	route  string
	nics   []NIC
	used   string
	others map[string]string // names and parts of reasons
}{
	{name: "nothing"},
	{name: "two", nics: two, used: "eth0 eth1"},
	{name: "two near the GPU", gpus: 1, nics: two, used: "eth0 eth1"},
	{name: "the scheduler is on loopback", nics: two, route: "127.0.0.1",
		others: map[string]string{"eth0": "the scheduler is on this host's loopback", "eth1": "the scheduler is on this host's loopback"}},
	{name: "one", nics: two[:1], used: "eth0"},
	{name: "one that routes to the scheduler", route: "10.9.0.1", used: "eth1",
		nics:   []NIC{ethernet("eth0", 100, pix, "10.0.0.1/24"), ethernet("eth1", 10, pix, "10.9.0.1/24")},
		others: map[string]string{"eth0": "one interface is used, eth1: no interface has a usable RDMA device, and this one routes to the scheduler"}},
	{name: "hidden, down, virtual and wireless", used: "eth0 eth1", nics: append([]NIC{
		but(ethernet("docker0", 0, place{}, "172.17.0.1/16"), func(n *NIC) { n.Hidden = "it is a bridge" }),
		but(ethernet("dummy0", 0, place{}, "10.2.0.1/24"), func(n *NIC) { n.Kind = "virtual" }),
		but(ethernet("vrf0", 0, place{}, "10.3.0.1/24"), func(n *NIC) { n.Kind = "vrf" }),
		but(ethernet("eth2", 100, pix, "10.4.0.1/24"), func(n *NIC) { n.Up = false }),
		but(ethernet("wlan0", 0, pix, "10.5.0.1/24"), func(n *NIC) { n.Kind = "wifi" }),
		but(ethernet("eth3", 100, pix, "fe80::1/64"), func(n *NIC) { n.Hidden = "it has no address that other hosts can use" }),
	}, two...), others: map[string]string{
		"docker0": "it is a bridge", "dummy0": "there is no hardware below it", "vrf0": "there is no hardware below it",
		"eth2": "it is down, or has no carrier", "wlan0": "it is wireless", "eth3": "it has no address that other hosts can use",
	}},
	{name: "a management NIC", route: "10.9.0.1", used: "eth0 eth1", nics: append([]NIC{ethernet("eno1", 1, pix, "10.9.0.1/24")}, two...),
		others: map[string]string{"eno1": "it is slow: 1 Gbit/s, and eth0 has 100 Gbit/s"}},
	{name: "a quarter as fast", used: "eno1 eth0", nics: []NIC{ethernet("eno1", 25, pix, "10.9.0.1/24"), two[0]}},
	{name: "less than a quarter", used: "eth0 eth1", nics: append([]NIC{ethernet("eno1", 24, pix, "10.9.0.1/24")}, two...),
		others: map[string]string{"eno1": "it is slow: 24 Gbit/s, and eth0 has 100 Gbit/s"}},
	{name: "2.5 Gbit/s", used: "eth0 eth1", nics: append([]NIC{but(ethernet("eno1", 0, pix, "10.9.0.1/24"), func(n *NIC) { n.Speed = 2500 })}, two...),
		others: map[string]string{"eno1": "it is slow: 2.5 Gbit/s"}},
	{name: "a speed that is not known", used: "eno1 eth0 eth1", nics: append([]NIC{ethernet("eno1", 0, pix, "10.9.0.1/24")}, two...)},
	{name: "far from the GPU", gpus: 1, used: "eth0 eth1",
		nics:   append([]NIC{ethernet("eno1", 100, sys, "10.9.0.1/24"), ethernet("eno2", 100, phb, "10.8.0.1/24")}, two...),
		others: map[string]string{"eno1": "it is farther from GPU 0 than eth0 (SYS, not PIX)", "eno2": "it is farther from GPU 0 than eth0 (PHB, not PIX)"}},
	{name: "all are far from the GPU", gpus: 1, used: "eno1 eno2",
		nics: []NIC{ethernet("eno1", 100, sys, "10.9.0.1/24"), ethernet("eno2", 100, sys, "10.8.0.1/24")}},
	{name: "a place that is not known", gpus: 1, used: "eth0 eth1", nics: append([]NIC{ethernet("eth9", 0, place{}, "10.9.0.1/24")}, two...),
		others: map[string]string{"eth9": "it is farther from GPU 0 than eth0 (?, not PIX)"}},
	{name: "a near one that is slow", gpus: 1, used: "eno1 eno2",
		nics:   []NIC{ethernet("eth0", 1, pix, "10.0.0.1/24"), ethernet("eno1", 100, sys, "10.9.0.1/24"), ethernet("eno2", 100, sys, "10.8.0.1/24")},
		others: map[string]string{"eth0": "it is slow: 1 Gbit/s, and eno1 has 100 Gbit/s"}},
	{name: "far away without a GPU", used: "eno1 eth0 eth1", nics: append([]NIC{ethernet("eno1", 100, sys, "10.9.0.1/24")}, two...)},
	{name: "one network", used: "eth0 eth1", nics: append(two[:2:2], ethernet("eth2", 100, pix, "10.1.0.7/24")),
		others: map[string]string{"eth2": "it is in the network 10.1.0.0/24 of eth1"}},
	{name: "one network, and the other one routes to the scheduler", used: "eth0 eth2", route: "10.1.0.7",
		nics:   append(two[:2:2], ethernet("eth2", 100, pix, "10.1.0.7/24")),
		others: map[string]string{"eth1": "it is in the network 10.1.0.0/24 of eth2"}},
	{name: "a network in another one", used: "eth0 eth1 eth2", nics: append(two[:2:2], ethernet("eth2", 100, pix, "10.1.9.1/16"))},
	{name: "two families", route: "fd00:a::1", used: "eth0 eth1", nics: []NIC{
		ethernet("eth0", 100, pix, "10.0.0.1/24", "fd00:a::1/64"), ethernet("eth1", 100, pix, "10.0.0.2/24", "fd00:b::1/64")}},
	{name: "a VLAN", used: "eth0 eth1", nics: append(two[:2:2], but(ethernet("eth1.7", 100, pix2, "10.7.0.1/24"), func(n *NIC) { n.Ports = []string{"eth1"} })),
		others: map[string]string{"eth1.7": "it uses the same port as eth1"}},
	{name: "two VLANs of a bond, one of which routes to the scheduler", used: "bond0.8 eth0", route: "10.8.0.1", nics: []NIC{
		but(ethernet("bond0", 200, pix), func(n *NIC) { n.Ports, n.Hidden = []string{"p0", "p1"}, "it has no address" }),
		but(ethernet("bond0.7", 200, pix, "10.7.0.1/24"), func(n *NIC) { n.Ports = []string{"bond0"} }),
		but(ethernet("bond0.8", 200, pix, "10.8.0.1/24"), func(n *NIC) { n.Ports = []string{"bond0"} }),
		two[0],
		but(ethernet("p0", 100, pix), func(n *NIC) { n.Hidden = "it is a port of the bond bond0" }),
		but(ethernet("p1", 100, pix), func(n *NIC) { n.Hidden = "it is a port of the bond bond0" }),
	}, others: map[string]string{"bond0": "it has no address", "bond0.7": "it uses the same port as bond0.8", "p0": "port of the bond", "p1": "port of the bond"}},
	{name: "five", device: 2, used: "eth2 eth3 eth4 eth0", nics: five(), others: map[string]string{"eth1": "there are 5, and auto uses at most 4 for each process"}},
	{name: "five and GPUs", gpus: 8, device: 6, used: "eth1 eth2 eth3 eth4", nics: five(), others: map[string]string{"eth0": "there are 5, and"}},
}

// TestRails: what DMLC_INTERFACE=auto uses of a host, in which order, and why not the others.
func TestRails(t *testing.T) {
	for _, c := range railsCases {
		t.Run(c.name, func(t *testing.T) {
			h := &Host{NUMA: 2, NICs: c.nics}
			for i := range c.gpus {
				h.GPUs = append(h.GPUs, GPU{Index: i, at: gpuPlace})
			}
			var used []string
			others := map[string]string{}
			for i, r := range h.Rails(c.device, "", addr(c.route)) {
				if r.Why != "" {
					others[r.Interface] = r.Why
					continue
				}
				require.Len(t, used, i, "what is used comes first")
				used = append(used, r.Interface)
				require.True(t, r.Address.IsValid())
			}
			require.Equal(t, c.used, strings.Join(used, " "))
			require.Len(t, others, len(c.others))
			for name, why := range c.others {
				require.Contains(t, others[name], why, name)
			}
		})
	}
}

func five() (nics []NIC) {
	for i := range 5 {
		nics = append(nics, ethernet("eth"+itoa(i), 100, pix, "10."+itoa(i)+".0.1/24"))
	}
	return nics
}

// TestRailsOfRecordedHosts: what auto uses of the machines of testdata.
func TestRailsOfRecordedHosts(t *testing.T) {
	used := func(machine string, device int, route string) (names string, of map[string]Rail) {
		of = map[string]Rail{}
		for _, r := range recorded(t, machine).Read().Rails(device, "", addr(route)) {
			if of[r.Interface] = r; r.Why == "" {
				names += " " + r.Interface
			}
		}
		return strings.TrimSpace(names), of
	}
	names, of := used("eight_gpus_eight_nics", 5, "10.1.0.21")
	require.Equal(t, "rail5", names, "each GPU has one")
	require.Equal(t, Rail{"rail5", netip.MustParsePrefix("10.2.5.21/24"), "mlx5_5", PIX, ""}, of["rail5"])
	require.Equal(t, "it is slow: 10 Gbit/s, and rail0 has 400 Gbit/s", of["eno1"].Why)
	require.Equal(t, "it is farther from GPU 5 than rail5 (SYS, not PIX)", of["rail0"].Why)

	names, of = used("infiniband", 1, "10.5.0.2")
	require.Equal(t, "ib1 ib0", names, "GPU 1 begins with the second one")
	require.Equal(t, "mlx5_1", of["ib1"].RDMA)
	require.Empty(t, of["ib2"].RDMA, "it may not be opened")

	names, of = used("bonded_nics", 0, "10.7.0.5")
	require.Equal(t, "bond0", names, "there is one, so Choose decides")
	require.Contains(t, of["bond0.7"].Why, "one interface is used, bond0: ")
	require.Equal(t, "it is a port of the bond bond0", of["ens3f0np0"].Why)

	names, _ = used("laptop", 0, "192.168.1.77")
	require.Equal(t, "wlp0s20f3", names)
	names, of = used("one_gpu_no_nic", 0, "")
	require.Empty(t, names)
	require.Equal(t, "it is the loopback interface", of["lo"].Why)
	names, _ = used("laptop", 0, "127.0.0.1")
	require.Equal(t, "lo", names)
}

// TestPorts: a port of a bond or team has no address of its own, and one of a VRF has.
func TestPorts(t *testing.T) {
	root := t.TempDir()
	for file, text := range map[string]string{
		"red/uevent": "DEVTYPE=vrf", "red/type": "1", "team0/type": "1", "team0/ifindex": "3", "eth0/ifindex": "1", "eth1/ifindex": "2",
	} {
		name := root + netClass + "/" + file
		require.NoError(t, os.MkdirAll(filepath.Dir(name), 0o755))
		require.NoError(t, writeFile(name, text))
	}
	require.NoError(t, os.Symlink("../red", root+netClass+"/eth0/master"))
	require.NoError(t, os.Symlink("../team0", root+netClass+"/eth1/master"))
	r := System{Root: root}.reader()
	address := []netip.Prefix{netip.MustParsePrefix("10.0.0.1/24")}
	require.Empty(t, r.hidden(&NIC{Name: "eth0", Kind: "ethernet", Addresses: address}))
	require.Equal(t, "it is a port of team0", r.hidden(&NIC{Name: "eth1", Kind: "ethernet", Addresses: address}))
}
