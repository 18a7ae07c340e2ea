package node

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"fserver/cshim/verbs/fakeverbs"
	"fserver/engine/conf"
	"fserver/engine/transport"
	"fserver/engine/transport/all"
	"fserver/engine/transport/verbs"
)

// apart keeps processes of one host from using what works inside it alone, and has nodes listen on loopback, where
// the devices of the fake library are.
var apart = []string{"BYTEPS_ENABLE_IPC=0", "DMLC_NODE_HOST=127.0.0.1"}

// kernelShows has the kernel show RDMA devices: with * behind the name those without hardware.
func kernelShows(t *testing.T, names ...string) {
	dir := t.TempDir()
	verbs.SetClass(filepath.Join(dir, "infiniband"))
	t.Cleanup(func() { verbs.SetClass("/sys/class/infiniband") })
	for _, sub := range []string{"infiniband", "infiniband_verbs"} {
		require.NoError(t, os.Mkdir(filepath.Join(dir, sub), 0o755))
	}
	for _, n := range names {
		to := "../devices/pci0000:00/0000:01:00.0/infiniband/" + n
		if n[len(n)-1] == '*' {
			n = n[:len(n)-1]
			to = "../devices/virtual/infiniband/" + n
		}
		require.NoError(t, os.Symlink(to, filepath.Join(dir, "infiniband", n)))
	}
	warned.Clear()
}

// opened are the Fabrics of a worker with these settings, and what it has logged.
func opened(t *testing.T, settings ...string) (names []string, logs *observer.ObservedLogs, err error) {
	cfg, _, bad := conf.Parse(shape{1, 1, 1}.settings("worker", 0, 0, "7000", settings...), all.Ways())
	require.NoError(t, bad)
	core, logs := observer.New(zapcore.InfoLevel)
	list, err := openFabrics(cfg, newGate(cfg), zap.New(core))
	for _, f := range list {
		names = append(names, f.Name())
		require.NoError(t, f.Close())
	}
	return names, logs, err
}

// TestAutoTakesRDMA: between two nodes with devices in one network, and links() names them.
func TestAutoTakesRDMA(t *testing.T) {
	fakes(t)
	kernelShows(t, "fake0", "fake1")
	m := newMesh(t, openFabrics, shape{1, 1, 1}, apart...)
	m.exchange(t, 5)
	for _, n := range []*Node{m.workers[0], m.servers[0]} {
		l := linkOf(t, n)
		require.Equal(t, "verbs", l.Transport)
		require.Equal(t, "fake0 port 1, GID 3 127.0.77.1 (RoCE v2) to GID 127.0.77.1, packets of 1024 bytes, traffic class 0", l.Path)
	}
	m.stop()
}

// TestAutoWithoutRDMA: why auto does not take a device, and what it says of that.
func TestAutoWithoutRDMA(t *testing.T) {
	both := []string{"fake0", "fake1"}
	for name, c := range map[string]struct {
		shown    []string
		set      func()
		settings []string
		fails    string // empty: nothing is said above info
	}{
		"no device":             {nil, func() { fakeverbs.Set("devices", 0) }, apart, ""},
		"no device of a name":   {nil, func() { fakeverbs.Set("devices", 0) }, append([]string{"FSERVER_RDMA_DEVICE=mlx5_0"}, apart...), ""},
		"software":              {[]string{"fake0*", "fake1*"}, func() {}, apart, ""},
		"software of a pattern": {[]string{"fake0*"}, func() {}, append([]string{"NCCL_IB_HCA=fake"}, apart...), ""},
		"TLS":                   {both, func() {}, append([]string{"FSERVER_TLS=1", "FSERVER_SECRET=a secret of the test", "FSERVER_RDMA_PLAINTEXT=1"}, apart...), ""},
		"one host":              {both, func() {}, apart[:1], ""},
		"ports down": {both, func() { fakeverbs.Set("down", 1) }, apart,
			"port 1 of fake0 is not active; port 1 of fake1 is not active (ibv_devinfo shows the devices and their ports)"},
		"no address": {both, func() {
			fakeverbs.Set("gids", 0)
			fakeverbs.Set("devices", 1)
			fakeverbs.Fail("ibv_query_gid_ex", syscall.ENODATA, 0, 1000)
		}, apart,
			"port 1 of fake0 has no GID (give its network interface an address)"},
		"no permission": {both, func() { fakeverbs.Set("devices", 1); fakeverbs.Fail("ibv_open_device", syscall.EACCES, 0, 100) }, apart,
			"open fake0: permission denied (let this user read and write /dev/infiniband/uverbs*; in a container, add --device /dev/infiniband)"},
		"no files": {both, func() { fakeverbs.Set("devices", 1); fakeverbs.Fail("ibv_open_device", syscall.ENOENT, 0, 100) }, apart,
			"open fake0: no such file or directory (let this user read and write /dev/infiniband/uverbs*; in a container, add --device /dev/infiniband)"},
		"no provider": {[]string{"mlx5_0"}, func() { fakeverbs.Set("devices", 0) }, apart,
			"libibverbs has no driver for mlx5_0 (install ibverbs-providers; in a container, of the version of the host's driver)"},
		"no module": {both, func() { fakeverbs.Fail("ibv_get_device_list", syscall.ENOSYS, 0, 100) }, apart,
			"list the devices: function not implemented (load the kernel's modules: modprobe ib_uverbs; in a container, on the host)"},
		"another name": {both, func() {}, append([]string{"FSERVER_RDMA_DEVICE=mlx5_0"}, apart...),
			"no RDMA device mlx5_0 (ibv_devinfo shows the devices and their ports)"},
	} {
		t.Run(name, func(t *testing.T) {
			fakes(t)
			kernelShows(t, c.shown...)
			c.set()
			for again := range 2 {
				names, logs, err := opened(t, c.settings...)
				require.Len(t, names, 1)
				if c.fails == "" {
					require.NoError(t, err)
					require.Empty(t, logs.FilterLevelExact(zapcore.WarnLevel).All())
					continue
				}
				require.EqualError(t, err, "verbs: not available: "+c.fails)
				require.Len(t, logs.FilterLevelExact(zapcore.WarnLevel).All(), 1-again, "a process warns once")
			}
			if c.fails != "" { // who asks for it does not get another one
				_, _, err := opened(t, append([]string{"FSERVER_TRANSPORT=verbs"}, c.settings...)...)
				var no *transport.ErrUnavailable
				require.ErrorAs(t, err, &no)
				require.NotEmpty(t, no.Remedy)
			}
		})
	}
}

