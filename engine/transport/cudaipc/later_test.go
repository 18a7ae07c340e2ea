package cudaipc

import (
	"testing"

	"fserver/engine/gpu/fakegpu"
	"fserver/engine/transport/transporttest/overtest"
)

func TestWaitingKernel(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overCMA)
	overtest.WaitingKernel(t, g, a, b)
}
