package node

import (
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"fserver/engine/channel"
	"fserver/engine/conf"
	"fserver/engine/exchange"
	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/inproc"
	"fserver/engine/wire"
)

// proxied is one side of a channel that the engine carries, with the test in place of the stream.
type proxied struct {
	tb     testing.TB
	n      *Node
	handle uint64
	words  []atomic.Int64
	rows   []atomic.Int64 // of what goes out
	counts []atomic.Int64 // of what comes in, by tensor
	out    []Tensor
	in     []Tensor
}

// memory is n words of 64 bits outside the Go heap, which stay mapped.
func memory(tb testing.TB, n int) (mem.Region, []atomic.Int64) {
	r, err := mem.Map(uint64(max(n, 1)) * 8)
	require.NoError(tb, err)
	return r, channel.CountsAt(r.Addr, n)
}

// countsOf is a tensor over them.
func countsOf(r mem.Region, n int) Tensor {
	return Tensor{Span: mem.Span{Addr: r.Addr, Len: 8 * uint64(n)}, Dev: mem.CPU, Base: r, Alloc: uint64(r.Addr), DType: wire.AnyType, Dims: []int64{int64(n)}}
}

// carry opens a side of a channel: at a worker of tensors pushed to all servers and pulled from each,
// at a server of those from and to each worker.
func carry(tb testing.TB, n *Node, name string, peers int, out, in []Tensor, patience time.Duration) *proxied {
	p := &proxied{tb: tb, n: n, out: out, in: in}
	var err error
	p.handle, err = n.OpenChannel(name)
	require.NoError(tb, err)
	for i := range peers {
		require.NoError(tb, n.TellChannel(p.handle, i, ""))
	}
	words, w := memory(tb, channel.ProxyWords)
	p.words = w
	c := Carried{Words: words.Addr, Lands: true, Patience: patience}
	count := len(in)
	at, counts := memory(tb, count)
	p.counts = counts
	if n.worker != nil {
		rows, r := memory(tb, len(out))
		p.rows, c.Rows = r, rows.Addr
		c.Out = out
		for i := range peers {
			share := count / peers
			c.In = append(c.In, in[i*share:(i+1)*share]...)
			if share != 0 {
				own := mem.Region{Addr: at.Addr + uintptr(8*i*share), Len: 8 * uint64(share), Dev: mem.CPU}
				c.In = append(c.In, countsOf(own, share))
			}
		}
	} else {
		c.In, c.Counts = in, at.Addr
		share := len(out) / peers
		rows, r := memory(tb, len(out))
		p.rows = r
		for i := range peers {
			c.Out = append(c.Out, out[i*share:(i+1)*share]...)
			if share != 0 {
				own := mem.Region{Addr: rows.Addr + uintptr(8*i*share), Len: 8 * uint64(share), Dev: mem.CPU}
				c.Out = append(c.Out, countsOf(own, share))
			}
		}
	}
	for i := range p.rows {
		p.rows[i].Store(out[i].Dims[0])
	}
	require.NoError(tb, n.CarryChannel(p.handle, c))
	return p
}

// ring is what the stream does when it has filled message i, from 1.
func (p *proxied) ring(i int) { p.words[channel.WordRung].Store(int64(i)) }

// done waits until message i is through, as a stream does.
func (p *proxied) done(i int) {
	p.words[channel.WordAsked].Store(int64(i))
	for looks := 0; p.words[channel.WordDone].Load() < int64(i); looks++ {
		if looks < 1000 {
			runtime.Gosched()
			continue
		}
		time.Sleep(10 * time.Microsecond) // the others need the core
		if looks > 2_000_000 {
			require.Fail(p.tb, "a stream waits for ever", "for message %d, and %d are done", i, p.words[channel.WordDone].Load())
		}
	}
}

// ended says whether streams do not wait any more.
func (p *proxied) ended() bool { return p.words[channel.WordDone].Load() > 1<<62 }

func (p *proxied) over() bool { return p.words[channel.WordOver].Load() == 1 }

func (p *proxied) close() { require.NoError(p.tb, p.n.CloseChannel(p.handle, "", -1)) }

func (p *proxied) state() error { return p.n.ChannelState(p.handle, 0) }

