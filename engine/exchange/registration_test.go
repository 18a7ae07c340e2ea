package exchange

import (
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/mem"
	"fserver/engine/transport"
)

// TestKeysOfAnotherFabric: a server that comes back over another Fabric is given keys of that one,
// for what waits for it and for what comes.
func TestKeysOfAnotherFabric(t *testing.T) {
	p := newPair(t, 1)
	p.w.Patient = true
	out := bytesOf(t, 0, 8, 0)
	p.w.Lose(0, errGone)
	first, err := p.pushPull([]Tensor{bytesOf(t, 1, 8, 5)}, []Tensor{out})
	require.NoError(t, err)
	require.NoError(t, p.settle())
	old := p.wf
	p.wf = newFabric()
	p.succeed(0)
	for _, fill := range []byte{5, 6} {
		if fill == 6 {
			first, err = p.pushPull([]Tensor{bytesOf(t, 1, 8, 6)}, []Tensor{out})
			require.NoError(t, err)
		}
		require.NoError(t, p.settle())
		require.NoError(t, p.respond(0, p.take(0)[0], bytesOf(t, 0, 8, fill)))
		require.NoError(t, p.settle())
		require.Equal(t, StateDone, p.state(first))
		require.Equal(t, fill, out.Span.Bytes()[0])
		require.Len(t, p.wf.keys, 1)
	}
	p.w.Forget(out.Alloc)
	require.Empty(t, p.wf.keys)
	require.Empty(t, old.keys)
}

// TestInUse: memory that peers may write to is in use while a ticket names it, also one that has failed and that a server
// may still write for, and then not.
func TestInUse(t *testing.T) {
	p := newPair(t, 2)
	out := []Tensor{bytesOf(t, 0, 8, 0), bytesOf(t, 0, 8, 0)}
	uses := func() (n int32) {
		for _, r := range p.wf.keys {
			n += r.InUse.Load()
		}
		return n
	}
	for range 2 { // with keys that are new, and with those that are kept
		_, err := p.pushPull([]Tensor{bytesOf(t, 1, 8, 5)}, out)
		require.NoError(t, err)
		require.NoError(t, p.settle())
		for i := range p.servers {
			require.Equal(t, int32(2), uses())
			require.NoError(t, p.respond(i, p.take(i)[0], bytesOf(t, 0, 8, 7)))
			require.NoError(t, p.settle())
		}
		require.Zero(t, uses())
		require.Len(t, p.wf.keys, 2)
	}
	id, err := p.pushPull([]Tensor{bytesOf(t, 1, 8, 5)}, out)
	require.NoError(t, err)
	require.NoError(t, p.settle())
	p.w.Lose(1, errGone)
	require.Equal(t, StateFailing, p.state(id))
	require.Equal(t, int32(2), uses())
	require.NoError(t, p.respond(0, p.take(0)[0], bytesOf(t, 0, 8, 7)))
	require.NoError(t, p.settle())
	require.Equal(t, StateFailed, p.state(id))
	require.Zero(t, uses())
}

// TestInUseOfAFailedCall: what a call names that fails is out of use when the call returns, and it is the owner who makes it so.
func TestInUseOfAFailedCall(t *testing.T) {
	p := sources(t, 2)
	out, answer := []Tensor{bytesOf(t, 0, 8, 0), bytesOf(t, 0, 8, 0)}, bytesOf(t, 0, 8, 7)
	id, err := p.pushPull([]Tensor{bytesOf(t, 1, 8, 5)}, out)
	require.NoError(t, err)
	require.NoError(t, p.settle())
	asked := []*Request{p.take(0)[0], p.take(1)[0]}
	for i, r := range asked {
		require.NoError(t, p.respond(i, r, answer))
	}
	require.NoError(t, p.settle())
	require.Equal(t, StateDone, p.state(id))

	uses := func(f *fakeFabric) (n int32) {
		for _, r := range f.keys {
			if r.InUse != nil { // else it is a receive buffer
				n += r.InUse.Load()
			}
		}
		return n
	}
	calls := 0
	owned := func(f *fakeFabric, before int32) func(func()) {
		return func(do func()) {
			calls++
			require.Equal(t, before, uses(f))
			do()
			require.Zero(t, uses(f))
		}
	}
	none := 0
	p.wf.room, p.w.Owned = &none, owned(p.wf, 2)
	_, err = p.pushPull([]Tensor{bytesOf(t, 2, 8, 5)}, out) // which cannot be registered
	require.ErrorContains(t, err, "no room")
	require.Equal(t, 1, calls)
	p.wf.room, p.w.Owned = nil, owned(p.wf, 3)
	_, err = p.w.Carry("channel", []Tensor{bytesOf(t, 3, 8, 5)}, out, false, nil)
	require.NoError(t, err)
	require.Equal(t, 2, calls)
	p.servers[0].Owned = owned(p.sf[0], 1)
	require.Error(t, p.respond(0, asked[0], answer), "it is answered")
	require.Equal(t, 3, calls)
}

