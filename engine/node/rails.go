package node

import (
	"context"
	"fmt"
	"net"
	"strings"

	"go.uber.org/zap"

	"fserver/engine/conf"
	"fserver/engine/topo"
	"fserver/engine/transport"
	"fserver/engine/transport/rails"
	"fserver/engine/wire"
)

// hosts are the addresses of the interfaces that the user named, if there are several.
func hosts(cfg *conf.Config) (all []string, err error) {
	if len(cfg.Interfaces) < 2 || cfg.NodeHost != "" {
		return nil, nil
	}
	for _, name := range cfg.Interfaces {
		at, err := interfaceAddress(name)
		if err != nil {
			return nil, err
		}
		all = append(all, at)
	}
	return all, nil
}

// railed says whether the data of peers that no better transport reaches is to travel over several
// interfaces.
func railed(cfg *conf.Config) bool {
	return len(cfg.Interfaces) > 1 && cfg.NodeHost == "" && cfg.Role != conf.Scheduler &&
		(cfg.Transport == conf.Auto || carrier(cfg) == base().Name)
}

// join makes one Fabric of those that a driver has opened, if there are several devices, or if several connections are
// wanted over the one. It adds a Fabric of the first device alone, for peers that use one device.
func join(cfg *conf.Config, d *transport.Driver, e *transport.Env, opened []transport.Fabric) ([]transport.Fabric, error) {
	if d.Lanes == nil || len(opened) == 1 && d.Lanes(cfg) == 1 {
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
	f, err := rails.New(opened, options(cfg, e.Log, names, links, d.Lanes(cfg)))
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
func options(cfg *conf.Config, log *zap.Logger, names, links []string, lanes int) rails.Options {
	return rails.Options{
		News: sayMember(log), Names: names, Lanes: lanes, Split: uint64(cfg.Split), Stall: cfg.StallTimeout, Same: wire.SamePeer, Watch: watchLinks(links, log),
		Failed: func(member int, why error) {
			log.Error("a device has failed", zap.String("device", names[member]), zap.Error(why))
		},
	}
}

// sayMember logs what becomes of the connections that one is made of.
func sayMember(log *zap.Logger) func(transport.Peer, transport.Member) {
	return func(peer transport.Peer, m transport.Member) {
		who := zap.String("peer", peer.Remote)
		if h, err := wire.ParseHello(peer.Hello); err == nil {
			who = zap.String("peer", fmt.Sprintf("%v %d", h.Role, h.Rank))
		}
		fields := []zap.Field{who, zap.String("over", m.Name), zap.String("at", m.Remote), zap.String("transport", m.Via)}
		if m.Why == "" {
			log.Info("one more connection is used", fields...)
		} else {
			log.Warn("a connection is lost, and the others carry on", append(fields, zap.String("why", m.Why))...)
		}
	}
}

// openRails opens one Fabric over all interfaces that the user named. The Fabric that reaches everybody uses
// the first of them too: it carries control, and the data of peers with one interface.
func openRails(cfg *conf.Config, g transport.Gate, log *zap.Logger) (transport.Fabric, error) {
	var members []transport.Fabric
	for _, name := range cfg.Interfaces {
		opened, err := openOver(cfg, g, log, name)
		if err != nil {
			closeAll(members)
			return nil, err
		}
		members = append(members, opened...)
	}
	f, err := rails.New(members, options(cfg, log, cfg.Interfaces, cfg.Interfaces, 1))
	if err != nil {
		closeAll(members)
		return nil, err
	}
	return f, nil
}

// openOver opens a Fabric over one interface.
func openOver(cfg *conf.Config, g transport.Gate, log *zap.Logger, name string) ([]transport.Fabric, error) {
	host, err := interfaceAddress(name)
	if err != nil {
		return nil, err
	}
	e := environment(cfg, g, log, net.JoinHostPort(host, "0"))
	if e.Host = host; cfg.Role == conf.Worker {
		e.Bind = host
	}
	opened, err := base().Open(e)
	if err != nil {
		return nil, fmt.Errorf("node: interface %s of DMLC_INTERFACE=%s: %w", name, strings.Join(cfg.Interfaces, ","), err)
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
