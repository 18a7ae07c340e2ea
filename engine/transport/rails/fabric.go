package rails

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// A Fabric is made of members. Posts and Polls of the members, which do not wait, are made under mu.
// Their Register and Connect, which may wait, are not.
type Fabric struct {
	link.Over // has the descriptors; all else of a Fabric is here
	members   []transport.Fabric
	o         Options
	local     bool // sources of writes are read by their registrations
	addr      transport.Addr
	ctx       context.Context // ends with Close
	cancel    context.CancelFunc
	tasks     sync.WaitGroup // added to before closing is set
	once      sync.Once      // Close
	failed    error          // of Close

	mu       sync.Mutex // guards the rest
	closing  bool       // nothing new is taken
	panicked error      // of a task
	lost     error      // no member is left
	rung     bool       // until the next Poll
	keys     keys
	rails    map[transport.Conn]*rail
	last     *rail      // that was looked for
	fresh    []*rail    // that a peer has opened, and not said what for
	conns    []*Conn    // that have events to come
	busy     []*Conn    // that a Poll has to look at
	late     []*Conn    // whose confirm was put off
	pool     pool       // of frames
	given    [][]byte   // that the last Poll gave to the user
	stirred  bool       // the next Poll has to look at busy; else each few Polls do
	told     []done     // to be given
	found    link.Found // of the Poll that runs
	asked    []asked
	next     int                  // the member that the next Poll asks first
	armed    bool                 // Arm was called since the last Poll
	polls    uint64               // so far
	active   uint64               // the Poll in which a member had something last
	skipped  int                  // weighs the Polls since all members were asked
	away     []away               // of each member
	dead     []dead               // of each member
	news     []news               // to be told
	untold   chan struct{}        // has an entry while news has some
	ailing   uint64               // a bit for each that is
	now      func() time.Duration // of a clock that begins with the Fabric
	timed    []*rail              // that have let go of writes in this Poll, while their meter runs
	portions [maxRails]portion
	ev       [64]transport.Event
	ops      [16]transport.Op
	sizes    [16]uint64
	heads    [16][headerLen + 1]byte // the frames of ops
}

// asked is what Polls have found on a member.
type asked struct {
	quiet uint64 // how many found nothing; see quietPolls
	seen  uint64 // the last one that found something
}

var _ transport.Fabric = (*Fabric)(nil)

func open(members []transport.Fabric, o Options) (*Fabric, error) {
	first := slices.IndexFunc(members, func(m transport.Fabric) bool { return !absent(m) })
	if first < 0 {
		return nil, fmt.Errorf("rails: no fabric works: %w", members[0].(*transport.Absent).Why)
	}
	f := &Fabric{Over: link.Over{Fabric: members[first]}, members: slices.Clone(members), o: o, addr: join(members, o.Strands),
		rails: map[transport.Conn]*rail{}, asked: make([]asked, len(members)), away: make([]away, len(members)), dead: make([]dead, len(members))}
	began := time.Now()
	f.now = func() time.Duration { return time.Since(began) }
	f.keys = keys{open: map[uint64]*region{}, ending: make([]map[uint64]*region, len(members))}
	for i, m := range members {
		f.keys.ending[i] = map[uint64]*region{}
		if a, ok := m.(*transport.Absent); ok {
			f.dead[i] = dead{why: a.Why, over: true}
		}
	}
	f.local = f.Caps().LocalKeys
	f.ctx, f.cancel = context.WithCancel(context.Background())
	err := f.Open()
	for i, m := range members {
		if err == nil && i != first && !absent(m) {
			err = unix.EpollCtl(f.FD(), unix.EPOLL_CTL_ADD, m.FD(), &unix.EpollEvent{Events: unix.EPOLLIN})
		}
	}
	if err != nil {
		f.cancel()
		f.Shut()
		return nil, fmt.Errorf("rails: open descriptors to sleep on: %w (raise ulimit -n)", err)
	}
	f.task(f.watchStalls)
	if o.News != nil {
		f.untold = make(chan struct{}, 1)
		f.task(f.tellNews)
	}
	if o.Watch != nil {
		f.task(func() { o.Watch(f.ctx, f.report) })
	}
	return f, nil
}

// ring makes FD readable until the next Poll. The caller holds mu.
func (f *Fabric) ring() {
	if !f.rung {
		f.Wake(1)
	}
	f.rung = true
}

// locked calls do under mu, and has the user look at what came of it.
func (f *Fabric) locked(do func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	do()
	f.ring()
}

// watchStalls ends Conns whose peer does not say what has come on a member that was lost.
func (f *Fabric) watchStalls() {
	tick := time.NewTicker(max(f.o.Stall/8, time.Millisecond))
	defer tick.Stop()
	for last := uint64(0); ; {
		select {
		case <-f.ctx.Done():
			return
		case <-tick.C:
		}
		last = f.inspect(last)
	}
}

