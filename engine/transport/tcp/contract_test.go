package tcp

import (
	"testing"

	"golang.org/x/sys/unix"

	"fserver/engine/transport"
	"fserver/engine/transport/link"
	"fserver/engine/transport/transporttest"
)

func TestContract(t *testing.T) {
	transporttest.Run(t, func(testing.TB) transporttest.Bed {
		return transporttest.Bed{Open: func(o transporttest.Options) (transport.Fabric, error) {
			return openForContract(o, nil)
		}, Kill: kill}
	})
}

func TestContractTLS(t *testing.T) {
	id := shared(t, "the secret of the contract")
	transporttest.Run(t, func(testing.TB) transporttest.Bed {
		return transporttest.Bed{Open: func(o transporttest.Options) (transport.Fabric, error) {
			return openForContract(o, id)
		}, Kill: kill, Allocates: "crypto/tls allocates two readers for each record"}
	})
}

func openForContract(o transporttest.Options, id *link.Identity) (transport.Fabric, error) {
	opts := Options{Gate: o.Gate, Limits: o.Limits, TLS: id}
	if o.Listen {
		opts.Listen = "127.0.0.1:0"
	}
	return Open(opts)
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
