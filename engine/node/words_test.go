package node

import (
	"fmt"
	"os"
	"regexp"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"fserver/engine/conf"
	"fserver/engine/exchange"
	"fserver/engine/gpu"
	"fserver/engine/gpu/fakegpu"
	"fserver/engine/peers"
	"fserver/engine/transport"
	"fserver/engine/transport/all"
	"fserver/engine/transport/cma"
)

// listen opens one node whose log is kept from info up.
func (m *mesh) listen(settings []string) (*Node, *observer.ObservedLogs) {
	cfg, _, err := conf.Parse(settings, all.Ways())
	require.NoError(m.tb, err)
	core, logs := observer.New(zapcore.InfoLevel)
	return m.open(cfg, zap.New(core)), logs
}

// pairLogs is a mesh of a worker and a server, and their logs.
func pairLogs(t *testing.T, f Fabrics, worker, server []string) (m *mesh, of map[string]*observer.ObservedLogs) {
	m = newCluster(t, f)
	s := shape{1, 1, 1}
	of = map[string]*observer.ObservedLogs{}
	m.scheduler, of["scheduler"] = m.listen(s.settings("scheduler", 0, 0, "0"))
	_, port := splitPort(t, m.scheduler.Info().Address)
	w, logs := m.listen(s.settings("worker", 0, 0, port, worker...))
	m.workers, of["worker"] = []*Node{w}, logs
	v, logs := m.listen(s.settings("server", 0, 0, port, server...))
	m.servers, of["server"] = []*Node{v}, logs
	for _, n := range m.all() {
		waitReady(t, n)
	}
	return m, of
}

// elsewhere is a transport inside a host that says that it is at another place.
type elsewhere struct {
	*cma.Fabric
	at func(transport.Addr) transport.Addr
}

func (f elsewhere) Addr() transport.Addr { return f.at(f.Fabric.Addr()) }

// moved puts the transport inside the host of servers elsewhere.
func moved(old string) Fabrics {
	return func(cfg *conf.Config, g transport.Gate, log *zap.Logger) ([]transport.Fabric, error) {
		list, err := openFabrics(cfg, g, log)
		if f, ok := list[0].(*cma.Fabric); ok && cfg.Role == conf.Server {
			list[0] = elsewhere{f, func(a transport.Addr) transport.Addr {
				return transport.Addr(regexp.MustCompile(old).ReplaceAllString(string(a), "${1}0123456789abcdef/"))
			}}
		}
		return list, err
	}
}

// TestReasons: both sides of a link say why its data does not travel over the better
// transport, and each logs once how it travels.
func TestReasons(t *testing.T) {
	tcp, no := []string{"FSERVER_TRANSPORT=tcp"}, []string{"BYTEPS_ENABLE_IPC=0"}
	const byTCP, byIPC = "cma: FSERVER_TRANSPORT=tcp at ", "cma: BYTEPS_ENABLE_IPC=0 at "
	for _, c := range []struct {
		name             string
		fabrics          Fabrics
		worker, server   []string
		atWorker, atPeer string // reasons
	}{
		{"tcp", openFabrics, tcp, tcp, byTCP + "worker 0", byTCP + "server 0"},
		{"worker tcp", openFabrics, tcp, nil, byTCP + "worker 0", byTCP + "worker 0"},
		{"server tcp", openFabrics, nil, tcp, byTCP + "server 0", byTCP + "server 0"},
		{"no IPC", openFabrics, no, no, byIPC + "worker 0", byIPC + "server 0"},
		{"worker without IPC", openFabrics, no, nil, byIPC + "worker 0", byIPC + "worker 0"},
		{"server without IPC", openFabrics, nil, no, byIPC + "server 0", byIPC + "server 0"},
		{"network namespaces", moved("(cma:.*-)[^/]*/"), nil, nil, "cma: the two processes are in different network namespaces of one host", "cma: the two processes are in different network namespaces of one host"},
		{"hosts", moved("(cma:)[^/]*/"), nil, nil, "cma: the two processes are on different hosts", "cma: the two processes are on different hosts"},
		{"none is better", openFabrics, []string{"FSERVER_CMA=staged"}, []string{"FSERVER_CMA=direct", "FSERVER_TRANSPORT=tcp"}, byTCP + "server 0", byTCP + "server 0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			m, of := pairLogs(t, c.fabrics, c.worker, c.server)
			m.echoes(t)
			for _, side := range []struct {
				n              *Node
				peer, why, log string
			}{{m.workers[0], "server 0", c.atWorker, "worker"}, {m.servers[0], "worker 0", c.atPeer, "server"}} {
				l := linkOf(t, side.n)
				require.Equal(t, "tcp", l.Transport)
				require.Contains(t, l.Reason, side.why)
				lines := of[side.log].FilterMessage(side.peer + " is connected").All()
				require.Len(t, lines, 1, "%v", of[side.log].All())
				told := lines[0].ContextMap()
				require.Equal(t, zapcore.InfoLevel, lines[0].Level)
				require.Equal(t, "tcp", told["transport"])
				require.Contains(t, told["why"], "cma: ")
				require.EqualValues(t, os.Getpid(), told["pid"])
				require.Equal(t, hostName(), told["host"])
			}
			m.stop()
		})
	}
}

