package topo

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

// hostOf is a host with a GPU below each of the switches gpus, and an RDMA device below each of the switches devices.
func hostOf(gpus, devices string) *Host {
	at := func(s rune, i int) place {
		return place{path: []string{"pci0000:00", "0000:0" + string(s) + ":00.0", fmt.Sprintf("0000:%02x:00.0", i)}}
	}
	h := &Host{NUMA: 1}
	for i, s := range gpus {
		h.GPUs = append(h.GPUs, GPU{Index: i, at: at(s, 16+i)})
	}
	for i, s := range devices {
		h.RDMA = append(h.RDMA, RDMADevice{
			Name: fmt.Sprint("mlx5_", i), Ports: []RDMAPort{{Number: "1", Active: true}}, Nodes: []string{"/dev/infiniband/uverbs0"}, at: at(s, 32+i),
		})
	}
	return h
}

// TestDevices: the nearest device comes first, and GPUs with the same ones nearest share them out.
func TestDevices(t *testing.T) {
	for _, c := range []struct {
		gpus, devices string
		down          int // a device without a link; -1: none
		want          []string
	}{
		{"12", "12", -1, []string{"01", "10"}},
		{"12", "21", -1, []string{"10", "01"}},
		{"1111", "11", -1, []string{"01", "10", "01", "10"}},
		{"1122", "1122", -1, []string{"0123", "1023", "2301", "3201"}},
		{"11", "112", 0, []string{"102", "102"}},
		{"33", "12", -1, []string{"01", "10"}},
	} {
		h := hostOf(c.gpus, c.devices)
		var names []string
		for i := range h.RDMA {
			h.RDMA[i].Ports[0].Active = i != c.down
			names = append(names, h.RDMA[i].Name)
		}
		for i, want := range c.want {
			got := ""
			for _, name := range h.Devices(i, "", names) {
				got += name[len("mlx5_"):]
			}
			require.Equal(t, want, got, "%+v GPU %d", c, i)
		}
		require.Equal(t, names, h.Devices(99, "", names), "no such GPU")
	}
	h := hostOf("1", "21")
	require.Equal(t, []string{"mlx5_1", "mlx5_0", "other"}, h.Devices(0, "", []string{"other", "mlx5_0", "mlx5_1"}), "one that is not known is last")
}
