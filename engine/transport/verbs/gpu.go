package verbs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"fserver/cshim/cuda"
	rdma "fserver/cshim/verbs"
	"fserver/engine/gpu"
	"fserver/engine/mem"
	"fserver/engine/transport"
)

// Ways is how the NIC may be shown memory of the GPU.
type Ways uint8

// Either way that works; none; one of them.
const (
	AnyWay Ways = iota
	NoWay
	ByDMABuf
	ByPeermem
)

// direct is the GPU whose memory the NIC reads and writes by itself (GPUDirect). The zero value is none.
type direct struct {
	dev       gpu.Device
	at        mem.Device // mem.CPU where the NIC takes no memory of a GPU
	buf, peer error      // why not by dma-buf, and why not by peer memory; nil: that way may be tried
	why       string     // a node has a GPU whose memory is not taken
}

// A DirectError says why memory of a GPU cannot be registered with a NIC.
type DirectError struct {
	Region       mem.Region
	DMABuf, Peer error // what spoke against each way
}

func (e *DirectError) Error() string {
	return fmt.Sprintf("verbs: register %d bytes at %#x of %v for GPUDirect: by dma-buf: %s; by nvidia-peermem: %s",
		e.Region.Len, e.Region.Addr, e.Region.Dev, bare(e.DMABuf), bare(e.Peer))
}

// Unwrap returns what spoke against each way.
func (e *DirectError) Unwrap() []error { return []error{e.DMABuf, e.Peer} }

func bare(err error) string { return strings.TrimPrefix(err.Error(), "verbs: ") }

// Where the kernel tells of its modules.
var sysModule, procModules = "/sys/module", "/proc/modules"

// peerModules let the driver of a NIC pin memory of a GPU by its address.
var peerModules = [...]string{"nvidia_peermem", "nv_peer_mem"}

// peermem says why the driver of a NIC cannot. It looks for the module, because an attempt with memory that the NIC's
// driver does not understand may do anything.
func peermem() error {
	list, _ := os.ReadFile(procModules)
	for _, name := range peerModules {
		if _, err := os.Stat(filepath.Join(sysModule, name)); err == nil || strings.Contains("\n"+string(list), "\n"+name+" ") {
			return nil
		}
	}
	return errors.New("the kernel module nvidia-peermem is not loaded")
}

const directRemedy = "run modprobe nvidia-peermem, or install NVIDIA's open kernel modules on Linux 5.12 or later"

// ways says what speaks against either way between a GPU and a NIC, of which noBuf says why it takes no dma-buf.
func ways(d cuda.Direct, noBuf error, allowed Ways) (buf, peer error) {
	switch {
	case !d.GPUDirect:
		buf = errors.New("this GPU has no GPUDirect RDMA")
		return buf, buf
	case !d.DMABuf:
		buf = errors.New("the GPU's driver gives no dma-buf")
	default:
		buf = noBuf
	}
	peer = peermem()
	off := fmt.Errorf("%s excludes it", gpuDirect)
	if allowed == NoWay || allowed == ByPeermem {
		buf = off
	}
	if allowed == NoWay || allowed == ByDMABuf {
		peer = off
	}
	return buf, peer
}

// openGPU finds out whether the NIC takes memory of d.
func (f *Fabric) openGPU(d gpu.Device, allowed Ways) (facts cuda.Direct) {
	g := &f.direct
	if d == nil {
		return facts
	}
	facts, err := d.Direct()
	if err != nil {
		g.deny(d, err.Error(), "check the GPU with nvidia-smi")
		return facts
	}
	g.buf, g.peer = ways(facts, f.dev.DMABuf(), allowed)
	if g.buf != nil && g.peer != nil {
		remedy := directRemedy
		if allowed == NoWay || !facts.GPUDirect {
			remedy = ""
		}
		g.deny(d, fmt.Sprintf("by dma-buf: %s; by nvidia-peermem: %s", bare(g.buf), bare(g.peer)), remedy)
		return facts
	}
	g.dev, g.at = d, mem.GPU(d.Ordinal())
	return facts
}

