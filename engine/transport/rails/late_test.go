package rails_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/faults"
	"fserver/engine/transport/inproc"
)

// A tardy Fabric gives EvClosed late. Just before it, each write of the peer lands again whose frame was not given: as long as an end is
// not closed, what its peer has sent may be under way, also if the peer has closed its own end.
type tardy struct {
	transport.Fabric
	all     *late
	conns   map[transport.Conn]*tardyConn // by the inner ones
	regions map[uint64]mem.Region         // by the IDs of their keys
	ended   []*tardyConn                  // whose EvClosed is held back
}

// late is what the tardy Fabrics of a test share.
type late struct {
	mu      sync.Mutex // guards all of them, and is held during Posts and Polls
	r       *rand.Rand
	greeted map[string]*tardyConn // ends of dialers, by the first frame that they have sent
	landed  int                   // writes
}

type tardyConn struct {
	transport.Conn
	f    *tardy
	peer *tardyConn // once the first frame has come
	sent []letter   // from the first write on whose frame the peer has not given
	said bool       // a frame was sent or has come
	rest int        // Polls until EvClosed
}

// letter is a write, or a frame if data is nil.
type letter struct {
	key, off uint64
	data     []byte
}

func (f *tardy) conn(in transport.Conn) *tardyConn {
	c := f.conns[in]
	if c == nil && in != nil {
		c = &tardyConn{Conn: in, f: f}
		f.conns[in] = c
	}
	return c
}

func (f *tardy) Connect(ctx context.Context, at transport.Addr) (transport.Conn, error) {
	in, err := f.Fabric.Connect(ctx, at)
	if err != nil {
		return nil, err
	}
	f.all.mu.Lock()
	defer f.all.mu.Unlock()
	return f.conn(in), nil
}

func (f *tardy) Register(r mem.Region) (transport.Key, error) {
	k, err := f.Fabric.Register(r)
	f.all.mu.Lock()
	defer f.all.mu.Unlock()
	f.regions[k.ID] = r
	return k, err
}

func (f *tardy) Bind(k transport.Key, c transport.Conn) error {
	return f.Fabric.Bind(k, c.(*tardyConn).Conn)
}

func (f *tardy) Poll(ev []transport.Event) (given int, err error) {
	f.all.mu.Lock()
	defer f.all.mu.Unlock()
	n, err := f.Fabric.Poll(ev)
	for _, e := range ev[:n] {
		c := f.conn(e.Conn)
		if c != nil {
			e.Conn = c
		}
		if e.Kind == transport.EvFrame {
			c.came(e.Data)
		}
		if e.Kind == transport.EvClosed {
			c.rest = f.all.r.IntN(20)
			f.ended = append(f.ended, c)
			continue
		}
		ev[given] = e
		given++
	}
	for len(f.ended) > 0 && given < len(ev) {
		c := f.ended[0]
		if c.rest--; c.rest >= 0 {
			break
		}
		f.ended = f.ended[1:]
		c.land()
		ev[given] = transport.Event{Kind: transport.EvClosed, Conn: c}
		given++
	}
	return given, err
}

func (f *tardy) Arm() bool {
	f.all.mu.Lock()
	defer f.all.mu.Unlock()
	return f.Fabric.Arm() || len(f.ended) > 0
}

func (c *tardyConn) Post(ops []transport.Op) (int, error) {
	c.f.all.mu.Lock()
	defer c.f.all.mu.Unlock()
	n, err := c.Conn.Post(ops)
	for _, op := range ops[:n] {
		l := letter{key: op.Key.ID, off: op.Off}
		for _, s := range op.Src {
			l.data = append(l.data, s.Bytes()...)
		}
		if op.Kind == transport.OpFrame && !c.said {
			c.said = true
			c.f.all.greeted[string(op.Frame)] = c
		}
		c.sent = append(c.sent, l)
	}
	return n, err
}

// came takes that a frame was given.
func (c *tardyConn) came(data []byte) {
	if p := c.f.all.greeted[string(data)]; !c.said && p != nil {
		c.peer, p.peer = p, c
	}
	c.said = true
	for at, l := range c.peer.sent {
		if l.data == nil {
			c.peer.sent = c.peer.sent[at+1:]
			return
		}
	}
}

func (c *tardyConn) land() {
	if c.peer == nil {
		return
	}
	for _, l := range c.peer.sent {
		if l.data != nil {
			c.f.all.landed++
			copy(c.f.regions[l.key].Span().Bytes()[l.off:], l.data)
		}
	}
}

// TestLateWrites loses NICs at random times. Writes land until the last moment, and a side looks whether a slot is written
// after its frame was given.
func TestLateWrites(t *testing.T) {
	landed := 0
	for _, seed := range seeds() {
		for members := 2; members <= 3; members++ {
			t.Run(fmt.Sprintf("seed %d/%d members", seed, members), func(t *testing.T) {
				all := &late{r: rand.New(rand.NewPCG(seed, 4)), greeted: map[string]*tardyConn{}}
				d := &duo{t: t, r: rand.New(rand.NewPCG(seed, 1)), bad: map[string]*faults.Fabric{}, inner: func(f transport.Fabric) transport.Fabric {
					return &tardy{Fabric: f, all: all, conns: map[transport.Conn]*tardyConn{}, regions: map[uint64]mem.Region{}}
				}}
				for range members {
					d.nets = append(d.nets, inproc.New())
				}
				d.a, d.b = d.side("a", seed, true, quick), d.side("b", seed+100, true, quick)
				d.connect(members)
				ch := chaos{d: d, state: make([]int, members)}
				d.traffic(200, ch.step)
				d.heals(members)
				d.traffic(20, func() {})
				landed += all.landed
			})
		}
	}
	require.Greater(t, landed, len(seeds()))
	t.Logf("%d writes have landed late", landed)
}