// TestAutoNamedSoftware: a software device that is named is taken.
func TestAutoNamedSoftware(t *testing.T) {
	fakes(t)
	kernelShows(t, "fake0*", "fake1*")
	names, _, err := opened(t, append([]string{"FSERVER_RDMA_DEVICE=fake1"}, apart...)...)
	require.NoError(t, err)
	require.Equal(t, "verbs/fake1:1", names[0])

	kernelShows(t, "fake0*", "fake1")
	names, _, err = opened(t, apart...)
	require.NoError(t, err)
	require.Equal(t, "verbs/fake1:1", names[0], "the one with hardware")
}

// TestAutoLocks: auto leaves RDMA alone where so little memory can be locked that tensors would be refused.
func TestAutoLocks(t *testing.T) {
	var was unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_MEMLOCK, &was))
	low := unix.Rlimit{Cur: min(was.Cur, 8<<20), Max: was.Max}
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_MEMLOCK, &low))
	t.Cleanup(func() { require.NoError(t, unix.Setrlimit(unix.RLIMIT_MEMLOCK, &was)) })
	fakes(t)
	kernelShows(t, "fake0")
	fakeverbs.Set("devices", 1)
	fakeverbs.Set("locked", 32<<20)
	names, logs, err := opened(t, apart...)
	require.Len(t, names, 1)
	require.ErrorContains(t, err, "raise the locked-memory limit: ulimit -l, now")
	require.Len(t, logs.FilterLevelExact(zapcore.WarnLevel).All(), 1)
	_, logs, err = opened(t, apart...)
	require.Error(t, err)
	require.Empty(t, logs.FilterLevelExact(zapcore.WarnLevel).All(), "the next node of the process")
	names, _, err = opened(t, append([]string{"FSERVER_TRANSPORT=verbs"}, apart...)...)
	require.NoError(t, err)
	require.Len(t, names, 2)
	fakeverbs.Set("locked", 128<<20) // a process with the capability
	names, _, err = opened(t, apart...)
	require.NoError(t, err)
	require.Len(t, names, 2)
}

// TestAutoNearest: with a GPU the nearest device comes first, unless the user has said which interface is used.
func TestAutoNearest(t *testing.T) {
	fakes(t)
	kernelShows(t, "fake0", "fake1")
	cfg, _, err := conf.Parse(shape{1, 1, 1}.settings("worker", 0, 0, "7000", apart[0], "FSERVER_RDMA_DEVICE=fake*"), all.Ways())
	require.NoError(t, err)
	e := environment(cfg, newGate(cfg), zap.NewNop(), "")
	require.Nil(t, e.Nearest)
	for _, down := range []int{0, 4} { // then fake1 is
		fakeverbs.Set("down", down)
		e.Nearest = func(names []string) []string {
			require.Equal(t, []string{"fake0", "fake1"}, names)
			return []string{"fake1", "fake0"}
		}
		for _, d := range all.Drivers() {
			if d.Named == nil {
				continue
			}
			list, err := d.Open(e)
			require.NoError(t, err)
			require.Equal(t, map[int]string{0: "verbs/fake1:1", 4: "verbs/fake0:1"}[down], list[0].Name())
			closeAll(list)
		}
	}
	near := *cfg
	near.Backend = conf.GPU
	require.NotNil(t, environment(&near, newGate(cfg), zap.NewNop(), "").Nearest)
	near.Interfaces = []string{"lo"}
	require.Nil(t, environment(&near, newGate(cfg), zap.NewNop(), "").Nearest)
}

