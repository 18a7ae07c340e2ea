package cudaipc

import (
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/cshim/cuda"
	"fserver/engine/gpu"
	"fserver/engine/gpu/fakegpu"
	"fserver/engine/transport"
	"fserver/engine/transport/transporttest/overtest"
)

func TestDriverWaits(t *testing.T) {
	for _, c := range []struct {
		call        string
		pieces, own bool
	}{
		{call: "Pin"},       // of the segment
		{call: "NewStream"}, // of the Conn
		{call: "ImportIPC"},
		{call: "Describe"},
		{call: "MapFDs", pieces: true},
		{call: "Reach", own: true},
	} {
		t.Run(c.call, func(t *testing.T) {
			g := fakegpu.New()
			g.Pieces = c.pieces
			a, b := pairOf(t, g, overCMA)
			if c.own {
				b.F.own = a.F.own
			}
			overtest.DriverWaits(t, g, a, b, c.call, false)
		})
	}
}

func TestDriverWaitsInPost(t *testing.T) {
	for name, alone := range map[string]bool{"mapped": false, "staged": true} { // the call is ours, or that of the Fabric below
		t.Run(name, func(t *testing.T) {
			g := fakegpu.New()
			g.Alone = alone
			a, b := pairOf(t, g, overCMA)
			overtest.DriverWaitsInPost(t, g, a, b, "Enqueue", true)
		})
	}
}

// TestDeregisterWaitsAlone: a key whose end has to wait for a lost peer that lives, and for its
// GPU, keeps nobody else. When its memory is quiet, the next Poll gives the region back.
func TestDeregisterWaitsAlone(t *testing.T) {
	g := fakegpu.New()
	a, b, dst, k, _, open := underWay(t, g)
	spare := onGPU(t, g, 4096, 1)
	stuck := b.C
	stuck.Close()
	b.F.Deregister(k)
	ending := func() int {
		b.F.Mu.Lock()
		defer b.F.Mu.Unlock()
		return b.F.Ending()
	}
	until(t, a, b, func() bool { return ending() == 1 })
	b.Aside(t, spare, a.F.Addr())
	connect(t, a, b)
	to := b.Key(t, spare)
	src := onGPU(t, g, 4096, 6)
	a.Post(t, write(to, src, transport.Point{}))
	until(t, a, b, func() bool { return len(b.Writes) == 1 && len(a.Done) >= 1 })
	b.Free(t, to)
	holds(t, g, spare, 6)
	require.Equal(t, 1, ending())
	holds(t, g, dst, 1)
	open()
	until(t, a, b, func() bool { return ending() == 0 })
	holds(t, g, dst, 5)
}

// panics is a Device that does so.
type panics struct{ gpu.Device }

func (panics) ImportIPC(cuda.IPCHandle) (uint64, error) { panic(overtest.PanicValue) }

func TestDriverPanics(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overCMA)
	a.F.Calls.Dev = panics{g}
	overtest.DriverPanics(t, g, a, b, "ImportIPC")
}
