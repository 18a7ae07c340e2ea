package node

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"fserver/engine/conf"
	"fserver/engine/exchange"
	"fserver/engine/peers"
	"fserver/engine/transport"
	"fserver/engine/transport/faults"
	"fserver/engine/transport/inproc"
	"fserver/engine/transport/rails"
	"fserver/engine/transport/transporttest"
	"fserver/engine/wire"
)

// TestLossInARestart: a worker or a server dies, and while its successor comes a member of the connections is lost, and
// comes back. It runs with the seeds of the tests of faults, and with one of the time, which the names of the tests tell.
func TestLossInARestart(t *testing.T) {
	seeds := []uint64{1 << 10, uint64(time.Now().UnixNano())}
	if !transporttest.Quick() {
		for seed := range uint64(20) {
			seeds = append(seeds, seed)
		}
	}
	if testing.Short() {
		seeds = seeds[:1]
	}
	for i, seed := range seeds {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			r := newRestarts(t, seed, i%2 == 1)
			for _, turn := range r.rng.Perm(9) {
				r.turn(turn%3, when(turn/3))
			}
			r.end()
		})
	}
}

// when is the moment at which a member is lost.
type when int

const (
	before when = iota // the death
	during             // the time in which the successor comes: it is lost and comes back several times
	after              // the successor has come
)

const railSplit = 8 << 10

// restarts is a mesh of a worker and two servers whose Fabrics are made of two, each in a Network of its own. The worker
// makes push_pulls all the time.
type restarts struct {
	*mesh
	t        *testing.T
	rng      *rand.Rand
	settings []string
	patient  bool // calls wait for the successor
	control  *inproc.Network
	nets     []*inproc.Network
	victim   atomic.Int64   // its index in alive
	alive    []*Node        // the worker and the servers
	dead     sync.Map       // those that were killed
	quit     [2]atomic.Bool // the worker, the servers
	good     atomic.Uint64  // push_pulls whose bytes were right
	runs     uint64         // of workers
	errs     chan error
	loops    [2]sync.WaitGroup
}

func newRestarts(t *testing.T, seed uint64, patient bool) *restarts {
	r := &restarts{t: t, rng: rand.New(rand.NewPCG(seed, 5)), patient: patient, settings: []string{"FSERVER_ON_PEER_LOST=raise"}, control: inproc.New(),
		nets: []*inproc.Network{inproc.New(), inproc.New()}, errs: make(chan error, 64)}
	if patient {
		r.settings[0] = "FSERVER_ON_PEER_LOST=wait"
	}
	r.victim.Store(-1)
	r.mesh = newMesh(t, r.fabrics(seed), shape{1, 2, 1}, r.settings...)
	r.alive = r.all()[1:]
	for i := range r.alive {
		r.begin(i)
	}
	r.whole()
	return r
}

// fabrics opens a Fabric of two that behave like NICs, and one that reaches everybody.
func (r *restarts) fabrics(seed uint64) Fabrics {
	var opened atomic.Uint64
	return func(cfg *conf.Config, g transport.Gate, log *zap.Logger) ([]transport.Fabric, error) {
		base, err := over(r.control)(cfg, g, log)
		if err != nil || cfg.Role == conf.Scheduler {
			return base, err
		}
		var members []transport.Fabric
		for i, net := range r.nets {
			in, err := net.Open(inproc.Options{Name: at(i, name(cfg)), Listen: cfg.Role != conf.Worker, Gate: g, Depth: 8})
			if err != nil {
				return nil, err
			}
			f, err := faults.Wrap(in, faults.NIC(seed<<8+opened.Add(1)))
			if err != nil {
				return nil, err
			}
			members = append(members, f)
		}
		f, err := rails.New(members, rails.Options{Names: []string{"eth0", "eth1"}, Split: railSplit, Pause: time.Millisecond, Same: wire.SamePeer})
		return append([]transport.Fabric{f}, base...), err
	}
}

func name(cfg *conf.Config) string { return fmt.Sprintf("%v-%d", cfg.Role, cfg.Rank) }

// at is the name of a Fabric in a Network: one of two addresses that are the same does not count.
func at(net int, name string) string { return fmt.Sprintf("%s/%d", name, net) }

func (r *restarts) cut(member int) {
	for _, server := range []string{"server-0", "server-1"} {
		r.nets[member].Cut(at(member, "worker-0"), at(member, server))
	}
}

