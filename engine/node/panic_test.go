package node

import (
	"context"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"fserver/engine/conf"
	"fserver/engine/exchange"
	"fserver/engine/gpu"
	"fserver/engine/gpu/fakegpu"
	"fserver/engine/transport"
	"fserver/engine/transport/all"
	"fserver/engine/transport/tcp"
)

// mined is a Fabric in which one call panics: the first of its kind below a function
// that the test names.
type mined struct {
	*tcp.Fabric
	mine   atomic.Pointer[mine]
	broken atomic.Pointer[transport.PanicError]
	mu     sync.Mutex
	conns  map[transport.Conn]*minedConn
}

type mine struct{ call, below string }

type minedConn struct {
	transport.Conn
	f *mined
}

const bang = "a fault of the test's own"

func (f *mined) step(call string) {
	m := f.mine.Load()
	if m == nil || m.call != call || !runs(m.below) || !f.mine.CompareAndSwap(m, nil) {
		return
	}
	panic(bang)
}

// runs reports whether a function with that end of its name is running in this goroutine.
func runs(below string) bool {
	var pcs [64]uintptr
	frames := runtime.CallersFrames(pcs[:runtime.Callers(2, pcs[:])])
	for more := true; more; {
		var f runtime.Frame
		if f, more = frames.Next(); strings.HasSuffix(f.Function, below) {
			return true
		}
	}
	return false
}

func (f *mined) Poll(ev []transport.Event) (int, error) {
	f.step("Poll")
	if e := f.broken.Load(); e != nil {
		return 0, e
	}
	k, err := f.Fabric.Poll(ev)
	f.mu.Lock()
	defer f.mu.Unlock()
	for i := range ev[:k] {
		if in := ev[i].Conn; ev[i].Kind == transport.EvAccept {
			f.conns[in] = &minedConn{in, f}
		}
		if c := f.conns[ev[i].Conn]; c != nil {
			ev[i].Conn = c
		}
	}
	return k, err
}

func (f *mined) Connect(ctx context.Context, to transport.Addr) (transport.Conn, error) {
	f.step("Connect")
	in, err := f.Fabric.Connect(ctx, to)
	if err != nil {
		return nil, err
	}
	c := &minedConn{in, f}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.conns[in] = c
	return c, nil
}

func (f *mined) Bind(k transport.Key, c transport.Conn) error {
	if m, ok := c.(*minedConn); ok {
		c = m.Conn
	}
	return f.Fabric.Bind(k, c)
}

func (f *mined) Arm() bool {
	f.step("Arm")
	return f.Fabric.Arm()
}

func (f *mined) Name() string {
	f.step("Name")
	return f.Fabric.Name()
}

func (f *mined) Close() error {
	err := f.Fabric.Close()
	f.step("Close")
	return err
}

func (c *minedConn) Peer() transport.Peer {
	c.f.step("Peer")
	return c.Conn.Peer()
}

func (c *minedConn) Post(ops []transport.Op) (int, error) {
	c.f.step("Post")
	return c.Conn.Post(ops)
}

// minefield is Fabrics whose nodes of a role are mined. lay is called before each such
// node starts.
func minefield(role conf.Role, lay func(*mined)) Fabrics {
	return func(cfg *conf.Config, g transport.Gate, log *zap.Logger) ([]transport.Fabric, error) {
		base, err := openBase(cfg, g, log)
		if err == nil && cfg.Role == role {
			f := &mined{Fabric: base.(*tcp.Fabric), conns: map[transport.Conn]*minedConn{}}
			lay(f)
			base = f
		}
		return []transport.Fabric{base}, err
	}
}

// guarded is what an export does with a call: it turns a panic into the error of the node.
func guarded(n *Node, call func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = n.Panicked(p)
		}
	}()
	return call()
}

// again is retried for a call of a node that may panic.
func again(n *Node, call func() error) error {
	return retried(func() error { return guarded(n, call) })
}

