// Package topo finds out what a host has: GPUs and their links, network
// interfaces and their RDMA devices, how far these are from each other, and the
// cores that are free to this process.
//
// Nothing here fails: what cannot be read is left out, and Host.Notes says so.
package topo

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Host is what was found. Whoever reads it must not change it.
type Host struct {
	GPUs   []GPU        `json:"gpus"`
	Driver Driver       `json:"gpu_driver"`
	NICs   []NIC        `json:"nics"`
	RDMA   []RDMADevice `json:"rdma"`
	NUMA   int          `json:"numa"` // nodes
	Cores  Cores        `json:"cores"`
	Notes  []string     `json:"notes"` // what could not be read, or is odd
}

// GPU is one device of the driver's, in the order of its numbers.
type GPU struct {
	Index  int      `json:"index"`
	Name   string   `json:"name"`
	UUID   string   `json:"uuid"`
	PCI    string   `json:"pci"` // "0000:17:00.0"
	NUMA   int      `json:"numa"`
	Memory uint64   `json:"memory_bytes"`
	MIG    bool     `json:"mig"`
	Links  []NVLink `json:"nvlinks"`

	at place
}

// NVLink is what leads from a GPU to one other end.
type NVLink struct {
	To    string `json:"to"` // PCI address of a GPU, or "switch"
	Lanes int    `json:"lanes"`
}

// Driver is that of the GPUs.
type Driver struct {
	Version string `json:"version"`
	CUDA    string `json:"cuda"`   // the newest version that it supports
	Missing string `json:"reason"` // why it could not be asked; empty: it was
}

// System is where Read looks; Local is this host.
type System struct {
	Root      string // of the file system
	GPUs      func() ([]GPU, Driver)
	Addresses func() (map[string][]netip.Prefix, error) // by interface
	Affinity  func() ([]int, error)                     // cores that the process may use
}

// Local is this host.
func Local() System {
	return System{Root: "/", GPUs: nvmlGPUs, Addresses: addresses, Affinity: affinity}
}

// Read looks at everything. It takes milliseconds, or, where a GPU driver has
// to start first, seconds.
func (s System) Read() *Host {
	r := s.reader()
	nodes, _ := filepath.Glob(r.root + "/sys/devices/system/node/node[0-9]*") // the pattern is good
	h := &Host{NUMA: len(nodes)}
	h.GPUs, h.Driver = s.GPUs()
	for i := range h.GPUs {
		g := &h.GPUs[i]
		g.at = r.pci(g.PCI)
		g.NUMA = g.at.numa
	}
	addrs, err := s.Addresses()
	if err != nil {
		r.note("addresses of the interfaces: %v", err)
	}
	h.RDMA = r.rdma()
	h.NICs = r.nics(h.RDMA, addrs)
	h.Cores = s.cores(r)
	r.unserved(h)
	h.GPUs, h.Notes = append([]GPU{}, h.GPUs...), append([]string{}, r.notes...)
	return h
}

func addresses() (map[string][]netip.Prefix, error) {
	all, err := net.Interfaces()
	if err != nil {
		return nil, err
	}
	found := map[string][]netip.Prefix{}
	for _, i := range all {
		list, err := i.Addrs()
		if err != nil {
			return found, err
		}
		found[i.Name] = nil
		for _, a := range list {
			if p, err := netip.ParsePrefix(a.String()); err == nil {
				found[i.Name] = append(found[i.Name], p)
			}
		}
	}
	return found, nil
}

// NVLinks is the number of NVLink lanes between two GPUs, direct or through
// switches; 0 if there are none.
func NVLinks(a, b *GPU) int {
	through := [2]int{}
	for i, pair := range [2][2]*GPU{{a, b}, {b, a}} {
		for _, l := range pair[0].Links {
			switch l.To {
			case pair[1].PCI:
				return l.Lanes
			case "switch":
				through[i] = l.Lanes
			}
		}
	}
	return min(through[0], through[1])
}

// unserved notes NVIDIA GPUs on the PCI bus that the driver does not show.
func (r *reader) unserved(h *Host) {
	for _, name := range r.list("/sys/bus/pci/devices") {
		dir := "/sys/bus/pci/devices/" + name
		vendor, _ := r.text(dir + "/vendor")
		class, _ := r.text(dir + "/class")
		display := strings.HasPrefix(class, "0x0300") || strings.HasPrefix(class, "0x0302")
		known := func(g GPU) bool { return g.PCI == name }
		if vendor == "0x10de" && display && !slices.ContainsFunc(h.GPUs, known) {
			r.note("the NVIDIA GPU at %s has no driver here: install the NVIDIA driver, or make it visible in this container", name)
		}
	}
}

// reader reads files of a System and notes what is wrong with them.
type reader struct {
	root  string
	notes []string
}

func (s System) reader() *reader {
	root, err := filepath.EvalSymlinks(s.Root)
	if err != nil {
		root = s.Root
	}
	return &reader{root: strings.TrimSuffix(root, "/")}
}

func (r *reader) note(format string, args ...any) {
	n := "topo: " + fmt.Sprintf(format, args...)
	if !slices.Contains(r.notes, n) {
		r.notes = append(r.notes, n)
	}
}

// text is the content of a small file without white space around it. That it
// is not there is normal, everything else is noted.
func (r *reader) text(name string) (string, bool) {
	b, err := os.ReadFile(r.root + name)
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTDIR) {
			r.note("read %s: %v", name, reason(err))
		}
		return "", false
	}
	return string(bytes.TrimSpace(b)), true
}

// number is the whole number in a file, or otherwise if there is none. What is
// no number is noted.
func (r *reader) number(name string, otherwise int) int {
	s, ok := r.text(name)
	if !ok {
		return otherwise
	}
	n, err := strconv.ParseInt(s, 0, 64)
	if err != nil {
		r.note("%s holds %.40q, not a number", name, s)
		return otherwise
	}
	return int(n)
}

// list is the names in a folder, sorted.
func (r *reader) list(name string) []string {
	entries, err := os.ReadDir(r.root + name)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		r.note("list %s: %v", name, reason(err))
	}
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = e.Name()
	}
	return names
}

func (r *reader) exists(name string) bool {
	_, err := os.Lstat(r.root + name)
	return err == nil
}

// target is the path that name leads to through links; empty if nowhere.
func (r *reader) target(name string) string {
	to, err := filepath.EvalSymlinks(r.root + name)
	if err != nil {
		return ""
	}
	return strings.TrimPrefix(to, r.root)
}

// base is the last element of what name links to; empty if nowhere.
func (r *reader) base(name string) string {
	if to := r.target(name); to != "" {
		return path.Base(to)
	}
	return ""
}

func reason(err error) error {
	var pe *fs.PathError
	if errors.As(err, &pe) {
		return pe.Err
	}
	return err
}
