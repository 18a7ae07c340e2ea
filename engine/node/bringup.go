package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/sys/unix"

	"fserver/engine/cluster"
	"fserver/engine/conf"
	"fserver/engine/gpu"
	"fserver/engine/peers"
	"fserver/engine/topo"
	"fserver/engine/trace"
	"fserver/engine/transport"
	"fserver/engine/transport/all"
	"fserver/engine/transport/faults"
	"fserver/engine/transport/stage"
	"fserver/engine/wire"
)

// failures are the transports that could not be opened, by the names of their drivers.
type failures map[string]error

func (f failures) Error() string { return errors.Join(slices.Collect(maps.Values(f))...).Error() }

// absent says whether d has nothing to do on this host, and nobody asks for it.
func absent(cfg *conf.Config, d *transport.Driver) bool {
	inside := d.Plain && conf.Loopback(cfg.SchedulerHost) && cfg.NodeHost == "" && !devicesNamed(cfg, d)
	return d.Open == nil || d.Name != carrier(cfg) && (inside || d.Absent != nil && d.Absent(cfg))
}

// devicesNamed says whether the settings name the devices of d.
func devicesNamed(cfg *conf.Config, d *transport.Driver) bool { return d.Named != nil && d.Named(cfg) }

// excluded says which setting keeps a node from opening a transport; empty: none.
func excluded(cfg *conf.Config, d *transport.Driver) string {
	switch {
	case cfg.Transport != conf.Auto && d.Name != carrier(cfg):
		return "FSERVER_TRANSPORT=" + cfg.Transport
	case d.Inside && cfg.Transport == conf.Auto && !cfg.SameHost:
		return "BYTEPS_ENABLE_IPC=0"
	case d.Plain && cfg.Transport == conf.Auto && cfg.TLS:
		return "FSERVER_TLS is on, and " + d.Name + " encrypts nothing"
	}
	return ""
}

// openFabrics opens the transports of a node, the best first. The last one reaches everybody. The
// error beside Fabrics is failures.
func openFabrics(cfg *conf.Config, g transport.Gate, log *zap.Logger) ([]transport.Fabric, error) {
	over, err := railsOf(cfg, log)
	if err != nil {
		return nil, err
	}
	base, err := openBase(cfg, g, log)
	if err != nil {
		return nil, err
	}
	list := []transport.Fabric{base}
	if cfg.Role == conf.Scheduler {
		return list, nil
	}
	if len(over) > 1 && railed(cfg) {
		f, err := openRails(cfg, g, log, over)
		if err != nil {
			closeAll(list)
			return nil, err
		}
		list = []transport.Fabric{f, base}
	}
	failed := failures{}
	drivers := all.Drivers()
	for i := len(drivers) - 2; i >= 0; i-- {
		d := &drivers[i]
		if absent(cfg, d) || excluded(cfg, d) != "" {
			continue
		}
		e := environment(cfg, g, log, location(base.Addr()))
		e.Hosts = devicesAt(over)
		f, err := d.Open(e)
		if err == nil {
			f, err = join(cfg, d, e, f)
		}
		switch {
		case err == nil:
			list = append(f, list...)
		case cfg.Transport != conf.Auto:
			closeAll(list)
			return nil, demanded(cfg, err)
		default:
			log.Log(onceWarn(d.Name), "cannot use the transport "+d.Name, zap.Error(err))
			failed[d.Name] = err
		}
	}
	if len(failed) == 0 {
		return list, nil
	}
	return list, failed
}

// demanded is the error of a node whose settings name a transport that cannot be opened.
func demanded(cfg *conf.Config, err error) error {
	var no *transport.ErrUnavailable
	if !errors.As(err, &no) {
		return err
	}
	remedy := "set FSERVER_TRANSPORT=auto"
	if no.Remedy != "" {
		remedy = no.Remedy + ", or " + remedy
	}
	return &settingError{fmt.Sprintf("FSERVER_TRANSPORT=%s: %s (%s)", cfg.Transport, no.Reason, remedy), err}
}

// warned holds the names of the drivers that this process has warned of.
var warned sync.Map

// onceWarn is the level at which it is told that a driver cannot be used: a process warns once, whatever nodes it has.
func onceWarn(driver string) zapcore.Level {
	if _, again := warned.LoadOrStore(driver, true); again {
		return zap.DebugLevel
	}
	return zap.WarnLevel
}

// carrier is the transport whose connections carry the data of peers, or conf.Auto.
func carrier(cfg *conf.Config) string {
	return cmp.Or(named(cfg).Over, cfg.Transport)
}

// environment is what drivers are given. A server takes connections at the host of the address at,
// too.
func environment(cfg *conf.Config, g transport.Gate, log *zap.Logger, at string) *transport.Env {
	e := &transport.Env{Config: cfg, Gate: g, Log: log, Refused: refused(log)}
	e.Host, _ = address(cfg)
	if own, ok := g.(*gate); ok {
		e.Device = own.device
	}
	if cfg.NodeHost != "" || len(cfg.Interfaces) > 0 {
		e.Bind = e.Host
	}
	if cfg.Backend == conf.GPU && cfg.NodeHost == "" && len(cfg.Interfaces) == 0 {
		e.Nearest = func(names []string) []string { return topo.Local().Read().Devices(cfg.GPU, cfg.Visible, names) }
	}
	if host, _, err := net.SplitHostPort(at); err == nil && cfg.Role == conf.Server {
		e.Listen, e.Host, e.Bind = net.JoinHostPort(host, "0"), host, ""
	}
	return e
}

