package node

import (
	"encoding/json"
	"errors"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"fserver/cshim/verbs/fakeverbs"
	"fserver/engine/conf"
	"fserver/engine/transport"
	"fserver/engine/transport/all"
	"fserver/engine/transport/cma"
	"fserver/engine/transport/transporttest"
)

// long skips a test that waits or repeats for seconds.
func long(t *testing.T) {
	if testing.Short() || os.Getenv("QUICK") != "" {
		t.Skip("takes seconds: not with -short, and `make test` leaves it to `make race`")
	}
}

// eachWay runs a test over each transport, in both modes of progress.
func eachWay(t *testing.T, test func(t *testing.T, way ...string)) {
	for _, w := range []struct {
		name     string
		settings []string
	}{
		{"tcp", []string{"FSERVER_TRANSPORT=tcp"}},
		{"cma", []string{"FSERVER_TRANSPORT=cma", "FSERVER_CMA=direct"}},
		{"cma staged", []string{"FSERVER_TRANSPORT=cma", "FSERVER_CMA=staged"}},
		{"verbs", []string{"FSERVER_TRANSPORT=verbs", "FSERVER_RDMA_DEVICE=" + fakeverbs.Devices()[0]}},
	} {
		for _, mode := range []string{"caller", "thread"} {
			t.Run(w.name+" "+mode, func(t *testing.T) {
				switch w.name {
				case "cma":
					skipWithoutCMA(t)
				case "verbs":
					newNICs(t)
				}
				test(t, append(w.settings, "FSERVER_PROGRESS="+mode)...)
			})
		}
	}
}

// skipWithoutCMA skips where the kernel lets no process write into another.
func skipWithoutCMA(t *testing.T) {
	o := cma.Options{Mode: cma.Direct}
	o.Gate = newGate(&conf.Config{})
	f, err := cma.Open(o)
	var no *transport.ErrUnavailable
	if errors.As(err, &no) {
		t.Skip(no.Error())
	}
	require.NoError(t, err)
	require.NoError(t, f.Close())
}

// unlike is a mesh of a worker and a server whose settings differ. The warnings
// are the worker's.
func unlike(t *testing.T, f Fabrics, worker, server []string) (m *mesh, logs *observer.ObservedLogs) {
	m = newCluster(t, f)
	s := shape{1, 1, 1}
	m.scheduler = m.start(s.settings("scheduler", 0, 0, "0"))
	_, port := splitPort(t, m.scheduler.Info().Address)
	w, logs := m.watch(s.settings("worker", 0, 0, port, worker...))
	m.workers = []*Node{w}
	m.servers = []*Node{m.start(s.settings("server", 0, 0, port, server...))}
	for _, n := range m.all() {
		waitReady(t, n)
	}
	return m, logs
}

// linkOf is what n says of the link to its only peer.
func linkOf(t *testing.T, n *Node) linkDescription {
	b, err := n.Describe()
	require.NoError(t, err)
	var d struct{ Links []linkDescription }
	require.NoError(t, json.Unmarshal(b, &d))
	require.Len(t, d.Links, 1)
	return d.Links[0]
}

// echoes makes a few push_pulls and checks their bytes.
func (m *mesh) echoes(t *testing.T) {
	require.NoError(t, echo(t, m.workers[0], m.servers, 20, closed()))
}

// TestStagedIsTold: a worker that is to be direct if it can says once why it is
// not. Who is told to stage has nothing to say.
func TestStagedIsTold(t *testing.T) {
	for _, c := range []struct {
		worker, server, how string
		lines               int
	}{
		{"auto", "staged", "cma/staged", 1},
		{"staged", "auto", "cma/staged", 0},
		{"auto", "auto", "cma", 0},
	} {
		t.Run(c.worker+" "+c.server, func(t *testing.T) {
			skipWithoutCMA(t)
			m, logs := unlike(t, openFabrics, []string{"FSERVER_CMA=" + c.worker}, []string{"FSERVER_CMA=" + c.server})
			m.echoes(t)
			l := linkOf(t, m.workers[0])
			require.Equal(t, c.how, l.Transport)
			require.Len(t, logs.All(), c.lines)
			for _, line := range logs.All() {
				require.Equal(t, "server 0 is connected", line.Message)
				require.Equal(t, "cma/staged", line.ContextMap()["transport"])
				require.Equal(t, "the peer is set to staging", line.ContextMap()["why"])
				require.Equal(t, l.Reason, line.ContextMap()["why"])
			}
			m.stop()
		})
	}
}

