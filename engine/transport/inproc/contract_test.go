package inproc_test

import (
	"fmt"
	"strings"
	"testing"

	"fserver/engine/transport"
	"fserver/engine/transport/inproc"
	"fserver/engine/transport/transporttest"
)

// bed is a Network of its own for each test.
func bed(seed uint64, faults inproc.Faults) func(testing.TB) transporttest.Bed {
	return func(testing.TB) transporttest.Bed {
		net := inproc.New(seed)
		net.SetFaults(faults)
		return transporttest.Bed{
			Open: func(o transporttest.Options) (transport.Fabric, error) {
				return net.Open(inproc.Options{Listen: o.Listen, Gate: o.Gate, Limits: o.Limits})
			},
			Kill: func(f transport.Fabric) {
				net.Kill(strings.TrimPrefix(f.Name(), "inproc/"))
			},
		}
	}
}

func TestContract(t *testing.T) { transporttest.Run(t, bed(1, inproc.Faults{})) }

func TestContractUnderChaos(t *testing.T) {
	seeds := uint64(2)
	if testing.Short() {
		seeds = 1
	}
	for seed := range seeds {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			transporttest.Run(t, bed(seed, inproc.Chaos))
		})
	}
}
