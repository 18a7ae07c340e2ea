package rails_test

import (
	"context"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/transport"
	"fserver/engine/transport/faults"
	"fserver/engine/transport/inproc"
	"fserver/engine/transport/rails"
	"fserver/engine/transport/transporttest"
)

// keepers returns how many goroutines dial members.
func keepers() int {
	stacks := make([]byte, 1<<20)
	return strings.Count(string(stacks[:runtime.Stack(stacks, true)]), "(*keeper).run(")
}

// TestCloseWhileDialing closes a Conn whose only member is being dialed. Nothing of the Conn stays.
func TestCloseWhileDialing(t *testing.T) {
	d := apart(t, 2, 1, false, rails.Options{})
	d.nets[1].Hold("a1", "b1")
	d.connect(1)
	d.until("member 1 is being dialed", func() bool { d.a.poll(); return rails.Dialing(d.a.c) == 1 })
	d.cut(0)
	d.until("member 0 has ended", func() bool { d.a.poll(); return rails.Unsettled(d.a.c) == 1 })
	require.NoError(t, d.a.down)
	d.a.c.Close()
	d.until("the conn has ended", func() bool { d.a.poll(); return d.a.closed })
	d.until("its goroutines have ended", func() bool { return keepers() == 0 })
}

// TestSilentDialHidesNoEnd: a Conn loses its only live member while another one is dialed and says nothing. The Conn ends
// when that dial has timed out.
func TestSilentDialHidesNoEnd(t *testing.T) {
	d := apart(t, 2, 1, false, rails.Options{Dial: 50 * time.Millisecond})
	d.nets[1].Hold("a1", "b1")
	d.connect(1)
	d.until("member 1 is being dialed", func() bool { d.a.poll(); return rails.Dialing(d.a.c) == 1 })
	d.cut(0)
	d.until("the conn is down", func() bool { d.a.poll(); d.b.poll(); return d.a.down != nil && d.b.down != nil })
	require.ErrorContains(t, d.a.down, "rails: no member is left: ")
	d.a.c.Close()
	d.b.c.Close()
	d.until("the conn has ended", func() bool { d.a.poll(); d.b.poll(); return d.a.closed && d.b.closed })
	d.until("its goroutines have ended", func() bool { return keepers() == 0 })
}

// TestConnectNamesEachFailure: the error says why each way has failed, also that the caller has given up.
func TestConnectNamesEachFailure(t *testing.T) {
	d := apart(t, 2, 1, false, rails.Options{})
	d.cut(0)
	d.nets[1].Hold("a1", "b1")
	ctx, cancel := context.WithCancel(context.Background())
	failed := make(chan error)
	go func() {
		_, err := d.a.f.Connect(ctx, d.b.f.Addr())
		failed <- err
	}()
	cancel()
	err := <-failed
	require.ErrorIs(t, err, context.Canceled)
	d.nets[1].Heal()
	d.cut(1)
	d.cut(0)
	_, err = d.a.f.Connect(context.Background(), d.b.f.Addr())
	require.ErrorContains(t, err, `connect a0 to "inproc:b0": the network is cut`)
	require.ErrorContains(t, err, `connect a1 to "inproc:b1": the network is cut`)
	require.EqualError(t, d.a.f.Reaches("rails:,"), `rails: no fabric reaches one of "rails:,": none of them takes connections`)
}

// TestSilentWay: the second way is tried while the first one says nothing.
func TestSilentWay(t *testing.T) {
	d := apart(t, 2, 1, false, rails.Options{})
	d.nets[0].Hold("a0", "b0")
	d.connect(1)
	d.traffic(20, func() {})
	require.False(t, rails.LiveOver(d.a.c, 0))
}

// TestBindToAnotherFabric: a Conn of another Fabric is none of this one's.
func TestBindToAnotherFabric(t *testing.T) {
	d := newDuo(t, 2, 1, false, rails.Options{})
	require.ErrorContains(t, d.b.f.Bind(d.b.key, d.a.c), "the connection belongs to another")
}

// TestUnsentWhileThePeerOwesAStatement: what was lost with a member goes out when the peer has said what
// has come.
func TestUnsentWhileThePeerOwesAStatement(t *testing.T) {
	d := newDuo(t, 2, 1, false, rails.Options{})
	require.False(t, d.a.c.Unsent())
	n, err := d.a.c.Post([]transport.Op{{Kind: transport.OpFrame, Frame: []byte{1, 2}}})
	require.NoError(t, err)
	require.Equal(t, 1, n)
	require.False(t, d.a.c.Unsent())
	d.nets[0].Cut("a0", "b0")
	ev := make([]transport.Event, 8)
	poll := func(s *side) { _, err := s.f.Poll(ev); require.NoError(t, err) }
	d.until("member 0 is lost", func() bool { poll(d.a); return rails.Live(d.a.c) == 1 })
	require.True(t, d.a.c.Unsent())
	d.until("the frame is on its way again", func() bool { poll(d.b); poll(d.a); return !d.a.c.Unsent() })
}

// TestStallDoesNotCountWhileNobodyPolls: what the peer has said is there, but was not read.
func TestStallDoesNotCountWhileNobodyPolls(t *testing.T) {
	const stall = 50 * time.Millisecond
	d := newDuo(t, 2, 1, false, rails.Options{Stall: stall})
	d.cut(0)
	for _, s := range []*side{d.a, d.b} {
		polls := 0
		d.until("member 0 has ended", func() bool { s.poll(); polls++; return polls > 20 && rails.Live(s.c) == 1 })
	}
	require.Equal(t, 1, rails.Unsettled(d.a.c))
	time.Sleep(4 * stall)
	d.heal(0)
	d.traffic(20, func() {})
}

