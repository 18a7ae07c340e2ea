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

// Option is a setting and everything that is known about it. Drivers make theirs with Flag, Number,
// Choice and Word.
type Option struct {
	Name    string
	Older   []Spelling // in order of precedence, all after Name
	Meaning string
	Effect  string // with what it takes effect; empty: in every build

	section string
	typ     string // one word for JSON
	want    string // what is allowed, as errors and the documentation say it
	def     string // as the user would write it; empty: none
	unset   string // what it means that no value is given, if there is no default
	strict  bool   // an empty value is an error, not as good as none
	secret  bool   // the value is never shown
	set     func(*Config, string) bool
	get     func(*Config) string
}

// Spelling is an older name of a setting. With To, its values have a meaning
// of their own: To gives the value of the newer name, empty if this one says
// nothing about it.
type Spelling struct {
	Name string
	Want string
	To   func(string) (string, bool)
}

const (
	maxGroups = 65535
	maxPort   = 65535
	minWait   = 10 * time.Millisecond
	maxWait   = 7 * 24 * time.Hour
	maxSecret = 4096
	maxPEM    = 1 << 20
)

// table is in the order of docs/settings.md. Values are read in this order. rows adds what the
// transports say.
var table = []struct {
	section string
	options []Option
}{
	{"Roles and ranks", []Option{
		choice("DMLC_ROLE", "server", roles, func(c *Config) *Role { return &c.Role },
			"role of this process; `joint` starts scheduler, servers and workers on this host"),
		number("DMLC_NUM_WORKER", "1", 1, maxGroups, func(c *Config) *int { return &c.Workers },
			"number of worker groups"),
		number("DMLC_NUM_SERVER", "1", 1, maxGroups, func(c *Config) *int { return &c.Servers },
			"number of server groups"),
		number("DMLC_GROUP_SIZE", "1", 1, 1024, func(c *Config) *int { return &c.GroupSize },
			"processes in a group, usually one for each GPU of a host. There are as many rails"),
		number("DMLC_NODE_RANK", "", NoRank, maxGroups-1, func(c *Config) *int { return &c.NodeRank },
			"index of this process's group within its role. The rank is DMLC_GROUP_SIZE × DMLC_NODE_RANK + STEPMESH_GPU + DMLC_RANK_OFFSET. With -1 the scheduler assigns the lowest free rank, whatever the other two are; DMLC_GROUP_SIZE must be 1 then, unless the role has one group, whose index is 0").or("0; -1 where DMLC_GROUP_SIZE is 1, there are several groups, and neither STEPMESH_GPU nor DMLC_RANK_OFFSET is set"),
		number("DMLC_RANK_OFFSET", "0", -maxGroups, maxGroups, func(c *Config) *int { return &c.RankOffset },
			"number that is added to the rank and to the rail index, for processes whose rank does not follow from their GPU"),
		number("DMLC_INSTANCE_ID", "", 0, 1023, func(c *Config) *int { return &c.Instance },
			"index of the rail. The process talks to the same instance of each group of the other role").or("STEPMESH_GPU + DMLC_RANK_OFFSET"),
		number("STEPMESH_GPU", "0", 0, 1023, func(c *Config) *int { return &c.GPU },
			"index of the GPU. It counts in the rank also where there is no GPU"),
	}},
	{"Scheduler and addresses", []Option{
		host("DMLC_PS_ROOT_URI", func(c *Config) *string { return &c.SchedulerHost },
			"host of the scheduler").or("127.0.0.1; required where DMLC_NODE_HOST or DMLC_INTERFACE names another address than loopback"),
		number("DMLC_PS_ROOT_PORT", "", 0, maxPort, func(c *Config) *int { return &c.SchedulerPort },
			"port of the scheduler. The scheduler itself may have 0, which takes any free port").or("any free port where the scheduler runs; required elsewhere"),
		flag("FSERVER_HOST_SCHEDULER", "0", func(c *Config) *bool { return &c.HostScheduler },
			"whether this server also runs the scheduler, in its own process. For servers in Python and C++"),
		host("DMLC_NODE_HOST", func(c *Config) *string { return &c.NodeHost },
			"address of this host that the process uses. It takes precedence over the names of DMLC_INTERFACE, and `auto` there over it").or("chosen"),
		interfaces("DMLC_INTERFACE",
			"network interfaces that the process uses. With several, tensors over TCP travel over all of them, and nothing is lost with one; see [several interfaces](rails.md). `auto` takes [all that are near the GPU](rails.md#auto), or, where one can be used, the interface nearest to the GPU among those with an RDMA device, or else the one that routes to the scheduler").or("chosen"),
		number("DMLC_PORT", "0", 0, maxPort, func(c *Config) *int { return &c.Port },
			"port that the process listens on; 0 takes any free port"),
		flag("DMLC_LOCAL", "0", func(c *Config) *bool { return &c.Local },
			"whether all processes run on this host. 1 uses loopback and ignores the other addresses"),
	}},
	{"Transport and device", []Option{
		flag("BYTEPS_ENABLE_IPC", "1", func(c *Config) *bool { return &c.SameHost },
			"whether `auto` may use the transports inside a host. 0 leaves RDMA and TCP. A transport that FSERVER_TRANSPORT names is used all the same, but then GPUs do not map each other's memory"),
		flag("FSERVER_LOANS", "1", func(c *Config) *bool { return &c.Loans },
			"whether a server reads shared tensors (`empty_shared`) of workers on its host where they are. It cannot write to them. 0 copies them into receive buffers as other tensors"),
		number("FSERVER_SPLIT_BYTES", "131072", 4096, 1<<40, func(c *Config) *int { return &c.Split },
			"size in bytes from which on a tensor is cut, to travel over [several interfaces](rails.md), devices or queue pairs at once"),
		choice("STEPMESH_BACKEND", "", backends, func(c *Config) *Backend { return &c.Backend },
			"where tensors and receive buffers are. `CPU` uses no GPU; `GPU` uses GPU STEPMESH_GPU, and is an error on a host without one").or("GPU if there is one, and torch can use it").older(Spelling{Name: "STEPMESH_BAKCEND"}),
		flag("STEPMESH_MEM_SYNC", "1", func(c *Config) *bool { return &c.Flags },
			"how the CPU learns that a stream has reached a point: 1 by a flag in memory, 0 by an event. For GPU tensors"),
		text("CUDA_VISIBLE_DEVICES", "text", "as CUDA reads it", func(c *Config) *string { return &c.Visible }, func(string) bool { return true },
			"the GPUs that CUDA shows to this process. STEPMESH_GPU counts among these").or("all GPUs"),
	}},
	{"Who may talk", []Option{
		word("FSERVER_CLUSTER", "default", func(c *Config) *string { return &c.Cluster },
			"id of the cluster. Nodes with another id are refused"),
		secret("FSERVER_SECRET",
			"secret that all nodes share. Both sides of each connection prove that they know it").or("none"),
		file("FSERVER_SECRET_FILE", maxSecret, func(c *Config) *string { return &c.secretFile },
			"file with the secret, used where FSERVER_SECRET is not set. White space around the secret does not count").or("none"),
		flag("FSERVER_TLS", "0", func(c *Config) *bool { return &c.TLS },
			"whether all TCP connections, control and data, use TLS 1.3. 1 needs a secret or a certificate. It must be the same on all nodes"),
		file("FSERVER_TLS_CERT", maxPEM, func(c *Config) *string { return &c.TLSCert.Path },
			"PEM file with this node's certificate, followed by those between it and its root").or("derived from the secret and FSERVER_CLUSTER"),
		file("FSERVER_TLS_KEY", maxPEM, func(c *Config) *string { return &c.TLSKey.Path },
			"PEM file with the private key of that certificate").or("derived from the secret and FSERVER_CLUSTER"),
		file("FSERVER_TLS_CA", maxPEM, func(c *Config) *string { return &c.TLSCA.Path },
			"PEM file with the roots from which certificates of peers must come. Names in certificates are not checked: peers are found by address, and being a member is what counts").or("the certificate itself"),
	}},
	{"Time limits and waiting", []Option{
		duration("FSERVER_INIT_TIMEOUT", "60", time.Second, minWait, maxWait, func(c *Config) *time.Duration { return &c.InitTimeout },
			"limit for the cluster to become complete, from when this process starts to connect"),
		duration("FSERVER_STOP_TIMEOUT", "30", time.Second, minWait, maxWait, func(c *Config) *time.Duration { return &c.StopTimeout },
			"limit for all nodes to leave together. After that this node leaves alone"),
		duration("FSERVER_BARRIER_TIMEOUT", "300", time.Second, minWait, maxWait, func(c *Config) *time.Duration { return &c.BarrierTimeout },
			"limit for a barrier whose call gives none"),
		duration("FSERVER_STALL_TIMEOUT", "30", time.Second, minWait, maxWait, func(c *Config) *time.Duration { return &c.StallTimeout },
			"limit for a connection that has bytes to send and makes no progress. After that it is lost"),
		duration("PS_HEARTBEAT_INTERVAL", "1", time.Second, 0, maxWait, func(c *Config) *time.Duration { return &c.HeartbeatInterval },
			"time between two heartbeats. 0 sends none, and then PS_HEARTBEAT_TIMEOUT has no effect: no peer is lost by silence. If only PS_HEARTBEAT_TIMEOUT is given, it is at most a quarter of that"),
		duration("PS_HEARTBEAT_TIMEOUT", "10", time.Second, 0, maxWait, func(c *Config) *time.Duration { return &c.HeartbeatTimeout },
			"time without any message after which a peer is lost; 0 means never. It must be more than PS_HEARTBEAT_INTERVAL. If only that is given, it is at least ten times as long"),
		choice("FSERVER_ON_PEER_LOST", "raise", onPeerLost, func(c *Config) *OnPeerLost { return &c.OnPeerLost },
			"what calls do that need a lost peer. `raise` raises an error until a process has taken the rank again. `wait` waits for that process, and sends unanswered requests to it again"),
		duration("FSERVER_REJOIN_TIMEOUT", "60", time.Second, minWait, maxWait, func(c *Config) *time.Duration { return &c.RejoinTimeout },
			"limit for FSERVER_ON_PEER_LOST=wait, from the loss. A scheduler stays for as long when all others are lost"),
		choice("FSERVER_PROGRESS", "auto", progresses, func(c *Config) *Progress { return &c.Progress },
			"who moves data while no thread is inside wait, get_batch or another call that moves it. `caller`: a background thread, about a millisecond later. `thread`: a thread that polls, at once, and takes a core while there is traffic. `auto`: `thread` if the process may use at least 8 cores for each process of its group (DMLC_GROUP_SIZE), otherwise `caller`. Other processes of the host are not counted"),
		duration("FSERVER_SPIN_US", "1000", time.Microsecond, 0, time.Second, func(c *Config) *time.Duration { return &c.Spin },
			"time for which a waiting call, or the thread of FSERVER_PROGRESS=thread, spins and yields before it sleeps"),
	}},
	{"Log", []Option{
		choice("FSERVER_LOG", "info", levels, func(c *Config) *Level { return &c.Log },
			"least important kind of line that is logged. `warn`: losses and slower ways than expected; `info`: also who connects, and how; `debug`: also what was tried and is not there. PS_VERBOSE: 0 means warn, 1 info, 2 and above debug").older(Spelling{"PS_VERBOSE", "a whole number from 0 to 9", verbose}),
	}},
	{"Cores", []Option{
		flag("STEPMESH_BIND_CPU_CORE", "0", func(c *Config) *bool { return &c.BindCores },
			"whether the polling threads are pinned to cores").with("polling threads"),
		number("STEPMESH_CPU_CORES_PER_SOCKET", "48", 1, 4096, func(c *Config) *int { return &c.CoresPerSocket },
			"number of cores of a socket. Two GPUs share half of them").with("polling threads"),
		number("STEPMESH_CPU_CORES_PER_GPU", "5", 1, 4096, func(c *Config) *int { return &c.CoresPerGPU },
			"number of cores for each GPU").with("polling threads"),
		number("STEPMESH_CPU_START_OFFSET", "10", 0, 4095, func(c *Config) *int { return &c.CoreOffset },
			"first core to use in each half of a socket").with("polling threads"),
	}},
	{"Loss", []Option{
		flag("PS_RESEND", "0", func(c *Config) *bool { return &c.Resend },
			"whether a frame (a control message, not the bytes of a tensor) that this node has lost on purpose is sent again. The frames behind it wait for it. Transports lose nothing by themselves, so this does nothing without PS_DROP_MSG, and nodes may differ in it"),
		duration("PS_RESEND_TIMEOUT", "1000", time.Millisecond, time.Millisecond, time.Hour, func(c *Config) *time.Duration { return &c.ResendTimeout },
			"time until a lost frame is sent again. It doubles each time that the frame is lost again, up to 16 times as long"),
		number("PS_DROP_MSG", "0", 0, 100, func(c *Config) *int { return &c.DropPercent },
			"percentage of frames that this node loses on purpose. Without PS_RESEND, calls that need a lost frame end in TimeoutError").older(Spelling{Name: "STEPMESH_DROP_RATE"}),
	}},
}

