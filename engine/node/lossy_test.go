package node

import (
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/transport/inproc"
)

// TestResend loses frames of all nodes and misses none.
func TestResend(t *testing.T) {
	long(t)
	settings := []string{"PS_DROP_MSG=20", "PS_RESEND=1", "PS_RESEND_TIMEOUT=5"}
	for name, fabrics := range map[string]Fabrics{"tcp": openFabrics, "inproc": over(inproc.New())} {
		t.Run(name, func(t *testing.T) {
			m := newMesh(t, fabrics, shape{1, 2, 1}, settings...)
			require.NoError(t, echo(t, m.workers[0], m.servers, 100, closed()))
			m.meet()
			m.stop()
		})
	}
}

// TestResendAndRestart kills nodes while frames are lost.
func TestResendAndRestart(t *testing.T) {
	settings := []string{"STEPMESH_DROP_RATE=10", "PS_RESEND=1", "PS_RESEND_TIMEOUT=5"}
	net, s := inproc.New(), shape{1, 1, 1}
	m := newMesh(t, over(net), s, settings...)
	for range 3 {
		m.restart(net, s, m.servers[0], settings...)
		require.NoError(t, echo(t, m.workers[0], m.servers, 20, closed()))
		m.restart(net, s, m.workers[0], settings...)
		require.NoError(t, echo(t, m.workers[0], m.servers, 20, closed()))
	}
	m.stop()
}

// TestDrop loses all frames of a worker, which ends in the time-out of what it
// waits for.
func TestDrop(t *testing.T) {
	s := shape{1, 1, 1}
	m := newCluster(t, openFabrics)
	m.scheduler = m.start(s.settings("scheduler", 0, 0, "0"))
	_, port := splitPort(t, m.scheduler.Info().Address)
	w := m.start(s.settings("worker", 0, 0, port, "PS_DROP_MSG=100", "FSERVER_INIT_TIMEOUT=3"))
	err := ready(w)
	require.ErrorContains(t, err, "members are missing at the scheduler")
	require.EqualValues(t, 110, Errno(err))
}

// TestResendOnOneSide: each node loses its own frames, and sends them again if it is to, whatever
// its peers do.
func TestResendOnOneSide(t *testing.T) {
	s := shape{1, 1, 1}
	m := newCluster(t, openFabrics)
	m.scheduler = m.start(s.settings("scheduler", 0, 0, "0", "PS_RESEND=1"))
	_, port := splitPort(t, m.scheduler.Info().Address)
	m.servers = append(m.servers, m.start(s.settings("server", 0, 0, port)))
	lossy := []string{"PS_DROP_MSG=20", "PS_RESEND=1", "PS_RESEND_TIMEOUT=5"}
	m.workers = append(m.workers, m.start(s.settings("worker", 0, 0, port, lossy...)))
	for _, n := range m.all() {
		waitReady(t, n)
	}
	require.NoError(t, echo(t, m.workers[0], m.servers, 20, closed()))
	m.meet()
	m.stop()
}
