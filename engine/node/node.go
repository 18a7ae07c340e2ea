// Package node is the composition root: it opens the Fabrics, brings a worker,
// server or scheduler into the cluster, drives progress for it, and ends it.
package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/sys/cpu"

	"fserver/engine/cluster"
	"fserver/engine/conf"
	"fserver/engine/exchange"
	"fserver/engine/mem"
	"fserver/engine/topo"
	"fserver/engine/trace"
	"fserver/engine/transport"
	"fserver/engine/wire"
)

// forever is longer than any process lives, and can be added to a clock.
const forever = 100 * 365 * 24 * time.Hour

// Version of the library; peers tell it each other.
const Version = "0.1.0"

// Node is one worker, server or scheduler. All methods are safe from any
// goroutine.
type Node struct {
	progress
	cfg      *conf.Config
	log      *zap.Logger
	gate     *gate
	spin     time.Duration
	yields   time.Duration // how long it polls before polls are followed by yields
	threaded bool          // the poller drives when no caller does
	counters trace.Counters
	channels *channels
	planes   []*plane         // the best first, the one that reaches everybody last
	only     string           // the transport that the user wants for data; empty: any
	lack     string           // why this node lacks a transport inside the host; empty: it does not
	gpu      *gpu             // nil: tensors are on the CPU
	worker   *exchange.Worker // of a worker, else nil
	server   *exchange.Server // of a server, else nil

	life     context.Context // ended by Close
	die      context.CancelFunc
	ctx      context.Context // of dialling during the bring-up
	cancel   context.CancelFunc
	dials    sync.WaitGroup
	joins    atomic.Int32 // calls of join
	deadline time.Time    // of the bring-up

	phase   atomic.Int32
	failure atomic.Pointer[error] // why the node is of no use any more

	stopped   atomic.Bool
	gone      chan struct{} // closed when it has ended
	closeOnce sync.Once
	closeErr  error
	unwatch   func() // of the GPU's Later; nil: none
	freeOnce  sync.Once

	_     cpu.CacheLinePad
	timer atomic.Int64 // when pass must look at the clock
	woken atomic.Bool  // somebody has slept: the next pass looks at everything

	// What follows belongs to who holds the token.
	events    [64]transport.Event
	passes    int                // since the last look at every Fabric
	member    *cluster.Member    // of a worker or server, else nil
	scheduler *cluster.Scheduler // of a scheduler, else nil
	links     map[transport.Conn]*link
	controls  map[int64]*link // those of the cluster, by the numbers that its outputs give them
	last      *link           // whose event came last
	lastID    int64           // of a connection of the scheduler
	peers     []*link         // the other side of the rail, by group; nil: not connected
	rail      []wire.Member   // those of peers; nil before the roster came
	waiting   []*link         // workers that connected before the roster came
	met       bool            // all peers are connected
	sayAt     int64           // when to say whom the cluster waits for
	said      string          // about that
	back      comingBack      // of peers and of this node
	stuck     []*link         // with frames that back-pressure held up
	ailing    []*link         // that take no more, and are to be ended
	frame     [1]transport.Op
	todo      []cluster.Output // of the calls of outputs under way
	stopErr   error            // what happened while leaving
	barriers  map[uint64]*barrier
}

// The phases of a node, in order.
const (
	joining = iota
	running
	leaving
	ended
)

// link is a connection and what it is for.
type link struct {
	conn   transport.Conn
	plane  *plane
	why    string // a better one was not used
	tried  bool   // a better one was tried, in vain
	kind   linkKind
	id     int64 // of a member at the scheduler: its number; of the scheduler at a member: 0
	index  int   // peer: place in the rail
	hello  wire.Hello
	left   bool     // it said Bye
	used   bool     // it said Up
	begun  bool     // calls use it
	ailing error    // why it takes no more
	frames [][]byte // not posted yet
	early  [][]byte // linkWaiting: frames that came already
	since  int64    // when it was opened
}

type linkKind uint8

const (
	linkWaiting   linkKind = iota // a worker that the scheduler has not named yet
	linkScheduler                 // ours to the scheduler
	linkMember                    // the scheduler's to a member
	linkPeer                      // between worker and server
)

// Fabrics opens the Fabrics of a node, the best first and the one that reaches
// everybody last; tests put their own in place. With an error it leaves none open, unless
// it gives Fabrics too: then the error says why a better one is not among them.
type Fabrics func(cfg *conf.Config, g transport.Gate, log *zap.Logger) ([]transport.Fabric, error)

// Open parses settings ("NAME=value") and starts to bring a node into its
// cluster. It does not wait; WaitReady does.
func Open(settings []string, b *exchange.Buffers) (*Node, error) {
	cfg, warnings, err := conf.Parse(settings)
	if err != nil {
		return nil, &settingError{err.Error()}
	}
	log := logger(cfg)
	for _, w := range warnings {
		log.Warn(string(w))
	}
	return open(cfg, log, b, openFabrics, openDevice)
}

