package faults_test

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/faults"
	"fserver/engine/transport/inproc"
	"fserver/engine/transport/transporttest"
)

// two is a Conn between two Fabrics of one Network with the same faults.
type two struct {
	t        *testing.T
	a, b     transport.Fabric
	from, to transport.Conn
	src      mem.Region
}

// The second one has other faults if others says so.
func newTwo(t *testing.T, o faults.Options, others ...faults.Options) *two {
	net := inproc.New()
	w := &two{t: t}
	for i, f := range []*transport.Fabric{&w.a, &w.b} {
		if i == 1 && len(others) > 0 {
			o = others[0]
		}
		in, err := net.Open(inproc.Options{Listen: true, Gate: transporttest.Gate{}})
		require.NoError(t, err)
		*f, err = faults.Wrap(in, o)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, (*f).Close()) })
	}
	var err error
	w.from, err = w.a.Connect(t.Context(), w.b.Addr())
	require.NoError(t, err)
	for w.to == nil {
		for _, e := range w.poll(w.b) {
			w.to = e.Conn
		}
	}
	w.src, err = mem.Map(1)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, mem.Unmap(w.src)) })
	w.src.Span().Bytes()[0] = 1
	return w
}

func (w *two) poll(f transport.Fabric) []transport.Event {
	w.t.Helper()
	var ev [64]transport.Event
	k, err := f.Poll(ev[:])
	require.NoError(w.t, err)
	return ev[:k]
}

func (w *two) post(ops ...transport.Op) {
	w.t.Helper()
	k, err := w.from.Post(ops)
	require.NoError(w.t, err)
	require.Equal(w.t, len(ops), k)
}

func frame(s string) transport.Op { return transport.Op{Kind: transport.OpFrame, Frame: []byte(s)} }

// write is one of a byte, and says whether it has landed.
func (w *two) write() (transport.Op, func() bool) {
	r, err := mem.Map(1)
	require.NoError(w.t, err)
	w.t.Cleanup(func() { require.NoError(w.t, mem.Unmap(r)) })
	k, err := w.b.Register(r)
	require.NoError(w.t, err)
	return transport.Op{Kind: transport.OpWrite, Key: k, Src: []mem.Span{w.src.Span()}},
		func() bool { return r.Span().Bytes()[0] == 1 }
}

// TestSeedDecidesTheRun compares all that two Fabrics say to each other.
func TestSeedDecidesTheRun(t *testing.T) {
	run := func(seed uint64) string {
		w := newTwo(t, faults.NIC(seed))
		write, _ := w.write()
		var log bytes.Buffer
		for i := range uint32(200) {
			k, err := w.from.Post([]transport.Op{write, frame(fmt.Sprint(i))})
			fmt.Fprintln(&log, "post", i, k, err)
			for _, f := range []transport.Fabric{w.a, w.b} {
				for _, e := range w.poll(f) {
					fmt.Fprintln(&log, f.Name(), e.Kind, e.User, string(e.Data), e.Err)
				}
			}
		}
		return log.String()
	}
	require.Equal(t, run(1), run(1))
	require.NotEqual(t, run(1), run(2))
}

// TestLateDone: completions come up to so many Polls late, and in another order.
func TestLateDone(t *testing.T) {
	const late, count = 5, 30
	w := newTwo(t, faults.Options{LateDone: late})
	for i := range uint64(count) {
		op := frame("x")
		op.User = i
		w.post(op)
	}
	require.Len(t, w.poll(w.b), count)
	var users []uint64
	for polls := range late + 1 {
		require.Less(t, len(users), count, "%d polls", polls)
		for _, e := range w.poll(w.a) {
			users = append(users, e.User)
		}
	}
	require.Len(t, users, count)
	require.False(t, slices.IsSorted(users))
}

// TestLateWrite: writes land after later ones and before the frame before them, but each before
// the frame behind it.
func TestLateWrite(t *testing.T) {
	const count = 10
	w := newTwo(t, faults.Options{LateWrite: 6})
	var landed [count]func() bool
	for i := range landed {
		write, ok := w.write()
		landed[i] = ok
		w.post(frame(string(rune('0'+i))), write)
	}
	require.True(t, w.from.Unsent())
	var frames string
	overtaken, unordered := false, false
	for range 100 {
		w.poll(w.a)
		for _, e := range w.poll(w.b) {
			frames += string(e.Data)
			for i := range len(frames) - 1 {
				require.True(t, landed[i](), "frame %d has come before write %d", len(frames)-1, i)
			}
		}
		for i := range count {
			overtaken = overtaken || landed[i]() && len(frames) <= i
			unordered = unordered || i > 0 && landed[i]() && !landed[i-1]()
		}
	}
	require.Equal(t, "0123456789", frames)
	require.True(t, overtaken, "no write has overtaken the frame before it")
	require.True(t, unordered, "no write has overtaken another")
	require.False(t, w.from.Unsent())
}

// TestEarly: the source is free before the write has landed, which it does with the bytes that
// it was posted with.
func TestEarly(t *testing.T) {
	w := newTwo(t, faults.Options{LateWrite: 10, Early: 1})
	early := false
	for range 20 {
		write, landed := w.write()
		w.post(write)
		done := false
		for !done {
			for _, e := range w.poll(w.a) {
				done = done || e.Kind == transport.EvDone
			}
		}
		early = early || !landed()
		w.src.Span().Bytes()[0] = 2
		for range 11 {
			w.poll(w.a)
		}
		require.True(t, landed())
		w.src.Span().Bytes()[0] = 1
	}
	require.True(t, early)
}

