// Package node is the composition root: it opens the Fabrics, brings a worker,
// server or scheduler into the cluster, drives progress for it, and ends it.
package node

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/cpu"

	"fserver/engine/channel"
	"fserver/engine/cluster"
	"fserver/engine/conf"
	"fserver/engine/exchange"
	"fserver/engine/gpu"
	"fserver/engine/mem"
	"fserver/engine/progress"
	"fserver/engine/trace"
	"fserver/engine/transport"
	"fserver/engine/transport/all"
	"fserver/engine/wire"
)

// forever is longer than any process lives, and can be added to a clock.
const forever = 100 * 365 * 24 * time.Hour

// Version of the library; peers tell it each other.
const Version = "0.1.0"

// Node is one worker, server or scheduler. All methods are safe from any
// goroutine.
type Node struct {
	driver   *progress.Driver
	cfg      *conf.Config
	log      *zap.Logger
	gate     *gate
	counters trace.Counters
	channels *channel.Channels
	proxies  proxies
	planes   []*plane         // the best first, the one that reaches everybody last
	only     string           // the transport that the user wants for data; empty: any
	lack     string           // why this node lacks a transport inside the host; empty: it does not
	gpu      *card            // nil: tensors are on the CPU
	side     exchange.Party   // the one of these that is not nil; of a scheduler, one without peers
	table    *exchange.Table  // of side
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
	later   atomic.Bool           // the cluster ran before this member came: it has the place of one that is gone
	failure atomic.Pointer[error] // why the node is of no use any more

	mails   atomic.Int64  // messages that nobody has received
	mailbox chan struct{} // has one if that has changed

	closeOnce sync.Once
	closeErr  error
	unwatch   func() // of the GPU's Later; nil: none
	freeOnce  sync.Once

	_ cpu.CacheLinePad
	// What follows belongs to who holds the token.
	events    [64]transport.Event
	passes    int                // since the last look at every Fabric
	machine   machine            // the one of these that is not nil
	member    *cluster.Member    // of a worker or server, else nil
	scheduler *cluster.Scheduler // of a scheduler, else nil
	links     map[transport.Conn]*link
	ended     map[transport.Conn]error // why peers' Conns that are not in links have ended; until EvClosed
	controls  map[int64]*link          // those of the cluster, by the numbers that its outputs give them
	last      *link                    // whose event came last
	lastID    int64                    // of a connection of the scheduler
	peers     []*peer                  // the other side of the rail, by group
	waiting   []*link                  // of workers that the scheduler has not named
	oldest    int64                    // of those, when it came; or cluster.Never
	met       bool                     // all peers are connected
	sayAt     int64                    // when to say whom the cluster waits for
	said      string                   // about that
	byes      bool                     // some are to be said
	stuck     []*link                  // with frames that are held up
	ailing    []*link                  // that take no more, and are to be ended
	frame     [1]transport.Op
	todo      []cluster.Output // of the calls of outputs under way
	stopErr   error            // what happened while leaving
	barriers  map[uint64]*barrier
	sent      map[uint64]*ending // messages whose outcome nobody has asked for
}

// machine is the node's part in the cluster.
type machine interface {
	Step(now int64, in cluster.Input) []cluster.Output
	Next() int64
	Waiting() string
	Send(now int64, to wire.Destination, data []byte) (seq uint64, out []cluster.Output, err error)
	Mail() (n int, first *wire.Message)
	Received()
	Statuses(now int64) []cluster.Status
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
	peer   *peer // of linkPeer
	hello  wire.Hello
	ailing error    // why it takes no more
	until  int64    // when it is ended for that
	frames [][]byte // not posted yet
	since  int64    // when it was opened
}

type linkKind uint8

const (
	linkStranger  linkKind = iota // a worker that has said nothing yet
	linkWaiting                   // a worker that has said Up and that the scheduler has not named yet
	linkScheduler                 // ours to the scheduler
	linkMember                    // the scheduler's to a member
	linkPeer                      // between worker and server
)

// Fabrics opens the Fabrics of a node, the best first and the one that reaches
// everybody last; tests put their own in place. With an error it leaves none open, unless
// it gives Fabrics too: then the error says why a better one is not among them.
type Fabrics func(cfg *conf.Config, g transport.Gate, log *zap.Logger) ([]transport.Fabric, error)

// DescribeSettings is conf.Describe for the transports of this build.
func DescribeSettings(settings []string) []byte { return conf.Describe(settings, all.Ways()) }

// Open parses settings ("NAME=value") and starts to bring a node into its
// cluster. It does not wait; WaitReady does.
func Open(settings []string, b *exchange.Buffers) (*Node, error) {
	cfg, warnings, err := conf.Parse(settings, all.Ways())
	if err != nil {
		return nil, &settingError{err.Error(), err}
	}
	log := logger(cfg)
	for _, w := range warnings {
		log.Warn(string(w))
	}
	return open(cfg, log, b, openFabrics, gpu.Open)
}

