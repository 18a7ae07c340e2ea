package node

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"fserver/engine/conf"
	"fserver/engine/topo"
)

// TestRailsOf: several interfaces that are named have their addresses and networks, and all else is one.
func TestRailsOf(t *testing.T) {
	of := func(settings string) []rail {
		list, err := railsOf(settingsOf(t, settings), zap.NewNop())
		require.NoError(t, err, settings)
		return list
	}
	for name, at := range addressesHere(t) {
		list := of("DMLC_PS_ROOT_URI=10.0.0.9 DMLC_INTERFACE=lo," + name)
		require.Len(t, list, 2)
		require.Equal(t, rail{"lo", "127.0.0.1", []netip.Prefix{netip.MustParsePrefix("127.0.0.1/8")}, true}, list[0])
		require.Equal(t, name, list[1].name)
		require.Contains(t, at, list[1].host)
		for _, p := range list[1].networks {
			require.Equal(t, netip.MustParseAddr(list[1].host).Is4(), p.Addr().Is4())
		}
		require.Len(t, devicesAt(list), 2)
		require.Empty(t, devicesAt(list[1:]))
		require.Empty(t, of("DMLC_PS_ROOT_URI=10.0.0.9 DMLC_INTERFACE="+name))
		require.Empty(t, of("DMLC_PS_ROOT_URI=10.0.0.9 DMLC_NODE_HOST="+list[1].host+" DMLC_INTERFACE=lo,"+name))
		require.Empty(t, of("DMLC_ROLE=scheduler DMLC_PS_ROOT_URI=10.0.0.9 DMLC_INTERFACE=lo,"+name))
	}
	require.Empty(t, of("DMLC_INTERFACE=auto"), "a cluster on loopback")
	require.Empty(t, of("DMLC_LOCAL=1 DMLC_PS_ROOT_URI=10.0.0.9 DMLC_INTERFACE=auto"))
	require.Empty(t, of(""))
	require.NotPanics(t, func() { networks("nosuch0", "10.0.0.1") })
}

// TestNearRails: auto is what topo says for the address that routes to the scheduler.
func TestNearRails(t *testing.T) {
	cfg := settingsOf(t, "DMLC_PS_ROOT_URI=192.0.2.1 DMLC_INTERFACE=auto")
	route, err := address(cfg)
	if err != nil || conf.Loopback(route) {
		t.Skipf("this host has no route to another one: %v", err)
	}
	var want, got []string
	for _, r := range topo.Local().Read().Rails(0, "", netip.MustParseAddr(route)) {
		if r.Why == "" {
			want = append(want, r.Interface)
		}
	}
	for _, r := range nearRails(cfg, zap.NewNop()) {
		got = append(got, r.name)
	}
	if len(want) < 2 {
		want = nil
	}
	require.Equal(t, want, got)
}