// turn kills a node and starts its successor. A member is lost meanwhile, and comes back in the end.
func (r *restarts) turn(victim int, moment when) {
	member := r.rng.IntN(2)
	defer func() {
		if r.t.Failed() {
			r.t.Logf("%s is killed, member %d is lost at %d", name(r.alive[victim].cfg), member, moment)
		}
	}()
	if moment == before {
		r.cut(member)
		time.Sleep(time.Duration(r.rng.IntN(3)) * time.Millisecond)
	}
	r.kill(victim)
	stop := func() {}
	if moment == during {
		stop = r.flap(member)
	}
	old := r.alive[victim]
	n := r.start(shape{1, 2, 1}.settings(old.cfg.Role.String(), old.Info().Group, 0, "1", r.settings...))
	waitReady(r.t, n)
	stop()
	if moment == after {
		r.cut(member)
	}
	r.alive[victim] = n
	r.begin(victim)
	r.progress(3)
	r.nets[member].Heal()
	r.whole()
	r.victim.Store(-1)
	r.carries()
}

// kill ends all Fabrics of a node.
func (r *restarts) kill(victim int) {
	r.victim.Store(int64(victim))
	r.dead.Store(r.alive[victim], true)
	who := name(r.alive[victim].cfg)
	for _, i := range r.rng.Perm(1 + len(r.nets)) {
		if i == len(r.nets) {
			r.control.Kill(who)
		} else {
			r.nets[i].Kill(at(i, who))
		}
	}
	old := r.alive[victim]
	r.loops[min(victim, 1)].Go(func() { _ = old.Close() }) // a process that is dead polls no more
}

// flap loses a member and lets it come back until stop is called.
func (r *restarts) flap(member int) (stop func()) {
	over, ended, rng := make(chan struct{}), make(chan struct{}), rand.New(rand.NewPCG(r.rng.Uint64(), 6))
	go func() {
		defer close(ended)
		for {
			r.cut(member)
			time.Sleep(time.Duration(rng.IntN(2000)) * time.Microsecond)
			r.nets[member].Heal()
			select {
			case <-over:
				return
			case <-time.After(time.Duration(rng.IntN(4000)) * time.Microsecond):
			}
		}
	}()
	return func() { close(over); <-ended }
}

// begin makes push_pulls from the worker, or answers at a server, until the node is killed.
func (r *restarts) begin(i int) {
	n := r.alive[i]
	run, loops := r.push, &r.loops[0]
	if i == 0 {
		r.runs++
	} else {
		run, loops = r.serve, &r.loops[1]
	}
	number := r.runs
	loops.Go(func() {
		err := run(n, number)
		if _, killed := r.dead.Load(n); err != nil && !killed {
			r.errs <- fmt.Errorf("%s: %w", name(n.cfg), err)
		}
	})
}

// excused reports whether an error names the node that was killed, or another whose connection to the successor was lost
// while it had one member.
func (r *restarts) excused(err error) bool {
	var lost *LostError
	victim := r.victim.Load()
	if victim < 0 || !errors.As(err, &lost) {
		return false
	}
	return victim == 0 || fmt.Sprintf("%v-%d", lost.Role, lost.Rank) == fmt.Sprintf("server-%d", victim-1) || lost.Role == wire.RoleWorker // a server knows of no other
}

// push makes push_pulls of small tensors and of those that are cut.
func (r *restarts) push(n *Node, run uint64) error {
	var x, y [2]exchange.Tensor
	for number := uint64(0); !r.quit[0].Load(); number++ {
		rows := []int{4, 2 * railSplit}[number%2]
		if x[0].Base.Len == 0 {
			for i := range x {
				x[i], y[i] = tensor(r.t, 1, 2*railSplit), tensor(r.t, uint64(i), 2*railSplit)
			}
		}
		for _, t := range []*exchange.Tensor{&x[0], &y[0], &y[1]} {
			t.Span.Len, t.Dims = uint64(rows)*8, []int64{int64(rows), 8}
		}
		fill(x[0], byte(number))
		binary.LittleEndian.PutUint64(x[0].Span.Bytes(), run<<32|number)
		err := r.exchange(n, x[:1], y[:])
		switch {
		case !r.patient && r.excused(err): // else the call waits for the successor
			x = [2]exchange.Tensor{} // a server that lives may still use them
			time.Sleep(time.Millisecond)
		case err != nil:
			return fmt.Errorf("push_pull %d: %w", number, err)
		default:
			r.good.Add(1)
		}
	}
	return nil
}