func logger(cfg *conf.Config) *zap.Logger {
	level := [...]zapcore.Level{zap.ErrorLevel, zap.WarnLevel, zap.InfoLevel, zap.DebugLevel}[cfg.Log]
	enc := zap.NewDevelopmentEncoderConfig()
	enc.CallerKey, enc.StacktraceKey, enc.NameKey = "", "", "node"
	core := zapcore.NewCore(zapcore.NewConsoleEncoder(enc), stderr{}, level)
	name := cfg.Role.String()
	if cfg.Role != conf.Scheduler {
		name = fmt.Sprintf("%s %d", name, cfg.Rank)
	}
	return zap.New(core).Named(name)
}

func open(cfg *conf.Config, log *zap.Logger, b *exchange.Buffers, fabrics Fabrics, devices Devices) (n *Node, err error) {
	if cfg.Role == conf.Joint {
		return nil, badSetting("DMLC_ROLE=joint: a node is a worker, a server or a scheduler (init() of the Python package starts one process for each)")
	}
	gpu, err := openGPU(cfg, devices, log)
	if err != nil {
		return nil, err
	}
	free := topo.FreeCores().Free
	n = &Node{
		cfg: cfg, log: log, gpu: gpu, spin: cfg.Spin, yields: yieldsAfter(cfg, gpu, free), threaded: threaded(cfg, free),
		links: map[transport.Conn]*link{}, controls: map[int64]*link{}, barriers: map[uint64]*barrier{},
		gone:     make(chan struct{}),
		deadline: time.Now().Add(cfg.InitTimeout),
	}
	n.life, n.die = context.WithCancel(context.Background())
	n.ctx, n.cancel = context.WithDeadline(n.life, n.deadline)
	n.gate = newGate(cfg)
	if gpu != nil {
		n.gate.me.Caps |= wire.CapGPU
	}
	timing := cluster.Timing{Interval: cfg.HeartbeatInterval, Timeout: cfg.HeartbeatTimeout, Leave: cfg.StopTimeout, Rejoin: cfg.RejoinTimeout}
	shape := wire.Shape{Workers: cfg.Workers, Servers: cfg.Servers, GroupSize: cfg.GroupSize}
	switch cfg.Role {
	case conf.Worker:
		n.peers = make([]*link, cfg.Servers)
		n.channels = newChannels(cfg.Servers)
		n.worker, err = exchange.NewWorker(cfg.Servers, &n.counters, n.broken)
	case conf.Server:
		n.peers = make([]*link, cfg.Workers)
		n.channels = newChannels(cfg.Workers)
		n.server, err = exchange.NewServer(cfg.Workers, b, &n.counters, n.broken)
		if err == nil && !cfg.Loans {
			n.server.RefuseLoans()
		}
	case conf.Scheduler:
		n.channels = newChannels(0)
		n.scheduler, err = cluster.NewScheduler(cluster.SchedulerConfig{Shape: shape, Timing: timing})
	}
	if err == nil && gpu != nil {
		n.tickets().OnPassed(gpu.passed)
		if n.server != nil {
			n.server.ReceiveIn(gpu)
		}
	}
	if err == nil {
		n.back.open(n)
		err = n.progress.open()
	}
	if err == nil {
		list, failed := fabrics(cfg, n.gate, log)
		if len(list) == 0 {
			err = failed
		}
		if err == nil && n.scheduler == nil {
			err = gpu.wrap(cfg, list)
		}
		if err == nil {
			err = n.lossy(list)
			err = errors.Join(err, n.enter(list))
		}
		n.lack = n.lacks(failed)
	}
	if cfg.Transport != conf.Auto {
		n.only = cfg.Transport.Base().String()
	}
	if err == nil && n.scheduler == nil {
		n.member = cluster.NewMember(cluster.MemberConfig{
			Self: n.self(), Shape: shape, Scheduler: cfg.Scheduler(), Timing: timing, Patient: n.patient(),
		})
	}
	if err != nil {
		n.abandon()
		return nil, err
	}
	n.sayAt = trace.Now() + sayEvery
	n.timer.Store(n.nextTimer())
	if gpu != nil {
		n.unwatch = gpu.later.OnPanic(func(err error) { _ = n.Panicked(err) })
	}
	if n.threaded {
		n.spawn(n.poller, func() { close(n.gone) })
	} else {
		n.spawn(n.background, func() { close(n.gone) })
	}
	if n.member != nil {
		n.dialling(n.join)
	}
	return n, nil
}

// abandon undoes what open has done when it cannot finish.
func (n *Node) abandon() {
	n.die()
	for _, p := range n.planes {
		_ = p.Close()
	}
	n.progress.close()
	n.freeWords()
}

// self is how the roster names this node.
func (n *Node) self() wire.Member {
	m := wire.Member{
		Role: wire.Role(n.cfg.Role), Rank: n.cfg.Rank, Group: n.cfg.Group,
		Instance: n.cfg.Instance, Epoch: n.gate.me.Epoch, Addrs: n.addrs(),
		Pid: uint32(os.Getpid()), Host: hostName(),
	}
	return m
}

