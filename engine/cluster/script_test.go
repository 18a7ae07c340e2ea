package cluster

import (
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/wire"
)

var update = flag.Bool("update", false, "rewrite the transcripts in testdata")

// TestScripts runs the transcripts in testdata. A line that starts at the
// margin is a command, what it made happen follows indented: "a > b: x" is a
// frame from a to b, "a: x" an output of a. Members are named after role and
// rank (w0, s1; w0b is a second w0), the scheduler is S. After each command
// every frame is delivered and answered until nothing moves.
//
//	cluster workers=1 servers=1 size=1 interval=1s timeout=5s leave=10s rejoin=0s
//	form           all members connect; it is not shown
//	start w0-3 [group=] [instance=] [workers=] [servers=] [size=] [slow] [patient] [any]
//	               members connect; slow ones wait for the command connected, the
//	               scheduler assigns ranks to any
//	connected w0   it is connected to its peers
//	barrier w0-3 servers|workers|all [groups]
//	giveup w0 1    it waits for its call 1 no more
//	leave w0-3
//	done s0        its workers have left
//	finish         the scheduler is about to go
//	send w0 w1|scheduler|servers|workers|all [run=] [bytes=] [times=]
//	               a message from it; S sends too
//	receive w0-3   all messages that have come
//	kill w0 [why]  its process is gone, or the scheduler's (kill S)
//	scheduler      a new one starts
//	redial w0-3    members that dial again reach it
//	mute w0        nothing reaches it or comes from it any more
//	hold w0        frames from and to it wait, until
//	free w0
//	say w0 HEX     a frame from it; tell w0 HEX: one to it
//	dial x         a connection that is no member's yet
//	after 3s       time passes
//	asleep 3s      time passes, and nothing runs
//	late 2ms       timers fire so much later from now on
//	waiting        what each waits for
//	quiet          from now on frames are not shown, and equal outputs counted
func TestScripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			want, err := os.ReadFile(file)
			require.NoError(t, err)
			got := play(t, string(want))
			if *update {
				require.NoError(t, os.WriteFile(file, []byte(got), 0o644))
				return
			}
			require.Equal(t, string(want), got)
		})
	}
}

// play runs the commands of a transcript and returns the transcript.
func play(t *testing.T, script string) string {
	w := &world{t: t, now: int64(time.Hour)}
	for line := range strings.Lines(script) {
		line = strings.TrimRight(line, "\n")
		if strings.HasPrefix(line, "\t") {
			continue
		}
		w.text.WriteString(line + "\n")
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		w.command(strings.Fields(line))
		w.settle()
		w.flush()
	}
	return w.text.String()
}

// world is a scheduler, members, and the network between them.
type world struct {
	t     *testing.T
	text  strings.Builder
	lines []string // of this command
	quiet bool
	now   int64
	shape wire.Shape
	time  Timing
	lag   int64      // of timers
	s     *Scheduler // nil: its process is gone
	nodes []*node    // in the order in which they connected; index + 1 is conn
}

type node struct {
	name      string
	m         *Member // nil: its process is gone, or it never was a member
	slow      bool
	any       bool // has come without a rank
	dials     bool // it was asked to dial again
	held      bool
	muted     bool
	shut      bool // the connection is closed
	up, down  [][]byte
	ended     bool
	wasClosed error // Down for the member is due
}

func (w *world) say(format string, args ...any) {
	w.lines = append(w.lines, fmt.Sprintf(format, args...))
}

// numbered are the numbers of messages, which are not shown when equal outputs are counted.
var numbered = regexp.MustCompile(`\b(send|sent) \d+`)

