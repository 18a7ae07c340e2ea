package rails_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/faults"
	"fserver/engine/transport/inproc"
	"fserver/engine/transport/rails"
	"fserver/engine/transport/transporttest"
)

const (
	patience  = 60 * time.Second // of one wait
	slots     = 8
	slotBytes = 40 << 10
	msgBytes  = 1 + 4 + 4 + 4 + 8
	poison    = 0xA5
)

// A side is one end of a Conn and the program above it. It writes to the peer's slots, tells it with a
// frame, and uses a slot again when the peer has said so. What has come it checks and then changes in place;
// some Polls later it looks whether somebody has written there since.
type side struct {
	t           *testing.T
	name        string
	f           transport.Fabric
	c           transport.Conn
	r           *rand.Rand
	mem, src    mem.Region
	key, theirs transport.Key
	pending     []transport.Op
	free        []uint32
	open        map[uint64]uint32 // writes without EvDone: the slot of their source
	held        []heldSlot
	credit      [slots]int // what a slot waits for until it is free: EvDone, and the peer's word
	unread      [slots]int // writes of a slot without EvDone: after the last one, its source changes
	limit       uint32     // messages to send
	sent, got   uint32
	polls       int
	room        int   // bounds the events of a Poll; 0: nothing more does
	failed      error // of ops
	down        error
	closed      bool
	others      map[transport.Conn]error // Conns that others have opened, and why they have ended
}

type heldSlot struct {
	slot uint32
	till int
}

func fill(b []byte, seed uint64) {
	for i := range b {
		b[i] = byte((seed + uint64(i)) * 0x9E3779B97F4A7C15 >> 56)
	}
}

func (s *side) slot(r mem.Region, i uint32) []byte {
	return r.Span().Bytes()[i*slotBytes : (i+1)*slotBytes]
}

// message posts a write, or several, and the frame that tells of them.
func (s *side) message() {
	at := s.r.IntN(len(s.free))
	slot := s.free[at]
	s.free = append(s.free[:at], s.free[at+1:]...)
	n, seed := 1+s.r.IntN(slotBytes>>s.r.IntN(12)), s.r.Uint64()
	b := s.slot(s.src, slot)[:n]
	fill(b, seed)
	s.credit[slot], s.unread[slot] = 1, 0
	for parts := 1 + s.r.IntN(2); len(b) > 0; parts-- {
		k := len(b)
		if parts > 1 {
			k = 1 + s.r.IntN(k)
		}
		off := slotBytes*uint64(slot) + uint64(n-len(b))
		s.push(transport.Op{Kind: transport.OpWrite, Key: s.theirs, Off: off, Src: []mem.Span{mem.Of(b[:k])}}, slot)
		s.credit[slot]++
		s.unread[slot]++
		b = b[k:]
	}
	s.frame(0, s.sent, slot, uint32(n), seed)
	s.sent++
}

func (s *side) push(op transport.Op, slot uint32) {
	op.User = s.r.Uint64()
	s.open[op.User] = slot
	s.pending = append(s.pending, op)
}

func (s *side) frame(kind byte, number, slot, n uint32, seed uint64) {
	b := append(make([]byte, 0, msgBytes), kind)
	b = binary.LittleEndian.AppendUint32(b, number)
	b = binary.LittleEndian.AppendUint32(b, slot)
	b = binary.LittleEndian.AppendUint32(b, n)
	b = binary.LittleEndian.AppendUint64(b, seed)
	switch s.r.IntN(100) {
	case 0: // some do not fit behind the header of a member's frame
		b = append(b, make([]byte, transport.MaxFrame-msgBytes-s.r.IntN(50))...)
	case 1, 2, 3, 4, 5, 6, 7, 8:
		b = append(b, make([]byte, s.r.IntN(5000))...)
	}
	b[len(b)-1] ^= kind // also of the last byte
	s.push(transport.Op{Kind: transport.OpFrame, Frame: b}, slots)
}

