package cma

import (
	"testing"

	"golang.org/x/sys/unix"

	"fserver/engine/transport"
	"fserver/engine/transport/link"
	"fserver/engine/transport/transporttest"
)

func TestContract(t *testing.T) {
	transporttest.Run(t, func(testing.TB) transporttest.Bed { return bed(Direct) })
}

func TestContractStaged(t *testing.T) {
	transporttest.Run(t, func(testing.TB) transporttest.Bed { return bed(Staged) })
}

func bed(m Mode) transporttest.Bed {
	return transporttest.Bed{Open: func(o transporttest.Options) (transport.Fabric, error) {
		return Open(Options{Options: link.Options{Listen: where(o.Listen), Gate: o.Gate, Limits: o.Limits}, Mode: m})
	}, Kill: kill}
}

// kill does what the kernel does to the sockets of a process that dies.
func kill(tf transport.Fabric) {
	f := tf.(*Fabric)
	f.Listener.Close()
	f.Owner.Lock()
	defer f.Owner.Unlock()
	for _, c := range f.conns.All {
		unix.Shutdown(c.FD, unix.SHUT_RDWR)
	}
}