// TestAcknowledgementsTravelWithFrames has a frame come in each Poll, and another one go after it: few
// acknowledgements go alone.
func TestAcknowledgementsTravelWithFrames(t *testing.T) {
	d := newDuo(t, 2, 1, false, rails.Options{})
	send := func(s *side) {
		n, err := s.c.Post([]transport.Op{{Kind: transport.OpFrame, Frame: make([]byte, 64)}})
		require.NoError(t, err)
		require.Equal(t, 1, n)
	}
	ev := make([]transport.Event, 16)
	turn := func(s *side) (frames int) {
		n, err := s.f.Poll(ev)
		require.NoError(t, err)
		for _, e := range ev[:n] {
			if e.Kind == transport.EvFrame {
				frames++
			}
		}
		return frames
	}
	for range 4 {
		send(d.a)
	}
	before := d.alone()
	for frames := 0; frames < 1000; {
		for _, s := range []*side{d.b, d.a} {
			for range turn(s) {
				frames++
				send(s)
			}
		}
	}
	require.Less(t, d.alone()-before, 10)
}

// clogged opens a Fabric over both networks whose members take nothing.
func (d *duo) clogged(name string) (transport.Fabric, *inproc.Fabric) {
	var members []transport.Fabric
	for i, net := range d.nets {
		in, err := net.Open(inproc.Options{Name: name + string(rune('0'+i)), Listen: true, Gate: transporttest.Gate{Hello: name}})
		require.NoError(d.t, err)
		f, err := faults.Wrap(in, faults.Options{Starve: 1})
		require.NoError(d.t, err)
		members = append(members, f)
	}
	f, err := rails.New(members, rails.Options{})
	require.NoError(d.t, err)
	d.t.Cleanup(func() { f.Close() })
	from, err := d.nets[0].Open(inproc.Options{Name: "from", Gate: transporttest.Gate{Hello: "from"}})
	require.NoError(d.t, err)
	d.t.Cleanup(func() { from.Close() })
	return f, from
}

// TestPeerThatDoesNotRead sends on and reads nothing: what waits for it is bounded.
func TestPeerThatDoesNotRead(t *testing.T) {
	item := func(kind byte, num, first, second uint64) []byte { return rails.Item(kind, num, first, second) }
	for _, c := range []struct {
		name string
		say  func(i uint64) [][]byte
		want string
	}{
		{"frames", func(i uint64) [][]byte { return [][]byte{item(1, i, 0, 0)} }, ""},
		{"statements, which it confirms", func(i uint64) [][]byte {
			return [][]byte{item(4, i, 0, i+1), item(3, 0, 0, i)}
		}, "wait for a peer that goes on sending"},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := apart(t, 2, 1, false, rails.Options{})
			f, from := d.clogged("clogged")
			conn, err := from.Connect(context.Background(), "inproc:clogged0")
			require.NoError(t, err)
			ev, theirs := make([]transport.Event, 16), make([]transport.Event, 16)
			most, down := 0, error(nil)
			post := func(b []byte) {
				for taken := 0; taken == 0 && down == nil; {
					taken, _ = conn.Post([]transport.Op{{Kind: transport.OpFrame, Frame: b}})
					n, err := f.Poll(ev)
					require.NoError(t, err)
					for _, e := range ev[:n] {
						if e.Kind == transport.EvDown {
							down = e.Err
						}
					}
					_, _ = from.Poll(theirs)
					most = max(most, rails.Queued(f))
				}
			}
			post(rails.GreetingOf([16]byte{1}, 0))
			for i := uint64(0); i < 10000 && down == nil; i++ {
				for _, b := range c.say(i) {
					post(b)
				}
			}
			if c.want == "" {
				require.NoError(t, down)
				require.Less(t, most, 10)
			} else {
				require.ErrorContains(t, down, c.want)
				require.Less(t, most, 5000)
			}
		})
	}
}

// TestCallsFromOtherGoroutinesUnderLoss: what is safe from any goroutine is so while members go and come.
func TestCallsFromOtherGoroutinesUnderLoss(t *testing.T) {
	d := newDuo(t, 3, 1, false, rails.Options{Pause: time.Millisecond, Split: 8 << 10})
	d.a.others, d.b.others = map[transport.Conn]error{}, map[transport.Conn]error{}
	var stop atomic.Bool
	var around sync.WaitGroup
	for _, s := range []*side{d.a, d.b} {
		f, c, addr, key, memory := s.f, s.c, d.b.f.Addr(), s.key, s.mem
		around.Go(func() {
			for !stop.Load() {
				k, err := f.Register(memory)
				if err != nil || f.Bind(key, c) != nil || f.Reaches(addr) != nil || c.Peer().Remote == "" {
					t.Errorf("%s: register: %v", f.Name(), err)
					return
				}
				f.Deregister(k)
				f.Arm()
				time.Sleep(100 * time.Microsecond) // or Polls hardly get the lock
			}
		})
	}
	f := d.a.f
	around.Go(func() {
		for !stop.Load() {
			if rails.Rails(f) > 12 { // those before have not ended
				time.Sleep(100 * time.Microsecond)
			} else if c, err := f.Connect(context.Background(), d.b.f.Addr()); err == nil {
				c.Close()
			}
		}
	})
	ch := chaos{d: d, state: make([]int, 3)}
	d.traffic(300, ch.step)
	stop.Store(true)
	around.Wait()
	d.traffic(10, func() {})
}