// wrap has the Fabrics take GPU memory, and puts the drivers that wrap others around them.
func wrap(e *transport.Env, list []transport.Fabric) error {
	o := stage.Options{HasGPU: hasGPU, Events: !e.Config.Flags, Refused: func(why error) {
		e.Log.Warn("some GPU tensors go through host memory", zap.Error(why))
	}}
	if g, ok := e.Device.(gpu.GPU); ok {
		o.Device, o.Later = g.Device, g.Later
	}
	for i := range list {
		f, err := stage.Wrap(list[i], o)
		if err != nil {
			return err
		}
		list[i] = f
		for _, d := range all.Drivers() {
			if d.Wrap == nil {
				continue
			}
			over, err := d.Wrap(e, list[i])
			if err != nil {
				return err
			}
			list[i] = over
		}
	}
	return nil
}

// refused logs the connections that were not let in. Somebody may look every few
// seconds whether the port is open, a load balancer for one.
func refused(log *zap.Logger) func(string, error) {
	return func(remote string, err error) {
		level := zap.WarnLevel
		if errors.Is(err, transport.ErrLooked) {
			level = zap.DebugLevel
		}
		log.Log(level, "connection refused", zap.String("from", remote), zap.Error(err))
	}
}

// openBase opens the Fabric that reaches everybody. Workers dial and take no
// connections.
func openBase(cfg *conf.Config, g transport.Gate, log *zap.Logger) (transport.Fabric, error) {
	e := environment(cfg, g, log, "")
	host, err := address(cfg)
	if err == nil && cfg.NearGPU && !conf.Loopback(host) {
		host = near(cfg, host, log)
	}
	switch {
	case cfg.Role == conf.Scheduler:
		if host, err = schedulerAddress(cfg); err != nil {
			return nil, err
		}
		e.Listen, e.Bind = net.JoinHostPort(host, fmt.Sprint(cfg.SchedulerPort)), ""
	case err != nil:
		return nil, err
	case cfg.Role == conf.Server:
		e.Listen, e.Bind = net.JoinHostPort(host, fmt.Sprint(cfg.Port)), ""
	}
	f, err := openWhenFree(e)
	if err != nil {
		return nil, err
	}
	if why := onlyHere(cfg, host); why != "" {
		log.Warn(why)
	}
	at := location(f.Addr())
	if h, _, _ := net.SplitHostPort(at); h != "" && !cfg.Secret.IsSet() && !cfg.TLS && !conf.Loopback(h) {
		log.Warn(conf.OpenWarning(at))
	}
	return f, nil
}

// base is the driver that reaches everybody.
func base() *transport.Driver {
	drivers := all.Drivers()
	return &drivers[len(drivers)-1]
}

// A process that takes another's place at once finds its port taken until that one has
// wholly ended. A scheduler stays for up to 10 s when its cluster has ended, until all
// have closed their connections.
const (
	portPatience      = 2 * time.Second
	schedulerPatience = 12 * time.Second
)

// openWhenFree opens the base. While its port is taken it tries again, for a bounded time.
func openWhenFree(e *transport.Env) (transport.Fabric, error) {
	limit := portPatience
	if e.Config.Role == conf.Scheduler {
		limit = min(schedulerPatience, e.Config.InitTimeout)
	}
	begin := time.Now()
	for told := false; ; told = true {
		f, err := base().Open(e)
		switch {
		case err == nil:
			return f[0], nil
		case !errors.Is(err, unix.EADDRINUSE):
			return nil, err
		case time.Since(begin) >= limit:
			return nil, fmt.Errorf("node: the port was not free within %v: %w", limit, err)
		case !told:
			e.Log.Warn("the port is in use, waiting until it is free", zap.String("at", e.Listen), zap.Duration("for", limit))
		}
		time.Sleep(firstPause)
	}
}

