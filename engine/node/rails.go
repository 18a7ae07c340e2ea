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
	f, err := transport.Fabric(nil), error(nil)
	for _, name := range cfg.Interfaces {
		var host string
		if host, err = interfaceAddress(name); err != nil {
			break
		}
		e := environment(cfg, g, log, net.JoinHostPort(host, "0"))
		if e.Host = host; cfg.Role == conf.Worker {
			e.Bind = host
		}
		var opened []transport.Fabric
		if opened, err = base().Open(e); err != nil {
			err = fmt.Errorf("node: DMLC_INTERFACE=%s: interface %s: %w", strings.Join(cfg.Interfaces, ","), name, err)
			break
		}
		members = append(members, opened...)
	}
	if err == nil {
		f, err = rails.New(members, rails.Options{Names: cfg.Interfaces, Stall: cfg.StallTimeout, Same: wire.SamePeer, Watch: watchLinks(cfg.Interfaces, log)})
	}
	if err != nil {
		closeAll(members)
		return nil, err
	}
	return f, nil
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
