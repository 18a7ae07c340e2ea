package conf

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// with is settings that a worker can open with, and more.
func with(more ...string) []string {
	return append([]string{"DMLC_ROLE=worker", "DMLC_PS_ROOT_PORT=7000"}, more...)
}

func good(t *testing.T, settings ...string) *Config {
	t.Helper()
	c, warnings, err := Parse(settings, ways)
	require.NoError(t, err)
	require.Empty(t, warnings)
	return c
}

func bad(t *testing.T, settings ...string) string {
	t.Helper()
	c, _, err := Parse(settings, ways)
	require.Error(t, err)
	require.Nil(t, c)
	return err.Error()
}

func warned(t *testing.T, settings ...string) (*Config, string) {
	t.Helper()
	c, warnings, err := Parse(settings, ways)
	require.NoError(t, err)
	require.Len(t, warnings, 1)
	return c, string(warnings[0])
}

// ways are transports for the tests.
type mode uint8

var ways = []Way{
	{Name: "near", About: "inside a host", Options: []Option{
		Choice[mode]("NEAR_MODE", "one", []string{"one", "two"}, "how"), Flag("NEAR_OPEN", "1", "whether"), Number("NEAR_ROOM", "7", 1, 9, "how much"),
	}},
	{Name: "tcp", About: "between all hosts", Aliases: []string{"zmq", "0"}, Options: []Option{
		Number("STEPAF_QP_NUM", "2", 1, 64, "how many"), Number("BYTEPS_RDMA_RX_DEPTH", "256", 1, 65536, "how deep"),
	}},
}

func TestDefaults(t *testing.T) {
	yes, room, pairs, depth := true, 7, 2, 256
	require.Equal(t, &Config{
		Role: Server, Workers: 1, Servers: 1, GroupSize: 1,
		SchedulerHost: "127.0.0.1", SchedulerPort: 7000,
		Transport: Auto, SameHost: true, Loans: true, Split: 1 << 17, Backend: AnyBackend, Flags: true,
		Cluster:     "default",
		InitTimeout: time.Minute, StopTimeout: 30 * time.Second, BarrierTimeout: 5 * time.Minute,
		StallTimeout: 30 * time.Second, HeartbeatInterval: time.Second, HeartbeatTimeout: 10 * time.Second, RejoinTimeout: 60 * time.Second,
		Spin: time.Millisecond, Log: LogInfo,
		CoresPerSocket: 48, CoresPerGPU: 5, CoreOffset: 10, ResendTimeout: time.Second,
		options: map[string]any{"NEAR_MODE": new(mode), "NEAR_OPEN": &yes, "NEAR_ROOM": &room, "STEPAF_QP_NUM": &pairs, "BYTEPS_RDMA_RX_DEPTH": &depth},
	}, good(t, "DMLC_PS_ROOT_PORT=7000"))
}

