package node

import (
	"fmt"
	"sync"
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
	log *zap.Logger

	mu   sync.Mutex // guards what follows; no call of the driver is made under it
	free []cuda.Event
	all  []cuda.Event
}

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
		return &card{GPU: gpu.GPU{Device: d, Later: gpu.LaterOf(cfg.GPU)}, log: log}, nil
	case cfg.Backend == conf.GPU:
		return nil, badSetting("STEPMESH_BACKEND=GPU: %v", err)
	case named.GPU:
		return nil, badSetting("FSERVER_TRANSPORT=%s: %v", named.Name, err)
	}
	log.Debug("tensors are on the CPU", zap.Error(err))
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

// point is what is queued on a stream so far. Whether anything is left of it is not
// asked: that takes the driver longer (1.4 µs on an H200) than the event and the wait
// for it together. It waits while the stream is full.
func (g *card) point(stream uint64) (transport.Point, error) {
	e, err := g.event()
	if err != nil {
		return transport.Point{}, err
	}
	p := transport.Point{Dev: g.device(), Event: uint64(e)}
	if err := g.Device.Record(e, cuda.Stream(stream)); err != nil {
		g.passed(p)
		return transport.Point{}, err
	}
	return p, nil
}

// event takes an event that nobody uses, or makes one.
func (g *card) event() (cuda.Event, error) {
	g.mu.Lock()
	if i := len(g.free) - 1; i >= 0 {
		e := g.free[i]
		g.free = g.free[:i]
		g.mu.Unlock()
		return e, nil
	}
	g.mu.Unlock()
	e, err := g.Device.NewEvent()
	if err != nil {
		return 0, err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.all = append(g.all, e)
	return e, nil
}

// passed takes back a point that nobody waits for any more.
func (g *card) passed(p transport.Point) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.free = append(g.free, cuda.Event(p.Event))
}

// close gives back the events. Nothing waits for any.
func (g *card) close() {
	g.mu.Lock()
	all := g.all
	g.all, g.free = nil, nil
	g.mu.Unlock()
	for _, e := range all {
		_ = g.Device.FreeEvent(e)
	}
}
