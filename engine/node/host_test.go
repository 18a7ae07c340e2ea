package node

import (
	"encoding/json"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/conf"
	"fserver/engine/transport"
	"fserver/engine/transport/all"
	"fserver/engine/wire"
)

func TestDescribeHost(t *testing.T) {
	for _, settings := range [][]string{
		nil,
		{"DMLC_ROLE=worker", "DMLC_PS_ROOT_PORT=7000"},
		{"DMLC_ROLE=worker", "DMLC_PS_ROOT_PORT=7000", "DMLC_INTERFACE=nosuch0", "DMLC_PS_ROOT_URI=127.0.0.1"},
	} {
		_ = library() // if it can be had
		b, err := DescribeHost(settings)
		require.NoError(t, err)
		var d struct {
			NICs   []struct{ Name string }
			Listen string
			Error  string `json:"listen_error"`
			Engine struct{ Transports []string }
			Cores  struct{ Free int }
			Auto   struct{ Why string }
		}
		require.NoError(t, json.Unmarshal(b, &d))
		require.NotEmpty(t, d.NICs)
		require.NotEmpty(t, d.Auto.Why)
		require.Contains(t, d.Engine.Transports, "tcp")
		require.Positive(t, d.Cores.Free)
		switch len(settings) {
		case 2:
			require.Equal(t, "127.0.0.1", d.Listen)
		case 4:
			require.Contains(t, d.Error, "DMLC_INTERFACE=nosuch0")
		}
	}
}

// Settings that demand a GPU say what keeps a node from it, in the node's words.
func TestDescribeHostWithoutItsGPU(t *testing.T) {
	for _, c := range []struct {
		want     string
		settings []string
	}{
		{"", []string{"STEPMESH_GPU=1023"}},
		{"", []string{"STEPMESH_GPU=1023", "FSERVER_TRANSPORT=cma"}},
		{"FSERVER_TRANSPORT=cudaipc: gpu: not available", []string{"STEPMESH_GPU=1023", "FSERVER_TRANSPORT=cudaipc"}},
		{"STEPMESH_BACKEND=GPU: gpu: not available", []string{"STEPMESH_GPU=1023", "STEPMESH_BACKEND=GPU"}},
		{"FSERVER_TRANSPORT=cudaipc with STEPMESH_BACKEND=CPU", []string{"FSERVER_TRANSPORT=cudaipc", "STEPMESH_BACKEND=CPU"}},
	} {
		settings := append([]string{"DMLC_ROLE=server", "DMLC_PS_ROOT_PORT=7000", "DMLC_GROUP_SIZE=1024"}, c.settings...)
		_ = library() // if it can be had
		b, err := DescribeHost(settings)
		require.NoError(t, err)
		var d struct {
			Error string `json:"gpu_error"`
		}
		require.NoError(t, json.Unmarshal(b, &d))
		if c.want == "" {
			require.Empty(t, d.Error)
			continue
		}
		_, err = Open(settings, NewBuffers())
		require.EqualError(t, err, d.Error)
		require.Contains(t, d.Error, c.want)
	}
}

func probed(t *testing.T, address string, more ...string) probe {
	t.Helper()
	host, port, err := net.SplitHostPort(address)
	require.NoError(t, err)
	settings := append([]string{"DMLC_ROLE=worker", "DMLC_PS_ROOT_URI=" + host, "DMLC_PS_ROOT_PORT=" + port}, more...)
	b, err := Probe(settings, 5*time.Second)
	require.NoError(t, err)
	var p probe
	require.NoError(t, json.Unmarshal(b, &p))
	require.Equal(t, address, p.Address)
	return p
}