// flush writes what the command made happen.
func (w *world) flush() {
	if w.quiet {
		var order []string
		count := make(map[string]int)
		for _, l := range w.lines {
			if _, text, ok := strings.Cut(l, ": "); ok && !strings.HasPrefix(l, "S: ") {
				l = "members: " + text
			}
			l = numbered.ReplaceAllString(l, "$1")
			if count[l]++; count[l] == 1 {
				order = append(order, l)
			}
		}
		w.lines = w.lines[:0]
		for _, l := range order {
			if n := count[l]; n > 1 || !strings.HasPrefix(l, "S: ") {
				l = fmt.Sprintf("%d %s", n, l)
			}
			w.lines = append(w.lines, l)
		}
	}
	for _, l := range w.lines {
		w.text.WriteString("\t" + l + "\n")
	}
	w.lines = w.lines[:0]
}

func (w *world) find(name string) *node {
	i := slices.IndexFunc(w.nodes, func(n *node) bool { return n.name == name })
	require.GreaterOrEqual(w.t, i, 0, "no %s", name)
	return w.nodes[i]
}

func (w *world) conn(n *node) int64 { return int64(slices.Index(w.nodes, n)) + 1 }

// names expands w0-3.
func (w *world) names(s string) (names []string) {
	from, to, ok := strings.Cut(s, "-")
	if !ok {
		return []string{s}
	}
	a, err := strconv.Atoi(from[1:])
	require.NoError(w.t, err)
	b, err := strconv.Atoi(to)
	require.NoError(w.t, err)
	for i := a; i <= b; i++ {
		names = append(names, from[:1]+strconv.Itoa(i))
	}
	return names
}

func (w *world) duration(s string) time.Duration {
	d, err := time.ParseDuration(s)
	require.NoError(w.t, err)
	return d
}

func (w *world) number(s string) int {
	n, err := strconv.Atoi(s)
	require.NoError(w.t, err)
	return n
}