// TestEverySpelling goes through each name of the table: values that are taken,
// with what they come to, and values that are refused.
func TestEverySpelling(t *testing.T) {
	type cases struct {
		take   map[string]string
		refuse []string
	}
	whole := func(lo, hi int) cases {
		l, h := fmt.Sprint(lo), fmt.Sprint(hi)
		return cases{map[string]string{l: l, h: h, " " + h + "\t": h},
			[]string{fmt.Sprint(lo - 1), fmt.Sprint(hi + 1), "two", "1.5", "1e3", "0x10", "9999999999999999999999"}}
	}
	onOff := cases{map[string]string{"0": "0", "1": "1", "off": "0", "On": "1", " ON ": "1"}, []string{"2", "-1", "true", "yes", "of"}}
	times := func(lo, hi string, outside ...string) cases {
		return cases{map[string]string{lo: lo, hi: hi, "1.5": "1.5"},
			append(outside, "-1", "nan", "inf", "-inf", "1s", "1e300", "soon")}
	}
	limit := times("0.01", "604800", "0", "0.001", "604800.1")
	hosts := cases{
		map[string]string{"10.0.0.9": "10.0.0.9", "node-7.rack2": "node-7.rack2", "fe80::1%eth0": "fe80::1%eth0", "[::1]": "::1", "localhost": "localhost"},
		[]string{"0.0.0.0", "::", "224.0.0.1", "10.0.0.9:7000", "tcp://10.0.0.9", "a b", "[10.0.0.9]", "[]", "é", strings.Repeat("a", 254)}}
	vans := cases{map[string]string{"0": "tcp", "zmq": "tcp", "ZMQ": "tcp"}, []string{"rdma", "2"}}

	all := map[string]cases{
		"DMLC_ROLE":               {map[string]string{"worker": "worker", "Server": "server", "scheduler": "scheduler", "joint": "joint"}, []string{"master", "2"}},
		"DMLC_NUM_WORKER":         whole(1, 65535),
		"DMLC_NUM_SERVER":         whole(1, 65535),
		"DMLC_GROUP_SIZE":         whole(1, 1024),
		"DMLC_NODE_RANK":          whole(-1, 65534),
		"DMLC_RANK_OFFSET":        whole(-65535, 65535),
		"DMLC_INSTANCE_ID":        whole(0, 1023),
		"STEPMESH_GPU":            whole(0, 1023),
		"DMLC_PS_ROOT_URI":        hosts,
		"DMLC_PS_ROOT_PORT":       whole(0, 65535),
		"FSERVER_HOST_SCHEDULER":  onOff,
		"DMLC_NODE_HOST":          hosts,
		"DMLC_INTERFACE":          {map[string]string{"eth0": "eth0", "AUTO": "auto", "bond0.7": "bond0.7", "a,b,c,d": "a,b,c,d"}, []string{"a/b", "a b", "sixteencharacter", "a,,b", "a,a", "a,b,c,d,e", "auto,a", "a,AUTO"}},
		"DMLC_PORT":               whole(0, 65535),
		"DMLC_LOCAL":              onOff,
		"FSERVER_TRANSPORT":       {map[string]string{"auto": "auto", "TCP": "tcp", "near": "near"}, []string{"zmq", "1", "inproc"}},
		"NEAR_MODE":               {map[string]string{"one": "one", "Two": "two"}, []string{"1", "shm"}},
		"NEAR_ROOM":               whole(1, 9),
		"STEPAF_QP_NUM":           whole(1, 64),
		"BYTEPS_RDMA_RX_DEPTH":    whole(1, 65536),
		"NEAR_OPEN":               onOff,
		"FSERVER_PROGRESS":        {map[string]string{"auto": "auto", "Caller": "caller", "thread": "thread"}, []string{"1", "both"}},
		"DMLC_ENABLE_RDMA":        vans,
		"DMLC_ENABLE_UCX":         {map[string]string{"0": "auto", "off": "auto"}, []string{"ucx", "2"}},
		"DMLC_PS_VAN_TYPE":        vans,
		"BYTEPS_ENABLE_IPC":       onOff,
		"FSERVER_LOANS":           onOff,
		"FSERVER_SPLIT_BYTES":     whole(4096, 1<<40),
		"STEPMESH_MEM_SYNC":       onOff,
		"STEPMESH_BACKEND":        {map[string]string{"CPU": "CPU", "gpu": "GPU"}, []string{"any", "ROCM"}},
		"STEPMESH_BAKCEND":        {map[string]string{"cpu": "CPU", "GPU": "GPU"}, []string{"any", "ROCM"}},
		"CUDA_VISIBLE_DEVICES":    {map[string]string{"0, 1": "0, 1", "-1": "-1", "GPU-0a1b": "GPU-0a1b"}, nil},
		"FSERVER_CLUSTER":         {map[string]string{"a": "a", strings.Repeat("x", 64): strings.Repeat("x", 64)}, []string{"a b", "a\x00", "é", strings.Repeat("x", 65)}},
		"FSERVER_SECRET":          {map[string]string{" 0123456789abcdef ": "set"}, []string{"", "  "}},
		"FSERVER_SECRET_FILE":     {nil, []string{"", "/nowhere/at/all", "/", "/dev/zero"}},
		"FSERVER_TLS":             onOff,
		"FSERVER_TLS_CERT":        {map[string]string{" /a/b ": "/a/b"}, nil},
		"FSERVER_TLS_KEY":         {map[string]string{"a": "a"}, nil},
		"FSERVER_TLS_CA":          {map[string]string{"a": "a"}, nil},
		"FSERVER_INIT_TIMEOUT":    limit,
		"FSERVER_STOP_TIMEOUT":    limit,
		"FSERVER_BARRIER_TIMEOUT": limit,
		"FSERVER_STALL_TIMEOUT":   limit,
		"PS_HEARTBEAT_INTERVAL":   {map[string]string{"0": "0", "2.5": "2.5"}, []string{"604801", "-1", "nan", "1m"}},
		"PS_HEARTBEAT_TIMEOUT":    times("0", "604800", "604801"),
		"FSERVER_ON_PEER_LOST":    {map[string]string{"raise": "raise", "WAIT": "wait"}, []string{"maybe", "0"}},
		"FSERVER_REJOIN_TIMEOUT":  limit,
		"FSERVER_SPIN_US":         times("0", "1000000", "1000001"),
		"FSERVER_LOG":             {map[string]string{"error": "error", "WARN": "warn", "info": "info", "debug": "debug"}, []string{"trace", "1"}},
		"PS_VERBOSE":              {map[string]string{"0": "warn", "1": "info", "2": "debug", "9": "debug"}, []string{"10", "-1", "info"}},

		"STEPMESH_BIND_CPU_CORE":        onOff,
		"STEPMESH_CPU_CORES_PER_SOCKET": whole(1, 4096),
		"STEPMESH_CPU_CORES_PER_GPU":    whole(1, 4096),
		"STEPMESH_CPU_START_OFFSET":     whole(0, 4095),

		"PS_RESEND":          onOff,
		"PS_RESEND_TIMEOUT":  times("1", "3600000", "0", "3600001"),
		"PS_DROP_MSG":        whole(0, 100),
		"STEPMESH_DROP_RATE": whole(0, 100),
	}
	p := parse(nil, ways)
	require.ElementsMatch(t, p.names(), keys(all))

	for _, s := range p.table {
		for _, sp := range append([]Spelling{{Name: s.Name, Want: s.want}}, s.Older...) {
			for v, come := range all[sp.Name].take {
				p := &parser{ways: ways, table: rows(ways), given: map[string]string{}, source: map[string]string{}}
				p.collect([]string{sp.Name + "=" + v})
				p.resolve(&s)
				require.Empty(t, p.errs, "%s=%q", sp.Name, v)
				require.Equal(t, come, s.get(&p.cfg), "%s=%q", sp.Name, v)
			}
			for _, v := range all[sp.Name].refuse {
				text := bad(t, with(sp.Name+"="+v)...)
				if s.secret {
					require.Contains(t, text, "conf: "+sp.Name+": want "+s.want)
				} else {
					require.Contains(t, text, fmt.Sprintf("conf: %s=%.100q: ", sp.Name, strings.TrimSpace(v)))
				}
			}
		}
	}
}