// step posts and polls.
func (s *side) step() {
	if s.down == nil && len(s.free) > 0 && s.sent < s.limit && len(s.pending) < 10 {
		s.message()
	}
	if s.down == nil && len(s.pending) > 0 {
		k, _ := s.c.Post(s.pending) // with an error, EvDown is to come
		s.pending = s.pending[k:]
	}
	s.poll()
	for len(s.held) > 0 && s.held[0].till < s.polls {
		slot := s.held[0].slot
		s.held = s.held[1:]
		for i, b := range s.slot(s.mem, slot) {
			if b != poison {
				s.t.Fatalf("%s: byte %d of slot %d was written after its frame was given", s.name, i, slot)
			}
		}
		s.frame(1, 0, slot, 0, 0)
	}
}

func (s *side) poll() {
	s.polls++
	ev := make([]transport.Event, 1+s.r.IntN(16))
	if s.room > 0 {
		ev = ev[:min(s.room, len(ev))]
	}
	n, err := s.f.Poll(ev)
	require.NoError(s.t, err)
	for _, e := range ev[:n] {
		if s.others != nil && e.Conn != nil && e.Conn != s.c {
			s.others[e.Conn] = e.Err
			if e.Kind == transport.EvDown {
				e.Conn.Close()
			}
			continue
		}
		switch e.Kind {
		case transport.EvAccept:
			require.Nil(s.t, s.c)
			s.c = e.Conn
		case transport.EvDone:
			slot, ok := s.open[e.User]
			require.True(s.t, ok, "%s: an op ends twice", s.name)
			delete(s.open, e.User)
			if slot < slots {
				if s.unread[slot]--; s.unread[slot] == 0 {
					clear(s.slot(s.src, slot))
				}
				s.release(slot)
			}
			s.failed = errors.Join(s.failed, e.Err)
		case transport.EvFrame:
			s.take(e.Data)
		case transport.EvDown:
			s.down = e.Err
		case transport.EvClosed:
			s.closed = true
		}
	}
}

// release takes one of the things that a slot waits for.
func (s *side) release(slot uint32) {
	if s.credit[slot]--; s.credit[slot] == 0 {
		s.free = append(s.free, slot)
	}
}

func (s *side) take(b []byte) {
	if b[len(b)-1] ^= b[0]; len(b) > msgBytes {
		require.Zero(s.t, b[len(b)-1], "%s: the last byte of a frame of %d", s.name, len(b))
	}
	number, slot := binary.LittleEndian.Uint32(b[1:]), binary.LittleEndian.Uint32(b[5:])
	n, seed := binary.LittleEndian.Uint32(b[9:]), binary.LittleEndian.Uint64(b[13:])
	if b[0] == 1 {
		s.release(slot)
		return
	}
	require.Equal(s.t, s.got, number, "%s: out of order, lost or twice", s.name)
	s.got++
	want := make([]byte, n)
	fill(want, seed)
	here := s.slot(s.mem, slot)
	require.Equal(s.t, want, here[:n], "%s: message %d", s.name, number)
	for i := range here {
		here[i] = poison
	}
	s.held = append(s.held, heldSlot{slot, s.polls + s.r.IntN(30)})
}

// String is what a test that fails says of s.
func (s *side) String() string {
	live := 0
	if s.c != nil {
		live = rails.Live(s.c)
	}
	return fmt.Sprintf("%s %d polls, sent %d, got %d, %d ops without EvDone, %d of them not taken, members %d, down %v, closed %v",
		s.name, s.polls, s.sent, s.got, len(s.open), len(s.pending), live, s.down, s.closed)
}

// idle reports whether all was sent, has come and has ended.
func (s *side) idle(peer *side) bool {
	return s.sent == s.limit && peer.got == s.limit && len(s.open) == 0 && len(s.held) == 0 && len(s.pending) == 0 && len(s.free) == slots
}