// openGPUReads makes what the order of the NIC's writes needs, if it needs it. Without that, the memory is not taken.
func (f *Fabric) openGPUReads(o Options, facts cuda.Direct) {
	if f.direct.at == mem.CPU || !needsReadback(facts, f.dev.Name) {
		return
	}
	later := o.Later
	if later == nil {
		later = new(gpu.Later)
	}
	if err := f.openReadback(o.GPU, later); err != nil {
		f.back.close()
		f.back = nil
		f.direct.deny(o.GPU, "set up reads of its memory: "+bare(err), "")
	}
}

// deny says that memory of d is not taken, and why.
func (g *direct) deny(d gpu.Device, why, remedy string) {
	if remedy != "" {
		why += " (" + remedy + ")"
	}
	*g = direct{why: fmt.Sprintf("no GPUDirect between the NIC and %v, so its tensors go through host memory: %s", mem.GPU(d.Ordinal()), why)}
}

// Caps implements transport.Fabric.
func (f *Fabric) Caps() transport.Caps {
	c := f.Fabric.Caps()
	c.GPU = f.direct.at
	return c
}

// registerGPU registers memory of the GPU with the NIC. It calls the drivers of both.
func (f *Fabric) registerGPU(g *region, r mem.Region, access rdma.Access) error {
	d := &f.direct
	if err := f.inAllocation(r); err != nil {
		return err
	}
	e := &DirectError{Region: r, DMABuf: d.buf, Peer: d.peer}
	if d.buf == nil {
		if e.DMABuf = f.registerDMABuf(g, access); e.DMABuf == nil {
			return nil
		}
	}
	if d.peer == nil {
		if e.Peer = f.registerParts(g, func(at, n uint64) (rdma.Region, error) { return f.dev.Register(at, n, access) }); e.Peer == nil {
			return nil
		}
	}
	return e
}

// inAllocation says whether r lies in one allocation of the GPU, as far as the driver tells: of a range that is mapped
// in pieces it tells of one piece, and the export of all fails where one is missing.
func (f *Fabric) inAllocation(r mem.Region) error {
	m, err := f.direct.dev.Describe(uint64(r.Addr))
	end := uint64(r.Addr) + r.Len
	switch {
	case err != nil: // freed, without a context, or of a GPU that has failed
	case !m.OnGPU:
		err = errors.New("the memory is not that of the GPU")
	case m.LegacyIPC && end > m.Base+m.Len:
		err = fmt.Errorf("the allocation ends after %d bytes", m.Base+m.Len-uint64(r.Addr))
	default:
		return nil
	}
	return &DirectError{Region: r, DMABuf: err, Peer: err}
}

// registerDMABuf does it by one descriptor, which the registrations outlive.
func (f *Fabric) registerDMABuf(g *region, access rdma.Access) error {
	page := uint64(os.Getpagesize())
	base := g.start &^ (page - 1)
	fd, err := f.direct.dev.ExportDMABuf(base, (g.end-base+page-1)&^(page-1))
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return f.registerParts(g, func(at, n uint64) (rdma.Region, error) {
		return f.dev.RegisterDMABuf(fd, at-base, n, at, access)
	})
}

// needsReadback reports whether the GPU may see what a NIC has written after the CPU has heard of it: where the GPU
// does not order a NIC's writes before what the CPU tells its owner, and where the NIC reaches the GPU over PCI, and
// the CPU over C2C. Of a NIC or GPU whose place is not known that is assumed: a read costs microseconds.
func needsReadback(d cuda.Direct, nic string) bool {
	if d.Ordering < cuda.OwnerOrdering {
		return true
	}
	return d.C2C && !apart(filepath.Join(sysRoot, "bus/pci/devices", fmt.Sprintf("%04x:%02x:%02x.0", d.Domain, d.Bus, d.Slot)),
		filepath.Join(sysRoot, "class/infiniband", nic, "device"))
}

var sysRoot = "/sys"

// apart reports whether two devices are known to share no bridge of PCI.
func apart(a, b string) bool {
	first, err := filepath.EvalSymlinks(a)
	second, bad := filepath.EvalSymlinks(b)
	if err != nil || bad != nil {
		return false
	}
	root := func(at string) string { // up to and with the first bridge
		_, below, _ := strings.Cut(at, "/pci")
		parts := strings.SplitN(below, "/", 3)
		if len(parts) < 3 {
			return at
		}
		return parts[0] + "/" + parts[1]
	}
	return root(first) != root(second)
}
