package node

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"time"

	"go.uber.org/zap"

	"fserver/engine/conf"
	"fserver/engine/gpu"
	"fserver/engine/topo"
	"fserver/engine/transport"
	"fserver/engine/transport/all"
	"fserver/engine/wire"
)

// near is the address that DMLC_INTERFACE=auto comes to, where route is the
// one that routes to the scheduler.
func near(cfg *conf.Config, route string, log *zap.Logger) string {
	c := topo.Local().Read().Choose(cfg.GPU, cfg.Visible, routeAt(route))
	if !c.Address.IsValid() {
		log.Warn("DMLC_INTERFACE=auto: found no interface", zap.String("why", c.Why), zap.String("instead", route))
		return route
	}
	log.Debug("interface chosen", zap.String("interface", c.Interface), zap.Stringer("address", c.Address), zap.String("why", c.Why))
	return c.Address.String()
}

// routeAt is the address that routes to the scheduler, as topo takes it: not valid where it is not known.
func routeAt(route string) netip.Addr {
	a, _ := netip.ParseAddr(route)
	return a
}

// hostDescription is the JSON of DescribeHost.
type hostDescription struct {
	*topo.Host
	GPUNIC [][]topo.Distance `json:"gpu_nic"` // distance of each GPU from each NIC
	GPUGPU [][]gpuPath       `json:"gpu_gpu"`
	Auto   topo.Choice       `json:"auto"`       // what DMLC_INTERFACE=auto comes to where one interface is used
	Rails  []topo.Rail       `json:"auto_rails"` // each interface, and whether auto uses it
	Listen string            `json:"listen"`
	NoAddr string            `json:"listen_error"`
	Hidden string            `json:"listen_warning"` // why other hosts cannot connect
	// Where the scheduler that runs in this process or is started by it listens; empty: there is none.
	Scheduler   string         `json:"scheduler_listen"`
	NoScheduler string         `json:"scheduler_error"`
	NoGPU       string         `json:"gpu_error"`       // of settings that demand one
	NoWay       string         `json:"transport_error"` // of settings that name a transport
	Lost        []string       `json:"device_errors"`   // of devices of that transport; others work
	Engine      map[string]any `json:"engine"`
	Ways        []foundWay     `json:"transports"`
}

type gpuPath struct {
	PCIe    topo.Distance `json:"pcie"`
	NVLinks int           `json:"nvlinks"`
}

// foundWay is what a driver says of itself and of this host.
type foundWay struct {
	Name     string              `json:"name"`
	Over     string              `json:"over"`   // the transport whose connections it uses; empty: its own
	Inside   bool                `json:"inside"` // it reaches processes of this host alone
	Findings []transport.Finding `json:"findings"`
}

// DescribeHost gives JSON about this host: what topo finds, and what a node
// with these settings would make of it. Settings that are wrong count as none.
func DescribeHost(settings []string) ([]byte, error) {
	h := topo.Local().Read()
	d := hostDescription{Host: h, GPUNIC: [][]topo.Distance{}, GPUGPU: [][]gpuPath{}, Lost: []string{}}
	d.distances()
	cfg, whole := settled(settings)
	d.Ways = foundWays(cfg)
	var names []string
	for _, w := range d.Ways {
		names = append(names, w.Name)
	}
	d.Engine = map[string]any{
		"version": Version, "wire": wire.Version, "go": runtime.Version(),
		"transports": names, "backends": []string{conf.CPU.String(), conf.GPU.String()},
	}
	if whole {
		var err error
		if d.Listen, err = address(cfg); err != nil {
			d.NoAddr = err.Error()
		}
		d.Hidden = onlyHere(cfg, d.Listen)
		d.schedules(cfg)
	}
	d.try(cfg)
	route := routeAt(d.Listen)
	d.Auto, d.Rails = h.Choose(cfg.GPU, cfg.Visible, route), h.Rails(cfg.GPU, cfg.Visible, route)
	return json.Marshal(d)
}

// schedules fills what concerns a scheduler.
func (d *hostDescription) schedules(cfg *conf.Config) {
	if cfg.Role != conf.Scheduler && cfg.Role != conf.Joint && !cfg.HostScheduler {
		return
	}
	at, err := schedulerAddress(cfg)
	if err != nil {
		d.NoScheduler = err.Error()
		return
	}
	d.Scheduler, d.Hidden = at, cmp.Or(onlyHere(cfg, at), d.Hidden)
}

// settled is what the settings say. If they do not describe a process of a cluster, whole is false, and they count as
// those of a worker; if they are wrong, they count as none.
func settled(settings []string) (cfg *conf.Config, whole bool) {
	if cfg, _, err := conf.Parse(settings, all.Ways()); err == nil {
		return cfg, true
	}
	worker := []string{"DMLC_ROLE=worker", "DMLC_PS_ROOT_PORT=1"}
	cfg, _, err := conf.Parse(slices.Concat(worker, settings), all.Ways())
	if err != nil {
		cfg, _, _ = conf.Parse(worker, all.Ways()) // cannot fail
	}
	return cfg, false
}

