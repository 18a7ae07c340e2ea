package cluster

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/wire"
)

const start = int64(time.Hour)

var timing = Timing{Interval: time.Second, Timeout: 5 * time.Second, Leave: 10 * time.Second}

func scheduler(t testing.TB, workers, servers, size int) *Scheduler {
	s, err := NewScheduler(wire.Shape{Workers: workers, Servers: servers, GroupSize: size}, timing)
	require.NoError(t, err)
	return s
}

// selves are all members of a shape, by role and rank.
func selves(s wire.Shape) []wire.Member {
	var ms []wire.Member
	for _, role := range []wire.Role{wire.RoleWorker, wire.RoleServer} {
		for rank := range s.Groups(role) * s.GroupSize {
			ms = append(ms, wire.Member{Role: role, Rank: rank, Group: rank / s.GroupSize, Instance: rank % s.GroupSize, Epoch: 1})
		}
	}
	return ms
}

// run brings a scheduler's cluster to the point of Running; member i of selves
// is connection i.
func run(t testing.TB, s *Scheduler) []wire.Member {
	members := selves(s.shape)
	for i, m := range members {
		s.Step(start, Input{Kind: Up, Conn: int64(i), Remote: "host"})
		s.Step(start, Input{Kind: Frame, Conn: int64(i), Data: wire.Append(nil, wire.TypeRegister, &wire.Register{Shape: s.shape, Member: m})})
	}
	var out []Output
	for i := range members {
		out = s.Step(start, Input{Kind: Frame, Conn: int64(i), Data: wire.AppendSignal(nil, wire.TypeReady)})
	}
	require.Equal(t, Running, out[len(out)-1].Kind)
	return members
}

// activeMember is worker 0 of two that run with one server.
func activeMember(t testing.TB) *Member {
	shape := wire.Shape{Workers: 2, Servers: 1, GroupSize: 1}
	all := selves(shape)
	m := NewMember(MemberConfig{Self: all[0], Shape: shape, Scheduler: "10.0.0.1:7000", Timing: timing})
	m.Step(start, Input{Kind: Up})
	require.Equal(t, Roster, m.Step(start, Input{Kind: Frame, Data: wire.Append(nil, wire.TypeRoster, &wire.Roster{Members: all})})[0].Kind)
	require.Equal(t, Send, m.Connected(start)[0].Kind)
	require.Equal(t, Running, m.Step(start, Input{Kind: Frame, Data: wire.AppendSignal(nil, wire.TypeGo)})[0].Kind)
	return m
}

func TestShapes(t *testing.T) {
	for _, s := range []wire.Shape{{}, {Workers: 1, Servers: 1}, {Workers: 1, GroupSize: 1}, {Servers: 1, GroupSize: 1},
		{Workers: -1, Servers: 1, GroupSize: 1}, {Workers: 1 << 40, Servers: 1, GroupSize: 1}} {
		_, err := NewScheduler(s, Timing{})
		require.ErrorContains(t, err, "each must be from 1 to 65536")
	}
	_, err := NewScheduler(wire.Shape{Workers: 256, Servers: 1, GroupSize: 256}, Timing{})
	require.EqualError(t, err, "cluster: workers=256 servers=1 group_size=256 are 65792 members: more than 65536")
}

