package cudaipc

import (
	"testing"

	"fserver/engine/gpu/fakegpu"
	"fserver/engine/transport/transporttest"
)

// TestGPUContractOwn: memory of a GPU of this host, if it has one, in one process, by its own addresses.
func TestGPUContractOwn(t *testing.T) {
	fakegpu.Real(t).WarmUp(t)
	transporttest.Run(t, func(tb testing.TB) transporttest.Bed {
		d := fakegpu.Real(tb)
		b := bed(tb, fakegpu.New(), overCMA, true, false)
		b.Open = opens(d.Device, overCMA, true, false)
		b.Memory, b.Allocates = fakegpu.RealMemory{G: d}, ""
		return b
	})
}
