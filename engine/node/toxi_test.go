package node

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/Shopify/toxiproxy/v2"
	"github.com/rs/zerolog"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"fserver/engine/conf"
	"fserver/engine/exchange"
	"fserver/engine/transport"
)

// behind is a Fabric that peers find at another address.
type behind struct {
	transport.Fabric
	at transport.Addr
}

func (b behind) Addr() transport.Addr { return b.at }

// newProxy makes a proxy before an address, "host:port". It ends with the test.
func newProxy(tb testing.TB, name, upstream string) *toxiproxy.Proxy {
	s := toxiproxy.NewServer(toxiproxy.NewMetricsContainer(nil), zerolog.Nop())
	p := toxiproxy.NewProxy(s, name, "127.0.0.1:0", upstream)
	require.NoError(tb, p.Start())
	tb.Cleanup(p.Stop)
	return p
}

// toxicMesh is a worker and a server over TCP. The worker finds the server and the
// scheduler behind a proxy each.
type toxicMesh struct {
	*mesh
	data, control *toxiproxy.Proxy
}

func newToxicMesh(t *testing.T, extra ...string) *toxicMesh {
	m := &toxicMesh{}
	m.mesh = newCluster(t, func(cfg *conf.Config, g transport.Gate, log *zap.Logger) ([]transport.Fabric, error) {
		f, err := openBase(cfg, g, log)
		if err != nil || cfg.Role != conf.Server {
			return []transport.Fabric{f}, err
		}
		m.data = newProxy(t, "data", location(f.Addr()))
		at := transport.Addr(scheme(f) + ":" + m.data.Listen)
		return []transport.Fabric{behind{f, at}}, nil
	})
	s, extra := shape{1, 1, 1}, append([]string{"FSERVER_LOG=error"}, extra...)
	m.scheduler = m.start(s.settings("scheduler", 0, 0, "0", extra...))
	m.control = newProxy(t, "control", m.scheduler.Info().Address)
	_, direct := splitPort(t, m.scheduler.Info().Address)
	_, proxied := splitPort(t, m.control.Listen)
	m.servers = []*Node{m.start(s.settings("server", 0, 0, direct, extra...))}
	m.workers = []*Node{m.start(s.settings("worker", 0, 0, proxied, extra...))}
	for _, n := range m.all() {
		waitReady(t, n)
	}
	return m
}

// poison adds a toxic to what goes one way, "upstream" to the server or
// "downstream" to the worker. What it gives takes it away again.
func poison(t *testing.T, p *toxiproxy.Proxy, way, kind, attributes string) (heal func()) {
	t.Helper()
	w, err := p.Toxics.AddToxicJson(strings.NewReader(fmt.Sprintf(
		`{"type": %q, "stream": %q, "attributes": {%s}}`, kind, way, attributes)))
	require.NoError(t, err)
	return func() { require.NoError(t, p.Toxics.RemoveToxic(t.Context(), w.Name)) }
}

// linked waits until worker and server are connected.
func (m *toxicMesh) linked() {
	m.tb.Helper()
	require.Eventually(m.tb, func() bool { return lostPeers(m.workers[0])+lostPeers(m.servers[0]) == 0 },
		10*time.Second, time.Millisecond)
}

// TestSlowPeers makes push_pulls, with all bytes checked, over connections that
// are only slow: nobody is lost, though a frame may take as long as a third of
// the time-out of heartbeats.
func TestSlowPeers(t *testing.T) {
	long(t)
	for _, toxic := range []struct {
		kind, attributes string
		count            int
	}{
		{"latency", `"latency": 20`, 10},
		{"latency", `"latency": 10, "jitter": 10`, 20},
		{"bandwidth", `"rate": 10`, 20}, // KB/s
		{"latency", `"latency": 1500`, 1},
	} {
		t.Run(toxic.kind+" "+toxic.attributes, func(t *testing.T) {
			m := newToxicMesh(t, "PS_HEARTBEAT_INTERVAL=1", "PS_HEARTBEAT_TIMEOUT=5")
			for _, way := range []string{"upstream", "downstream"} {
				poison(t, m.data, way, toxic.kind, toxic.attributes)
				poison(t, m.control, way, toxic.kind, toxic.attributes)
			}
			require.NoError(t, echo(t, m.workers[0], m.servers, toxic.count, closed()))
			require.Zero(t, lostPeers(m.workers[0])+lostPeers(m.servers[0]))
			m.stop()
		})
	}
}

