package rails_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/rails"
	"fserver/engine/transport/tcp"
	"fserver/engine/transport/transporttest"
)

// BenchmarkRoundTrip writes both ways in turn, over one tcp Fabric and over two.
func BenchmarkRoundTrip(b *testing.B) {
	for _, size := range []uint64{64, 4 << 10, 16 << 20} {
		for _, members := range []int{1, 2} {
			b.Run(fmt.Sprintf("%d bytes over %d", size, members), func(b *testing.B) {
				round, _ := trip{members: members, size: size}.begin(b)
				b.SetBytes(2 * int64(size))
				b.ReportAllocs()
				for b.Loop() {
					round()
				}
			})
		}
	}
}

// BenchmarkSmall alternates between one tcp Fabric and two, in short turns, and reports the median of each. So what else
// the machine does hits both.
func BenchmarkSmall(b *testing.B) {
	for _, size := range []uint64{64, 4 << 10} {
		b.Run(fmt.Sprint(size, " bytes"), func(b *testing.B) {
			const turn = 20
			var round [2]func()
			var took [2][]float64
			for i := range round {
				round[i], _ = trip{members: 1 + i, size: size}.begin(b)
			}
			for b.Loop() {
				for i := range round {
					begin := time.Now()
					for range turn {
						round[i]()
					}
					took[i] = append(took[i], float64(time.Since(begin).Nanoseconds())/turn)
				}
			}
			for i := range took {
				slices.Sort(took[i])
				b.ReportMetric(took[i][len(took[i])/2], fmt.Sprintf("ns-over-%d", i+1))
			}
			b.ReportMetric(took[1][len(took[1])/2]/took[0][len(took[0])/2], "times")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// TestRoundTripAllocatesNothing, also of a write that is cut.
func TestRoundTripAllocatesNothing(t *testing.T) {
	if transporttest.RaceEnabled {
		t.Skip("the race detector allocates")
	}
	for _, size := range []uint64{64, 2 << 20} {
		round, _ := trip{members: 2, size: size}.begin(t)
		for range 300 {
			round()
		}
		require.Zero(t, testing.AllocsPerRun(200, round), "%d bytes", size)
	}
}

// BenchmarkHeld is the same with 16 MiB, where each member takes 300 MB/s.
func BenchmarkHeld(b *testing.B) {
	const size = 16 << 20
	for _, members := range []int{1, 2} {
		b.Run(fmt.Sprint("over ", members), func(b *testing.B) {
			round, _ := trip{members: members, size: size, rates: []float64{300e6, 300e6}}.begin(b)
			b.SetBytes(2 * size)
			for b.Loop() {
				round()
			}
		})
	}
}

// BenchmarkUneven is the same where one member takes 100 MB/s and the other 300 MB/s: a write in equal halves, and one
// that is cut by the rates.
func BenchmarkUneven(b *testing.B) {
	const size = 16 << 20
	for _, halves := range []bool{true, false} {
		name := map[bool]string{true: "equal halves", false: "by rates"}[halves]
		b.Run(name, func(b *testing.B) {
			round, _ := trip{members: 2, size: size, rates: []float64{100e6, 300e6}, halves: halves}.begin(b)
			for range 10 {
				round()
			}
			b.SetBytes(2 * size)
			for b.Loop() {
				round()
			}
		})
	}
}

// TestSharesByRates: members at 100 and 300 MB/s carry bytes as 1 to 3, and so they do when the rates change.
func TestSharesByRates(t *testing.T) {
	rates := []float64{100e6, 300e6}
	round, c := trip{members: 2, size: 32 << 20, rates: rates, clock: new(time.Duration)}.begin(t)
	for range 6 {
		round()
	}
	require.InDelta(t, 0.25, share(c[0], 4, round), 0.08)
	rates[0], rates[1] = 300e6, 100e6
	for range 8 {
		round()
	}
	require.InDelta(t, 0.75, share(c[0], 4, round), 0.08)
}

// TestSlowMemberIsProbed: a member that is far slower gets nothing, and its share when it has recovered.
func TestSlowMemberIsProbed(t *testing.T) {
	rates := []float64{10e6, 300e6}
	round, c := trip{members: 2, size: 16 << 20, rates: rates, clock: new(time.Duration)}.begin(t)
	for range 5 { // the first sample of the fast one may be bad
		round()
	}
	require.Zero(t, share(c[0], 3, round))
	rates[0] = 300e6
	require.Zero(t, share(c[0], 3, round), "nobody has looked")
	for i := range c {
		rails.ProbeNext(c[i])
	}
	for range 6 {
		round()
	}
	require.InDelta(t, 0.5, share(c[0], 3, round), 0.1)
}

// TestSmallPartsAreNotMeasured: members take what fits into their buffers at any rate, so it says nothing about them.
func TestSmallPartsAreNotMeasured(t *testing.T) {
	round, c := trip{members: 2, size: 1 << 20, rates: []float64{100e6, 300e6}, clock: new(time.Duration)}.begin(t)
	require.InDelta(t, 0.5, share(c[0], 30, round), 0.001)
}

// share returns what the first member carries of so many rounds.
func share(c transport.Conn, rounds int, round func()) float64 {
	before := c.Peer().Members
	for range rounds {
		round()
	}
	after := c.Peer().Members
	first, second := after[0].Sent-before[0].Sent, after[1].Sent-before[1].Sent
	if first < uint64(rounds)*1000 { // frames
		first = 0
	}
	return float64(first) / float64(first+second)
}

// TestQuietMemberIsAskedSeldom: while small writes go over one member, the other one is asked in one of AskBusy Polls.
// With cut writes it is asked in nearly each.
func TestQuietMemberIsAskedSeldom(t *testing.T) {
	polls := make([]int, 2)
	for _, size := range []uint64{64, 1 << 20} {
		round, _ := trip{members: 2, size: size, polls: polls}.begin(t)
		for range 200 { // long enough for the one that carries nothing to be quiet
			round()
		}
		clear(polls)
		for range 1000 {
			round()
		}
		quiet, busy := min(polls[0], polls[1]), max(polls[0], polls[1])
		if size == 64 {
			require.InDelta(t, 1, float64(quiet*rails.AskBusy)/float64(busy), 0.1, "%d of %d Polls", quiet, busy)
		} else {
			require.Greater(t, 10*quiet, 9*busy)
		}
	}
}

// counted is a Fabric that counts its Polls.
type counted struct {
	transport.Fabric
	polls *int
}

func (c counted) Poll(ev []transport.Event) (int, error) {
	*c.polls++
	return c.Fabric.Poll(ev)
}

// held is a Fabric whose Conns take so many bytes a second. An op is passed on when its time has ended.
type held struct {
	transport.Fabric
	rate *float64
	now  func() time.Duration
}

type heldConn struct {
	transport.Conn
	rate  *float64
	now   func() time.Duration
	began time.Duration // the time of the next op; negative: it has not been seen
}

func (h held) Connect(ctx context.Context, peer transport.Addr) (transport.Conn, error) {
	c, err := h.Fabric.Connect(ctx, peer)
	if err != nil {
		return nil, err
	}
	return h.slow(c), nil
}

// slow returns the Conn that our user knows for one.
func (h held) slow(c transport.Conn) transport.Conn {
	slow.Lock()
	defer slow.Unlock()
	if slow.all[c] == nil {
		slow.all[c] = &heldConn{Conn: c, rate: h.rate, now: h.now, began: -1}
	}
	return slow.all[c]
}

var slow = struct {
	sync.Mutex
	all map[transport.Conn]*heldConn
}{all: map[transport.Conn]*heldConn{}}

func (h held) Poll(ev []transport.Event) (int, error) {
	n, err := h.Fabric.Poll(ev)
	for i := range ev[:n] {
		if ev[i].Conn != nil {
			ev[i].Conn = h.slow(ev[i].Conn)
		}
	}
	return n, err
}

func (h held) Bind(k transport.Key, c transport.Conn) error {
	return h.Fabric.Bind(k, c.(*heldConn).Conn)
}

func (c *heldConn) Post(ops []transport.Op) (n int, err error) {
	for n < len(ops) {
		bytes := 0
		for _, s := range ops[n].Src {
			bytes += int(s.Len)
		}
		if c.began < 0 {
			c.began = c.now()
		}
		if c.now()-c.began < time.Duration(float64(bytes) / *c.rate * 1e9) {
			return n, nil
		}
		k, err := c.Conn.Post(ops[n : n+1])
		if k == 0 || err != nil {
			return n, err
		}
		c.began = -1
		n++
	}
	return n, nil
}

func mapped(b testing.TB, size uint64) mem.Region {
	r, err := mem.Map(size)
	require.NoError(b, err)
	b.Cleanup(func() { _ = mem.Unmap(r) })
	return r
}

// A trip is a write of size bytes each way.
type trip struct {
	members int
	size    uint64
	rates   []float64 // bytes a second that the members take; nil: as they do
	halves  bool      // what is known of the rates is forgotten each time, so that writes are cut in equal parts
	// clock is the time that the members take, which goes on with each look at the Fabrics; nil: it is that of the machine.
	// So a machine that has other things to do changes no rate.
	clock *time.Duration
	polls []int // counts those of the members of one side; nil: they are not counted
}

// begin returns a function that makes the trip, and the Conns of both sides.
func (t trip) begin(b testing.TB) (func(), [2]transport.Conn) {
	f, c, ops := t.open(b)
	round := t.trips(b, &f, &c, &ops)
	if t.halves {
		return func() { rails.ForgetRates(c[0]); rails.ForgetRates(c[1]); round() }, c
	}
	return round, c
}

// open returns the Fabrics and Conns of both sides, and what each posts.
func (t trip) open(b testing.TB) (f [2]transport.Fabric, c [2]transport.Conn, ops [2][]transport.Op) {
	began := time.Now()
	now := func() time.Duration { return time.Since(began) }
	if t.clock != nil {
		now = func() time.Duration { return *t.clock }
	}
	for i := range f {
		var all []transport.Fabric
		for j := range t.members {
			m, err := tcp.Open(tcp.Options{Listen: "127.0.0.1:0", Gate: transporttest.Gate{}})
			require.NoError(b, err)
			switch {
			case t.rates != nil:
				all = append(all, held{m, &t.rates[j], now})
			case t.polls != nil && i == 0:
				all = append(all, counted{m, &t.polls[j]})
			default:
				all = append(all, m)
			}
		}
		var err error
		f[i], err = rails.New(all, rails.Options{})
		require.NoError(b, err)
		if t.clock != nil {
			rails.SetClock(f[i], now)
		}
		b.Cleanup(func() { f[i].Close() })
	}
	var err error
	c[0], err = f[0].Connect(context.Background(), f[1].Addr())
	require.NoError(b, err)
	ev := make([]transport.Event, 16)
	whole := func() bool { return t.members == 1 || c[1] != nil && rails.Live(c[0]) == 2 && rails.Live(c[1]) == 2 }
	for c[1] == nil || !whole() {
		for i := range f {
			if n, _ := f[i].Poll(ev); n > 0 && ev[0].Kind == transport.EvAccept {
				c[1] = ev[0].Conn
			}
		}
	}
	for i := range f {
		r := mapped(b, t.size)
		k, err := f[1-i].Register(r)
		require.NoError(b, err)
		ops[i] = []transport.Op{{Kind: transport.OpWrite, Key: k, Src: []mem.Span{r.Span()}}, {Kind: transport.OpFrame, Frame: make([]byte, 64)}}
	}
	return f, c, ops
}

// trips returns a function that posts all ops of each side in turn, and polls both until a frame has arrived.
func (t trip) trips(b testing.TB, f *[2]transport.Fabric, c *[2]transport.Conn, ops *[2][]transport.Op) func() {
	ev := make([]transport.Event, 16)
	return func() {
		for i := range f {
			for posted, arrived := 0, false; !arrived; {
				if posted < 2 {
					k, err := c[i].Post(ops[i][posted:])
					if err != nil {
						b.Fatal(err)
					}
					posted += k
				}
				if t.clock != nil {
					*t.clock += 20 * time.Microsecond
				}
				for j := range f {
					n, err := f[j].Poll(ev)
					if err != nil {
						b.Fatal(err)
					}
					for _, e := range ev[:n] {
						arrived = arrived || j != i && e.Kind == transport.EvFrame
					}
				}
			}
		}
	}
}
