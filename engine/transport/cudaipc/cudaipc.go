// Package cudaipc lets GPU memory travel over another Fabric, which carries host
// memory alone: the frames, the connections and who may talk are that one's. A
// peer need not be wrapped itself: its host memory can be written from our GPU,
// and our GPU memory from its host memory.
//
// # Three ways of a write
//
// Mapped: where the Fabric below is of this host, and the peer's GPU memory can
// be mapped, the copy engine writes it there, and the stream then stores the
// write's number into host memory that both processes map (segment_unsafe.go).
// The receiver sees the number with a plain load. No CPU takes part after Post,
// no call into the driver waits, no SM is used.
//
// Staged: the copy engine brings the source to pinned host memory in pieces, and
// each goes over the Fabric below while the next is copied (stage.go). GPU memory
// has a shadow in host memory that such writes land in, from where the copy engine
// takes them (land.go). A peer sees the shadow's key as that of the memory.
//
// Held: host memory that a stream is still to fill waits here until the stream has
// passed the point (Op.After).
//
// # Memory
//
// A Key of GPU memory carries what a peer needs to map it: the name of the
// allocation, which is mapped once for each Conn and told from a later one at the
// same address by its buffer id. A peer looks into the owner's table of keys before
// it enqueues a copy, and says first that it is about to: so Deregister either
// sees the copy, and waits for its number, or the peer sees that the key is gone.
// Mappings without a living key are closed.
//
// A peer that is allowed to map memory could write anywhere in its allocation; that
// it goes by keys and bounds guards against mistakes, not against malice, as with
// cma.
package cudaipc

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"fserver/cshim/cuda"
	"fserver/engine/mem"
	"fserver/engine/transport"
)

// A Device is the GPU as this package uses it; *cuda.Device is one. No method waits for
// what the GPU has to do but those that give memory back; see Later.
type Device interface {
	Ordinal() int
	UUID() cuda.UUID
	NewStream() (cuda.Stream, error)
	FreeStream(cuda.Stream) error
	Idle(cuda.Stream) (bool, error)
	NewEvent() (cuda.Event, error)
	FreeEvent(cuda.Event) error
	Record(cuda.Event, cuda.Stream) error
	Passed(cuda.Event) (bool, error)
	Enqueue(s cuda.Stream, e cuda.Event, copies []cuda.Copy, flag, value uint64) error
	Alloc(n uint64) (uint64, error)
	Free(address uint64) error
	Pin(address, n uint64) (uint64, error)
	Unpin(address uint64) error
	Describe(address uint64) (cuda.Memory, error)
	ExportIPC(base uint64) (cuda.IPCHandle, error)
	ImportIPC(cuda.IPCHandle) (uint64, error)
	CloseIPC(base uint64) error
	Reach(cuda.UUID) error
	ExportFD(address uint64) (int, error)
	MapFDs(fds []int32, lens []uint64) (uint64, error)
	UnmapFDs(base uint64, lens []uint64) error
}

// Options say what to wrap with.
type Options struct {
	Device Device
	// Share says that the peers are processes of this host, so that GPU memory
	// can be mapped. Conns of the Fabric below are Lenders and Orderers then.
	Share bool
	// Events has the CPU ask events how far copies to and from its own memory are,
	// instead of having the streams say so in host memory.
	Events bool
	// Stall bounds how long a peer may leave writes unseen; 0 means 30 s.
	Stall time.Duration
	// Later is that of the Device, for all who share it; nil: nobody does.
	Later *Later
}

// secret is this process's: with it a Fabric knows the keys of all Fabrics here,
// whose memory it cannot map and need not. Nobody else can make one.
var secret = func() (p [16]byte) {
	rand.Read(p[:]) // never fails
	return p
}()

// A Fabric is another one, for GPU memory too. It is a Sleeper.
type Fabric struct {
	inner  transport.Fabric
	sleep  transport.Sleeper
	dev    Device
	events *byEvents // dev, or nil
	o      Options
	secret [16]byte
	id     uint64 // random; names this Fabric to peers
	spaces spaces // of this process
	epoll  int
	timer  int

	// mu guards the rest. It is held during Posts and Polls of inner, and calls
	// of the device, which do not wait.
	mu      sync.Mutex
	closed  bool
	ended   error
	conns   map[transport.Conn]*Conn // by inner's
	busy    []*Conn                  // that a Poll has to look at; see due
	told    []transport.Event        // completions, to be given first
	ev      [64]transport.Event      // of inner
	at, got int                      // ev[at:got] is not given yet
	regions map[uint64]*region       // by the IDs of inner's keys
	free    []uint32                 // slots of the table
	used    uint32                   // slots that were ever used
	table   *mem.Shared
	mailbox transport.Key
	box     mem.Region
	in      landing
	scan    time.Time // of the last tick
	polls   uint64
	slept   bool // FD was asked for, and no Poll since
}

