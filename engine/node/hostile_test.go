package node

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"fserver/engine/conf"
	"fserver/engine/exchange"
	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/all"
	"fserver/engine/wire"
)

// spy is the Fabric of a worker; it keeps the keys that servers give to it.
type spy struct {
	transport.Fabric
	mu   sync.Mutex
	keys []transport.Key
}

func (s *spy) Poll(ev []transport.Event) (int, error) {
	n, err := s.Fabric.Poll(ev)
	for _, e := range ev[:n] {
		if e.Kind == transport.EvFrame && wire.FrameType(e.Data) == wire.TypeBuffers {
			if v, err := wire.Parse[wire.Buffers](e.Data, wire.TypeBuffers); err == nil {
				s.mu.Lock()
				for _, b := range v.List {
					s.keys = append(s.keys, transport.Key{ID: b.Region.ID, Token: b.Region.Token})
				}
				s.mu.Unlock()
			}
		}
	}
	return n, err
}

// hostileMesh is a mesh whose workers are spied on, in the first of their Fabrics,
// and whose servers' logs are kept.
type hostileMesh struct {
	*mesh
	spies []*spy
	logs  []*observer.ObservedLogs
}

func newHostileMesh(t *testing.T, s shape, way ...string) *hostileMesh {
	h := &hostileMesh{}
	h.mesh = newMesh(t, func(cfg *conf.Config, g transport.Gate, log *zap.Logger) ([]transport.Fabric, error) {
		list, err := openFabrics(cfg, g, log)
		if err == nil && cfg.Role == conf.Worker {
			s := &spy{Fabric: list[0]}
			h.spies = append(h.spies, s)
			list[0] = s
		}
		return list, err
	}, s, way...)
	for _, n := range h.servers {
		require.True(t, n.driver.Own())
		core, logs := observer.New(zapcore.WarnLevel)
		n.log = zap.New(core)
		n.driver.Disown()
		h.logs = append(h.logs, logs)
	}
	return h
}

// attack lets worker i send ops to server 0 behind the engine's back.
func (h *hostileMesh) attack(i int, ops ...transport.Op) {
	n := h.workers[i]
	require.True(h.tb, n.driver.Own())
	defer n.driver.Disown()
	for end := time.Now().Add(10 * time.Second); len(ops) > 0; {
		k, err := n.peers[0].link.conn.Post(ops)
		require.NoError(h.tb, err)
		ops = ops[k:]
		require.True(h.tb, time.Now().Before(end))
	}
}

