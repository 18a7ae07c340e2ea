package node

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"strings"

	"go.uber.org/zap"

	"fserver/engine/conf"
	"fserver/engine/topo"
	"fserver/engine/transport"
	"fserver/engine/transport/rails"
	"fserver/engine/wire"
)

// rail is an interface that data travels over, if there are several.
type rail struct {
	name, host string
	networks   []netip.Prefix // of the family of host
	rdma       bool           // it has an RDMA device that may be opened
}

// railsOf are the interfaces that the user named, or that DMLC_INTERFACE=auto comes to. There are none where one is used.
func railsOf(cfg *conf.Config, log *zap.Logger) (list []rail, err error) {
	if cfg.NodeHost != "" || cfg.Role == conf.Scheduler {
		return nil, nil
	}
	if cfg.NearGPU {
		return nearRails(cfg, log), nil
	}
	if len(cfg.Interfaces) == 1 {
		return nil, nil
	}
	for _, name := range cfg.Interfaces {
		at, err := interfaceAddress(name)
		if err != nil {
			return nil, err
		}
		list = append(list, rail{name: name, host: at, networks: networks(name, at), rdma: true})
	}
	return list, nil
}

// nearRails are what DMLC_INTERFACE=auto comes to, if it is more than one interface.
func nearRails(cfg *conf.Config, log *zap.Logger) (list []rail) {
	route, err := address(cfg)
	if err != nil || conf.Loopback(route) {
		return nil
	}
	var used, not []string
	for _, r := range topo.Local().Read().Rails(cfg.GPU, cfg.Visible, routeAt(route)) {
		if r.Why != "" {
			not = append(not, r.Interface+": "+r.Why)
			continue
		}
		host := r.Address.Addr().Unmap().String()
		used = append(used, r.Interface)
		list = append(list, rail{r.Interface, host, networks(r.Interface, host), r.RDMA != ""})
	}
	if len(list) < 2 {
		return nil
	}
	log.Info("interfaces chosen (DMLC_INTERFACE=auto)", zap.Strings("used", used), zap.Strings("not used", not))
	return list
}

// networks are those of an interface, of the family of the address at, or of both if it is empty. It has none if it is
// gone.
func networks(name, at string) (list []netip.Prefix) {
	all, _ := topo.Local().Addresses()
	for _, p := range all[name] {
		if like, err := netip.ParseAddr(at); err != nil || like.Is4() == p.Addr().Is4() {
			list = append(list, p)
		}
	}
	return list
}

// devicesAt are the addresses whose RDMA devices are used, if there are several.
func devicesAt(list []rail) (hosts []string) {
	for _, r := range list {
		if r.rdma {
			hosts = append(hosts, r.host)
		}
	}
	if len(hosts) < 2 {
		return nil
	}
	return hosts
}

// railed says whether the data of peers that no better transport reaches may travel over several interfaces.
func railed(cfg *conf.Config) bool {
	return cfg.Transport == conf.Auto || carrier(cfg) == base().Name
}

// join makes one Fabric of those that a driver has opened, if there are several devices, or if several connections are
// wanted over the one. It adds a Fabric of the first device alone, for peers that use one device.
func join(cfg *conf.Config, d *transport.Driver, e *transport.Env, opened []transport.Fabric) ([]transport.Fabric, error) {
	if d.Strands == nil || len(opened) == 1 && d.Strands(cfg) == 1 {
		return opened, nil
	}
	var names, links []string
	for _, f := range opened {
		names = append(names, strings.TrimPrefix(f.Name(), d.Name+"/"))
		name := ""
		switch f := f.(type) {
		case *transport.Absent:
			e.Log.Warn("a device is not used", zap.String("device", f.Device), zap.Error(f.Why))
		case interface{ Interface() string }:
			name = f.Interface()
		}
		links = append(links, name)
	}
	o := options(cfg, e.Log, names, links)
	o.Strands = d.Strands(cfg)
	o.Common = (cfg.NearGPU || cfg.Transport == conf.Auto) && !devicesNamed(cfg, d)
	f, err := rails.New(opened, o)
	if err != nil {
		closeAll(opened)
		return nil, fmt.Errorf("node: FSERVER_TRANSPORT=%s: %w", d.Name, err)
	}
	one := *e
	one.One = true
	beside, err := d.Open(&one)
	if err != nil {
		e.Log.Warn("peers that use one device cannot be reached by it", zap.String("transport", d.Name), zap.Error(err))
	}
	return append([]transport.Fabric{f}, beside...), nil
}

