package cudaipc

import (
	"errors"
	"fmt"
	"strings"

	"fserver/cshim/cuda"
	"fserver/engine/conf"
	"fserver/engine/gpu"
	"fserver/engine/transport"
)

// Driver lets GPU memory be mapped by peers of the transport that lends memory, which is named over.
func Driver(over string) transport.Driver {
	return transport.Driver{
		Over:  over,
		GPU:   true,
		Probe: probe,
		Way:   conf.Way{Name: "cudaipc", About: over + " between processes with GPUs, of which each maps the other's memory"},
		Wrap: func(e *transport.Env, f transport.Fabric) (transport.Fabric, error) {
			g, ok := e.Device.(gpu.GPU)
			if !ok || !f.Caps().Lends || !e.Config.SameHost {
				return f, nil
			}
			return Wrap(f, Options{Device: g.Device, Later: g.Later})
		},
	}
}

// probe counts the GPUs that CUDA shows to this process.
func probe(*conf.Config) []transport.Finding {
	var why *transport.ErrUnavailable
	if _, err := gpu.Find(0); errors.As(err, &why) {
		return []transport.Finding{{State: transport.No, Text: "no GPU: " + strings.TrimPrefix(why.Reason, "cuda: "), Remedy: why.Remedy}}
	}
	n, _ := cuda.Count() // Find has counted them just now
	return []transport.Finding{{State: transport.Yes, Text: fmt.Sprintf("GPUs that this process sees: %d", n)}}
}