// TestKeyThatCannotBeRenewed fails the push_pull that has waited for the successor, and no other.
func TestKeyThatCannotBeRenewed(t *testing.T) {
	p := newPair(t, 2)
	p.w.Patient = true
	out := []Tensor{bytesOf(t, 0, 8, 0), bytesOf(t, 0, 8, 0)}
	id, err := p.pushPull([]Tensor{bytesOf(t, 1, 8, 5)}, out)
	require.NoError(t, err)
	require.NoError(t, p.settle())
	p.w.Lose(1, errGone)
	none := 0
	p.wf.room = &none
	p.succeed(1)
	require.NoError(t, p.settle())
	require.Equal(t, StateFailed, p.state(id), "server 0 has given it back")
	require.ErrorContains(t, p.w.Result(id), "no room")
	require.Nil(t, p.take(0))
	p.wf.room = nil
	id, err = p.pushPull([]Tensor{bytesOf(t, 1, 8, 5)}, out)
	require.NoError(t, err)
	require.NoError(t, p.settle())
	for i := range p.servers {
		require.NoError(t, p.respond(i, p.take(i)[0], bytesOf(t, 0, 8, 7)))
	}
	require.NoError(t, p.settle())
	require.Equal(t, StateDone, p.state(id))
}

// meeting is a Fabric whose first two calls of Register wait for each other.
type meeting struct {
	*fakeFabric
	mu    sync.Mutex
	calls int
	both  chan struct{}
}

func (f *meeting) Register(r mem.Region) (transport.Key, error) {
	f.mu.Lock()
	if f.calls++; f.calls == 2 {
		close(f.both)
	}
	f.mu.Unlock()
	<-f.both
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.fakeFabric.Register(r)
}

// TestTwoRegisterTheSame: of two threads that register one allocation at the same time, one has
// its key kept, and that of the other ends with its push_pull.
func TestTwoRegisterTheSame(t *testing.T) {
	p := newPair(t, 1)
	f := &meeting{fakeFabric: p.wf, both: make(chan struct{})}
	p.meet(0, f)
	p.as = f
	out := bytesOf(t, 0, 8, 0)
	var tickets [2]*Ticket
	var ids [2]uint64
	for i := range tickets {
		tk, err := p.w.Begin()
		require.NoError(t, err)
		require.NoError(t, tk.AddPull(out))
		tickets[i], ids[i] = tk, tk.ID()
	}
	errs := make(chan error)
	for _, tk := range tickets {
		go func() { errs <- p.w.Submit(tk) }()
	}
	for range tickets {
		require.NoError(t, <-errs)
	}
	require.NoError(t, p.settle())
	require.Len(t, p.wf.keys, 2)
	for range ids {
		require.NoError(t, p.respond(0, p.take(0)[0], bytesOf(t, 0, 8, 3)))
		require.NoError(t, p.settle())
	}
	for _, id := range ids {
		require.Equal(t, StateDone, p.state(id))
	}
	require.Len(t, p.wf.keys, 1)
}