// TestNoReason: where nothing better is left out, there is none.
func TestNoReason(t *testing.T) {
	skipWithoutCMA(t)
	m, of := pairLogs(t, openFabrics, nil, nil)
	m.echoes(t)
	for _, n := range []*Node{m.workers[0], m.servers[0]} {
		require.Equal(t, linkDescription{linkOf(t, n).Role, 0, linkOf(t, n).Remote, "cma", "", []memberDescription{}, ""}, linkOf(t, n))
	}
	for _, line := range append(of["worker"].FilterMessageSnippet(" is connected").All(), of["server"].FilterMessageSnippet(" is connected").All()...) {
		require.Equal(t, "cma", line.ContextMap()["transport"])
		require.NotContains(t, line.ContextMap(), "why")
	}
	m.stop()
}

// TestServerDiesAndReturns: the log says nothing that is not so, names peers by role and
// rank, and says once that the server is back.
func TestServerDiesAndReturns(t *testing.T) {
	skipWithoutCMA(t)
	m, of := pairLogs(t, openFabrics, nil, nil)
	_, port := splitPort(t, m.scheduler.Info().Address)
	for round := 1; round < 4; round++ {
		m.echoes(t)
		require.NoError(t, m.servers[0].Close())
		lostWithin(t, func() error { return m.workers[0].lossOf(t) }, "server", 0)
		var logs *observer.ObservedLogs
		m.servers[0], logs = m.listen(shape{1, 1, 1}.settings("server", 0, 0, port))
		waitReady(t, m.servers[0])
		m.meet()
		require.Equal(t, round, of["worker"].FilterMessage("server 0 is back").Len())
		require.Equal(t, round, of["scheduler"].FilterMessage("server 0 is back").Len())
		require.Equal(t, 1, logs.FilterMessage("worker 0 is connected").Len())
		require.Equal(t, 1, of["worker"].FilterMessage("server 0 is connected").Len())
	}
	m.stop()
	for side, logs := range of {
		for _, line := range logs.All() {
			text := fmt.Sprint(line.Message, line.ContextMap())
			require.NotRegexp(t, "taking another way|context canceled|[0-9a-f]{16}", text, side)
		}
	}
	back := of["worker"].FilterMessage("server 0 is back").All()[0]
	require.Equal(t, zapcore.InfoLevel, back.Level)
	require.Equal(t, "cma", back.ContextMap()["transport"])
}

// lossOf is the error of a push_pull whose server is lost.
func (n *Node) lossOf(t *testing.T) error {
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); {
		if err := wait(n, pushPull(t, n, []exchange.Tensor{tensor(t, 1, 1)}, nil)); err != nil {
			return err
		}
	}
	return nil
}