func (w *world) command(f []string) {
	options := make(map[string]string)
	var args []string
	for _, a := range f[1:] {
		if k, v, ok := strings.Cut(a, "="); ok {
			options[k] = v
		} else {
			args = append(args, a)
		}
	}
	number := func(name string, value int) int {
		if s, ok := options[name]; ok {
			return w.number(s)
		}
		return value
	}
	duration := func(name string, value time.Duration) time.Duration {
		if s, ok := options[name]; ok {
			return w.duration(s)
		}
		return value
	}
	switch f[0] {
	case "cluster":
		w.shape = wire.Shape{Workers: number("workers", 1), Servers: number("servers", 1), GroupSize: number("size", 1)}
		w.time = Timing{
			duration("interval", time.Second), duration("timeout", 5*time.Second),
			duration("leave", 10*time.Second), duration("rejoin", 0),
		}
		w.command([]string{"scheduler"})
	case "scheduler":
		s, err := NewScheduler(w.shape, w.time)
		require.NoError(w.t, err)
		w.s = s
	case "redial":
		for _, name := range w.names(args[0]) {
			old := w.find(name)
			require.True(w.t, old.dials, "%s does not dial", name)
			w.dial(&node{name: name, m: old.m, held: old.held})
			old.name, old.m = "", nil
		}
	case "start":
		slow, patient, free := slices.Contains(args, "slow"), slices.Contains(args, "patient"), slices.Contains(args, "any")
		for _, a := range args {
			if a == "slow" || a == "patient" || a == "any" {
				continue
			}
			for _, name := range w.names(a) {
				role := wire.RoleWorker
				if name[0] == 's' {
					role = wire.RoleServer
				}
				rank := w.number(strings.TrimRight(name[1:], "bcd"))
				shape := wire.Shape{
					Workers:   number("workers", w.shape.Workers),
					Servers:   number("servers", w.shape.Servers),
					GroupSize: number("size", w.shape.GroupSize),
				}
				self := wire.Member{
					Role: role, Rank: rank,
					Group:    number("group", rank/shape.GroupSize),
					Instance: number("instance", rank%shape.GroupSize),
					Epoch:    uint64(len(w.nodes) + 1),
				}
				if free {
					self.Rank, self.Group = NoRank, NoRank
				}
				if role == wire.RoleServer {
					self.Addrs = []string{fmt.Sprintf("tcp:10.0.1.%d:7000", rank)}
				}
				w.dial(&node{name: name, slow: slow, any: free, m: NewMember(MemberConfig{
					Self: self, Shape: shape, Scheduler: "10.0.0.1:7000", Timing: w.time, Patient: patient,
				})})
			}
		}
	case "form":
		w.command([]string{"start", fmt.Sprintf("w0-%d", w.shape.Workers*w.shape.GroupSize-1)})
		w.command([]string{"start", fmt.Sprintf("s0-%d", w.shape.Servers*w.shape.GroupSize-1)})
		w.settle()
		w.lines = w.lines[:0]
		require.Equal(w.t, running, w.s.phase)
	case "dial":
		w.dial(&node{name: args[0]})
	case "connected":
		n := w.find(args[0])
		w.fromMember(n, n.m.Connected(w.now))
	case "barrier":
		flags := map[string]wire.BarrierFlags{
			"none": 0, "servers": wire.BarrierServers, "workers": wire.BarrierWorkers,
			"all": wire.BarrierServers | wire.BarrierWorkers,
		}[args[1]]
		if len(args) > 2 {
			flags |= wire.BarrierGroups
		}
		for _, name := range w.names(args[0]) {
			n := w.find(name)
			seq, out, err := n.m.Barrier(w.now, flags)
			if err != nil {
				w.say("%s: error: %v", name, err)
				continue
			}
			w.say("%s: call %d", name, seq)
			w.fromMember(n, out)
		}
	case "send":
		for range number("times", 1) {
			w.message(args[0], args[1], uint64(number("run", 0)), number("bytes", 5))
		}
	case "receive":
		for _, name := range w.names(args[0]) {
			box := &w.s.inbox
			if name != "S" {
				box = &w.find(name).m.inbox
			}
			for n, first := box.Mail(); n > 0; n, first = box.Mail() {
				w.say("%s: received of %s, run %d: %d bytes", name, who(first.Role, first.Rank), first.Run, len(first.Data))
				box.Received()
			}
		}
	case "giveup":
		w.find(args[0]).m.GiveUp(uint64(w.number(args[1])))
	case "leave":
		for _, name := range w.names(args[0]) {
			n := w.find(name)
			w.fromMember(n, n.m.Leave(w.now))
		}
	case "finish":
		out, parting := w.s.Finish(w.now)
		w.say("S: parting: %v", parting)
		w.fromScheduler(out)
	case "done":
		n := w.find(args[0])
		w.fromMember(n, n.m.Done(w.now))
	case "kill":
		err := io.EOF
		if len(args) > 1 {
			err = errors.New(strings.Join(args[1:], " "))
		}
		if args[0] == "S" {
			w.s = nil
			for _, n := range w.nodes {
				w.closed(n, err)
			}
			return
		}
		n := w.find(args[0])
		was := n.shut
		n.m, n.shut = nil, true
		if w.s != nil && !was {
			w.fromScheduler(w.s.Step(w.now, Input{Kind: Down, Conn: w.conn(n), Err: err}))
		}
	case "mute":
		w.find(args[0]).muted = true
	case "hold":
		w.find(args[0]).held = true
	case "free":
		w.find(args[0]).held = false
	case "say", "tell":
		n := w.find(args[0])
		b, err := hex.DecodeString(strings.Join(args[1:], ""))
		require.NoError(w.t, err)
		if f[0] == "say" {
			n.up = append(n.up, b)
		} else {
			n.down = append(n.down, b)
		}
	case "after":
		w.pass(w.duration(args[0]))
	case "late":
		w.lag = int64(w.duration(args[0]))
	case "asleep":
		w.now += int64(w.duration(args[0]))
	case "waiting":
		if w.s != nil {
			w.say("S: waiting: %s", w.s.Waiting())
		}
		for _, n := range w.nodes {
			if n.m != nil && !n.ended {
				w.say("%s: waiting: %s", n.name, n.m.Waiting())
			}
		}
	case "quiet":
		w.quiet = true
	default:
		w.t.Fatalf("unknown command %q", f[0])
	}
}

