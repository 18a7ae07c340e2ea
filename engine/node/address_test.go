package node

import (
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"fserver/engine/conf"
	"fserver/engine/exchange"
	"fserver/engine/topo"
	"fserver/engine/transport"
	"fserver/engine/transport/all"
	"fserver/engine/transport/inproc"
	"fserver/engine/wire"
)

// farAway is a Fabric with an address of so many bytes.
type farAway struct {
	transport.Fabric
	size int
}

func (f farAway) Addr() transport.Addr {
	return transport.Addr("rails:" + strings.Repeat("a", f.size-len("rails:")))
}

// TestLongAddress: a node whose addresses peers cannot be told says so when it is opened.
func TestLongAddress(t *testing.T) {
	cfg := settingsOf(t, "STEPMESH_BACKEND=CPU DMLC_NUM_WORKER=1 DMLC_NUM_SERVER=1 DMLC_NODE_RANK=0")
	for _, c := range []struct {
		planes, size int
		want         string
	}{
		{1, wire.MaxAddr + 1, "aaa... has 4097 bytes, and peers are told of at most 4096"},
		{5, wire.MaxAddr, "the 5 addresses have 20480 bytes, and peers are told of at most 16384"},
	} {
		_, err := open(cfg, zap.NewNop(), exchange.NewBuffers(), func(cfg *conf.Config, g transport.Gate, log *zap.Logger) (far []transport.Fabric, err error) {
			for range c.planes {
				list, err := over(inproc.New())(cfg, g, log)
				require.NoError(t, err)
				far = append(far, farAway{list[0], c.size})
			}
			return far, nil
		}, nil)
		require.ErrorContains(t, err, c.want+": use fewer interfaces and devices (DMLC_INTERFACE)")
	}
}

func settingsOf(t *testing.T, settings string) *conf.Config {
	t.Helper()
	base := []string{"DMLC_ROLE=server", "DMLC_PS_ROOT_PORT=7000"}
	cfg, _, err := conf.Parse(append(base, strings.Fields(settings)...), all.Ways())
	require.NoError(t, err, settings)
	return cfg
}

// TestAddress: what is named comes first, then the route to a scheduler elsewhere, then loopback.
func TestAddress(t *testing.T) {
	for settings, want := range map[string]string{
		"":                                  "127.0.0.1",
		"DMLC_INTERFACE=auto":               "127.0.0.1",
		"DMLC_PS_ROOT_URI=localhost":        "127.0.0.1",
		"DMLC_PS_ROOT_URI=127.8.8.8":        "127.0.0.1",
		"DMLC_PS_ROOT_URI=::ffff:127.0.0.1": "127.0.0.1",
		"DMLC_PS_ROOT_URI=::1":              "127.0.0.1",
		"DMLC_NODE_HOST=::1":                "::1",
		"DMLC_INTERFACE=lo":                 "127.0.0.1",
		"DMLC_PS_ROOT_URI=10.0.0.9 DMLC_INTERFACE=lo":                                           "127.0.0.1",
		"DMLC_PS_ROOT_URI=10.0.0.9 DMLC_INTERFACE=lo DMLC_NODE_HOST=10.0.0.8":                   "10.0.0.8",
		"DMLC_PS_ROOT_URI=localhost DMLC_INTERFACE=auto DMLC_NODE_HOST=10.0.0.8":                "127.0.0.1",
		"DMLC_PS_ROOT_URI=localhost DMLC_INTERFACE=auto DMLC_NODE_HOST=::1 DMLC_ROLE=scheduler": "::1",
		"DMLC_LOCAL=1 DMLC_PS_ROOT_URI=10.0.0.9 DMLC_NODE_HOST=10.0.0.8 DMLC_INTERFACE=eth9":    "127.0.0.1",
	} {
		got, err := address(settingsOf(t, settings))
		require.NoError(t, err, settings)
		require.Equal(t, want, got, settings)
	}
	_, err := address(settingsOf(t, "DMLC_PS_ROOT_URI=10.0.0.9 DMLC_INTERFACE=eth9"))
	require.ErrorContains(t, err, "node: DMLC_INTERFACE=eth9: no such network interface (this host has ")
	_, err = address(settingsOf(t, "DMLC_PS_ROOT_URI=nobody.invalid DMLC_ROLE=scheduler"))
	require.ErrorContains(t, err, "node: no route to the scheduler's host nobody.invalid: ")
	for name, list := range addressesHere(t) {
		for _, at := range list { // the way to itself, and by the name of its interface
			got, err := address(settingsOf(t, "DMLC_PS_ROOT_URI="+at))
			require.NoError(t, err)
			require.Equal(t, at, got)
		}
		got, err := address(settingsOf(t, "DMLC_PS_ROOT_URI=10.0.0.9 DMLC_INTERFACE="+name))
		require.NoError(t, err)
		require.Contains(t, list, got)
	}
}

