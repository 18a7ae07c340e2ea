package node

import (
	"os"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	rdma "fserver/cshim/verbs"
	"fserver/cshim/verbs/fakeverbs"
	"fserver/engine/conf"
	"fserver/engine/exchange"
	"fserver/engine/gpu/fakegpu"
	"fserver/engine/transport"
	"fserver/engine/transport/verbs"
)

// nics opens the Fabrics of a mesh whose data travels over RDMA: workers use the first
// device and servers the second. They are those of the fake library or, where
// FSERVER_TEST_RDMA is set, of the system.
type nics struct {
	mu  sync.Mutex
	all []*verbs.Fabric
}

func newNICs(t testing.TB) *nics {
	err := library()
	if fakeverbs.Real() {
		require.NoError(t, err)
		return &nics{}
	}
	if err != nil {
		t.Skip(err)
	}
	fakeverbs.Reset()
	return &nics{}
}

// library opens the library of these tests, before something opens another one.
func library() error {
	if fakeverbs.Real() {
		return rdma.Open(os.Getenv("FSERVER_TEST_DMABUF"))
	}
	path, err := fakeverbs.Library()
	if err != nil {
		return err
	}
	return rdma.Open(path)
}

func (n *nics) open(cfg *conf.Config, g transport.Gate, log *zap.Logger) ([]transport.Fabric, error) {
	base, err := openBase(cfg, g, log)
	if err != nil || cfg.Role == conf.Scheduler {
		return []transport.Fabric{base}, err
	}
	devices := fakeverbs.Devices()
	o := verbs.Options{Device: map[conf.Role]string{conf.Worker: devices[0], conf.Server: devices[1]}[cfg.Role]}
	if !fakeverbs.Real() {
		if o.Library, err = fakeverbs.Library(); err != nil {
			return nil, err
		}
	}
	o.Gate = g
	if cfg.Role == conf.Server {
		o.Listen = "127.0.0.1:0"
	}
	f, err := verbs.Open(o)
	if err != nil {
		return nil, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.all = append(n.all, f)
	return []transport.Fabric{f, base}, nil
}

// directNICs has the NICs of the fake library take memory of g, which sees what they write after a read only. The func
// returns how many reads there were.
func directNICs(t testing.TB, g *fakegpu.GPU) func() int {
	if fakeverbs.Real() {
		t.Skip("the GPU is that of tests, which only the fake library reaches")
	}
	newNICs(t)
	t.Cleanup(fakeverbs.Reset)
	fakeverbs.Set("gids", 3)
	fakeverbs.Set("cqe", 1<<15)
	fakeverbs.Set("late", 1)
	g.NIC.Ordering = 0
	before := fakeverbs.Count("reads")
	return func() int { return fakeverbs.Count("reads") - before }
}

// TestVerbs runs push_pulls of 8 B to 16 MiB and of random sizes between nodes on two
// devices, with and without a secret, and compares every byte.
func TestVerbs(t *testing.T) {
	for name, extra := range map[string][]string{"open": nil, "secret": {"FSERVER_SECRET=a secret of the test"}} {
		t.Run(name, func(t *testing.T) {
			s := shape{1, 1, 1}
			if name == "secret" {
				s = shape{2, 2, 1}
			}
			m := newMesh(t, newNICs(t).open, s, extra...)
			for _, w := range m.workers {
				for _, l := range w.peers[:len(m.servers)] {
					how, _ := l.link.via()
					require.Equal(t, "verbs", how)
				}
			}
			m.exchange(t, 10)
			for i, rows := range []int{1, 512, 1 << 17, 2 << 20} {
				oneOf(t, m, rows, byte(i))
			}
			m.stop()
		})
	}
}

// TestVerbsProxies: the messages of two channels between two workers and two servers, carried by the engine.
func TestVerbsProxies(t *testing.T) {
	exchangeMessages(t, newMesh(t, newNICs(t).open, shape{2, 2, 1}))
}

// oneOf is a push_pull of each worker to all servers, with one tensor of so many rows.
func oneOf(t *testing.T, m *mesh, rows int, seed byte) {
	x, answer := tensor(t, 100, rows), tensor(t, 0, rows)
	fill(x, seed)
	fill(answer, seed+1)
	var ids []uint64
	var outs [][]exchange.Tensor
	for _, w := range m.workers {
		var out []exchange.Tensor
		for range m.servers {
			out = append(out, tensor(t, 0, rows))
		}
		outs = append(outs, out)
		ids = append(ids, pushPull(t, w, []exchange.Tensor{x}, out))
	}
	for _, s := range m.servers {
		b, err := getBatch(s)
		require.NoError(t, err)
		for _, r := range b.reqs {
			require.Equal(t, x.Span.Bytes(), r.push[0].Span.Bytes())
			respond(t, s, r.handler, answer)
		}
	}
	for i, w := range m.workers {
		require.NoError(t, wait(w, ids[i]))
		for _, out := range outs[i] {
			require.Equal(t, answer.Span.Bytes(), out.Span.Bytes())
		}
	}
}

// registrations is how many the fake library has made.
func registrations() int {
	if fakeverbs.Real() {
		return 0
	}
	return fakeverbs.Count("registered")
}

// TestVerbsCounts: more tensors of a push_pull are more writes, and neither more doorbells nor
// more completions. Memory is registered once, and slots for frames are posted again eight at a time.
func TestVerbsCounts(t *testing.T) {
	n := newNICs(t)
	m := newMesh(t, n.open, shape{1, 1, 1})
	total := func() (c verbs.Counts) {
		for _, f := range n.all {
			o := f.Counts()
			c.Doorbells, c.Requests = c.Doorbells+o.Doorbells, c.Requests+o.Requests
			c.Completions, c.Refills = c.Completions+o.Completions, c.Refills+o.Refills
		}
		return c
	}
	w, s := m.workers[0], m.servers[0]
	const rounds = 100
	used := map[int]verbs.Counts{}
	for _, tensors := range []int{1, 8} {
		var push, pull []exchange.Tensor
		for i := range tensors {
			push, pull = append(push, tensor(t, uint64(100*tensors+i), 64)), append(pull, tensor(t, 0, 64))
		}
		before, registered := verbs.Counts{}, 0
		for i := range rounds + 1 {
			id := pushPull(t, w, push, pull)
			b, err := getBatch(s)
			require.NoError(t, err)
			respond(t, s, b.reqs[0].handler, push...)
			require.NoError(t, wait(w, id))
			if i == 0 { // buffers and plans
				before, registered = total(), registrations()
			}
		}
		require.Equal(t, registered, registrations())
		c := total()
		c.Doorbells, c.Requests = c.Doorbells-before.Doorbells, c.Requests-before.Requests
		c.Completions, c.Refills = c.Completions-before.Completions, c.Refills-before.Refills
		t.Logf("%d tensors each way, %d push_pulls: %d doorbells, %d requests, %d completions, %d refills", tensors, rounds, c.Doorbells, c.Requests, c.Completions, c.Refills)
		used[tensors] = c
	}
	require.LessOrEqual(t, used[8].Requests, used[1].Requests+2*7*rounds+rounds/10)
	require.LessOrEqual(t, used[8].Doorbells, used[1].Doorbells+rounds/10)
	require.LessOrEqual(t, used[8].Completions, used[1].Completions+rounds/10)
	require.LessOrEqual(t, used[8].Refills, uint64(2*rounds/8+rounds/10))
	m.stop()
}
