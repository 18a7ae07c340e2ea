package conf

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"
)

// setting is one row of the table: a variable and everything that is known
// about it.
type setting struct {
	name    string
	older   []spelling // in order of precedence, all after name
	section string     // set on the first row of a section
	value
	unset   string // what it means that no value is given, if there is no default
	effect  string // with what it takes effect; empty: in every build
	meaning string
	strict  bool // an empty value is an error, not as good as none
	secret  bool // the value is never shown
}

// spelling is an older name of a setting. With to, its values have a meaning
// of their own: to gives the value of the newer name, empty if this one says
// nothing about it.
type spelling struct {
	name string
	want string
	to   func(string) (string, bool)
}

// value is the type of a setting.
type value struct {
	typ  string // one word for JSON
	want string // what is allowed, as errors and the documentation say it
	def  string // as the user would write it; empty: none
	set  func(*Config, string) bool
	get  func(*Config) string
}

const (
	maxGroups = 65535
	maxPort   = 65535
	maxWait   = 7 * 24 * time.Hour
	maxSecret = 4096
	maxPEM    = 1 << 20
)

// table is in the order of docs/settings.md. Values are read in this order.
var table = []setting{
	{
		section: "Roles and ranks",
		name:    "DMLC_ROLE",
		value:   choice("server", roles, nil, func(c *Config) *Role { return &c.Role }),
		meaning: "role of this process; `joint` starts scheduler, servers and workers on this host",
	}, {
		name:    "DMLC_NUM_WORKER",
		value:   number("1", 1, maxGroups, func(c *Config) *int { return &c.Workers }),
		meaning: "number of worker groups",
	}, {
		name:    "DMLC_NUM_SERVER",
		value:   number("1", 1, maxGroups, func(c *Config) *int { return &c.Servers }),
		meaning: "number of server groups",
	}, {
		name:    "DMLC_GROUP_SIZE",
		value:   number("1", 1, 1024, func(c *Config) *int { return &c.GroupSize }),
		meaning: "processes in a group, usually one for each GPU of a host. There are as many rails",
	}, {
		name:    "DMLC_NODE_RANK",
		value:   number("0", 0, maxGroups-1, func(c *Config) *int { return &c.NodeRank }),
		meaning: "index of this process's group within its role. The rank is DMLC_GROUP_SIZE × DMLC_NODE_RANK + STEPMESH_GPU + DMLC_RANK_OFFSET",
	}, {
		name:    "DMLC_RANK_OFFSET",
		value:   number("0", -maxGroups, maxGroups, func(c *Config) *int { return &c.RankOffset }),
		meaning: "number that is added to the rank and to the rail index, for processes whose rank does not follow from their GPU",
	}, {
		name:    "DMLC_INSTANCE_ID",
		value:   number("", 0, 1023, func(c *Config) *int { return &c.Instance }),
		unset:   "STEPMESH_GPU + DMLC_RANK_OFFSET",
		meaning: "index of the rail. The process talks to the same instance of each group of the other role",
	}, {
		name:    "STEPMESH_GPU",
		value:   number("0", 0, 1023, func(c *Config) *int { return &c.GPU }),
		meaning: "index of the GPU. It counts in the rank also where there is no GPU",
	}, {
		section: "Scheduler and addresses",
		name:    "DMLC_PS_ROOT_URI",
		value:   host(func(c *Config) *string { return &c.SchedulerHost }),
		unset:   "127.0.0.1; required where DMLC_NODE_HOST or DMLC_INTERFACE names another address than loopback",
		meaning: "host of the scheduler",
	}, {
		name:    "DMLC_PS_ROOT_PORT",
		value:   number("", 0, maxPort, func(c *Config) *int { return &c.SchedulerPort }),
		unset:   "any free port where the scheduler runs; required elsewhere",
		meaning: "port of the scheduler. The scheduler itself may have 0, which takes any free port",
	}, {
		name:    "FSERVER_HOST_SCHEDULER",
		value:   onOff("0", func(c *Config) *bool { return &c.HostScheduler }),
		meaning: "whether this server also runs the scheduler, in its own process. For servers in Python only",
	}, {
		name:    "DMLC_NODE_HOST",
		value:   host(func(c *Config) *string { return &c.NodeHost }),
		unset:   "chosen",
		meaning: "address of this host that the process uses. It takes precedence over DMLC_INTERFACE",
	}, {
		name:    "DMLC_INTERFACE",
		value:   iface(),
		unset:   "chosen",
		meaning: "network interface that the process uses. `auto` takes the interface nearest to the GPU among those with an RDMA device, or else the one that routes to the scheduler",
	}, {
		name:    "DMLC_PORT",
		value:   number("0", 0, maxPort, func(c *Config) *int { return &c.Port }),
		meaning: "port that the process listens on; 0 takes any free port",
	}, {
		name:    "DMLC_LOCAL",
		value:   onOff("0", func(c *Config) *bool { return &c.Local }),
		meaning: "whether all processes run on this host. 1 uses loopback and ignores the other addresses",
	}, {
		section: "Transport and device",
		name:    "FSERVER_TRANSPORT",
		older: []spelling{
			{"DMLC_ENABLE_RDMA", vans, van},
			{"DMLC_ENABLE_UCX", switches, oneOf("0", "", "off", "", "1", "ucx", "on", "ucx")},
			{"DMLC_PS_VAN_TYPE", vans, van},
		},
		value:   choice("auto", transports, nil, func(c *Config) *Transport { return &c.Transport }),
		meaning: "transport of tensors. `auto` takes the best one that reaches the peer. This build has tcp, cma (inside a host) and cudaipc (cma between processes with GPUs), and refuses the others. Older spellings: `ibverbs`, `multivan` and 1 mean verbs, `fabric` means ofi, `zmq` and 0 mean tcp",
	}, {
		name:    "BYTEPS_ENABLE_IPC",
		value:   onOff("1", func(c *Config) *bool { return &c.SameHost }),
		meaning: "whether `auto` may use the transports inside a host. 0 leaves TCP. A transport that FSERVER_TRANSPORT names is used all the same, but then GPUs do not map each other's memory",
	}, {
		name:    "FSERVER_LOANS",
		value:   onOff("1", func(c *Config) *bool { return &c.Loans }),
		meaning: "whether a server reads shared tensors (`empty_shared`) of workers on its host where they are. It cannot write to them. 0 copies them into receive buffers as other tensors",
	}, {
		name:    "FSERVER_CMA",
		value:   choice("auto", cmaModes, nil, func(c *Config) *CMAMode { return &c.CMAMode }),
		meaning: "how the transport cma writes into a peer's memory. `direct` copies once; `staged` copies twice, through shared memory; `auto` takes `direct` where the kernel permits it to both sides, and otherwise `staged`, with a warning that says why",
	}, {
		name:    "FSERVER_PTRACER",
		value:   onOff("1", func(c *Config) *bool { return &c.Ptracer }),
		meaning: "whether the process permits other processes of its user to write into its memory (PR_SET_PTRACER) where the kernel permits that to parents only (kernel.yama.ptrace_scope=1). `cma` needs this to copy directly",
	}, {
		name:    "STEPMESH_BACKEND",
		older:   []spelling{{name: "STEPMESH_BAKCEND"}},
		value:   choice("", backends, []string{"CPU", "GPU"}, func(c *Config) *Backend { return &c.Backend }),
		unset:   "GPU if there is one",
		meaning: "where tensors and receive buffers are. `CPU` uses no GPU; `GPU` uses GPU STEPMESH_GPU, and is an error on a host without one",
	}, {
		name:    "CUDA_VISIBLE_DEVICES",
		value:   anything("as CUDA reads it", func(c *Config) *string { return &c.Visible }),
		unset:   "all GPUs",
		meaning: "the GPUs that CUDA shows to this process. STEPMESH_GPU counts among these",
	}, {
		section: "Who may talk",
		name:    "FSERVER_CLUSTER",
		value:   text("default", 64, func(c *Config) *string { return &c.Cluster }),
		meaning: "id of the cluster. Nodes with another id are refused",
	}, {
		name:    "FSERVER_SECRET",
		value:   secret(),
		unset:   "none",
		strict:  true,
		secret:  true,
		meaning: "secret that all nodes share. Both sides of each connection prove that they know it",
	}, {
		name:    "FSERVER_SECRET_FILE",
		value:   secretFile(),
		unset:   "none",
		strict:  true,
		meaning: "file with the secret, used where FSERVER_SECRET is not set. White space around the secret does not count",
	}, {
		name:    "FSERVER_TLS",
		value:   onOff("0", func(c *Config) *bool { return &c.TLS }),
		meaning: "whether all TCP connections, control and data, use TLS 1.3. 1 needs a secret or a certificate. It must be the same on all nodes",
	}, {
		name:    "FSERVER_TLS_CERT",
		value:   file(func(c *Config) *string { return &c.TLSCert.Path }),
		unset:   "derived from the secret and FSERVER_CLUSTER",
		meaning: "PEM file with this node's certificate, followed by those between it and its root",
	}, {
		name:    "FSERVER_TLS_KEY",
		value:   file(func(c *Config) *string { return &c.TLSKey.Path }),
		unset:   "derived from the secret and FSERVER_CLUSTER",
		meaning: "PEM file with the private key of that certificate",
	}, {
		name:    "FSERVER_TLS_CA",
		value:   file(func(c *Config) *string { return &c.TLSCA.Path }),
		unset:   "the certificate itself",
		meaning: "PEM file with the roots from which certificates of peers must come. Names in certificates are not checked: peers are found by address, and being a member is what counts",
	}, {
		section: "Time limits and waiting",
		name:    "FSERVER_INIT_TIMEOUT",
		value:   seconds("60", 10*time.Millisecond, maxWait, func(c *Config) *time.Duration { return &c.InitTimeout }),
		meaning: "limit for the cluster to become complete, from when this process starts to connect",
	}, {
		name:    "FSERVER_STOP_TIMEOUT",
		value:   seconds("30", 10*time.Millisecond, maxWait, func(c *Config) *time.Duration { return &c.StopTimeout }),
		meaning: "limit for all nodes to leave together. After that this node leaves alone",
	}, {
		name:    "FSERVER_BARRIER_TIMEOUT",
		value:   seconds("300", 10*time.Millisecond, maxWait, func(c *Config) *time.Duration { return &c.BarrierTimeout }),
		meaning: "limit for a barrier whose call gives none",
	}, {
		name:    "FSERVER_STALL_TIMEOUT",
		value:   seconds("30", 10*time.Millisecond, maxWait, func(c *Config) *time.Duration { return &c.StallTimeout }),
		meaning: "limit for a connection that has bytes to send and makes no progress. After that it is lost",
	}, {
		name:    "PS_HEARTBEAT_INTERVAL",
		value:   seconds("1", 0, maxWait, func(c *Config) *time.Duration { return &c.HeartbeatInterval }),
		meaning: "time between two heartbeats; 0 sends none",
	}, {
		name:    "PS_HEARTBEAT_TIMEOUT",
		value:   seconds("10", 0, maxWait, func(c *Config) *time.Duration { return &c.HeartbeatTimeout }),
		meaning: "time without any message after which a peer is lost; 0 means never. It must be more than PS_HEARTBEAT_INTERVAL",
	}, {
		name:    "FSERVER_ON_PEER_LOST",
		value:   choice("raise", onPeerLost, nil, func(c *Config) *OnPeerLost { return &c.OnPeerLost }),
		meaning: "what calls do that need a lost peer. `raise` raises an error until a process has taken the rank again. `wait` waits for that process, and sends unanswered requests to it again",
	}, {
		name:    "FSERVER_REJOIN_TIMEOUT",
		value:   seconds("60", 10*time.Millisecond, maxWait, func(c *Config) *time.Duration { return &c.RejoinTimeout }),
		meaning: "limit for FSERVER_ON_PEER_LOST=wait, from the loss. A scheduler stays for as long when all others are lost",
	}, {
		name:    "FSERVER_PROGRESS",
		value:   choice("auto", progresses, nil, func(c *Config) *Progress { return &c.Progress }),
		meaning: "who moves data while no thread is inside wait, get_batch or another call that moves it. `caller`: a background thread, about a millisecond later. `thread`: a thread that polls, at once, and takes a core while there is traffic. `auto`: `thread` where 8 cores are free for each process, otherwise `caller`",
	}, {
		name:    "FSERVER_SPIN_US",
		value:   microseconds("1000", 0, time.Second, func(c *Config) *time.Duration { return &c.Spin }),
		meaning: "time for which a waiting call, or the thread of FSERVER_PROGRESS=thread, spins and yields before it sleeps",
	}, {
		section: "Log",
		name:    "FSERVER_LOG",
		older: []spelling{{"PS_VERBOSE", "a whole number from 0 to 9", func(v string) (string, bool) {
			n, err := strconv.Atoi(v)
			switch {
			case err != nil || n < 0 || n > 9:
				return "", false
			case n == 0:
				return "warn", true
			case n == 1:
				return "info", true
			}
			return "debug", true
		}}},
		value:   choice("info", levels, nil, func(c *Config) *Level { return &c.Log }),
		meaning: "least important kind of line that is logged. `warn`: losses and slower ways than expected; `info`: also who connects, and how; `debug`: also what was tried and is not there. PS_VERBOSE: 0 means warn, 1 info, 2 and above debug",
	}, {
		section: "RDMA",
		name:    "STEPMESH_SPLIT_QP_LAG",
		older: []spelling{{"DMLC_SPLIT_QP_LAG", "a whole number", func(v string) (string, bool) {
			n, err := strconv.Atoi(v)
			if err != nil {
				return "", false
			}
			switch n {
			case 0:
				return "1", true
			case 1:
				return "port1", true
			case 2:
				return "port2", true
			}
			return "0", true
		}}},
		value:   choice("0", lags, nil, func(c *Config) *Lag { return &c.SplitLag }),
		effect:  "transport verbs",
		meaning: "ports of a bonded NIC that queue pairs use: 1 spreads them over both, port1 and port2 keep to one, 0 leaves it to the NIC. DMLC_SPLIT_QP_LAG counts otherwise: 0 spreads, 1 and 2 are ports, all else is off",
	}, {
		name:    "STEPAF_QP_NUM",
		value:   number("2", 1, 64, func(c *Config) *int { return &c.QueuePairs }),
		effect:  "transport verbs",
		meaning: "number of queue pairs for each peer",
	}, {
		name:    "BYTEPS_RDMA_RX_DEPTH",
		value:   number("256", 1, 65536, func(c *Config) *int { return &c.RecvDepth }),
		effect:  "transport verbs",
		meaning: "depth of the receive queue",
	}, {
		name:    "BYTEPS_RDMA_START_DEPTH",
		value:   number("128", 1, 65536, func(c *Config) *int { return &c.StartDepth }),
		effect:  "transport verbs",
		meaning: "depth of the send queue",
	}, {
		section: "GPU and cores",
		name:    "STEPMESH_MEM_SYNC",
		value:   onOff("1", func(c *Config) *bool { return &c.MemSync }),
		effect:  "GPU tensors",
		meaning: "how the CPU learns that a stream has reached a point: 1 by a flag in memory, 0 by an event",
	}, {
		name:    "STEPMESH_BIND_CPU_CORE",
		value:   onOff("0", func(c *Config) *bool { return &c.BindCores }),
		effect:  "polling threads",
		meaning: "whether the polling threads are pinned to cores",
	}, {
		name:    "STEPMESH_CPU_CORES_PER_SOCKET",
		value:   number("48", 1, 4096, func(c *Config) *int { return &c.CoresPerSocket }),
		effect:  "polling threads",
		meaning: "number of cores of a socket. Two GPUs share half of them",
	}, {
		name:    "STEPMESH_CPU_CORES_PER_GPU",
		value:   number("5", 1, 4096, func(c *Config) *int { return &c.CoresPerGPU }),
		effect:  "polling threads",
		meaning: "number of cores for each GPU",
	}, {
		name:    "STEPMESH_CPU_START_OFFSET",
		value:   number("10", 0, 4095, func(c *Config) *int { return &c.CoreOffset }),
		effect:  "polling threads",
		meaning: "first core to use in each half of a socket",
	}, {
		section: "Loss",
		name:    "PS_RESEND",
		value:   onOff("0", func(c *Config) *bool { return &c.Resend }),
		meaning: "whether frames (control messages, not the bytes of tensors) are numbered, acknowledged and sent again when they are lost. It must be the same on all nodes",
	}, {
		name:    "PS_RESEND_TIMEOUT",
		value:   milliseconds("1000", time.Millisecond, time.Hour, func(c *Config) *time.Duration { return &c.ResendTimeout }),
		meaning: "time to wait for an acknowledgement. It doubles each time, up to 16 times as long",
	}, {
		name:    "PS_DROP_MSG",
		older:   []spelling{{name: "STEPMESH_DROP_RATE"}},
		value:   number("0", 0, 100, func(c *Config) *int { return &c.DropPercent }),
		meaning: "percentage of frames that this node loses on purpose. Without PS_RESEND, calls that need a lost frame end in TimeoutError",
	},
}

