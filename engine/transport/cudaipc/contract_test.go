package cudaipc

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/gpu/fakegpu"
	"fserver/engine/transport"
	"fserver/engine/transport/cma"
	"fserver/engine/transport/tcp"
	"fserver/engine/transport/transporttest"
)

// below opens the Fabric that is wrapped.
type below func(o transporttest.Options) (transport.Fabric, error)

func overCMA(o transporttest.Options) (transport.Fabric, error) { return openCMA(o, cma.Auto) }

func overStaged(o transporttest.Options) (transport.Fabric, error) { return openCMA(o, cma.Staged) }

func openCMA(o transporttest.Options, m cma.Mode) (transport.Fabric, error) {
	in := cma.Options{Mode: m}
	in.Gate, in.Limits = o.Gate, o.Limits
	if o.Listen {
		in.Listen = "here"
	}
	return cma.Open(in)
}

func overTCP(o transporttest.Options) (transport.Fabric, error) {
	t := tcp.Options{Gate: o.Gate, Limits: o.Limits}
	if o.Listen {
		t.Listen = "127.0.0.1:0"
	}
	return tcp.Open(t)
}

// bed is the contract's, over a GPU of our own making. Every Fabric plays a process
// of its own if apart is true.
func bed(tb testing.TB, g *fakegpu.GPU, under below, share, apart bool, onGPU bool) transporttest.Bed {
	tb.Cleanup(func() { g.Empty(tb) })
	b := transporttest.Bed{
		Allocates: "the GPU that tests use allocates",
		Open: func(o transporttest.Options) (transport.Fabric, error) {
			in, err := under(o)
			if err != nil {
				return nil, err
			}
			f, err := Wrap(in, Options{Device: g, Share: share})
			if err != nil {
				require.NoError(tb, in.Close())
				return nil, err
			}
			if apart {
				f.own = new(sync.Map)
			}
			return f, nil
		},
	}
	b.Offloads = onGPU
	if onGPU && share {
		b.Alone, b.Pause = true, 2*answerLimit
	}
	if onGPU {
		b.Memory = fakegpu.Memory{G: g}
	}
	return b
}

// variant skips what differs from TestContractMapped in how memory is found, not in
// what runs at the same time, where the race detector makes it slow.
func variant(t *testing.T) {
	if transporttest.RaceEnabled {
		t.Skip("with the race detector, TestContractMapped, Staged and TCP stand for all: the whole suite takes minutes")
	}
}

// twice skips in the first of the two runs of `make test` what the second, with the race detector,
// runs whole, and what counts no allocations.
func twice(t *testing.T) {
	if testing.Short() {
		t.Skip("with -short, TestContractPieces, Own, Events and Host stand for all; go test -race runs this one")
	}
}

// TestContractMapped: GPU memory of peers is mapped by IPC handles.
func TestContractMapped(t *testing.T) {
	twice(t)
	transporttest.Run(t, func(tb testing.TB) transporttest.Bed { return bed(tb, fakegpu.New(), overCMA, true, true, true) })
}

// TestContractPieces: by descriptors.
func TestContractPieces(t *testing.T) {
	variant(t)
	transporttest.Run(t, func(tb testing.TB) transporttest.Bed {
		g := fakegpu.New()
		g.Pieces = true
		return bed(tb, g, overCMA, true, true, true)
	})
}

// TestContractOwn: GPU memory of the same process.
func TestContractOwn(t *testing.T) {
	variant(t)
	transporttest.Run(t, func(tb testing.TB) transporttest.Bed { return bed(tb, fakegpu.New(), overCMA, true, false, true) })
}

// TestContractStaged: GPU memory that cannot be mapped, inside a host.
func TestContractStaged(t *testing.T) {
	twice(t)
	transporttest.Run(t, func(tb testing.TB) transporttest.Bed {
		g := fakegpu.New()
		g.Alone = true
		return bed(tb, g, overCMA, true, true, true)
	})
}

// TestContractTCP: GPU memory of another host.
func TestContractTCP(t *testing.T) {
	twice(t)
	transporttest.Run(t, func(tb testing.TB) transporttest.Bed { return bed(tb, fakegpu.New(), overTCP, false, true, true) })
}

// TestContractEvents: the CPU asks events.
func TestContractEvents(t *testing.T) {
	variant(t)
	for _, share := range []bool{true, false} {
		transporttest.Run(t, func(tb testing.TB) transporttest.Bed {
			g := fakegpu.New()
			b := bed(tb, g, overCMA, share, true, true)
			b.Open = func(o transporttest.Options) (transport.Fabric, error) {
				in, err := overCMA(o)
				if err != nil {
					return nil, err
				}
				f, err := Wrap(in, Options{Device: g, Share: share, Events: true})
				if err == nil {
					f.own = new(sync.Map)
				}
				return f, err
			}
			return b
		})
	}
}

// TestContractBare: nodes without a GPU, to peers that may have one.
func TestContractBare(t *testing.T) {
	variant(t)
	transporttest.Run(t, func(tb testing.TB) transporttest.Bed {
		b := bed(tb, fakegpu.New(), overCMA, true, true, false)
		b.Allocates = ""
		b.Open = func(o transporttest.Options) (transport.Fabric, error) {
			in, err := overCMA(o)
			if err != nil {
				return nil, err
			}
			return Wrap(in, Options{HasGPU: func([]byte) bool { return true }})
		}
		return b
	})
}

// TestContractHost: host memory beside a GPU.
func TestContractHost(t *testing.T) {
	variant(t)
	transporttest.Run(t, func(tb testing.TB) transporttest.Bed {
		b := bed(tb, fakegpu.New(), overCMA, true, true, false)
		b.Allocates = ""
		return b
	})
}
