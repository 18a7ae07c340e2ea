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
}

// fd skips the test when n cannot sleep.
func (n *node) fd() int {
	s, ok := n.f.(transport.Sleeper)
	if !ok {
		n.w.Skip("the fabric is no Sleeper")
	}
	return s.FD()
}

// readable waits up to limit until the descriptors of some nodes are readable,
// and returns those nodes.
func (w *world) readable(limit time.Duration) []*node {
	fds := make([]unix.PollFd, len(w.nodes))
	for i, n := range w.nodes {
		fds[i] = unix.PollFd{Fd: int32(n.fd()), Events: unix.POLLIN}
	}
	for {
		if _, err := unix.Poll(fds, int(limit.Milliseconds())); err != unix.EINTR {
			require.NoError(w, err)
			break
		}
	}
	var out []*node
	for i, f := range fds {
		if f.Revents&unix.POLLIN != 0 {
			out = append(out, w.nodes[i])
		}
	}
	return out
}

// untilWoken is until for a user that sleeps: it polls a node only when its
// descriptor is readable. What must happen has no other cause than Polls.
func (w *world) untilWoken(what string, cond func() bool) {
	w.Helper()
	for end := time.Now().Add(patience); !cond(); {
		awake := w.readable(patience / 4)
		if len(awake) == 0 {
			w.Fatalf("no descriptor is readable and this has not happened: %s\n%s", what, w.state())
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

// settle polls until no descriptor is readable.
func (w *world) settle() {
	w.Helper()
	for range 10000 {
		w.turn()
		if len(w.readable(0)) == 0 {
			return
		}
	}
	w.Fatalf("a descriptor stays readable though nothing happens\n%s", w.state())
}

func testWakes(w *world) {
	a, b := w.open("a"), w.open("b")
	a.fd()
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
				s.ops = append(s.ops, dst.write(k*size, uint32(j), part(src, k*size, size)))
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
	a.n.fd()
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
	require.Empty(w, w.readable(50*time.Millisecond))
	w.echo(a, b)
	w.settle()
}