func keys[V any](m map[string]V) []string {
	var k []string
	for name := range m {
		k = append(k, name)
	}
	return k
}

func TestErrorText(t *testing.T) {
	require.Equal(t, `conf: DMLC_NUM_WORKER="two": want a whole number from 1 to 65535`, bad(t, with("DMLC_NUM_WORKER=two")...))
	require.Equal(t, `conf: DMLC_ROLE="boss": want scheduler, worker, server or joint
conf: PS_VERBOSE="loud": want a whole number from 0 to 9
conf: DMLC_PS_ROOT_PORT is not set: want the port of the scheduler, 1 to 65535`, bad(t, "PS_VERBOSE=loud", "DMLC_ROLE=boss"))
	require.Equal(t, "conf: setting 3 of 3 has no '=': want NAME=value", bad(t, with("hunter2")...))
}

func TestLaterEntryCounts(t *testing.T) {
	require.Equal(t, 3, good(t, with("DMLC_NUM_WORKER=2", "DMLC_NUM_WORKER=3")...).Workers)
	require.Equal(t, 1, good(t, with("DMLC_NUM_WORKER=two", "DMLC_NUM_WORKER=")...).Workers)
}

func TestNewerSpellingWins(t *testing.T) {
	c, w := warned(t, with("STEPMESH_BAKCEND=GPU", "STEPMESH_BACKEND=CPU")...)
	require.Equal(t, CPU, c.Backend)
	require.Equal(t, `conf: STEPMESH_BAKCEND="GPU" has no effect: STEPMESH_BACKEND="CPU" is the newer spelling and says otherwise`, w)

	// What a newer spelling overrides need not be in this build.
	c, w = warned(t, with("FSERVER_TRANSPORT=tcp", "DMLC_ENABLE_RDMA=ibverbs")...)
	require.Equal(t, "tcp", c.Transport)
	require.Contains(t, w, `DMLC_ENABLE_RDMA="ibverbs" has no effect`)

	// The same said twice, or nothing said, is no contradiction.
	require.Equal(t, "tcp", good(t, with("FSERVER_TRANSPORT=TCP", "DMLC_ENABLE_RDMA=zmq", "DMLC_ENABLE_UCX=0")...).Transport)
	require.Equal(t, LogWarn, good(t, with("FSERVER_LOG=warn", "PS_VERBOSE=0")...).Log)
	require.Equal(t, LogDebug, good(t, with("FSERVER_LOG=debug", "PS_VERBOSE=3")...).Log)

	// An overridden value still has to be one.
	require.Contains(t, bad(t, with("FSERVER_LOG=debug", "PS_VERBOSE=loud")...), "PS_VERBOSE")
}

func TestTransportNotBuilt(t *testing.T) {
	const list = "this build has no such transport: want auto, near or tcp (set FSERVER_TRANSPORT=auto"
	for _, v := range []string{"verbs", "fabric", "zmq", "1"} { // zmq is a name of the older spellings alone
		require.Equal(t, fmt.Sprintf("conf: FSERVER_TRANSPORT=%q: %s)", v, list), bad(t, with("FSERVER_TRANSPORT="+v)...))
	}
	for _, older := range []string{"DMLC_ENABLE_RDMA=ibverbs", "DMLC_ENABLE_RDMA=1", "DMLC_ENABLE_UCX=1", "DMLC_PS_VAN_TYPE=fabric"} {
		name, v, _ := strings.Cut(older, "=")
		require.Equal(t, fmt.Sprintf("conf: %s=%q: %s, which overrides it)", name, v, list), bad(t, with(older)...))
		c, _ := warned(t, with(older, "FSERVER_TRANSPORT=auto")...) // so it does
		require.Equal(t, Auto, c.Transport)
	}
}

// TestOptions: a transport's own settings are read and shown as all others are.
func TestOptions(t *testing.T) {
	c := good(t, with("NEAR_MODE=TWO", "NEAR_OPEN=off")...)
	require.Equal(t, mode(1), Get[mode](c, "NEAR_MODE"))
	require.False(t, Get[bool](c, "NEAR_OPEN"))
	require.Equal(t, 7, Get[int](c, "NEAR_ROOM"))
	require.True(t, ways[0].Chosen(c))
	require.False(t, ways[0].Chosen(good(t, with("NEAR_ROOM=7")...)))
	require.Equal(t, `conf: NEAR_ROOM="10": want a whole number from 1 to 9`, bad(t, with("NEAR_ROOM=10")...))
}

