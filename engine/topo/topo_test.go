package topo

import (
	"encoding/json"
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/conf"
)

func TestEightGPUsEightNICs(t *testing.T) {
	h := recorded(t, "eight_gpus_eight_nics").Read()
	require.Empty(t, h.Notes)
	require.Len(t, h.GPUs, 8)
	require.Len(t, h.RDMA, 8)
	require.Equal(t, 2, h.NUMA)
	require.Equal(t, Cores{Online: 192, Allowed: h.Cores.Allowed, Free: 192}, h.Cores)

	for i := range h.GPUs {
		g := &h.GPUs[i]
		require.Equal(t, i/4, g.NUMA)
		for j := range h.GPUs {
			want := Distance(NODE)
			if i/4 != j/4 {
				want = SYS
			}
			if i != j {
				require.Equal(t, want, h.Between(g, &h.GPUs[j]))
				require.Equal(t, 18, NVLinks(g, &h.GPUs[j]))
			}
		}
		rail := h.nicNamed(t, "rail"+itoa(i))
		require.Equal(t, NIC{
			Name: rail.Name, Kind: "ethernet", Up: true, MTU: 4200, Speed: 400000, Driver: "mlx5_core",
			PCI: rail.PCI, NUMA: i / 4, Ports: []string{}, RDMA: []string{"mlx5_" + itoa(i)},
			Addresses: []netip.Prefix{netip.MustParsePrefix("10.2." + itoa(i) + ".21/24")}, at: rail.at,
		}, *rail)
		require.Equal(t, PIX, h.Distance(g, rail))
		require.Equal(t, Choice{
			Interface: rail.Name, Address: addr("10.2." + itoa(i) + ".21"), RDMA: "mlx5_" + itoa(i), GPU: i, Distance: PIX,
			Why: "of 8 interfaces with an RDMA device it is the nearest to GPU " + itoa(i) + " (PIX)",
		}, h.Choose(i, "", addr("10.1.0.21")))
	}
	require.Equal(t, []string{"/dev/infiniband/uverbs3"}, h.RDMA[3].Nodes)
	require.Equal(t, []RDMAPort{{"1", true, "Ethernet", "400 Gb/sec (4X NDR)"}}, h.RDMA[3].Ports)

	// CUDA_VISIBLE_DEVICES gives the devices other numbers.
	require.Equal(t, "rail5", h.Choose(1, "3,5", addr("10.1.0.21")).Interface)
	require.Equal(t, "rail2", h.Choose(0, "GPU-00000002", addr("10.1.0.21")).Interface)
	require.Nil(t, h.Device(2, "3,5"))
	require.Nil(t, h.Device(0, "MIG-1"))
	require.Nil(t, h.Device(8, ""))

	// A cluster on loopback stays there.
	c := h.Choose(3, "", addr("127.0.0.1"))
	require.Equal(t, "lo 127.0.0.1", c.Interface+" "+c.Address.String())
}

func TestBondedNICs(t *testing.T) {
	h := recorded(t, "bonded_nics").Read()
	require.Empty(t, h.Notes)
	bond, vlan := h.nicNamed(t, "bond0"), h.nicNamed(t, "bond0.7")
	require.Equal(t, "bond", bond.Kind)
	require.Equal(t, []string{"ens3f0np0", "ens3f1np1"}, bond.Ports)
	require.Equal(t, []string{"mlx5_bond_0"}, bond.RDMA)
	require.Equal(t, "0000:c4:00.0", bond.PCI)
	require.Equal(t, "vlan", vlan.Kind)
	require.Equal(t, []string{"mlx5_bond_0"}, vlan.RDMA)
	require.NotEmpty(t, h.nicNamed(t, "ens3f0np0").Hidden)
	require.Equal(t, NODE, h.Distance(&h.GPUs[0], bond))
	require.Equal(t, PHB, h.Distance(&h.GPUs[1], bond))
	require.Equal(t, PHB, h.Distance(&h.GPUs[1], vlan))
	require.Equal(t, 0, NVLinks(&h.GPUs[0], &h.GPUs[1]))
	require.Equal(t, "bond0", h.Choose(0, "", addr("192.168.10.5")).Interface)

	// The quota is that of the folder above; the mask is narrower than the host.
	require.Equal(t, 64, h.Cores.Online)
	require.Len(t, h.Cores.Allowed, 32)
	require.Equal(t, 20.0, h.Cores.Quota)
	require.Equal(t, "/sys/fs/cgroup/cpu,cpuacct/slurm/cpu.cfs_quota_us", h.Cores.Limit)
	require.Equal(t, 20, h.Cores.Free)
}