// sources is a pair whose Fabrics send what is registered.
func sources(t *testing.T, servers int) *pair {
	p := newPair(t, servers)
	for i := range p.servers {
		p.wf.local, p.sf[i].local = true, true
		p.w.keys, p.servers[i].keys = keys{paths: make([]*keyring, servers), givenUp: new(atomic.Uint64)}, keys{paths: make([]*keyring, 1), givenUp: new(atomic.Uint64)}
	}
	for i, s := range p.servers {
		p.meet(i, p.wf)
		s.Up(0, 0, p.sf[i], p.from[i])
	}
	return p
}

// TestSources: a Fabric that sends what is registered is told of each allocation once, before it is
// sent, by both sides. What is not to be cached is known for one push_pull.
func TestSources(t *testing.T) {
	p := sources(t, 2)
	push := []Tensor{bytesOf(t, 1, 8, 5), bytesOf(t, 2, 16, 6), bytesOf(t, 3, 0, 0)}
	whole := bytesOf(t, 0, 4096, 7)
	loose := whole
	loose.Alloc, loose.Key, loose.Span.Len = 0, 4, 64
	loose.Dims = []int64{64}
	pull := []Tensor{bytesOf(t, 0, 8, 0), bytesOf(t, 0, 8, 0)}
	answer := bytesOf(t, 0, 8, 9)
	for round := range 3 {
		id, err := p.pushPull(append(push, loose), pull)
		require.NoError(t, err)
		require.Len(t, p.wf.keys, 2+2+1)
		require.NoError(t, p.settle())
		for i := range p.servers {
			require.NoError(t, p.respond(i, p.take(i)[0], answer))
		}
		require.NoError(t, p.settle())
		require.Equal(t, StateDone, p.state(id))
		require.Equal(t, byte(9), pull[1].Span.Bytes()[0])
		require.Len(t, p.wf.keys, 2+2, "what is not to be cached is gone")
		require.Equal(t, uint64(4+round+1), p.wf.next, "registrations of the worker so far")
		require.Len(t, p.sf[0].keys, 3+1, "three receive buffers and the answer")
	}
	p.servers[0].Forget(answer.Alloc)
	require.Len(t, p.sf[0].keys, 3)
	for _, x := range append(push[:2], pull...) {
		p.w.Forget(x.Alloc)
	}
	require.Empty(t, p.wf.keys)
}

// TestSourceIsGone: an allocation that is gone while it is sent stays registered until the push_pull
// has ended.
func TestSourceIsGone(t *testing.T) {
	p := sources(t, 1)
	x, out := bytesOf(t, 1, 8, 5), bytesOf(t, 0, 8, 0)
	id, err := p.pushPull([]Tensor{x}, []Tensor{out})
	require.NoError(t, err)
	p.w.Forget(x.Alloc)
	require.True(t, p.wf.knows(x.Span))
	require.NoError(t, p.settle())
	require.NoError(t, p.respond(0, p.take(0)[0], bytesOf(t, 0, 8, 5)))
	require.NoError(t, p.settle())
	require.Equal(t, StateDone, p.state(id))
	require.False(t, p.wf.knows(x.Span))
}

// TestSourceIsLetGoOfOnce: a message of which one tensor is registered and another is not leaves nothing in its ticket, whose
// next user lets go of what is its own.
func TestSourceIsLetGoOfOnce(t *testing.T) {
	p := sources(t, 1)
	x, none := bytesOf(t, 1, 8, 5), bytesOf(t, 0, 0, 0)
	exchanged := func(push, pull []Tensor) {
		t.Helper()
		id, err := p.pushPull(push, pull)
		require.NoError(t, err)
		require.NoError(t, p.settle())
		require.NoError(t, p.respond(0, p.take(0)[0], pull...))
		require.NoError(t, p.settle())
		require.Equal(t, StateDone, p.state(id))
	}
	exchanged([]Tensor{x}, nil)
	r := p.w.keys.rings[0].all[x.Alloc]
	require.Zero(t, r.uses.Load())

	tk, err := p.w.Begin()
	require.NoError(t, err)
	require.NoError(t, tk.AddPush(x))
	require.NoError(t, tk.AddPush(bytesOf(t, 2, 8, 6)))
	require.ErrorIs(t, p.w.keys.source(tk, false), errUnknown)
	p.w.discard(tk)
	require.Zero(t, r.uses.Load())

	exchanged([]Tensor{bytesOf(t, 3, 8, 7)}, []Tensor{none})
	require.Zero(t, r.uses.Load())
}

