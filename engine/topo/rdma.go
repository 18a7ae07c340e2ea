package topo

import (
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/Mellanox/rdmamap"
)

// RDMADevice is what verbs open.
type RDMADevice struct {
	Name  string     `json:"name"` // "mlx5_0"
	PCI   string     `json:"pci"`
	NUMA  int        `json:"numa"`
	Ports []RDMAPort `json:"ports"`
	NICs  []string   `json:"nics"`     // interfaces that its GID tables name
	Nodes []string   `json:"nodes"`    // character devices that can be opened: "/dev/infiniband/uverbs0"
	Soft  bool       `json:"software"` // no hardware below it: soft-RoCE, iWARP over TCP

	at place
}

// RDMAPort is one port of an RDMA device.
type RDMAPort struct {
	Number string `json:"number"`
	Active bool   `json:"active"`
	Layer  string `json:"link_layer"` // "InfiniBand" or "Ethernet"
	Rate   string `json:"rate"`       // "400 Gb/sec (4X NDR)"
}

// Active says whether a port of it has a link.
func (d *RDMADevice) Active() bool {
	return slices.ContainsFunc(d.Ports, func(p RDMAPort) bool { return p.Active })
}

// Usable says whether this process may open it.
func (d *RDMADevice) Usable() bool {
	return slices.ContainsFunc(d.Nodes, func(n string) bool { return strings.Contains(n, "/uverbs") })
}

// rdmaRoot guards the places where rdmamap looks, which are its variables.
var rdmaRoot sync.Mutex

const (
	rdmaClass = "/sys/class/infiniband"
	rdmaDev   = "/dev/infiniband"
)

// rdma lists the RDMA devices. rdmamap says which there are, with their ports
// and character devices; for the interfaces it would ask the kernel of this
// host, whatever the root is, so these are read here.
func (r *reader) rdma() []RDMADevice {
	rdmaRoot.Lock()
	defer rdmaRoot.Unlock()
	rdmamap.RdmaClassDir = r.root + rdmaClass
	rdmamap.RdmaIbUcmDir = r.root + "/sys/class/infiniband_cm"
	rdmamap.RdmaUmadDir = r.root + "/sys/class/infiniband_mad"
	rdmamap.RdmaUverbsDir = r.root + "/sys/class/infiniband_verbs"
	rdmamap.RdmaDeviceDir = r.root + rdmaDev
	rdmamap.RdmaUcmDevice = r.root + rdmaDev + "/rdma_cm"

	devices := []RDMADevice{}
	names := rdmamap.GetRdmaDeviceList()
	slices.Sort(names)
	for _, name := range names {
		dir := rdmaClass + "/" + name
		d := RDMADevice{Name: name, at: r.placeOf(dir), Ports: []RDMAPort{}, NICs: []string{}, Nodes: []string{}}
		d.PCI, d.NUMA, d.Soft = d.at.address(), d.at.numa, strings.Contains(r.target(dir), "/virtual/")
		ports := rdmamap.GetPorts(name)
		slices.Sort(ports)
		for _, number := range ports {
			port := dir + "/ports/" + number
			state, _ := r.text(port + "/state") // "4: ACTIVE"
			layer, _ := r.text(port + "/link_layer")
			rate, _ := r.text(port + "/rate")
			d.Ports = append(d.Ports, RDMAPort{number, strings.Contains(state, "ACTIVE"), layer, rate})
			d.NICs = r.ndevs(port+"/gid_attrs/ndevs", d.NICs)
		}
		for _, node := range rdmamap.GetRdmaCharDevices(name) {
			if node = strings.TrimPrefix(node, r.root); r.exists(node) && !slices.Contains(d.Nodes, node) {
				d.Nodes = append(d.Nodes, node)
			}
		}
		slices.Sort(d.Nodes)
		devices = append(devices, d)
	}
	return devices
}

// ndevs adds the interfaces that a GID table names. An entry that is not in
// use cannot be read, so nothing is noted.
func (r *reader) ndevs(dir string, found []string) []string {
	for _, index := range r.list(dir) {
		b, err := os.ReadFile(r.root + dir + "/" + index)
		if name := strings.TrimSpace(string(b)); err == nil && name != "" && !slices.Contains(found, name) {
			found = append(found, name)
		}
	}
	return found
}