func TestUnknownNames(t *testing.T) {
	_, w := warned(t, with("STEPMESH_BACKNED=CPU", "STEPMESH_BACKNED=GPU", "PATH=/bin", "PS_UNKNOWN=1", "BYTEPS_LOCAL_RANK=0", "PS_"+strings.Repeat("X", 1<<20)+"=1")...)
	require.Equal(t, "conf: unknown setting STEPMESH_BACKNED has no effect (the nearest known name is STEPMESH_BACKEND)", w)
	for name, want := range map[string]string{
		"DMLC_NUM_WORKERS":  "DMLC_NUM_WORKER",
		"FSERVER_SPINUS":    "FSERVER_SPIN_US",
		"FSERVER_SECERT":    "FSERVER_SECRET",
		"DMLC_ROOT_URI":     "DMLC_PS_ROOT_URI",
		"STEPMESH_VERBOSE":  "PS_VERBOSE",
		"DMLC_PS_ROOT_PROT": "DMLC_PS_ROOT_PORT",

		"PS_HEARTBEAT_TIMEOUTS": "PS_HEARTBEAT_TIMEOUT",
		"PS_DROPMSG":            "PS_DROP_MSG",
		"STEPAF_QP_NUMS":        "STEPAF_QP_NUM",
		"BYTEPS_RDMA_RX_DETPH":  "BYTEPS_RDMA_RX_DEPTH",

		"FSEVER_SECRET":     "FSERVER_SECRET",
		"FSERVR_TLS":        "FSERVER_TLS",
		"STEPMSH_BACKEND":   "STEPMESH_BACKEND",
		"BYTPES_ENABLE_IPC": "BYTEPS_ENABLE_IPC",
		"STEPAFF_QP_NUM":    "STEPAF_QP_NUM",

		"FSEVER_SECRETS":     "FSERVER_SECRET",
		"FSRVER_INIT_TIMOUT": "FSERVER_INIT_TIMEOUT",
		"FSEVRE_TRANSPORT":   "FSERVER_TRANSPORT",
		"STEPMHS_BAKCEND":    "STEPMESH_BAKCEND",
		"DMCL_NUM_WORKER":    "DMLC_NUM_WORKER",
		"DLMC_PS_ROOT_URI":   "DMLC_PS_ROOT_URI",
	} {
		_, w := warned(t, with(name+"=1")...)
		require.Contains(t, w, "(the nearest known name is "+want+")", name)
	}
	// Those of others.
	good(t, with("SERVER_SECRET=1", "SERVER_TLS_CERT=1", "FSVR_SECRET=1", "FSEVER_PORT=1", "FSEVER=1", "FSERVE_LAG=1",
		"XSERVER_SECRETS=1", "SERVERS_SECRET=1", "SERVER_SECRETS=1", "FILESERVER_TLS=1", "STEPS_BACKENDS=1", "BYTES_TOTAL=1",
		"_SECRET=1", "MLC_PORT=1", "MLC_ROLE=1", "MLC_NUM_WORKERS=1", "DML_LOCAL=1", "GPS_VERBOSE=1", "fserver_SECRET=1", strings.Repeat("X", 1<<20)+"_SECRET=1")...)
	_, w = warned(t, with("DMLC_"+strings.Repeat("X", 1<<20)+"=1")...)
	require.Less(t, len(w), 256)
}

func TestDistance(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want int
	}{{"", "", 0}, {"abc", "", 3}, {"", "abc", 3}, {"abc", "abc", 0}, {"abc", "acb", 1}, {"abc", "axc", 1}, {"abcd", "bcd", 1}, {"kitten", "sitting", 3}} {
		require.Equal(t, c.want, distance(c.a, c.b), "%q %q", c.a, c.b)
	}
}