// TestPasses: a frame that passes waits for no write of a device, but for all others, and those
// behind such a write wait for it.
func TestPasses(t *testing.T) {
	passing := frame("passes")
	passing.Passes = true
	for _, dev := range []mem.Device{mem.CPU, mem.GPU(0)} {
		overtakes := false
		for seed := range uint64(20) {
			w := newTwo(t, faults.Options{Seed: seed, LateWrite: 20})
			write, landed := w.write()
			write.Dev = dev
			w.post(write, frame("behind"), passing)
			var got []string
			for range 30 {
				w.poll(w.a)
				for _, e := range w.poll(w.b) {
					got = append(got, string(e.Data))
					require.True(t, landed() || string(e.Data) == "passes")
					overtakes = overtakes || !landed()
				}
			}
			require.ElementsMatch(t, []string{"behind", "passes"}, got)
		}
		require.Equal(t, dev != mem.CPU, overtakes)
	}
}

// TestResend: lost frames come again, once and in order, and whoever sleeps is woken to send them. The
// receiver takes no part in it.
func TestResend(t *testing.T) {
	const count = 100
	w := newTwo(t, faults.Options{Drop: 0.5, Resend: true, Timeout: time.Millisecond}, faults.Options{})
	var want, got []string
	lost := false
	for len(got) < count {
		if len(want) < count {
			s := fmt.Sprint(len(want))
			k, err := w.from.Post([]transport.Op{frame(s)})
			require.NoError(t, err)
			want = append(want, []string{s}[:k]...)
		}
		for _, e := range w.poll(w.b) {
			got = append(got, string(e.Data))
		}
		if w.from.Unsent() && !w.a.Arm() {
			lost = true
			ready, err := transporttest.Sleep([]unix.PollFd{{Fd: int32(w.a.FD()), Events: unix.POLLIN}}, 10*time.Second)
			require.NoError(t, err)
			require.Equal(t, 1, ready, "nobody wakes the sleeper")
		}
		w.poll(w.a)
	}
	require.True(t, lost)
	require.Equal(t, want, got)
}

func TestStarve(t *testing.T) {
	w := newTwo(t, faults.Options{Starve: 0.5})
	took := [3]int{}
	for range 100 {
		k, err := w.from.Post([]transport.Op{frame("x"), frame("y")})
		require.NoError(t, err)
		took[k]++
		w.poll(w.a)
		w.poll(w.b)
	}
	require.NotContains(t, took, 0, "posts that took 0, 1 and 2 of 2 ops: %v", took)
}

func TestIdle(t *testing.T) {
	w := newTwo(t, faults.Options{Idle: 0.5})
	empty := 0
	for range 100 {
		w.post(frame("x"))
		for len(w.poll(w.b)) == 0 {
			empty++
		}
		for len(w.poll(w.a)) == 0 {
		}
	}
	require.InDelta(t, 100, empty, 60)
}

// TestForget: what is held back is posted before Close, or never.
func TestForget(t *testing.T) {
	for _, forget := range []float64{0, 1} {
		arrived := 0
		for seed := range uint64(20) {
			w := newTwo(t, faults.Options{Seed: seed, LateWrite: 10, Forget: forget})
			write, _ := w.write()
			w.post(write, frame("last words"))
			w.from.Close()
			var kinds []transport.EventKind
			for len(kinds) < 3 {
				for _, e := range w.poll(w.a) {
					kinds = append(kinds, e.Kind)
				}
			}
			require.Equal(t, []transport.EventKind{transport.EvDone, transport.EvDone, transport.EvClosed}, kinds)
			if w.poll(w.b)[0].Kind == transport.EvFrame {
				arrived++
			}
		}
		if forget == 0 {
			require.Equal(t, 20, arrived)
		} else {
			require.Less(t, arrived, 10)
		}
	}
}

func TestSlowRegister(t *testing.T) {
	const slow, count = 2 * time.Millisecond, 50
	w := newTwo(t, faults.Options{SlowRegister: slow})
	begin := time.Now()
	for range count {
		w.write()
	}
	require.Greater(t, time.Since(begin), count*slow/4)
}

func TestFailNext(t *testing.T) {
	w := newTwo(t, faults.Options{})
	broken := errors.New("broken")
	w.post(frame("1"), frame("2"))
	w.a.(*faults.Fabric).FailNext(broken)
	w.post(frame("3"))
	_, err := w.from.Post([]transport.Op{frame("4")})
	require.ErrorIs(t, err, broken)
	failed, down := 0, error(nil)
	for range 5 {
		for _, e := range w.poll(w.a) {
			require.True(t, down == nil || e.Kind == transport.EvDone, "after EvDown")
			if e.Kind == transport.EvDown {
				down = e.Err
			} else if errors.Is(e.Err, broken) {
				failed++
			}
		}
	}
	require.ErrorIs(t, down, broken)
	require.Equal(t, 1, failed)
	last := w.poll(w.b)
	require.Equal(t, transport.EvDown, last[len(last)-1].Kind)
}