// inspect is told how many Polls there had been the last time. Without one since then, what the peer has said
// may be unread, unless the user sleeps and nothing has come.
func (f *Fabric) inspect(last uint64) (polls uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	read := f.polls != last
	if f.armed && !read {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(f.FD()), Events: unix.POLLIN}}, 0)
		read = n == 0 && err == nil
	}
	for _, c := range f.conns {
		c.inspect(time.Now(), read)
	}
	return f.polls
}

// task starts a goroutine of an open Fabric. A panic in it makes the Fabric unusable, as Poll says.
func (f *Fabric) task(run func()) {
	f.tasks.Go(func() {
		defer func() {
			if e := transport.Caught(recover()); e != nil {
				f.locked(func() { f.panicked = e })
			}
		}()
		run()
	})
}

// Name implements transport.Fabric: "tcp/eth0+eth1". It begins as that of the first member that works, since that
// transport carries the bytes.
func (f *Fabric) Name() string {
	kind, _, _ := strings.Cut(f.Fabric.Name(), "/")
	return kind + "/" + strings.ReplaceAll(strings.Join(f.o.Names, "+"), kind+"/", "")
}

func names(members []transport.Fabric) []string {
	list := make([]string, len(members))
	for i, m := range members {
		list[i] = m.Name()
	}
	return list
}

// Addr implements transport.Fabric.
func (f *Fabric) Addr() transport.Addr { return f.addr }

// Caps implements transport.Fabric.
func (f *Fabric) Caps() (c transport.Caps) {
	known := false
	for _, m := range f.members { // also of those that have failed: it does not change
		of := m.Caps()
		c.LocalKeys = c.LocalKeys || of.LocalKeys
		switch {
		case absent(m): // nothing is registered with it
		case !known:
			c.GPU, known = of.GPU, true
		case c.GPU != of.GPU:
			c.GPU = mem.CPU
		}
	}
	return c
}

// Reaches implements transport.Fabric.
func (f *Fabric) Reaches(peer transport.Addr) error {
	_, err := f.routes(peer)
	return err
}

// routes returns how peer is reached.
func (f *Fabric) routes(peer transport.Addr) (*routes, error) {
	to, strands, err := split(peer)
	if err != nil {
		return nil, err
	}
	why := errors.New("none of them takes connections")
	if f.o.Common {
		why = errors.New("none of them is in a network of ours")
	}
	pairs := match(f.o.Networks, to, f.o.Common, func(i int, a transport.Addr) bool {
		err := f.works(i)
		if err == nil {
			err = f.members[i].Reaches(a)
		}
		if err != nil {
			why = err
		}
		return err == nil
	})
	if len(pairs) == 0 {
		return nil, fmt.Errorf("rails: no fabric reaches one of %q: %w", peer, why)
	}
	r := &routes{fabrics: len(to), strands: strands}
	for strand := range min(strands, f.o.Strands) {
		for _, p := range pairs {
			r.ways = append(r.ways, way{p, strand, to[p.theirs]})
		}
	}
	return r, nil
}

// Arm implements transport.Fabric. Acknowledgements that have waited for a frame to travel with go alone.
func (f *Fabric) Arm() (again bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.armed = true
	f.catchUp()
	for _, c := range f.busy {
		again = c.rest() || again
	}
	for i, m := range f.members {
		// One that is closed tells nobody of its last events.
		again = f.answers(i) && (f.dead[i].shut || m.Arm()) || again
	}
	return again || len(f.told) != 0
}

// Close implements transport.Fabric.
func (f *Fabric) Close() error {
	f.once.Do(func() {
		f.mu.Lock()
		f.closing = true
		for _, c := range f.conns {
			c.leave()
		}
		for _, r := range f.fresh {
			r.conn.Close()
		}
		f.mu.Unlock()
		f.cancel()
		for _, m := range f.members {
			f.failed = errors.Join(f.failed, m.Close())
		}
		f.tasks.Wait()
		f.mu.Lock()
		defer f.mu.Unlock()
		f.Shut()
	})
	return f.failed
}

// begin holds off Close until tasks.Done; it is false after Close.
func (f *Fabric) begin() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.closing {
		f.tasks.Add(1)
	}
	return !f.closing
}

// find returns the rail of a member Conn over member Fabric at, whose events may come before Connect returns
// it.
func (f *Fabric) find(at int, in transport.Conn) *rail {
	if f.last != nil && f.last.conn == in {
		return f.last
	}
	r := f.rails[in]
	if r == nil {
		r = &rail{f: f, conn: in, at: at, lost: make(chan struct{})}
		f.rails[in] = r
	}
	f.last = r
	return r
}

// forget drops a rail that has no more events to come.
func (f *Fabric) forget(r *rail) {
	delete(f.rails, r.conn)
	if f.last == r {
		f.last = nil
	}
}