func (r *restarts) exchange(n *Node, x, y []exchange.Tensor) error {
	t, err := n.BeginPushPull()
	if err != nil {
		return err
	}
	if err = errors.Join(t.AddPush(x[0]), t.AddPull(y[0]), t.AddPull(y[1])); err != nil {
		return err
	}
	id := t.ID()
	if err = n.PushPull(t); err == nil {
		err = wait(n, id)
	}
	for server := 0; server < len(y) && err == nil; server++ {
		for i, b := range y[server].Span.Bytes() {
			if want := x[0].Span.Bytes()[i] + byte(server+1); b != want {
				return fmt.Errorf("byte %d of %d from server %d is %d, want %d", i, y[server].Span.Len, server, b, want)
			}
		}
	}
	return err
}

// serve answers what comes, which has to be in order, each once.
func (r *restarts) serve(n *Node, _ uint64) error {
	var sink batch
	y, last := tensor(r.t, 0, 2*railSplit), uint64(0)
	for !r.quit[1].Load() {
		err := n.GetBatch(&sink, 0, 10*time.Millisecond, false)
		if err == ErrAgain || !r.patient && r.excused(err) {
			continue
		} else if err != nil {
			return err
		}
		for _, q := range sink.reqs {
			in := q.push[0].Span.Bytes()
			number := binary.LittleEndian.Uint64(in)
			if number <= last {
				return fmt.Errorf("push_pull %x has come after %x", number, last)
			}
			last = number
			for i, b := range in {
				if i >= 8 && b != byte(number)+byte(i) {
					return fmt.Errorf("push_pull %x: byte %d of %d is %d", number, i, len(in), b)
				}
				y.Span.Bytes()[i] = b + byte(n.Info().Rank+1)
			}
			y.Span.Len, y.Dims = uint64(len(in)), []int64{int64(len(in) / 8), 8}
			if err := r.answer(n, q.handler, y); err != nil && !r.excused(err) {
				return fmt.Errorf("answer to push_pull %x: %w", number, err)
			} else if err != nil {
				y = tensor(r.t, 0, 2*railSplit)
			}
			y.Span.Len = y.Base.Len
		}
	}
	return nil
}

func (r *restarts) answer(n *Node, handler uint64, y exchange.Tensor) error {
	t, err := n.BeginAnswer()
	if err == nil {
		err = t.AddPush(y)
	}
	if err != nil {
		return err
	}
	id := t.ID()
	if err = n.Respond(handler, t); err != nil {
		return err
	}
	n.Flush()
	return wait(n, id)
}

// until waits for cond, while nothing goes wrong.
func (r *restarts) until(what string, cond func() bool) {
	r.t.Helper()
	for end := time.Now().Add(20 * time.Second); !cond(); time.Sleep(100 * time.Microsecond) {
		select {
		case err := <-r.errs:
			require.NoError(r.t, err)
		default:
		}
		require.True(r.t, time.Now().Before(end), "did not happen: %s: %+v", what, r.links())
	}
}

// progress waits for so many push_pulls.
func (r *restarts) progress(count uint64) {
	r.t.Helper()
	good := r.good.Load() + count
	r.until("the worker makes push_pulls", func() bool { return r.good.Load() >= good })
}

// links are the members between the worker and each server; none if they are not connected by them.
func (r *restarts) links() (all [2][]transport.Member) {
	w := r.alive[0]
	w.driver.Under(func() {
		for i, p := range w.peers {
			if p.State() == peers.Ready && p.link.plane == w.planes[0] {
				all[i] = p.link.conn.Peer().Members
			}
		}
	})
	return all
}

// whole waits until both members to each server are in use.
func (r *restarts) whole() {
	r.t.Helper()
	r.until("both members are in use", func() bool {
		for _, members := range r.links() {
			if len(members) != 2 || members[0].Why != "" || members[1].Why != "" {
				return false
			}
		}
		return true
	})
}

// carries waits until each member to each server has carried a part of a tensor.
func (r *restarts) carries() {
	r.t.Helper()
	was := r.links()
	r.until("both members carry tensors", func() bool {
		for i, members := range r.links() {
			for j, m := range members {
				if m.Sent < was[i][j].Sent+railSplit {
					return false
				}
			}
		}
		return true
	})
}

// end lets all leave.
func (r *restarts) end() {
	for i := range r.loops {
		r.quit[i].Store(true)
		r.loops[i].Wait()
	}
	close(r.errs)
	for err := range r.errs {
		require.NoError(r.t, err)
	}
	r.mesh.workers, r.mesh.servers = r.alive[:1], r.alive[1:]
	r.stop()
	r.t.Logf("%d push_pulls", r.good.Load())
}