// TestMissing: everybody who waits for the cluster learns who is missing, in the
// time-out's error and, after 5 s, in the log.
func TestMissing(t *testing.T) {
	for _, after := range []string{"4", "15"} {
		t.Run(after, func(t *testing.T) {
			if after == "15" {
				long(t)
			}
			m := newCluster(t, openFabrics)
			s, limit := shape{2, 2, 1}, "FSERVER_INIT_TIMEOUT="+after
			scheduler, logs := m.listen(s.settings("scheduler", 0, 0, "0", limit))
			_, port := splitPort(t, scheduler.Info().Address)
			worker, told := m.listen(s.settings("worker", 1, 0, port, limit))
			server, seen := m.listen(s.settings("server", 0, 0, port, limit))
			const names = "2 of 4 members have registered; missing: worker 0, server 1"
			for n, log := range map[*Node]*observer.ObservedLogs{scheduler: logs, worker: told, server: seen} {
				err := ready(n)
				require.ErrorContains(t, err, names)
				require.EqualValues(t, 110, Errno(err))
				lines := log.FilterMessageSnippet("waiting for the cluster to become complete: ").All()
				if after != "15" {
					require.Empty(t, lines)
					continue
				}
				require.Len(t, lines, 1)
				require.Equal(t, zapcore.InfoLevel, lines[0].Level)
				require.Contains(t, lines[0].Message, names)
			}
		})
	}
}

// TestOutOfReach: a worker that no transport brings to a server says to which, and why.
func TestOutOfReach(t *testing.T) {
	skipWithoutCMA(t)
	m := newCluster(t, openFabrics)
	s := shape{1, 1, 1}
	m.scheduler = m.start(s.settings("scheduler", 0, 0, "0"))
	_, port := splitPort(t, m.scheduler.Info().Address)
	w := m.start(s.settings("worker", 0, 0, port, "FSERVER_TRANSPORT=cma"))
	m.start(s.settings("server", 0, 0, port, "FSERVER_TRANSPORT=tcp"))
	err := ready(w)
	require.ErrorContains(t, err, fmt.Sprintf("server 0 (pid %d on %s) cannot be reached over cma", os.Getpid(), hostName()))
	require.ErrorContains(t, err, "server 0 does not offer it")
	require.EqualValues(t, 22, Errno(err))
}

// TestRemedies: an error of the bring-up names the setting that helps, and no other.
func TestRemedies(t *testing.T) {
	m := newCluster(t, openFabrics)
	s := shape{1, 1, 1}
	m.scheduler = m.start(s.settings("scheduler", 0, 0, "0", "FSERVER_SECRET=a secret of some length"))
	_, port := splitPort(t, m.scheduler.Info().Address)
	for _, secret := range [][]string{{"FSERVER_SECRET=another secret, also long"}, nil} {
		n := m.start(s.settings("worker", 0, 0, port, secret...))
		err := ready(n)
		require.ErrorContains(t, err, "FSERVER_SECRET must be the same on all nodes")
		require.ErrorContains(t, err, "FSERVER_SECRET_FILE")
		require.NotContains(t, err.Error(), "DMLC_PS_ROOT")
	}
	require.NoError(t, m.scheduler.Close())
	n := m.start(s.settings("worker", 0, 0, port, "FSERVER_INIT_TIMEOUT=3"))
	require.ErrorContains(t, ready(n), "is it running, and are DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT right?")
}

// TestLeaveAfterWorkers: servers that end in whatever way once the workers have left are
// no loss to those, nor is a scheduler that ends with them.
func TestLeaveAfterWorkers(t *testing.T) { eachWay(t, leaveAfterWorkers) }

func leaveAfterWorkers(t *testing.T, way ...string) {
	for _, c := range []struct {
		name string
		end  func(m *mesh)
	}{
		{"close", func(m *mesh) { m.close(t, m.servers...) }},
		{"close, with the scheduler", func(m *mesh) { m.close(t, append(m.servers, m.scheduler)...) }},
		{"close, the scheduler first", func(m *mesh) { m.close(t, append([]*Node{m.scheduler}, m.servers...)...) }},
		{"free", func(m *mesh) {
			for _, s := range m.servers {
				require.NoError(t, s.Free())
			}
		}},
		{"one stops", func(m *mesh) {
			m.close(t, m.servers[0])
			require.NoError(t, retried(func() error { return m.servers[1].Stop(20 * time.Second) }))
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := newMesh(t, openFabrics, shape{2, 2, 1}, way...)
			m.meet()
			left := make(chan error)
			for _, w := range m.workers {
				go func() { left <- retried(func() error { return w.Stop(20 * time.Second) }) }()
			}
			for _, s := range m.servers {
				var over error
				for over = ErrAgain; over == ErrAgain; _, over = getBatch(s) {
				}
				require.ErrorIs(t, over, exchange.ErrLeft)
				for end := time.Now().Add(10 * time.Second); !s.allLeft(); time.Sleep(time.Millisecond) {
					require.True(t, time.Now().Before(end))
				}
			}
			c.end(m)
			for range m.workers {
				require.NoError(t, <-left)
			}
			require.NoError(t, retried(func() error { return m.scheduler.Stop(20 * time.Second) }))
		})
	}
}

