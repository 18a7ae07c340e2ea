package wire

import (
	"encoding/hex"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var updateControl = flag.Bool("update-control", false, "rewrite the golden files of handshake and control frames")

// golden collects frames as lines of a golden file: name, colon, hex.
type golden struct{ strings.Builder }

func (g *golden) add(name string, frame []byte) {
	fmt.Fprintf(g, "%s:\n", name)
	for line := range strings.SplitSeq(strings.TrimRight(hex.Dump(frame), "\n"), "\n") {
		fmt.Fprintf(g, "\t%s\n", line)
	}
}

func (g *golden) compare(t *testing.T, file string) {
	t.Helper()
	if *updateControl {
		require.NoError(t, os.WriteFile(file, []byte(g.String()), 0o644))
	}
	want, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, string(want), g.String())
}

// control is one frame of each kind, and how to parse it and append it again.
var control = []struct {
	name  string
	frame []byte
	again func(b []byte) (any, []byte, error)
}{
	{"register", Append(nil, TypeRegister, &Register{Shape: Shape{3, 2, 4}, Member: member}), again[Register](TypeRegister)},
	{"register without addresses", Append(nil, TypeRegister, &Register{Shape: Shape{1, 1, 1}, Member: Member{Role: RoleWorker}}), again[Register](TypeRegister)},
	{"register of one without a rank", Append(nil, TypeRegister, &Register{Shape: Shape{2, 1, 1}, Member: Member{Role: RoleWorker, Epoch: 7}, Any: true}), again[Register](TypeRegister)},
	{"register of one that runs", Append(nil, TypeRegister, &Register{Shape: Shape{1, 1, 1}, Member: member, Known: roster}), again[Register](TypeRegister)},
	{"roster", Append(nil, TypeRoster, roster), again[Roster](TypeRoster)},
	{"ready", AppendSignal(nil, TypeReady), signal},
	{"go", AppendSignal(nil, TypeGo), signal},
	{"barrier", Append(nil, TypeBarrier, &Barrier{BarrierWorkers | BarrierGroups, 300, 5}), again[Barrier](TypeBarrier)},
	{"release", Append(nil, TypeRelease, &Release{300}), again[Release](TypeRelease)},
	{"leave", AppendSignal(nil, TypeLeave), signal},
	{"left", AppendSignal(nil, TypeLeft), signal},
	{"lost", Append(nil, TypeLost, &Lost{7, RoleServer, 5, 0x1122334455667788, "10.0.0.9:7000", "connection reset by peer"}), again[Lost](TypeLost)},
	{"refuse", Append(nil, TypeRefuse, &Text{"rank 9 is taken"}), again[Text](TypeRefuse)},
	{"heartbeat", AppendSignal(nil, TypeHeartbeat), signal},
	{"joined", Append(nil, TypeJoined, &Joined{300, member}), again[Joined](TypeJoined)},
	{"ping", AppendSignal(nil, TypePing), signal},
	{"waiting", Append(nil, TypeWaiting, &Text{"1 of 2 members have registered; missing: worker 0"}), again[Text](TypeWaiting)},
	{"done", Append(nil, TypeDone, &Done{300}), again[Done](TypeDone)},
	{"send to one", Append(nil, TypeSend, &Send{300, Destination{ToWorkers, 5, 0x1122334455667788}, Data("hello")}), again[Send](TypeSend)},
	{"send to groups", Append(nil, TypeSend, &Send{1, Destination{ToScheduler | ToServers, All, 0}, nil}), again[Send](TypeSend)},
	{"message", Append(nil, TypeMessage, &Message{RoleServer, 5, 0x1122334455667788, Data("hello")}), again[Message](TypeMessage)},
	{"taken", Append(nil, TypeTaken, &Taken{true}), again[Taken](TypeTaken)},
	{"parted", Append(nil, TypeParted, &Parted{RoleServer, 5, 0x1122334455667788}), again[Parted](TypeParted)},
	{"sent", Append(nil, TypeSent, &Sent{300, WasLost, RoleServer, 5, "10.0.0.9:7000", "connection reset by peer"}), again[Sent](TypeSent)},
}

var roster = &Roster{View: 300, Running: true, Members: []Member{
	member, {Role: RoleWorker, Rank: 300, Group: 75, Instance: 3, Epoch: 1, State: Gone},
}}

var member = Member{
	Role: RoleServer, Rank: 5, Group: 1, Instance: 2, Epoch: 0x1122334455667788, Pid: 4321, Host: "host-a",
	Addrs: []string{"tcp:10.0.0.9:7000", "tcp:[fe80::1]:7000"},
}

func signal(b []byte) (any, []byte, error) {
	return nil, AppendSignal(nil, FrameType(b)), ParseSignal(b)
}

// again parses a frame of type t, and appends it again.
func again[T any, P Frame[T]](t Type) func(b []byte) (any, []byte, error) {
	return func(b []byte) (any, []byte, error) {
		v, err := Parse[T, P](b, t)
		return v, Append(nil, t, v), err
	}
}