// A spoiler is a Fabric whose frames are no more what they were at its next Poll.
type spoiler struct {
	transport.Fabric
	last  [][]byte
	alone int // acknowledgements that were no part of another frame
	mute  int // Polls to come that give nothing

	gone   error         // if set, what Connect gives
	hold   chan struct{} // if set, Close waits for it in the end
	shut   atomic.Bool   // Close waits
	called atomic.Bool   // by who would wait for Close
	mu     sync.Mutex
	broken error // what Poll gives until Close
}

func (s *spoiler) Arm() bool {
	s.called.Store(s.called.Load() || s.shut.Load())
	return s.Fabric.Arm()
}

func (s *spoiler) Deregister(k transport.Key) {
	s.called.Store(s.called.Load() || s.shut.Load())
	s.Fabric.Deregister(k)
}

func (s *spoiler) Connect(ctx context.Context, to transport.Addr) (transport.Conn, error) {
	if s.gone != nil {
		return nil, s.gone
	}
	return s.Fabric.Connect(ctx, to)
}

// fail makes the Fabric unusable.
func (s *spoiler) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.broken = err
}

func (s *spoiler) fails() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.broken
}

func (s *spoiler) Close() error {
	err := s.Fabric.Close() // the peers hear of it at once
	if s.hold != nil {
		s.shut.Store(true)
		<-s.hold
		s.shut.Store(false)
	}
	s.fail(nil)
	return err
}

func (s *spoiler) Poll(ev []transport.Event) (int, error) {
	for _, b := range s.last {
		clear(b)
	}
	s.last = s.last[:0]
	if err := s.fails(); err != nil {
		return 0, err
	}
	if s.mute > 0 {
		s.mute--
		return 0, nil
	}
	n, err := s.Fabric.Poll(ev)
	for _, e := range ev[:n] {
		if len(e.Data) > 0 {
			s.last = append(s.last, e.Data)
			if e.Data[0] == 3 {
				s.alone++
			}
		}
	}
	return n, err
}

// A duo is two sides over so many Networks, each of which has one member Fabric of both.
type duo struct {
	t    *testing.T
	nets []*inproc.Network
	a, b *side // a has dialed
	r    *rand.Rand
	bad  map[string]*faults.Fabric
	all  []*spoiler // the members of both

	inner func(transport.Fabric) transport.Fabric // if set, goes around a member, below its faults
}

// apart opens both sides.
func apart(t *testing.T, members int, seed uint64, nic bool, o rails.Options) *duo {
	d := &duo{t: t, r: rand.New(rand.NewPCG(seed, 1)), bad: map[string]*faults.Fabric{}}
	for range members {
		d.nets = append(d.nets, inproc.New())
	}
	d.a, d.b = d.side("a", seed, nic, o), d.side("b", seed+100, nic, o)
	return d
}

// connect makes the Conn, and waits until so many members are live.
func (d *duo) connect(members int) {
	var err error
	d.a.c, err = d.a.f.Connect(context.Background(), d.b.f.Addr())
	require.NoError(d.t, err)
	d.until("the conn is open", func() bool { d.a.poll(); d.b.poll(); return d.b.c != nil }) // a may have had no credit for its greeting
	d.until("all members are live", func() bool {
		d.a.poll()
		d.b.poll()
		return rails.Live(d.a.c) == members && rails.Live(d.b.c) == members
	})
	d.a.theirs, d.b.theirs = d.b.key, d.a.key
	require.NoError(d.t, d.a.f.Bind(d.a.key, d.a.c))
	require.NoError(d.t, d.b.f.Bind(d.b.key, d.b.c))
}

func newDuo(t *testing.T, members int, seed uint64, nic bool, o rails.Options) *duo {
	d := apart(t, members, seed, nic, o)
	d.connect(members)
	return d
}