func TestErrors(t *testing.T) {
	require.EqualError(t, &LostError{wire.RoleServer, 1, "10.0.0.2:4711", "connection reset by peer"},
		"cluster: server 1 at 10.0.0.2:4711 is gone: connection reset by peer")
	require.EqualError(t, &LostError{Role: wire.RoleScheduler, Reason: "no heartbeat"}, "cluster: the scheduler is gone: no heartbeat")
	require.EqualError(t, &RefusedError{"no"}, "cluster: refused by the scheduler: no")
	require.EqualError(t, &EndedError{"so"}, "cluster: ended: so")
	require.Equal(t, "it closed its connection", reason(fmt.Errorf("tcp: read: %w", io.EOF)))
	require.Equal(t, "it closed its connection", reason(nil))
	require.Equal(t, "reset", reason(errors.New("reset")))
	require.Equal(t, "[fe80::1]:7000", place(&wire.Member{Addrs: []string{"cma:1f2e/fserver-3d", "tcp:[fe80::1]:7000"}}))
	require.Equal(t, "host", place(&wire.Member{Addrs: []string{"host"}}))
	require.Empty(t, place(&wire.Member{}))
	m := NewMember(MemberConfig{Scheduler: "10.0.0.1:7000"})
	require.Equal(t, "not connected to the scheduler at 10.0.0.1:7000", m.Waiting())
}

// TestLarge runs 40 worker and 40 server groups of 8 instances.
func TestLarge(t *testing.T) {
	s := scheduler(t, 40, 40, 8)
	members := run(t, s)
	for i := range members {
		out := s.Step(start, Input{Kind: Frame, Conn: int64(i), Data: wire.AppendSignal(nil, wire.TypeLeave)})
		if i == len(members)-1 {
			require.Len(t, out, len(members)+1)
		}
	}
}

// TestRosterTooLong has members with more addresses than one frame holds.
func TestRosterTooLong(t *testing.T) {
	s := scheduler(t, 64, 1, 1)
	var out []Output
	for i, m := range selves(s.shape) {
		for range wire.MaxAddrs {
			m.Addrs = append(m.Addrs, "tcp:"+strings.Repeat("a", 251))
		}
		s.Step(start, Input{Kind: Up, Conn: int64(i)})
		out = s.Step(start, Input{Kind: Frame, Conn: int64(i), Data: wire.Append(nil, wire.TypeRegister, &wire.Register{Shape: s.shape, Member: m})})
	}
	require.Len(t, out, 66) // a line of log, and each is refused
	for _, o := range out[1:] {
		why, err := wire.Parse[wire.Text](o.Frame, wire.TypeRefuse)
		require.NoError(t, err)
		require.Equal(t, wire.TypeRefuse, wire.FrameType(o.Frame))
		require.Contains(t, why.Text, "the list of 65 members takes 1070164 bytes")
	}
	for i := range 65 {
		out = s.Step(start, Input{Kind: Down, Conn: int64(i)})
	}
	require.Equal(t, Ended, out[0].Kind)
	require.ErrorContains(t, out[0].Err, "too many addresses")
}

// addressed returns m with as many addresses as it may have, of so many bytes each.
func addressed(m wire.Member, each int) wire.Member {
	m.Addrs = nil
	for range wire.MaxAddrs {
		m.Addrs = append(m.Addrs, strings.Repeat("a", each))
	}
	return m
}

// TestTooManyAddresses: neither one member nor successors one by one make the roster too long for a frame.
func TestTooManyAddresses(t *testing.T) {
	s := scheduler(t, 64, 1, 1)
	members := selves(s.shape)
	frame := func(i int, t wire.Type) []Output {
		return s.Step(start, Input{Kind: Frame, Conn: int64(i), Data: wire.AppendSignal(nil, t)})
	}
	register := func(conn int, m wire.Member) []Output {
		s.Step(start, Input{Kind: Up, Conn: int64(conn)})
		g := &wire.Register{Shape: s.shape, Member: m}
		return slices.Clone(s.Step(start, Input{Kind: Frame, Conn: int64(conn), Data: wire.Append(nil, wire.TypeRegister, g)}))
	}
	refused := func(out []Output, want string) {
		require.Len(t, out, 2) // a line of log, and it is refused
		why, err := wire.Parse[wire.Text](out[1].Frame, wire.TypeRefuse)
		require.NoError(t, err)
		require.Contains(t, why.Text, want)
	}
	refused(register(1000, addressed(members[0], 257)), "its addresses have 16448 bytes, and a member may have 16384")
	for i, m := range members {
		register(i, addressed(m, 241))
	}
	for i := range members {
		frame(i, wire.TypeReady)
	}
	require.Equal(t, running, s.phase)
	for i := range 5 { // each has 832 bytes more than the one before it
		s.Step(start, Input{Kind: Down, Conn: int64(i)})
		members[i].Epoch += 1000
		out := register(100+i, addressed(members[i], 254))
		if i < 4 {
			require.Equal(t, Joined, out[64].Kind)
			continue
		}
		refused(out, "the list of 65 members takes ")
		require.Equal(t, wire.Gone, s.known[i].State)
		require.NotEmpty(t, register(200+i, members[i]))
		require.Equal(t, wire.Present, s.known[i].State)
	}
}