func TestOneGPUNoNIC(t *testing.T) {
	h := recorded(t, "one_gpu_no_nic").Read()
	require.Equal(t, []string{"topo: the NVIDIA GPU at 0000:02:00.0 has no driver here: install the NVIDIA driver, or make it visible in this container"}, h.Notes)
	require.Len(t, h.GPUs, 1)
	require.Equal(t, -1, h.GPUs[0].NUMA)
	require.Len(t, h.NICs, 1)
	require.Equal(t, Choice{GPU: -1, Distance: Unknown, Why: "no interface has an address that other hosts can use"},
		h.Choose(0, "", netip.Addr{}))
	require.Equal(t, "lo", h.Choose(0, "", addr("::1")).Interface)
}

func TestLaptop(t *testing.T) {
	h := recorded(t, "laptop").Read()
	require.Empty(t, h.Notes)
	kinds := map[string]string{}
	announced := []string{}
	for _, n := range h.NICs {
		kinds[n.Name] = n.Kind
		if n.Hidden == "" {
			announced = append(announced, n.Name)
		}
	}
	require.Equal(t, map[string]string{
		"lo": "loopback", "wlp0s20f3": "wifi", "enp0s31f6": "ethernet", "docker0": "bridge", "veth4f1c2ab": "veth",
		"mynet": "bridge", "virbr0": "bridge", "tun0": "tunnel",
	}, kinds)
	require.Equal(t, []string{"wlp0s20f3"}, announced)
	require.False(t, h.nicNamed(t, "enp0s31f6").Up)
	require.Equal(t, "it is a port of the bridge docker0", h.nicNamed(t, "veth4f1c2ab").Hidden)
	require.Equal(t, "wlp0s20f3", h.Choose(0, "", addr("192.168.1.77")).Interface)
	require.Equal(t, "wlp0s20f3", h.Choose(0, "", netip.Addr{}).Interface)
	// A scheduler behind the VPN or in a container of this host is reached from there.
	require.Equal(t, "tun0", h.Choose(0, "", addr("10.8.0.2")).Interface)
	require.Equal(t, "docker0", h.Choose(0, "", addr("172.17.0.1")).Interface)
	require.Equal(t, 8, h.Cores.Free)
	require.Zero(t, h.Cores.Quota)
}

func TestNoListOfCores(t *testing.T) {
	r := &reader{}
	require.Empty(t, r.cpus("/sys/devices/system/cpu/online", "zero to seven"))
	require.Equal(t, []string{`topo: /sys/devices/system/cpu/online holds "zero to seven", not a list of cores`}, r.notes)
}

func TestContainer(t *testing.T) {
	h := recorded(t, "container").Read()
	require.ElementsMatch(t, []string{
		"topo: read /sys/class/infiniband/mlx5_3/ports/1/link_layer: is a directory",
	}, h.Notes)
	require.Equal(t, "veth", h.nicNamed(t, "eth0").Kind)
	require.Empty(t, h.nicNamed(t, "eth0").Hidden)
	require.Equal(t, "it is a tunnel", h.nicNamed(t, "flannel.1").Hidden)
	require.Equal(t, "it has the name of a bridge or overlay of containers", h.nicNamed(t, "cni7").Hidden)
	require.Equal(t, []string{"mlx5_3"}, h.nicNamed(t, "net1").RDMA)
	require.True(t, h.RDMA[0].Active() && h.RDMA[0].Usable())
	require.False(t, h.RDMA[1].Active() || h.RDMA[1].Usable())
	require.Equal(t, Unknown, h.Distance(&h.GPUs[0], h.nicNamed(t, "eth0")))
	require.Equal(t, "net1", h.Choose(0, "", addr("10.244.3.9")).Interface)
	require.Equal(t, 8, len(h.Cores.Allowed))
	require.Equal(t, 3.5, h.Cores.Quota)
	require.Equal(t, 3, h.Cores.Free)
}