// endsIn checks that a node has ended in the panic of the test, below a function, and
// that it can be closed at once.
func endsIn(t *testing.T, n *Node, err error, below string) {
	t.Helper()
	var e *transport.PanicError
	require.ErrorAs(t, err, &e)
	require.Equal(t, bang, e.Value)
	require.Contains(t, err.Error(), below)
	require.Same(t, e, n.failed())
	begin := time.Now()
	require.NoError(t, n.Close())
	require.Less(t, time.Since(begin), 20*time.Second)
	require.ErrorIs(t, n.ready(true, "a call", ""), e, "later calls")
}

// TestPanicInGoroutine has each goroutine of a node panic, with the token and without.
// The node ends with an error that names the place, callers that wait get it, and the
// others lose no more than that node.
func TestPanicInGoroutine(t *testing.T) {
	for _, c := range []struct{ mode, call, below string }{
		{"caller", "Poll", "(*Driver).background"},
		{"caller", "Arm", "(*Driver).background"},
		{"thread", "Poll", "(*Driver).poller"},
		{"thread", "Arm", "(*Driver).poller"},
	} {
		t.Run(c.below+" "+c.call, func(t *testing.T) {
			var f *mined
			m := newMesh(t, minefield(conf.Worker, func(x *mined) { f = x }), shape{1, 1, 1}, "FSERVER_TRANSPORT=tcp", "FSERVER_PROGRESS="+c.mode)
			w, s := m.workers[0], m.servers[0]
			id := pushPull(t, w, []exchange.Tensor{tensor(t, 1, 9)}, []exchange.Tensor{tensor(t, 0, 9)})
			f.mine.Store(&mine{c.call, c.below})
			w.driver.Stir()
			require.Eventually(t, w.driver.Stopped, 10*time.Second, time.Millisecond)
			endsIn(t, w, wait(w, id), c.below)
			lostWithin(t, func() error {
				for {
					if _, err := getBatch(s); err != nil {
						return err
					}
				}
			}, "worker", 0)
		})
	}
}

// TestPanicWhileDialling has the goroutines that connect panic, with the token and
// without, in the bring-up and after.
func TestPanicWhileDialling(t *testing.T) {
	for _, c := range []struct{ call, below string }{
		{"Connect", "(*Node).join"},
		{"Post", "(*Node).meetScheduler"}, // with the token
		{"Connect", "(*Node).connect"},
		{"Name", "(*Node).connect"}, // with the token
	} {
		t.Run(c.below+" "+c.call, func(t *testing.T) {
			sh := shape{1, 1, 1}
			m := newCluster(t, minefield(conf.Worker, func(x *mined) { x.mine.Store(&mine{c.call, c.below}) }))
			m.scheduler = m.start(sh.settings("scheduler", 0, 0, "0"))
			_, port := splitPort(t, m.scheduler.Info().Address)
			m.start(sh.settings("server", 0, 0, port, "FSERVER_TRANSPORT=tcp"))
			w := m.start(sh.settings("worker", 0, 0, port, "FSERVER_TRANSPORT=tcp"))
			endsIn(t, w, again(w, func() error { return w.WaitReady(time.Second) }), c.below)
		})
	}
	for _, c := range []struct{ call, below string }{
		{"Connect", "(*Node).join"},
		{"Post", "(*Node).meetScheduler"}, // with the token
	} {
		t.Run(c.below+" "+c.call, func(t *testing.T) {
			var f *mined
			sh := shape{1, 1, 1}
			m := newMesh(t, minefield(conf.Worker, func(x *mined) { f = x }), sh, "FSERVER_TRANSPORT=tcp")
			w := m.workers[0]
			id := pushPull(t, w, []exchange.Tensor{tensor(t, 1, 9)}, nil)
			f.mine.Store(&mine{c.call, c.below})
			_, port := splitPort(t, m.scheduler.Info().Address)
			require.NoError(t, m.scheduler.Close())
			m.start(sh.settings("scheduler", 0, 0, port))
			endsIn(t, w, wait(w, id), c.below)
		})
	}
}