// TestProbeRDMA: the doctor says of each device whether it can be used, and what is to be done.
func TestProbeRDMA(t *testing.T) {
	for _, c := range []struct {
		set    func()
		state  transport.State
		text   string // of the first device
		remedy string
	}{
		{func() {}, transport.Yes, "port 1 is active, packets of 1024 bytes, GID 3 127.0.77.1 (RoCE v2)", ""},
		{func() {}, transport.Yes, "it has no hardware and is slower than TCP, so auto does not take it unless FSERVER_RDMA_DEVICE names it", ""},
		{func() { fakeverbs.Set("down", 2) }, transport.No, "port 1 of fake0 is not active", "check cable and switch"},
		{func() { fakeverbs.Set("locked", 0) }, transport.No, "register", "raise the locked-memory limit: ulimit -l"},
		{func() { fakeverbs.Fail("ibv_open_device", syscall.EACCES, 0, 1) }, transport.No, "permission denied", "let this user read and write"},
	} {
		fakes(t)
		kernelShows(t, "fake0*", "fake1")
		c.set()
		for _, d := range all.Drivers() {
			if d.Named == nil {
				continue
			}
			found := d.Probe(nil)
			require.Len(t, found, 2)
			require.Equal(t, "fake0", found[0].What)
			require.Equal(t, c.state, found[0].State)
			require.Contains(t, found[0].Text, c.text)
			require.Contains(t, found[0].Remedy, c.remedy)
			require.NotContains(t, found[1].Text, "no hardware")
		}
	}
}

// TestAutoFallsBack: a peer that RDMA does not reach, or whose connection does not come up, is reached by TCP, and
// links() of both sides and one line of the log say why.
func TestAutoFallsBack(t *testing.T) {
	for name, c := range map[string]struct {
		first, second func() // before the worker opens its device, and before the server does
		why           string
		level         zapcore.Level
	}{
		"no network in common": {func() { fakeverbs.Set("infiniband", 2) }, func() { fakeverbs.Set("down", 2) },
			"; verbs: verbs/fake0:1 is in the InfiniBand subnet fe80000000000001, and the peer in fe80000000000002 .*FSERVER_RDMA_DEVICE", zapcore.InfoLevel},
		"InfiniBand and Ethernet": {func() { fakeverbs.Set("infiniband", 1) }, func() { fakeverbs.Set("infiniband", 0) },
			"; verbs: the device of one side is InfiniBand and that of the other is Ethernet", zapcore.InfoLevel},
		"no path": {func() { fakeverbs.Fail("RTR", syscall.ETIMEDOUT, 0, 1000) }, func() {},
			"; verbs: .*no path from GID 127.0.77.1 of verbs/fake0:1 to GID 127.0.77.1 of the peer: .*connection timed out", zapcore.WarnLevel},
	} {
		t.Run(name, func(t *testing.T) {
			fakes(t)
			kernelShows(t, "fake0", "fake1")
			m := newCluster(t, openFabrics)
			s := shape{1, 1, 1}
			m.scheduler = m.start(s.settings("scheduler", 0, 0, "0"))
			_, port := splitPort(t, m.scheduler.Info().Address)
			c.first()
			w, logs := m.watch(s.settings("worker", 0, 0, port, append([]string{"FSERVER_LOG=info"}, apart...)...))
			c.second()
			m.workers, m.servers = []*Node{w}, []*Node{m.start(s.settings("server", 0, 0, port, apart[1:]...))}
			for _, n := range m.all() {
				waitReady(t, n)
			}
			m.exchange(t, 5)
			for _, n := range []*Node{w, m.servers[0]} {
				require.Equal(t, "tcp", linkOf(t, n).Transport)
				require.Regexp(t, c.why, linkOf(t, n).Reason)
				require.Empty(t, linkOf(t, n).Path)
			}
			if c.level == zapcore.WarnLevel {
				require.Equal(t, 1, logs.Len())
				require.Regexp(t, c.why, logs.All()[0].ContextMap()["why"])
			}
			m.stop()
		})
	}
}