func eventually(t *testing.T, met func() bool) {
	t.Helper()
	require.Eventually(t, met, 20*time.Second, time.Millisecond)
}

// carriedKeys gives each channel keys of its own.
var carriedKeys atomic.Uint64

// carriedPair is a channel of one worker and one server, of rows of 8 bytes.
func carriedPair(tb testing.TB, m *mesh, name string, rows int, patience time.Duration) (w, s *proxied) {
	key := carriedKeys.Add(2)
	one := func(key uint64) []Tensor { return []Tensor{tensor(tb, key, rows)} }
	w = carry(tb, m.workers[0], name, 1, one(key), one(key+1), patience)
	s = carry(tb, m.servers[0], name, 1, one(key+1), one(key), patience)
	return w, s
}

// overTwo is openFabrics for two interfaces, which are the same.
func overTwo(cfg *conf.Config, g transport.Gate, log *zap.Logger) ([]transport.Fabric, error) {
	list, err := openFabrics(cfg, g, log)
	if err != nil || cfg.Role == conf.Scheduler {
		return list, err
	}
	f, err := openRails(cfg, g, log, []rail{{name: "lo", host: "127.0.0.1"}, {name: "lo", host: "127.0.0.1"}})
	return append([]transport.Fabric{f}, list...), err
}

const longest = 20 * time.Second

func TestProxies(t *testing.T) { eachWay(t, proxiesOf) }

// TestProxiesOverRails: the same over two interfaces, and with frames that are dropped and sent again.
func TestProxiesOverRails(t *testing.T) {
	exchangeMessages(t, newMesh(t, overTwo, shape{2, 2, 1}, "FSERVER_TRANSPORT=tcp"))
	exchangeMessages(t, newMesh(t, openFabrics, shape{2, 2, 1}, "FSERVER_TRANSPORT=tcp", "PS_DROP_MSG=10", "PS_RESEND=1", "PS_RESEND_TIMEOUT=5"))
}

func proxiesOf(t *testing.T, way ...string) {
	exchangeMessages(t, newMesh(t, openFabrics, shape{2, 2, 1}, way...))
}

// exchangeMessages between two workers and two servers on two channels at a time, beside push_pulls: in
// order, each once, with rows, and nothing before its bytes.
func exchangeMessages(t *testing.T, m *mesh) {
	const rows, turns = 1000, 60
	names := []string{"a", "b"}
	end := make(chan bool, 8)
	var streams []func() // they begin when all sides are open, as a channel's have to
	run := func(p *proxied, body func(p *proxied, i int)) {
		streams = append(streams, func() {
			for i := 1; i <= turns; i++ {
				body(p, i)
			}
			end <- true
		})
	}
	value := func(who, i int) byte { return byte(17*who + 5*i) }
	var sides []*proxied
	for c, name := range names {
		key := uint64(10 * c)
		for who, n := range m.workers {
			p := carry(t, n, name, 2, []Tensor{tensor(t, key+1, rows)}, []Tensor{tensor(t, key+2, rows), tensor(t, key+2, rows)}, longest)
			sides = append(sides, p)
			run(p, func(p *proxied, i int) {
				fill(p.out[0], value(who, i))
				p.rows[0].Store(int64(i * rows / turns))
				p.ring(i)
				p.done(i)
				for k := range 2 {
					b := p.in[k].Span.Bytes()
					if b[0] != value(who, i)+1+byte(k) || b[len(b)-1] != b[0]+byte(len(b)-1) || p.counts[k].Load() != int64(i) {
						t.Errorf("worker %d, message %d: %d rows of %d from server %d", who, i, p.counts[k].Load(), b[0], k)
					}
				}
			})
		}
		for who, n := range m.servers {
			p := carry(t, n, name, 2, []Tensor{tensor(t, key+2, rows), tensor(t, key+2, rows)}, []Tensor{tensor(t, key+1, rows), tensor(t, key+1, rows)}, longest)
			sides = append(sides, p)
			run(p, func(p *proxied, i int) {
				p.done(i)
				for k := range 2 {
					b, n := p.in[k].Span.Bytes(), i*rows/turns
					if b[0] != value(k, i) || b[8*n-1] != b[0]+byte(8*n-1) || p.counts[k].Load() != int64(n) {
						t.Errorf("server %d, message %d: %d rows of %d from worker %d", who, i, p.counts[k].Load(), b[0], k)
					}
					fill(p.out[k], value(k, i)+1+byte(who))
					p.rows[k].Store(int64(i))
				}
				p.ring(i)
			})
		}
	}
	for _, stream := range streams {
		go stream()
	}
	for range turns {
		var ids []uint64
		for _, w := range m.workers {
			ids = append(ids, pushPull(t, w, []Tensor{tensor(t, 5, 3)}, nil))
		}
		for _, s := range m.servers {
			b, err := getBatch(s)
			require.NoError(t, err)
			for _, r := range b.reqs {
				respond(t, s, r.handler)
			}
		}
		for i, id := range ids {
			require.NoError(t, wait(m.workers[i], id))
		}
	}
	for range sides {
		<-end
	}
	for _, p := range sides {
		require.NoError(t, p.state())
		require.EqualValues(t, turns, p.words[channel.WordSent].Load())
	}
	for _, p := range sides {
		p.close()
	}
	for _, p := range sides {
		eventually(t, p.over)
		require.True(t, p.ended())
	}
	m.stop()
}

