package cudaipc

import (
	"fmt"
	"strings"

	"fserver/cshim/cuda"
	"fserver/engine/conf"
	"fserver/engine/gpu"
	"fserver/engine/transport"
)

// Driver lets GPU memory travel: mapped over the transport that lends memory, which is named over,
// and staged over all others.
func Driver(over string) transport.Driver {
	return transport.Driver{
		Over:  over,
		GPU:   true,
		Probe: probe,
		Way: conf.Way{Name: "cudaipc", About: over + " between processes with GPUs, of which each maps the other's memory", Options: []conf.Option{
			conf.Flag("STEPMESH_MEM_SYNC", "1",
				"how the CPU learns that a stream has reached a point: 1 by a flag in memory, 0 by an event. For GPU tensors"),
		}},
		Wrap: func(e *transport.Env, f transport.Fabric) (transport.Fabric, error) {
			o := Options{HasGPU: e.HasGPU}
			if g, ok := e.Device.(gpu.GPU); ok {
				o.Device, o.Later = g.Device, g.Later
				o.Events = !conf.Get[bool](e.Config, "STEPMESH_MEM_SYNC")
				o.Share = f.Caps().Lends && e.Config.SameHost
			}
			return Wrap(f, o)
		},
	}
}

// probe counts the GPUs that CUDA shows to this process.
func probe() []transport.Finding {
	err := cuda.Open()
	n := 0
	if err == nil {
		n, err = cuda.Count()
	}
	switch {
	case err != nil:
		return []transport.Finding{{State: transport.No, Text: "no GPU: " + strings.TrimPrefix(err.Error(), "cuda: "), Remedy: "use tcp, or install an NVIDIA driver for CUDA 11.7 or later"}}
	case n == 0:
		return []transport.Finding{{State: transport.No, Text: "no GPU: the driver shows none", Remedy: "use tcp, or make a GPU visible to this process (CUDA_VISIBLE_DEVICES)"}}
	}
	return []transport.Finding{{State: transport.Yes, Text: fmt.Sprintf("GPUs that this process sees: %d", n)}}
}