// TestHostileWorker lets worker 1 of two, which passed the gate, do what no
// worker does. Its server says so once, tells the application, and loses no other
// worker.
func TestHostileWorker(t *testing.T) {
	for _, way := range [][]string{
		{"FSERVER_TLS=off", "FSERVER_TRANSPORT=tcp"},
		{"FSERVER_TLS=on", "FSERVER_TRANSPORT=tcp", "FSERVER_SECRET=a secret of some length"},
		{"FSERVER_CMA=staged", "FSERVER_TRANSPORT=cma"},
		{"PS_DROP_MSG=10", "PS_RESEND=1", "PS_RESEND_TIMEOUT=5", "FSERVER_TRANSPORT=tcp"},
	} {
		for _, c := range []struct {
			name string
			op   func(own, other transport.Key) transport.Op
			text string
		}{
			{"the other worker's key", func(_, other transport.Key) transport.Op {
				return transport.Op{Kind: transport.OpWrite, Key: other}
			}, "the key was given to another peer"},
			{"out of range", func(own, _ transport.Key) transport.Op {
				return transport.Op{Kind: transport.OpWrite, Key: own, Off: 1 << 63}
			}, "out of bounds of key"},
			{"a wrong token", func(own, _ transport.Key) transport.Op {
				own.Token++
				return transport.Op{Kind: transport.OpWrite, Key: own}
			}, "a wrong token"},
			{"a frame of garbage", func(_, _ transport.Key) transport.Op {
				return transport.Op{Kind: transport.OpFrame, Frame: []byte{33, 0xff, 0xff, 0xff, 0xff, 0xff}}
			}, "wire: "},
			{"a frame of a scheduler", func(_, _ transport.Key) transport.Op {
				return transport.Op{Kind: transport.OpFrame, Frame: []byte{byte(wire.TypeGo)}}
			}, ""},
		} {
			t.Run(strings.TrimPrefix(way[0], "FSERVER_")+" "+c.name, func(t *testing.T) {
				m := newHostileMesh(t, shape{2, 1, 1}, way...)
				round := func() {
					done := make(chan error, 1)
					go func() { done <- serve(t, m.servers[0], 1) }()
					var ids []uint64
					for _, w := range m.workers {
						ids = append(ids, pushPull(t, w, []exchange.Tensor{tensor(t, 1, 9)}, []exchange.Tensor{tensor(t, 1, 9)}))
					}
					for i, w := range m.workers {
						require.NoError(t, wait(w, ids[i]))
					}
					require.NoError(t, <-done)
				}
				round()
				require.Len(t, m.spies[0].keys, 1)
				require.Len(t, m.spies[1].keys, 1)
				other, own := m.spies[0].keys[0], m.spies[1].keys[0]
				victim := m.servers[0]
				require.True(t, victim.driver.Own())
				require.Empty(t, m.logs[0].All())
				victim.driver.Disown()

				x := tensor(t, 1, 8)
				fill(x, 99)
				op := c.op(own, other)
				op.Src = []mem.Span{x.Span}
				m.attack(1, op)
				lostWithin(t, func() error { _, err := getBatch(victim); return err }, "worker", 1)

				// Worker 0 is still connected, and its buffer is as it was.
				id := pushPull(t, m.workers[0], []exchange.Tensor{tensor(t, 1, 9)}, nil)
				require.ErrorIs(t, m.workers[0].Wait(id, 50*time.Millisecond, true), ErrAgain, "the batch is not complete, as worker 1 is gone")
				require.True(t, victim.driver.Own())
				defer victim.driver.Disown()
				require.Contains(t, victim.links, victim.peers[0].link.conn)
				var lines []string
				for _, e := range m.logs[0].All() {
					if e.Message != "a node is lost" {
						lines = append(lines, e.Message+": "+e.ContextMap()["error"].(string))
					}
				}
				require.Len(t, lines, 1)
				require.Contains(t, lines[0], c.text)
				if strings.HasPrefix(c.name, "a frame") { // the transport reports what a peer writes
					require.Contains(t, lines[0], `(the peer runs "fserver `+Version+`", this node "fserver `+Version+`": run the same version on both; `)
				}
			})
		}
	}
}

// TestTLSMesh brings a cluster up over TLS, and lets in nobody who does not fit.
func TestTLSMesh(t *testing.T) {
	const secret = "FSERVER_SECRET=a secret of some length"
	way := []string{"FSERVER_TRANSPORT=tcp", "FSERVER_TLS=on", secret}
	oneToOne(t, way...)

	m := newMesh(t, openFabrics, shape{1, 1, 1}, way...)
	_, port := splitPort(t, m.scheduler.Info().Address)
	b, err := Probe(append(shape{1, 1, 1}.settings("worker", 0, 0, port), way...), 5*time.Second)
	require.NoError(t, err)
	require.Contains(t, string(b), `"accepted":true`)
	for want, settings := range map[string][]string{
		"the peer speaks TLS (set FSERVER_TLS=on":                    {secret},
		"the peer's certificate does not come from our secret":       {"FSERVER_TLS=on", "FSERVER_SECRET=another secret, also long"},
		"FSERVER_SECRET, FSERVER_CLUSTER and FSERVER_TLS_* must fit": {"FSERVER_TLS=on", "FSERVER_CLUSTER=other", secret},
	} {
		n, err := Open(append(shape{1, 1, 1}.settings("worker", 0, 0, port), settings...), m.buffers)
		require.NoError(t, err)
		start := time.Now()
		err = ready(n)
		require.ErrorContains(t, err, want)
		require.EqualValues(t, 22, Errno(err), "%v", err)
		require.Less(t, time.Since(start), 10*time.Second)
		require.NoError(t, n.Free())
	}
	m.stop()

	plain := newMesh(t, openFabrics, shape{1, 1, 1}, "FSERVER_TRANSPORT=tcp", secret)
	_, port = splitPort(t, plain.scheduler.Info().Address)
	n, err := Open(append(shape{1, 1, 1}.settings("worker", 0, 0, port), way...), plain.buffers)
	require.NoError(t, err)
	require.ErrorContains(t, ready(n), "the peer does not speak TLS")
	require.NoError(t, n.Free())
	plain.stop()
}