// options say how rails joins Fabrics. links are the network interfaces of each, or empty.
func options(cfg *conf.Config, log *zap.Logger, names, links []string) rails.Options {
	o := rails.Options{
		News: sayMember(log), Names: names, Split: uint64(cfg.Split), Stall: cfg.StallTimeout, Same: wire.SamePeer, Watch: watchLinks(links, log),
		Failed: func(member int, why error) {
			log.Error("a device has failed", zap.String("device", names[member]), zap.Error(why))
		},
	}
	for _, name := range links {
		o.Networks = append(o.Networks, networks(name, ""))
	}
	return o
}

// sayMember logs what becomes of the connections that one is made of.
func sayMember(log *zap.Logger) func(transport.Peer, transport.Member) {
	return func(peer transport.Peer, m transport.Member) {
		who := zap.String("peer", peer.Remote)
		if h, err := wire.ParseHello(peer.Hello); err == nil {
			who = zap.String("peer", fmt.Sprintf("%v %d", h.Role, h.Rank))
		}
		fields := []zap.Field{who, zap.String("over", m.Name), zap.String("at", m.Remote), zap.String("transport", m.Via), zap.Uint64("bytes", m.Sent)}
		if m.Why == "" {
			log.Info("one more connection is used", fields...)
		} else {
			log.Warn("a connection is lost, and the others carry on", append(fields, zap.String("why", m.Why))...)
		}
	}
}

// openRails opens one Fabric over several interfaces. The Fabric that reaches everybody uses one of them too: it
// carries control, and the data of peers with one interface.
func openRails(cfg *conf.Config, g transport.Gate, log *zap.Logger, list []rail) (transport.Fabric, error) {
	var members []transport.Fabric
	var names []string
	for _, r := range list {
		opened, err := openOver(cfg, g, log, r)
		if err != nil {
			closeAll(members)
			return nil, err
		}
		members, names = append(members, opened...), append(names, r.name)
	}
	o := options(cfg, log, names, names)
	o.Common = cfg.NearGPU
	for i, r := range list {
		o.Networks[i] = r.networks
	}
	f, err := rails.New(members, o)
	if err != nil {
		closeAll(members)
		return nil, err
	}
	return f, nil
}

// openOver opens a Fabric over one interface.
func openOver(cfg *conf.Config, g transport.Gate, log *zap.Logger, r rail) ([]transport.Fabric, error) {
	e := environment(cfg, g, log, net.JoinHostPort(r.host, "0"))
	if e.Host = r.host; cfg.Role == conf.Worker {
		e.Bind = r.host
	}
	opened, err := base().Open(e)
	if err != nil {
		return nil, fmt.Errorf("node: interface %s of DMLC_INTERFACE: %w", r.name, err)
	}
	return opened, nil
}

// watchLinks tells rails which interfaces are down, before anything stalls. Those without a name work.
func watchLinks(names []string, log *zap.Logger) func(context.Context, func(int, error)) {
	return func(ctx context.Context, report func(int, error)) {
		err := topo.WatchLinks(ctx, names, func(i int, why error) {
			if why != nil {
				log.Warn("a link is down", zap.Error(why))
			} else {
				log.Info("a link is up", zap.String("interface", names[i]))
			}
			report(i, why)
		})
		if err != nil {
			log.Warn("whether links are up is not known: one that goes down is noticed after FSERVER_STALL_TIMEOUT", zap.Error(err))
		}
	}
}

// closeAll closes Fabrics that nobody has used.
func closeAll(list []transport.Fabric) {
	for _, f := range list {
		_ = f.Close()
	}
}