// TestProxyWordRunsAhead: a stream that is messages ahead of its peer changes nothing, and a message is
// only sent when its word says so. One side has the permission to send alone.
func TestProxyWordRunsAhead(t *testing.T) {
	m := newMesh(t, openFabrics, shape{1, 1, 1})
	w := carry(t, m.workers[0], "a", 1, []Tensor{tensor(t, 1, 100)}, nil, longest)
	s := carry(t, m.servers[0], "a", 1, nil, []Tensor{tensor(t, 1, 100)}, longest)
	w.ring(50) // of the same bytes
	for i := 1; i <= 50; i++ {
		s.done(i)
		if i == 25 {
			time.Sleep(5 * time.Millisecond)
			require.EqualValues(t, 25, s.words[channel.WordDone].Load(), "the memory is the stream's until it has rung")
			require.EqualValues(t, 24, w.words[channel.WordDone].Load(), "and the worker's until then")
		}
		s.ring(i)
	}
	w.done(50)
	time.Sleep(5 * time.Millisecond)
	require.EqualValues(t, 50, s.words[channel.WordDone].Load())

	back := carry(t, m.servers[0], "b", 1, []Tensor{tensor(t, 2, 100)}, nil, longest)
	to := carry(t, m.workers[0], "b", 1, nil, []Tensor{tensor(t, 2, 100)}, longest)
	for i := range 20 {
		fill(back.out[0], byte(i))
		back.ring(i + 1)
		time.Sleep(100 * time.Microsecond)
		require.EqualValues(t, i, back.words[channel.WordDone].Load(), "without permission")
		to.ring(i + 1)
		to.done(i + 1)
		require.EqualValues(t, i, to.in[0].Span.Bytes()[0])
		back.done(i + 1)
	}
	for _, p := range []*proxied{w, s, back, to} {
		require.NoError(t, p.state())
	}
	for _, p := range []*proxied{w, s, back, to} {
		p.close()
	}
	m.stop()
}

// TestProxyLargeMessages are copied in pieces at the server.
func TestProxyLargeMessages(t *testing.T) {
	m := newMesh(t, openFabrics, shape{1, 1, 1})
	w, s := carriedPair(t, m, "a", 700_000, longest)
	for i := 1; i <= 3; i++ {
		fill(w.out[0], byte(i))
		w.ring(i)
		s.done(i)
		require.Equal(t, w.out[0].Span.Bytes(), s.in[0].Span.Bytes())
		fill(s.out[0], byte(i+9))
		s.ring(i)
		w.done(i)
		require.Equal(t, s.out[0].Span.Bytes(), w.in[0].Span.Bytes())
	}
	m.stop()
}

