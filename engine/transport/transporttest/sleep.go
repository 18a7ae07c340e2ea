package transporttest

import (
	"context"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"fserver/engine/transport"
)

var sleepCases = []testCase{
	{"FDWakesForEverything", testWakes},
	{"FDCarriesAllTraffic", testSleepTraffic},
	{"FDWakesAfterBackPressure", testSleepPressure},
	{"FDIsQuietWhenIdle", testSleepQuiet},
	{"ArmForAnotherSleeper", testArmForOther},
}

// Sleep waits for one of some descriptors, at most for limit, and returns how many are ready. A signal
// starts it again.
func Sleep(fds []unix.PollFd, limit time.Duration) (ready int, err error) {
	for err = unix.EINTR; err == unix.EINTR; {
		ready, err = unix.Poll(fds, int(limit.Milliseconds()))
	}
	return ready, err
}

// Woken sleeps as the user of some Fabrics does, at most for limit, and returns the numbers of
// those that have something to tell.
func Woken(limit time.Duration, fabrics ...transport.Fabric) (which []int, err error) {
	fds, again := make([]unix.PollFd, len(fabrics)), make([]bool, len(fabrics))
	for i, f := range fabrics {
		fds[i] = unix.PollFd{Fd: int32(f.FD()), Events: unix.POLLIN}
		if again[i] = f.Arm(); again[i] {
			limit = 0
		}
	}
	_, err = Sleep(fds, limit)
	for i := range fabrics {
		if again[i] || fds[i].Revents&unix.POLLIN != 0 {
			which = append(which, i)
		}
	}
	return which, err
}

// woken sleeps on all nodes, and returns those to poll.
func (w *world) woken(limit time.Duration) (awake []*node) {
	var all []transport.Fabric
	for _, n := range w.nodes {
		all = append(all, n.f)
	}
	which, err := Woken(limit, all...)
	require.NoError(w, err)
	for _, i := range which {
		awake = append(awake, w.nodes[i])
	}
	return awake
}

// untilWoken is until for a user that sleeps: it polls a node only when that has something to
// tell. What must happen has no other cause than Polls.
func (w *world) untilWoken(what string, cond func() bool) {
	w.Helper()
	for end := time.Now().Add(patience); !cond(); {
		awake := w.woken(patience / 4)
		if len(awake) == 0 {
			w.Fatalf("nobody is woken and this has not happened: %s\n%s", what, w.state())
		}
		for _, n := range awake {
			n.poll()
		}
		if w.Failed() {
			w.FailNow()
		}
		if time.Now().After(end) {
			w.Fatalf("did not happen within %v: %s\n%s", patience, what, w.state())
		}
	}
}

// settle polls until no node has anything to tell and no lost frame is to be sent again. All are armed then.
func (w *world) settle() {
	w.Helper()
	for range 10000 {
		w.turn()
		if len(w.woken(w.bed.Lost)) == 0 {
			return
		}
	}
	w.Fatalf("a fabric has something to tell though nothing happens\n%s", w.state())
}

func testWakes(w *world) {
	a, b := w.open("a"), w.open("b")
	w.settle()
	d := a.dial(context.Background(), b.f.Addr())
	w.untilWoken("the listener hears of the connection", func() bool { return len(b.fresh) == 1 })
	w.until("connect returns", d.over)
	require.NoError(w, d.got.err)
	la, lb := a.link(d.got.c), b.fresh[0]

	w.settle()
	la.post(frame([]byte("one")))
	w.untilWoken("the op ends and the frame arrives", func() bool { return la.idle() && len(lb.frames) == 1 })

	dst, src := b.target(100), w.source(1, 100)
	w.settle()
	lb.post(frame([]byte("back")))
	la.post(dst.write(0, 1, src))
	w.untilWoken("all arrives", func() bool {
		return len(lb.writes) == 1 && len(la.frames) == 1 && la.idle() && lb.idle()
	})

	w.settle()
	la.close()
	w.untilWoken("the peer hears", func() bool { return lb.isDown })
}

// testSleepTraffic moves large writes both ways and many frames, through
// back-pressure and with room for one event, and polls only who is woken.
func testSleepTraffic(w *world) {
	const frames, writes, size = 500, 6, 3 << 20
	a, b := w.pair()
	a.n.ev, b.n.ev = a.n.ev[:1], b.n.ev[:1]
	var sides [2]struct {
		from, to *link
		ops      []transport.Op
		last     int // polls of from's node at its last Post
	}
	sides[0].from, sides[0].to = a, b
	sides[1].from, sides[1].to = b, a
	for i := range sides {
		s := &sides[i]
		dst, src := s.to.n.target(writes*size), w.source(uint64(i), writes*size)
		for j := range frames {
			s.ops = append(s.ops, frame([]byte{byte(j)}))
			if k := uint64(j); k < writes {
				s.ops = append(s.ops, dst.write(k*size, uint32(j), slice(src, k*size, size)))
			}
		}
	}
	w.untilWoken("all traffic arrives", func() bool {
		over := true
		for i := range sides {
			s := &sides[i]
			if s.from.n.polls > s.last { // else it has not been woken
				s.last = s.from.n.polls
				k, err := s.from.try(s.ops...)
				require.NoError(w, err)
				s.ops = s.ops[k:]
			}
			over = over && len(s.ops) == 0 && s.from.idle() && len(s.to.frames) == frames && len(s.to.writes) == writes
		}
		return over
	})
}

// testSleepPressure posts until there is back-pressure and sleeps over it: room
// for the next op must wake the sender.
func testSleepPressure(w *world) {
	a, b := w.pair()
	b.n.asleep = true
	buf := make([]byte, 4096)
	taken := a.fill(pressureBytes/len(buf), func(int) transport.Op { return frame(buf) })
	b.n.asleep = false
	more, last := 0, 0
	w.untilWoken("post takes ops again", func() bool {
		if a.n.polls > last && more < 100 { // else a has not been woken
			last = a.n.polls
			k, err := a.try(frame(buf))
			require.NoError(w, err)
			more += k
		}
		return more == 100 && a.idle() && len(b.frames) == taken+more
	})
}

func testSleepQuiet(w *world) {
	a, b := w.pair()
	w.transfer(a, b)
	w.settle()
	require.Empty(w, w.woken(50*time.Millisecond))
	w.echo(a, b)
	w.settle()
}

// testArmForOther polls while somebody else sleeps on the descriptor, who hears of what comes
// after that, be it from Arm or from the descriptor.
func testArmForOther(w *world) {
	a, b := w.pair()
	w.transfer(a, b)
	w.settle()
	fd := b.n.f.FD()
	require.Equal(w, fd, b.n.f.FD())
	for i := range 20 {
		asleep := make(chan bool)
		go func() {
			fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
			ready, err := Sleep(fds, patience)
			asleep <- err == nil && ready != 0
		}()
		for range i {
			b.n.poll()
		}
		require.False(w, b.n.f.Arm())
		b.n.asleep = true
		frames := len(b.frames)
		a.post(frame([]byte{byte(i)}))
		for b.n.asleep {
			select {
			case told := <-asleep:
				require.True(w, told)
				b.n.asleep = false
			default:
				a.n.poll()
			}
		}
		w.until("the frame arrives", func() bool { return len(b.frames) > frames && a.idle() })
		w.settle()
	}
}
