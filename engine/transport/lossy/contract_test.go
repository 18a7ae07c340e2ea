package lossy_test

import (
	"testing"
	"time"

	"fserver/engine/transport"
	"fserver/engine/transport/inproc"
	"fserver/engine/transport/lossy"
	"fserver/engine/transport/transporttest"
)

// bed is a Network of its own for each test, with losses.
func bed(faults inproc.Faults, o lossy.Options) func(testing.TB) transporttest.Bed {
	return func(testing.TB) transporttest.Bed {
		net := inproc.New(1)
		net.SetFaults(faults)
		return transporttest.Bed{
			Open: func(w transporttest.Options) (transport.Fabric, error) {
				f, err := net.Open(inproc.Options{Listen: w.Listen, Gate: w.Gate, Limits: w.Limits})
				if err != nil {
					return nil, err
				}
				return lossy.Wrap(f, o)
			},
			Kill: func(f transport.Fabric) { net.Kill(f.Name()[len("inproc/"):]) },
		}
	}
}

func TestContract(t *testing.T) {
	transporttest.Run(t, bed(inproc.Faults{}, lossy.Options{Resend: true, Timeout: time.Minute}))
}

func TestContractWithoutResend(t *testing.T) {
	transporttest.Run(t, bed(inproc.Faults{}, lossy.Options{}))
}

func TestContractUnderLoss(t *testing.T) {
	transporttest.Run(t, bed(inproc.Chaos, lossy.Options{Resend: true, Drop: 0.1, Timeout: 2 * time.Millisecond}))
}
