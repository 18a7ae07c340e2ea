package rails_test

import (
	"context"
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/inproc"
	"fserver/engine/transport/rails"
	"fserver/engine/transport/transporttest"
)

// TestRandomPeer has a peer say random items on random members, while the program posts. Each op ends once,
// and so does the Conn, and nothing is kept.
func TestRandomPeer(t *testing.T) {
	p := &randomPeer{d: apart(t, 3, 1, false, rails.Options{})}
	for _, net := range p.d.nets {
		f, err := net.Open(inproc.Options{Name: "from", Gate: transporttest.Gate{Hello: "from"}})
		require.NoError(t, err)
		t.Cleanup(func() { f.Close() })
		p.from = append(p.from, f)
		k, err := f.Register(p.d.a.mem)
		require.NoError(t, err)
		p.keys = append(p.keys, k)
	}
	seeds := uint64(1000)
	if testing.Short() || transporttest.Quick() {
		seeds = 50
	}
	for seed := range seeds {
		p.talk = talk{open: map[uint64]bool{}, came: map[transport.Conn]uint64{}, said: map[transport.Conn]bool{}}
		p.r = rand.New(rand.NewPCG(seed, 3))
		binary.LittleEndian.PutUint64(p.id[:], seed)
		p.run(seed)
	}
	p.d.until("nothing is kept", func() bool { p.poll(); return rails.Rails(p.d.b.f) == 0 })
}

// A randomPeer speaks to the Fabric of b, over a Fabric of its own in each network.
type randomPeer struct {
	d    *duo
	r    *rand.Rand
	from []*inproc.Fabric
	keys []transport.Key // of one region, in each of them
	talk
}

// talk is what is known of one Conn.
type talk struct {
	id     [16]byte
	ways   []transport.Conn          // the members, by their numbers
	came   map[transport.Conn]uint64 // numbered items of b
	said   map[transport.Conn]bool   // a statement
	given  uint64                    // numbers below may be acknowledged
	theirs uint64                    // statements of b that have come
	stated uint64
	sent   uint64

	c      transport.Conn // of b
	down   bool
	closed bool
	posted uint64
	open   map[uint64]bool // ops of b
}

// dial begins another member.
func (p *randomPeer) dial() {
	at := p.r.IntN(3)
	in, err := p.from[at].Connect(context.Background(), transport.Addr("inproc:b"+string(rune('0'+at))))
	require.NoError(p.d.t, err)
	p.ways = append(p.ways, in)
	b := rails.GreetingOf(p.id, uint32(len(p.ways)-1))
	binary.LittleEndian.PutUint16(b[22:], uint16(at))
	binary.LittleEndian.PutUint16(b[24:], 3)
	_, _ = in.Post([]transport.Op{{Kind: transport.OpFrame, Frame: b}, {Kind: transport.OpFrame, Frame: rails.Item(3, 0, 0, 0)}})
}

// say says something, which most times is right.
func (p *randomPeer) say() {
	in := p.ways[p.r.IntN(len(p.ways))]
	mostly := func(n uint64) uint64 {
		switch p.r.IntN(400) {
		case 0:
			return p.r.Uint64N(300)
		case 1:
			return p.r.Uint64()
		}
		return n
	}
	var b []byte
	switch p.r.IntN(12) {
	case 0, 1, 2, 3, 4:
		kind := byte(1 + p.r.IntN(2))
		b = rails.Item(kind, mostly(p.sent), mostly(p.given), mostly(p.theirs))
		p.sent++
	case 5, 6, 7:
		b = rails.Item(3, 0, mostly(p.given), mostly(p.theirs))
	case 8:
		if len(p.ways) < 2 || p.r.IntN(4) > 0 {
			return
		}
		about := p.r.IntN(len(p.ways))
		if p.said[p.ways[about]] && p.r.IntN(50) > 0 {
			return
		}
		p.said[p.ways[about]] = true
		b = rails.Item(4, mostly(p.stated), mostly(p.came[p.ways[about]]), mostly(uint64(about)))
		p.stated++
	case 10:
		if p.r.IntN(10) == 0 {
			in.Close()
		}
		return
	case 9, 11:
		if p.r.IntN(3) == 0 {
			p.dial()
		}
		return
	}
	_, _ = in.Post([]transport.Op{{Kind: transport.OpFrame, Frame: b}})
}

func (p *randomPeer) poll() {
	ev := make([]transport.Event, 8)
	for _, f := range p.from {
		n, _ := f.Poll(ev)
		for _, e := range ev[:n] {
			switch {
			case e.Kind == transport.EvDown:
				e.Conn.Close()
			case e.Kind == transport.EvFrame && len(e.Data) >= 25:
				switch e.Data[0] {
				case 1, 2:
					p.came[e.Conn]++
					p.given = max(p.given, binary.LittleEndian.Uint64(e.Data[1:])+1)
				case 4:
					p.theirs = max(p.theirs, binary.LittleEndian.Uint64(e.Data[1:])+1)
				}
			}
		}
	}
	n, err := p.d.b.f.Poll(ev)
	require.NoError(p.d.t, err)
	for _, e := range ev[:n] {
		switch e.Kind {
		case transport.EvAccept:
			p.c = e.Conn
		case transport.EvDone:
			require.True(p.d.t, p.open[e.User])
			delete(p.open, e.User)
		case transport.EvDown:
			require.False(p.d.t, p.down)
			p.down = true
		case transport.EvClosed:
			require.False(p.d.t, p.closed)
			p.closed = true
		}
	}
}

func (p *randomPeer) post() {
	p.posted++
	op := transport.Op{Kind: transport.OpFrame, User: p.posted, Frame: make([]byte, p.r.IntN(2000))}
	if p.r.IntN(2) == 0 {
		op = transport.Op{Kind: transport.OpWrite, User: p.posted, Src: []mem.Span{p.d.b.src.Span()}, Key: rails.KeyOf(p.keys)}
		op.Src[0].Len = p.r.Uint64N(40 << 10)
	}
	if n, _ := p.c.Post([]transport.Op{op}); n == 1 {
		p.open[op.User] = true
	}
}

func (p *randomPeer) run(seed uint64) {
	p.dial()
	limit := 20 + p.r.IntN(500)
	for i := 0; i < limit && !p.down; i++ {
		p.say()
		if p.c != nil && p.r.IntN(2) == 0 {
			p.post()
		}
		if p.r.IntN(3) > 0 {
			p.poll()
		}
	}
	p.d.until("the peer is known", func() bool { p.poll(); return p.c != nil })
	if p.r.IntN(2) == 0 {
		p.c.Close()
	}
	for _, in := range p.ways {
		in.Close()
	}
	p.d.until("the conn is over", func() bool {
		p.poll()
		if p.down {
			p.c.Close()
		}
		return p.closed
	})
	require.Empty(p.d.t, p.open, "seed %d", seed)
}
