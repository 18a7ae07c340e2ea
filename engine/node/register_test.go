package node

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"fserver/engine/conf"
	"fserver/engine/exchange"
	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/inproc"
)

// slow is a Fabric whose calls about memory block, or fail, when a test says so.
type slow struct {
	*inproc.Fabric
	register atomic.Pointer[hold] // of the next call
	freed    atomic.Pointer[hold] // of all EvFreeds
	kept     []transport.Event    // EvFreeds that are held
	ended    atomic.Int64         // calls of Deregister
}

// hold keeps a call until let.
type hold struct {
	began, let chan struct{}
	err        error // of the call
}

func newHold(err error) *hold { return &hold{make(chan struct{}), make(chan struct{}), err} }

func (h *hold) wait() error {
	if h == nil {
		return nil
	}
	close(h.began)
	<-h.let
	return h.err
}

// held waits until a call is inside.
func (h *hold) held(t *testing.T) {
	t.Helper()
	select {
	case <-h.began:
	case <-time.After(10 * time.Second):
		require.Fail(t, "nobody has made the call")
	}
}

func (f *slow) Register(r mem.Region) (transport.Key, error) {
	if err := f.register.Swap(nil).wait(); err != nil {
		return transport.Key{}, err
	}
	return f.Fabric.Register(r)
}

func (f *slow) Deregister(k transport.Key) {
	f.ended.Add(1)
	f.Fabric.Deregister(k)
}

func (f *slow) Poll(ev []transport.Event) (n int, err error) {
	h := f.freed.Load()
	found, err := f.Fabric.Poll(ev)
	for _, e := range ev[:found] {
		if e.Kind == transport.EvFreed && h != nil {
			if f.kept = append(f.kept, e); len(f.kept) == 1 {
				close(h.began)
			}
			continue
		}
		ev[n] = e
		n++
	}
	for ; h == nil && len(f.kept) > 0 && n < len(ev); n++ {
		ev[n], f.kept = f.kept[0], f.kept[1:]
	}
	return n, err
}

// free lets the EvFreeds go, and wakes who sleeps.
func (f *slow) free(t *testing.T) {
	t.Helper()
	f.freed.Store(nil)
	k, err := f.Fabric.Register(mem.Region{Dev: mem.CPU})
	require.NoError(t, err)
	f.Fabric.Deregister(k)
}

// slowly is over with slow Fabrics. The function gives the last one of a node.
func slowly(net *inproc.Network) (Fabrics, func(n *Node) *slow) {
	var all sync.Map
	name := func(cfg *conf.Config) string { return fmt.Sprint(cfg.Role, cfg.Rank) }
	open := func(cfg *conf.Config, g transport.Gate, log *zap.Logger) ([]transport.Fabric, error) {
		list, err := over(net)(cfg, g, log)
		if err != nil {
			return nil, err
		}
		f := &slow{Fabric: list[0].(*inproc.Fabric)}
		all.Store(name(cfg), f)
		return []transport.Fabric{f}, nil
	}
	return open, func(n *Node) *slow {
		f, _ := all.Load(name(n.cfg))
		return f.(*slow)
	}
}

// someBatch is getBatch of as few as one worker.
func someBatch(t *testing.T, n *Node) request {
	t.Helper()
	var b batch
	require.NoError(t, retried(func() error { return n.GetBatch(&b, 1, 10*time.Second, true) }))
	require.Len(t, b.reqs, 1)
	return b.reqs[0]
}

// served makes a push_pull that its server answers with what was pushed.
func served(t *testing.T, w, s *Node, x, y exchange.Tensor) {
	t.Helper()
	id := pushPull(t, w, []exchange.Tensor{x}, []exchange.Tensor{y})
	respond(t, s, someBatch(t, s).handler, x)
	require.NoError(t, wait(w, id))
	require.Equal(t, x.Span.Bytes(), y.Span.Bytes())
}

