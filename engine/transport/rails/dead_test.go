package rails_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/inproc"
	"fserver/engine/transport/rails"
	"fserver/engine/transport/transporttest"
)

// TestFabricFails: a member Fabric of either side fails in the middle of traffic. Nothing is lost, and keys that were
// registered before and after come to their end.
func TestFabricFails(t *testing.T) {
	broken := errors.New("the device is gone")
	for name, at := range map[string]int{"of the dialer": 0, "of the dialer, a later member": 1, "of the other side": 2, "of the other side, a later member": 3} {
		for seed := range uint64(5) {
			t.Run(name, func(t *testing.T) {
				var mu sync.Mutex
				var told []error
				d := newDuo(t, 2, seed, true, rails.Options{Pause: time.Millisecond, Split: 8 << 10, Failed: func(_ int, why error) {
					mu.Lock()
					defer mu.Unlock()
					told = append(told, why)
				}})
				s := []*side{d.a, d.b}[at/2]
				before, err := s.f.Register(s.src)
				require.NoError(t, err)
				n := 0
				d.traffic(100, func() {
					if n++; n == 20 {
						d.all[at].fail(broken)
					}
				})
				d.wait("it is closed", func() bool { return !rails.LiveOver(s.c, at%2) && d.all[at].fails() == nil })
				d.traffic(50, func() {})
				require.Equal(t, 1, rails.Live(s.c))
				m := s.c.Peer().Members
				require.Equal(t, "the device is gone", m[at%2].Why)
				require.Empty(t, m[1-at%2].Why)
				mu.Lock()
				require.Len(t, told, 1)
				require.ErrorIs(t, told[0], broken)
				mu.Unlock()

				after, err := s.f.Register(s.src)
				require.NoError(t, err)
				s.frees(after)
				s.frees(before)
			})
		}
	}
}

// TestDeviceIsGone: the first that says that a device is gone is the call that is to bring a member back. Nobody tries again.
func TestDeviceIsGone(t *testing.T) {
	var mu sync.Mutex
	var told []error
	d := apart(t, 2, 1, true, rails.Options{Pause: time.Millisecond, Failed: func(_ int, why error) {
		mu.Lock()
		defer mu.Unlock()
		told = append(told, why)
	}})
	d.connect(2)
	d.all[0].gone = fmt.Errorf("connect: %w", &transport.DeviceError{Err: unix.EIO}) // no goroutine dials now
	d.bad["a0"].FailNext(errors.New("the Conn ends"))
	d.traffic(50, func() {})
	d.wait("it is known", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(told) == 1
	})
	require.ErrorIs(t, told[0], unix.EIO)
	require.True(t, rails.LiveOver(d.a.c, 1))
	d.traffic(20, func() {})
	require.Equal(t, "connect: input/output error", d.a.c.Peer().Members[0].Why)
}

// frees ends a key, and waits until it has ended.
func (s *side) frees(k transport.Key) {
	s.f.Deregister(k)
	s.freed(k)
}

func (s *side) freed(k transport.Key) {
	ev := make([]transport.Event, 16)
	for end := time.Now().Add(patience); time.Now().Before(end); {
		n, err := s.f.Poll(ev)
		require.NoError(s.t, err)
		for _, e := range ev[:n] {
			if e.Kind == transport.EvFreed && e.User == k.ID {
				return
			}
		}
	}
	require.Fail(s.t, "no EvFreed")
}

// TestSlowEnd: nobody waits for the Close of a member that has failed, which may take long.
func TestSlowEnd(t *testing.T) {
	d := newDuo(t, 2, 1, false, rails.Options{Pause: time.Millisecond})
	before, err := d.a.f.Register(d.a.src)
	require.NoError(t, err)
	m := d.all[0]
	m.hold = make(chan struct{})
	release := sync.OnceFunc(func() { close(m.hold) })
	t.Cleanup(release)
	m.fail(errors.New("the device is gone"))
	d.until("it is being closed, as both sides know", func() bool {
		d.a.poll()
		d.b.poll()
		return m.shut.Load() && !rails.LiveOver(d.a.c, 0) && !rails.LiveOver(d.b.c, 0)
	})
	d.traffic(50, func() { d.a.f.Arm() })
	d.a.f.Deregister(before)
	require.False(t, m.called.Load())
	release()
	d.a.freed(before)
}