func TestRanks(t *testing.T) {
	for _, c := range []struct {
		settings              string
		rank, group, instance int
	}{
		{"DMLC_ROLE=worker", 0, 0, 0},
		{"DMLC_ROLE=worker DMLC_NUM_WORKER=40 DMLC_NODE_RANK=39", 39, 39, 0},
		{"DMLC_ROLE=server DMLC_NUM_SERVER=2 DMLC_GROUP_SIZE=8 DMLC_NODE_RANK=1 STEPMESH_GPU=5", 13, 1, 5},
		{"DMLC_ROLE=worker DMLC_GROUP_SIZE=4 STEPMESH_GPU=6 DMLC_RANK_OFFSET=-4", 2, 0, 2},
		{"DMLC_ROLE=worker DMLC_GROUP_SIZE=4 STEPMESH_GPU=1 DMLC_RANK_OFFSET=2", 3, 0, 3},
		{"DMLC_ROLE=worker DMLC_GROUP_SIZE=4 STEPMESH_GPU=3 DMLC_INSTANCE_ID=0", 3, 0, 0},
		{"DMLC_ROLE=worker DMLC_NUM_WORKER=4 STEPMESH_GPU=3 DMLC_INSTANCE_ID=0", 3, 3, 0},
		{"DMLC_ROLE=scheduler DMLC_NODE_RANK=7 STEPMESH_GPU=3 DMLC_INSTANCE_ID=2", 0, 0, 0},
		{"DMLC_ROLE=joint STEPMESH_GPU=3", 0, 0, 0},
		// Assigned.
		{"DMLC_ROLE=worker DMLC_NUM_WORKER=2", -1, -1, 0},
		{"DMLC_ROLE=worker DMLC_NUM_WORKER=2 DMLC_NODE_RANK=-1 STEPMESH_GPU=3 DMLC_RANK_OFFSET=1", -1, -1, 0},
		{"DMLC_ROLE=server DMLC_NUM_SERVER=2 DMLC_NODE_RANK= DMLC_INSTANCE_ID=0", -1, -1, 0},
		// Not assigned: it is the only one, or something says which it is.
		{"DMLC_ROLE=worker DMLC_NODE_RANK=-1 STEPMESH_GPU=3", 0, 0, 0},
		{"DMLC_ROLE=worker DMLC_GROUP_SIZE=4 DMLC_NODE_RANK=-1 STEPMESH_GPU=3", 3, 0, 3},
		{"DMLC_ROLE=worker DMLC_NUM_WORKER=2 DMLC_NODE_RANK=0", 0, 0, 0},
		{"DMLC_ROLE=worker DMLC_NUM_WORKER=2 STEPMESH_GPU=0", 0, 0, 0},
		{"DMLC_ROLE=worker DMLC_NUM_WORKER=2 DMLC_RANK_OFFSET=1 DMLC_INSTANCE_ID=0", 1, 1, 0},
		{"DMLC_ROLE=worker DMLC_NUM_WORKER=2 DMLC_GROUP_SIZE=2", 0, 0, 0},
	} {
		got := good(t, append(strings.Fields(c.settings), "DMLC_PS_ROOT_PORT=7000")...)
		require.Equal(t, []int{c.rank, c.group, c.instance}, []int{got.Rank, got.Group, got.Instance}, c.settings)
	}
	require.Equal(t, "conf: rank 1 of a worker (DMLC_GROUP_SIZE 1 × DMLC_NODE_RANK 0 + STEPMESH_GPU 1 + DMLC_RANK_OFFSET 0): "+
		"want 0 to 0, for DMLC_NUM_WORKER=1 groups of DMLC_GROUP_SIZE=1 (DMLC_RANK_OFFSET=-1 makes the rank independent of the device)",
		bad(t, with("STEPMESH_GPU=1")...))
	require.Contains(t, bad(t, with("DMLC_RANK_OFFSET=-1")...), "rank -1 of a worker")
	require.Contains(t, bad(t, "DMLC_NODE_RANK=1", "DMLC_PS_ROOT_PORT=7000"), "rank 1 of a server")
	require.Equal(t, "conf: instance 3: want 0 to 0, for DMLC_GROUP_SIZE=1 (the instance is DMLC_INSTANCE_ID or, if that is not set, STEPMESH_GPU 3 + DMLC_RANK_OFFSET 0)",
		bad(t, with("DMLC_NUM_WORKER=4", "STEPMESH_GPU=3")...))
	require.Contains(t, bad(t, with("DMLC_INSTANCE_ID=1")...), "instance 1: want 0 to 0")
	require.Equal(t, "conf: DMLC_NODE_RANK=-1 with DMLC_GROUP_SIZE=2 and DMLC_NUM_WORKER=3: the scheduler assigns ranks to groups of one process only: want 0 to 2",
		bad(t, with("DMLC_NODE_RANK=-1", "DMLC_GROUP_SIZE=2", "DMLC_NUM_WORKER=3")...))
	require.Equal(t, "conf: DMLC_INSTANCE_ID=1: want 0, for DMLC_GROUP_SIZE=1", bad(t, with("DMLC_INSTANCE_ID=1", "DMLC_NUM_WORKER=2")...))
}

func TestScheduler(t *testing.T) {
	require.Equal(t, "[fd00::9]:7000", good(t, with("DMLC_PS_ROOT_URI=[fd00::9]")...).Scheduler())
	require.Equal(t, "10.0.0.9:7000", good(t, with("DMLC_PS_ROOT_URI=10.0.0.9")...).Scheduler())

	// On one host the address is known; where another host is named it is not.
	for _, s := range []string{"DMLC_NODE_HOST=localhost", "DMLC_NODE_HOST=::1", "DMLC_INTERFACE=lo", "DMLC_INTERFACE=auto"} {
		require.Equal(t, "127.0.0.1:7000", good(t, with(s)...).Scheduler(), s)
	}
	for _, s := range []string{"DMLC_NODE_HOST=10.0.0.9", "DMLC_INTERFACE=eth0"} {
		require.Contains(t, bad(t, with(s)...), "conf: DMLC_PS_ROOT_URI is not set: want the host of the scheduler", s)
	}

	// The port may be any one only where the scheduler runs.
	for _, s := range []string{"DMLC_ROLE=scheduler", "DMLC_ROLE=joint", "FSERVER_HOST_SCHEDULER=1"} {
		require.Equal(t, "127.0.0.1:0", good(t, s).Scheduler())
	}
	for _, s := range []string{"DMLC_ROLE=worker", "DMLC_ROLE=server"} {
		require.Equal(t, "conf: DMLC_PS_ROOT_PORT is not set: want the port of the scheduler, 1 to 65535", bad(t, s))
		require.Equal(t, `conf: DMLC_PS_ROOT_PORT="0": want the port of the scheduler, 1 to 65535 (only the scheduler may use 0)`,
			bad(t, s, "DMLC_PS_ROOT_PORT=0"))
	}

	// What is wrong is said once.
	require.Equal(t, `conf: DMLC_PS_ROOT_PORT="65536": want a whole number from 0 to 65535`, bad(t, "DMLC_PS_ROOT_PORT=65536"))
	require.Equal(t, `conf: DMLC_PS_ROOT_URI="a:1": want a host name, or an IP address of one host, without port or scheme`,
		bad(t, with("DMLC_PS_ROOT_URI=a:1", "DMLC_NODE_HOST=10.0.0.9")...))
	require.Equal(t, "conf: FSERVER_HOST_SCHEDULER=1 for DMLC_ROLE=worker: only a server can also run the scheduler (unset it)",
		bad(t, with("FSERVER_HOST_SCHEDULER=1")...))
}