// TestServerRegistersAside: while the server registers a receive buffer, only that push waits.
func TestServerRegistersAside(t *testing.T) {
	open, of := slowly(inproc.New())
	m := newMesh(t, open, shape{2, 1, 1})
	s, a, b := m.servers[0], m.workers[0], m.workers[1]
	x, y := tensor(t, 1, 4), tensor(t, 0, 4)
	served(t, a, s, x, y)
	served(t, b, s, x, y)
	h := newHold(nil)
	of(s).register.Store(h)
	late, big := tensor(t, 2, 700), tensor(t, 3, 5000)
	id := pushPull(t, a, []exchange.Tensor{late}, nil)
	h.held(t)
	for range 10 {
		served(t, b, s, x, y)
		served(t, b, s, big, tensor(t, 0, 5000)) // for which a buffer is registered meanwhile
	}
	require.ErrorIs(t, a.Wait(id, time.Millisecond, true), ErrAgain)
	close(h.let)
	respond(t, s, someBatch(t, s).handler)
	require.NoError(t, wait(a, id))
	m.stop()
}

// TestServerCannotRegister: the push that needs the buffer fails, and no other.
func TestServerCannotRegister(t *testing.T) {
	open, of := slowly(inproc.New())
	m := newMesh(t, open, shape{1, 1, 1})
	s, w := m.servers[0], m.workers[0]
	x, y := tensor(t, 1, 4), tensor(t, 0, 4)
	served(t, w, s, x, y)
	h := newHold(errors.New("no more pages can be pinned"))
	of(s).register.Store(h)
	close(h.let)
	buffers := m.buffers.Len()
	require.ErrorContains(t, wait(w, pushPull(t, w, []exchange.Tensor{tensor(t, 2, 9)}, nil)), "no more pages can be pinned")
	require.Eventually(t, func() bool { return m.buffers.Len() == buffers }, 10*time.Second, time.Millisecond, "the buffer that was made for it is dropped")
	served(t, w, s, x, y)
	served(t, w, s, tensor(t, 2, 9), tensor(t, 0, 9))
	m.stop()
}

// TestDeregisterAside: while memory of a worker that is lost cannot be let go of, the server serves
// the other, and the successor of the first.
func TestDeregisterAside(t *testing.T) {
	net := inproc.New()
	open, of := slowly(net)
	sh := shape{2, 1, 1}
	m := newMesh(t, open, sh)
	s, b := m.servers[0], m.workers[1]
	x, y := tensor(t, 1, 4), tensor(t, 0, 4)
	served(t, m.workers[0], s, x, y)
	served(t, b, s, x, y)
	h := newHold(nil)
	of(s).freed.Store(h)
	m.restart(net, sh, m.workers[0])
	h.held(t)
	for range 10 {
		served(t, b, s, x, y)
		served(t, m.workers[0], s, x, y)
	}
	of(s).free(t)
	m.stop()
}

// TestLostServerStillWrites: a push_pull that a lost server may still write to has failed, but its
// memory stays the engine's. What is registered anew waits for that, and nothing else does.
func TestLostServerStillWrites(t *testing.T) {
	net := inproc.New()
	open, of := slowly(net)
	sh := shape{1, 1, 1}
	m := newMesh(t, open, sh)
	w := m.workers[0]
	x, y := tensor(t, 1, 4), tensor(t, 0, 4)
	served(t, w, m.servers[0], x, y)
	id := pushPull(t, w, []exchange.Tensor{x}, []exchange.Tensor{y})
	someBatch(t, m.servers[0])
	h := newHold(nil)
	of(w).freed.Store(h)
	s := m.restart(net, sh, m.servers[0])
	h.held(t)
	var lost *LostError
	require.ErrorAs(t, wait(w, id), &lost)
	state, ok := w.table.State(id)
	require.True(t, ok)
	require.Equal(t, exchange.StateFailing, state)
	only := pushPull(t, w, []exchange.Tensor{x}, nil) // registers nothing
	respond(t, s, someBatch(t, s).handler)
	require.NoError(t, wait(w, only))
	of(w).free(t)
	require.Eventually(t, func() bool {
		state, _ = w.table.State(id)
		return state == exchange.StateFailed
	}, 10*time.Second, time.Millisecond)
	served(t, w, s, x, y)
	m.stop()
}