// TestPanicInCall has each call that can drive or hold the token panic, while another
// caller waits: both get the error.
func TestPanicInCall(t *testing.T) {
	push := func(m *mesh) func() error {
		id := pushPull(m.tb, m.workers[0], []exchange.Tensor{tensor(m.tb, 1, 9)}, nil)
		return func() error { return m.workers[0].Wait(id, time.Second, true) }
	}
	barrier := func(n *Node) func() error {
		var seq uint64
		return func() (err error) {
			if seq == 0 {
				if seq, err = n.Barrier(everybody, 0); err != nil {
					return err
				}
			}
			return n.WaitBarrier(seq, time.Second)
		}
	}
	for _, c := range []struct {
		name        string
		call, below string
		start       func(m *mesh) func() error // of the worker, which is mined
	}{
		{"wait", "Poll", "(*Node).Wait", push},
		{"wait, asleep", "Arm", "(*Node).Wait", push},
		{"barrier", "Post", "(*Node).Barrier", func(m *mesh) func() error { return barrier(m.workers[0]) }},
		{"wait for a barrier", "Poll", "(*Node).WaitBarrier", func(m *mesh) func() error { return barrier(m.workers[0]) }},
		{"push_pull", "Post", "(*Worker).Drain", func(m *mesh) func() error {
			key := uint64(1)
			return func() error {
				key++                        // of which the server has to be asked first
				time.Sleep(time.Millisecond) // so that it has answered for the one before, most likely
				p, err := m.workers[0].BeginPushPull()
				if err == nil {
					require.NoError(m.tb, p.AddPush(tensor(m.tb, key, 9)))
					err = m.workers[0].PushPull(p)
				}
				if err == nil {
					err = ErrAgain // here or in the caller that waits
				}
				return err
			}
		}},
		{"links", "Peer", "(*Node).Describe", func(m *mesh) func() error {
			return func() error { _, err := m.workers[0].Describe(); return err }
		}},
		{"stop", "Post", "(*Node).Stop", func(m *mesh) func() error {
			return func() error { return m.workers[0].Stop(time.Second) }
		}},
		{"stop, waiting", "Poll", "(*Node).Stop", func(m *mesh) func() error {
			return func() error { return m.workers[0].Stop(time.Second) }
		}},
		{"channel", "Post", "(*Node).TellChannel", func(m *mesh) func() error {
			h, err := m.workers[0].OpenChannel("c")
			require.NoError(m.tb, err)
			return func() error { return m.workers[0].TellChannel(h, 0, "text") }
		}},
		{"close a channel", "Post", "(*Node).CloseChannel", func(m *mesh) func() error {
			h, err := m.workers[0].OpenChannel("c")
			require.NoError(m.tb, err)
			return func() error { return m.workers[0].CloseChannel(h, "", time.Second) }
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var f *mined
			m := newMesh(t, minefield(conf.Worker, func(x *mined) { f = x }), shape{1, 1, 1}, "FSERVER_TRANSPORT=tcp")
			w := m.workers[0]
			id := pushPull(t, w, []exchange.Tensor{tensor(t, 1, 9)}, nil)
			call := c.start(m)
			blocked := make(chan error, 1)
			go func() { blocked <- again(w, func() error { return w.Wait(id, time.Minute, true) }) }()
			require.Eventually(t, w.callerSleeps, 10*time.Second, time.Millisecond)
			f.mine.Store(&mine{c.call, c.below})
			err := again(w, call)
			endsIn(t, w, err, c.below)
			require.Equal(t, err, <-blocked)
			require.Equal(t, err, w.Wait(id, time.Second, true))
		})
	}
}

// boom is a sink that panics.
type boom struct{}

func (boom) Batch([]*exchange.Request) error { panic(bang) }

