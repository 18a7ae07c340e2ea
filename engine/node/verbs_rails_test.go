package node

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"fserver/cshim/verbs/fakeverbs"
	"fserver/engine/conf"
	"fserver/engine/transport"
	"fserver/engine/transport/all"
)

// fakes has the fake library loaded, with two devices on addresses of this host.
func fakes(t *testing.T) {
	if err := library(); err != nil {
		t.Skip(err)
	}
	if fakeverbs.Real() {
		t.Skip("it drives the fake library")
	}
	fakeverbs.Reset()
	fakeverbs.Set("gids", 3)
	fakeverbs.Set("cqe", 1<<15)
	t.Cleanup(fakeverbs.Reset)
}

// byRDMA is a mesh whose nodes use RDMA devices as the settings say.
func byRDMA(t *testing.T, s shape, settings ...string) *mesh {
	return newMesh(t, openFabrics, s, append([]string{"FSERVER_TRANSPORT=verbs"}, settings...)...)
}

// exchange runs push_pulls of random sizes in all pairs, and compares each byte.
func (m *mesh) exchange(t *testing.T, rounds int) {
	const keys = 3
	done := make(chan error, len(m.servers)+len(m.workers))
	for _, n := range m.servers {
		go func() { done <- serve(t, n, rounds*keys) }()
	}
	for _, n := range m.workers {
		rng := rand.New(rand.NewPCG(7, uint64(n.Info().Rank)))
		go func() { done <- chaoticWorker(t, n, rng, rounds, keys) }()
	}
	for range cap(done) {
		require.NoError(t, <-done)
	}
}

// members are those of the connection between the first worker and the first server.
func (m *mesh) members() []transport.Member { return m.workers[0].peers[0].link.conn.Peer().Members }

// whole waits until all members are connected. Each round of the mesh gives them time.
func (m *mesh) whole(t *testing.T, want int) []transport.Member {
	for range 1000 {
		n := 0
		for _, x := range m.members() {
			if x.Why == "" {
				n++
			}
		}
		if n == want {
			return m.members()
		}
		oneOf(t, m, 1, 0)
	}
	require.Fail(t, "members are missing", "%+v", m.members())
	return nil
}

// TestVerbsQueuePairs: over one device and over two, with 1, 2 and 4 queue pairs each.
func TestVerbsQueuePairs(t *testing.T) {
	for _, devices := range []string{"fake0", "fake0,fake1"} {
		for _, pairs := range []int{1, 2, 4} {
			if devices == "fake0" && pairs == 1 {
				continue // TestVerbs
			}
			t.Run(fmt.Sprint(devices, " ", pairs), func(t *testing.T) {
				fakes(t)
				m := byRDMA(t, shape{2, 2, 1}, "FSERVER_RDMA_DEVICE="+devices, fmt.Sprint("STEPAF_QP_NUM=", pairs))
				m.exchange(t, 5)
				list := m.whole(t, pairs*(1+strings.Count(devices, ",")))
				for i, rows := range []int{1, 512, 1 << 17, 2 << 20} {
					oneOf(t, m, rows, byte(i))
				}
				for _, x := range m.members() {
					require.Greater(t, x.Sent, uint64(1<<20), x.Name)
					require.Equal(t, "verbs", x.Via)
				}
				want := "fake0:1"
				if pairs > 1 {
					want += "/0"
				}
				require.Equal(t, want, list[0].Name)
				peer := m.workers[0].peers[0].link.conn.Peer()
				require.Equal(t, strings.Repeat("+verbs", len(list))[1:], peer.Via)
				require.Empty(t, peer.Why)
				m.stop()
			})
		}
	}
}