// lossy puts the losses that the settings ask for, if any, over the Fabrics.
func (n *Node) lossy(fabrics []transport.Fabric) error {
	if n.cfg.DropPercent == 0 {
		return nil
	}
	n.log.Warn("dropping frames on purpose (PS_DROP_MSG)", zap.Int("percent", n.cfg.DropPercent), zap.Bool("sent again", n.cfg.Resend))
	for i, f := range fabrics {
		l, err := faults.Wrap(f, faults.Options{
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

// dialContext ends when nobody wants what is dialled from now on.
func (n *Node) dialContext() context.Context {
	if n.phase.Load() == joining {
		return n.ctx
	}
	return n.life
}

// dialling starts a goroutine that connects, which Close waits for.
func (n *Node) dialling(f func()) {
	n.dials.Add(1)
	n.driver.Spawn(f, n.dials.Done)
}

// join connects a member to the scheduler, in a goroutine of its own. In the bring-up, which
// ends with ctx, it fails the node if it cannot. Later it looks for the successor of a scheduler
// that is gone, for as long as it takes.
func (n *Node) join(ctx context.Context) {
	wait := time.Duration(0)
	if n.joins.Add(1) > 1 { // the last one that we found has ended, or was about to
		wait = firstPause
	}
	for ; ; wait = time.Second {
		pause(ctx, wait)
		err := n.meetScheduler(ctx)
		switch {
		case err == nil:
			return
		case ctx == n.ctx:
			n.driver.Under(func() { n.fail(closedError(err)) })
			return
		}
		n.log.Warn("waiting for the scheduler", zap.String("at", n.cfg.Scheduler()), zap.Error(err))
		if ctx.Err() != nil {
			return
		}
	}
}

// meetScheduler connects to the scheduler and hands the connection over.
func (n *Node) meetScheduler(ctx context.Context) error {
	base := n.base()
	c, err := n.dial(ctx, base, transport.Addr(scheme(base)+":"+n.cfg.Scheduler()), n.theScheduler())
	if err != nil {
		remedy := " (is it running, and are DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT right?)"
		if refusal(err) { // it is there, and err names the settings that differ
			remedy = ""
		}
		return fmt.Errorf("node: %s: %w%s", n.theScheduler(), err, remedy)
	}
	h, err := wire.ParseHello(c.Peer().Hello)
	if err != nil || h.Role != wire.RoleScheduler {
		c.Close()
		return badSetting("node: what listens at %s is %v %d, not a scheduler (DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT)", n.cfg.Scheduler(), h.Role, h.Rank)
	}
	if !n.driver.Own() {
		c.Close()
		return nil
	}
	defer n.driver.Disown()
	if n.failed() != nil {
		c.Close()
		return nil
	}
	n.enlist(&link{conn: c, plane: base, kind: linkScheduler, hello: h})
	n.control(cluster.Input{Kind: cluster.Up, Remote: c.Peer().Remote})
	return nil
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

// introduced takes the roster: now we know whom to connect to, or to expect.
// late says that the cluster runs already.
func (n *Node) introduced(rail []wire.Member, late bool) {
	if n.ctx.Err() != nil {
		return // the time is up, as WaitReady says
	}
	for i, p := range n.peers {
		m := &rail[i]
		why := "the process was lost and has not been replaced yet"
		if m.State == wire.Parting {
			why = hasLeft
		}
		n.step(p, peers.Input{Kind: peers.Named, Member: m, Late: late, Err: &LostError{Role: m.Role, Rank: m.Rank, Reason: why}})
	}
	n.admitAll()
	n.meet()
}

// connect connects a worker to p, which was m when it began. It runs in a goroutine of its
// own, and gives up when ctx ends or p is another run. A peer has one link, so a
// connection that stands when reach has begun another dial is closed: with two, the
// server ends the older one, and that would be taken for the end of both.
func (n *Node) connect(ctx context.Context, p *peer, m wire.Member) {
	l, err := n.path(ctx, m)
	if err != nil {
		n.unreached(ctx, p, &m, fmt.Errorf("node: %s: %w", m.Name(), err))
		return
	}
	c := l.conn
	h, err := wire.ParseHello(c.Peer().Hello)
	if err != nil || h.Role != wire.RoleServer || h.Rank != int32(m.Rank) && h.Rank != conf.NoRank || h.Epoch != m.Epoch {
		n.unreached(ctx, p, &m, &LostError{Role: m.Role, Rank: m.Rank, Address: c.Peer().Remote, Reason: fmt.Sprintf("%v %d answered at this address", h.Role, h.Rank)})
		c.Close()
		return
	}
	if !n.driver.Own() {
		c.Close()
		return
	}
	defer n.driver.Disown()
	if ctx.Err() != nil || !n.wants(p, &m) {
		c.Close()
		return
	}
	l.hello = h
	n.enlist(l)
	n.linked(p, l)
}

// accept takes a new connection: of a member by the scheduler, of a worker by
// a server.
func (n *Node) accept(p *plane, c transport.Conn) {
	h, err := wire.ParseHello(c.Peer().Hello)
	l := &link{conn: c, plane: p, why: n.lack, hello: h, since: trace.Now()}
	switch {
	case err != nil:
	case n.scheduler == nil && n.failed() != nil:
		err = fmt.Errorf("this node has failed: %w", n.failed())
	case n.scheduler != nil:
		n.lastID++
		l.kind, l.id = linkMember, n.lastID
		n.enlist(l)
		n.control(cluster.Input{Kind: cluster.Up, Conn: l.id, Remote: c.Peer().Remote})
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
	c.Close()
}

// meet tells the cluster when all peers are connected, and say so.
func (n *Node) meet() {
	missing := func(p *peer) bool { return p.State() == peers.Absent || p.Missing() }
	if n.phase.Load() != joining || n.met || slices.ContainsFunc(n.peers, missing) {
		return
	}
	n.met = true
	n.outputs(n.member.Connected(trace.Now()))
}