func TestInfiniBand(t *testing.T) {
	h := recorded(t, "infiniband").Read()
	require.Empty(t, h.Notes)
	require.Equal(t, "infiniband", h.nicNamed(t, "ib0").Kind)
	require.Equal(t, []string{"mlx5_2"}, h.nicNamed(t, "ib2").RDMA)
	require.Equal(t, PIX, h.Between(&h.GPUs[0], &h.GPUs[1]))
	require.Equal(t, PIX, h.Distance(&h.GPUs[0], h.nicNamed(t, "ib1")))

	// Each GPU has two that are equally near, and takes its own; ib2 cannot be
	// opened and ib3 has no link.
	for gpu, nic := range []string{"ib0", "ib1", "ib0", "ib1"} {
		require.Equal(t, nic, h.Choose(gpu, "", addr("10.5.0.2")).Interface, "GPU %d", gpu)
	}
	// Without a GPU the numbers are dealt.
	h.GPUs = nil
	require.Equal(t, "ib1", h.Choose(1, "", addr("10.5.0.2")).Interface)
	require.Equal(t, "ib0", h.Choose(1, "", addr("10.6.0.2")).Interface)

	// A bridge over a card has an address of the host's own.
	require.Empty(t, h.nicNamed(t, "br0").Hidden)
	require.Equal(t, "it is a port of the bridge br0", h.nicNamed(t, "eth0").Hidden)
	require.Equal(t, 0.5, h.Cores.Quota)
	require.Equal(t, 1, h.Cores.Free)
}

func TestDistances(t *testing.T) {
	at := func(numa int, path ...string) place { return place{path: path, numa: numa} }
	gpu := at(0, "pci0000:10", "port", "up", "down1", "gpu")
	for _, c := range []struct {
		other place
		nodes int
		want  Distance
	}{
		{at(0, "pci0000:10", "port", "up", "down2", "nic"), 2, PIX},
		{at(0, "pci0000:10", "port", "up", "down1", "nic"), 2, PIX},
		{at(0, "pci0000:10", "port", "up", "down2", "up2", "down3", "nic"), 2, PXB},
		{at(0, "pci0000:10", "port2", "nic"), 2, PHB},
		{at(0, "pci0000:20", "port", "nic"), 2, NODE},
		{at(1, "pci0000:20", "port", "nic"), 2, SYS},
		{at(-1, "pci0000:20", "port", "nic"), 2, SYS},
		{at(-1, "pci0000:20", "port", "nic"), 1, NODE},
		{at(0), 2, Unknown},
	} {
		require.Equal(t, c.want, distance(gpu, c.other, c.nodes), "%v", c.other.path)
		require.Equal(t, c.want, distance(c.other, gpu, c.nodes), "%v", c.other.path)
	}
}

// Nothing that a file holds, or a call says, ends in anything but a note.
func TestNothingThere(t *testing.T) {
	broken := errors.New("not today")
	h := System{
		Root:      t.TempDir(),
		GPUs:      func() ([]GPU, Driver) { return []GPU{{PCI: "../../etc"}}, Driver{Missing: "none"} },
		Addresses: func() (map[string][]netip.Prefix, error) { return nil, broken },
		Affinity:  func() ([]int, error) { return nil, broken },
	}.Read()
	require.Equal(t, 1, h.Cores.Free)
	require.Len(t, h.Notes, 2)
	require.Equal(t, Choice{GPU: -1, Distance: Unknown, Why: "no interface has an address that other hosts can use"},
		h.Choose(0, "", netip.Addr{}))
}