// TestAllFabricsFail: with the last one the whole fails.
func TestAllFabricsFail(t *testing.T) {
	d := newDuo(t, 2, 1, false, rails.Options{})
	d.all[0].fail(errors.New("the first is gone"))
	d.all[1].fail(errors.New("the second is gone"))
	ev := make([]transport.Event, 16)
	for end := time.Now().Add(patience); ; {
		_, err := d.a.f.Poll(ev)
		if err != nil {
			require.ErrorContains(t, err, "rails: no fabric is left: ")
			break
		}
		require.True(t, time.Now().Before(end))
	}
}

// TestAbsent: a device that does not work keeps its place, and the others their numbers.
func TestAbsent(t *testing.T) {
	nets := []*inproc.Network{inproc.New(), inproc.New()}
	open := func(name string, hole int) transport.Fabric {
		var members []transport.Fabric
		for i, n := range nets {
			f, err := n.Open(inproc.Options{Name: name, Listen: true, Gate: transporttest.Gate{Hello: name}})
			require.NoError(t, err)
			members = append(members, f)
			if i == hole {
				require.NoError(t, f.Close())
				members[i] = &transport.Absent{Device: "nic0", Why: errors.New("the cable is out")}
			}
		}
		f, err := rails.New(members, rails.Options{})
		require.NoError(t, err)
		t.Cleanup(func() { f.Close() })
		return f
	}
	a, b := open("a", 0), open("b", -1)
	require.Equal(t, "inproc/nic0+a", a.Name())
	require.NoError(t, a.Reaches(b.Addr()))
	c, err := a.Connect(context.Background(), b.Addr())
	require.NoError(t, err)
	require.Equal(t, "the cable is out", c.Peer().Members[0].Why)
	m, err := mem.Map(4096)
	require.NoError(t, err)
	defer mem.Unmap(m)
	k, err := a.Register(m)
	require.NoError(t, err)
	require.NoError(t, a.Bind(k, c))
	s := &side{t: t, f: a}
	s.frees(k)

	_, err = rails.New([]transport.Fabric{&transport.Absent{Device: "nic0", Why: errors.New("the cable is out")}, &transport.Absent{Device: "nic1", Why: errors.New("no such device")}}, rails.Options{})
	require.EqualError(t, err, "rails: no fabric works: the cable is out")
}

// TestNews: who wants to know is told which members are used and which are lost.
func TestNews(t *testing.T) {
	var mu sync.Mutex
	var told []transport.Member
	d := newDuo(t, 2, 1, false, rails.Options{Pause: time.Millisecond, News: func(p transport.Peer, m transport.Member) {
		mu.Lock()
		defer mu.Unlock()
		told = append(told, m)
	}})
	// until waits for so many entries about member 1, and returns the last one.
	until := func(what string, count int) (last transport.Member) {
		d.wait(what, func() bool {
			mu.Lock()
			defer mu.Unlock()
			n := 0
			for _, m := range told {
				if m.Name[len(m.Name)-1] == '1' {
					n, last = n+1, m
				}
			}
			return n == count
		})
		return last
	}
	require.Empty(t, until("both sides use it", 2).Why)
	d.traffic(10, func() {})
	d.cut(1)
	lost := until("both sides have lost it", 4)
	require.Regexp(t, "the network is cut|rails: the peer has lost it", lost.Why)
	require.Equal(t, "inproc", lost.Via)
	d.heal(1)
	require.Empty(t, until("both sides use it again", 6).Why)
	d.traffic(10, func() {})
}
