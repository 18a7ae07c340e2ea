package node

import (
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"

	"fserver/cshim/cuda"
	"fserver/engine/conf"
	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/cudaipc"
	"fserver/engine/wire"
)

// Devices finds the GPU with an index, as CUDA counts; tests put their own in place.
type Devices func(index int) (cudaipc.Device, error)

// held is the GPUs of this process by their index. Their contexts are never given back: receive
// buffers may outlive their node.
var held sync.Map

var laters sync.Map // *cudaipc.Later by the index of a GPU

// LaterOf is what gives back memory of a GPU of this process.
func LaterOf(index int) *cudaipc.Later {
	l, ok := laters.Load(index)
	if !ok {
		l, _ = laters.LoadOrStore(index, new(cudaipc.Later))
	}
	return l.(*cudaipc.Later)
}

// A Thing is what FreeLater gives back, by its number in fserver.h.
type Thing int

// Memory of the GPU, a mapping of another process's, pinned memory of the driver's,
// kernels, and a context that is not the primary one, by a pointer to it.
const (
	Allocated Thing = iota
	Mapped
	PinnedHost
	Module
	Context
)

var things = [...]struct {
	kind cudaipc.Kind
	free func(*cuda.Device, uint64) error
}{
	Allocated:  {cudaipc.Memory, (*cuda.Device).Free},
	Mapped:     {cudaipc.Mapping, (*cuda.Device).CloseIPC},
	PinnedHost: {cudaipc.Host, (*cuda.Device).FreeHost},
	Module:     {cudaipc.Host, (*cuda.Device).Unload},
	Context:    {cudaipc.Rest, (*cuda.Device).Destroy},
}

// FreeLater gives back what the driver knows by an address or handle, when LaterOf does.
func FreeLater(index int, what Thing, address, bytes uint64) error {
	d, err := cuda.Retain(index)
	if err != nil {
		return err
	}
	LaterOf(index).Do(things[what].kind, bytes, func() {
		_ = things[what].free(d, address) // who had it has gone on
		d.Release()
	})
	return nil
}

// Reclaim gives back what FreeLater has put off of the same sort, and says whether that
// has been of use.
func Reclaim(index int, what Thing, limit time.Duration) bool {
	l := LaterOf(index)
	return l.Force(things[what].kind) && l.Wait(limit)
}

// openDevice holds a GPU. Without a driver or that GPU it is an ErrUnavailable.
func openDevice(index int) (cudaipc.Device, error) {
	if d, ok := held.Load(index); ok {
		return d.(*cuda.Device), nil
	}
	if _, err := findDevice(index); err != nil {
		return nil, err
	}
	d, err := cuda.Retain(index)
	if err != nil {
		return nil, err
	}
	first, loaded := held.LoadOrStore(index, d)
	if loaded {
		d.Release()
	}
	return first.(*cuda.Device), nil
}

// findDevice is openDevice without a context: it holds nothing, and gives no Device.
func findDevice(index int) (cudaipc.Device, error) {
	if err := cuda.Open(); err != nil {
		return nil, &transport.ErrUnavailable{Transport: "cudaipc", Reason: err.Error(), Remedy: "install an NVIDIA driver for CUDA 11.7 or later, or set STEPMESH_BACKEND=CPU"}
	}
	n, err := cuda.Count()
	if err == nil && index >= n {
		err = fmt.Errorf("gpu %d: CUDA shows %d GPUs", index, n)
	}
	if err != nil {
		return nil, &transport.ErrUnavailable{Transport: "cudaipc", Reason: err.Error(), Remedy: "check STEPMESH_GPU and CUDA_VISIBLE_DEVICES"}
	}
	return nil, nil
}

// gpu is the GPU of a node.
type gpu struct {
	dev   cudaipc.Device
	log   *zap.Logger
	later *cudaipc.Later

	mu   sync.Mutex // guards what follows; no call of the driver is made under it
	free []cuda.Event
	all  []cuda.Event
}