// TestSourceCannotBeRegistered: the call that sends it gives the error. Nothing else notices, and
// the call can be made again.
func TestSourceCannotBeRegistered(t *testing.T) {
	p := sources(t, 1)
	out := bytesOf(t, 0, 8, 0)
	first, err := p.pushPull([]Tensor{bytesOf(t, 1, 8, 5)}, []Tensor{out})
	require.NoError(t, err)
	none := 0
	p.wf.room = &none
	_, err = p.pushPull([]Tensor{bytesOf(t, 2, 8, 5)}, []Tensor{out})
	require.EqualError(t, err, "exchange: tensor 0 cannot be sent: fake: no room")
	p.wf.room = nil
	require.NoError(t, p.settle())
	r := p.take(0)[0]
	p.sf[0].room = &none
	require.EqualError(t, p.respond(0, r, bytesOf(t, 0, 8, 6)), "exchange: tensor 0 cannot be sent: fake: no room")
	p.sf[0].room = nil
	require.NoError(t, p.respond(0, r, bytesOf(t, 0, 8, 6)))
	require.NoError(t, p.settle())
	require.Equal(t, StateDone, p.state(first))
	require.Equal(t, byte(6), out.Span.Bytes()[0])
}

// TestSourcesOfAnotherFabric: what waits for a server that comes back over another Fabric is made
// known to that one.
func TestSourcesOfAnotherFabric(t *testing.T) {
	p := sources(t, 1)
	p.w.Patient = true
	p.w.Lose(0, errGone)
	x := bytesOf(t, 1, 8, 5)
	id, err := p.pushPull([]Tensor{x}, []Tensor{bytesOf(t, 0, 8, 0)})
	require.NoError(t, err)
	p.wf = newFabric()
	p.wf.local = true
	p.succeed(0)
	require.NoError(t, p.settle())
	require.True(t, p.wf.knows(x.Span))
	require.NoError(t, p.respond(0, p.take(0)[0], bytesOf(t, 0, 8, 6)))
	require.NoError(t, p.settle())
	require.Equal(t, StateDone, p.state(id))
}

// locker is a Fabric that locks the memory of so many registrations.
type locker struct {
	*fakeFabric
	most int
}

func (f *locker) Register(r mem.Region) (transport.Key, error) {
	if len(f.keys) >= f.most {
		return transport.Key{}, fmt.Errorf("fake: register: %w", syscall.ENOMEM)
	}
	return f.fakeFabric.Register(r)
}

// TestLockedMemory: where no more memory can be locked, registrations that no ticket names are given up, at all Fabrics; if
// there are none, or that is not enough, the error comes.
func TestLockedMemory(t *testing.T) {
	ks := keys{paths: make([]*keyring, 2), givenUp: new(atomic.Uint64)}
	f, other := &locker{newFabric(), 2}, newFabric()
	ks.path(0, f)
	ks.path(1, other)
	all := []Tensor{bytesOf(t, 0, 8, 0), bytesOf(t, 0, 8, 0), bytesOf(t, 0, 8, 0), bytesOf(t, 0, 8, 0)}
	use := func(server, i int) ([]*registration, error) {
		regs := make([]*registration, 1)
		return regs, ks.acquire(server, all[i:i+1], regs, true)
	}
	far, err := use(1, 0)
	require.NoError(t, err)
	ks.letGo(far)
	first, err := use(0, 0)
	require.NoError(t, err)
	_, err = use(0, 1)
	require.NoError(t, err)
	require.Len(t, other.keys, 1)
	ks.letGo(first)
	_, err = use(0, 2)
	require.NoError(t, err)
	require.Len(t, f.keys, 2)
	require.Empty(t, other.keys)
	require.EqualValues(t, 1, ks.givenUp.Load())
	_, err = use(0, 3)
	require.ErrorIs(t, err, syscall.ENOMEM)
	require.Len(t, f.keys, 2, "tickets name them")
	far, err = use(1, 0)
	require.NoError(t, err)
	ks.letGo(far)
	_, err = ks.register(&locker{newFabric(), 0}, all[3].Base) // a receive buffer
	require.ErrorIs(t, err, syscall.ENOMEM)
	require.Empty(t, other.keys)
	again, err := use(0, 2)
	require.NoError(t, err)
	require.NotNil(t, again[0])
	told := ks.givenUp.Load()
	ks.revoke(ks.paths[0], nil)
	require.Equal(t, told+1, ks.givenUp.Load())
}

