package cudaipc

import (
	"testing"
	"time"

	"fserver/engine/gpu"
	"fserver/engine/gpu/fakegpu"
	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/transporttest"
	"fserver/engine/transport/transporttest/overtest"
)

// What these tests have from overtest.
type side = overtest.Side[*Fabric]

var (
	until   = overtest.Until[*Fabric]
	connect = overtest.Connect[*Fabric]
	onGPU   = overtest.OnGPU
	holds   = overtest.Holds
	heldUp  = overtest.HeldUp
	write   = overtest.Write
	text    = overtest.Text
	message = overtest.Message
)

// shares opens a Fabric of d, which plays a process of its own if apart is true.
func shares(d gpu.Device, under overtest.Below, apart bool) func(transporttest.Options) (*Fabric, error) {
	return func(o transporttest.Options) (*Fabric, error) {
		f, err := opens(d, under, true, apart)(o)
		if err != nil {
			return nil, err
		}
		return f.(*Fabric), nil
	}
}

// pairOf is a Conn between two Fabrics over one GPU.
func pairOf(t *testing.T, g *fakegpu.GPU, under overtest.Below) (a, b *side) {
	return pairAs(t, g, under, g, g)
}

// pairWith is pairOf, where each side sees the GPU as a Device of its own.
func pairWith(t *testing.T, g *fakegpu.GPU, da, db gpu.Device) (a, b *side) {
	return pairAs(t, g, overCMA, da, db)
}

func pairAs(t *testing.T, g *fakegpu.GPU, under overtest.Below, da, db gpu.Device) (a, b *side) {
	t.Cleanup(func() { g.Empty(t) })
	a, b = overtest.Open(t, "a", shares(da, under, true)), overtest.Open(t, "b", shares(db, under, true))
	connect(t, a, b)
	// A write waits for the introductions for as long as this machine takes, and is not staged meanwhile.
	ours(a).asked = time.Now().Add(time.Hour)
	return a, b
}

// ours is the Conn of one end; nil if it is inner's.
func ours(s *side) *Conn {
	c, _ := s.C.(*Conn)
	return c
}

// underWay is two sides of which a has begun a write of 4 KiB to a key of b's, whose copy
// waits until open is called. s is a's segment.
func underWay(t *testing.T, g *fakegpu.GPU) (a, b *side, dst mem.Region, k transport.Key, s *segment, open func()) {
	a, b = pairOf(t, g, overCMA)
	src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1)
	point, open := heldUp(t, g, a.F)
	k = b.Key(t, dst)
	a.Post(t, write(k, src, point))
	s = segmentOf(t, a, b)
	until(t, a, b, func() bool { return s.begun.Load() == 1 })
	return a, b, dst, k, s, open
}

// segmentOf is the segment of a, which has posted a write of GPU memory to b.
func segmentOf(t *testing.T, a, b *side) *segment {
	l := &ours(a).sender
	until(t, a, b, func() bool { return l.seg != nil })
	return l.seg
}