// TestBarrierModel compares barriers with the rule itself: the k-th call of a
// party is released when every party has called k times.
func TestBarrierModel(t *testing.T) {
	kinds := []wire.BarrierFlags{1, 2, 3, 5, 6, 7}
	for seed := range uint64(50) {
		r := rand.New(rand.NewPCG(seed, 1))
		s := scheduler(t, 1+r.IntN(3), 1+r.IntN(3), 1+r.IntN(3))
		members := run(t, s)
		type key struct {
			kind         wire.BarrierFlags
			role         wire.Role
			party, round int
		}
		calls := make(map[key]int)   // whose the call is
		count := make(map[key]int)   // calls of a party, round unused
		begun := make([]int, 100)    // calls of a member
		pending := make(map[int]key) // by member << 32 | seq
		for range 400 {
			i := r.IntN(len(members))
			m, kind := members[i], kinds[r.IntN(len(kinds))]
			if !kind.Has(m.Role) {
				continue
			}
			party := func(m wire.Member) int {
				if kind&wire.BarrierGroups != 0 {
					return m.Group
				}
				return m.Rank
			}
			k := key{kind: kind, role: m.Role, party: party(m)}
			count[k]++
			k.round = count[key{kind: kind, role: m.Role, party: k.party}]
			begun[i]++
			calls[k] = i<<32 | begun[i]
			pending[calls[k]] = k

			var got, want []int
			for _, o := range s.Step(start, Input{Kind: Frame, Conn: int64(i),
				Data: wire.Append(nil, wire.TypeBarrier, &wire.Barrier{Flags: kind, Seq: uint64(begun[i])})}) {
				v, err := wire.Parse[wire.Release](o.Frame, wire.TypeRelease)
				require.NoError(t, err)
				got = append(got, int(o.Conn)<<32|int(v.Seq))
			}
			least := 1 << 30
			for _, m := range members {
				if kind.Has(m.Role) {
					least = min(least, count[key{kind: kind, role: m.Role, party: party(m)}])
				}
			}
			for id, k := range pending {
				if k.kind == kind && k.round <= least {
					want = append(want, id)
					delete(pending, id)
				}
			}
			slices.Sort(got)
			slices.Sort(want)
			require.Equal(t, want, got)
		}
	}
}

// TestBarrierCalls bounds the calls that are pending, at both ends.
func TestBarrierCalls(t *testing.T) {
	m := activeMember(t)
	for range maxCalls / 2 {
		for _, f := range []wire.BarrierFlags{wire.BarrierWorkers, wire.BarrierWorkers | wire.BarrierGroups} {
			_, _, err := m.Barrier(start, f)
			require.NoError(t, err)
		}
	}
	m.GiveUp(1)
	_, _, err := m.Barrier(start, wire.BarrierWorkers|wire.BarrierServers)
	require.EqualError(t, err, "cluster: barrier of servers and workers: 256 barrier calls are already pending (wait for them first)")
	seq, out, err := m.Barrier(start, wire.BarrierWorkers)
	require.NoError(t, err)
	require.Empty(t, out, "it goes on with call 1")
	require.EqualValues(t, maxCalls+1, seq)

	s := scheduler(t, 2, 1, 1)
	run(t, s)
	for i := range uint64(maxCalls + 1) {
		out = s.Step(start, Input{Kind: Frame, Conn: 0, Data: wire.Append(nil, wire.TypeBarrier, &wire.Barrier{Flags: wire.BarrierWorkers, Seq: i})})
		require.Equal(t, i == maxCalls, len(out) != 0)
	}
	require.Equal(t, Close, out[0].Kind)
	require.ErrorContains(t, out[len(out)-1].Err, "more than 256 barrier calls at once")
}

