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

// bed opens each second Fabric on the other device.
func bed(t testing.TB) transporttest.Bed {
	lib := library(t)
	net := inproc.New(1)
	opened := 0
	wrap := func(in transport.Fabric, o transporttest.Options) (transport.Fabric, error) {
		device := [2]string{"fake0", "fake1"}[opened%2]
		if onHardware() {
			device = [2]string{"rxe0", "rxe1"}[opened%2]
		}
		opened++
		f, err := Open(Options{Inner: in, Library: lib, Device: device, Limits: o.Limits})
		if err != nil {
			require.NoError(t, in.Close())
			return nil, err
		}
		return f, nil
	}
	if onHardware() {
		return transporttest.Bed{Open: func(o transporttest.Options) (transport.Fabric, error) {
			in := tcp.Options{Gate: o.Gate, Limits: o.Limits}
			if o.Listen {
				in.Listen = "127.0.0.1:0"
			}
			f, err := tcp.Open(in)
			if err != nil {
				return nil, err
			}
			return wrap(f, o)
		}, Offloads: true, Alone: true}
	}
	return transporttest.Bed{
		Open: func(o transporttest.Options) (transport.Fabric, error) {
			in, err := net.Open(inproc.Options{Listen: o.Listen, Gate: o.Gate, Limits: o.Limits})
			if err != nil {
				return nil, err
			}
			return wrap(in, o)
		},
		// The kernel closes the sockets of a process that dies and destroys its queue pairs.
		Kill: func(tf transport.Fabric) {
			f := tf.(*Fabric)
			net.Kill(strings.TrimPrefix(f.inner.Name(), "inproc/"))
			f.mu.Lock()
			defer f.mu.Unlock()
			for _, c := range f.conns {
				require.NoError(t, c.qp.Fail())
			}
		},
		Offloads: true, Alone: true,
	}
}

func TestContract(t *testing.T) { transporttest.Run(t, bed) }
