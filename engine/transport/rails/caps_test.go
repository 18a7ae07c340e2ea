package rails

import (
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/mem"
	"fserver/engine/transport"
)

type able struct {
	transport.Fabric
	caps transport.Caps
}

func (a able) Caps() transport.Caps { return a.caps }

// TestCaps: memory of a GPU is taken if all members take it, but for those that never worked.
func TestCaps(t *testing.T) {
	none, one, other, away := able{}, able{caps: transport.Caps{GPU: mem.GPU(0), LocalKeys: true}}, able{caps: transport.Caps{GPU: mem.GPU(1)}}, &transport.Absent{}
	for _, c := range []struct {
		members []transport.Fabric
		gpu     mem.Device
	}{
		{[]transport.Fabric{one, one}, mem.GPU(0)},
		{[]transport.Fabric{away, one, away}, mem.GPU(0)},
		{[]transport.Fabric{one, none}, mem.CPU},
		{[]transport.Fabric{none, one}, mem.CPU},
		{[]transport.Fabric{one, other, one}, mem.CPU},
		{[]transport.Fabric{none, away}, mem.CPU},
	} {
		f := &Fabric{members: c.members}
		require.Equal(t, c.gpu, f.Caps().GPU)
	}
}