// TestPanicInServer has the calls of a server panic under the token.
func TestPanicInServer(t *testing.T) {
	for _, c := range []struct {
		name        string
		call, below string
		do          func(s *Node, handler uint64) error
	}{
		{"a batch", "", "boom.Batch", func(s *Node, _ uint64) error { return s.GetBatch(boom{}, 0, time.Second, true) }},
		{"get_batch", "Poll", "(*Node).GetBatch", func(s *Node, _ uint64) error {
			if err := s.GetBatch(&batch{}, 0, time.Second, true); err != nil {
				return err
			}
			return ErrAgain // the one that was sent before
		}},
		{"respond", "Post", "(*Node).Flush", func(s *Node, handler uint64) error {
			t, err := s.BeginAnswer()
			if err == nil {
				err = s.Respond(handler, t)
			}
			s.Flush()
			return err
		}},
		{"too many answers", "Poll", "(*Node).BeginAnswer", func(s *Node, _ uint64) error {
			_, err := s.BeginAnswer()
			for err == nil { // until there are as many as may be
				_, err = s.BeginAnswer()
			}
			return err
		}},
		{"a batch of a channel", "", "boom.Batch", func(s *Node, _ uint64) error { return s.TakeOn(1, boom{}, time.Second, true) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			var f *mined
			m := newMesh(t, minefield(conf.Server, func(x *mined) { f = x }), shape{1, 1, 1}, "FSERVER_TRANSPORT=tcp")
			s, w := m.servers[0], m.workers[0]
			x := tensor(t, 1, 9)
			id := pushPull(t, w, []exchange.Tensor{x}, nil)
			b, err := getBatch(s)
			require.NoError(t, err)
			pushPull(t, w, []exchange.Tensor{tensor(t, 2, 9)}, nil)
			_, err = s.OpenChannel("c") // is channel 1
			require.NoError(t, err)
			h, err := w.OpenChannel("c")
			require.NoError(t, err)
			require.NoError(t, w.TellChannel(h, 0, ""))
			on, err := w.BeginPushPull()
			require.NoError(t, err)
			require.NoError(t, on.AddPush(tensor(t, 3, 9)))
			require.NoError(t, w.PushPullOn(h, on))
			if c.call != "" {
				f.mine.Store(&mine{c.call, c.below})
			}
			endsIn(t, s, again(s, func() error { return c.do(s, b.reqs[0].handler) }), c.below)
			lostWithin(t, func() error { return wait(w, id) }, "server", 0)
		})
	}
}

// TestPanicInClose has a node panic while it is closed: all the rest is closed too.
func TestPanicInClose(t *testing.T) {
	m := newCluster(t, minefield(conf.Scheduler, func(f *mined) { f.mine.Store(&mine{"Close", "(*Node).Close"}) }))
	cfg, _, err := conf.Parse(shape{1, 1, 1}.settings("scheduler", 0, 0, "0"), all.Ways())
	require.NoError(t, err)
	n, err := open(cfg, logger(cfg), m.buffers, m.fabrics, nil)
	require.NoError(t, err)
	blocked := make(chan error, 1)
	go func() { blocked <- ready(n) }()
	require.ErrorContains(t, n.Close(), bang)
	require.ErrorIs(t, <-blocked, ErrClosed)
	require.ErrorContains(t, n.Free(), bang)
}

// TestPanicBesideGPU has what gives back memory of a GPU panic. It is the process's: all
// of its nodes on that GPU end.
func TestPanicBesideGPU(t *testing.T) {
	g := fakegpu.New()
	m := newGPUPair(t, "tcp", func(int) (gpu.Device, error) { return g, nil })
	w, s := m.workers[0], m.servers[0]
	id := pushPull(t, w, []exchange.Tensor{tensor(t, 1, 9)}, nil)
	gpu.LaterOf(w.cfg.GPU).Do(gpu.Rest, 0, func() { panic(bang) })
	for _, n := range []*Node{w, s} {
		require.Eventually(t, n.driver.Stopped, 10*time.Second, time.Millisecond)
	}
	endsIn(t, w, again(w, func() error { return w.Wait(id, time.Second, true) }), "TestPanicBesideGPU")
	endsIn(t, s, again(s, func() error { return s.GetBatch(&batch{}, 0, time.Second, true) }), "TestPanicBesideGPU")
	require.True(t, gpu.LaterOf(w.cfg.GPU).Wait(20*time.Second))
}

// TestPanicInFabric: a Fabric that says that a goroutine of its own has panicked ends the
// node like one of ours.
func TestPanicInFabric(t *testing.T) {
	var f *mined
	m := newMesh(t, minefield(conf.Worker, func(x *mined) { f = x }), shape{1, 1, 1}, "FSERVER_TRANSPORT=tcp")
	w := m.workers[0]
	id := pushPull(t, w, []exchange.Tensor{tensor(t, 1, 9)}, nil)
	f.broken.Store(&transport.PanicError{Value: bang, Stack: "\tat somewhere\n"})
	w.driver.Stir()
	endsIn(t, w, again(w, func() error { return w.Wait(id, time.Second, true) }), "somewhere")
}
