package node

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/conf"
	"fserver/engine/transport"
	"fserver/engine/transport/cma"
)

// long skips a test that waits or repeats for seconds.
func long(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds: not with -short")
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
	} {
		for _, mode := range []string{"caller", "thread"} {
			t.Run(w.name+" "+mode, func(t *testing.T) {
				if w.name == "cma" {
					skipWithoutCMA(t)
				}
				test(t, append(w.settings, "FSERVER_PROGRESS="+mode)...)
			})
		}
	}
}

// skipWithoutCMA skips where the kernel lets no process write into another.
func skipWithoutCMA(t *testing.T) {
	f, err := cma.Open(cma.Options{Gate: newGate(&conf.Config{}), Mode: cma.Direct})
	var no *transport.ErrUnavailable
	if errors.As(err, &no) {
		t.Skip(no.Error())
	}
	require.NoError(t, err)
	require.NoError(t, f.Close())
}
