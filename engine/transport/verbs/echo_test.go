package verbs

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	rdma "fserver/cshim/verbs"
	"fserver/cshim/verbs/fakeverbs"
	"fserver/engine/mem"
	"fserver/engine/transport"
)

// TestEcho times one write and one frame each way, over two Fabrics that one goroutine polls in
// turn, beside the same requests over bare queue pairs of the same devices. It reports times and
// asserts the bytes alone.
func TestEcho(t *testing.T) {
	rounds := map[int]int{4096: 200, 1 << 20: 20}
	if testing.Short() {
		rounds = map[int]int{4096: 20}
	}
	w := &two{t: t}
	lib := library(t)
	for i := range w.f {
		w.down[i] = map[transport.Conn]error{}
		w.f[i] = w.open(Options{Library: lib, Device: fakeverbs.Devices()[i]})
	}
	for _, size := range []int{4096, 1 << 20} {
		if rounds[size] == 0 {
			continue
		}
		a, b := w.pair()
		ours := w.echoOver(a, b, size, rounds[size])
		bare := w.echoBare(size, rounds[size])
		t.Logf("%d bytes each way: %v, bare queue pairs %v (medians of %d): %.2f times; to register as much and let go of it takes %v",
			size, ours, bare, rounds[size], float64(ours)/float64(bare), w.registering(size, rounds[size]))
		a.Close()
	}
}

func median(d []time.Duration) time.Duration {
	slices.Sort(d)
	return d[len(d)/2]
}

// registering is what it costs to register a source for one write.
func (w *two) registering(size, rounds int) time.Duration {
	m := w.memory(uint64(size))
	clear(m.Span().Bytes()) // its pages are there
	var times []time.Duration
	for range rounds {
		start := time.Now()
		r, err := w.f[0].dev.Register(uint64(m.Addr), m.Len, 0)
		require.NoError(w.t, err)
		require.NoError(w.t, r.Deregister())
		times = append(times, time.Since(start))
	}
	return median(times)
}

func (w *two) echoOver(a, b *Conn, size, rounds int) time.Duration {
	var keys [2]transport.Key
	var src, dst [2]mem.Region
	for i := range keys {
		var err error
		src[i], dst[i] = w.memory(uint64(size)), w.memory(uint64(size))
		keys[i], err = w.f[i].Register(dst[i])
		require.NoError(w.t, err)
		_, err = w.f[i].Register(src[i])
		require.NoError(w.t, err)
	}
	go1 := func(c *Conn, i int) {
		ops := []transport.Op{
			{Kind: transport.OpWrite, Key: keys[1-i], Src: []mem.Span{src[i].Span()}},
			{Kind: transport.OpFrame, Frame: make([]byte, 64)},
		}
		for len(ops) > 0 {
			n, err := c.Post(ops)
			require.NoError(w.t, err)
			ops = ops[n:]
		}
		n := len(w.frames[1-i])
		for end := time.Now().Add(20 * time.Second); len(w.frames[1-i]) == n; w.poll() {
			require.True(w.t, time.Now().Before(end))
		}
	}
	var times []time.Duration
	for i := range rounds {
		src[0].Span().Bytes()[0], src[1].Span().Bytes()[size-1] = byte(i+1), byte(i+2)
		start := time.Now()
		go1(a, 0)
		go1(b, 1)
		times = append(times, time.Since(start))
		require.Equal(w.t, byte(i+1), dst[1].Span().Bytes()[0])
		require.Equal(w.t, byte(i+2), dst[0].Span().Bytes()[size-1])
	}
	return median(times)
}

// bareEnd is one side of a pair of queue pairs without a Fabric.
type bareEnd struct {
	cq  *rdma.CQ
	qp  *rdma.QP
	mr  rdma.Region
	mem mem.Region
	f   *Fabric
}

func (w *two) bareEnds(size int) (e [2]bareEnd) {
	for i := range e {
		f := w.f[i]
		m := w.memory(uint64(size) + 128)
		cq, err := f.dev.NewCQ(64)
		require.NoError(w.t, err)
		qp, err := f.dev.NewQP(cq, rdma.Room{Send: 16, Recv: 16, Port: 1})
		require.NoError(w.t, err)
		mr, err := f.dev.Register(uint64(m.Addr), m.Len, rdma.LocalWrite|rdma.RemoteWrite)
		require.NoError(w.t, err)
		e[i] = bareEnd{cq, qp, mr, m, f}
	}
	for i := range e {
		p := &e[1-i]
		require.NoError(w.t, e[i].qp.Connect(rdma.Path{
			GID: p.f.at.gid().Raw, QP: p.qp.Number, GIDIndex: e[i].f.at.gid().Index, MTU: p.f.at.port.MTU, Global: true, Port: 1, Timeout: 16, Retries: 6, NotReady: 7,
		}))
	}
	return e
}

// echoBare does it without a Fabric: memory is registered once, and nothing is copied.
func (w *two) echoBare(size, rounds int) time.Duration {
	e := w.bareEnds(size)
	defer func() {
		for i := range e {
			require.NoError(w.t, e[i].qp.Destroy())
			require.NoError(w.t, e[i].cq.Destroy())
			require.NoError(w.t, e[i].mr.Deregister())
		}
	}()
	var found [8]rdma.Completion
	oneWay := func(from, to *bareEnd) {
		_, err := to.qp.PostRecv([]rdma.Slot{{ID: recvMark, To: rdma.Piece{Address: uint64(to.mem.Addr) + uint64(size) + 64, Len: 64, LKey: to.mr.LKey}}})
		require.NoError(w.t, err)
		_, err = from.qp.PostSend([]rdma.Request{
			{
				Remote: uint64(to.mem.Addr), RKey: to.mr.RKey, Op: rdma.Write,
				From: rdma.Piece{Address: uint64(from.mem.Addr), Len: uint32(size), LKey: from.mr.LKey},
			}, {
				Op: rdma.Send, Flags: rdma.Signaled,
				From: rdma.Piece{Address: uint64(from.mem.Addr) + uint64(size), Len: 64, LKey: from.mr.LKey},
			},
		})
		require.NoError(w.t, err)
		for got := 0; got == 0; {
			_, err = from.cq.Poll(found[:])
			require.NoError(w.t, err)
			n, err := to.cq.Poll(found[:])
			require.NoError(w.t, err)
			for _, c := range found[:n] {
				require.Equal(w.t, rdma.Success, c.Status)
				if c.ID&recvMark != 0 {
					got++
				}
			}
		}
	}
	var times []time.Duration
	for range rounds {
		start := time.Now()
		oneWay(&e[0], &e[1])
		oneWay(&e[1], &e[0])
		times = append(times, time.Since(start))
	}
	return median(times)
}
