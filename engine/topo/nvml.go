package topo

import (
	"fmt"
	"slices"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// nvmlUsed is every function that nvmlGPUs calls. They are bound when they are
// first called, and the process ends if the driver's library lacks one, so it
// is asked first.
var nvmlUsed = []string{
	"nvmlInit_v2", "nvmlShutdown", "nvmlErrorString", "nvmlSystemGetDriverVersion", "nvmlSystemGetCudaDriverVersion",
	"nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetName", "nvmlDeviceGetUUID",
	"nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMigMode",
	"nvmlDeviceGetNvLinkState", "nvmlDeviceGetNvLinkRemotePciInfo_v2", "nvmlDeviceGetNvLinkRemoteDeviceType",
}

// nvmlGPUs asks the driver of the NVIDIA GPUs. What it does not answer stays
// empty.
func nvmlGPUs() ([]GPU, Driver) {
	lib := nvml.New()
	if ret := lib.Init(); ret != nvml.SUCCESS {
		why := "NVML: " + lib.ErrorString(ret)
		if ret == nvml.ERROR_LIBRARY_NOT_FOUND {
			why = "libnvidia-ml.so.1 is not installed (install the NVIDIA driver, or make it visible in this container)"
		}
		return nil, Driver{Missing: why}
	}
	defer lib.Shutdown()
	for _, name := range nvmlUsed {
		if lib.Extensions().LookupSymbol(name) != nil {
			return nil, Driver{Missing: fmt.Sprintf("libnvidia-ml.so.1 has no function %s (install a newer NVIDIA driver)", name)}
		}
	}
	var d Driver
	d.Version, _ = lib.SystemGetDriverVersion()
	if v, ret := lib.SystemGetCudaDriverVersion(); ret == nvml.SUCCESS {
		d.CUDA = fmt.Sprintf("%d.%d", v/1000, v%1000/10)
	}
	count, ret := lib.DeviceGetCount()
	if ret != nvml.SUCCESS {
		d.Missing = "NVML: " + lib.ErrorString(ret)
	}
	var gpus []GPU
	for i := range count {
		g := GPU{Index: i, Links: []NVLink{}}
		if dev, ret := lib.DeviceGetHandleByIndex(i); ret == nvml.SUCCESS {
			g.ask(dev)
		}
		gpus = append(gpus, g)
	}
	return gpus, d
}

func (g *GPU) ask(dev nvml.Device) {
	g.Name, _ = dev.GetName()
	g.UUID, _ = dev.GetUUID()
	if pci, ret := dev.GetPciInfo(); ret == nvml.SUCCESS {
		g.PCI = sysfsAddress(pci)
	}
	if m, ret := dev.GetMemoryInfo(); ret == nvml.SUCCESS {
		g.Memory = m.Total
	}
	if mode, _, ret := dev.GetMigMode(); ret == nvml.SUCCESS {
		g.MIG = mode == nvml.DEVICE_MIG_ENABLE
	}
	for lane := range nvml.NVLINK_MAX_LINKS {
		if state, ret := dev.GetNvLinkState(lane); ret != nvml.SUCCESS || state != nvml.FEATURE_ENABLED {
			continue
		}
		to := "switch"
		if kind, ret := dev.GetNvLinkRemoteDeviceType(lane); ret != nvml.SUCCESS || kind != nvml.NVLINK_DEVICE_TYPE_SWITCH {
			pci, ret := dev.GetNvLinkRemotePciInfo(lane)
			if ret != nvml.SUCCESS {
				continue
			}
			to = sysfsAddress(pci)
		}
		g.link(to)
	}
}

// link counts one lane more.
func (g *GPU) link(to string) {
	i := slices.IndexFunc(g.Links, func(l NVLink) bool { return l.To == to })
	if i < 0 {
		i = len(g.Links)
		g.Links = append(g.Links, NVLink{To: to})
	}
	g.Links[i].Lanes++
}

// sysfsAddress is a PCI address as sysfs writes it; NVML writes the domain
// with eight digits.
func sysfsAddress(pci nvml.PciInfo) string {
	id, _, _ := strings.Cut(string(pci.BusId[:]), "\x00")
	_, rest, _ := strings.Cut(strings.ToLower(id), ":")
	return fmt.Sprintf("%04x:%s", pci.Domain, rest)
}