// TestProxyCloses: whichever side closes while the other waits, the other's stream goes on, and its
// calls say why. What was sent before still arrives.
func TestProxyCloses(t *testing.T) {
	for _, who := range []string{"worker", "server"} {
		t.Run(who, func(t *testing.T) {
			m := newMesh(t, openFabrics, shape{1, 1, 1})
			w, s := carriedPair(t, m, "a", 10, longest)
			for _, p := range []*proxied{w, s} {
				textOf(t, p.n, p.handle, 0)
			}
			closes, stays := s, w
			if who == "worker" {
				closes, stays = w, s
			}
			fill(w.out[0], 7)
			w.ring(1)
			eventually(t, func() bool { return w.words[channel.WordSent].Load() == 1 })
			closes.close()
			if who == "worker" {
				s.done(1)
				require.EqualValues(t, 7, s.in[0].Span.Bytes()[0])
				s.ring(1)
			}
			eventually(t, stays.ended)
			require.True(t, isOver(stays.state()), "%v", stays.state())
			require.ErrorContains(t, stays.state(), "closed its side")
			require.True(t, closes.ended())
			stays.close()
			eventually(t, closes.over)
			eventually(t, stays.over)
			m.stop()
		})
	}
}

// TestProxyClosesBehindItsMessage: both sides close while the receive buffers of the worker's first message are on their way. Its
// write does not come to memory that the server has let go of, which would end the connection.
func TestProxyClosesBehindItsMessage(t *testing.T) {
	eachWay(t, func(t *testing.T, way ...string) {
		var left atomic.Int32
		var blind atomic.Bool
		m := newMesh(t, refusingFrames(conf.Worker, wire.TypeNeed, &left, &blind), shape{1, 1, 1}, way...)
		w, s := carriedPair(t, m, "a", 10, longest)
		for _, p := range []*proxied{w, s} {
			textOf(t, p.n, p.handle, 0)
		}
		before := firstLink(t, w.n)
		blind.Store(true) // the worker takes nothing
		w.ring(1)
		eventually(t, func() bool { return w.words[channel.WordSent].Load() == 1 })
		w.close()
		time.Sleep(100 * time.Millisecond) // what it has said of that, if anything, is there
		s.close()
		require.False(t, s.over(), "the worker may still write")
		blind.Store(false)
		eventually(t, w.over)
		eventually(t, s.over)
		require.NoError(t, echo(t, m.workers[0], m.servers, 1, closed()))
		require.Same(t, before, firstLink(t, w.n))

		again, _ := carriedPair(t, m, "a", 10, longest) // which is told of behind the end of the first
		require.NoError(t, again.state())
		m.stop()
	})
}

// firstLink is the connection to the first peer.
func firstLink(t *testing.T, n *Node) (l *link) {
	require.True(t, n.driver.Under(func() { l = n.peers[0].link }))
	return l
}

// TestProxyLosesItsPeer between a word and the arrival: streams go on, and the error is typed.
func TestProxyLosesItsPeer(t *testing.T) {
	for _, patient := range []string{"raise", "wait"} {
		for _, who := range []string{"worker", "server"} {
			t.Run(who+" "+patient, func(t *testing.T) {
				m := newMesh(t, openFabrics, shape{1, 1, 1}, "FSERVER_ON_PEER_LOST="+patient)
				w, s := carriedPair(t, m, "a", 10, longest)
				w.ring(1)
				s.done(1)
				dies, stays := s, w
				if who == "worker" {
					dies, stays = w, s
					s.ring(1)
					w.done(1)
				}
				require.NoError(t, dies.n.Close())
				require.True(t, dies.ended() && dies.over(), "nothing is touched after Close")
				eventually(t, stays.ended)
				var lost *LostError
				require.ErrorAs(t, stays.state(), &lost)
				require.NoError(t, retried(func() error { return stays.n.CloseChannel(stays.handle, "", longest) }))
				eventually(t, func() bool { return stays.over() || stays.n.Close() == nil })
			})
		}
	}
}