func TestBarrierBefore(t *testing.T) {
	m := NewMember(MemberConfig{Self: wire.Member{Role: wire.RoleWorker}, Timing: timing})
	_, _, err := m.Barrier(start, wire.BarrierWorkers)
	require.ErrorIs(t, err, ErrNotRunning)
	m = activeMember(t)
	m.Leave(start)
	_, _, err = m.Barrier(start, wire.BarrierWorkers)
	require.ErrorIs(t, err, ErrNotRunning)
	require.Empty(t, m.Leave(start), "only the first counts")
	m.GiveUp(77)
}

// TestBadRoster gives a member lists that are not of its cluster.
func TestBadRoster(t *testing.T) {
	shape := wire.Shape{Workers: 2, Servers: 2, GroupSize: 2}
	for name, change := range map[string]func(ms []wire.Member) []wire.Member{
		"short":           func(ms []wire.Member) []wire.Member { return ms[:7] },
		"empty":           func([]wire.Member) []wire.Member { return nil },
		"without self":    func(ms []wire.Member) []wire.Member { ms[0].Rank = 4; return ms },
		"other self":      func(ms []wire.Member) []wire.Member { ms[0].Epoch = 2; return ms },
		"twice":           func(ms []wire.Member) []wire.Member { ms[1] = ms[0]; return ms },
		"no rail":         func(ms []wire.Member) []wire.Member { ms[6].Instance = 1; return ms },
		"two of a group":  func(ms []wire.Member) []wire.Member { ms[6].Group = 0; return ms },
		"group too large": func(ms []wire.Member) []wire.Member { ms[6].Group = 2; return ms },
	} {
		m := NewMember(MemberConfig{Self: selves(shape)[0], Shape: shape, Timing: timing})
		m.Step(start, Input{Kind: Up})
		out := m.Step(start, Input{Kind: Frame, Data: wire.Append(nil, wire.TypeRoster, &wire.Roster{Members: change(selves(shape))})})
		require.Len(t, out, 2, name)
		require.Equal(t, Close, out[0].Kind, name)
		require.Equal(t, Ended, out[1].Kind, name)
		require.ErrorContains(t, out[1].Err, "is not of workers=2 servers=2 group_size=2 with worker 0 in it once, and with instance 0 in each server group", name)
	}
}

// TestLeaveUnanswered has a scheduler that lives and does not answer.
func TestLeaveUnanswered(t *testing.T) {
	m := activeMember(t)
	require.Equal(t, wire.TypeLeave, wire.FrameType(m.Leave(start)[0].Frame))
	now := start
	for {
		now = m.Next()
		out := m.Step(now, Input{Kind: Frame, Data: wire.AppendSignal(nil, wire.TypeHeartbeat)})
		require.Len(t, out, 1)
		if out[0].Kind == Ended {
			require.EqualError(t, out[0].Err, "cluster: ended: not all members wanted to leave within 10s")
			break
		}
	}
	require.Equal(t, timing.Leave, time.Duration(now-start))
	require.Empty(t, m.Leave(now))
	require.EqualValues(t, Never, m.Next())
	require.Empty(t, m.Step(now, Input{Kind: Down}))
}