// Wrap puts a Fabric over inner, which is a Sleeper, and is closed by the
// Fabric's Close. With an error, inner is still the caller's.
func Wrap(inner transport.Fabric, o Options) (*Fabric, error) {
	s, ok := inner.(transport.Sleeper)
	if !ok {
		return nil, fmt.Errorf("cudaipc: transport %s has no descriptor to wait on", inner.Name())
	}
	if o.Stall <= 0 {
		o.Stall = 30 * time.Second
	}
	if o.Later == nil {
		o.Later = new(Later)
	}
	f := &Fabric{
		inner: inner, sleep: s, dev: o.Device, o: o, secret: secret, spaces: ownSpaces(), epoll: -1, timer: -1,
		conns: map[transport.Conn]*Conn{}, regions: map[uint64]*region{},
	}
	if o.Events {
		f.events = &byEvents{Device: o.Device}
		f.dev = f.events
	}
	var b [8]byte
	rand.Read(b[:])
	f.id = binary.LittleEndian.Uint64(b[:])
	if err := f.open(); err != nil {
		if f.mailbox.ID != 0 {
			_ = inner.Deregister(f.mailbox) // it was just made
		}
		f.release()
		return nil, fmt.Errorf("cudaipc: %w", err)
	}
	return f, nil
}

func (f *Fabric) open() (err error) {
	if f.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return err
	}
	if f.timer, err = unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_CLOEXEC|unix.TFD_NONBLOCK); err != nil {
		return err
	}
	for _, fd := range []int{f.sleep.FD(), f.timer} {
		if err = unix.EpollCtl(f.epoll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN}); err != nil {
			return err
		}
	}
	if f.table, err = mem.NewNamed("fserver-cudaipc", tableSize); err != nil {
		return err
	}
	if f.box, err = mem.Map(1); err != nil {
		return err
	}
	if f.mailbox, err = f.inner.Register(f.box); err != nil {
		return err
	}
	return f.in.open(f)
}

// release gives back what open acquired.
func (f *Fabric) release() {
	f.in.close(f)
	if f.events != nil {
		f.events.close()
	}
	for _, fd := range []int{f.epoll, f.timer} {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
	f.epoll, f.timer = -1, -1
	if f.table != nil {
		_ = mem.FreeShared(f.table.ID())
		f.table = nil
	}
	if f.box.Len != 0 {
		_ = mem.Unmap(f.box)
		f.box = mem.Region{}
	}
}

// pin is Pin. Where memory is short, what is put off is there for who tries again.
func (f *Fabric) pin(address, n uint64) (uint64, error) {
	seen, err := f.dev.Pin(address, n)
	if cuda.Is(err, cuda.OutOfMemory) {
		f.o.Later.Force(Host)
	}
	return seen, err
}

// unpin gives back memory that is pinned, and to whom it belongs, later. The caller holds
// f.mu.
func (f *Fabric) unpin(r mem.Region, free func()) {
	if f.events != nil {
		f.events.forget(uint64(r.Addr))
	}
	f.o.Later.Do(Host, r.Len, func() {
		_ = f.o.Device.Unpin(uint64(r.Addr))
		free()
	})
}

// unpinMapped is unpin for what mem.Map gave.
func (f *Fabric) unpinMapped(r mem.Region) {
	f.unpin(r, func() { _ = mem.Unmap(r) })
}

// Name is inner's, and so are the addresses.
func (f *Fabric) Name() string                     { return f.inner.Name() }
func (f *Fabric) Addr() transport.Addr             { return f.inner.Addr() }
func (f *Fabric) Reaches(peer transport.Addr) bool { return f.inner.Reaches(peer) }

// Beyond implements transport.Explainer, if inner does.
func (f *Fabric) Beyond(peer transport.Addr) string { return transport.Beyond(f.inner, peer) }

// Connect implements transport.Fabric.
func (f *Fabric) Connect(ctx context.Context, peer transport.Addr) (transport.Conn, error) {
	in, err := f.inner.Connect(ctx, peer)
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return nil, errors.Join(transport.ErrClosed, in.Close())
	}
	return f.conn(in).self, nil
}

