package cudaipc

import (
	"errors"
	"sync"
	"testing"

	"fserver/engine/gpu"
	"fserver/engine/gpu/fakegpu"
	"fserver/engine/transport"
	"fserver/engine/transport/cma"
	"fserver/engine/transport/stage"
	"fserver/engine/transport/transporttest"
	"fserver/engine/transport/transporttest/overtest"
)

func overCMA(o transporttest.Options) (transport.Fabric, error) {
	in := cma.Options{}
	in.Gate, in.Limits = o.Gate, o.Limits
	if o.Listen {
		in.Listen = "here"
	}
	return cma.Open(in)
}

// opens opens a Fabric of d, which plays a process of its own if apart is true. Without share it has staging alone.
func opens(d gpu.Device, under overtest.Below, share, apart bool) func(transporttest.Options) (transport.Fabric, error) {
	return func(o transporttest.Options) (transport.Fabric, error) {
		in, err := under(o)
		if err != nil {
			return nil, err
		}
		later := new(gpu.Later)
		staged, err := stage.Wrap(in, stage.Options{Device: d, Later: later})
		if err != nil {
			return nil, errors.Join(err, in.Close())
		}
		if !share {
			return staged, nil
		}
		f, err := Wrap(staged, Options{Device: d, Later: later})
		if err != nil {
			return nil, errors.Join(err, staged.Close())
		}
		if apart {
			f.own = new(sync.Map)
		}
		return f, nil
	}
}

// bed is the contract's, over a GPU of our own making.
func bed(tb testing.TB, g *fakegpu.GPU, under overtest.Below, onGPU, apart bool) transporttest.Bed {
	tb.Cleanup(func() { g.Empty(tb) })
	b := transporttest.Bed{Open: opens(g, under, true, apart), Offloads: onGPU}
	if onGPU {
		b.Alone, b.Pause = true, 2*answerLimit
		b.Memory, b.Allocates = fakegpu.Memory{G: g}, "the GPU that tests use allocates"
	}
	return b
}

// variant skips what differs from TestContractMapped in how memory is found, not in
// what runs at the same time.
func variant(t *testing.T) {
	if transporttest.Quick() {
		t.Skip("TestContractMapped and Staged stand for all: the whole suite takes minutes")
	}
}

// TestContractMapped: GPU memory of peers is mapped by IPC handles.
func TestContractMapped(t *testing.T) {
	transporttest.Run(t, func(tb testing.TB) transporttest.Bed { return bed(tb, fakegpu.New(), overCMA, true, true) })
}

// TestContractPieces: by descriptors.
func TestContractPieces(t *testing.T) {
	variant(t)
	transporttest.Run(t, func(tb testing.TB) transporttest.Bed {
		g := fakegpu.New()
		g.Pieces = true
		return bed(tb, g, overCMA, true, true)
	})
}

// TestContractOwn: GPU memory of the same process.
func TestContractOwn(t *testing.T) {
	variant(t)
	transporttest.Run(t, func(tb testing.TB) transporttest.Bed { return bed(tb, fakegpu.New(), overCMA, true, false) })
}

// TestContractStaged: GPU memory that cannot be mapped.
func TestContractStaged(t *testing.T) {
	transporttest.Run(t, func(tb testing.TB) transporttest.Bed {
		g := fakegpu.New()
		g.Alone = true
		return bed(tb, g, overCMA, true, true)
	})
}

// TestContractHost: host memory beside a GPU.
func TestContractHost(t *testing.T) {
	variant(t)
	transporttest.Run(t, func(tb testing.TB) transporttest.Bed { return bed(tb, fakegpu.New(), overCMA, false, true) })
}