func (m *mesh) close(t *testing.T, nodes ...*Node) {
	for _, n := range nodes {
		require.NoError(t, n.Close())
	}
}

// allLeft says whether all workers of a server have said that they leave.
func (n *Node) allLeft() bool {
	if !n.driver.Own() {
		return true
	}
	defer n.driver.Disown()
	for _, p := range n.peers {
		if p.State() != peers.Left {
			return false
		}
	}
	return true
}

// TestLeaveBeforeWorkers: a server that ends before all its workers have left is lost, to
// those that leave too.
func TestLeaveBeforeWorkers(t *testing.T) {
	m := newMesh(t, openFabrics, shape{2, 1, 1})
	m.meet()
	require.ErrorIs(t, m.workers[0].Stop(10*time.Millisecond), ErrAgain)
	require.NoError(t, m.servers[0].Close())
	var lost *LostError
	require.ErrorAs(t, m.workers[1].lossOf(t), &lost)
	left := make(chan error)
	go func() { left <- retried(func() error { return m.workers[1].Stop(20 * time.Second) }) }()
	require.ErrorAs(t, retried(func() error { return m.workers[0].Stop(20 * time.Second) }), &lost)
	require.Equal(t, "server 0", fmt.Sprint(lost.Role, " ", lost.Rank))
	<-left // it may or may not have heard before it left
}

// TestReasonsOfGPUs: with GPUs, the reasons name the transport of their memory too.
func TestReasonsOfGPUs(t *testing.T) {
	for _, c := range []struct{ way, setting, transport, why string }{
		{"tcp", "", "tcp", "cma and cudaipc: FSERVER_TRANSPORT=tcp at "},
		{"auto", "BYTEPS_ENABLE_IPC=0", "tcp", "cma and cudaipc: BYTEPS_ENABLE_IPC=0 at "},
		{"cma", "BYTEPS_ENABLE_IPC=0", "cma", "cudaipc: BYTEPS_ENABLE_IPC=0 at "},
		{"cudaipc", "", "cma", ""},
	} {
		t.Run(c.way+c.setting, func(t *testing.T) {
			skipWithoutCMA(t)
			g := fakegpu.New()
			settings := []string{c.setting}
			if c.setting == "" {
				settings = nil
			}
			m := newGPUPair(t, c.way, func(int) (gpu.Device, error) { return g, nil }, settings...)
			for n, who := range map[*Node]string{m.workers[0]: "worker 0", m.servers[0]: "server 0"} {
				why := c.why
				if why != "" {
					why += who
				}
				l := linkOf(t, n)
				require.Equal(t, []string{c.transport, why}, []string{l.Transport, l.Reason})
			}
			m.stop()
		})
	}
}

// TestDoneIsOfTheRun: a worker that has left, and whose successor comes, is not gone for
// good: the server is needed again until that one leaves too.
func TestDoneIsOfTheRun(t *testing.T) {
	m := newMesh(t, openFabrics, shape{2, 1, 1}, "FSERVER_STOP_TIMEOUT=0.2")
	_, port := splitPort(t, m.scheduler.Info().Address)
	m.meet()
	require.ErrorContains(t, retried(func() error { return m.workers[0].Stop(20 * time.Second) }), "FSERVER_STOP_TIMEOUT") // it has left alone
	m.workers[0] = m.start(shape{2, 1, 1}.settings("worker", 0, 0, port))
	waitReady(t, m.workers[0])
	require.ErrorContains(t, retried(func() error { return m.workers[1].Stop(20 * time.Second) }), "FSERVER_STOP_TIMEOUT")
	require.NoError(t, m.servers[0].Close())
	require.Eventually(t, func() bool { // the scheduler says so
		require.True(t, m.workers[0].driver.Own())
		defer m.workers[0].driver.Disown()
		return m.workers[0].peers[0].Lost()
	}, 10*time.Second, time.Millisecond)
	require.NoError(t, m.workers[0].Close())
}
