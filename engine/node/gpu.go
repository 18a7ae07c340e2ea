package node

import (
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"fserver/cshim/cuda"
	"fserver/engine/conf"
	"fserver/engine/gpu"
	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/all"
	"fserver/engine/wire"
)

// card is the GPU of a node.
type card struct {
	gpu.GPU
	points
	log *zap.Logger
}

// visible is the remedy where there is no GPU for the transport that is named.
const visible = "unset FSERVER_TRANSPORT, or make the GPU that STEPMESH_GPU names visible to this process"

// openGPU finds the GPU that the settings ask for; nil: tensors are on the CPU.
func openGPU(cfg *conf.Config, find gpu.Opener, log *zap.Logger) (*card, error) {
	named := named(cfg)
	switch {
	case cfg.Role == conf.Scheduler:
		return nil, nil
	case cfg.Backend == conf.CPU && named.GPU:
		return nil, badSetting("FSERVER_TRANSPORT=%s with STEPMESH_BACKEND=CPU: it is for GPU tensors (use %s, or STEPMESH_BACKEND=GPU)", named.Name, named.Over)
	case cfg.Backend == conf.CPU:
		return nil, nil
	}
	d, err := find(cfg.GPU)
	switch {
	case err == nil:
		return newCard(d, gpu.LaterOf(cfg.GPU), cfg.Flags, log)
	case cfg.Backend == conf.GPU:
		return nil, badSetting("STEPMESH_BACKEND=GPU: %v", err)
	case named.GPU:
		var no *transport.ErrUnavailable
		if errors.As(err, &no) { // the remedy of its own may be STEPMESH_BACKEND=CPU
			err = &transport.ErrUnavailable{Transport: no.Transport, Reason: no.Reason, Remedy: visible}
		}
		return nil, badSetting("FSERVER_TRANSPORT=%s: %v", named.Name, err)
	}
	level := zap.DebugLevel
	if errors.As(err, new(*gpu.IndexError)) { // there are GPUs: this is hardly what was meant
		level = zap.WarnLevel
	}
	log.Log(level, "tensors are on the CPU", zap.Error(err))
	return nil, nil
}

// named is the driver that the settings name; the zero value where they name none.
func named(cfg *conf.Config) (named transport.Driver) {
	for _, d := range all.Drivers() {
		if d.Name == cfg.Transport {
			named = d
		}
	}
	return named
}

// hasGPU says by the hello of a peer whether it may have tensors on a GPU.
func hasGPU(hello []byte) bool {
	h, err := wire.ParseHello(hello)
	return err == nil && h.Caps&wire.CapGPU != 0
}

// device is where the node's tensors may be beside the CPU; CPU if nowhere.
func (g *card) device() mem.Device {
	if g == nil {
		return mem.CPU
	}
	return mem.GPU(g.Device.Ordinal())
}

// Alloc implements exchange.Memory.
func (g *card) Alloc(n uint64) (mem.Region, error) {
	a, err := g.Device.Alloc(n)
	if cuda.Is(err, cuda.OutOfMemory) && g.Later.Reclaim(gpu.Memory, time.Second) {
		a, err = g.Device.Alloc(n)
	}
	if cuda.Is(err, cuda.OutOfMemory) {
		err = fmt.Errorf("%w (call torch.cuda.empty_cache() to release memory that torch caches, or push fewer or smaller tensors)", err)
	}
	return mem.Region{Addr: uintptr(a), Len: n, Dev: g.device()}, err
}

// Free implements exchange.Memory. It does not wait.
func (g *card) Free(r mem.Region) error {
	g.Later.Do(gpu.Memory, r.Len, func() {
		if err := g.Device.Free(uint64(r.Addr)); err != nil {
			g.log.Warn("cannot free a receive buffer on the GPU", zap.Uint64("bytes", r.Len), zap.Error(err))
		}
	})
	return nil
}
