package stage

import (
	"testing"

	"fserver/engine/gpu/fakegpu"
	"fserver/engine/transport/transporttest"
	"fserver/engine/transport/transporttest/overtest"
)

func TestEachCallFails(t *testing.T) {
	for name, events := range map[string]bool{"words": false, "events": true} {
		t.Run(name, func(t *testing.T) {
			overtest.EachCallFails(t, fakegpu.New, func(g *fakegpu.GPU, o transporttest.Options) (*Fabric, error) {
				return wraps(overTCP, Options{Device: g, Events: events})(o)
			})
		})
	}
}
