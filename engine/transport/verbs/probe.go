package verbs

import (
	"fmt"
	"strings"

	rdma "fserver/cshim/verbs"
	"fserver/engine/transport"
)

// probe says of the library and of each device whether they can be used.
func probe() []transport.Finding {
	if err := rdma.Open(""); err != nil {
		return []transport.Finding{no("library", err, "install libibverbs1 and ibverbs-providers")}
	}
	names, err := rdma.Names()
	if err != nil {
		return []transport.Finding{no("devices", err, "load the kernel's modules: modprobe ib_uverbs")}
	}
	if len(names) == 0 {
		return []transport.Finding{{
			What: "devices", State: transport.No, Text: noDevice,
			Remedy: "use tcp, or, for tests, add a software device: rdma link add rxe0 type rxe netdev INTERFACE",
		}}
	}
	var all []transport.Finding
	for _, n := range names {
		all = append(all, inspect(n))
	}
	return all
}

// inspect opens a device and looks at its port.
func inspect(name string) transport.Finding {
	dev, err := rdma.OpenDevice(name)
	if err != nil {
		return no(name, err, "in a container, add --device /dev/infiniband")
	}
	defer dev.Close()
	port, gids, err := usable(dev)
	if err != nil {
		return no(name, err, "check cable and switch, and the address of the network interface (ibv_devinfo shows the ports)")
	}
	text := []string{"port 1 is active", fmt.Sprintf("packets of %d bytes", port.MTU)}
	for _, g := range gids {
		text = append(text, fmt.Sprintf("GID %d %s (%s)", g.Index, g, g.Type))
	}
	return transport.Finding{What: name, State: transport.Yes, Text: strings.Join(text, ", ")}
}

// no is a finding that something cannot be used. The error's own remedy, if it has one, comes first.
func no(what string, err error, remedy string) transport.Finding {
	text, own, found := strings.Cut(strings.TrimPrefix(err.Error(), "verbs: "), " (")
	if found {
		remedy = strings.TrimSuffix(own, ")")
	}
	return transport.Finding{What: what, State: transport.No, Text: text, Remedy: remedy}
}

// usable is the port of a device that is to be used, and its GIDs.
func usable(dev *rdma.Device) (port rdma.Port, gids []rdma.GID, err error) {
	if port, err = dev.Port(1); err == nil && !port.Active {
		err = fmt.Errorf("port 1 of %s is not active", dev.Name)
	}
	if err == nil {
		gids, err = dev.GIDs(1)
	}
	if err == nil && len(gids) == 0 {
		err = fmt.Errorf("port 1 of %s has no GID (give its network interface an address)", dev.Name)
	}
	return port, gids, err
}
