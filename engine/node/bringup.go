package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"fserver/engine/cluster"
	"fserver/engine/conf"
	"fserver/engine/trace"
	"fserver/engine/transport"
	"fserver/engine/transport/cma"
	"fserver/engine/transport/lossy"
	"fserver/engine/transport/tcp"
	"fserver/engine/wire"
)

// gate checks who connects, and says who we are.
type gate struct {
	me     wire.Hello
	secret []byte
}

func newGate(cfg *conf.Config) *gate {
	g := &gate{me: wire.Hello{
		Build: "fserver " + Version, Cluster: cfg.Cluster, Role: wire.Role(cfg.Role), Rank: int32(cfg.Rank),
		Epoch: uint64(time.Now().UnixNano()),
	}}
	if cfg.Resend {
		g.me.Caps |= wire.CapResend
	}
	if cfg.Secret.IsSet() {
		g.secret = cfg.Secret.Bytes()
	}
	return g
}

// Open implements transport.Gate.
func (g *gate) Open(dialer bool) transport.Handshake {
	return wire.NewHandshake(g.me, g.secret, dialer)
}

// stderr is where the log goes. The descriptor is looked up at each line, so
// that a caller who puts another file in its place is respected.
type stderr struct{}

func (stderr) Write(b []byte) (int, error) { return os.Stderr.Write(b) }
func (stderr) Sync() error                 { return nil }

// openFabrics opens the Fabrics of a node: the one of this host if it can be had
// and is wanted, then TCP. An error beside Fabrics says why the first is missing.
func openFabrics(cfg *conf.Config, g transport.Gate, log *zap.Logger) ([]transport.Fabric, error) {
	base, err := openTCP(cfg, g, log)
	if err != nil {
		return nil, err
	}
	here := cfg.Role != conf.Scheduler && (cfg.Transport.Base() == conf.CMA || cfg.Transport == conf.Auto && cfg.SameHost)
	if !here {
		return []transport.Fabric{base}, nil
	}
	f, err := cma.Open(cma.Options{
		Listen:    cfg.Role == conf.Server,
		Gate:      g,
		Limits:    transport.Limits{Stall: cfg.StallTimeout},
		Refused:   refused(log),
		Mode:      [...]cma.Mode{cma.Auto, cma.Direct, cma.Staged}[cfg.CMAMode],
		NoPtracer: !cfg.Ptracer,
	})
	switch {
	case err == nil:
		return []transport.Fabric{f, base}, nil
	case cfg.Transport.Base() == conf.CMA:
		_ = base.Close()
		return nil, err
	}
	log.Warn("cannot use the transports inside this host", zap.Error(err))
	return []transport.Fabric{base}, err
}

// refused logs the connections that were not let in. Somebody may look every few
// seconds whether the port is open, a load balancer for one.
func refused(log *zap.Logger) func(string, error) {
	return func(remote string, err error) {
		level := zap.WarnLevel
		if errors.Is(err, tcp.ErrLooked) {
			level = zap.DebugLevel
		}
		log.Log(level, "connection refused", zap.String("from", remote), zap.Error(err))
	}
}

// openTCP opens the Fabric that reaches everybody. Workers dial and take no
// connections.
func openTCP(cfg *conf.Config, g transport.Gate, log *zap.Logger) (transport.Fabric, error) {
	o := tcp.Options{
		Gate:    g,
		Limits:  transport.Limits{Stall: cfg.StallTimeout},
		Refused: refused(log),
	}
	var err error
	if o.TLS, err = identity(cfg); err != nil {
		return nil, err
	}
	listen := cfg.Listen()
	host, err := address(listen)
	if err == nil && cfg.NearGPU && listen.Kind == conf.ListenRoute {
		host = near(cfg, host, log)
	}
	switch {
	case cfg.Role == conf.Scheduler:
		o.Listen = cfg.Scheduler()
		if cfg.NodeHost != "" {
			o.Listen = net.JoinHostPort(cfg.NodeHost, fmt.Sprint(cfg.SchedulerPort))
		}
	case err != nil:
		return nil, err
	case cfg.Role == conf.Server:
		o.Listen = net.JoinHostPort(host, fmt.Sprint(cfg.Port))
	case listen.Kind == conf.ListenHost || listen.Kind == conf.ListenInterface:
		o.Bind = host
	}
	f, err := openWhenFree(o, cfg, log)
	if err != nil {
		return nil, err
	}
	if at := location(f.Addr()); at != "" && listen.Open && !isLoopback(at) {
		log.Warn(conf.OpenWarning(at))
	}
	return f, nil
}

// A process that takes another's place at once finds its port taken until that one has
// wholly ended. A scheduler stays for up to 10 s when its cluster has ended, until all
// have closed their connections.
const (
	portPatience      = 2 * time.Second
	schedulerPatience = 12 * time.Second
)