func (d *duo) side(name string, seed uint64, nic bool, o rails.Options) *side {
	var members []transport.Fabric
	for i, net := range d.nets {
		in, err := net.Open(inproc.Options{Name: fmt.Sprint(name, i), Listen: true, Gate: transporttest.Gate{Hello: name},
			Limits: transport.Limits{Handshake: time.Hour}}) // a Connect that is held waits
		require.NoError(d.t, err)
		worse := faults.Options{}
		if nic {
			worse = faults.NIC(seed + uint64(i))
		}
		inner := transport.Fabric(in)
		if d.inner != nil {
			inner = d.inner(in)
		}
		f, err := faults.Wrap(inner, worse)
		require.NoError(d.t, err)
		d.bad[fmt.Sprint(name, i)] = f.(*faults.Fabric)
		members = append(members, d.spoil(f))
	}
	f, err := rails.New(members, o)
	require.NoError(d.t, err)
	s := &side{t: d.t, name: name, f: f, r: rand.New(rand.NewPCG(seed, 2)), open: map[uint64]uint32{}}
	for i := range uint32(slots) {
		s.free = append(s.free, i)
	}
	for _, r := range []*mem.Region{&s.mem, &s.src} {
		*r, err = mem.Map(slots * slotBytes)
		require.NoError(d.t, err)
		d.t.Cleanup(func() { _ = mem.Unmap(*r) })
	}
	d.t.Cleanup(func() { require.NoError(d.t, f.Close()) })
	s.key, err = f.Register(s.mem)
	require.NoError(d.t, err)
	return s
}

func (d *duo) spoil(f transport.Fabric) transport.Fabric {
	s := &spoiler{Fabric: f}
	d.all = append(d.all, s)
	return s
}

// alone returns how many acknowledgements have travelled alone.
func (d *duo) alone() (n int) {
	for _, s := range d.all {
		n += s.alone
	}
	return n
}

func (d *duo) until(what string, cond func() bool) {
	d.t.Helper()
	for end := time.Now().Add(patience); !cond(); {
		if time.Now().After(end) {
			d.t.Fatalf("did not happen: %s: %v; %v", what, d.a, d.b)
		}
	}
}

func (d *duo) step() { d.a.step(); d.b.step() }

// traffic sends so many more messages each way and waits until all have come.
func (d *duo) traffic(messages uint32, meanwhile func()) {
	d.t.Helper()
	d.a.limit += messages
	d.b.limit += messages
	d.until("all messages have come", func() bool {
		meanwhile()
		d.step()
		return d.a.idle(d.b) && d.b.idle(d.a)
	})
	require.NoError(d.t, errors.Join(d.a.down, d.b.down, d.a.failed, d.b.failed))
}

func (d *duo) wait(what string, cond func() bool) {
	d.t.Helper()
	d.until(what, func() bool { d.step(); return cond() })
}

func (d *duo) cut(i int)  { d.nets[i].Cut(fmt.Sprint("a", i), fmt.Sprint("b", i)) }
func (d *duo) heal(i int) { d.nets[i].Heal() }

// TestLossInTraffic takes members away and brings them back at random times, but for one that
// stays. That is another one each time.
func TestLossInTraffic(t *testing.T) {
	for _, c := range []struct {
		name    string
		members int
		nic     bool
		seeds   uint64
	}{{"two members", 2, false, 5}, {"two NICs", 2, true, 5}, {"three members", 3, false, 4}, {"three NICs", 3, true, 4}} {
		t.Run(c.name, func(t *testing.T) {
			seeds := c.seeds
			if testing.Short() || transporttest.Quick() {
				seeds = 2
			}
			cuts := 0
			for seed := range seeds {
				d := newDuo(t, c.members, seed+1, c.nic, rails.Options{Pause: time.Millisecond, Split: 8 << 10})
				ch := chaos{d: d, state: make([]int, c.members)}
				d.traffic(400, ch.step)
				cuts += ch.cuts
				for i := range d.nets {
					d.heal(i)
				}
				d.wait("all members are back", func() bool {
					return rails.Live(d.a.c) == c.members && rails.Live(d.b.c) == c.members
				})
				d.wait("nothing is kept of those that were lost", func() bool {
					return rails.Unsettled(d.a.c) == 0 && rails.Unsettled(d.b.c) == 0 &&
						rails.Rails(d.a.f) == c.members && rails.Rails(d.b.f) == c.members
				})
				d.traffic(50, func() {})
				t.Logf("seed %d: %d members lost in %d messages each way", seed+1, ch.cuts, d.a.sent)
			}
			require.Greater(t, cuts, 2*int(seeds))
		})
	}
}