func TestLocal(t *testing.T) {
	c := good(t, with("DMLC_LOCAL=1", "DMLC_PS_ROOT_URI=::1")...)
	require.Equal(t, "[::1]:7000", c.Scheduler())

	_, w, err := Parse(with("DMLC_PS_ROOT_URI=10.0.0.9", "DMLC_NODE_HOST=10.0.0.9", "DMLC_INTERFACE=eth0,eth1"), ways)
	require.NoError(t, err)
	require.Equal(t, []Warning{`conf: DMLC_INTERFACE="eth0,eth1" has no effect: DMLC_NODE_HOST="10.0.0.9" names the one address to use (unset it, and tensors travel over all interfaces)`}, w)
	c, w, err = Parse(with("DMLC_PS_ROOT_URI=10.0.0.9", "DMLC_NODE_HOST=10.0.0.9", "DMLC_INTERFACE=auto"), ways)
	require.NoError(t, err)
	require.Equal(t, []Warning{`conf: DMLC_NODE_HOST="10.0.0.9" has no effect: DMLC_INTERFACE=auto chooses the address (unset DMLC_INTERFACE to use this one)`}, w)
	require.Empty(t, c.NodeHost)
	c, w, err = Parse(with("DMLC_ROLE=scheduler", "DMLC_PS_ROOT_URI=10.0.0.9", "DMLC_NODE_HOST=10.0.0.9", "DMLC_INTERFACE=auto"), ways)
	require.NoError(t, err)
	require.Empty(t, w)
	require.Equal(t, "10.0.0.9", c.NodeHost)
	c, w, err = Parse(with("DMLC_LOCAL=1", "DMLC_PS_ROOT_URI=10.0.0.9", "DMLC_NODE_HOST=10.0.0.9", "DMLC_INTERFACE=eth0"), ways)
	require.NoError(t, err)
	require.Equal(t, "127.0.0.1:7000", c.Scheduler())
	require.Empty(t, c.NodeHost)
	require.Empty(t, c.Interfaces)
	require.Equal(t, []Warning{
		`conf: DMLC_PS_ROOT_URI="10.0.0.9" has no effect: DMLC_LOCAL=1 keeps everything on 127.0.0.1`,
		`conf: DMLC_NODE_HOST="10.0.0.9" has no effect: DMLC_LOCAL=1 keeps everything on 127.0.0.1`,
		`conf: DMLC_INTERFACE="eth0" has no effect: DMLC_LOCAL=1 keeps everything on 127.0.0.1`,
	}, w)
}

func TestOpenWarning(t *testing.T) {
	require.Contains(t, OpenWarning("10.0.0.9:7000"), "conf: listening on 10.0.0.9:7000 without a secret")
}

func TestLoopback(t *testing.T) {
	for _, host := range []string{"localhost", "LOCALHOST", "127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"} {
		require.True(t, Loopback(host), host)
	}
	for _, host := range []string{"", "10.0.0.9", "head", "fe80::1%eth0", "::", "127.0.0.1:7000"} {
		require.False(t, Loopback(host), host)
	}
}

func TestSecret(t *testing.T) {
	file := func(name, text string) string {
		path := filepath.Join(t.TempDir(), name)
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	const s = "correct horse battery staple"
	ok := file("ok", "\n  "+s+" \r\n")

	require.False(t, good(t, with()...).Secret.IsSet())
	require.Equal(t, s, string(good(t, with("FSERVER_SECRET= "+s+" ")...).Secret.Bytes()))
	require.Equal(t, s, string(good(t, with("FSERVER_SECRET_FILE="+ok)...).Secret.Bytes()))
	require.Equal(t, strings.Repeat("x", 4096), string(good(t, with("FSERVER_SECRET_FILE="+file("full", strings.Repeat("x", 4096)))...).Secret.Bytes()))

	c, w := warned(t, with("FSERVER_SECRET_FILE="+ok, "FSERVER_SECRET=0123456789abcdef")...)
	require.Equal(t, "0123456789abcdef", string(c.Secret.Bytes()))
	require.Contains(t, w, "has no effect: FSERVER_SECRET is set")

	_, w = warned(t, with("FSERVER_SECRET=hunter2")...)
	require.Equal(t, "conf: the secret is shorter than 16 bytes: anyone who records the start of one connection can guess the secret (use a longer one)", w)

	for path, want := range map[string]string{
		"/nowhere/at/all":                        "no such file or directory",
		t.TempDir():                              "not a regular file",
		"/dev/zero":                              "not a regular file",
		file("blank", " \n"):                     "the file contains no secret",
		file("large", strings.Repeat("x", 4097)): "more than 4096 bytes",
	} {
		require.Equal(t, fmt.Sprintf("conf: FSERVER_SECRET_FILE=%.100q: %s", path, want), bad(t, with("FSERVER_SECRET_FILE="+path)...))
	}

	// It does not show.
	c = good(t, with("FSERVER_SECRET="+s)...)
	for _, format := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%d"} {
		require.NotContains(t, fmt.Sprintf(format, c.Secret), s)
	}
	require.NotContains(t, fmt.Sprintf("%+v", *c), s)
	js, err := json.Marshal(c)
	require.NoError(t, err)
	require.NotContains(t, string(js), s)
	require.NotContains(t, string(Describe(with("FSERVER_SECRET="+s), ways)), s)
	require.NotContains(t, string(Describe(with("FSERVER_SECRET_FILE="+ok), ways)), s)
}

