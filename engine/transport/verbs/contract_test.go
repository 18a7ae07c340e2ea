package verbs

import (
	"errors"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/cshim/verbs/fakeverbs"
	"fserver/engine/mem"
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

func onHardware() bool { return os.Getenv("FSERVER_TEST_RDMA") != "" }

// devices are two, which reach each other.
func devices() [2]string {
	if onHardware() {
		return [2]string{"rxe0", "rxe1"}
	}
	return [2]string{"fake0", "fake1"}
}

// known is host memory that all Fabrics of a test know, as they must know what they send.
type known struct {
	fabrics []*Fabric
	regions []mem.Region
}

func (k *known) add(f *Fabric) {
	k.fabrics = append(k.fabrics, f)
	for _, r := range k.regions {
		_, _ = f.Register(r)
	}
}

func (k *known) Alloc(n uint64) (mem.Region, error) {
	r, err := mem.Map(n)
	if err == nil {
		k.regions = append(k.regions, r)
		for _, f := range k.fabrics {
			_, _ = f.Register(r) // of one that is closed
		}
	}
	return r, err
}

// Free is called when the Fabrics are closed.
func (k *known) Free(r mem.Region) error { return mem.Unmap(r) }

func (k *known) Load(dst []byte, s mem.Span) error {
	copy(dst, s.Bytes())
	return nil
}

func (k *known) Store(s mem.Span, src []byte) error {
	copy(s.Bytes(), src)
	return nil
}

// TestContract opens each second Fabric on the other device. Sources are registered, as exchange
// does it; TestLockedMemory sends one that is not.
func TestContract(t *testing.T) {
	transporttest.Run(t, func(tb testing.TB) transporttest.Bed {
		lib := library(tb)
		opened := 0
		all := &known{}
		return transporttest.Bed{
			Memory: all,
			Open: func(o transporttest.Options) (transport.Fabric, error) {
				opts := Options{Options: link.Options{Gate: o.Gate, Limits: o.Limits}, Library: lib, Device: devices()[opened%2]}
				if o.Listen {
					opts.Listen = "127.0.0.1:0"
				}
				f, err := Open(opts)
				if err != nil {
					return nil, err
				}
				opened++
				all.add(f)
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
			_ = c.session.Socket.Close() // it may have ended
			if c.qp != nil {
				err = errors.Join(err, c.qp.Fail())
			}
		}
	})
	return err
}
