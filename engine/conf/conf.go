// Package conf turns settings ("NAME=value", from the environment or from
// keyword arguments) into one typed Config. It owns every variable name: the
// table in table.go is the only place that knows one, and docs/settings.md is
// generated from it. Nothing here reads the process environment.
package conf

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"time"
)

// Role is what a process is in the cluster. The first three have the numbers
// of FS_ROLE_* in fserver.h.
type Role uint8

// The roles. Joint stands for one process tree of all three on this host; an
// engine node is never joint.
const (
	Scheduler Role = iota
	Worker
	Server
	Joint
)

func (r Role) String() string { return nameOf(roles, r) }

// NoRank is the Rank and Group of a node that the scheduler assigns one.
const NoRank = -1

// Progress says who drives a node.
type Progress uint8

// The ways: by the cores that are free, the callers in turn, or a thread of its
// own.
const (
	AnyProgress Progress = iota
	ByCaller
	ByThread
)

// Backend is the kind of device that the tensors are on.
type Backend uint8

// The backends. AnyBackend was not chosen: the GPU if the host has one. GPU was
// asked for by name: a node that has none refuses to open.
const (
	AnyBackend Backend = iota
	CPU
	GPU
)

func (b Backend) String() string { return nameOf(backends, b) }

// Level is how much is logged; each level includes those before it.
type Level uint8

// The levels.
const (
	LogError Level = iota
	LogWarn
	LogInfo  // connection set-up
	LogDebug // every message
)

// OnPeerLost says what becomes of the calls that need a peer that is lost.
type OnPeerLost uint8

// The ways: they fail, or wait for the process that takes its place.
const (
	RaiseLost OnPeerLost = iota
	WaitForSuccessor
)

var (
	roles      = []string{"scheduler", "worker", "server", "joint"}
	progresses = []string{"auto", "caller", "thread"}
	backends   = []string{"any", "CPU", "GPU"}
	levels     = []string{"error", "warn", "info", "debug"}
	onPeerLost = []string{"raise", "wait"}
)

func nameOf[T ~uint8](names []string, v T) string {
	if int(v) < len(names) {
		return names[v]
	}
	return strconv.Itoa(int(v))
}

// Config is what one node is to be. Parse makes it; nobody changes it after
// that.
type Config struct {
	Role       Role
	Workers    int // worker groups
	Servers    int // server groups
	GroupSize  int // processes in a group
	NodeRank   int // index of the group's host within the role
	RankOffset int
	GPU        int // device index, also when Rank and Instance say otherwise

	// Derived: Rank is GroupSize*NodeRank + GPU + RankOffset, Group is
	// Rank/GroupSize, and Instance (the rail) is DMLC_INSTANCE_ID, else
	// GPU + RankOffset. All three are 0 for a scheduler and for Joint. NoRank as Rank and
	// Group: the scheduler assigns them.
	Rank     int
	Group    int
	Instance int

	SchedulerHost string // name or address, without brackets
	SchedulerPort int    // 0: any free one, only where this process listens on it
	HostScheduler bool   // this server runs the scheduler too

	NodeHost   string   // name or address of this host to use; empty: not named
	Interfaces []string // to use, the first one for control; empty: not named
	NearGPU    bool     // DMLC_INTERFACE=auto: prefer the NIC nearest the GPU
	Port       int      // port to listen on; 0: any free one
	Local      bool     // everything is on this host

	Transport string // Auto, or the name of one of the transports
	SameHost  bool   // transports inside a host may be used
	Loans     bool   // a server takes tensors that are lent
	Split     int    // bytes from which on a tensor travels over several connections at once
	Backend   Backend
	Flags     bool   // streams store in memory how far they are; else events are asked
	Visible   string // CUDA_VISIBLE_DEVICES

	Cluster    string // only nodes of the same cluster id talk to each other
	Secret     Secret
	secretFile string // where Secret was read, if it was

	// With TLS and no TLSCert, certificates come from Secret and Cluster. No TLSCA
	// means TLSCert itself.
	TLS                    bool // on all connections over TCP
	TLSCert, TLSKey, TLSCA PEM

	InitTimeout       time.Duration // until the cluster is complete
	StopTimeout       time.Duration // to leave together
	BarrierTimeout    time.Duration
	StallTimeout      time.Duration // without progress while bytes are owed
	HeartbeatInterval time.Duration // 0: no heartbeats are sent
	HeartbeatTimeout  time.Duration // 0: silence is not a fault
	Progress          Progress
	OnPeerLost        OnPeerLost
	RejoinTimeout     time.Duration // for the successor of a lost peer
	Spin              time.Duration // a waiting call spins this long before it sleeps

	Log Level

	// What follows is read and checked, and takes effect with what the table
	// names in its column "takes effect".
	BindCores      bool
	CoresPerSocket int
	CoresPerGPU    int
	CoreOffset     int
	Resend         bool
	ResendTimeout  time.Duration
	DropPercent    int

	options map[string]any // those of transports, as pointers, by name; see Get
}

// Scheduler is the scheduler's address, "host:port".
func (c *Config) Scheduler() string {
	return net.JoinHostPort(c.SchedulerHost, strconv.Itoa(c.SchedulerPort))
}

// PEM is a file in PEM and, with TLS, what it holds; empty if none was named.
type PEM struct {
	Path string
	Text Secret
}

// Secret is what members prove to each other that they know. It does not show
// what it holds, however it is printed.
type Secret struct{ s string }

// IsSet says whether there is a secret at all.
func (s Secret) IsSet() bool { return s.s != "" }

// Bytes is the secret itself, a new copy.
func (s Secret) Bytes() []byte { return []byte(s.s) }

// String gives "set" or nothing.
func (s Secret) String() string {
	if s.IsSet() {
		return "set"
	}
	return ""
}

// Format prints String for every verb.
func (s Secret) Format(f fmt.State, _ rune) { io.WriteString(f, s.String()) }

// OpenWarning is the text for a node that listens on addr without a secret
// where other hosts can connect.
func OpenWarning(addr string) string {
	return fmt.Sprintf("conf: listening on %s without a secret: any process that can connect can join the cluster "+
		"(set FSERVER_SECRET or FSERVER_SECRET_FILE on all nodes)", addr)
}

// Loopback says whether host is certain to be this host's loopback.
func Loopback(host string) bool {
	if a, err := netip.ParseAddr(host); err == nil {
		return a.Unmap().IsLoopback()
	}
	return strings.EqualFold(host, "localhost")
}
