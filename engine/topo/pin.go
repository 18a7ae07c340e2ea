package topo

import (
	"fmt"
	"slices"

	"fserver/engine/conf"
)

// Pin is the core for a poller of a GPU (a number from 0 for each) under
// STEPMESH_BIND_CPU_CORE. Two GPUs share a half of a socket: the first one has
// CoresPerGPU cores from CoreOffset on, the second one those that follow.
// Pollers beyond CoresPerGPU share the last core of their GPU.
//
// ok is false where nothing is to be pinned. It is an error if the core is not
// among those that the process may use.
func Pin(c *conf.Config, gpu, poller int, allowed []int) (core int, ok bool, err error) {
	if !c.BindCores {
		return 0, false, nil
	}
	core = gpu/2*(c.CoresPerSocket/2) + c.CoreOffset + gpu%2*c.CoresPerGPU + min(poller, c.CoresPerGPU-1)
	if !slices.Contains(allowed, core) {
		return 0, false, fmt.Errorf("topo: pin poller %d of GPU %d to core %d: this process may not use that core "+
			"(it may use %d cores; set STEPMESH_CPU_START_OFFSET=%d, STEPMESH_CPU_CORES_PER_GPU=%d and "+
			"STEPMESH_CPU_CORES_PER_SOCKET=%d differently, or STEPMESH_BIND_CPU_CORE=0)",
			poller, gpu, core, len(allowed), c.CoreOffset, c.CoresPerGPU, c.CoresPerSocket)
	}
	return core, true, nil
}