// certificate makes a certificate and its key in PEM.
func certificate(t *testing.T, from, to time.Time) (cert, key string) {
	t.Helper()
	public, private, err := ed25519.GenerateKey(nil)
	require.NoError(t, err)
	c := x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: from, NotAfter: to}
	der, err := x509.CreateCertificate(rand.Reader, &c, &c, public, private)
	require.NoError(t, err)
	k, err := x509.MarshalPKCS8PrivateKey(private)
	require.NoError(t, err)
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})),
		string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: k}))
}

func TestTLS(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	day := 24 * time.Hour
	certText, keyText := certificate(t, time.Now().Add(-day), time.Now().Add(day))
	_, otherKey := certificate(t, time.Now().Add(-day), time.Now().Add(day))
	oldText, oldKeyText := certificate(t, time.Now().Add(-2*day), time.Now().Add(-day))
	newText, newKeyText := certificate(t, time.Now().Add(day), time.Now().Add(2*day))
	cert, key := file("cert", certText), file("key", keyText)
	other, junk := file("other", otherKey), file("junk", "no PEM")

	// By files, and by the secret.
	c := good(t, with("FSERVER_TLS=on", "FSERVER_TLS_CERT="+cert, "FSERVER_TLS_KEY="+key, "FSERVER_TLS_CA="+cert)...)
	require.True(t, c.TLS)
	require.Equal(t, certText, string(c.TLSCert.Text.Bytes()))
	require.Equal(t, keyText, string(c.TLSKey.Text.Bytes()))
	require.Equal(t, certText, string(c.TLSCA.Text.Bytes()))
	require.NotContains(t, fmt.Sprintf("%+v", *c), "PRIVATE")
	require.True(t, good(t, with("FSERVER_TLS=on", "FSERVER_SECRET=0123456789abcdef")...).TLS)
	_, w := warned(t, with("FSERVER_TLS_CERT=/nowhere")...)
	require.Equal(t, `conf: FSERVER_TLS_CERT="/nowhere" has no effect: FSERVER_TLS is off`, w)

	for want, settings := range map[string][]string{
		"conf: FSERVER_TLS=on has nothing to prove who is who: set FSERVER_TLS_CERT and FSERVER_TLS_KEY, or FSERVER_SECRET on all nodes": {},
		fmt.Sprintf("conf: FSERVER_TLS_CERT=%q without its key: set FSERVER_TLS_KEY too", cert):                                          {"FSERVER_TLS_CERT=" + cert},
		fmt.Sprintf("conf: FSERVER_TLS_KEY=%q without its certificate: set FSERVER_TLS_CERT too", key):                                   {"FSERVER_TLS_KEY=" + key},
		fmt.Sprintf("conf: FSERVER_TLS_CA=%q without a certificate of this node: set FSERVER_TLS_CERT and FSERVER_TLS_KEY too", cert): {
			"FSERVER_TLS_CA=" + cert, "FSERVER_SECRET=0123456789abcdef"},
		`conf: FSERVER_TLS_CERT="/nowhere": no such file or directory (want a PEM file that this process can read)`: {
			"FSERVER_TLS_CERT=/nowhere", "FSERVER_TLS_KEY=" + key},
		`conf: FSERVER_TLS_KEY="/dev/zero": not a regular file (want a PEM file that this process can read)`: {
			"FSERVER_TLS_CERT=" + cert, "FSERVER_TLS_KEY=/dev/zero"},
		fmt.Sprintf("conf: FSERVER_TLS_CERT=%q and FSERVER_TLS_KEY=%q: tls: private key does not match public key (want a certificate and its own key, both in PEM)", cert, other): {
			"FSERVER_TLS_CERT=" + cert, "FSERVER_TLS_KEY=" + other},
		fmt.Sprintf("conf: FSERVER_TLS_CA=%q: no certificate in it: want one or more in PEM", junk): {
			"FSERVER_TLS_CERT=" + cert, "FSERVER_TLS_KEY=" + key, "FSERVER_TLS_CA=" + junk},
	} {
		require.Equal(t, want, bad(t, with(append(settings, "FSERVER_TLS=on")...)...))
	}
	old, oldKey, early, earlyKey := file("old", oldText), file("oldkey", oldKeyText), file("new", newText), file("newkey", newKeyText)
	require.Contains(t, bad(t, with("FSERVER_TLS=on", "FSERVER_TLS_CERT="+old, "FSERVER_TLS_KEY="+oldKey)...),
		fmt.Sprintf("conf: FSERVER_TLS_CERT=%q has expired on ", old))
	require.Contains(t, bad(t, with("FSERVER_TLS=on", "FSERVER_TLS_CERT="+early, "FSERVER_TLS_KEY="+earlyKey)...),
		fmt.Sprintf("conf: FSERVER_TLS_CERT=%q is not valid before ", early))
	require.Contains(t, bad(t, with("FSERVER_TLS=on", "FSERVER_TLS_CERT="+junk, "FSERVER_TLS_KEY="+key)...), "failed to find any PEM data")
}