// vans are the values of the older spellings of the transport.
const vans = "ibverbs, fabric, ucx, zmq, multivan, 0 or 1"

var van = oneOf("ibverbs", "verbs", "1", "verbs", "multivan", "verbs", "fabric", "ofi", "ucx", "ucx", "zmq", "tcp", "0", "tcp")

// oneOf makes the to of a spelling from pairs of its value and the newer one.
func oneOf(pairs ...string) func(string) (string, bool) {
	return func(v string) (string, bool) {
		for i := 0; i < len(pairs); i += 2 {
			if strings.EqualFold(v, pairs[i]) {
				return pairs[i+1], true
			}
		}
		return "", false
	}
}

func number(def string, lo, hi int, at func(*Config) *int) value {
	return value{
		typ:  "number",
		want: fmt.Sprintf("a whole number from %d to %d", lo, hi),
		def:  def,
		set: func(c *Config, v string) bool {
			n, err := strconv.Atoi(v)
			if err != nil || n < lo || n > hi {
				return false
			}
			*at(c) = n
			return true
		},
		get: func(c *Config) string { return strconv.Itoa(*at(c)) },
	}
}

// onOff is a switch. Users write it in either spelling; it is shown as 0 or 1.
func onOff(def string, at func(*Config) *bool) value {
	return value{
		typ:  "flag",
		want: switches,
		def:  def,
		set: func(c *Config, v string) bool {
			*at(c) = v == "1" || strings.EqualFold(v, "on")
			return *at(c) || v == "0" || strings.EqualFold(v, "off")
		},
		get: func(c *Config) string {
			if *at(c) {
				return "1"
			}
			return "0"
		},
	}
}