func TestControlGolden(t *testing.T) {
	var g golden
	for _, c := range control {
		g.add(c.name, c.frame)
		_, again, err := c.again(c.frame)
		require.NoError(t, err, c.name)
		require.Equal(t, c.frame, again, c.name)
	}
	g.compare(t, "testdata/control_golden.txt")
}

func TestControlValues(t *testing.T) {
	g, err := Parse[Register](control[0].frame, TypeRegister)
	require.NoError(t, err)
	require.Equal(t, &Register{Shape: Shape{3, 2, 4}, Member: member}, g)
	require.Equal(t, 20, g.Shape.Members())
	require.Equal(t, 3, g.Shape.Groups(RoleWorker))
	require.Equal(t, 2, g.Shape.Groups(RoleServer))
	require.Equal(t, "server 5 (pid 4321 on host-a)", g.Name())
	require.Equal(t, "worker 0", (&Member{Role: RoleWorker, Pid: 1}).Name())

	l, err := Parse[Lost](Append(nil, TypeLost, &Lost{Role: RoleWorker, Address: "a\x00b", Reason: "line\nline\xff" + strings.Repeat("x", 5000)}), TypeLost)
	require.NoError(t, err)
	require.Equal(t, "a?b", l.Address)
	require.Len(t, l.Reason, maxReason)
	require.Equal(t, "line?line?x", l.Reason[:11])

	require.Equal(t, "scheduler worker server role 9", fmt.Sprint(RoleScheduler, " ", RoleWorker, " ", RoleServer, " ", Role(9)))
	require.Equal(t, "barrier of servers and workers by groups", BarrierFlags(7).String())
	require.Equal(t, "barrier of nobody", BarrierFlags(0).String())
	for f := range BarrierFlags(16) {
		require.Equal(t, f&3 != 0 && f < 8, f.Valid())
	}
}

// TestControlNotAliased checks that nothing parsed changes with the frame.
func TestControlNotAliased(t *testing.T) {
	for _, c := range control {
		b := append([]byte(nil), c.frame...)
		got, _, err := c.again(b)
		require.NoError(t, err)
		before := fmt.Sprintf("%+v", got)
		clear(b)
		require.Equal(t, before, fmt.Sprintf("%+v", got), c.name)
	}
}

// TestControlShort cuts each frame everywhere, and lengthens it.
func TestControlShort(t *testing.T) {
	for _, c := range control {
		for n := range c.frame {
			_, _, err := c.again(c.frame[:n])
			require.Error(t, err, "%s of %d bytes", c.name, n)
		}
		_, _, err := c.again(append(c.frame[:len(c.frame):len(c.frame)], 0))
		require.Error(t, err, c.name)
	}
}

// TestRegisterOfManyDevices: one address names all devices of a transport.
func TestRegisterOfManyDevices(t *testing.T) {
	device := "verbs:[fe80::1234:5678:9abc:def0]:45678/fe80000000000000"
	m := Member{Role: RoleServer, Addrs: []string{"rails:" + strings.Repeat(device+",", 7) + device}}
	g, err := Parse[Register](Append(nil, TypeRegister, &Register{Shape: Shape{1, 1, 1}, Member: m}), TypeRegister)
	require.NoError(t, err)
	require.Equal(t, m, g.Member)
}

