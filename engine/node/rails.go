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

// railed says whether the data of peers that no better transport reaches is to travel over several
// interfaces.
func railed(cfg *conf.Config) bool {
	return len(cfg.Interfaces) > 1 && cfg.NodeHost == "" && cfg.Role != conf.Scheduler &&
		(cfg.Transport == conf.Auto || carrier(cfg) == base().Name)
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
	f, err := rails.New(members, rails.Options{Names: cfg.Interfaces, Stall: cfg.StallTimeout, Same: wire.SamePeer, Watch: watchLinks(cfg.Interfaces, log)})
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

// watchLinks tells rails which interfaces are down, before anything stalls.
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
