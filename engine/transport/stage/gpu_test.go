package stage

import (
	"testing"

	"fserver/engine/gpu/fakegpu"
	"fserver/engine/transport/transporttest"
)

// TestGPUContract: memory of a GPU of this host, if it has one.
func TestGPUContract(t *testing.T) {
	fakegpu.Real(t).WarmUp(t)
	transporttest.Run(t, func(tb testing.TB) transporttest.Bed {
		d := fakegpu.Real(tb)
		b := bed(tb, fakegpu.New(), overTCP, Options{Device: d.Device}, true)
		b.Memory, b.Allocates = fakegpu.RealMemory{G: d}, ""
		return b
	})
}