// message has a node, or the scheduler, send one.
func (w *world) message(from, to string, run uint64, bytes int) {
	d := wire.Destination{Rank: wire.All, Run: run}
	switch to {
	case "scheduler":
		d.Roles = wire.ToScheduler
	case "servers":
		d.Roles = wire.ToServers
	case "workers":
		d.Roles = wire.ToWorkers
	case "all":
		d.Roles = wire.ToScheduler | wire.ToServers | wire.ToWorkers
	default:
		d.Rank = w.number(to[1:])
		if d.Roles = wire.ToWorkers; to[0] == 's' {
			d.Roles = wire.ToServers
		}
	}
	if from == "S" {
		seq, out, err := w.s.Send(w.now, d, make([]byte, bytes))
		w.say("S: send %d: %v", seq, err)
		w.fromScheduler(out)
		return
	}
	n := w.find(from)
	seq, out, err := n.m.Send(w.now, d, make([]byte, bytes))
	w.say("%s: send %d: %v", from, seq, err)
	w.fromMember(n, out)
}

func (w *world) dial(n *node) {
	w.nodes = append(w.nodes, n)
	conn := w.conn(n)
	w.fromScheduler(w.s.Step(w.now, Input{Kind: Up, Conn: conn, Remote: fmt.Sprintf("10.0.2.%d:4000", conn)}))
	if n.m != nil {
		w.fromMember(n, n.m.Step(w.now, Input{Kind: Up}))
	}
}

// pass lets time pass, and the machines run when they want to.
func (w *world) pass(d time.Duration) {
	end := w.now + int64(d)
	for {
		w.settle()
		next := end
		if w.s != nil {
			next = min(next, w.s.Next())
		}
		for _, n := range w.nodes {
			if n.m != nil {
				next = min(next, n.m.Next())
			}
		}
		w.now = max(w.now, min(next+w.lag, end))
		if w.s != nil {
			w.fromScheduler(w.s.Step(w.now, Input{}))
		}
		if w.s != nil {
			require.Greater(w.t, w.s.Next(), w.now)
		}
		for _, n := range w.nodes {
			if n.m != nil {
				w.fromMember(n, n.m.Step(w.now, Input{}))
				require.Greater(w.t, n.m.Next(), w.now)
			}
		}
		if w.now == end {
			return
		}
	}
}

// settle delivers frames until nothing moves.
func (w *world) settle() {
	for moved := true; moved; {
		moved = false
		for _, n := range w.nodes {
			if n.held {
				continue
			}
			if len(n.up) != 0 {
				b := n.up[0]
				n.up, moved = n.up[1:], true
				if w.s != nil && !n.shut && !n.muted {
					w.show(n.name, "S", b)
					w.fromScheduler(w.s.Step(w.now, Input{Kind: Frame, Conn: w.conn(n), Data: b}))
				}
			}
			if len(n.down) != 0 {
				b := n.down[0]
				n.down, moved = n.down[1:], true
				if n.m != nil && !n.muted {
					w.show("S", n.name, b)
					w.fromMember(n, n.m.Step(w.now, Input{Kind: Frame, Data: b}))
				}
			}
			if err := n.wasClosed; err != nil && len(n.down) == 0 {
				n.wasClosed, moved = nil, true
				if n.m != nil && !n.muted {
					w.fromMember(n, n.m.Step(w.now, Input{Kind: Down, Err: err}))
				}
			}
		}
	}
}

// closed closes the connection under a node.
func (w *world) closed(n *node, err error) {
	if !n.shut {
		n.shut, n.wasClosed = true, err
	}
}

