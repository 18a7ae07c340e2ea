package wire

import (
	"fmt"
	"math"
)

// Role is what a node is in the cluster.
type Role uint8

// The roles, with the numbers of FS_ROLE_* in fserver.h.
const (
	RoleScheduler Role = iota
	RoleWorker
	RoleServer
)

func (r Role) String() string {
	switch r {
	case RoleScheduler:
		return "scheduler"
	case RoleWorker:
		return "worker"
	case RoleServer:
		return "server"
	}
	return fmt.Sprintf("role %d", uint8(r))
}

// Bounds of the control frames. A roster is one frame, so it is what bounds a
// cluster: 18,000 members with one IPv4 address and a host name of 12 bytes each
// (55 bytes), or 8,300 with four addresses (122 bytes).
const (
	MaxMembers = 65536
	MaxRoster  = 1<<20 - 1<<15 // bytes: what a transport takes as one frame, less what Register has beside it
	MaxAddrs   = 64            // of one member
	MaxAddr    = 4096          // one address, bytes: that of 8 devices has some 300
	MaxAddrSum = 1 << 14       // all addresses of one member, bytes: a Register has them beside a roster
	MaxHost    = 64            // name of a host, bytes
)

// Member is one worker or server.
type Member struct {
	Role     Role
	Rank     int // within the role
	Group    int
	Instance int      // rail
	Epoch    uint64   // which run of the process: no two runs have the same
	State    State    // in a roster
	Pid      uint32   // number of its process on Host
	Host     string   // name of its host, for people; at most MaxHost bytes
	Addrs    []string // where it listens, best first; printable, at most MaxAddr bytes each
}

// Name returns how messages name the member: role, rank, process and host.
func (m *Member) Name() string {
	if m.Host == "" {
		return fmt.Sprintf("%v %d", m.Role, m.Rank)
	}
	return fmt.Sprintf("%v %d (pid %d on %s)", m.Role, m.Rank, m.Pid, m.Host)
}

// AddrSum returns the bytes of all addresses, at most MaxAddrSum of a member that a scheduler takes.
func (m *Member) AddrSum() (sum int) {
	for _, a := range m.Addrs {
		sum += len(a)
	}
	return sum
}

// State is what has become of a member.
type State uint8

// The states.
const (
	Present State = iota
	Gone          // lost
	Parting       // it has asked to leave, or has left
)

// memberSize is the least that a Member takes.
const memberSize = 16

func (m *Member) walk(c *codec) {
	octet(c, "role", &m.Role, RoleServer)
	number(c, "rank", &m.Rank, MaxMembers-1)
	number(c, "group", &m.Group, MaxMembers-1)
	number(c, "instance", &m.Instance, MaxMembers-1)
	c.word(&m.Epoch)
	octet(c, "state", &m.State, Parting)
	number(c, "process number", &m.Pid, math.MaxUint32)
	c.words("bytes of a host name", &m.Host, MaxHost)
	list(c, "addresses", &m.Addrs, MaxAddrs, 1, func(a *string) { c.label("bytes of an address", a, MaxAddr) })
}

// Shape is how large the cluster is. All nodes are configured with the same.
type Shape struct {
	Workers   int // groups
	Servers   int // groups
	GroupSize int // members of a group: as many rails
}

func (s *Shape) walk(c *codec) {
	number(c, "worker groups", &s.Workers, MaxMembers)
	number(c, "server groups", &s.Servers, MaxMembers)
	number(c, "group size", &s.GroupSize, MaxMembers)
}

// Groups is the number of groups of a role.
func (s Shape) Groups(r Role) int {
	if r == RoleWorker {
		return s.Workers
	}
	return s.Servers
}

// Members is the number of workers and servers.
func (s Shape) Members() int { return (s.Workers + s.Servers) * s.GroupSize }

func (s Shape) String() string {
	return fmt.Sprintf("workers=%d servers=%d group_size=%d", s.Workers, s.Servers, s.GroupSize)
}

// Roster is the list of all members.
type Roster struct {
	View    uint64 // counts what has changed in it: of two rosters, the one with more is later
	Running bool   // the cluster runs already, and its receiver joins it
	Members []Member
}

func (v *Roster) walk(c *codec) {
	number(c, "view", &v.View, math.MaxUint64)
	c.flag(&v.Running)
	list(c, "members", &v.Members, MaxMembers, memberSize, func(m *Member) { m.walk(c) })
}

// Register is a member's first frame.
type Register struct {
	Shape Shape // as the member is configured
	Member
	Any   bool    // it has no rank: the scheduler is to assign one. Rank and group are 0
	Known *Roster // of a member that runs and has lost its scheduler; nil: it is new
}

