package stage

import (
	"testing"

	"fserver/engine/gpu"
	"fserver/engine/gpu/fakegpu"
	"fserver/engine/transport/transporttest/overtest"
)

func TestDriverWaits(t *testing.T) {
	for _, c := range []struct {
		call  string
		lands bool
	}{
		{call: "NewStream"},        // of the Conn
		{call: "Pin"},              // of the buffers
		{call: "Pin", lands: true}, // of the shadow
	} {
		name := c.call
		if c.lands {
			name += ", lands"
		}
		t.Run(name, func(t *testing.T) {
			g := fakegpu.New()
			a, b := pairOf(t, g, overTCP)
			overtest.DriverWaits(t, g, a, b, c.call, c.lands)
		})
	}
}

func TestDriverWaitsInPost(t *testing.T) {
	for _, call := range []string{"Enqueue", "NewEvent", "Record"} {
		t.Run(call, func(t *testing.T) {
			g := fakegpu.New()
			a, b := pairOf(t, g, overTCP)
			a.F.Calls.Events = call == "NewEvent" || call == "Record"
			overtest.DriverWaitsInPost(t, g, a, b, call, call != "NewEvent")
		})
	}
}

// panics is a Device that does so.
type panics struct{ gpu.Device }

func (panics) Pin(uint64, uint64) (uint64, error) { panic(overtest.PanicValue) }

func TestDriverPanics(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overTCP)
	a.F.Calls.Dev = panics{g}
	overtest.DriverPanics(t, g, a, b, "Pin")
}