// chaos takes members away and brings them back.
type chaos struct {
	d     *duo
	state []int // of each member
	cuts  int
}

const (
	intact = iota
	isCut
	healed
)

func (c *chaos) step() {
	left := 0
	for i := range c.state {
		a, b := rails.LiveOver(c.d.a.c, i), rails.LiveOver(c.d.b.c, i)
		switch {
		case c.state[i] == isCut && !a && !b && c.d.r.IntN(20) == 0:
			c.d.heal(i)
			c.state[i] = healed
		case c.state[i] == healed && a && b:
			c.state[i] = intact
		}
		if c.state[i] == intact {
			left++
		}
	}
	if i := c.d.r.IntN(len(c.state)); left > 1 && c.state[i] == intact && c.d.r.IntN(20) == 0 {
		c.d.cut(i)
		c.state[i] = isCut
		c.cuts++
	}
}

// TestFirstWayIsClosed: another Fabric begins the Conn, and the first one gets a member later.
func TestFirstWayIsClosed(t *testing.T) {
	d := apart(t, 2, 1, false, rails.Options{Pause: time.Millisecond})
	d.cut(0)
	d.connect(1)
	d.traffic(20, func() {})
	require.False(t, rails.LiveOver(d.a.c, 0))
	d.wait("the reason is known", func() bool { return strings.HasPrefix(d.a.c.Peer().Why, "members connected: 1 of 2 (") })
	require.Equal(t, "inproc", d.a.c.Peer().Via)
	d.heal(0)
	d.wait("the other one is there", func() bool { return rails.Live(d.a.c) == 2 && rails.Live(d.b.c) == 2 })
	require.Equal(t, "inproc+inproc", d.a.c.Peer().Via)
	require.Empty(t, d.a.c.Peer().Why)
	d.traffic(20, func() {})

	d = apart(t, 2, 1, false, rails.Options{})
	d.cut(0)
	d.cut(1)
	_, err := d.a.f.Connect(context.Background(), d.b.f.Addr())
	require.ErrorContains(t, err, "the network is cut")
}

// TestBothMembersAreLost ends the Conn, also while Polls have room for one event: then Post says so before EvDown.
func TestBothMembersAreLost(t *testing.T) {
	for _, room := range []int{0, 1} {
		d := newDuo(t, 2, 1, false, rails.Options{})
		n, cut := 0, false
		d.a.limit, d.b.limit = 1000, 1000
		d.wait("both sides hear", func() bool {
			if n++; !cut && n >= 50 && len(d.a.free) > 1 { // for messages after the cut
				cut, d.a.room = true, room
				d.a.f.Arm() // the next Poll asks both members
				d.cut(0)
				d.cut(1)
			}
			return d.a.down != nil && d.b.down != nil
		})
		if room == 1 {
			require.NotEmpty(t, d.a.pending, "a has heard it from Post")
		}
		for _, s := range []*side{d.a, d.b} {
			require.NotErrorIs(t, s.down, io.EOF)
			require.ErrorContains(t, s.down, "rails: no member is left: ")
			s.c.Close()
		}
		d.wait("all has ended", func() bool {
			return d.a.closed && d.b.closed && len(d.a.open)+len(d.b.open) == len(d.a.pending)+len(d.b.pending)
		})
	}
}