// TestRegisterInTheCall: a push_pull registers its new pull tensors before it is one. Others of
// its worker go on meanwhile; if it fails, the call raises and nothing else notices.
func TestRegisterInTheCall(t *testing.T) {
	open, of := slowly(inproc.New())
	m := newMesh(t, open, shape{1, 1, 1})
	s, w := m.servers[0], m.workers[0]
	x, y := tensor(t, 1, 4), tensor(t, 0, 4)
	served(t, w, s, x, y)
	for _, want := range []error{errors.New("no more pages can be pinned"), nil} {
		h := newHold(want)
		of(w).register.Store(h)
		other := tensor(t, 0, 4)
		id, called := make(chan uint64, 1), make(chan error, 1)
		go func() {
			p, err := w.BeginPushPull()
			if err == nil {
				err = errors.Join(p.AddPush(x), p.AddPull(other))
				id <- p.ID()
			}
			called <- errors.Join(err, w.PushPull(p))
		}()
		h.held(t)
		for range 10 {
			served(t, w, s, x, y)
		}
		close(h.let)
		err := <-called
		require.ErrorIs(t, err, want)
		if want == nil {
			respond(t, s, someBatch(t, s).handler, x)
			require.NoError(t, wait(w, <-id))
			require.Equal(t, x.Span.Bytes(), other.Span.Bytes())
		} else {
			require.ErrorContains(t, err, "pull tensor of key 0")
			<-id
		}
	}
	m.stop()
}

// TestForgetUnderWay: memory of a push_pull that is under way stays registered until that has ended,
// also when its allocation is forgotten.
func TestForgetUnderWay(t *testing.T) {
	open, of := slowly(inproc.New())
	m := newMesh(t, open, shape{1, 1, 1})
	s, w := m.servers[0], m.workers[0]
	x, y := tensor(t, 1, 4), tensor(t, 0, 4)
	fill(x, 7)
	id := pushPull(t, w, []exchange.Tensor{x}, []exchange.Tensor{y})
	r := someBatch(t, s)
	w.Forget(y.Alloc)
	w.Forget(x.Alloc)
	require.Zero(t, of(w).ended.Load())
	respond(t, s, r.handler, x)
	require.NoError(t, wait(w, id))
	require.Equal(t, x.Span.Bytes(), y.Span.Bytes())
	require.EqualValues(t, 1, of(w).ended.Load(), "before the push_pull is done")
	served(t, w, s, x, y)
	w.Forget(y.Alloc)
	require.Eventually(t, func() bool { return of(w).ended.Load() == 2 }, 10*time.Second, time.Millisecond)
	m.stop()
}

// TestCloseWhileRegistering: whoever waits gets ErrClosed at once, and Close waits for the call that
// is under way, of a worker and of a server.
func TestCloseWhileRegistering(t *testing.T) {
	for _, role := range []string{"worker", "server"} {
		t.Run(role, func(t *testing.T) {
			open, of := slowly(inproc.New())
			m := newMesh(t, open, shape{1, 1, 1})
			s, w := m.servers[0], m.workers[0]
			x, y := tensor(t, 1, 4), tensor(t, 0, 4)
			served(t, w, s, x, y)
			under := pushPull(t, w, []exchange.Tensor{x}, []exchange.Tensor{y})
			n, h, called := w, newHold(nil), make(chan error, 1)
			if role == "server" {
				n = s
			}
			of(n).register.Store(h)
			if role == "worker" {
				p, err := w.BeginPushPull()
				require.NoError(t, err)
				require.NoError(t, p.AddPull(tensor(t, 0, 4)))
				go func() { called <- w.PushPull(p) }()
			} else {
				pushPull(t, w, []exchange.Tensor{tensor(t, 2, 9)}, nil)
				called <- ErrClosed
			}
			h.held(t)
			closed := make(chan error, 1)
			go func() { closed <- n.Close() }()
			if role == "worker" {
				require.ErrorIs(t, wait(w, under), ErrClosed)
			}
			require.Eventually(t, n.driver.Stopped, 10*time.Second, time.Millisecond)
			require.Empty(t, closed)
			close(h.let)
			require.NoError(t, <-closed)
			require.ErrorIs(t, <-called, ErrClosed)
			if role == "server" {
				require.Equal(t, 1, m.buffers.Len(), "that which the application has seen")
			}
		})
	}
}
