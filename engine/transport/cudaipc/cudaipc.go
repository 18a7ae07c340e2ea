// Package cudaipc lets GPU memory travel over another Fabric, inner, which carries host
// memory alone: connections, and who may talk, are inner's.
//
// # Three ways of a write
//
// Mapped: inner is of this host, and the peer's GPU memory can be mapped. The copy engine
// writes it there, and the stream then stores the write's number into host memory that both
// processes map (segment_unsafe.go). No CPU takes part after Post, no call into the driver
// waits, no SM is used.
//
// Staged: the copy engine brings the source to pinned host memory in pieces, and each goes
// over inner while the next is copied (stage.go). GPU memory has a shadow in host memory,
// which such writes land in. Its key is what a peer sees as that of the memory. Behind each
// write the sender tells the receiver to lift it, that is, to copy it from the shadow to the
// GPU (land.go).
//
// Held: host memory that a stream is still to fill waits here until the stream has passed the
// point (Op.After).
//
// # Frames
//
// A frame that comes behind mapped writes carries how many were begun before it on its Conn,
// and the receiver gives it when as many have ended. So does a frame that arrives while
// copies from shadows are under way (held.go). A frame whose writes are still to be started,
// or to be handed to inner, waits at the sender. A frame that waits for nothing travels over
// inner as it is, so peers without GPU memory need not be wrapped (message.go).
//
// A node without a GPU has a Fabric without a Device. It wraps only the Conns to nodes with
// one, to tell them what to lift, and hands out inner's Conns for all others (bare.go).
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
// A peer that is allowed to map memory can write anywhere in its allocation, as with cma. Its
// own checks of keys and bounds guard against mistakes, not against malice.
package cudaipc

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
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
	Device Device // nil: this node has no GPU
	// HasGPU says by its hello whether a peer may have GPU memory. It is for a Fabric
	// without a Device; the others treat all peers alike.
	HasGPU func(hello []byte) bool
	// Share says that the peers are processes of this host, so that GPU memory
	// can be mapped. Conns of inner are Lenders then.
	Share bool
	// Events has the CPU ask events how far copies to and from its own memory are,
	// instead of having the streams say so in host memory.
	Events bool
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
	regions map[uint64]*region       // GPU memory, by the IDs of its keys
	free    []uint32                 // slots of the table
	used    uint32                   // slots that were ever used
	table   *mem.Shared
	in      landing
	scan    time.Time // of the last tick
	polls   uint64
	slept   bool // FD was asked for, and no Poll since

	tracked atomic.Int32 // without a Device: Conns that are wrapped, and Connects under way
}

// Wrap puts a Fabric over inner, which is a Sleeper, and is closed by the
// Fabric's Close. With an error, inner is still the caller's.
func Wrap(inner transport.Fabric, o Options) (*Fabric, error) {
	s, ok := inner.(transport.Sleeper)
	if !ok {
		return nil, fmt.Errorf("cudaipc: transport %s has no descriptor to wait on", inner.Name())
	}
	if o.Later == nil {
		o.Later = new(Later)
	}
	f := &Fabric{
		inner: inner, sleep: s, dev: o.Device, o: o, secret: secret, spaces: ownSpaces(), epoll: -1, timer: -1,
		conns: map[transport.Conn]*Conn{}, regions: map[uint64]*region{},
	}
	if o.Device == nil {
		return f, nil
	}
	if o.Events {
		f.events = &byEvents{Device: o.Device}
		f.dev = f.events
	}
	var b [8]byte
	rand.Read(b[:])
	f.id = binary.LittleEndian.Uint64(b[:])
	if err := f.open(); err != nil {
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
	f.tracked.Add(1) // before an event of the new Conn can come
	defer f.tracked.Add(-1)
	in, err := f.inner.Connect(ctx, peer)
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return nil, errors.Join(transport.ErrClosed, in.Close())
	}
	if !f.wraps(in) {
		return in, nil
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
		f.tracked.Add(1)
	}
	return c
}

// forget drops a Conn that has no more events to give.
func (f *Fabric) forget(c *Conn) {
	c.release()
	delete(f.conns, c.inner)
	f.tracked.Add(-1)
}

// Bind implements transport.Binder, if inner does.
func (f *Fabric) Bind(k transport.Key, conn transport.Conn) error {
	f.mu.Lock()
	c := wrapped(conn)
	if c != nil {
		conn = c.inner
	}
	if r := f.regions[k.ID]; r != nil && c != nil {
		r.only = c
	}
	f.mu.Unlock()
	if b, ok := f.inner.(transport.Binder); ok {
		return b.Bind(k, conn) // it knows a Conn that is not its own
	}
	return nil
}

// wrapped returns the Conn behind one that a Fabric gave out; nil if that is inner's.
func wrapped(conn transport.Conn) *Conn {
	switch v := conn.(type) {
	case *Conn:
		return v
	case lendingConn:
		return v.Conn
	}
	return nil
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
	for _, r := range f.regions { // who has not begun to write there will not
		tableIn(f.table.Region())[r.slot].Store(0)
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
	}
	for _, c := range f.conns {
		c.release()
	}
	for _, r := range f.regions {
		f.discard(r)
	}
	clear(f.regions)
	f.release()
	f.o.Later.Wait(settleLimit)
	return err
}

// name is the GPU; the CPU if there is none.
func (f *Fabric) name() mem.Device {
	if f.dev == nil {
		return mem.CPU
	}
	return mem.GPU(f.dev.Ordinal())
}