// TestProxyAfterARestart: whichever process comes back, both open another channel. What the old one had
// under way is not sent to it.
func TestProxyAfterARestart(t *testing.T) {
	for _, who := range []string{"worker", "server"} {
		t.Run(who, func(t *testing.T) {
			net, sh := inproc.New(), shape{1, 1, 1}
			patient := []string{"FSERVER_ON_PEER_LOST=wait"}
			m := newMesh(t, over(net), sh, patient...)
			for turn, name := range []string{"a", "b", "c"} {
				w, s := carriedPair(t, m, name, 10, longest)
				for i := 1; i <= 3; i++ {
					fill(w.out[0], byte(10*turn+i))
					w.ring(i)
					s.done(i)
					require.Equal(t, w.out[0].Span.Bytes(), s.in[0].Span.Bytes())
					s.ring(i)
					w.done(i)
				}
				w.ring(4)
				s.done(4)
				stays, old := w, m.servers[0]
				if who == "worker" {
					stays, old = s, m.workers[0]
				}
				m.restart(net, sh, old, patient...)
				m.meet()
				eventually(t, stays.ended)
				var lost *LostError
				require.ErrorAs(t, stays.state(), &lost)
				stays.close()
			}
			m.stop()
		})
	}
}

// TestProxyIsAttended: while a proxy runs, somebody looks at its words also when nobody calls, at last
// every millisecond.
func TestProxyIsAttended(t *testing.T) {
	m := newMesh(t, openFabrics, shape{1, 1, 1}, "FSERVER_PROGRESS=caller")
	w, s := carriedPair(t, m, "a", 10, longest)
	n := w.n
	require.Equal(t, 1, n.driver.State().Streams)
	time.Sleep(20 * time.Millisecond) // everybody sleeps
	w.ring(1)
	s.done(1)
	w.close()
	require.Zero(t, n.driver.State().Streams)
	s.close()
	m.stop()
}

// TestProxyTimeOut counts from when the stream waits, and ends the wait.
func TestProxyTimeOut(t *testing.T) {
	m := newMesh(t, openFabrics, shape{1, 1, 1})
	one := func(key uint64) []Tensor { return []Tensor{tensor(t, key, 10)} }
	w := carry(t, m.workers[0], "a", 1, one(1), one(2), 50*time.Millisecond)
	s := carry(t, m.servers[0], "a", 1, one(2), one(1), longest)
	w.ring(1)
	s.done(1)
	time.Sleep(150 * time.Millisecond)
	require.NoError(t, w.state(), "nobody waits")
	w.done(1) // for ever is not so long
	var late *channel.TimeoutError
	require.ErrorAs(t, w.state(), &late)
	require.ErrorContains(t, late, "timeout_ms=50,")
	require.NoError(t, s.state())
	require.False(t, w.over(), "the server may still write")
	w.close()
	s.close()
	eventually(t, w.over)
	eventually(t, s.over)
	m.stop()
}

// TestProxyRefusals of arguments that do not fit.
func TestProxyRefusals(t *testing.T) {
	m := newMesh(t, openFabrics, shape{1, 1, 1})
	w, s := carriedPair(t, m, "a", 10, longest)
	w.rows[0].Store(11)
	w.ring(1)
	w.done(1)
	require.ErrorContains(t, w.state(), "11 rows of tensor 0 are to be sent, but it has 10")
	var shape *exchange.ShapeError
	require.ErrorAs(t, w.state(), &shape)
	w.close()
	s.close()
	one, two := []Tensor{tensor(t, 1, 10)}, []Tensor{tensor(t, 1, 20)}
	w = carry(t, m.workers[0], "b", 1, two, nil, longest)
	s = carry(t, m.servers[0], "b", 1, nil, one, longest)
	w.ring(1)
	w.done(1)
	require.True(t, w.ended())
	require.ErrorContains(t, w.state(), "a push of 160 bytes for key 1 of worker 0 exceeds the 80 bytes of its tensor in channel \"b\"")
	w.close()
	s.close()
	one[0].Key, two[0].Key = 2, 3 // it does not land
	w = carry(t, m.workers[0], "b", 1, two, nil, longest)
	s = carry(t, m.servers[0], "b", 1, nil, one, longest)
	w.ring(1)
	s.done(1)
	require.True(t, s.ended())
	require.ErrorContains(t, s.state(), "worker 0 sent 160 bytes in 20 rows")
	require.ErrorIs(t, m.workers[0].CarryChannel(99, Carried{}), errClosed)
	s.close()
	require.ErrorIs(t, s.n.CarryChannel(s.handle, Carried{}), errClosed)
	w.close()
	m.stop()
}