// TestBrokenConnections ends the connection between two that live, in several
// ways, with a push_pull under way. That ends in LostError; then the worker
// connects again, and all goes on.
func TestBrokenConnections(t *testing.T) {
	for _, cut := range []struct {
		name string
		end  func(t *testing.T, p *toxiproxy.Proxy) (heal func())
	}{
		{"cut", func(t *testing.T, p *toxiproxy.Proxy) func() {
			p.Stop()
			return func() { require.NoError(t, p.Start()) }
		}},
		{"reset to the server", func(t *testing.T, p *toxiproxy.Proxy) func() {
			return poison(t, p, "upstream", "reset_peer", `"timeout": 0`)
		}},
		{"reset to the worker", func(t *testing.T, p *toxiproxy.Proxy) func() {
			return poison(t, p, "downstream", "reset_peer", `"timeout": 0`)
		}},
		{"half-open, then closed", func(t *testing.T, p *toxiproxy.Proxy) func() {
			return poison(t, p, "downstream", "timeout", `"timeout": 100`)
		}},
	} {
		t.Run(cut.name, func(t *testing.T) {
			m := newToxicMesh(t)
			w, s := m.workers[0], m.servers[0]
			for range 3 {
				require.NoError(t, echo(t, w, m.servers, 5, closed()))
				heal := cut.end(t, m.data)
				id := pushPull(t, w, []exchange.Tensor{tensor(t, 1, 4096)}, []exchange.Tensor{tensor(t, 0, 9)})
				answered := make(chan struct{})
				go func() { // until the loss of the worker
					defer close(answered)
					if b, err := getBatch(s); err == nil {
						answer, err := s.BeginAnswer()
						if err == nil && answer.AddPush(tensor(t, 0, 9)) == nil {
							_ = s.Respond(b.reqs[0].handler, answer)
							s.Flush()
						}
					}
				}()
				lostWithin(t, func() error { return wait(w, id) }, "server", 0)
				<-answered
				heal()
				m.linked()
			}
			require.NoError(t, echo(t, w, m.servers, 5, closed()))
			require.NoError(t, barrierOfBoth(m))
			m.stop()
		})
	}
}

func barrierOfBoth(m *toxicMesh) error {
	done := make(chan error, 1)
	go func() { done <- barrierOf(m.servers[0]) }()
	err := barrierOf(m.workers[0])
	if e := <-done; err == nil {
		err = e
	}
	return err
}

// TestBlackholes lets nothing through to or from the worker, though all
// connections stand. By its heartbeats everybody learns that it is gone, and it
// learns that of the others.
func TestBlackholes(t *testing.T) {
	long(t)
	for _, ways := range [][]string{{"upstream"}, {"downstream"}, {"upstream", "downstream"}} {
		t.Run(strings.Join(ways, " and "), func(t *testing.T) {
			m := newToxicMesh(t, "PS_HEARTBEAT_INTERVAL=1", "PS_HEARTBEAT_TIMEOUT=5")
			w, s := m.workers[0], m.servers[0]
			require.NoError(t, echo(t, w, m.servers, 5, closed()))
			began := time.Now()
			for _, way := range ways {
				poison(t, m.data, way, "timeout", `"timeout": 0`)
				poison(t, m.control, way, "timeout", `"timeout": 0`)
			}
			id := pushPull(t, w, []exchange.Tensor{tensor(t, 1, 9)}, []exchange.Tensor{tensor(t, 0, 9)})
			_, err := getBatch(s)
			if err == nil { // only the way back is closed
				_, err = getBatch(s)
			}
			requireLost(t, err, "worker")
			requireLost(t, wait(w, id), "server")
			require.Greater(t, time.Since(began), 3*time.Second)
			require.Less(t, time.Since(began), 20*time.Second)
		})
	}
}

func requireLost(t *testing.T, err error, role string) {
	t.Helper()
	var lost *LostError
	require.ErrorAs(t, err, &lost)
	require.Equal(t, role, lost.Role.String())
}

// TestSilentData lets no data through for a while, though the worker's
// heartbeats arrive. A wait has its own bound, and nobody is lost until the
// connection is.
func TestSilentData(t *testing.T) {
	m := newToxicMesh(t, "PS_HEARTBEAT_INTERVAL=0.5", "PS_HEARTBEAT_TIMEOUT=3")
	w := m.workers[0]
	require.NoError(t, echo(t, w, m.servers, 5, closed()))
	heal := poison(t, m.data, "upstream", "timeout", `"timeout": 0`)
	id := pushPull(t, w, []exchange.Tensor{tensor(t, 1, 9)}, nil)
	for end := time.Now().Add(4 * time.Second); time.Now().Before(end); { // a signal ends a call
		require.ErrorIs(t, w.Wait(id, time.Until(end), true), ErrAgain)
	}
	require.Zero(t, lostPeers(w)+lostPeers(m.servers[0]))
	heal() // which closes the connection: what was swallowed is missing
	lostWithin(t, func() error { return wait(w, id) }, "server", 0)
	m.linked()
	require.NoError(t, echo(t, w, m.servers, 5, closed()))
	m.stop()
}