// TestAutoRefusedGID: if a device refuses its address, auto tries RDMA again with the next address, and takes TCP when there
// is no other address to try.
func TestAutoRefusedGID(t *testing.T) {
	for name, c := range map[string]struct {
		refuse func()
		path   string // empty: TCP
	}{
		"the server's": {func() { fakeverbs.Fail("RTR", syscall.EINVAL, 0, 1) }, "GID 5 fd00:77::1 (RoCE v2) to GID 127.0.77.1,"},
		"the worker's": {func() { fakeverbs.Fail("RTR", syscall.EINVAL, 1, 1) }, "GID 5 fd00:77::1 (RoCE v2) to GID fd00:77::1,"},
		"of both":      {func() { fakeverbs.Set("away", 3) }, "GID 5 fd00:77::1 (RoCE v2) to GID fd00:77::1,"},
		"each":         {func() { fakeverbs.Fail("RTR", syscall.EINVAL, 0, 1000) }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			fakes(t)
			kernelShows(t, "fake0")
			refuse := func(cfg *conf.Config, g transport.Gate, log *zap.Logger) ([]transport.Fabric, error) {
				list, err := openFabrics(cfg, g, log)
				if cfg.Role == conf.Server {
					c.refuse()
				}
				return list, err
			}
			m, logs := unlike(t, refuse, apart, apart)
			m.exchange(t, 5)
			w, s := linkOf(t, m.workers[0]), linkOf(t, m.servers[0])
			if c.path != "" {
				require.Equal(t, "verbs", w.Transport, w.Reason)
				require.Contains(t, s.Path, c.path)
				require.NotContains(t, w.Reason+s.Reason, "verbs")
				require.Zero(t, logs.Len())
			} else {
				require.Equal(t, "tcp", w.Transport)
				require.Regexp(t, "verbs: .*no path from GID .* invalid argument", w.Reason)
				require.NotContains(t, w.Reason, "the next attempt")
			}
			m.stop()
		})
	}
}

// TestAutoPairsNetworks: devices that auto chose pair only where they have a network in common, those that are named
// wherever one reaches the other.
func TestAutoPairsNetworks(t *testing.T) {
	for _, named := range []bool{false, true} {
		fakes(t)
		kernelShows(t, "fake0", "fake1")
		settings := apart
		if named {
			settings = append([]string{"FSERVER_RDMA_DEVICE=fake0,fake1"}, apart...)
		}
		cfg, _, err := conf.Parse(shape{1, 1, 1}.settings("server", 0, 0, "7000", settings...), all.Ways())
		require.NoError(t, err)
		for _, d := range all.Drivers() {
			if d.Strands == nil {
				continue
			}
			e := environment(cfg, newGate(cfg), zap.NewNop(), "127.0.0.1:0")
			e.Hosts = []string{"127.0.77.1", "127.0.77.2"}
			list, err := d.Open(e)
			require.NoError(t, err)
			list, err = join(cfg, &d, e, list)
			require.NoError(t, err)
			f := list[0]
			own := string(f.Addr())
			require.Equal(t, 2, strings.Count(own, ":127.0."), own)
			require.NoError(t, f.Reaches(f.Addr()))
			far := transport.Addr(strings.ReplaceAll(own, ":127.0.", ":192.0."))
			if named {
				require.NoError(t, f.Reaches(far))
			} else {
				require.ErrorContains(t, f.Reaches(far), "none of them is in a network of ours")
			}
			closeAll(list)
		}
	}
}

// TestPlainTextOverRDMA: with TLS, RDMA is used only by name and with FSERVER_RDMA_PLAINTEXT. links() says why auto does not use it.
func TestPlainTextOverRDMA(t *testing.T) {
	fakes(t)
	kernelShows(t, "fake0", "fake1")
	tls := append([]string{"FSERVER_TLS=1", "FSERVER_SECRET=a secret of the test"}, apart...)
	named := append([]string{"FSERVER_TRANSPORT=verbs"}, tls...)
	_, _, err := opened(t, named...)
	require.ErrorContains(t, err, "FSERVER_TRANSPORT=verbs: FSERVER_TLS is on, and RDMA encrypts nothing")
	for want, settings := range map[string][]string{"verbs": append([]string{"FSERVER_RDMA_PLAINTEXT=1"}, named...), "tcp/tls": tls} {
		m := newMesh(t, openFabrics, shape{1, 1, 1}, settings...)
		m.exchange(t, 2)
		l := linkOf(t, m.workers[0])
		require.Equal(t, want, l.Transport)
		if want != "verbs" {
			require.Contains(t, l.Reason, "FSERVER_TLS is on, and verbs encrypts nothing")
		}
		m.stop()
	}
}