// or gives the option a text for what holds where no value is given.
func (o Option) or(unset string) Option { o.unset = unset; return o }

// with names what else has to be set for the option to take effect.
func (o Option) with(effect string) Option { o.Effect = effect; return o }

func (o Option) older(s ...Spelling) Option { o.Older = s; return o }

// verbose translates a value of PS_VERBOSE into a level of FSERVER_LOG.
func verbose(v string) (string, bool) {
	n, err := strconv.Atoi(v)
	if err != nil || n < 0 || n > 9 {
		return "", false
	}
	return levels[min(n+1, len(levels)-1)], true
}

// option makes a setting. at returns the field of Config that it sets. read converts a text, and
// returns false if the text is not allowed. show converts the field back.
func option[T any](name, typ, want, def string, at func(*Config) *T, read func(string) (T, bool), show func(T) string, meaning string) Option {
	return Option{
		Name: name, Meaning: meaning, typ: typ, want: want, def: def,
		set: func(c *Config, v string) (ok bool) {
			*at(c), ok = read(v)
			return ok
		},
		get: func(c *Config) string { return show(*at(c)) },
	}
}

func number(name, def string, lo, hi int, at func(*Config) *int, meaning string) Option {
	return option(name, "number", fmt.Sprintf("a whole number from %d to %d", lo, hi), def, at, func(v string) (int, bool) {
		n, err := strconv.Atoi(v)
		return n, err == nil && n >= lo && n <= hi
	}, strconv.Itoa, meaning)
}