// TestEachSideLosesAnother ends member 0 at one side and member 1 at the other at the same time.
func TestEachSideLosesAnother(t *testing.T) {
	for seed := range uint64(10) {
		d := newDuo(t, 3, seed, true, rails.Options{Pause: time.Millisecond, Split: 8 << 10})
		n := 0
		d.traffic(100, func() {
			if n++; n == 20 {
				d.bad["a0"].FailNext(errors.New("broken at a"))
				d.bad["b1"].FailNext(errors.New("broken at b"))
			}
		})
		d.wait("all members are back", func() bool { return rails.Live(d.a.c) == 3 && rails.Live(d.b.c) == 3 })
	}
}

// TestHalfOpenMemberIsLost has a member end that the dialer has and the other side has not heard of.
func TestHalfOpenMemberIsLost(t *testing.T) {
	for _, hears := range []bool{false, true} {
		d := newDuo(t, 2, 1, false, rails.Options{Pause: time.Millisecond})
		d.cut(1)
		d.wait("member 1 is lost", func() bool {
			return rails.Live(d.a.c) == 1 && rails.Live(d.b.c) == 1 && rails.Unsettled(d.a.c) == 0
		})
		d.heal(1)
		d.until("a has dialed", func() bool {
			d.a.step()
			if hears { // the member, and not what it says
				d.b.poll()
			}
			return rails.Half(d.a.c) == 1 || rails.Live(d.a.c) == 2
		})
		d.cut(1)
		d.traffic(50, func() {})
		d.wait("both know", func() bool { return rails.Half(d.a.c) == 0 && rails.Unsettled(d.a.c)+rails.Unsettled(d.b.c) == 0 })
		d.heal(1)
		d.wait("member 1 is back", func() bool { return rails.Live(d.a.c) == 2 && rails.Live(d.b.c) == 2 })
		d.traffic(50, func() {})
	}
}

// TestPeerThatSaysNothing has a peer that does not poll when a member is lost.
func TestPeerThatSaysNothing(t *testing.T) {
	for _, asleep := range []bool{false, true} {
		t.Run(fmt.Sprint("asleep ", asleep), func(t *testing.T) { testPeerThatSaysNothing(t, asleep) })
	}
}

func testPeerThatSaysNothing(t *testing.T, asleep bool) {
	d := newDuo(t, 2, 1, false, rails.Options{Stall: 100 * time.Millisecond})
	d.a.limit = 5
	d.until("a has posted", func() bool { d.a.step(); return d.a.sent == 5 && len(d.a.pending) == 0 })
	begin := time.Now()
	d.cut(0)
	d.until("a gives up", func() bool {
		if asleep && !d.a.f.Arm() {
			ready, err := transporttest.Sleep([]unix.PollFd{{Fd: int32(d.a.f.FD()), Events: unix.POLLIN}}, patience)
			require.NoError(t, err)
			require.Equal(t, 1, ready)
		}
		d.a.step()
		return d.a.down != nil
	})
	require.GreaterOrEqual(t, time.Since(begin), 100*time.Millisecond)
	require.ErrorContains(t, d.a.down, "the peer has not said for 100ms what has come on member 0, which was lost (Limits.Stall)")
	d.until("b hears", func() bool { d.b.poll(); return d.b.down != nil })
	require.NotErrorIs(t, d.b.down, io.EOF)
}

// TestPoisonEndsTheConn: a write that the peer refuses ends each member that it travels on. The Conn ends, and does
// not go on with new members for ever.
func TestPoisonEndsTheConn(t *testing.T) {
	d := newDuo(t, 2, 1, false, rails.Options{Pause: time.Nanosecond})
	d.a.theirs.Token ^= 1
	d.a.limit = 1
	d.wait("both sides hear", func() bool { return d.a.down != nil && d.b.down != nil })
	require.NotErrorIs(t, d.a.down, io.EOF)
	require.NotErrorIs(t, d.b.down, io.EOF)
}