func (w *world) fromScheduler(out []Output) {
	for _, o := range out {
		switch o.Kind {
		case Send:
			n := w.nodes[o.Conn-1]
			require.False(w.t, n.shut, "a frame to %s, whose connection is closed", n.name)
			n.down = append(n.down, o.Frame)
		case Close:
			n := w.nodes[o.Conn-1]
			require.False(w.t, n.shut, "%s is closed twice", n.name)
			w.say("S: close %s", n.name)
			w.closed(n, io.EOF)
		case Log, Warn:
			w.say("S: %s", o.Text)
		case Running:
			w.say("S: running")
		case Lost:
			w.say("S: lost: %v", o.Err)
		case Joined:
			w.say("S: joined: %s", who(o.Member.Role, o.Member.Rank))
		case Mail:
			w.say("S: mail")
		case Sent:
			w.say("S: sent %d: %v", o.Seq, o.Err)
		case Ended:
			w.say("S: ended: %v", o.Err)
			require.Empty(w.t, w.s.Step(w.now, Input{}))
			require.EqualValues(w.t, Never, w.s.Next())
			w.s = nil
			for _, n := range w.nodes {
				w.closed(n, io.EOF)
			}
			return
		default:
			w.t.Fatalf("output %d of the scheduler", o.Kind)
		}
	}
}

func (w *world) fromMember(n *node, out []Output) {
	var ready bool
	for _, o := range out {
		require.False(w.t, n.ended, "%s goes on after its end", n.name)
		switch o.Kind {
		case Send:
			n.up = append(n.up, o.Frame)
		case Close:
			w.say("%s: close", n.name)
			w.hangUp(n)
		case Redial:
			n.dials = true
			w.say("%s: dials again", n.name)
		case Roster:
			var peers []string
			for _, p := range o.Peers {
				text := strings.Join(append([]string{who(p.Role, p.Rank)}, p.Addrs...), " ")
				peers = append(peers, text+[]string{"", " (gone)", " (parting)"}[p.State])
			}
			w.say("%s: roster of %d, peers: %s", n.name, len(n.m.roster), strings.Join(peers, ", "))
			if n.any {
				w.say("%s: is %s", n.name, who(n.m.cfg.Self.Role, n.m.Rank()))
			}
			ready = !n.slow
		case Running:
			w.say("%s: running", n.name)
		case Released:
			w.say("%s: released %d", n.name, o.Seq)
		case Lost, Overdue, Joined:
			text := map[OutputKind]string{Lost: "lost", Overdue: "overdue", Joined: "joined"}[o.Kind]
			if o.Kind == Joined {
				text += ": " + who(o.Member.Role, o.Member.Rank)
			} else {
				text += ": " + o.Err.Error()
			}
			if len(o.Seqs) != 0 {
				text += fmt.Sprintf(", which ends calls %v", o.Seqs)
			}
			w.say("%s: %s", n.name, text)
		case Mail:
			w.say("%s: mail", n.name)
		case Sent:
			w.say("%s: sent %d: %v", n.name, o.Seq, o.Err)
		case Ended:
			w.say("%s: ended: %v", n.name, o.Err)
			n.ended = true
			w.hangUp(n)
		default:
			w.t.Fatalf("output %d of a member", o.Kind)
		}
	}
	if ready {
		w.fromMember(n, n.m.Connected(w.now))
	}
}

// hangUp is a member that closes its connection, after what it has sent.
func (w *world) hangUp(n *node) {
	if n.shut || n.muted {
		return
	}
	n.shut = true
	if w.s == nil {
		return
	}
	for _, b := range n.up {
		w.show(n.name, "S", b)
		w.fromScheduler(w.s.Step(w.now, Input{Kind: Frame, Conn: w.conn(n), Data: b}))
	}
	n.up = nil
	if w.s != nil {
		w.fromScheduler(w.s.Step(w.now, Input{Kind: Down, Conn: w.conn(n), Err: io.EOF}))
	}
}

// show writes a frame, but for heartbeats.
func (w *world) show(from, to string, b []byte) {
	if w.quiet || wire.FrameType(b) == wire.TypeHeartbeat {
		return
	}
	w.say("%s > %s: %s", from, to, describe(b))
}

