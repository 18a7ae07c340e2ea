package faults_test

import (
	"fmt"
	"testing"
	"time"

	"fserver/engine/transport"
	"fserver/engine/transport/cma"
	"fserver/engine/transport/faults"
	"fserver/engine/transport/inproc"
	"fserver/engine/transport/link"
	"fserver/engine/transport/tcp"
	"fserver/engine/transport/transporttest"
)

// wrap gives each Fabric of a test a seed of its own.
func wrap(inner transport.Fabric, o *faults.Options) (transport.Fabric, error) {
	o.Seed++
	return faults.Wrap(inner, *o)
}

// bed is a Network of its own for each test, with faults.
func bed(o faults.Options) func(testing.TB) transporttest.Bed {
	return func(tb testing.TB) transporttest.Bed {
		net, o := inproc.New(), o
		return transporttest.Bed{
			Open: func(w transporttest.Options) (transport.Fabric, error) {
				f, err := net.Open(inproc.Options{Listen: w.Listen, Gate: w.Gate, Limits: w.Limits})
				if err != nil {
					return nil, err
				}
				return wrap(f, &o)
			},
			Kill:      func(f transport.Fabric) { net.Kill(f.Name()[len("inproc/"):]) },
			Offloads:  true,
			Allocates: "inproc copies each frame",
		}
	}
}

func TestContract(t *testing.T) { transporttest.Run(t, bed(faults.Options{})) }

func TestContractUnderLoss(t *testing.T) {
	o := faults.NIC(1)
	o.Resend, o.Drop, o.Timeout = true, 0.1, 200*time.Microsecond
	transporttest.Run(t, func(tb testing.TB) transporttest.Bed {
		b := bed(o)(tb)
		b.Lost = 4 * time.Millisecond // 16 times Timeout at most, see held.wait
		return b
	})
}

// TestContractOfNIC has memory behave like a NIC, with a fixed seed and with one of the time, which
// the names of the tests tell. The race detector has the last one alone.
func TestContractOfNIC(t *testing.T) {
	seeds := []uint64{1 << 10, uint64(time.Now().UnixNano())}
	if testing.Short() {
		seeds = seeds[:1]
	} else if transporttest.Quick() {
		seeds = seeds[1:]
	}
	for _, seed := range seeds {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) { transporttest.Run(t, bed(faults.NIC(seed))) })
	}
}

func TestContractOverTCP(t *testing.T) {
	transporttest.Run(t, func(tb testing.TB) transporttest.Bed {
		o := faults.Options{}
		return transporttest.Bed{Open: func(w transporttest.Options) (transport.Fabric, error) {
			in := tcp.Options{Gate: w.Gate, Limits: w.Limits}
			if w.Listen {
				in.Listen = "127.0.0.1:0"
			}
			f, err := tcp.Open(in)
			if err != nil {
				return nil, err
			}
			return wrap(f, &o)
		}}
	})
}

// TestContractOverCMA: the inner Fabric lends.
func TestContractOverCMA(t *testing.T) {
	transporttest.Run(t, func(tb testing.TB) transporttest.Bed {
		o := faults.NIC(1)
		return transporttest.Bed{Allocates: "a copy of what is held back", Open: func(w transporttest.Options) (transport.Fabric, error) {
			in := link.Options{Gate: w.Gate, Limits: w.Limits}
			if w.Listen {
				in.Listen = "here"
			}
			f, err := cma.Open(cma.Options{Options: in})
			if err != nil {
				return nil, err
			}
			return wrap(f, &o)
		}}
	})
}
