package verbs

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/cshim/verbs/fakeverbs"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
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

func onHardware() bool { return fakeverbs.Real() }

// TestContract opens each second Fabric on the other device. Sources are registered, as exchange
// does it; TestLockedMemory sends one that is not.
func TestContract(t *testing.T) {
	transporttest.Run(t, func(tb testing.TB) transporttest.Bed {
		lib := library(tb)
		opened := 0
		all := &transporttest.Known{}
		return transporttest.Bed{
			Memory: all,
			Open: func(o transporttest.Options) (transport.Fabric, error) {
				opts := Options{Options: link.Options{Gate: o.Gate, Limits: o.Limits}, Library: lib, Device: fakeverbs.Devices()[opened%2]}
				if o.Listen {
					opts.Listen = "127.0.0.1:0"
				}
				f, err := Open(opts)
				if err != nil {
					return nil, err
				}
				opened++
				all.Add(f)
				return f, nil
			},
			Kill: func(f transport.Fabric) {
				require.NoError(tb, kill(f.(*Fabric)))
			},
			Offloads: true,
			Alone:    true,
		}
	})
}

// kill does what the kernel does to a process that dies: it closes the sockets and destroys the
// queue pairs.
func kill(f *Fabric) (err error) {
	f.Listener.Close()
	f.Owned(func() {
		for _, c := range f.conns.All {
			_ = c.session.Socket.Close()      // it may have ended
			if c.qp != nil && !c.destroying { // else another goroutine is destroying it
				err = errors.Join(err, c.qp.Fail())
			}
		}
	})
	return err
}
