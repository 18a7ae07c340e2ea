package wire

import (
	"encoding/binary"
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
	maxAddr    = 255           // one address, bytes
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
	Addrs    []string // where it listens, best first; printable, at most 255 bytes each
}

// Name returns how messages name the member: role, rank, process and host.
func (m *Member) Name() string {
	if m.Host == "" {
		return fmt.Sprintf("%v %d", m.Role, m.Rank)
	}
	return fmt.Sprintf("%v %d (pid %d on %s)", m.Role, m.Rank, m.Pid, m.Host)
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

func appendMember(dst []byte, m *Member) []byte {
	dst = append(dst, byte(m.Role))
	dst = binary.AppendUvarint(dst, uint64(m.Rank))
	dst = binary.AppendUvarint(dst, uint64(m.Group))
	dst = binary.AppendUvarint(dst, uint64(m.Instance))
	dst = binary.LittleEndian.AppendUint64(dst, m.Epoch)
	dst = append(dst, byte(m.State))
	dst = binary.AppendUvarint(dst, uint64(m.Pid))
	dst = appendBytes(dst, m.Host)
	dst = binary.AppendUvarint(dst, uint64(len(m.Addrs)))
	for _, a := range m.Addrs {
		dst = appendBytes(dst, a)
	}
	return dst
}

func (r *reader) member() Member {
	m := Member{
		Role:     r.role(),
		Rank:     r.number("rank", MaxMembers-1),
		Group:    r.number("group", MaxMembers-1),
		Instance: r.number("instance", MaxMembers-1),
		Epoch:    r.u64(),
		State:    State(r.u8()),
		Pid:      uint32(r.number("process number", math.MaxUint32)),
		Host:     r.text("bytes of a host name", MaxHost),
	}
	if r.err == nil && m.State > Parting {
		r.fail(fmt.Errorf("wire: a member has the unknown state %d", m.State))
	}
	if n := r.count("addresses", MaxAddrs, 1); n != 0 {
		m.Addrs = make([]string, n)
		for i := range m.Addrs {
			m.Addrs[i] = r.name("bytes of an address", maxAddr)
		}
	}
	return m
}

// Shape is how large the cluster is. All nodes are configured with the same.
type Shape struct {
	Workers   int // groups
	Servers   int // groups
	GroupSize int // members of a group: as many rails
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

// Register is a member's first frame.
type Register struct {
	Shape Shape // as the member is configured
	Member
	Known *Roster // of a member that runs and has lost its scheduler; nil: it is new
}

// AppendRegister appends g as a frame.
func AppendRegister(dst []byte, g *Register) []byte {
	dst = append(dst, byte(TypeRegister))
	dst = binary.AppendUvarint(dst, uint64(g.Shape.Workers))
	dst = binary.AppendUvarint(dst, uint64(g.Shape.Servers))
	dst = binary.AppendUvarint(dst, uint64(g.Shape.GroupSize))
	dst = appendMember(dst, &g.Member)
	if g.Known == nil {
		return append(dst, 0)
	}
	return appendRoster(append(dst, 1), g.Known)
}

// ParseRegister parses a frame; the result does not alias it.
func ParseRegister(b []byte) (*Register, error) {
	r := reader{b: b}
	r.kind(TypeRegister)
	g := &Register{Shape: Shape{
		Workers:   r.number("worker groups", MaxMembers),
		Servers:   r.number("server groups", MaxMembers),
		GroupSize: r.number("group size", MaxMembers),
	}, Member: r.member()}
	if r.flag() {
		g.Known = r.roster()
	}
	return g, r.end()
}

// AppendRoster appends the list of all members as a frame.
func AppendRoster(dst []byte, v *Roster) []byte {
	return appendRoster(append(dst, byte(TypeRoster)), v)
}

func appendRoster(dst []byte, v *Roster) []byte {
	dst = binary.AppendUvarint(dst, v.View)
	running := byte(0)
	if v.Running {
		running = 1
	}
	dst = append(dst, running)
	dst = binary.AppendUvarint(dst, uint64(len(v.Members)))
	for i := range v.Members {
		dst = appendMember(dst, &v.Members[i])
	}
	return dst
}

// ParseRoster parses a frame; the result does not alias it.
func ParseRoster(b []byte) (*Roster, error) {
	r := reader{b: b}
	r.kind(TypeRoster)
	v := r.roster()
	return v, r.end()
}

func (r *reader) roster() *Roster {
	v := &Roster{View: r.uvarint(), Running: r.flag()}
	v.Members = make([]Member, r.count("members", MaxMembers, memberSize))
	for i := range v.Members {
		v.Members[i] = r.member()
	}
	return v
}

// Joined says that a member has taken the place of one that is gone.
type Joined struct {
	View uint64 // of the roster, with it
	Member
}

// AppendJoined appends j as a frame.
func AppendJoined(dst []byte, j *Joined) []byte {
	dst = append(dst, byte(TypeJoined))
	dst = binary.AppendUvarint(dst, j.View)
	return appendMember(dst, &j.Member)
}

// ParseJoined parses a frame; the result does not alias it.
func ParseJoined(b []byte) (*Joined, error) {
	r := reader{b: b}
	r.kind(TypeJoined)
	j := &Joined{r.uvarint(), r.member()}
	return j, r.end()
}

// AppendSignal appends a frame that is its type alone: Ready, Go, Leave, Left,
// Heartbeat, Ping, Done.
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

// Barrier says that a member has reached a barrier. Seq is the member's own
// count of its calls, from 1. View is the roster's as the member knows it: a
// call from before a loss is over.
type Barrier struct {
	Flags BarrierFlags
	Seq   uint64
	View  uint64
}

// AppendBarrier appends v as a frame.
func AppendBarrier(dst []byte, v Barrier) []byte {
	dst = append(dst, byte(TypeBarrier), byte(v.Flags))
	dst = binary.AppendUvarint(dst, v.Seq)
	return binary.AppendUvarint(dst, v.View)
}

// ParseBarrier parses a frame. The flags are valid.
func ParseBarrier(b []byte) (Barrier, error) {
	r := reader{b: b}
	r.kind(TypeBarrier)
	v := Barrier{BarrierFlags(r.u8()), r.uvarint(), r.uvarint()}
	if r.err == nil && !v.Flags.Valid() {
		r.fail(fmt.Errorf("wire: a barrier has the invalid flags %#x", uint8(v.Flags)))
	}
	return v, r.end()
}

// AppendRelease appends the frame that ends the receiver's barrier call seq.
func AppendRelease(dst []byte, seq uint64) []byte {
	dst = append(dst, byte(TypeRelease))
	return binary.AppendUvarint(dst, seq)
}

// ParseRelease parses a frame.
func ParseRelease(b []byte) (seq uint64, err error) {
	r := reader{b: b}
	r.kind(TypeRelease)
	seq = r.uvarint()
	return seq, r.end()
}

// Lost says that a member is gone. Epoch tells which run of it.
type Lost struct {
	View    uint64 // of the roster, without it
	Role    Role
	Rank    int
	Epoch   uint64
	Address string // for people
	Reason  string
}

// AppendLost appends l as a frame. A reason that is too long is cut.
func AppendLost(dst []byte, l *Lost) []byte {
	dst = append(dst, byte(TypeLost))
	dst = binary.AppendUvarint(dst, l.View)
	dst = append(dst, byte(l.Role))
	dst = binary.AppendUvarint(dst, uint64(l.Rank))
	dst = binary.LittleEndian.AppendUint64(dst, l.Epoch)
	dst = appendBytes(dst, clip(l.Address, maxReason))
	return appendBytes(dst, clip(l.Reason, maxReason))
}

// ParseLost parses a frame; the result does not alias it.
func ParseLost(b []byte) (*Lost, error) {
	r := reader{b: b}
	r.kind(TypeLost)
	l := &Lost{
		View:    r.uvarint(),
		Role:    r.role(),
		Rank:    r.number("rank", MaxMembers-1),
		Epoch:   r.u64(),
		Address: r.text("bytes of an address", maxReason),
		Reason:  r.text("bytes of a reason", maxReason),
	}
	return l, r.end()
}

// AppendRefuse appends the frame that turns a member away, with the reason.
func AppendRefuse(dst []byte, reason string) []byte {
	return appendBytes(append(dst, byte(TypeRefuse)), clip(reason, maxReason))
}

// ParseRefuse parses a frame.
func ParseRefuse(b []byte) (reason string, err error) {
	r := reader{b: b}
	r.kind(TypeRefuse)
	reason = r.text("bytes of a reason", maxReason)
	return reason, r.end()
}

// AppendWaiting appends the frame that tells a member what the cluster waits for.
func AppendWaiting(dst []byte, what string) []byte {
	return appendBytes(append(dst, byte(TypeWaiting)), clip(what, maxReason))
}

// ParseWaiting parses a frame.
func ParseWaiting(b []byte) (what string, err error) {
	r := reader{b: b}
	r.kind(TypeWaiting)
	what = r.text("bytes of what is waited for", maxReason)
	return what, r.end()
}

func (r *reader) role() Role {
	v := Role(r.u8())
	if r.err == nil && v > RoleServer {
		r.fail(fmt.Errorf("wire: %v is unknown", v))
	}
	return v
}

// flag reads a byte that is 0 or 1.
func (r *reader) flag() bool {
	v := r.u8()
	if r.err == nil && v > 1 {
		r.fail(fmt.Errorf("wire: a flag is %d, want 0 or 1", v))
	}
	return v == 1
}

// number reads a number that is at most limit.
func (r *reader) number(what string, limit int) int {
	v := r.uvarint()
	if r.err == nil && v > uint64(limit) {
		r.fail(fmt.Errorf("wire: %s %d: want at most %d", what, v, limit))
		return 0
	}
	return int(v)
}
