package verbs

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/cshim/verbs/fakeverbs"
	"fserver/engine/transport"
	"fserver/engine/transport/inproc"
	"fserver/engine/transport/tcp"
	"fserver/engine/transport/transporttest"
)

// library is the fake, or the system's where FSERVER_TEST_RDMA is set.
func library(t testing.TB) string {
	t.Helper()
	if onHardware() {
		return ""
	}
	path, err := fakeverbs.Library()
	if err != nil {
		t.Skip(err)
	}
	fakeverbs.Reset()
	fakeverbs.Set("cqe", 1<<15)
	t.Cleanup(fakeverbs.Reset)
	return path
}

func onHardware() bool { return os.Getenv("FSERVER_TEST_RDMA") != "" }

// devices are two, which reach each other.
func devices() [2]string {
	if onHardware() {
		return [2]string{"rxe0", "rxe1"}
	}
	return [2]string{"fake0", "fake1"}
}

// bed opens each second Fabric on the other device, over what under opens.
func bed(t testing.TB, under func(transporttest.Options) (transport.Fabric, error)) transporttest.Bed {
	lib := library(t)
	opened := 0
	return transporttest.Bed{
		Open: func(o transporttest.Options) (transport.Fabric, error) {
			in, err := under(o)
			if err != nil {
				return nil, err
			}
			device := devices()[opened%2]
			opened++
			f, err := Open(Options{Inner: in, Library: lib, Device: device, Limits: o.Limits})
			if err != nil {
				require.NoError(t, in.Close())
				return nil, err
			}
			return f, nil
		},
		Offloads: true,
		Alone:    true,
	}
}

// TestContract is over Conns that are set up in memory, so that a peer can be killed.
func TestContract(t *testing.T) {
	transporttest.Run(t, func(tb testing.TB) transporttest.Bed {
		net := inproc.New(1)
		b := bed(tb, func(o transporttest.Options) (transport.Fabric, error) {
			return net.Open(inproc.Options{Listen: o.Listen, Gate: o.Gate, Limits: o.Limits})
		})
		// The kernel closes the sockets of a process that dies and destroys its queue pairs.
		b.Kill = func(tf transport.Fabric) {
			f := tf.(*Fabric)
			net.Kill(strings.TrimPrefix(f.inner.Name(), "inproc/"))
			f.mu.Lock()
			defer f.mu.Unlock()
			for _, c := range f.conns {
				require.NoError(tb, c.qp.Fail())
			}
		}
		return b
	})
}

// TestContractTCP is over Conns that are set up as nodes do it.
func TestContractTCP(t *testing.T) {
	if transporttest.RaceEnabled {
		t.Skip("with the race detector, TestContract stands for this one")
	}
	transporttest.Run(t, func(tb testing.TB) transporttest.Bed {
		return bed(tb, func(o transporttest.Options) (transport.Fabric, error) {
			in := tcp.Options{Gate: o.Gate, Limits: o.Limits}
			if o.Listen {
				in.Listen = "127.0.0.1:0"
			}
			return tcp.Open(in)
		})
	})
}