// describe is a frame for people.
func describe(b []byte) string {
	switch t := wire.FrameType(b); t {
	case wire.TypeRegister:
		if g, err := wire.Parse[wire.Register](b, wire.TypeRegister); err == nil {
			text := fmt.Sprintf("register %v %d, group %d, instance %d", g.Role, g.Rank, g.Group, g.Instance)
			if g.Any {
				text = fmt.Sprintf("register a %v without a rank", g.Role)
			}
			if g.Known != nil {
				text += fmt.Sprintf(", runs with view %d", g.Known.View)
			}
			return text
		}
	case wire.TypeRoster:
		if ms, err := wire.Parse[wire.Roster](b, wire.TypeRoster); err == nil {
			if ms.Running {
				return fmt.Sprintf("roster of %d, view %d", len(ms.Members), ms.View)
			}
			return fmt.Sprintf("roster of %d", len(ms.Members))
		}
	case wire.TypeReady, wire.TypeGo, wire.TypeLeave, wire.TypeLeft, wire.TypePing:
		if wire.ParseSignal(b) == nil {
			return map[wire.Type]string{
				wire.TypeReady: "ready", wire.TypeGo: "go", wire.TypeLeave: "leave", wire.TypeLeft: "left", wire.TypePing: "ping",
			}[t]
		}
	case wire.TypeJoined:
		if j, err := wire.Parse[wire.Joined](b, wire.TypeJoined); err == nil {
			return fmt.Sprintf("joined %v %d, view %d", j.Role, j.Rank, j.View)
		}
	case wire.TypeParted:
		if p, err := wire.Parse[wire.Parted](b, wire.TypeParted); err == nil {
			return fmt.Sprintf("parted %v %d", p.Role, p.Rank)
		}
	case wire.TypeDone:
		if d, err := wire.Parse[wire.Done](b, wire.TypeDone); err == nil {
			return fmt.Sprintf("done, view %d", d.View)
		}
	case wire.TypeBarrier:
		if v, err := wire.Parse[wire.Barrier](b, wire.TypeBarrier); err == nil {
			return fmt.Sprintf("%v, call %d", v.Flags, v.Seq)
		}
	case wire.TypeRelease:
		if v, err := wire.Parse[wire.Release](b, wire.TypeRelease); err == nil {
			return fmt.Sprintf("release %d", v.Seq)
		}
	case wire.TypeLost:
		if l, err := wire.Parse[wire.Lost](b, wire.TypeLost); err == nil {
			return fmt.Sprintf("lost %v %d, view %d", l.Role, l.Rank, l.View)
		}
	case wire.TypeSend:
		if v, err := wire.Parse[wire.Send](b, wire.TypeSend); err == nil {
			return fmt.Sprintf("send %d, roles %d, rank %d, %d bytes", v.Seq, v.To.Roles, v.To.Rank, len(v.Data))
		}
	case wire.TypeMessage:
		if v, err := wire.Parse[wire.Message](b, wire.TypeMessage); err == nil {
			return fmt.Sprintf("message of %s, %d bytes", who(v.Role, v.Rank), len(v.Data))
		}
	case wire.TypeTaken:
		if v, err := wire.Parse[wire.Taken](b, wire.TypeTaken); err == nil {
			return map[bool]string{false: "taken", true: "full"}[v.Full]
		}
	case wire.TypeSent:
		if v, err := wire.Parse[wire.Sent](b, wire.TypeSent); err == nil {
			return fmt.Sprintf("sent %d, outcome %d", v.Seq, v.Outcome)
		}
	case wire.TypeWaiting:
		if v, err := wire.Parse[wire.Text](b, wire.TypeWaiting); err == nil {
			return "waiting: " + v.Text
		}
	case wire.TypeRefuse:
		if v, err := wire.Parse[wire.Text](b, wire.TypeRefuse); err == nil {
			return strings.TrimSpace("refuse: " + v.Text)
		}
	}
	return "frame " + hex.EncodeToString(b)
}