// foundWays are the transports of this build.
func foundWays(cfg *conf.Config) (ways []foundWay) {
	inside := map[string]bool{}
	drivers := all.Drivers()
	for i := range drivers {
		inside[drivers[i].Name] = drivers[i].Inside
	}
	for _, d := range drivers {
		w := foundWay{d.Name, d.Over, inside[d.Name] || inside[d.Over], []transport.Finding{}}
		if d.Probe != nil {
			w.Findings = d.Probe(cfg)
		}
		ways = append(ways, w)
	}
	return ways
}

// distances fills GPUNIC and GPUGPU.
func (d *hostDescription) distances() {
	h := d.Host
	for i := range h.GPUs {
		g := &h.GPUs[i]
		nics, gpus := []topo.Distance{}, []gpuPath{}
		for j := range h.NICs {
			nics = append(nics, h.Distance(g, &h.NICs[j]))
		}
		for j := range h.GPUs {
			gpus = append(gpus, gpuPath{h.Between(g, &h.GPUs[j]), topo.NVLinks(g, &h.GPUs[j])})
		}
		d.GPUNIC, d.GPUGPU = append(d.GPUNIC, nics), append(d.GPUGPU, gpus)
	}
}

// try opens the GPU and the transport that the settings demand, as a node does.
func (d *hostDescription) try(cfg *conf.Config) {
	if cfg.Backend == conf.GPU || named(cfg).GPU {
		if _, err := openGPU(cfg, gpu.Find, zap.NewNop()); err != nil {
			d.NoGPU = err.Error()
			return
		}
	}
	drivers := all.Drivers()
	for i := range drivers[:len(drivers)-1] { // that the last one listens at an address is not tested here
		w := &drivers[i]
		if cfg.Role == conf.Scheduler || cfg.Transport == conf.Auto || d.NoAddr != "" || absent(cfg, w) || excluded(cfg, w) != "" {
			continue
		}
		lost, err := tryDriver(cfg, w, net.JoinHostPort(d.Listen, "0"))
		d.Lost = append(d.Lost, lost...)
		if err != nil {
			d.NoWay = demanded(cfg, err).Error()
		}
	}
}

// tryDriver opens a transport as openFabrics does, and closes it. lost are the errors of devices that are done without.
func tryDriver(cfg *conf.Config, d *transport.Driver, at string) (lost []string, err error) {
	log := zap.NewNop()
	over, err := railsOf(cfg, log)
	if err != nil {
		return nil, err
	}
	e := environment(cfg, newGate(cfg), log, at)
	e.Hosts = devicesAt(over)
	opened, err := d.Open(e)
	if err != nil {
		return nil, err
	}
	for _, f := range opened {
		if a, ok := f.(*transport.Absent); ok {
			lost = append(lost, fmt.Sprintf("%s: %v", a.Device, a.Why))
		}
	}
	opened, err = join(cfg, d, e, opened)
	closeAll(opened)
	return lost, err
}

// probe is the JSON of Probe.
type probe struct {
	Address  string `json:"address"`
	Spoke    bool   `json:"spoke"`    // it is a node: it knows the handshake
	Accepted bool   `json:"accepted"` // and it would talk to us
	TLS      string `json:"tls"`      // who has it, as transport.TLSError.Sides; empty: nobody, or it is not known
	Role     string `json:"role"`     // of an accepted one
	Rank     int    `json:"rank"`
	Build    string `json:"build"`
	Secret   string `json:"secret"` // how the secrets differ, as wire.HandshakeError.Secret
	Error    string `json:"error"`
	Took     int64  `json:"ns"` // to connect and to shake hands
}

// Probe introduces itself to the scheduler that the settings name, as a worker
// without a rank, and leaves again. A scheduler notes that a connection is
// gone; its cluster does not see it. The result is JSON.
func Probe(settings []string, limit time.Duration) ([]byte, error) {
	cfg, _, err := conf.Parse(settings, all.Ways())
	if err != nil {
		return nil, &settingError{err.Error(), err}
	}
	g := newGate(cfg)
	g.me.Role = wire.RoleWorker
	g.rank.Store(conf.NoRank)
	list, err := base().Open(&transport.Env{Config: cfg, Gate: g, Log: zap.NewNop()})
	if err != nil {
		return nil, fmt.Errorf("node: probe: %w", err)
	}
	f := list[0]
	defer f.Close()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	begin := Now()
	c, err := f.Connect(ctx, transport.Addr(scheme(f)+":"+cfg.Scheduler()))
	p := probe{Address: cfg.Scheduler(), Rank: -1, Took: Now() - begin}
	var hello wire.Hello
	if err == nil {
		hello, err = wire.ParseHello(c.Peer().Hello)
	}
	var refused *wire.HandshakeError
	p.Spoke = err == nil || errors.As(err, &refused)
	if apart := (*transport.TLSError)(nil); errors.As(err, &apart) {
		p.TLS = apart.Sides
		p.Error = apart.Reason
	} else if p.Spoke && cfg.TLS {
		p.TLS = transport.Both
	}
	switch {
	case refused != nil:
		p.Error, p.Secret = refused.Reason, refused.Secret
	case err == nil:
		p.Accepted, p.Role, p.Rank, p.Build = true, hello.Role.String(), int(hello.Rank), hello.Build
	case p.Error == "":
		p.Error = err.Error()
	}
	return json.Marshal(p)
}
