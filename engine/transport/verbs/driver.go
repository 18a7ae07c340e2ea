package verbs

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"

	"go.uber.org/zap"

	"fserver/engine/conf"
	"fserver/engine/gpu"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// Driver opens RDMA NICs.
var Driver = transport.Driver{
	Way:     conf.Way{Name: "verbs", Aliases: []string{"ibverbs", "multivan", "1"}, About: "RDMA between hosts", Options: settings()},
	Probe:   probe,
	Plain:   true,
	Absent:  absent,
	Named:   func(c *conf.Config) bool { return len(conf.Get[[]string](c, device)) > 0 },
	Open:    openAll,
	Strands: func(c *conf.Config) int { return conf.Get[int](c, pairs) },
}

const (
	plaintext  = "FSERVER_RDMA_PLAINTEXT"
	device     = "FSERVER_RDMA_DEVICE"
	pairs      = "STEPAF_QP_NUM"
	splitLag   = "STEPMESH_SPLIT_QP_LAG"
	gidIndex   = "FSERVER_GID_INDEX"
	mtu        = "FSERVER_RDMA_MTU"
	class      = "FSERVER_RDMA_TC"
	level      = "FSERVER_RDMA_SL"
	gpuDirect  = "FSERVER_RDMA_GPUDIRECT"
	timeout    = "FSERVER_RDMA_TIMEOUT"
	retries    = "FSERVER_RDMA_RETRIES"
	maxDevices = 8
	maxPairs   = 64 // to a peer, over all devices: what package rails takes
)

// openAll opens the devices that are named, or those of the interfaces that are, or one. One of several that
// does not work keeps its place.
func openAll(e *transport.Env) ([]transport.Fabric, error) {
	if e.Config.TLS && !conf.Get[bool](e.Config, plaintext) {
		return nil, &transport.ErrUnavailable{
			Transport: "verbs", Reason: "FSERVER_TLS is on, and RDMA encrypts nothing: tensors would travel as plain text",
			Remedy: "set FSERVER_RDMA_PLAINTEXT=1 to allow that",
		}
	}
	base, err := link.From(e)
	if err != nil {
		return nil, err
	}
	o := Options{Options: base, Near: e.Host, Lag: conf.Get[Lag](e.Config, splitLag), Path: pathOf(e.Config)}
	if g, ok := e.Device.(gpu.GPU); ok {
		o.GPU, o.Later, o.GPUDirect = g.Device, g.Later, conf.Get[Ways](e.Config, gpuDirect)
	}
	var all []Options
	names := conf.Get[[]string](e.Config, device)
	if e.Config.Transport == conf.Auto {
		o = o.auto(e, len(names) > 0)
	}
	if !several(names) {
		o.Device = strings.Join(names, ",")
	}
	for _, n := range names {
		if several(names) {
			one := o
			one.Device = n
			all = append(all, one)
		}
	}
	for i := 0; i < len(e.Hosts) && len(names) == 0; i++ {
		one := o
		one.Near, one.Only = e.Hosts[i], true
		all = append(all, one)
	}
	if len(all) == 0 {
		all = append(all, o)
	}
	if n := conf.Get[int](e.Config, pairs); n*len(all) > maxPairs {
		return nil, &transport.ErrUnavailable{
			Transport: "verbs", Reason: fmt.Sprintf("%s=%d over each of %d devices: at most %d queue pairs in all", pairs, n, len(all), maxPairs),
			Remedy: fmt.Sprintf("set %s to %d or less", pairs, maxPairs/len(all)),
		}
	}
	return openEach(all, e)
}

// openEach opens Fabrics, or the first one that works if e asks for one.
func openEach(all []Options, e *transport.Env) (list []transport.Fabric, err error) {
	works := false
	for i := range all {
		all[i].Own = all[i].Own || len(all) > 1
		f, bad := Open(all[i])
		switch {
		case bad == nil:
			f.sayPacket(e.Log)
			list, works = append(list, f), true
		case err == nil:
			err = bad
			fallthrough
		default:
			list = append(list, &transport.Absent{Device: cmp.Or(all[i].Device, all[i].Near), Why: bad})
		}
		if works && e.One {
			return list[len(list)-1:], nil
		}
	}
	if !works {
		return nil, err
	}
	return list, nil
}

// sayPacket warns if packets are smaller than the settings ask for.
func (f *Fabric) sayPacket(log *zap.Logger) {
	f.Owned(func() {
		if can := f.at.port.MTU; can < f.path.MTU {
			log.Warn(fmt.Sprintf("%s=%d: port %d of %s sends packets of at most %d bytes (raise the MTU of its network interface and of the switches, or of the InfiniBand subnet)",
				mtu, f.path.MTU, f.at.number, f.dev.Name, can))
		}
	})
}

