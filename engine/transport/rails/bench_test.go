package rails_test

import (
	"context"
	"fmt"
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
				round := roundTrip(b, members, size, 0)
				b.SetBytes(2 * int64(size))
				b.ReportAllocs()
				for b.Loop() {
					round()
				}
			})
		}
	}
}

// TestRoundTripAllocatesNothing, also of a write that is cut.
func TestRoundTripAllocatesNothing(t *testing.T) {
	if transporttest.RaceEnabled {
		t.Skip("the race detector allocates")
	}
	for _, size := range []uint64{64, 2 << 20} {
		round := roundTrip(t, 2, size, 0)
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
			round := roundTrip(b, members, size, 300e6)
			b.SetBytes(2 * size)
			for b.Loop() {
				round()
			}
		})
	}
}

// held is a Fabric whose Conns take so many bytes a second.
type held struct {
	transport.Fabric
	rate float64
}

type heldConn struct {
	transport.Conn
	rate float64
	free time.Time
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
		slow.all[c] = &heldConn{Conn: c, rate: h.rate}
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
	for n < len(ops) && !time.Now().Before(c.free) {
		k, err := c.Conn.Post(ops[n : n+1])
		if k == 0 || err != nil {
			return n, err
		}
		bytes := 0
		for _, s := range ops[n].Src {
			bytes += int(s.Len)
		}
		c.free = time.Now().Add(time.Duration(float64(bytes) / c.rate * 1e9))
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

// roundTrip returns a function that writes so many bytes each way, over members that take so many bytes a second; 0: as
// they do.
func roundTrip(b testing.TB, members int, size uint64, rate float64) func() {
	var f [2]transport.Fabric
	for i := range f {
		var all []transport.Fabric
		for range members {
			m, err := tcp.Open(tcp.Options{Listen: "127.0.0.1:0", Gate: transporttest.Gate{}})
			require.NoError(b, err)
			if rate > 0 {
				all = append(all, held{m, rate})
			} else {
				all = append(all, m)
			}
		}
		var err error
		f[i], err = rails.New(all, rails.Options{})
		require.NoError(b, err)
		b.Cleanup(func() { f[i].Close() })
	}
	var c [2]transport.Conn
	var err error
	c[0], err = f[0].Connect(context.Background(), f[1].Addr())
	require.NoError(b, err)
	ev := make([]transport.Event, 16)
	whole := func() bool { return members == 1 || c[1] != nil && rails.Live(c[0]) == 2 && rails.Live(c[1]) == 2 }
	for c[1] == nil || !whole() {
		for i := range f {
			if n, _ := f[i].Poll(ev); n > 0 && ev[0].Kind == transport.EvAccept {
				c[1] = ev[0].Conn
			}
		}
	}
	var ops [2][]transport.Op
	for i := range f {
		r := mapped(b, size)
		k, err := f[1-i].Register(r)
		require.NoError(b, err)
		ops[i] = []transport.Op{{Kind: transport.OpWrite, Key: k, Src: []mem.Span{r.Span()}}, {Kind: transport.OpFrame, Frame: make([]byte, 64)}}
	}
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
