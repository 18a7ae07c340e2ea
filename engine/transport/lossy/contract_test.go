package lossy_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/transport"
	"fserver/engine/transport/inproc"
	"fserver/engine/transport/lossy"
	"fserver/engine/transport/tcp"
	"fserver/engine/transport/transporttest"
)

// wrap checks that what comes is a Binder if inner is.
func wrap(tb testing.TB, inner transport.Fabric, o lossy.Options) (transport.Fabric, error) {
	f, err := lossy.Wrap(inner, o)
	_, want := inner.(transport.Binder)
	_, binds := f.(transport.Binder)
	require.Equal(tb, want && err == nil, binds)
	return f, err
}

// bed is a Network of its own for each test, with losses.
func bed(faults inproc.Faults, o lossy.Options) func(testing.TB) transporttest.Bed {
	return func(tb testing.TB) transporttest.Bed {
		net := inproc.New(1)
		net.SetFaults(faults)
		return transporttest.Bed{
			Open: func(w transporttest.Options) (transport.Fabric, error) {
				f, err := net.Open(inproc.Options{Listen: w.Listen, Gate: w.Gate, Limits: w.Limits})
				if err != nil {
					return nil, err
				}
				return wrap(tb, f, o)
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

// TestContractOverTCP: what it wraps is a Binder.
func TestContractOverTCP(t *testing.T) {
	transporttest.Run(t, func(tb testing.TB) transporttest.Bed {
		return transporttest.Bed{Open: func(w transporttest.Options) (transport.Fabric, error) {
			o := tcp.Options{Gate: w.Gate, Limits: w.Limits}
			if w.Listen {
				o.Listen = "127.0.0.1:0"
			}
			f, err := tcp.Open(o)
			if err != nil {
				return nil, err
			}
			return wrap(tb, f, lossy.Options{Resend: true, Timeout: time.Minute})
		}}
	})
}
