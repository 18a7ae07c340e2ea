package node

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/cshim/verbs/fakeverbs"
	"fserver/engine/transport"
)

// hostSaid is what DescribeHost says of transports.
type hostSaid struct {
	Error string     `json:"transport_error"`
	Lost  []string   `json:"device_errors"`
	Ways  []foundWay `json:"transports"`
}

func describedHost(t *testing.T, settings ...string) (d hostSaid) {
	t.Helper()
	b, err := DescribeHost(settings)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(b, &d))
	return d
}

// Settings that name a transport say what keeps a node from it, in the node's words, whether or not they describe a
// cluster.
func TestDescribeHostWithoutItsTransport(t *testing.T) {
	fakes(t)
	fakeverbs.Set("devices", 0)
	kernelShows(t)
	const tls, secret = "FSERVER_TLS=1", "FSERVER_SECRET=0123456789abcdef"
	for _, c := range []struct {
		want     string
		settings []string
	}{
		{"", nil},
		{"", []string{"FSERVER_TRANSPORT=tcp"}},
		{"", []string{"FSERVER_TRANSPORT=cma"}},
		{"FSERVER_TRANSPORT=verbs: ", []string{"FSERVER_TRANSPORT=verbs"}},
		{"FSERVER_TRANSPORT=verbs: ", []string{"DMLC_PS_VAN_TYPE=ibverbs"}},
		{"FSERVER_TLS is on, and RDMA encrypts nothing", []string{"FSERVER_TRANSPORT=verbs", tls, secret}},
	} {
		require.Contains(t, describedHost(t, c.settings...).Error, c.want, c.settings)
		for _, role := range []string{"worker", "server"} {
			settings := append([]string{"DMLC_ROLE=" + role, "DMLC_PS_ROOT_PORT=7000"}, c.settings...)
			said := describedHost(t, settings...).Error
			if c.want == "" {
				require.Empty(t, said, settings)
				continue
			}
			_, err := Open(settings, NewBuffers())
			require.EqualError(t, err, said)
			require.Contains(t, said, "set FSERVER_TRANSPORT=auto")
		}
		require.Empty(t, describedHost(t, append([]string{"DMLC_ROLE=scheduler", "DMLC_PS_ROOT_PORT=7000"}, c.settings...)...).Error)
	}
}

// Of several devices that are named one may fail. Nothing stays open.
func TestDescribeHostWithSomeDevices(t *testing.T) {
	fakes(t)
	kernelShows(t, "fake0", "fake1")
	named := func(devices string) hostSaid {
		return describedHost(t, "DMLC_ROLE=worker", "DMLC_PS_ROOT_PORT=7000", "FSERVER_TRANSPORT=verbs", "FSERVER_RDMA_DEVICE="+devices)
	}
	all := named("fake0,fake1")
	require.Empty(t, all.Error)
	require.Empty(t, all.Lost)
	some := named("fake0,nosuch")
	require.Empty(t, some.Error)
	require.Len(t, some.Lost, 1)
	require.Contains(t, some.Lost[0], "no RDMA device nosuch")
	require.Contains(t, named("nosuch,neither").Error, "no RDMA device nosuch")
	fakeverbs.Set("locked", 0)
	require.NotEmpty(t, named("fake0").Error)
}

// What the doctor tests with two processes follows from the settings.
func TestDescribeHostNamesATest(t *testing.T) {
	for _, c := range []struct {
		test      transport.Test
		otherwise string
		settings  []string
	}{
		{transport.WritesPermittedMemory, "two copies through shared memory", nil},
		{transport.WritesPermittedMemory, "two copies through shared memory", []string{"FSERVER_LOG=wrong"}},
		{transport.WritesMemory, "two copies through shared memory", []string{"FSERVER_PTRACER=0"}},
		{transport.WritesPermittedMemory, "FSERVER_CMA=direct cannot be had", []string{"FSERVER_CMA=direct"}},
		{"", "", []string{"FSERVER_CMA=staged"}},
	} {
		for _, w := range describedHost(t, c.settings...).Ways {
			if w.Name == "cma" {
				require.True(t, w.Inside)
				require.Len(t, w.Findings, 1)
				require.Equal(t, c.test, w.Findings[0].Test)
				require.Equal(t, c.otherwise, w.Findings[0].Else)
			}
			require.Equal(t, w.Over == "cma" || w.Name == "cma", w.Inside, w.Name)
		}
	}
}