// openGPU finds the GPU that the settings ask for; nil: tensors are on the CPU.
func openGPU(cfg *conf.Config, devices Devices, log *zap.Logger) (*gpu, error) {
	switch {
	case cfg.Role == conf.Scheduler:
		return nil, nil
	case cfg.Backend == conf.CPU && cfg.Transport == conf.CUDAIPC:
		return nil, badSetting("FSERVER_TRANSPORT=cudaipc with STEPMESH_BACKEND=CPU: it is for GPU tensors (use cma, or STEPMESH_BACKEND=GPU)")
	case cfg.Backend == conf.CPU:
		return nil, nil
	}
	d, err := devices(cfg.GPU)
	switch {
	case err == nil:
		return &gpu{dev: d, log: log, later: LaterOf(cfg.GPU)}, nil
	case cfg.Backend == conf.GPU:
		return nil, badSetting("STEPMESH_BACKEND=GPU: %v", err)
	case cfg.Transport == conf.CUDAIPC:
		return nil, badSetting("FSERVER_TRANSPORT=cudaipc: %v", err)
	}
	log.Debug("tensors are on the CPU", zap.Error(err))
	return nil, nil
}

// wrap lets GPU memory travel over Fabrics: memory of this node's GPU, if it has one, and of
// its peers'. With an error, all of them are closed.
func (g *gpu) wrap(cfg *conf.Config, list []transport.Fabric) error {
	for i, f := range list {
		o := cudaipc.Options{HasGPU: hasGPU}
		if g != nil {
			o.Device, o.Later, o.Events = g.dev, g.later, !cfg.MemSync
			o.Share = scheme(f) == conf.CMA.String() && cfg.SameHost
		}
		w, err := cudaipc.Wrap(f, o)
		if err != nil {
			for _, f := range list {
				_ = f.Close()
			}
			return err
		}
		list[i] = w
	}
	return nil
}

// hasGPU says by the hello of a peer whether it may have tensors on a GPU.
func hasGPU(hello []byte) bool {
	h, err := wire.ParseHello(hello)
	return err == nil && h.Caps&wire.CapGPU != 0
}

// device is where the node's tensors may be beside the CPU; CPU if nowhere.
func (g *gpu) device() mem.Device {
	if g == nil {
		return mem.CPU
	}
	return mem.GPU(g.dev.Ordinal())
}

// Alloc implements exchange.Memory.
func (g *gpu) Alloc(n uint64) (mem.Region, error) {
	a, err := g.dev.Alloc(n)
	if cuda.Is(err, cuda.OutOfMemory) && g.later.Force(cudaipc.Memory) && g.later.Wait(time.Second) {
		a, err = g.dev.Alloc(n)
	}
	if cuda.Is(err, cuda.OutOfMemory) {
		err = fmt.Errorf("%w (call torch.cuda.empty_cache() to release memory that torch caches, or push fewer or smaller tensors)", err)
	}
	return mem.Region{Addr: uintptr(a), Len: n, Dev: g.device()}, err
}

// Free implements exchange.Memory. It does not wait.
func (g *gpu) Free(r mem.Region) error {
	g.later.Do(cudaipc.Memory, r.Len, func() {
		if err := g.dev.Free(uint64(r.Addr)); err != nil {
			g.log.Warn("cannot free a receive buffer on the GPU", zap.Uint64("bytes", r.Len), zap.Error(err))
		}
	})
	return nil
}

// point is what is queued on a stream so far. Whether anything is left of it is not
// asked: that takes the driver longer (1.4 µs on an H200) than the event and the wait
// for it together. It waits while the stream is full.
func (g *gpu) point(stream uint64) (transport.Point, error) {
	e, err := g.event()
	if err != nil {
		return transport.Point{}, err
	}
	p := transport.Point{Dev: g.device(), Event: uint64(e)}
	if err := g.dev.Record(e, cuda.Stream(stream)); err != nil {
		g.passed(p)
		return transport.Point{}, err
	}
	return p, nil
}

// event takes an event that nobody uses, or makes one.
func (g *gpu) event() (cuda.Event, error) {
	g.mu.Lock()
	if i := len(g.free) - 1; i >= 0 {
		e := g.free[i]
		g.free = g.free[:i]
		g.mu.Unlock()
		return e, nil
	}
	g.mu.Unlock()
	e, err := g.dev.NewEvent()
	if err != nil {
		return 0, err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.all = append(g.all, e)
	return e, nil
}

// passed takes back a point that nobody waits for any more.
func (g *gpu) passed(p transport.Point) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.free = append(g.free, cuda.Event(p.Event))
}

// close gives back the events. Nothing waits for any.
func (g *gpu) close() {
	g.mu.Lock()
	all := g.all
	g.all, g.free = nil, nil
	g.mu.Unlock()
	for _, e := range all {
		_ = g.dev.FreeEvent(e)
	}
}
