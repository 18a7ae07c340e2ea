package stage

import (
	"errors"
	"testing"

	"fserver/engine/gpu/fakegpu"
	"fserver/engine/transport/transporttest"
	"fserver/engine/transport/transporttest/overtest"
)

// What these tests have from overtest.
type side = overtest.Side[*Fabric]

var (
	until   = overtest.Until[*Fabric]
	connect = overtest.Connect[*Fabric]
	polls   = overtest.Polls[*Fabric]
	onGPU   = overtest.OnGPU
	holds   = overtest.Holds
	heldUp  = overtest.HeldUp
	write   = overtest.Write
	text    = overtest.Text
	message = overtest.Message
)

// wraps opens a Fabric over another one.
func wraps(under overtest.Below, o Options) func(transporttest.Options) (*Fabric, error) {
	return func(t transporttest.Options) (*Fabric, error) {
		in, err := under(t)
		if err != nil {
			return nil, err
		}
		f, err := Wrap(in, o)
		if err != nil {
			return nil, errors.Join(err, in.Close())
		}
		return f, nil
	}
}

// pairOf is a Conn between two Fabrics over one GPU.
func pairOf(t *testing.T, g *fakegpu.GPU, under overtest.Below) (a, b *side) {
	t.Cleanup(func() { g.Empty(t) })
	open := wraps(under, Options{Device: g})
	a, b = overtest.Open(t, "a", open), overtest.Open(t, "b", open)
	connect(t, a, b)
	return a, b
}

// ours is the Conn of one end; nil if the Fabric does not wrap it.
func ours(s *side) *Conn {
	c, _ := s.C.(*Conn)
	return c
}