func TestControlBounds(t *testing.T) {
	many := make([]string, MaxAddrs+1)
	for _, c := range []struct {
		frame []byte
		want  string
	}{
		{Append(nil, TypeRegister, &Register{Shape: Shape{1, 1, 1}, Member: Member{Role: 3}}), "role 3: want at most 2"},
		{Append(nil, TypeRegister, &Register{Shape: Shape{1, 1, 1}, Member: Member{Rank: MaxMembers}}), "rank 65536: want at most 65535"},
		{Append(nil, TypeRegister, &Register{Shape: Shape{1, 1, 1}, Member: Member{Rank: -1}}), "want at most 65535"},
		{Append(nil, TypeRegister, &Register{Shape: Shape{1, 1, 1}, Member: Member{Group: MaxMembers}}), "group 65536"},
		{Append(nil, TypeRegister, &Register{Shape: Shape{1, 1, 1}, Member: Member{Instance: MaxMembers}}), "instance 65536"},
		{Append(nil, TypeRegister, &Register{Shape: Shape{MaxMembers + 1, 1, 1}}), "worker groups 65537"},
		{Append(nil, TypeRegister, &Register{Shape: Shape{1, 1, 1}, Member: Member{Addrs: many}}), "65 addresses"},
		{Append(nil, TypeRegister, &Register{Shape: Shape{1, 1, 1}, Member: Member{Addrs: []string{strings.Repeat("a", MaxAddr+1)}}}), "4097 bytes of an address"},
		{Append(nil, TypeRegister, &Register{Shape: Shape{1, 1, 1}, Member: Member{Addrs: []string{"a\x7f"}}}), "not printable"},
		{Append(nil, TypeRegister, &Register{Shape: Shape{1, 1, 1}, Member: Member{Addrs: []string{"\xc3"}}}), "not printable"},
		{Append(nil, TypeRegister, &Register{Shape: Shape{1, 1, 1}, Member: Member{Host: strings.Repeat("a", MaxHost+1)}}), "65 bytes of a host name"},
	} {
		_, err := Parse[Register](c.frame, TypeRegister)
		require.ErrorContains(t, err, c.want)
	}
	for _, b := range []string{"\x02\x00\x00\xff\xff\x7f", "\x02\x00\x00\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "\x02\x00\x00\x02" + strings.Repeat("\x00", 16)} {
		_, err := Parse[Roster]([]byte(b), TypeRoster)
		require.ErrorContains(t, err, "members: more than 65536, or more than it holds")
	}
	_, err := Parse[Roster]([]byte{byte(TypeRoster), 0, 2, 0}, TypeRoster)
	require.ErrorContains(t, err, "a boolean is 2, want 0 or 1")
	_, err = Parse[Roster](Append(nil, TypeRoster, &Roster{Members: []Member{{State: 3}}}), TypeRoster)
	require.ErrorContains(t, err, "state 3: want at most 2")
	_, err = Parse[Barrier]([]byte{byte(TypeBarrier), 4, 1, 0}, TypeBarrier)
	require.ErrorContains(t, err, "invalid flags 0x4")
	_, err = Parse[Barrier]([]byte{byte(TypeBarrier), 9, 1, 0}, TypeBarrier)
	require.ErrorContains(t, err, "invalid flags 0x9")
	_, err = Parse[Text](append([]byte{byte(TypeRefuse), 0x81, 0x08}, make([]byte, maxReason+1)...), TypeRefuse)
	require.ErrorContains(t, err, "1025 bytes of a reason")
	_, err = Parse[Roster](control[0].frame, TypeRoster)
	require.ErrorContains(t, err, "frame of type 1, want 2")
	for want, v := range map[string]*Send{
		"roles 8: want at most 7":             {To: Destination{Roles: 8}},
		"no set of scheduler (1)":             {},
		"for rank 1 of several roles":         {To: Destination{Roles: ToServers | ToWorkers, Rank: 1}},
		"one run of all ranks":                {To: Destination{Roles: ToServers, Rank: All, Run: 1}},
		"rank 65537: want at most 65536":      {To: Destination{Roles: ToServers, Rank: MaxMembers}},
		"announces 1000001 bytes of a messag": {To: Destination{Roles: ToServers}, Data: make(Data, MaxMessage+1)},
	} {
		_, err := Parse[Send](Append(nil, TypeSend, v), TypeSend)
		require.ErrorContains(t, err, want)
	}
	_, err = Parse[Sent](Append(nil, TypeSent, &Sent{Outcome: 3}), TypeSent)
	require.ErrorContains(t, err, "outcome 3: want at most 2")
}

// TestControlRoster shows how large a cluster a roster holds.
func TestControlRoster(t *testing.T) {
	cluster := func(groups, instances, addrs int) []Member {
		var ms []Member
		for _, role := range []Role{RoleWorker, RoleServer} {
			for g := range groups {
				for i := range instances {
					m := Member{Role: role, Rank: g*instances + i, Group: g, Instance: i, Epoch: 1 << 60, Pid: 100000, Host: "host-name-12"}
					for a := range addrs {
						m.Addrs = append(m.Addrs, fmt.Sprintf("tcp:10.%d.%d.%d:%d", a, g%256, i+100, 40000+i))
					}
					ms = append(ms, m)
				}
			}
		}
		return ms
	}
	for _, c := range []struct{ groups, instances, addrs int }{{40, 8, 4}, {1125, 8, 1}, {518, 8, 4}} {
		ms := cluster(c.groups, c.instances, c.addrs)
		b := Append(nil, TypeRoster, &Roster{Members: ms})
		require.LessOrEqual(t, len(b), MaxRoster)
		t.Logf("%d members with %d addresses: %d bytes, %.1f each", len(ms), c.addrs, len(b), float64(len(b))/float64(len(ms)))
		got, err := Parse[Roster](b, TypeRoster)
		require.NoError(t, err)
		require.Equal(t, ms, got.Members)
	}
}

// FuzzControl parses anything as every kind of frame; what parses is the same
// after Append and Parse.
func FuzzControl(f *testing.F) {
	for _, c := range control {
		f.Add(c.frame)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, c := range control {
			v, again, err := c.again(b)
			if err != nil {
				continue
			}
			v2, again2, err := c.again(again)
			require.NoError(t, err, c.name)
			require.Equal(t, v, v2, c.name)
			require.Equal(t, again, again2, c.name)
		}
	})
}