// TestVerbsUnlike: one side has more devices or queue pairs than the other, or one of each.
func TestVerbsUnlike(t *testing.T) {
	for _, c := range []struct {
		name, workers, servers string
		members                int // 0: the one Fabric beside
	}{
		{"queue pairs", "FSERVER_RDMA_DEVICE=fake0 STEPAF_QP_NUM=4", "FSERVER_RDMA_DEVICE=fake1 STEPAF_QP_NUM=2", 2},
		{"devices", "FSERVER_RDMA_DEVICE=fake0,fake1", "FSERVER_RDMA_DEVICE=fake1 STEPAF_QP_NUM=2", 1},
		{"several and one", "FSERVER_RDMA_DEVICE=fake0,fake1 STEPAF_QP_NUM=2", "FSERVER_RDMA_DEVICE=fake1", 0},
		{"one and several", "FSERVER_RDMA_DEVICE=fake1", "FSERVER_RDMA_DEVICE=fake1,fake0", 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			fakes(t)
			m := newMixedMesh(t, openFabrics, shape{1, 1, 1}, func(role string) []string {
				of := map[string]string{"worker": c.workers, "server": c.servers}[role]
				return append(strings.Fields(of), "FSERVER_TRANSPORT=verbs")
			})
			m.exchange(t, 5)
			if c.members == 0 {
				require.Empty(t, m.members())
			} else {
				m.whole(t, c.members)
			}
			how, _ := m.workers[0].peers[0].link.via()
			require.True(t, strings.HasPrefix(how, "verbs"), how)
			m.stop()
		})
	}
}

// TestBrokenNIC: a NIC that does not work keeps its place, and one that fails later is done without.
func TestBrokenNIC(t *testing.T) {
	t.Run("from the start", func(t *testing.T) {
		fakes(t)
		fakeverbs.Set("down", 2)
		m := byRDMA(t, shape{1, 1, 1}, "FSERVER_RDMA_DEVICE=fake0,fake1")
		m.exchange(t, 5)
		list := m.whole(t, 1)
		require.Equal(t, "fake0", list[0].Name)
		require.Equal(t, "verbs: not available: port 1 of fake0 is not active (ibv_devinfo shows the devices and their ports)", list[0].Why)
		require.Equal(t, "verbs", list[1].Via)
		m.stop()
	})
	for device := range 2 {
		t.Run(fmt.Sprint("device ", device, " vanishes"), func(t *testing.T) {
			fakes(t)
			m := byRDMA(t, shape{1, 1, 1}, "FSERVER_RDMA_DEVICE=fake0,fake1", "STEPAF_QP_NUM=2")
			m.whole(t, 4)
			fakeverbs.Vanish(device)
			m.exchange(t, 5)
			for i, x := range m.whole(t, 2) {
				require.Equal(t, i/2 == device, x.Why != "", "%+v", x)
			}
			m.stop()
		})
	}
	for broken := range 3 {
		for _, role := range []conf.Role{conf.Worker, conf.Server} {
			t.Run(fmt.Sprint("one of three: ", broken, " of the ", role), func(t *testing.T) {
				fakes(t)
				fakeverbs.Set("devices", 3)
				m := newMesh(t, func(cfg *conf.Config, g transport.Gate, log *zap.Logger) ([]transport.Fabric, error) {
					if cfg.Role == role {
						fakeverbs.Set("down", 2<<broken)
						defer fakeverbs.Set("down", 0)
					}
					return openFabrics(cfg, g, log)
				}, shape{1, 1, 1}, "FSERVER_TRANSPORT=verbs", "FSERVER_RDMA_DEVICE=fake0,fake1,fake2")
				m.exchange(t, 5)
				for i, x := range m.whole(t, 2) {
					require.Equal(t, i == broken, x.Why != "", "%+v", x)
				}
				oneOf(t, m, 2<<20, 1)
				for i, x := range m.members() {
					require.Equal(t, i != broken, x.Sent > 1<<20, "%+v", x)
				}
				m.stop()
			})
		}
	}
	t.Run("all", func(t *testing.T) {
		fakes(t)
		fakeverbs.Set("down", 1)
		require.ErrorContains(t, notOpened(t, "FSERVER_RDMA_DEVICE=fake0,fake1"), "port 1 of fake0 is not active")
	})
}

// notOpened is why a worker with these settings does not open.
func notOpened(t *testing.T, settings ...string) error {
	cfg, _, err := conf.Parse(shape{1, 1, 1}.settings("worker", 0, 0, "7000", append(settings, "FSERVER_TRANSPORT=verbs")...), all.Ways())
	require.NoError(t, err)
	_, err = openFabrics(cfg, newGate(cfg), zap.NewNop())
	require.Error(t, err)
	return err
}

