package node

import (
	"fmt"
	"os"
	"strings"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"fserver/engine/cluster"
	"fserver/engine/conf"
	"fserver/engine/trace"
	"fserver/engine/transport"
	"fserver/engine/wire"
)

// What the log and the errors of the bring-up say of peers.

// hostName returns the name of this host, as far as peers are told it.
func hostName() string {
	name, err := os.Hostname()
	if err != nil || name == "" {
		return "an unnamed host"
	}
	return name[:min(len(name), wire.MaxHost)]
}

// me names this node in reasons that peers are told too.
func (n *Node) me() string { return fmt.Sprintf("%v %d", n.cfg.Role, n.cfg.Rank) }

// theScheduler names the scheduler.
func (n *Node) theScheduler() string { return "the scheduler at " + n.cfg.Scheduler() }

// name names the other end of a connection: role, rank, process and host, as far as
// they are known.
func (n *Node) name(l *link) string {
	switch l.kind {
	case linkScheduler:
		return n.theScheduler()
	case linkPeer:
		return n.rail[l.index].Name()
	case linkMember:
		if name := n.scheduler.Name(l.id); name != "" {
			return name
		}
	}
	return fmt.Sprintf("%v %d at %s", l.hello.Role, l.hello.Rank, l.conn.Remote())
}

// sayLinked logs, once for each connection to a peer, how its data travels and why not
// in a better way. A worker warns if it has tried one in vain.
func (n *Node) sayLinked(l *link) {
	m := &n.rail[l.index]
	what := "is connected"
	if n.back.seen[l.index] {
		what = "is back"
	}
	n.back.seen[l.index] = true
	how, why := l.via()
	fields := []zap.Field{zap.Uint32("pid", m.Pid), zap.String("host", m.Host), zap.String("transport", how)}
	if why != "" {
		fields = append(fields, zap.String("why", why))
	}
	level := zapcore.InfoLevel
	_, staged := transport.Via(l.conn, l.plane.Name())
	if n.worker != nil && (l.tried || staged != "" && n.cfg.CMAMode == conf.CMAAuto) {
		level = zapcore.WarnLevel
	}
	n.log.Log(level, fmt.Sprintf("%v %d %s", m.Role, m.Rank, what), fields...)
}

// sayEvery is after what time a node says whom the cluster waits for, and how often it
// does so again at most.
const sayEvery = int64(5 * time.Second)

// sayMissing logs whom the cluster waits for, if that is due and has changed.
func (n *Node) sayMissing(now int64) {
	switch {
	case n.phase.Load() != joining:
		n.sayAt = cluster.Never
	case now >= n.sayAt:
		n.sayAt = now + sayEvery
		if what := n.missing(); what != n.said {
			n.said = what
			n.log.Info("waiting for the cluster to become complete: " + what)
		}
	}
}

// missing says what the cluster waits for before it runs.
func (n *Node) missing() string {
	if n.scheduler != nil {
		return n.scheduler.Waiting()
	}
	var names []string
	for i := range n.rail {
		if l := n.peers[i]; n.rail[i].State == wire.Present && !(n.up(l) && l.used) {
			names = append(names, n.rail[i].Name())
		}
	}
	if len(names) != 0 {
		return "not connected to " + strings.Join(names, ", ")
	}
	return n.member.Waiting()
}

// lacks says why this node has not all transports that carry the data of peers on this
// host: text for people, empty if it has them. failed is why one could not be opened.
func (n *Node) lacks(failed error) string {
	why, has, inside := "", false, conf.CMA.String()
	for _, p := range n.planes {
		has = has || scheme(p) == inside
	}
	better := n.gives(inside)
	if has {
		better = conf.CUDAIPC.String()
	}
	switch {
	case has && (n.gpu == nil || n.cfg.SameHost):
		return ""
	case !has && n.cfg.Transport != conf.Auto:
		why = "FSERVER_TRANSPORT=" + n.cfg.Transport.String() + " at " + n.me()
	case !n.cfg.SameHost:
		why = "BYTEPS_ENABLE_IPC=0 at " + n.me()
	case failed != nil:
		why = strings.TrimPrefix(failed.Error(), inside+": ") + " at " + n.me()
	default:
		return ""
	}
	return better + ": " + why
}

// gives names the transports that a link over one of this name gives: of a node with a
// GPU, its memory travels over cma by cudaipc.
func (n *Node) gives(name string) string {
	if n.gpu != nil && name == conf.CMA.String() {
		return name + " and " + conf.CUDAIPC.String()
	}
	return name
}

// sayDone tells the scheduler when all workers have left this server, which may end in
// whatever way then.
func (n *Node) sayDone() {
	for i := range n.rail {
		l, m := n.peers[i], &n.rail[i]
		left := m.State == wire.Parting || l != nil && l.left && l.hello.Epoch == m.Epoch
		if !left {
			return
		}
	}
	n.outputs(n.member.Done(trace.Now()))
}

// whyNot joins what speaks against the ways that are better than the one taken.
func whyNot(of ...string) string {
	var said []string
	for _, s := range of {
		if s != "" {
			said = append(said, s)
		}
	}
	return strings.Join(said, "; ")
}