func (g *Register) walk(c *codec) {
	g.Shape.walk(c)
	g.Member.walk(c)
	c.flag(&g.Any)
	known := g.Known != nil
	if c.flag(&known); !known {
		return
	}
	if c.parses {
		g.Known = new(Roster)
	}
	g.Known.walk(c)
}

// Joined says that a member has taken the place of one that is gone.
type Joined struct {
	View uint64 // of the roster, with it
	Member
}

func (j *Joined) walk(c *codec) {
	number(c, "view", &j.View, math.MaxUint64)
	j.Member.walk(c)
}

// AppendSignal appends a frame that is its type alone: Ready, Go, Leave, Left,
// Heartbeat, Ping, Bye.
func AppendSignal(dst []byte, t Type) []byte { return append(dst, byte(t)) }

// ParseSignal checks that a frame is its type alone.
func ParseSignal(b []byte) error {
	r := reader{b: b}
	r.u8()
	return r.end()
}

// BarrierFlags say whom a barrier is for; with these numbers in fserver.h.
type BarrierFlags uint8

// The flags. A barrier has at least one role.
const (
	BarrierServers BarrierFlags = 1 << iota
	BarrierWorkers
	BarrierGroups // one call per group, not per instance

	// BarrierKinds is the number of values, for tables.
	BarrierKinds = 8
)

// Has says whether members of the role take part.
func (f BarrierFlags) Has(r Role) bool {
	return r == RoleServer && f&BarrierServers != 0 || r == RoleWorker && f&BarrierWorkers != 0
}

// Valid says whether f names at least one role and nothing unknown.
func (f BarrierFlags) Valid() bool {
	return f&(BarrierServers|BarrierWorkers) != 0 && f < BarrierKinds
}

func (f BarrierFlags) String() string {
	s := "barrier of"
	switch f & (BarrierServers | BarrierWorkers) {
	case BarrierServers:
		s += " servers"
	case BarrierWorkers:
		s += " workers"
	case BarrierServers | BarrierWorkers:
		s += " servers and workers"
	default:
		s += " nobody"
	}
	if f&BarrierGroups != 0 {
		s += " by groups"
	}
	return s
}

// Barrier says that a member has reached a barrier. Seq is a number of the
// member's, larger than that of its last call. View is the roster's as the member knows it: a
// call from before a loss is over.
type Barrier struct {
	Flags BarrierFlags
	Seq   uint64
	View  uint64
}

func (v *Barrier) walk(c *codec) {
	octet(c, "flags", &v.Flags, math.MaxUint8)
	number(c, "call", &v.Seq, math.MaxUint64)
	number(c, "view", &v.View, math.MaxUint64)
	if !v.Flags.Valid() {
		c.fail(fmt.Errorf("wire: a barrier has the invalid flags %#x", uint8(v.Flags)))
	}
}

// Release ends the receiver's barrier call Seq.
type Release struct{ Seq uint64 }

func (v *Release) walk(c *codec) { number(c, "call", &v.Seq, math.MaxUint64) }

// Lost says that a member is gone. Epoch tells which run of it.
type Lost struct {
	View    uint64 // of the roster, without it
	Role    Role
	Rank    int
	Epoch   uint64
	Address string // for people
	Reason  string
}

func (l *Lost) walk(c *codec) {
	number(c, "view", &l.View, math.MaxUint64)
	octet(c, "role", &l.Role, RoleServer)
	number(c, "rank", &l.Rank, MaxMembers-1)
	c.word(&l.Epoch)
	c.reason("bytes of an address", &l.Address, maxReason)
	c.reason("bytes of a reason", &l.Reason, maxReason)
}

// Done says that all workers of a server have left. View is the roster's as the server
// knows it: a worker that has come since then is not one of them.
type Done struct{ View uint64 }

func (d *Done) walk(c *codec) { number(c, "view", &d.View, math.MaxUint64) }

// Parted says that a member has left in good order before the others. Epoch tells which run of it.
type Parted struct {
	Role  Role
	Rank  int
	Epoch uint64
}

func (p *Parted) walk(c *codec) {
	octet(c, "role", &p.Role, RoleServer)
	number(c, "rank", &p.Rank, MaxMembers-1)
	c.word(&p.Epoch)
}

// Text is what a Refuse, a Waiting and an Up say: why a member is turned away, what the cluster
// waits for, and, in a worker's, why it has taken no better way.
type Text struct{ Text string }

func (v *Text) walk(c *codec) { c.reason("bytes of a reason", &v.Text, maxReason) }