func open(cfg *conf.Config, log *zap.Logger, b *exchange.Buffers, fabrics Fabrics, devices gpu.Opener) (n *Node, err error) {
	if cfg.Role == conf.Joint {
		return nil, badSetting("DMLC_ROLE=joint: a node is a worker, a server or a scheduler (init() of the Python package starts one process for each)")
	}
	gpu, err := openGPU(cfg, devices, log)
	if err != nil {
		return nil, err
	}
	n = newNode(cfg, log, gpu)
	if n.driver, err = progress.Open(work{n}, n.waits()); err != nil {
		n.die()
		n.freeWords()
		return nil, err
	}
	n.proxies.driver = n.driver
	if err = n.takeRole(b); err == nil {
		err = n.openPlanes(fabrics)
	}
	if err != nil {
		n.abandon()
		return nil, err
	}
	n.start()
	return n, nil
}

func newNode(cfg *conf.Config, log *zap.Logger, gpu *card) *Node {
	n := &Node{
		cfg: cfg, log: log, gpu: gpu,
		links: map[transport.Conn]*link{}, ended: map[transport.Conn]error{}, controls: map[int64]*link{}, barriers: map[uint64]*barrier{},
		sent: map[uint64]*ending{}, mailbox: make(chan struct{}, 1),
		deadline: time.Now().Add(cfg.InitTimeout), oldest: cluster.Never,
		gate: newGate(cfg),
	}
	n.life, n.die = context.WithCancel(context.Background())
	n.ctx, n.cancel = context.WithDeadline(n.life, n.deadline)
	if gpu != nil {
		n.gate.me.Caps |= wire.CapGPU
		n.gate.device = gpu.GPU
	}
	return n
}

// owned calls f under the token, or when nobody can hold it any more.
func (n *Node) owned(f func()) {
	if !n.driver.Under(f) {
		f()
	}
}

// takeRole makes what a worker, a server or a scheduler has.
func (n *Node) takeRole(b *exchange.Buffers) (err error) {
	host := exchange.Host{Broken: n.broken, Breach: n.breached, Aside: n.driver.Aside, Owned: n.owned, Takes: n.takes, Patient: n.patient()}
	if n.gpu != nil {
		host.Point, host.Word, host.Passed = n.gpu.point, n.gpu.word, n.gpu.passed
	}
	switch n.cfg.Role {
	case conf.Server:
		n.meetPeers(n.cfg.Workers)
		if n.server, err = exchange.NewServer(n.cfg.Workers, b, &n.counters, host); err != nil {
			return err
		}
		n.side, n.table = n.server, n.server.Tickets()
		n.server.RefuseLoans(!n.cfg.Loans)
	case conf.Worker:
		n.meetPeers(n.cfg.Servers)
		if n.worker, err = exchange.NewWorker(n.cfg.Servers, &n.counters, host); err != nil {
			return err
		}
		n.side, n.table = n.worker, n.worker.Tickets()
	case conf.Scheduler:
		idle, err := exchange.NewWorker(0, &n.counters, host)
		if err != nil {
			return err
		}
		n.side, n.table = idle, idle.Tickets()
		if n.scheduler, err = cluster.NewScheduler(n.shape(), n.timing()); err != nil {
			return err
		}
		n.scheduler.Run = n.gate.me.Epoch
		n.machine = n.scheduler
	}
	n.channels = channel.NewChannels(len(n.peers))
	if n.gpu != nil && n.server != nil {
		n.server.ReceiveIn(n.gpu)
	}
	return nil
}

func (n *Node) shape() wire.Shape {
	return wire.Shape{Workers: n.cfg.Workers, Servers: n.cfg.Servers, GroupSize: n.cfg.GroupSize}
}

func (n *Node) timing() cluster.Timing {
	c := n.cfg
	return cluster.Timing{Interval: c.HeartbeatInterval, Timeout: c.HeartbeatTimeout, Leave: c.StopTimeout, Rejoin: c.RejoinTimeout}
}

// openPlanes opens the Fabrics, and makes what depends on their addresses.
func (n *Node) openPlanes(fabrics Fabrics) error {
	list, failed := fabrics(n.cfg, n.gate, n.log)
	if len(list) == 0 && failed != nil {
		return failed
	}
	if n.cfg.Transport != conf.Auto {
		n.only = carrier(n.cfg)
	}
	var err error
	if n.scheduler == nil {
		err = wrap(environment(n.cfg, n.gate, n.log, ""), list)
	}
	if err = errors.Join(err, n.lossy(list), n.enter(list)); err != nil {
		return err
	}
	if err = n.tellable(); err != nil {
		return err
	}
	n.lack = n.lacks(failed)
	if n.scheduler == nil {
		n.member = cluster.NewMember(cluster.MemberConfig{
			Self: n.self(), Shape: n.shape(), Scheduler: n.cfg.Scheduler(), Timing: n.timing(), Patient: n.patient(),
		})
		n.machine = n.member
	}
	return nil
}