// openWhenFree opens the Fabric that o describes. While its port is taken it tries again, for
// a bounded time.
func openWhenFree(o tcp.Options, cfg *conf.Config, log *zap.Logger) (*tcp.Fabric, error) {
	limit := portPatience
	if cfg.Role == conf.Scheduler {
		limit = min(schedulerPatience, cfg.InitTimeout)
	}
	begin := time.Now()
	for told := false; ; told = true {
		f, err := tcp.Open(o)
		switch {
		case !errors.Is(err, unix.EADDRINUSE):
			return f, err
		case time.Since(begin) >= limit:
			return nil, fmt.Errorf("node: the port was not free within %v: %w", limit, err)
		case !told:
			log.Warn("the port is in use, waiting until it is free", zap.String("at", o.Listen), zap.Duration("for", limit))
		}
		time.Sleep(firstPause)
	}
}

// lossy puts the losses that the settings ask for, if any, over the Fabrics.
func (n *Node) lossy(fabrics []transport.Fabric) error {
	if !n.cfg.Resend && n.cfg.DropPercent == 0 {
		return nil
	}
	if n.cfg.DropPercent != 0 {
		n.log.Warn("dropping frames on purpose (PS_DROP_MSG)", zap.Int("percent", n.cfg.DropPercent), zap.Bool("sent again", n.cfg.Resend))
	}
	for i, f := range fabrics {
		l, err := lossy.Wrap(f, lossy.Options{
			Drop: float64(n.cfg.DropPercent) / 100, Seed: uint64(n.cfg.Role)<<40 | uint64(n.cfg.Rank)<<8 | uint64(i),
			Resend: n.cfg.Resend, Timeout: n.cfg.ResendTimeout,
		})
		if err != nil {
			return err
		}
		fabrics[i] = l
	}
	return nil
}

func isLoopback(hostport string) bool {
	h, _, err := net.SplitHostPort(hostport)
	ip := net.ParseIP(h)
	return err == nil && ip != nil && ip.IsLoopback()
}

// address turns the settings' wish into one address of this host.
func address(l conf.Listen) (string, error) {
	switch l.Kind {
	case conf.ListenHost:
		if ip := net.ParseIP(l.Name); ip != nil && ip.IsUnspecified() {
			return "", badSetting("node: DMLC_NODE_HOST=%s is not an address that peers can connect to (name one of this host's, or set DMLC_INTERFACE)", l.Name)
		}
		return l.Name, nil
	case conf.ListenInterface:
		return interfaceAddress(l.Name)
	case conf.ListenRoute:
		// Connecting a UDP socket sends nothing; it asks the routing table.
		c, err := net.Dial("udp", net.JoinHostPort(l.Name, "9"))
		if err != nil {
			return "", badSetting("node: no route to the scheduler's host %s: %v (DMLC_PS_ROOT_URI)", l.Name, err)
		}
		defer c.Close()
		h, _, err := net.SplitHostPort(c.LocalAddr().String())
		return h, err
	}
	if strings.Contains(l.Name, ":") {
		return "::1", nil
	}
	return "127.0.0.1", nil
}

func interfaceAddress(name string) (string, error) {
	i, err := net.InterfaceByName(name)
	if err != nil {
		all, _ := net.Interfaces()
		names := make([]string, len(all))
		for j := range all {
			names[j] = all[j].Name
		}
		return "", badSetting("node: DMLC_INTERFACE=%s: %v (this host has %s)", name, err, strings.Join(names, ", "))
	}
	addrs, err := i.Addrs()
	if err != nil {
		return "", fmt.Errorf("node: DMLC_INTERFACE=%s: %w", name, err)
	}
	var found string
	for _, a := range addrs {
		p, ok := a.(*net.IPNet)
		if !ok || p.IP.IsLinkLocalUnicast() {
			continue
		}
		if p.IP.To4() != nil {
			return p.IP.String(), nil
		}
		if found == "" {
			found = p.IP.String()
		}
	}
	if found == "" {
		return "", badSetting("node: DMLC_INTERFACE=%s has no address", name)
	}
	return found, nil
}

// dialling starts a goroutine that connects, which Close waits for.
func (n *Node) dialling(f func()) {
	n.dials.Add(1)
	n.spawn(f, n.dials.Done)
}

// join connects a member to the scheduler. It runs in a goroutine of its own.
func (n *Node) join() {
	base := n.base()
	at := transport.Addr(scheme(base) + ":" + n.cfg.Scheduler())
	if n.joins.Add(1) > 1 { // the last one that we found was about to end
		pause(n.ctx, firstPause)
	}
	c, err := n.dial(n.ctx, base, at, n.theScheduler())
	if err != nil {
		remedy := " (is it running, and are DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT right?)"
		if refusal(err) { // it is there, and err names the settings that differ
			remedy = ""
		}
		n.failDial(fmt.Errorf("node: %s: %w%s", n.theScheduler(), err, remedy))
		return
	}
	if !n.own() {
		_ = c.Close()
		return
	}
	defer n.disown()
	h, err := wire.ParseHello(c.Hello())
	if err != nil || h.Role != wire.RoleScheduler {
		n.fail(badSetting("node: what listens at %s is %v %d, not a scheduler (DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT)", n.cfg.Scheduler(), h.Role, h.Rank))
		_ = c.Close()
		return
	}
	n.enlist(&link{conn: c, plane: base, kind: linkScheduler, hello: h})
	n.control(cluster.Input{Kind: cluster.Up, Remote: c.Remote()})
}