// certified is the settings of a node with a certificate of its own and no secret.
func certified(t *testing.T) []string {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	c := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, c, c, key.Public(), key)
	require.NoError(t, err)
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	require.NoError(t, err)
	dir := t.TempDir()
	for name, block := range map[string]*pem.Block{
		"cert": {Type: "CERTIFICATE", Bytes: der}, "key": {Type: "PRIVATE KEY", Bytes: secret},
	} {
		require.NoError(t, os.WriteFile(dir+"/"+name, pem.EncodeToMemory(block), 0o600))
	}
	return []string{"FSERVER_TRANSPORT=tcp", "FSERVER_TLS=on", "FSERVER_TLS_CERT=" + dir + "/cert", "FSERVER_TLS_KEY=" + dir + "/key"}
}

// TestTLSWithCertificates brings a cluster up with a certificate that its nodes share, and
// no secret, and lets nobody in with another one.
func TestTLSWithCertificates(t *testing.T) {
	way := certified(t)
	oneToOne(t, way...)

	m := newMesh(t, openFabrics, shape{1, 1, 1}, way...)
	_, port := splitPort(t, m.scheduler.Info().Address)
	n, err := Open(shape{1, 1, 1}.settings("worker", 0, 0, port, certified(t)...), m.buffers)
	require.NoError(t, err)
	err = ready(n)
	require.ErrorContains(t, err, "certificate")
	require.EqualValues(t, 22, Errno(err), "%v", err)
	require.NoError(t, n.Free())
	m.stop()
}

// TestOneSidedSecret gives both sides a clear error, whichever has the secret, and if
// each has one of its own.
func TestOneSidedSecret(t *testing.T) {
	const secret = "FSERVER_SECRET=a secret of some length"
	for _, c := range []struct{ scheduler, member []string }{
		{[]string{secret}, nil}, {nil, []string{secret}}, {[]string{secret}, []string{secret + "!"}},
	} {
		m := newCluster(t, openFabrics)
		core, logs := observer.New(zapcore.WarnLevel)
		cfg, _, err := conf.Parse(shape{1, 1, 1}.settings("scheduler", 0, 0, "0", c.scheduler...), all.Ways())
		require.NoError(t, err)
		s, err := open(cfg, zap.New(core), m.buffers, openFabrics, nil)
		require.NoError(t, err)
		_, port := splitPort(t, s.Info().Address)
		n, err := Open(append(shape{1, 1, 1}.settings("worker", 0, 0, port), c.member...), m.buffers)
		require.NoError(t, err)
		err = ready(n)
		require.ErrorContains(t, err, "FSERVER_SECRET must be the same on all nodes")
		require.EqualValues(t, 22, Errno(err))
		require.NoError(t, n.Free())
		require.Eventually(t, func() bool { return logs.FilterMessage("connection refused").Len() == 1 }, 10*time.Second, time.Millisecond)
		require.Contains(t, logs.FilterMessage("connection refused").All()[0].ContextMap()["error"], "FSERVER_SECRET must be the same on all nodes")
		require.NoError(t, s.Free())
	}
}