// switches are the values of every setting that is on or off.
const switches = "0, 1, off or on"

// choice is one of names, each of which stands for its index; allowed (nil: all
// of names) are those that a user can write, in any case.
func choice[T ~uint8](def string, names, allowed []string, at func(*Config) *T) value {
	if allowed == nil {
		allowed = names
	}
	last := len(allowed) - 1
	return value{
		typ:  "choice",
		want: strings.Join(allowed[:last], ", ") + " or " + allowed[last],
		def:  def,
		set: func(c *Config, v string) bool {
			for _, a := range allowed {
				if !strings.EqualFold(a, v) {
					continue
				}
				for i, n := range names {
					if n == a {
						*at(c) = T(i)
						return true
					}
				}
			}
			return false
		},
		get: func(c *Config) string {
			if n := name(names, *at(c)); slices.Contains(allowed, n) {
				return n
			}
			return "" // as nobody can write it
		},
	}
}

// duration is a decimal number of units. lo and hi are what is allowed.
func duration(typ, units string, unit time.Duration, def string, lo, hi time.Duration, at func(*Config) *time.Duration) value {
	show := func(d time.Duration) string {
		return strconv.FormatFloat(float64(d)/float64(unit), 'f', -1, 64)
	}
	return value{
		typ:  typ,
		want: fmt.Sprintf("%s from %s to %s", units, show(lo), show(hi)),
		def:  def,
		set: func(c *Config, v string) bool {
			f, err := strconv.ParseFloat(v, 64)
			f = math.Round(f * float64(unit))
			if err != nil || !(f >= float64(lo) && f <= float64(hi)) { // also not a number
				return false
			}
			*at(c) = time.Duration(f)
			return true
		},
		get: func(c *Config) string { return show(*at(c)) },
	}
}