// TestWrongDevices: each error names the setting, its value and the remedy.
func TestWrongDevices(t *testing.T) {
	fakes(t)
	for want, settings := range map[string][]string{
		"FSERVER_TRANSPORT=verbs: STEPAF_QP_NUM=33 over each of 2 devices: at most 64 queue pairs in all (set STEPAF_QP_NUM to 32 or less, or set FSERVER_TRANSPORT=auto)": {"FSERVER_RDMA_DEVICE=fake0,fake1", "STEPAF_QP_NUM=33"},
		"node: DMLC_INTERFACE=nosuch0: no such network interface": {"DMLC_INTERFACE=lo,nosuch0"},
		"no RDMA device nosuch":                                   {"FSERVER_RDMA_DEVICE=nosuch"},
	} {
		require.ErrorContains(t, notOpened(t, settings...), want)
	}
}

// TestPacketSize: a port that sends smaller packets than FSERVER_RDMA_MTU asks for is one warning, which says what it can do.
func TestPacketSize(t *testing.T) {
	for size, warned := range map[string]string{
		"port": "", "512": "", "1024": "",
		"2048": "FSERVER_RDMA_MTU=2048: port 1 of fake0 sends packets of at most 1024 bytes (raise the MTU of its",
		"4096": "FSERVER_RDMA_MTU=4096: port 1 of fake0 sends packets of at most 1024 bytes (raise the MTU of its",
	} {
		fakes(t)
		_, logs, err := opened(t, "FSERVER_TRANSPORT=verbs", "FSERVER_RDMA_DEVICE=fake0", "FSERVER_RDMA_MTU="+size)
		require.NoError(t, err)
		lines := logs.FilterLevelExact(zapcore.WarnLevel).All()
		if warned == "" {
			require.Empty(t, lines, size)
			continue
		}
		require.Len(t, lines, 1, size)
		require.Contains(t, lines[0].Message, warned)
	}
}

// TestSplitLag: queue pairs use the ports of a bond as STEPMESH_SPLIT_QP_LAG says.
func TestSplitLag(t *testing.T) {
	for _, c := range []struct {
		setting      string
		bond         int
		first, other int // queue pairs on each port, of 8 at each side
		flows        int
		via, why     string
	}{
		{"STEPMESH_SPLIT_QP_LAG=0", 1, 0, 0, 0, "verbs", ""},
		{"STEPMESH_SPLIT_QP_LAG=1", 1, 8, 8, 16, "verbs/port1", ""},
		{"DMLC_SPLIT_QP_LAG=0", 1, 8, 8, 16, "verbs/port1", ""},
		{"STEPMESH_SPLIT_QP_LAG=port2", 1, 0, 16, 0, "verbs/port2", ""},
		{"DMLC_SPLIT_QP_LAG=1", 1, 16, 0, 0, "verbs/port1", ""},
		{"STEPMESH_SPLIT_QP_LAG=1", 0, 0, 0, 16, "verbs", "STEPMESH_SPLIT_QP_LAG: fake0 is not a bonded mlx5 NIC, so its port cannot be chosen"},
	} {
		t.Run(fmt.Sprint(c.setting, " ", c.bond), func(t *testing.T) {
			fakes(t)
			fakeverbs.Set("lag", c.bond)
			m := byRDMA(t, shape{2, 2, 1}, "FSERVER_RDMA_DEVICE=fake0", "STEPAF_QP_NUM=2", c.setting)
			m.exchange(t, 2)
			list := m.whole(t, 2)
			for _, w := range m.workers {
				for _, l := range w.peers[:len(m.servers)] {
					for len(l.link.conn.Peer().Via) < len("verbs+verbs") {
						oneOf(t, m, 1, 0)
					}
				}
			}
			require.Equal(t, c.first, fakeverbs.Count("port1"))
			require.Equal(t, c.other, fakeverbs.Count("port2"))
			require.Equal(t, c.flows, fakeverbs.Count("flows"))
			require.Equal(t, c.via, list[0].Via)
			require.Equal(t, c.why, m.workers[0].peers[0].link.conn.Peer().Why)
			m.stop()
		})
	}
}
