package inproc_test

import (
	"strings"
	"testing"

	"fserver/engine/transport"
	"fserver/engine/transport/inproc"
	"fserver/engine/transport/transporttest"
)

// TestContract has a Network of its own for each test. Package faults runs the suite over it, too.
func TestContract(t *testing.T) {
	transporttest.Run(t, func(testing.TB) transporttest.Bed {
		net := inproc.New()
		return transporttest.Bed{
			Open: func(o transporttest.Options) (transport.Fabric, error) {
				return net.Open(inproc.Options{Listen: o.Listen, Gate: o.Gate, Limits: o.Limits})
			},
			Kill:      func(f transport.Fabric) { net.Kill(strings.TrimPrefix(f.Name(), "inproc/")) },
			Offloads:  true,
			Allocates: "a copy of each frame",
		}
	})
}