// A scheduler takes a probe before and while its cluster runs, and nobody in
// the cluster minds.
func TestProbe(t *testing.T) {
	const secret = "FSERVER_SECRET=0123456789abcdef"
	scheduler, err := Open([]string{"DMLC_ROLE=scheduler", "FSERVER_LOG=error", secret}, NewBuffers())
	require.NoError(t, err)
	defer scheduler.Free()
	at := scheduler.Info().Address
	check := func() {
		p := probed(t, at, secret)
		require.True(t, p.Spoke && p.Accepted, p.Error)
		require.Equal(t, "scheduler", p.Role)
		require.Equal(t, "fserver "+Version, p.Build)
		p = probed(t, at)
		require.True(t, p.Spoke && !p.Accepted)
		require.Contains(t, p.Error, "the scheduler has a secret, a worker has none")
		require.Equal(t, wire.SecretOnlyThere, p.Secret)
		p = probed(t, at, "FSERVER_SECRET=another one, quite as long")
		require.True(t, p.Spoke && !p.Accepted)
		require.Contains(t, p.Error, "the proof of")
		require.Equal(t, wire.SecretDiffers, p.Secret)
		p = probed(t, at, secret, "FSERVER_CLUSTER=other")
		require.Contains(t, p.Error, `a worker is of cluster "other"`)
		require.Empty(t, p.Secret)
	}
	check()
	_, port, _ := net.SplitHostPort(at)
	var members []*Node
	for _, role := range []string{"server", "worker"} {
		n, err := Open([]string{"DMLC_ROLE=" + role, "DMLC_PS_ROOT_PORT=" + port, "FSERVER_LOG=error", secret}, NewBuffers())
		require.NoError(t, err)
		defer n.Free()
		members = append(members, n)
	}
	for _, n := range members {
		require.NoError(t, ready(n))
	}
	check()
	for _, n := range append(members, scheduler) {
		require.NoError(t, n.failed())
	}
}

// A probe says who has TLS, whether or not that keeps the two apart.
func TestProbeOverTLS(t *testing.T) {
	const tls, secret = "FSERVER_TLS=on", "FSERVER_SECRET=0123456789abcdef"
	for _, c := range []struct {
		there, here []string
		accepted    bool
		tls         string
	}{
		{[]string{secret, tls}, []string{secret, tls}, true, transport.Both},
		{[]string{secret, tls}, []string{secret}, false, transport.OnlyThere},
		{[]string{secret}, []string{secret, tls}, false, transport.OnlyHere},
		{[]string{secret, tls}, []string{secret + "x", tls}, false, transport.Both},
	} {
		scheduler, err := Open(append([]string{"DMLC_ROLE=scheduler", "FSERVER_LOG=error"}, c.there...), NewBuffers())
		require.NoError(t, err)
		p := probed(t, scheduler.Info().Address, c.here...)
		require.NoError(t, scheduler.Free())
		require.Equal(t, c.tls, p.TLS, p.Error)
		require.Equal(t, c.accepted, p.Accepted, p.Error)
		require.Equal(t, c.accepted, p.Spoke, p.Error)
	}
}

func TestProbeOfAStranger(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	at := l.Addr().String()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = c.Write([]byte("SSH-2.0-OpenSSH_9.2p1\r\n"))
			_ = c.Close()
		}
	}()
	p := probed(t, at)
	require.False(t, p.Spoke || p.Accepted)
	require.Contains(t, p.Error, "not a message of fserver")
	p = probed(t, at, "FSERVER_TLS=on", "FSERVER_SECRET=0123456789abcdef")
	require.False(t, p.Spoke || p.Accepted)
	require.Empty(t, p.TLS)
	require.NoError(t, l.Close())
	p = probed(t, at)
	require.False(t, p.Spoke || p.Accepted)
	require.Contains(t, p.Error, "no process listens at this address")

	_, err = Probe([]string{"DMLC_ROLE=worker"}, time.Second)
	require.ErrorContains(t, err, "DMLC_PS_ROOT_PORT")
}

// auto keeps a cluster on loopback there, and takes an address of this host
// where the scheduler is elsewhere.
func TestAutomaticInterface(t *testing.T) {
	cfg, _, err := conf.Parse([]string{"DMLC_ROLE=server", "DMLC_PS_ROOT_PORT=7000", "DMLC_INTERFACE=auto"}, all.Ways())
	require.NoError(t, err)
	at, err := address(cfg)
	require.NoError(t, err)
	require.Equal(t, "127.0.0.1", at)
	cfg.SchedulerHost = "192.0.2.1"
	route, err := address(cfg)
	if err != nil {
		t.Skipf("this host has no route to another one: %v", err)
	}
	at = near(cfg, route, logger(cfg))
	l, err := net.Listen("tcp", net.JoinHostPort(at, "0"))
	require.NoError(t, err, "an address of this host")
	require.NoError(t, l.Close())
	require.False(t, strings.HasPrefix(at, "127."))
}