// TestFramesStay checks that a frame that was handed out is not touched again.
func TestFramesStay(t *testing.T) {
	m := activeMember(t)
	var frames []Output
	var copies []string
	for i := range int64(4) {
		_, out, err := m.Barrier(start, wire.BarrierWorkers)
		require.NoError(t, err)
		for _, o := range slices.Concat(out, m.Step(start+i*int64(time.Second), Input{})) {
			frames, copies = append(frames, o), append(copies, string(o.Frame))
		}
	}
	for i, o := range frames {
		require.Equal(t, copies[i], string(o.Frame))
	}
}

// TestComesBackTwice has a member whose connection has broken at its end alone.
func TestComesBackTwice(t *testing.T) {
	s := scheduler(t, 2, 1, 1)
	members := run(t, s)
	again := func(conn int64, known *wire.Roster) []Output {
		s.Step(start, Input{Kind: Up, Conn: conn, Remote: "host"})
		return slices.Clone(s.Step(start, Input{Kind: Frame, Conn: conn,
			Data: wire.Append(nil, wire.TypeRegister, &wire.Register{Shape: s.shape, Member: members[0], Known: known})}))
	}
	out := again(10, &wire.Roster{Members: members})
	require.Equal(t, []Output{{Kind: Close, Conn: 0}}, out[:1])
	why, err := wire.Parse[wire.Text](out[len(out)-1].Frame, wire.TypeRefuse)
	require.NoError(t, err)
	require.Contains(t, why.Text, "it was taken for lost")
	for i, known := range [][]wire.Member{nil, members[:2], {members[1], members[0], members[2]}, {{Role: wire.RoleWorker, Epoch: 9}, members[1], members[2]}} {
		out = again(int64(11+i), &wire.Roster{View: 7, Members: known})
		why, err = wire.Parse[wire.Text](out[len(out)-1].Frame, wire.TypeRefuse)
		require.NoError(t, err)
		require.Contains(t, why.Text, "is not that of a cluster of workers=2 servers=1 group_size=1 with itself in it")
	}
}

// TestAfterTheEnd: a scheduler whose cluster has ended keeps no connection open, which would wait for it.
func TestAfterTheEnd(t *testing.T) {
	s := scheduler(t, 1, 1, 1)
	run(t, s)
	for i := range int64(2) {
		s.Step(start, Input{Kind: Frame, Conn: i, Data: wire.AppendSignal(nil, wire.TypeLeave)})
	}
	for i := range int64(2) {
		s.Step(start, Input{Kind: Down, Conn: i})
	}
	require.EqualValues(t, Never, s.Next())
	require.Equal(t, []Output{{Kind: Close, Conn: 7}}, s.Step(start, Input{Kind: Up, Conn: 7, Remote: "host"}))
	require.Empty(t, s.Step(start, Input{Kind: Down, Conn: 7}))
}

