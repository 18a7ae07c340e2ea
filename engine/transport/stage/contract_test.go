package stage

import (
	"testing"

	"fserver/engine/gpu/fakegpu"
	"fserver/engine/transport"
	"fserver/engine/transport/cma"
	"fserver/engine/transport/faults"
	"fserver/engine/transport/inproc"
	"fserver/engine/transport/tcp"
	"fserver/engine/transport/transporttest"
	"fserver/engine/transport/transporttest/overtest"
)

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

// overProc opens Fabrics of one process.
func overProc() overtest.Below {
	net := inproc.New()
	return func(o transporttest.Options) (transport.Fabric, error) {
		return net.Open(inproc.Options{Listen: o.Listen, Gate: o.Gate, Limits: o.Limits})
	}
}

// worse puts faults over what a Fabric is opened by.
func worse(under overtest.Below, o faults.Options) overtest.Below {
	return func(t transporttest.Options) (transport.Fabric, error) {
		in, err := under(t)
		if err != nil {
			return nil, err
		}
		o.Seed++
		return faults.Wrap(in, o)
	}
}

// bed is the contract's, over a GPU of our own making.
func bed(tb testing.TB, g *fakegpu.GPU, under overtest.Below, o Options, onGPU bool) transporttest.Bed {
	tb.Cleanup(func() { g.Empty(tb) })
	b := transporttest.Bed{
		Offloads: onGPU,
		Open:     func(t transporttest.Options) (transport.Fabric, error) { return wraps(under, o)(t) },
	}
	if onGPU {
		b.Memory, b.Allocates = fakegpu.Memory{G: g}, "the GPU that tests use allocates"
	}
	return b
}

// variant skips what differs from TestContract in how memory is found, not in
// what runs at the same time.
func variant(t *testing.T) {
	if transporttest.Quick() {
		t.Skip("TestContract stands for all: the whole suite takes minutes")
	}
}

// TestContract: GPU memory over another host's Fabric.
func TestContract(t *testing.T) {
	transporttest.Run(t, func(tb testing.TB) transporttest.Bed {
		g := fakegpu.New()
		return bed(tb, g, overTCP, Options{Device: g}, true)
	})
}

// TestContractInproc: over a Fabric without sockets.
func TestContractInproc(t *testing.T) {
	variant(t)
	transporttest.Run(t, func(tb testing.TB) transporttest.Bed {
		g := fakegpu.New()
		return bed(tb, g, overProc(), Options{Device: g}, true)
	})
}

// TestContractEvents: the CPU asks events.
func TestContractEvents(t *testing.T) {
	variant(t)
	transporttest.Run(t, func(tb testing.TB) transporttest.Bed {
		g := fakegpu.New()
		return bed(tb, g, overCMA, Options{Device: g, Events: true}, true)
	})
}

// TestContractBare: nodes without a GPU, to peers that may have one.
func TestContractBare(t *testing.T) {
	variant(t)
	transporttest.Run(t, func(tb testing.TB) transporttest.Bed {
		return bed(tb, fakegpu.New(), overCMA, Options{HasGPU: func([]byte) bool { return true }}, false)
	})
}

// TestContractHost: host memory beside a GPU.
func TestContractHost(t *testing.T) {
	variant(t)
	transporttest.Run(t, func(tb testing.TB) transporttest.Bed {
		g := fakegpu.New()
		return bed(tb, g, overCMA, Options{Device: g}, false)
	})
}

// TestContractFaults: over a Fabric that behaves like a NIC.
func TestContractFaults(t *testing.T) {
	variant(t)
	transporttest.Run(t, func(tb testing.TB) transporttest.Bed {
		g := fakegpu.New()
		b := bed(tb, g, worse(overProc(), faults.NIC(1)), Options{Device: g}, true)
		return b
	})
}