// Info is what is known of a node from outside.
type Info struct {
	Role                  int
	Rank, Group, Instance int
	Workers, Servers      int // groups
	Device                mem.Device
	Words                 mem.Region // of the tickets; none for a scheduler
	Address               string     // without the name of the transport
}

// Info describes the node.
func (n *Node) Info() Info {
	v := Info{
		Role: int(n.cfg.Role), Rank: n.cfg.Rank, Group: n.cfg.Group, Instance: n.cfg.Instance,
		Workers: n.cfg.Workers, Servers: n.cfg.Servers, Device: n.gpu.device(),
		Address: location(n.base().Addr()),
	}
	if tb := n.tickets(); tb != nil {
		v.Words = tb.Words()
	}
	return v
}

func (n *Node) tickets() *exchange.Table {
	switch {
	case n.worker != nil:
		return n.worker.Table
	case n.server != nil:
		return n.server.Table
	}
	return nil
}

// description is the JSON of Describe.
type description struct {
	Role      string            `json:"role"`
	Rank      int               `json:"rank"`
	Group     int               `json:"group"`
	Instance  int               `json:"instance"`
	Address   string            `json:"address"`
	Fabrics   []string          `json:"fabrics"`
	Links     []linkDescription `json:"links"`
	PushPulls uint64            `json:"push_pulls"`
	Requests  uint64            `json:"requests"`
	Responses uint64            `json:"responses"`
	BytesOut  uint64            `json:"bytes_out"`
	BytesIn   uint64            `json:"bytes_in"`
	Loans     uint64            `json:"loans"`
	Sleeps    uint64            `json:"sleeps"`
}

type linkDescription struct {
	Role      string `json:"role"`
	Rank      int    `json:"rank"`
	Remote    string `json:"remote"`
	Transport string `json:"transport"`
	Reason    string `json:"reason"`
}

// Describe gives JSON about the node: who it is, its links and its counters.
func (n *Node) Describe() ([]byte, error) {
	i := n.Info()
	d := description{
		Role: n.cfg.Role.String(), Rank: i.Rank, Group: i.Group, Instance: i.Instance,
		Address: i.Address, Links: []linkDescription{},
		PushPulls: n.counters.PushPulls.Load(), Requests: n.counters.Requests.Load(),
		Responses: n.counters.Responses.Load(), BytesOut: n.counters.BytesOut.Load(),
		BytesIn: n.counters.BytesIn.Load(), Loans: n.counters.Loans.Load(), Sleeps: n.counters.Sleeps.Load(),
	}
	for _, p := range n.planes {
		d.Fabrics = append(d.Fabrics, p.Name())
	}
	n.under(func() {
		for i, l := range n.peers {
			if n.up(l) {
				how, why := l.via()
				d.Links = append(d.Links, linkDescription{n.rail[i].Role.String(), n.rail[i].Rank, l.conn.Remote(), how, why})
			}
		}
	})
	return json.Marshal(d)
}

// own takes the token, waiting for the pass that is under way. False means
// that the node is closed, and failed says why. Whoever has it defers disown or
// giveBack.
func (n *Node) own() bool {
	if n.token.CompareAndSwap(false, true) {
		return true
	}
	n.wanted.Add(1)
	defer n.wanted.Add(-1)
	for looks := 1; !n.token.CompareAndSwap(false, true); looks++ {
		if n.stopped.Load() {
			return false
		}
		if looks%1000 == 0 { // 1 to 2 ns each: whoever holds it does not run
			runtime.Gosched()
			yield()
		}
	}
	return true
}

// disown gives the token back and makes the pass that others may have missed. It is to
// be deferred.
func (n *Node) disown() {
	if p := recover(); p != nil {
		panic(n.crashed(p))
	}
	n.timer.Store(n.nextTimer())
	n.token.Store(false)
	n.wakeAll()
	n.submit()
}

// news reports whether a ticket has ended since the last call. For the owner.
func (n *Node) news() bool {
	tb := n.tickets()
	return tb != nil && tb.News()
}

// pending says whether callers have put something into a queue of the exchange.
func (n *Node) pending() bool {
	switch {
	case n.worker != nil:
		return n.worker.Pending()
	case n.server != nil:
		return n.server.Pending()
	}
	return false
}

// take hands the exchange what callers have put into its queue, and lets it
// post what back-pressure held up.
func (n *Node) take() {
	switch {
	case n.worker != nil:
		n.worker.Drain()
	case n.server != nil:
		n.server.Drain()
	}
}

// pass makes one round over everything, and returns how much it found.
func (n *Node) pass(now int64) int {
	n.take()
	if len(n.stuck) != 0 {
		n.unstick()
	}
	ailing := len(n.ailing)
	found := n.poll()
	if ailing != 0 {
		n.endAiling(ailing)
	}
	due := now >= n.timer.Load()
	if due {
		n.tick()
		n.timer.Store(n.nextTimer())
	}
	if (found > 0 || due || n.news()) && n.others() { // they may wait for what has just ended
		n.wakeAll()
	}
	return found
}
