package verbs

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"fserver/engine/conf"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// Driver opens RDMA NICs.
var Driver = transport.Driver{
	Way:    conf.Way{Name: "verbs", Aliases: []string{"ibverbs", "multivan", "1"}, About: "RDMA between hosts, which `auto` does not take yet", Options: settings()},
	Probe:  probe,
	ByName: true, // it has not run on hardware
	Absent: func() bool {
		names, _ := filepath.Glob("/sys/class/infiniband/*")
		return !slices.ContainsFunc(names, func(at string) bool { return !software(filepath.Base(at)) })
	},
	Open: func(e *transport.Env) ([]transport.Fabric, error) {
		if e.Config.TLS && !conf.Get[bool](e.Config, plaintext) {
			return nil, &transport.ErrUnavailable{
				Transport: "verbs", Reason: "FSERVER_TLS is on, and RDMA encrypts nothing: tensors would travel as plain text",
				Remedy: "set FSERVER_RDMA_PLAINTEXT=1 to allow that",
			}
		}
		o, err := link.From(e)
		if err != nil {
			return nil, err
		}
		f, err := Open(Options{Options: o, Device: conf.Get[string](e.Config, device), Near: e.Host})
		if err != nil {
			return nil, err
		}
		return []transport.Fabric{f}, nil
	},
}

const (
	plaintext = "FSERVER_RDMA_PLAINTEXT"
	device    = "FSERVER_RDMA_DEVICE"
	noDevice  = "no RDMA device (/sys/class/infiniband is empty)"
)

// software says whether a device has no hardware below it.
func software(name string) bool {
	at, err := os.Readlink(filepath.Join("/sys/class/infiniband", name))
	return err == nil && strings.Contains(at, "/virtual/")
}

// Lag says how queue pairs use the ports of a bonded NIC.
type Lag uint8

// settings are those of this transport. Some wait for rails over several queue pairs.
func settings() []conf.Option {
	lag := conf.Choice[Lag]("STEPMESH_SPLIT_QP_LAG", "0", []string{"0", "1", "port1", "port2"},
		"ports of a bonded NIC that queue pairs use: 1 spreads them over both, port1 and port2 keep to one, 0 leaves it to the NIC. DMLC_SPLIT_QP_LAG counts otherwise: 0 spreads, 1 and 2 are ports, all else is off")
	lag.Older = []conf.Spelling{{Name: "DMLC_SPLIT_QP_LAG", Want: "a whole number", To: func(v string) (string, bool) {
		n, err := strconv.Atoi(v)
		if names := []string{"1", "port1", "port2"}; err == nil && n >= 0 && n < len(names) {
			return names[n], true
		}
		return "0", err == nil
	}}}
	pairs := conf.Number("STEPAF_QP_NUM", "2", 1, 64, "number of queue pairs for each peer")
	recv := conf.Number("BYTEPS_RDMA_RX_DEPTH", "256", 1, 65536, "depth of the receive queue")
	send := conf.Number("BYTEPS_RDMA_START_DEPTH", "128", 1, 65536, "depth of the send queue")
	all := []conf.Option{lag, pairs, recv, send}
	for i := range all {
		all[i].Effect = "rails over several queue pairs"
	}
	return append([]conf.Option{
		conf.Word(device, "name of the RDMA device; its port 1 is used"),
		conf.Flag(plaintext, "0", "whether tensors may travel over RDMA, where nothing is encrypted, although FSERVER_TLS is on"),
	}, all...)
}