// firstPause is how long dial waits before it tries again; it doubles.
const firstPause = 20 * time.Millisecond

// pause waits, unless ctx ends.
func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

// dial connects to at, where who is, over f, again and again until it works, the peer
// says no, or ctx ends: in the bring-up, because its time is up.
func (n *Node) dial(ctx context.Context, f transport.Fabric, at transport.Addr, who string) (transport.Conn, error) {
	wait := firstPause
	var last error // of an attempt that said more than that its time was up
	for {
		try, cancel := context.WithTimeout(ctx, 10*time.Second)
		c, err := f.Connect(try, at)
		cancel()
		if err == nil {
			return c, nil
		}
		if refusal(err) || errors.Is(err, transport.ErrClosed) {
			return nil, err
		}
		n.log.Debug("not connected yet", zap.String("to", who), zap.Error(err))
		if last == nil || !errors.Is(err, context.DeadlineExceeded) {
			last = err
		}
		if pause(ctx, wait); ctx.Err() != nil {
			return nil, &TimeoutError{fmt.Sprintf("no connection within %v; the last attempt: %v", n.cfg.InitTimeout, last)}
		}
		wait = min(2*wait, 500*time.Millisecond)
	}
}

// failDial fails the node from a dialling goroutine.
func (n *Node) failDial(err error) {
	n.under(func() { n.fail(closedError(err)) })
}

// introduced takes the roster: now we know whom to connect to, or to expect.
// late says that the cluster runs already.
func (n *Node) introduced(rail []wire.Member, late bool) {
	n.rail, n.back.late = rail, late
	if n.ctx.Err() != nil {
		return // the time is up, as WaitReady says
	}
	for i := range n.rail {
		switch {
		case n.rail[i].State != wire.Present:
			n.absent(i)
		case n.worker != nil:
			n.reach(i, 0)
		}
	}
	n.admitAll()
	n.meet()
}

// connect connects a worker to server i. It runs in a goroutine of its own, and
// gives up when ctx ends or m is not that server any more. A peer has one link, so a
// connection that stands when reach has begun another dial is closed: with two, the
// server ends the older one, and that would be taken for the end of both.
func (n *Node) connect(ctx context.Context, i int, m wire.Member) {
	l, err := n.path(ctx, m)
	if err != nil {
		n.unreached(ctx, i, &m, fmt.Errorf("node: %s: %w", m.Name(), err))
		return
	}
	c := l.conn
	h, err := wire.ParseHello(c.Hello())
	if err != nil || h.Role != wire.RoleServer || h.Rank != int32(m.Rank) || h.Epoch != m.Epoch {
		n.unreached(ctx, i, &m, &LostError{Role: m.Role, Rank: m.Rank, Address: c.Remote(), Reason: fmt.Sprintf("%v %d answered at this address", h.Role, h.Rank)})
		_ = c.Close()
		return
	}
	if !n.own() {
		_ = c.Close()
		return
	}
	defer n.disown()
	if ctx.Err() != nil || !n.current(i, &m) {
		_ = c.Close()
		return
	}
	l.kind, l.index, l.hello, l.since = linkPeer, i, h, trace.Now()
	n.enlist(l)
	n.linked(l)
}

// accept takes a new connection: of a member by the scheduler, of a worker by
// a server.
func (n *Node) accept(p *plane, c transport.Conn) {
	h, err := wire.ParseHello(c.Hello())
	l := &link{conn: c, plane: p, why: n.lack, hello: h, since: trace.Now()}
	switch {
	case err != nil:
	case n.scheduler != nil:
		n.lastID++
		l.kind, l.id = linkMember, n.lastID
		n.enlist(l)
		n.control(cluster.Input{Kind: cluster.Up, Conn: l.id, Remote: c.Remote()})
		return
	case n.server != nil && h.Role == wire.RoleWorker && (h.Rank < 0 || int(h.Rank) >= n.cfg.Workers*n.cfg.GroupSize):
		err = fmt.Errorf("rank %d is out of range: this cluster has %d workers", h.Rank, n.cfg.Workers*n.cfg.GroupSize)
	case n.server != nil && h.Role == wire.RoleWorker:
		n.hold(l)
		n.admitAll()
		return
	default:
		err = fmt.Errorf("a %v (rank %d) must not connect to a %v", h.Role, h.Rank, n.cfg.Role)
	}
	n.log.Warn("connection closed", zap.String("peer", n.name(l)), zap.Error(err))
	_ = c.Close()
}

// meet tells the cluster when all peers are connected, and say so.
func (n *Node) meet() {
	if n.rail == nil || n.phase.Load() != joining || n.met {
		return
	}
	for i, l := range n.peers {
		if n.rail[i].State == wire.Present && !(n.up(l) && l.used) {
			return
		}
	}
	n.met = true
	n.outputs(n.member.Connected(trace.Now()))
}