func TestHeartbeat(t *testing.T) {
	require.Equal(t, `conf: PS_HEARTBEAT_TIMEOUT is 10s and PS_HEARTBEAT_INTERVAL is 20s: want the time-out to be longer (0 turns either off)`,
		bad(t, with("PS_HEARTBEAT_INTERVAL=20", "PS_HEARTBEAT_TIMEOUT=10")...))
	for given, want := range map[string][2]time.Duration{
		"PS_HEARTBEAT_INTERVAL=15":  {15 * time.Second, 150 * time.Second},
		"PS_HEARTBEAT_INTERVAL=0.1": {100 * time.Millisecond, 10 * time.Second},
		"PS_HEARTBEAT_INTERVAL=0":   {0, 10 * time.Second},
		"PS_HEARTBEAT_TIMEOUT=1":    {250 * time.Millisecond, time.Second},
		"PS_HEARTBEAT_TIMEOUT=30":   {time.Second, 30 * time.Second},
		"PS_HEARTBEAT_TIMEOUT=0":    {time.Second, 0},
		"PS_HEARTBEAT_INTERVAL=":    {time.Second, 10 * time.Second},
	} {
		c := good(t, with(given)...)
		require.Equal(t, want, [2]time.Duration{c.HeartbeatInterval, c.HeartbeatTimeout}, given)
	}
	require.Zero(t, good(t, with("PS_HEARTBEAT_INTERVAL=20", "PS_HEARTBEAT_TIMEOUT=0")...).HeartbeatTimeout)
	require.Zero(t, good(t, with("PS_HEARTBEAT_INTERVAL=0")...).HeartbeatInterval)
}

func TestDescribe(t *testing.T) {
	var got struct {
		Settings []map[string]any
		Unknown  []map[string]string
		Warnings []string
		Errors   []string
	}
	require.NoError(t, json.Unmarshal(Describe(with("DMLC_ENABLE_RDMA=zmq", "FSERVER_TYPO=1", "DMLC_PORT=many"), ways), &got))
	require.Len(t, got.Settings, len(rows(ways)))
	require.Equal(t, []string{`conf: DMLC_PORT="many": want a whole number from 0 to 65535`}, got.Errors)
	require.Len(t, got.Warnings, 1)
	require.Equal(t, "FSERVER_TYPO", got.Unknown[0]["name"])
	require.Contains(t, parse(nil, ways).names(), got.Unknown[0]["nearest"])
	of := map[string]map[string]any{}
	for _, s := range got.Settings {
		of[s["name"].(string)] = s
		for _, field := range []string{"section", "type", "allowed", "default", "meaning", "source"} {
			require.NotEmpty(t, s[field], "%s of %s", field, s["name"])
		}
	}
	row := of["FSERVER_TRANSPORT"]
	require.Equal(t, "tcp", row["value"])
	require.Equal(t, "DMLC_ENABLE_RDMA", row["source"])
	require.Equal(t, []any{"DMLC_ENABLE_RDMA", "DMLC_ENABLE_UCX", "DMLC_PS_VAN_TYPE"}, row["older"])
	require.Equal(t, "worker", of["DMLC_ROLE"]["value"])
	require.Equal(t, "127.0.0.1", of["DMLC_PS_ROOT_URI"]["value"])
	require.Equal(t, "default", of["DMLC_PS_ROOT_URI"]["source"])
	require.Equal(t, "polling threads", of["STEPMESH_BIND_CPU_CORE"]["takes_effect_with"])
	require.Equal(t, "Transport near", of["NEAR_MODE"]["section"])
	require.Empty(t, of["STEPMESH_BACKEND"]["value"]) // which no value stands for: the default is in words

	require.NoError(t, json.Unmarshal(Describe(nil, ways), &got))
	require.Equal(t, []string{}, got.Warnings)
	require.Empty(t, got.Unknown)
}

// FuzzParse holds what is true for any settings: no panic, an error or a
// Config, a Config within its limits, JSON that is JSON.
func FuzzParse(f *testing.F) {
	f.Add("DMLC_ROLE=worker\nDMLC_PS_ROOT_PORT=7000")
	f.Add("DMLC_NUM_WORKER=two\nFSERVER_SECRET=\nX")
	f.Add("DMLC_PS_ROOT_URI=[::1]\nDMLC_INTERFACE=auto\nDMLC_LOCAL=1\nFSERVER_HOST_SCHEDULER=1")
	f.Add("FSERVER_INIT_TIMEOUT=1e-999\nPS_HEARTBEAT_INTERVAL=0x1p3\nFSERVER_SPIN_US=+Inf\n=\n==")
	f.Add("STEPMESH_BAKCEND=GPU\nSTEPMESH_BACKEND=cpu\nDMLC_SPLIT_QP_LAG=-9\nDMLC_\xff=\xff")
	f.Fuzz(func(t *testing.T, text string) {
		settings := strings.Split(text, "\n")
		c, _, err := Parse(settings, ways)
		if js := Describe(settings, ways); !json.Valid(js) {
			t.Fatalf("not JSON: %s", js)
		}
		if (c == nil) != (err != nil) {
			t.Fatalf("config %v with error %v", c, err)
		}
		if c == nil {
			return
		}
		groups := c.Workers
		if c.Role == Server {
			groups = c.Servers
		}
		if c.Rank < 0 || c.Rank >= groups*c.GroupSize || c.Instance < 0 || c.Instance >= c.GroupSize || c.Group < 0 || c.Group >= groups {
			t.Fatalf("rank %d group %d instance %d of %d groups of %d", c.Rank, c.Group, c.Instance, groups, c.GroupSize)
		}
		if c.InitTimeout <= 0 || c.StopTimeout <= 0 || c.BarrierTimeout <= 0 || c.StallTimeout <= 0 || c.Spin < 0 || c.SchedulerHost == "" || c.Transport == "" {
			t.Fatalf("out of limits: %+v", *c)
		}
	})
}
