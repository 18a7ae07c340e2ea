package cudaipc

import (
	"testing"

	"fserver/engine/gpu/fakegpu"
	"fserver/engine/transport/transporttest"
	"fserver/engine/transport/transporttest/overtest"
)

func TestEachCallFails(t *testing.T) {
	for _, c := range []struct {
		name               string
		pieces, own, alone bool
	}{
		{name: "mapped"},
		{name: "pieces", pieces: true},
		{name: "own", own: true},
		{name: "staged", alone: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			newGPU := func() *fakegpu.GPU {
				g := fakegpu.New()
				g.Pieces, g.Alone = c.pieces, c.alone
				return g
			}
			overtest.EachCallFails(t, newGPU, func(g *fakegpu.GPU, o transporttest.Options) (*Fabric, error) {
				return shares(g, overCMA, !c.own)(o)
			})
		})
	}
}