// tellable returns an error if peers cannot be told of the addresses of this node.
func (n *Node) tellable() error {
	m := wire.Member{Addrs: n.addrs()}
	for _, a := range m.Addrs {
		if len(a) > wire.MaxAddr {
			return badSetting("node: the address %.64s... has %d bytes, and peers are told of at most %d: use fewer interfaces and devices (DMLC_INTERFACE)", a, len(a), wire.MaxAddr)
		}
	}
	if sum := m.AddrSum(); sum > wire.MaxAddrSum {
		return badSetting("node: the %d addresses have %d bytes, and peers are told of at most %d: use fewer interfaces and devices (DMLC_INTERFACE)", len(m.Addrs), sum, wire.MaxAddrSum)
	}
	return nil
}

// start lets the node run.
func (n *Node) start() {
	n.sayAt = trace.Now() + sayEvery
	n.reschedule()
	if n.gpu != nil {
		n.unwatch = n.gpu.Later.OnPanic(func(err error) { _ = n.Panicked(err) })
	}
	n.driver.Start()
	if n.member != nil {
		n.dialling(func() { n.join(n.ctx) })
	}
}

// abandon undoes what open has done when it cannot finish.
func (n *Node) abandon() {
	n.die()
	for _, p := range n.planes {
		_ = p.Close()
	}
	n.driver.Close()
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

// rank is the number of the node within its role; conf.NoRank: the scheduler has not assigned it yet.
func (n *Node) rank() int { return int(n.gate.rank.Load()) }

// group is the index of the node's group, as rank.
func (n *Node) group() int {
	if n.cfg.Rank == conf.NoRank {
		return n.rank() // which is assigned in groups of one
	}
	return n.cfg.Group
}

// Info is what is known of a node from outside.
type Info struct {
	Role                  int
	Rank, Group, Instance int  // rank and group: conf.NoRank until the scheduler has assigned them
	Recovery              bool // it has the place of one that was lost
	Workers, Servers      int  // groups
	Device                mem.Device
	Registers             bool       // what is sent is registered with a Fabric
	Words                 mem.Region // of the tickets; none for a scheduler
	Address               string     // without the name of the transport
}

// Info describes the node.
func (n *Node) Info() Info {
	v := Info{
		Role: int(n.cfg.Role), Rank: n.rank(), Group: n.group(), Instance: n.cfg.Instance, Recovery: n.later.Load(),
		Workers: n.cfg.Workers, Servers: n.cfg.Servers, Device: n.gpu.device(),
		Address: location(n.base().Addr()),
	}
	for _, p := range n.planes {
		v.Registers = v.Registers || p.Caps().LocalKeys
	}
	if n.scheduler == nil {
		v.Words = n.table.Words()
	}
	return v
}

// linkDescription is a link in the JSON of Describe.
type linkDescription struct {
	Role      string `json:"role"`
	Rank      int    `json:"rank"`
	Remote    string `json:"remote"`
	Transport string `json:"transport"`
	Reason    string `json:"reason"`

	Members []memberDescription `json:"members"`
	Path    string              `json:"path"`
}

type memberDescription struct {
	Interface string `json:"interface"`
	Remote    string `json:"remote"`
	Transport string `json:"transport"`
	Sent      uint64 `json:"sent"`
	Reason    string `json:"reason"`
	Path      string `json:"path"`
}

// Describe gives JSON about the node: who it is, its links and its counters.
func (n *Node) Describe() ([]byte, error) {
	var fabrics []string
	for _, p := range n.planes {
		fabrics = append(fabrics, p.Name())
	}
	links := []linkDescription{}
	n.driver.Under(func() {
		for _, p := range n.peers {
			if l := p.link; l != nil {
				m := p.Member()
				how, why := l.via()
				p := l.conn.Peer()
				members := []memberDescription{}
				for _, r := range p.Members {
					members = append(members, memberDescription{r.Name, r.Remote, r.Via, r.Sent, r.Why, r.Path})
				}
				links = append(links, linkDescription{m.Role.String(), m.Rank, p.Remote, how, why, members, p.Path})
			}
		}
	})
	c := &n.counters
	return json.Marshal(map[string]any{
		"role": n.cfg.Role.String(), "rank": n.rank(), "group": n.group(), "instance": n.cfg.Instance,
		"address": location(n.base().Addr()), "fabrics": fabrics, "links": links,
		"push_pulls": c.PushPulls.Load(), "requests": c.Requests.Load(), "responses": c.Responses.Load(),
		"bytes_out": c.BytesOut.Load(), "bytes_in": c.BytesIn.Load(),
		"loans": c.Loans.Load(), "sleeps": n.driver.Sleeps(),
	})
}