// TestOwnAddress: of the addresses of a name, a node takes one of its host, and loopback last.
func TestOwnAddress(t *testing.T) {
	here := []netip.Prefix{}
	for _, p := range []string{"127.0.0.1/8", "::1/128", "10.0.0.5/24", "fd00::5/64", "fe80::5/64"} {
		here = append(here, netip.MustParsePrefix(p))
	}
	for found, want := range map[string]string{
		"10.0.0.5":                   "10.0.0.5",
		"127.0.1.1":                  "127.0.1.1", // of /etc/hosts in Debian
		"127.0.1.1 10.0.0.5":         "10.0.0.5",
		"::1 127.0.1.1 fe80::5":      "fe80::5",
		"fe80::5%eth0 fd00::5":       "fd00::5",
		"fd00::5 10.0.0.5":           "10.0.0.5",
		"::ffff:10.0.0.5":            "10.0.0.5",
		"10.0.0.4 10.0.0.5 10.0.0.6": "10.0.0.5", // of all pods of a service
		"10.0.0.4 fd00::4 127.0.1.1": "127.0.1.1",
		"10.0.0.4 fd00::4":           "invalid IP",
		"":                           "invalid IP",
	} {
		var list []netip.Addr
		for _, a := range strings.Fields(found) {
			list = append(list, netip.MustParseAddr(a))
		}
		require.Equal(t, want, ownAddress(list, here).String(), found)
	}
}

// TestOnlyHere: where a name means loopback, other hosts cannot connect, and a node that takes connections says so.
func TestOnlyHere(t *testing.T) {
	for _, c := range []struct{ settings, host, want string }{
		{"DMLC_PS_ROOT_URI=a", "127.0.1.1", "a is 127.0.1.1 here, so other hosts cannot connect "},
		{"DMLC_PS_ROOT_URI=a DMLC_NODE_HOST=b", "127.0.1.1", "b is 127.0.1.1 here, so other hosts cannot connect "},
		{"DMLC_PS_ROOT_URI=a DMLC_ROLE=scheduler DMLC_INTERFACE=eth0", "127.0.1.1", "a is 127.0.1.1 here"},
		{"DMLC_PS_ROOT_URI=a DMLC_INTERFACE=lo", "127.0.0.1", ""},
		{"DMLC_PS_ROOT_URI=a", "10.0.0.5", ""},
		{"DMLC_PS_ROOT_URI=a DMLC_NODE_HOST=localhost", "127.0.0.1", ""},
		{"DMLC_PS_ROOT_URI=127.0.1.1", "127.0.0.1", ""},
		{"", "127.0.0.1", ""},
	} {
		why := onlyHere(settingsOf(t, c.settings), c.host)
		require.Equal(t, c.want != "", why != "", c.settings)
		require.True(t, strings.HasPrefix(why, c.want), why)
	}
}

// TestOwnHost: an address stays as it is, and so does a name that nobody knows.
func TestOwnHost(t *testing.T) {
	for _, name := range []string{"10.9.9.9", "::", "0.0.0.0", "localhost", "LOCALHOST", "nobody.invalid"} {
		got, err := ownHost(settingsOf(t, ""), name)
		require.NoError(t, err)
		require.Equal(t, name, got)
	}
	name, err := os.Hostname()
	require.NoError(t, err)
	if got, err := ownHost(settingsOf(t, ""), name); err == nil && got != name { // it can be resolved
		l, err := net.Listen("tcp", net.JoinHostPort(got, "0"))
		require.NoError(t, err)
		require.NoError(t, l.Close())
	}
}

// addressesHere is the addresses of this host that others can use, by interface.
func addressesHere(t *testing.T) map[string][]string {
	found, err := topo.Local().Addresses()
	require.NoError(t, err)
	here := map[string][]string{}
	for name, list := range found {
		for _, p := range list {
			if a := p.Addr(); !a.IsLoopback() && !a.IsLinkLocalUnicast() {
				here[name] = append(here[name], a.String())
			}
		}
	}
	return here
}

// TestOpenIsTold: a node warns where other hosts can connect and neither secret nor certificate keeps
// them out.
func TestOpenIsTold(t *testing.T) {
	told := func(settings string) bool {
		core, logs := observer.New(zapcore.WarnLevel)
		cfg := settingsOf(t, settings)
		f, err := openBase(cfg, newGate(cfg), zap.New(core))
		require.NoError(t, err, settings)
		require.NoError(t, f.Close())
		if logs.Len() > 0 {
			require.Contains(t, logs.All()[0].Message, "without a secret")
		}
		return logs.Len() > 0
	}
	for _, closed := range []string{"", "DMLC_NODE_HOST=localhost", "DMLC_NODE_HOST=127.0.0.1", "DMLC_INTERFACE=lo"} {
		require.False(t, told(closed), closed)
	}
	for name, list := range addressesHere(t) {
		for _, open := range []string{"DMLC_NODE_HOST=" + list[0], "DMLC_INTERFACE=" + name, ""} {
			open += " DMLC_PS_ROOT_URI=" + list[0]
			require.True(t, told(open), open)
			require.False(t, told(open+" FSERVER_SECRET=0123456789abcdef"), open)
			require.False(t, told(open+" FSERVER_SECRET=0123456789abcdef FSERVER_TLS=on"), open)
			require.False(t, told(open+" "+strings.Join(certified(t), " ")), open)
		}
	}
}