// TestNoWayInside: a worker whose transport inside the host fails, when it
// connects or when it opens, says so and goes over TCP.
func TestNoWayInside(t *testing.T) {
	const direct, staged = "FSERVER_CMA=direct", "FSERVER_CMA=staged"
	skipWithoutCMA(t)
	t.Run("connect", func(t *testing.T) {
		m, logs := unlike(t, openFabrics, []string{direct}, []string{staged})
		m.echoes(t)
		l := linkOf(t, m.workers[0])
		require.Equal(t, "tcp", l.Transport)
		require.Contains(t, l.Reason, "not available: the peer is set to staging")
		require.Equal(t, location(m.servers[0].base().Addr()), l.Remote)
		require.Equal(t, "tcp", linkOf(t, m.servers[0]).Transport)
		require.Equal(t, 1, logs.Len())
		line := logs.All()[0]
		require.Equal(t, "server 0 is connected", line.Message)
		require.Equal(t, "tcp", line.ContextMap()["transport"])
		require.Equal(t, l.Reason, line.ContextMap()["why"])
		require.Equal(t, l.Reason, linkOf(t, m.servers[0]).Reason)
		m.stop()
	})
	t.Run("open", func(t *testing.T) {
		refused := func(cfg *conf.Config, g transport.Gate, log *zap.Logger) (list []transport.Fabric, err error) {
			if cfg.Role != conf.Worker {
				return openFabrics(cfg, g, log)
			}
			transporttest.Refused(t, unix.SYS_PROCESS_VM_WRITEV, uint32(unix.Getpid()), unix.EPERM, func() {
				list, err = openFabrics(cfg, g, log)
			})
			return list, err
		}
		m, logs := unlike(t, refused, []string{direct}, nil)
		m.echoes(t)
		for _, n := range []*Node{m.workers[0], m.servers[0]} {
			require.Equal(t, "tcp", linkOf(t, n).Transport)
			require.Regexp(t, `^cma: .*process_vm_writev: operation not permitted \(.* at worker 0$`, linkOf(t, n).Reason)
		}
		require.Equal(t, 1, logs.Len())
		line := logs.All()[0]
		require.Equal(t, "cannot use the transport cma", line.Message)
		require.Contains(t, line.ContextMap()["error"], "process_vm_writev: operation not permitted (")
		m.stop()

		// Who wants it alone cannot do without.
		cfg, _, err := conf.Parse(shape{1, 1, 1}.settings("worker", 0, 0, "1", direct, "FSERVER_TRANSPORT=cma"), all.Ways())
		require.NoError(t, err)
		_, err = refused(cfg, newGate(cfg), zap.NewNop())
		var no *transport.ErrUnavailable
		require.ErrorAs(t, err, &no)
	})
}

// TestPtracer: FSERVER_PTRACER=0 keeps the node from opening this process to
// others, and so does what never writes into one.
func TestPtracer(t *testing.T) {
	for _, c := range []struct {
		settings []string
		want     bool
	}{
		{nil, true},
		{[]string{"FSERVER_PTRACER=1"}, true},
		{[]string{"FSERVER_PTRACER=0"}, false},
		{[]string{"FSERVER_CMA=staged"}, false},
		{[]string{"FSERVER_TRANSPORT=tcp"}, false},
	} {
		cfg, _, err := conf.Parse(shape{1, 1, 1}.settings("worker", 0, 0, "1", c.settings...), all.Ways())
		require.NoError(t, err)
		var list []transport.Fabric
		called := transporttest.Calls(t, unix.SYS_PRCTL, unix.PR_SET_PTRACER, func() {
			list, err = openFabrics(cfg, newGate(cfg), zap.NewNop())
		})
		require.NoError(t, err)
		for _, f := range list {
			require.NoError(t, f.Close())
		}
		require.Equal(t, c.want, called, "%v", c.settings)
	}
}