func TestQuotaThatMakesNoSense(t *testing.T) {
	for _, text := range []string{"x 100000", "100000", "100000 0", "-5 100000", "1 2 3", "nan 1"} {
		s := recorded(t, "infiniband")
		r := s.reader()
		require.NoError(t, writeFile(s.Root+"/sys/fs/cgroup/cpu.max", text))
		quota, _ := r.quota()
		require.Zero(t, quota, text)
		require.Len(t, r.notes, 1, text)
	}
}

func TestThisHost(t *testing.T) {
	s := Local()
	h := s.Read()
	require.NotEmpty(t, h.NICs)
	require.GreaterOrEqual(t, h.Cores.Free, 1)
	require.Equal(t, h.Cores, FreeCores())
	b, err := json.Marshal(h)
	require.NoError(t, err)
	require.NotContains(t, string(b), "null", "empty lists are lists")
	if len(h.GPUs) == 0 {
		require.NotEmpty(t, h.Driver.Missing)
	}
}

func TestPin(t *testing.T) {
	all := make([]int, 96)
	for i := range all {
		all[i] = i
	}
	config := func(settings ...string) *conf.Config {
		c, _, err := conf.Parse(append(settings, "DMLC_ROLE=scheduler", "STEPMESH_BIND_CPU_CORE=1"), nil)
		require.NoError(t, err)
		return c
	}
	c := config()
	for gpu, want := range []int{10, 15, 34, 39, 58, 63, 82, 87} {
		core, ok, err := Pin(c, gpu, 0, all)
		require.NoError(t, err)
		require.True(t, ok)
		require.Equal(t, want, core, "GPU %d", gpu)
	}
	for poller, want := range []int{15, 16, 17, 18, 19, 19, 19} {
		core, _, err := Pin(c, 1, poller, all)
		require.NoError(t, err)
		require.Equal(t, want, core, "poller %d", poller)
	}
	core, _, err := Pin(config("STEPMESH_CPU_CORES_PER_SOCKET=8", "STEPMESH_CPU_CORES_PER_GPU=1", "STEPMESH_CPU_START_OFFSET=2"), 3, 4, all)
	require.NoError(t, err)
	require.Equal(t, 7, core)

	_, ok, err := Pin(c, 0, 0, []int{0, 1})
	require.False(t, ok)
	require.ErrorContains(t, err, "topo: pin poller 0 of GPU 0 to core 10: this process may not use that core (it may use 2 cores;")
	c.BindCores = false
	_, ok, err = Pin(c, 0, 0, nil)
	require.NoError(t, err)
	require.False(t, ok)
}

func BenchmarkFreeCores(b *testing.B) {
	for b.Loop() {
		FreeCores()
	}
}

// FuzzRead has any text in the place of one file of a recorded tree. Reading ends,
// what it gives can be told, and a choice can be made of it.
func FuzzRead(f *testing.F) {
	s := recorded(f, "container")
	var files []string
	require.NoError(f, filepath.WalkDir(s.Root, func(path string, e fs.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() {
			files = append(files, path)
		}
		return err
	}))
	for i, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(f, err)
		f.Add(uint(i), text)
		f.Add(uint(i), []byte("0-1,,65536-,-1 NaN / - cgroup2 x :\n0::/../.."))
	}
	f.Fuzz(func(t *testing.T, at uint, text []byte) {
		file := files[at%uint(len(files))]
		before, err := os.ReadFile(file)
		require.NoError(t, err)
		defer func() { require.NoError(t, os.WriteFile(file, before, 0o644)) }()
		require.NoError(t, os.WriteFile(file, text, 0o644))
		h := s.Read()
		_, err = json.Marshal(h)
		require.NoError(t, err)
		require.GreaterOrEqual(t, h.Cores.Free, 0)
		h.Choose(0, "", addr("10.0.0.1"))
	})
}