func seconds(def string, lo, hi time.Duration, at func(*Config) *time.Duration) value {
	return duration("seconds", "seconds", time.Second, def, lo, hi, at)
}

func milliseconds(def string, lo, hi time.Duration, at func(*Config) *time.Duration) value {
	return duration("milliseconds", "milliseconds", time.Millisecond, def, lo, hi, at)
}

func microseconds(def string, lo, hi time.Duration, at func(*Config) *time.Duration) value {
	return duration("microseconds", "microseconds", time.Microsecond, def, lo, hi, at)
}

// text is at most max visible ASCII characters.
func text(def string, max int, at func(*Config) *string) value {
	return value{
		typ:  "text",
		want: fmt.Sprintf("1 to %d visible ASCII characters without spaces", max),
		def:  def,
		set: func(c *Config, v string) bool {
			*at(c) = v
			return visible(v, max)
		},
		get: func(c *Config) string { return *at(c) },
	}
}

// anything is a variable of somebody else's, who knows what is right.
func anything(want string, at func(*Config) *string) value {
	return value{
		typ:  "text",
		want: want,
		set: func(c *Config, v string) bool {
			*at(c) = v
			return true
		},
		get: func(c *Config) string { return *at(c) },
	}
}

func visible(v string, max int) bool {
	for i := 0; i < len(v); i++ {
		if v[i] <= ' ' || v[i] > '~' {
			return false
		}
	}
	return v != "" && len(v) <= max
}

