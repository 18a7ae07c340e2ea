package verbs

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"strings"

	rdma "fserver/cshim/verbs"
	"fserver/engine/transport"
)

// probe says of the library and of each device whether they can be used.
func probe() []transport.Finding {
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
		all = append(all, inspect(n))
	}
	return all
}

// inspect opens a device and looks at its ports.
func inspect(name string) transport.Finding {
	dev, err := open(name)
	if err != nil {
		return no(name, err, giveFiles)
	}
	defer dev.Close()
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
