package verbs

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"fserver/cshim/cuda"
	rdma "fserver/cshim/verbs"
	"fserver/engine/conf"
	"fserver/engine/transport"
)

// probe says of the library and of each device whether they can be used.
func probe(*conf.Config) []transport.Finding {
	names, err := listDevices("")
	if no := (*transport.ErrUnavailable)(nil); errors.As(err, &no) {
		what := "devices"
		if rdma.Open("") != nil {
			what = "library"
		}
		return []transport.Finding{{What: what, State: transport.No, Text: no.Reason, Remedy: no.Remedy}}
	}
	var all []transport.Finding
	for _, n := range names {
		all = append(all, inspect(n)...)
	}
	return all
}

// inspect opens a device, and looks at its ports and at what it can do with the GPUs.
func inspect(name string) []transport.Finding {
	dev, err := open(name)
	if err != nil {
		return []transport.Finding{no(name, err, giveFiles)}
	}
	defer dev.Close()
	list := []transport.Finding{ports(dev)}
	if all := gpus(); len(all) > 0 {
		list = append(list, gpuDirectOf(name, dev.DMABuf(), all))
	}
	return list
}

// gpus are those that this process sees. No context is made for that.
var gpus = func() (all []cuda.Direct) {
	if cuda.Open() != nil {
		return nil
	}
	n, _ := cuda.Count()
	for i := range n {
		d, _ := cuda.DirectOf(i) // of one that does not answer nothing works
		all = append(all, d)
	}
	return all
}

// gpuDirectOf says of a device how it reads and writes the memory of GPUs, or why it cannot. noBuf says why it takes no
// dma-buf.
func gpuDirectOf(name string, noBuf error, all []cuda.Direct) transport.Finding {
	f := transport.Finding{What: name + " GPUDirect", State: transport.Yes}
	var texts []string
	first := 0 // of those of which the same is to be said
	for i, d := range all {
		buf, peer := ways(d, noBuf, AnyWay)
		text := "by nvidia-peermem"
		switch {
		case buf == nil && peer == nil:
			text = "by dma-buf, else by nvidia-peermem"
		case buf == nil:
			text = "by dma-buf"
		case peer != nil:
			text = fmt.Sprintf("through host memory (by dma-buf: %s; by nvidia-peermem: %s)", bare(buf), bare(peer))
			f.State = transport.Note
			if d.GPUDirect {
				f.Remedy = directRemedy
			}
		}
		if (buf == nil || peer == nil) && needsReadback(d, name) {
			text += ", with a read behind writes"
		}
		switch last := len(texts) - 1; {
		case last >= 0 && strings.HasSuffix(texts[last], ": "+text):
			texts[last] = fmt.Sprintf("gpu %d to %d: %s", first, i, text)
		default:
			first, texts = i, append(texts, fmt.Sprintf("gpu %d: %s", i, text))
		}
	}
	f.Text = strings.Join(texts, "; ")
	return f
}

// ports says which ports of a device can be used.
func ports(dev *rdma.Device) (f transport.Finding) {
	name, err := dev.Name, error(nil)
	var text []string
	for n := int32(1); n <= max(dev.Ports, 1); n++ {
		a, bad := addressOf(dev, n, Path{}, netip.Addr{})
		if bad != nil {
			err = cmp.Or(err, bad)
			continue
		}
		text = append(text, fmt.Sprintf("port %d is active, packets of %d bytes, %s", n, a.port.MTU, list(a.gids)))
	}
	if len(text) == 0 {
		return no(name, err, "check cable and switch, and the address of the network interface (ibv_devinfo shows the ports)")
	}
	if err = lock(dev, 0); err != nil {
		return no(name, err, "raise the locked-memory limit: ulimit -l unlimited")
	}
	if software(name) {
		text = append(text, "it has no hardware and is slower than TCP, so auto does not take it unless FSERVER_RDMA_DEVICE names it")
	}
	return transport.Finding{What: name, State: transport.Yes, Text: strings.Join(text, "; ")}
}

// no is a finding that something cannot be used. The error's own remedy, if it has one, comes first.
func no(what string, err error, remedy string) transport.Finding {
	text, own, found := strings.Cut(strings.TrimPrefix(err.Error(), "verbs: "), " (")
	if found {
		remedy = strings.TrimSuffix(own, ")")
	}
	return transport.Finding{What: what, State: transport.No, Text: text, Remedy: remedy}
}