// conn is the Conn over one of inner, whose events may come before Connect
// returns.
func (f *Fabric) conn(in transport.Conn) *Conn {
	c := f.conns[in]
	if c == nil {
		c = &Conn{f: f, inner: in, jobs: make([]job, 1)}
		c.self = c
		if c.lender, _ = in.(transport.Lender); c.lender != nil {
			c.self = lendingConn{c}
		}
		f.conns[in] = c
	}
	return c
}

// pollEvery is how often a sleeping user is woken while a GPU works: it cannot
// ring.
const pollEvery = 50 * time.Microsecond

// FD is an epoll descriptor over inner's and a timer.
func (f *Fabric) FD() int {
	f.sleep.FD()
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return f.epoll
	}
	f.tick()
	f.look()
	f.slept = true
	if len(f.told) != 0 || f.at < f.got {
		f.arm(1)
	} else {
		f.arm(f.rest())
	}
	return f.epoll
}

// arm has the descriptor readable after d; 0: not at all.
func (f *Fabric) arm(d time.Duration) {
	at := unix.ItimerSpec{Value: unix.Timespec{Nsec: int64(d)}}
	_ = unix.TimerfdSettime(f.timer, 0, &at, nil)
}

// rouse wakes a sleeper who has not heard of work that a GPU has been given since.
func (f *Fabric) rouse() {
	if f.slept {
		f.slept = false
		f.arm(pollEvery)
	}
}

// tick looks once a second at what nobody tells of: whether the device still works,
// and, by way of scan, at mappings without a use.
func (f *Fabric) tick() {
	now := time.Now()
	if now.Sub(f.scan) < time.Second {
		return
	}
	f.scan = now
	if f.in.waiting() {
		idle, err := f.dev.Idle(f.in.stream)
		f.look()
		switch {
		case err != nil:
			f.in.fail(err)
		case idle && f.in.waiting(): // the flag of the last copy was not enqueued
			wordIn(f.in.page).Store(f.in.next)
		}
	}
	for _, c := range f.conns {
		if !c.copying() {
			continue
		}
		idle, err := f.dev.Idle(c.lane.stream)
		f.look()
		if err != nil || idle && c.over != nil && c.copying() { // what is left was not enqueued
			c.lane.broken = true
			c.seg().begun.Store(c.seg().done.Load()) // for the peer: none is under way
			c.fail(err)
			c.wake()
		}
	}
}

// rest tells peers to wake us, and says when to look how far GPUs are; 0: none is at
// work for us.
func (f *Fabric) rest() time.Duration {
	working, left := f.in.waiting() || len(f.in.queue) != 0, false
	for _, c := range f.conns {
		if c.lane.seg != nil {
			c.lane.seg.asleep.Store(1)
		}
		if c.through() && c.writing() { // for as long as the peer likes
			left = true
			continue
		}
		working = working || c.due() || c.coming()
	}
	switch {
	case working:
		return pollEvery
	case left:
		return deadEvery
	}
	return 0
}

// Poll implements transport.Fabric. It finds nothing while a Post has f.mu: that is in
// the driver for microseconds, and who parks meanwhile is not back for longer.
func (f *Fabric) Poll(ev []transport.Event) (int, error) {
	if !f.mu.TryLock() {
		return 0, nil
	}
	defer f.mu.Unlock()
	f.slept = false
	f.look()
	p := poll{ev: ev}
	f.tell(&p)
	f.land(&p)
	if f.polls++; f.polls%(1<<16) == 0 {
		f.tick()
	}
	var err error
	if f.at == f.got && p.room() {
		f.at = 0
		f.got, err = f.inner.Poll(f.ev[:])
	}
	for f.at < f.got && p.room() {
		f.event(&f.ev[f.at], &p)
		f.at++
	}
	f.service(&p)
	f.tell(&p)
	if p.n != 0 || f.at < f.got || len(f.told) != 0 {
		err = nil // it comes again
	}
	return p.n, err
}

// look finds out how far the streams are, if they do not say so by themselves.
func (f *Fabric) look() {
	if f.events != nil {
		f.events.settle()
	}
}