// FuzzScheduler lets some connections send anything. Nothing panics, nothing
// goes to a connection that is closed, and the end is the end.
func FuzzScheduler(f *testing.F) {
	register := func(role wire.Role, rank int) []byte {
		b := wire.Append(nil, wire.TypeRegister, &wire.Register{Shape: wire.Shape{Workers: 2, Servers: 1, GroupSize: 1},
			Member: wire.Member{Role: role, Rank: rank, Group: rank, Epoch: 1}})
		return append([]byte{byte(len(b))}, b...)
	}
	script := []byte{0, 1, 0, 2, 0, 3}
	script = append(append(script, 0x11), register(wire.RoleWorker, 0)...)
	script = append(append(script, 0x12), register(wire.RoleWorker, 1)...)
	script = append(append(script, 0x13), register(wire.RoleServer, 0)...)
	known := wire.Append(nil, wire.TypeRegister, &wire.Register{
		Shape:  wire.Shape{Workers: 2, Servers: 1, GroupSize: 1},
		Member: wire.Member{Role: wire.RoleWorker, Epoch: 1},
		Known:  &wire.Roster{View: 3, Members: selves(wire.Shape{Workers: 2, Servers: 1, GroupSize: 1})},
	})
	f.Add(append(append([]byte{0, 1, 0, 2, 0x11, byte(len(known))}, known...), append([]byte{0x12}, register(wire.RoleServer, 0)...)...))
	for _, frame := range []string{"\x03", "\x05\x02\x01\x00", "\x05\x07\x02\x00", "\x07"} {
		for c := byte(1); c < 4; c++ {
			script = append(append(script, 0x10|c, byte(len(frame))), frame...)
			f.Add(slices.Clone(script))
			f.Add(append(slices.Clone(script), 0x21, 0x30, 0xff))
		}
	}
	f.Fuzz(func(t *testing.T, script []byte) {
		s := scheduler(t, 2, 1, 1)
		open := make(map[int64]bool)
		now, conns, ended := start, int64(0), false
		next := func() byte {
			if len(script) == 0 {
				return 0
			}
			b := script[0]
			script = script[1:]
			return b
		}
		for len(script) != 0 {
			op := next()
			in := Input{Conn: int64(op & 0xf)}
			switch op >> 4 {
			case 0:
				conns++
				in = Input{Kind: Up, Conn: conns, Remote: "host"}
				open[conns] = true
			case 1:
				n := min(int(next()), len(script))
				in.Kind, in.Data = Frame, script[:n:n]
				script = script[n:]
			case 2:
				in.Kind, in.Err = Down, io.ErrUnexpectedEOF
			default:
				now += int64(next()) * int64(100*time.Millisecond)
			}
			if in.Kind != Tick && !open[in.Conn] {
				continue
			}
			if in.Kind == Down {
				delete(open, in.Conn)
			}
			out := s.Step(now, in)
			for _, o := range out {
				require.True(t, !ended || o.Kind == Close && in.Kind == Up)
				switch o.Kind {
				case Send:
					require.True(t, open[o.Conn])
				case Close:
					require.True(t, open[o.Conn])
					delete(open, o.Conn)
				case Ended:
					ended = true
				}
			}
			require.Greater(t, s.Next(), now)
			s.Waiting()
		}
	})
}

// FuzzMember gives a member anything. It ends once, at the latest when the
// connection does.
func FuzzMember(f *testing.F) {
	shape := wire.Shape{Workers: 1, Servers: 1, GroupSize: 1}
	all := selves(shape)
	roster := wire.Append(nil, wire.TypeRoster, &wire.Roster{Members: all})
	lost := wire.Append(nil, wire.TypeLost, &wire.Lost{Role: wire.RoleServer})
	joined := wire.Append(nil, wire.TypeJoined, &wire.Joined{Member: all[1]})
	f.Add(roster, []byte{4}, lost, joined, byte(9))
	f.Add(roster, []byte{4}, []byte{6, 1}, []byte{8}, byte(0))
	f.Add(roster, []byte{4}, lost, []byte{8, 2, 'n', 'o'}, byte(3))
	f.Add([]byte{10, 2, 'n', 'o'}, roster, []byte{11}, lost, byte(1))
	f.Fuzz(func(t *testing.T, a, b, c, d []byte, leave byte) {
		m := NewMember(MemberConfig{Self: all[0], Shape: shape, Timing: timing})
		ended := false
		check := func(out []Output) {
			for _, o := range out {
				require.False(t, ended)
				ended = o.Kind == Ended
			}
		}
		check(m.Step(start, Input{Kind: Up}))
		for i, frame := range [][]byte{a, b, c, d} {
			if int(leave) == i {
				check(slices.Clone(m.Leave(start)))
			}
			check(m.Step(start, Input{Kind: Frame, Data: frame}))
			check(m.Connected(start))
			if _, out, err := m.Barrier(start, wire.BarrierWorkers); err == nil {
				check(out)
			}
			require.Greater(t, m.Next(), start)
			m.Waiting()
		}
		check(m.Step(start, Input{Kind: Down}))
		check(m.Leave(start))
		require.True(t, ended)
	})
}