// scarce is a locker that takes memory of a GPU in a way that locks none where that is asked for.
type scarce struct {
	locker
	tries, asked int
}

func (f *scarce) Register(r mem.Region) (transport.Key, error) {
	f.tries++
	if r.Scarce {
		f.asked++
		return f.fakeFabric.Register(r)
	}
	return f.locker.Register(r)
}

// TestLockedMemoryOfAGPU: memory of a GPU is taken in a way that locks less when what can be spared has been given up, and
// not before. Host memory is not.
func TestLockedMemoryOfAGPU(t *testing.T) {
	ks := keys{paths: make([]*keyring, 1), givenUp: new(atomic.Uint64)}
	f := &scarce{locker: locker{newFabric(), 1}}
	f.gpu = mem.GPU(0)
	ring := ks.path(0, f)
	onGPU := func() *Tensor {
		x := bytesOf(t, 0, 8, 0)
		x.Dev, x.Base.Dev = f.gpu, f.gpu
		return &x
	}
	use := func(x *Tensor) (*registration, error) {
		ks.mu.Lock()
		defer ks.mu.Unlock()
		return ks.use(ring, x, true)
	}
	first, err := use(onGPU())
	require.NoError(t, err)
	ks.letGo([]*registration{first})
	_, err = use(onGPU())
	require.NoError(t, err)
	require.Zero(t, f.asked, "the first one was given up")
	f.tries = 0
	_, err = use(onGPU())
	require.NoError(t, err)
	require.Equal(t, 1, f.asked)
	require.Equal(t, 2, f.tries, "there is nothing to give up, so nothing to wait for")
	host := bytesOf(t, 0, 8, 0)
	_, err = use(&host)
	require.ErrorIs(t, err, syscall.ENOMEM)
	require.Equal(t, 1, f.asked)
}

// TestSourcesOnAGPU: memory of the GPU that a Fabric takes by itself is made known to it, and that of no other.
func TestSourcesOnAGPU(t *testing.T) {
	for _, gpu := range []mem.Device{mem.CPU, mem.GPU(0), mem.GPU(1)} {
		ks, f := keys{paths: make([]*keyring, 1), givenUp: new(atomic.Uint64)}, newFabric()
		f.local, f.gpu = true, gpu
		ks.path(0, f)
		x := bytesOf(t, 1, 8, 5)
		x.Dev = mem.GPU(0)
		require.NoError(t, ks.source(&Ticket{push: []Tensor{x}}, true))
		require.Equal(t, gpu == x.Dev, f.knows(x.Span))
	}
}

// BenchmarkKnownMemory is what a push_pull with two pull tensors pays to find their keys and to let
// go of them.
func BenchmarkKnownMemory(b *testing.B) {
	ks := keys{paths: make([]*keyring, 1), givenUp: new(atomic.Uint64)}
	ks.path(0, newFabric())
	var all []Tensor
	for i := range 1000 {
		x := mem.Region{Addr: uintptr(4096 * (i + 1)), Len: 8}
		all = append(all, Tensor{Span: x.Span(), Base: x, Alloc: uint64(i + 1)})
	}
	regs := make([]*registration, 2)
	b.ReportAllocs()
	for i := range b.N {
		at := i % 998
		if err := ks.acquire(0, all[at:at+2], regs, true); err != nil {
			b.Fatal(err)
		}
		ks.letGo(regs)
	}
}