// poll is what one Poll has found.
type poll struct {
	ev []transport.Event
	n  int
}

func (p *poll) room() bool { return p.n < len(p.ev) }

func (p *poll) put(e transport.Event) {
	p.ev[p.n] = e
	p.n++
}

// tell gives the completions that wait, as far as p has room.
func (f *Fabric) tell(p *poll) {
	k := copy(p.ev[p.n:], f.told)
	p.n += k
	f.told = f.told[:copy(f.told, f.told[k:])]
}

// event takes one event of inner, for which p has room.
func (f *Fabric) event(e *transport.Event, p *poll) {
	c := f.conn(e.Conn)
	if e.Kind == transport.EvDone {
		c.open--
		c.finish(e.User, e.Err)
		return
	}
	if c.over != nil { // it has ended since inner was asked
		if e.Kind == transport.EvLent {
			_ = e.View.Drop()
		}
		return
	}
	switch e.Kind {
	case transport.EvDown:
		c.end(e.Err)
		return
	case transport.EvWritten:
		f.written(c, e, p)
		return
	case transport.EvLent:
		if c.expect > 0 {
			if err := c.greeted(e); err != nil {
				c.fail(err)
			}
			return
		}
	}
	out := *e
	out.Conn = c.self
	p.put(out)
}

// service does what is due on the Conns.
func (f *Fabric) service(p *poll) {
	kept := f.busy[:0]
	for _, c := range f.busy {
		c.arrive(p)
		c.advance()
		c.call()
		if c.ended() && p.room() && len(f.told) == 0 {
			c.down = true
			p.put(transport.Event{Kind: transport.EvDown, Conn: c.self, Err: c.over})
		}
		if c.gone() {
			c.release()
			delete(f.conns, c.inner)
			continue
		}
		if c.listed = c.due() || c.theirs != nil; c.listed {
			kept = append(kept, c)
		}
	}
	clear(f.busy[len(kept):])
	f.busy = kept
}

// Bind implements transport.Binder, if inner does.
func (f *Fabric) Bind(k transport.Key, conn transport.Conn) error {
	var c *Conn
	switch v := conn.(type) {
	case *Conn:
		c = v
	case lendingConn:
		c = v.Conn
	default:
		return fmt.Errorf("cudaipc: bind key %d: the connection belongs to another transport", k.ID)
	}
	f.mu.Lock()
	r := f.regions[k.ID]
	if r != nil {
		r.only = c
	}
	f.mu.Unlock()
	b, ok := f.inner.(transport.Binder)
	if !ok || r == nil {
		return nil
	}
	return errors.Join(b.Bind(r.last, c.inner), b.Bind(r.part, c.inner))
}

// settleLimit bounds how long Deregister and Close wait for copies that are under
// way. The wire needs microseconds; a copy may wait behind a kernel though.
const settleLimit = 5 * time.Second

// Close implements transport.Fabric.
func (f *Fabric) Close() error {
	err := f.inner.Close()
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return errors.Join(err, f.ended)
	}
	f.closed = true
	for _, c := range f.conns {
		c.stop()
	}
	for _, r := range f.regions {
		if r.Dev != mem.CPU { // who has not begun to write there will not
			tableIn(f.table.Region())[r.slot].Store(0)
		}
	}
	for end := time.Now().Add(settleLimit); ; {
		f.look()
		f.tick()
		left := f.in.waiting()
		for _, c := range f.conns {
			c.advance()
			left = left || c.first != c.last || c.copying() || c.writing() // a copy may have ended since advance looked
		}
		if !left {
			break
		}
		if time.Now().After(end) {
			f.ended = fmt.Errorf("cudaipc: close: copies on %v have not finished within %v (a kernel before them does not end), so their memory stays pinned", f.name(), settleLimit)
			return errors.Join(err, f.ended)
		}
		f.mu.Unlock()
		time.Sleep(20 * time.Microsecond)
		f.mu.Lock()
		f.in.forget()
	}
	for _, c := range f.conns {
		c.release()
	}
	for id, r := range f.regions {
		if id == r.last.ID {
			f.discard(r)
		}
	}
	clear(f.regions)
	f.release()
	f.o.Later.Wait(settleLimit)
	return err
}

func (f *Fabric) name() mem.Device { return mem.GPU(f.dev.Ordinal()) }
