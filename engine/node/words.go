package node

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"fserver/engine/cluster"
	"fserver/engine/conf"
	"fserver/engine/peers"
	"fserver/engine/trace"
	"fserver/engine/transport/all"
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
func (n *Node) me() string { return fmt.Sprintf("%v %d", n.cfg.Role, n.rank()) }

// theScheduler names the scheduler.
func (n *Node) theScheduler() string { return "the scheduler at " + n.cfg.Scheduler() }

// name names the other end of a connection: role, rank, process and host, as far as
// they are known.
func (n *Node) name(l *link) string {
	switch l.kind {
	case linkScheduler:
		return n.theScheduler()
	case linkPeer:
		return l.peer.Member().Name()
	case linkMember:
		if name := n.scheduler.Name(l.id); name != "" {
			return name
		}
	}
	return fmt.Sprintf("%v %d at %s", l.hello.Role, l.hello.Rank, l.conn.Peer().Remote)
}

// sayLinked logs, once for each connection to a peer, how its data travels and why not
// in a better way. A worker warns if it has tried one in vain. again says that the peer was
// there before.
func (n *Node) sayLinked(l *link, again bool) {
	m := l.peer.Member()
	what := "is connected"
	if again {
		what = "is back"
	}
	how, why := l.via()
	fields := []zap.Field{zap.Uint32("pid", m.Pid), zap.String("host", m.Host), zap.String("transport", how)}
	if why != "" {
		fields = append(fields, zap.String("why", why))
	}
	level := zapcore.InfoLevel
	worse := l.conn.Peer().Why
	if n.worker != nil && (l.tried || worse != "" && !n.chosen(scheme(l.plane))) {
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
	var names []string
	for _, p := range n.peers {
		if p.Missing() {
			names = append(names, p.Member().Name())
		}
	}
	if len(names) != 0 {
		return "not connected to " + strings.Join(names, ", ")
	}
	return n.machine.Waiting()
}

// lacks says why this node has not all transports that are better than the one that reaches
// everybody: text for people, empty if it has them. failed is what was beside its Fabrics.
func (n *Node) lacks(failed error) string {
	var errs failures
	errors.As(failed, &errs)
	var names, whys []string
	drivers := all.Drivers()
	for i := range drivers[:len(drivers)-1] {
		d := &drivers[i]
		why := ""
		switch err := errs[d.Name]; {
		case d.Open == nil && n.gpu != nil && !n.cfg.SameHost && n.has(d.Over):
			why = "BYTEPS_ENABLE_IPC=0"
		case absent(n.cfg, d) || n.has(d.Name):
		case err != nil:
			why = strings.TrimPrefix(err.Error(), d.Name+": ")
		default:
			why = excluded(n.cfg, d)
		}
		switch last := len(whys) - 1; {
		case why == "":
		case last >= 0 && whys[last] == why:
			names[last] += ", " + n.gives(d.Name)
		default:
			names, whys = append(names, n.gives(d.Name)), append(whys, why)
		}
	}
	for i := range whys {
		whys[i] = names[i] + ": " + whys[i] + " at " + n.me()
	}
	return whyNot(whys...)
}

// chosen says whether the settings say how the transport with a name is to work.
func (n *Node) chosen(name string) bool {
	return slices.ContainsFunc(all.Ways(), func(w conf.Way) bool { return w.Name == name && w.Chosen(n.cfg) })
}

// has says whether this node has a Fabric of the driver with a name.
func (n *Node) has(name string) bool {
	return slices.ContainsFunc(n.planes, func(p *plane) bool { return scheme(p) == name })
}

// gives names the transports that a link over one of this name gives: of a node with a
// GPU, those for its memory too.
func (n *Node) gives(name string) string {
	text := name
	for _, d := range all.Drivers() {
		if n.gpu != nil && d.Over == name {
			text += " and " + d.Name
		}
	}
	return text
}

// sayDone tells the scheduler when all workers have left this server, which may end in
// whatever way then.
func (n *Node) sayDone() {
	if slices.ContainsFunc(n.peers, func(p *peer) bool { return p.State() != peers.Left }) {
		return
	}
	n.outputs(n.member.Done(trace.Now()))
}

// whyNot joins what speaks against the ways that are better than the one taken.
func whyNot(of ...string) string {
	return strings.Join(slices.DeleteFunc(of, func(s string) bool { return s == "" }), "; ")
}