// host is a host name, or an IP address that names one host, with or without
// the brackets of IPv6.
func host(at func(*Config) *string) value {
	return value{
		typ:  "host",
		want: "a host name, or an IP address of one host, without port or scheme",
		set: func(c *Config, v string) bool {
			if n := len(v); n > 2 && v[0] == '[' && v[n-1] == ']' {
				v = v[1 : n-1]
				if !strings.Contains(v, ":") {
					return false
				}
			}
			*at(c) = v
			if a, err := netip.ParseAddr(v); err == nil {
				return !a.IsUnspecified() && !a.IsMulticast()
			}
			return visible(v, 253) && !strings.ContainsAny(v, `:/\@[]`)
		},
		get: func(c *Config) string { return *at(c) },
	}
}

func iface() value {
	return value{
		typ:  "interface",
		want: "auto, or the name of an interface of at most 15 characters",
		set: func(c *Config, v string) bool {
			if strings.EqualFold(v, "auto") {
				c.NearGPU = true
				return true
			}
			c.Interface = v
			return visible(v, 15) && !strings.Contains(v, "/")
		},
		get: func(c *Config) string {
			if c.NearGPU {
				return "auto"
			}
			return c.Interface
		},
	}
}

func secret() value {
	return value{
		typ:  "secret",
		want: "at least one character that is not white space",
		set: func(c *Config, v string) bool {
			c.Secret = Secret{v}
			return v != ""
		},
		get: func(c *Config) string { return c.Secret.String() },
	}
}

func secretFile() value {
	v := file(func(c *Config) *string { return &c.secretFile })
	v.want = fmt.Sprintf("a readable file of 1 to %d bytes", maxSecret)
	return v
}

// file only names a file; finish reads it.
func file(at func(*Config) *string) value {
	return value{
		typ:  "file",
		want: fmt.Sprintf("a readable file of 1 to %d bytes", maxPEM),
		set: func(c *Config, v string) bool {
			*at(c) = v
			return v != ""
		},
		get: func(c *Config) string { return *at(c) },
	}
}