// switches are the values of every setting that is on or off.
const switches = "0, 1, off or on"

// onOff reads a switch. Users write it in either spelling; it is shown as 0 or 1.
func onOff(v string) (on, ok bool) {
	on = v == "1" || strings.EqualFold(v, "on")
	return on, on || v == "0" || strings.EqualFold(v, "off")
}

func flag(name, def string, at func(*Config) *bool, meaning string) Option {
	return option(name, "flag", switches, def, at, onOff, func(on bool) string {
		if on {
			return "1"
		}
		return "0"
	}, meaning)
}

// choice is one of names, in any case, each of which stands for its index. If there is no default, the
// first one says that none was given, and nobody can write it.
func choice[T ~uint8](name, def string, names []string, at func(*Config) *T, meaning string) Option {
	first := 0
	if def == "" {
		first = 1
	}
	return option(name, "choice", oneOf(names[first:]), def, at, func(v string) (T, bool) {
		i := slices.IndexFunc(names, func(n string) bool { return strings.EqualFold(n, v) })
		return T(i), i >= first
	}, func(v T) string {
		if int(v) < first {
			return ""
		}
		return nameOf(names, v)
	}, meaning)
}

// oneOf is a list of names for people.
func oneOf(names []string) string {
	last := len(names) - 1
	return strings.Join(names[:last], ", ") + " or " + names[last]
}