// pathOf is what the settings say of the packets.
func pathOf(c *conf.Config) Path {
	p := Path{
		GID: int32(conf.Get[int](c, gidIndex)), TrafficClass: uint8(conf.Get[int](c, class)), ServiceLevel: uint8(conf.Get[int](c, level)),
		Timeout: uint8(conf.Get[int](c, timeout)), Retries: uint8(conf.Get[int](c, retries)),
	}
	if p.Fixed = p.GID >= 0; !p.Fixed {
		p.GID = 0
	}
	if size := conf.Get[packet](c, mtu); size > 0 {
		p.MTU = 128 << size
	}
	return p
}

// packet is how large packets may be: 0 as the port says, else 128 bytes times 2 to the power of it.
type packet uint8

// settings are those of this transport. ps-lite's depths of the queues have no effect.
func settings() []conf.Option {
	lag := conf.Choice[Lag](splitLag, "0", []string{"0", "1", "port1", "port2"},
		"ports of a bonded NIC that queue pairs use: 1 spreads them over both, port1 and port2 keep to one, 0 leaves it to the NIC. With 1 each queue pair also has a UDP source port of its own, by which switches spread them. DMLC_SPLIT_QP_LAG counts otherwise: 0 spreads, 1 and 2 are ports, all else is off")
	lag.Older = []conf.Spelling{{Name: "DMLC_SPLIT_QP_LAG", Want: "a whole number", To: func(v string) (string, bool) {
		n, err := strconv.Atoi(v)
		if names := []string{"1", "port1", "port2"}; err == nil && n >= 0 && n < len(names) {
			return names[n], true
		}
		return "0", err == nil
	}}}
	names := conf.Names(device, maxDevices, "RDMA devices, each as NAME or NAME:PORT. Tensors travel over all of them. If none is named, `auto` takes the one nearest to the GPU, and no software device. If no port is named, it is the first one that is up. With NAME*, for all that start so, or ^ before the first name, for all others, one of those is used. NCCL_IB_HCA is written as for NCCL")
	names.Older = []conf.Spelling{{Name: "NCCL_IB_HCA", Want: "names of devices as NCCL takes them", To: fromNCCL}}
	gid := conf.Number(gidIndex, "-1", -1, 255, "entry of the port's GID table that is used. With -1 it is chosen: RoCE v2 before v1, routable before private addresses, IPv4 before IPv6").Else("NCCL_IB_GID_INDEX")
	tc := conf.Number(class, "0", 0, 255, "traffic class of RoCE v2 packets: the DSCP, times 4, and the ECN bits").Else("NCCL_IB_TC")
	sl := conf.Number(level, "0", 0, 15, "service level of InfiniBand, and the priority of RoCE packets in a VLAN").Else("NCCL_IB_SL")
	recv := conf.Number("BYTEPS_RDMA_RX_DEPTH", "256", 1, 65536, "depth of the receive queue")
	send := conf.Number("BYTEPS_RDMA_START_DEPTH", "128", 1, 65536, "depth of the send queue")
	recv.Effect = "queues of a depth that can be set"
	send.Effect = recv.Effect
	return []conf.Option{
		names,
		conf.Number(pairs, "1", 1, maxPairs, "number of queue pairs to each peer over each device; with several devices at most 64 in all. A bonded NIC needs two or more to use both ports"),
		lag, gid, tc, sl,
		conf.Choice[packet](mtu, "port", []string{"port", "256", "512", "1024", "2048", "4096"}, "most bytes of a packet. The port of either end may allow less; `port` takes what it does"),
		conf.Number(timeout, "16", 8, 21, "time until packets that are not acknowledged are sent again: 4.096 µs times 2 to this power, so 16 is 0.27 s"),
		conf.Number(retries, "6", 1, 6, "how often they are. Then the connection ends"),
		conf.Choice[Ways](gpuDirect, "auto", []string{"auto", "0", "dmabuf", "peermem"},
			"how the NIC reads and writes GPU memory by itself: by dma-buf, by the kernel module nvidia-peermem, or with `auto` by the first of the two that works. 0 has GPU tensors go through host memory"),
		conf.Flag(plaintext, "0", "whether tensors may travel over RDMA, where nothing is encrypted, although FSERVER_TLS is on"),
		recv, send,
	}
}
