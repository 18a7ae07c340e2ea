package inproc

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"fserver/engine/mem"
	"fserver/engine/transport"
)

// A Fabric is a transport.Fabric and transport.Sleeper in a Network.
type Fabric struct {
	net    *Network
	name   string
	listen bool
	gate   transport.Gate
	limits transport.Limits
	depth  int
	bell   *bell
	done   chan struct{} // closed by Close and Kill
	once   sync.Once     // of Close
	alarm  *time.Timer   // rings the bell while bytes are owed, for Limits.Stall

	// Guarded by net.mu.
	over     error // why Poll and the rest are at an end
	killed   bool
	conns    []*Conn // with events to come
	regions  map[uint64]region
	lastID   uint64
	pending  int    // peers inside the Gate
	polls    uint64 // so far: the clock of delays
	next     int    // the Conn that the next Poll serves first
	lent     [][]byte
	alarmSet bool
	failIn   int   // ops until the one that fails; 0: none does
	failWith error // its error

	// touched is who must be woken after the Poll or Post that is running.
	touched wakes
}

// region is registered memory.
type region struct {
	mem.Region
	token uint64
}

var (
	_ transport.Fabric  = (*Fabric)(nil)
	_ transport.Sleeper = (*Fabric)(nil)
	_ transport.Conn    = (*Conn)(nil)
)

// Name is "inproc/NAME".
func (f *Fabric) Name() string { return "inproc/" + f.name }

// Addr is "inproc:NAME", or empty if the Fabric takes no connections.
func (f *Fabric) Addr() transport.Addr {
	if !f.listen {
		return ""
	}
	return transport.Addr(prefix + f.name)
}

// Reaches says whether peer is an address of this transport.
func (f *Fabric) Reaches(peer transport.Addr) bool {
	_, ok := nameOf(peer)
	return ok
}

// FD is an eventfd.
func (f *Fabric) FD() int { return f.bell.fd }

// Register implements transport.Fabric.
func (f *Fabric) Register(r mem.Region) (transport.Key, error) {
	if r.Dev != mem.CPU {
		return transport.Key{}, fmt.Errorf("inproc: register %d bytes on %v: want host memory", r.Len, r.Dev)
	}
	f.net.mu.Lock()
	defer f.net.mu.Unlock()
	if f.over != nil {
		return transport.Key{}, fmt.Errorf("inproc: register %d bytes: %w", r.Len, f.over)
	}
	f.lastID++
	// The token need not be secret inside one process, only unlike others.
	token := mix(f.net.seed, f.name, f.lastID)
	f.regions[f.lastID] = region{r, token}
	return transport.Key{ID: f.lastID, Token: token}, nil
}

// Deregister implements transport.Fabric.
func (f *Fabric) Deregister(k transport.Key) error {
	f.net.mu.Lock()
	defer f.net.mu.Unlock()
	if r, ok := f.regions[k.ID]; !ok || r.token != k.Token {
		return fmt.Errorf("inproc: deregister region %d: not registered", k.ID)
	}
	delete(f.regions, k.ID)
	return nil
}

// lookup is the n bytes at off of the region that k names. The caller holds
// net.mu for as long as it uses the memory, so that Deregister waits.
func (f *Fabric) lookup(k transport.Key, off, n uint64) (mem.Span, error) {
	r, ok := f.regions[k.ID]
	if !ok || r.token != k.Token {
		return mem.Span{}, fmt.Errorf("region %d is not registered with this token", k.ID)
	}
	return r.Slice(off, n)
}

// pollBytes bounds the bytes that one Poll copies.
const pollBytes = 1 << 20

// Poll implements transport.Fabric. On a closed Fabric it gives the open ops'
// completions, then transport.ErrClosed.
func (f *Fabric) Poll(ev []transport.Event) (int, error) {
	f.bell.take()
	f.net.mu.Lock()
	k, err := f.poll(ev)
	f.net.mu.Unlock()
	f.touched.ring()
	return k, err
}

func (f *Fabric) poll(ev []transport.Event) (int, error) {
	if f.killed {
		return 0, f.over
	}
	for i, b := range f.lent {
		f.net.spare.put(b)
		f.lent[i] = nil
	}
	f.lent = f.lent[:0]
	f.polls++
	r := round{ev: ev, now: time.Now(), budget: pollBytes}
	count := len(f.conns)
	for i := range count {
		f.conns[(f.next+i)%count].poll(&r)
	}
	f.next++
	if r.gone {
		f.conns = slices.DeleteFunc(f.conns, (*Conn).gone)
	}
	if r.again || (r.n == len(ev) && len(f.conns) > 0) {
		f.touched.add(f)
	}
	if r.owed {
		f.watch()
	}
	if r.n == 0 && f.over != nil && len(f.conns) == 0 {
		return 0, f.over
	}
	return r.n, nil
}

// A round is one Poll: what it has found and what it may still do.
type round struct {
	ev     []transport.Event
	n      int // events in ev
	now    time.Time
	budget int  // bytes that may still be copied
	again  bool // a next Poll could make progress without anybody else's doing
	owed   bool // peers have not taken all that was posted
	gone   bool // a Conn has given its last event
}

// put adds an event; false means that there is no room.
func (r *round) put(e transport.Event) bool {
	if r.n == len(r.ev) {
		return false
	}
	r.ev[r.n] = e
	r.n++
	return true
}

// watch makes the bell ring from time to time, for a user that sleeps while its
// peers stand still. The caller holds net.mu.
func (f *Fabric) watch() {
	if !f.alarmSet && f.over == nil {
		f.alarmSet = true
		f.alarm.Reset(f.limits.Stall/4 + time.Millisecond)
	}
}

func (f *Fabric) alarmed() {
	f.net.mu.Lock()
	f.alarmSet = false
	f.net.mu.Unlock()
	f.bell.ring()
}

// Close implements transport.Fabric. Its peers see io.EOF.
func (f *Fabric) Close() error {
	f.once.Do(func() {
		var w wakes
		f.net.mu.Lock()
		f.shut(transport.ErrClosed, &w)
		for _, c := range f.conns {
			c.close(&w)
		}
		f.net.mu.Unlock()
		w.ring()
		f.bell.close()
	})
	return nil
}

// shut ends what is not a Conn. The caller holds net.mu.
func (f *Fabric) shut(why error, w *wakes) {
	if f.over != nil {
		return
	}
	f.over = why
	close(f.done)
	delete(f.net.fabrics, f.name)
	clear(f.regions)
	f.alarm.Stop()
	w.add(f)
}

var errKilled = errors.New("inproc: the fabric was killed")

// wakes are Fabrics whose bell is to ring once net.mu is free.
type wakes []*Fabric

func (w *wakes) add(f *Fabric) {
	if !slices.Contains(*w, f) {
		*w = append(*w, f)
	}
}

// ring rings and empties w.
func (w *wakes) ring() {
	for i, f := range *w {
		f.bell.ring()
		(*w)[i] = nil
	}
	*w = (*w)[:0]
}