// duration is a decimal number of units. lo and hi are what is allowed.
func duration(name, def string, unit, lo, hi time.Duration, at func(*Config) *time.Duration, meaning string) Option {
	units := map[time.Duration]string{time.Second: "seconds", time.Millisecond: "milliseconds", time.Microsecond: "microseconds"}[unit]
	show := func(d time.Duration) string {
		return strconv.FormatFloat(float64(d)/float64(unit), 'f', -1, 64)
	}
	return option(name, units, fmt.Sprintf("%s from %s to %s", units, show(lo), show(hi)), def, at, func(v string) (time.Duration, bool) {
		f, err := strconv.ParseFloat(v, 64)
		f = math.Round(f * float64(unit))
		if err != nil || !(f >= float64(lo) && f <= float64(hi)) { // also not a number
			return 0, false
		}
		return time.Duration(f), true
	}, show, meaning)
}

// text is kept as it is written.
func text(name, typ, want string, at func(*Config) *string, allowed func(string) bool, meaning string) Option {
	read := func(v string) (string, bool) { return v, allowed(v) }
	return option(name, typ, want, "", at, read, same, meaning)
}

func same(v string) string { return v }

// word is at most 64 visible ASCII characters.
func word(name, def string, at func(*Config) *string, meaning string) Option {
	const most = 64
	o := text(name, "text", fmt.Sprintf("1 to %d visible ASCII characters without spaces", most), at,
		func(v string) bool { return visible(v, most) }, meaning)
	o.def = def
	return o
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
func host(name string, at func(*Config) *string, meaning string) Option {
	return option(name, "host", "a host name, or an IP address of one host, without port or scheme", "", at, func(v string) (string, bool) {
		if n := len(v); n > 2 && v[0] == '[' && v[n-1] == ']' {
			v = v[1 : n-1]
			if !strings.Contains(v, ":") {
				return "", false
			}
		}
		if a, err := netip.ParseAddr(v); err == nil {
			return v, !a.IsUnspecified() && !a.IsMulticast()
		}
		return v, visible(v, 253) && !strings.ContainsAny(v, `:/\@[]`)
	}, same, meaning)
}

// maxInterfaces bounds the names in DMLC_INTERFACE.
const maxInterfaces = 4

// names is a list of at most so many different names, separated by commas.
func names(name, typ, want string, at func(*Config) *[]string, most int, allowed func(string) bool, meaning string) Option {
	read := func(v string) ([]string, bool) {
		list := strings.Split(v, ",")
		for i, n := range list {
			if !allowed(n) || slices.Contains(list[:i], n) {
				return nil, false
			}
		}
		return list, len(list) <= most
	}
	show := func(list []string) string { return strings.Join(list, ",") }
	return option(name, typ, want, "", at, read, show, meaning)
}

func interfaces(name, meaning string) Option {
	want := fmt.Sprintf("auto alone, or the names of 1 to %d different interfaces, each of at most 15 characters, separated by commas", maxInterfaces)
	at := func(c *Config) *[]string { return &c.Interfaces }
	o := names(name, "interfaces", want, at, maxInterfaces, func(n string) bool {
		return !strings.EqualFold(n, "auto") && visible(n, 15) && !strings.Contains(n, "/")
	}, meaning)
	set, get := o.set, o.get
	o.set = func(c *Config, v string) bool {
		c.NearGPU = strings.EqualFold(v, "auto")
		return c.NearGPU || set(c, v)
	}
	o.get = func(c *Config) string {
		if c.NearGPU {
			return "auto"
		}
		return get(c)
	}
	return o
}

func secret(name, meaning string) Option {
	at := func(c *Config) *Secret { return &c.Secret }
	read := func(v string) (Secret, bool) { return Secret{v}, v != "" }
	o := option(name, "secret", "at least one character that is not white space", "", at, read, Secret.String, meaning)
	o.strict, o.secret = true, true
	return o
}

// file only names a file of at most so many bytes; finish reads it.
func file(name string, most int, at func(*Config) *string, meaning string) Option {
	o := text(name, "file", fmt.Sprintf("a readable file of 1 to %d bytes", most), at, func(v string) bool { return v != "" }, meaning)
	o.strict = most == maxSecret
	return o
}
