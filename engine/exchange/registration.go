package exchange

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"fserver/engine/mem"
	"fserver/engine/transport"
)

// freed names a Key whose EvFreed is waited for.
type freed struct {
	fabric transport.Fabric
	key    uint64 // its ID
}

// quiet are the Conns of lost peers that may still write: each is closed with its Conn.
type quiet []chan struct{}

// calmLimit bounds how long a call waits for that.
const calmLimit = 5 * time.Second

func (q quiet) wait() error {
	limit := time.After(calmLimit)
	for _, over := range q {
		select {
		case <-over:
		case <-limit:
			return fmt.Errorf("a process whose connection was lost may still write to memory of this one, for %v (end that process)", calmLimit)
		}
	}
	return nil
}

// ends is what the owner waits for when something ends at a Fabric.
type ends struct {
	freed  map[freed]func()
	closed map[transport.Conn]*closing // of peers that are lost
	over   bool                        // all Fabrics are closed: nobody touches memory any more
}

// closing waits for EvClosed.
type closing struct {
	over chan struct{}
	then []func() // for the owner
}

// Freed takes EvFreed of a key of f, and Closed EvClosed.
func (e *ends) Freed(f transport.Fabric, key uint64) {
	at := freed{f, key}
	if then := e.freed[at]; then != nil {
		delete(e.freed, at)
		then()
	}
}

func (e *ends) Closed(c transport.Conn) {
	if x := e.closed[c]; x != nil {
		delete(e.closed, c)
		close(x.over)
		for _, then := range x.then {
			then()
		}
	}
}

// afterFreed calls then when a key is freed that is being deregistered.
func (e *ends) afterFreed(at freed, then func()) {
	if e.over {
		then()
	} else {
		e.freed[at] = then
	}
}

// lost adds c, which a peer that is lost had, to those in q that have not ended.
func (e *ends) lost(c transport.Conn, q quiet) (next quiet) {
	for _, over := range q {
		select {
		case <-over:
		default:
			next = append(next, over)
		}
	}
	if c != nil && !e.over {
		x := &closing{over: make(chan struct{})}
		e.closed[c] = x
		next = append(next, x.over)
	}
	return next
}

// Over says that all Fabrics are closed, so that nobody touches memory any more.
func (e *ends) Over() {
	e.over = true
	for c := range e.closed {
		e.Closed(c)
	}
	for at := range e.freed {
		e.Freed(at.fabric, at.key)
	}
}

// registration is the key of an allocation at one Fabric.
type registration struct {
	ring   *keyring
	key    transport.Key
	region mem.Region
	era    uint64       // of the ring
	cached bool         // in the ring; else it ends when no ticket names it
	uses   atomic.Int32 // tickets that name it: Region.InUse, as the memory may be gone when it is 0
}

// keyring is what a node has registered with one Fabric, but for receive buffers.
type keyring struct {
	fabric transport.Fabric
	local  bool                     // the Fabric sends what is registered
	gpu    mem.Device               // whose memory it takes by itself, or mem.CPU
	points bool                     // it takes points
	at     int                      // in keys.rings
	all    map[uint64]*registration // by allocation
	era    uint64                   // how often peers on the Fabric were lost; the owner writes it
	calm   quiet                    // of peers that know keys of the eras before
}

// keys are the keys of a worker's pull tensors and of what a node sends. Callers look them up and
// make new ones; the owner ends them.
type keys struct {
	mu    sync.Mutex  // held for a few instructions, never while a Fabric registers
	rings []*keyring  // one for each Fabric
	paths []*keyring  // by peer; nil: it has had no path yet
	local atomic.Bool // a Fabric sends what is registered

	givenUp *atomic.Uint64 // see Table.Words
}

// path has the keys for peer i made at f.
func (ks *keys) path(i int, f transport.Fabric) *keyring {
	ks.mu.Lock()
	defer ks.mu.Unlock()
	for _, r := range ks.rings {
		if r.fabric == f {
			ks.paths[i] = r
			return r
		}
	}
	caps := f.Caps()
	r := &keyring{fabric: f, local: caps.LocalKeys, gpu: caps.GPU, points: caps.Points, at: len(ks.rings), all: map[uint64]*registration{}}
	ks.rings, ks.paths[i] = append(ks.rings, r), r
	if r.local {
		ks.local.Store(true)
	}
	return r
}

// Direct reports whether every peer has a path that takes memory of GPU d by itself. Safe from any goroutine.
func (tb *Table) Direct(d mem.Device) bool {
	ks := &tb.keys
	ks.mu.Lock()
	defer ks.mu.Unlock()
	for _, r := range ks.paths {
		if r == nil || r.gpu != d {
			return false
		}
	}
	return true
}

// acquire gives regs, which are of pull tensors of server i, their keys. With block it registers what is new; else it gives
// those that there are.
func (ks *keys) acquire(i int, tensors []Tensor, regs []*registration, block bool) (err error) {
	blobs := 0
	ks.mu.Lock()
	defer ks.mu.Unlock()
	ring := ks.paths[i]
	if ring == nil {
		return nil
	}
	for j := range tensors {
		x := &tensors[j]
		if x.Span.Len == 0 {
			continue
		}
		if regs[j], err = ks.use(ring, x, block); err != nil {
			return fmt.Errorf("exchange: pull tensor of key %d: %w", x.Key, err)
		}
		if regs[j] != nil {
			blobs += len(regs[j].key.Blob)
		}
	}
	if blobs > maxBlobs {
		err = Shapef("exchange: push_pull: the keys of %d pull tensors take %d bytes, and there is room for %d in a frame of %d (pull fewer tensors in one call)", len(regs), blobs, maxBlobs, transport.MaxFrame)
	}
	return err
}

// errUnknown says that something that t sends is not registered yet.
var errUnknown = errors.New("exchange: a tensor is not registered")

// source finds the registrations of what t sends with each Fabric that sends what is registered. With block it registers what
// is new. Without, the error may be errUnknown; a later call then begins with that Fabric again.
func (ks *keys) source(t *Ticket, block bool) error {
	if !ks.local.Load() {
		return nil
	}
	ks.mu.Lock()
	defer ks.mu.Unlock()
	for ; t.rings < len(ks.rings); t.rings++ {
		ring := ks.rings[t.rings]
		for j := 0; ring.local && j < len(t.push); j++ {
			if !ring.sends(&t.push[j]) {
				continue
			}
			r, err := ks.use(ring, &t.push[j], block)
			switch {
			case err != nil:
				return fmt.Errorf("exchange: tensor %d cannot be sent: %w", j, err)
			case r == nil:
				return errUnknown
			}
			t.regs = append(t.regs, r)
		}
	}
	return nil
}

// sends reports whether the Fabric sends x by its registration.
func (ring *keyring) sends(x *Tensor) bool {
	return x.Span.Len != 0 && (x.Dev == mem.CPU || x.Dev == ring.gpu)
}

// use finds the key of the allocation of x for a ticket. If there is none, it makes it with block, and gives the lock back
// while the Fabric registers; else it returns nil.
func (ks *keys) use(ring *keyring, x *Tensor, block bool) (*registration, error) {
	r := ring.all[x.Alloc]
	if r == nil || r.region != x.Base {
		if !block {
			return nil, nil
		}
		r = &registration{ring: ring, region: x.Base}
		k, err := ks.call(r)
		if err != nil {
			return nil, err
		}
		r.key, r.era = k, ring.era
		old := ring.all[x.Alloc]
		if x.Alloc != 0 && (old == nil || old.region != x.Base) { // else another thread was faster
			if old != nil { // the allocation has been resized in place
				old.uncache()
			}
			r.cached, ring.all[x.Alloc] = true, r
		}
	}
	r.uses.Add(1)
	return r, nil
}

// call registers the memory of r without the lock, when no peer that is lost writes to the same memory any more.
func (ks *keys) call(r *registration) (transport.Key, error) {
	calm, region := r.ring.calm, r.region
	region.InUse = &r.uses
	ks.mu.Unlock()
	defer ks.mu.Lock()
	if err := calm.wait(); err != nil {
		return transport.Key{}, err
	}
	return ks.register(r.ring.fabric, region)
}

// register registers with a Fabric. If no more memory can be locked, it gives up registrations that are not in use and tries
// again. If that is not enough, memory of a GPU is registered with Scarce. It may block.
func (ks *keys) register(f transport.Fabric, r mem.Region) (transport.Key, error) {
	k, err := f.Register(r)
	if errors.Is(err, syscall.ENOMEM) && ks.spare() {
		for wait := time.Millisecond; errors.Is(err, syscall.ENOMEM) && wait < spareLimit; wait *= 2 {
			time.Sleep(wait) // what is given up is let go of meanwhile
			k, err = f.Register(r)
		}
	}
	if errors.Is(err, syscall.ENOMEM) && r.Dev != mem.CPU {
		r.Scarce = true
		k, err = f.Register(r)
	}
	return k, err
}

// spareLimit bounds how long register waits for the memory of registrations that it has given up.
const spareLimit = 256 * time.Millisecond

// spare gives up all registrations that no ticket names, because no more memory can be locked. It reports whether there
// were any.
func (ks *keys) spare() (found bool) {
	ks.mu.Lock()
	defer ks.mu.Unlock()
	for _, ring := range ks.rings {
		for alloc, r := range ring.all {
			if r.uses.Load() == 0 {
				delete(ring.all, alloc)
				r.uncache()
				found = true
			}
		}
	}
	if found {
		ks.givenUp.Add(1)
	}
	return found
}

// uncache ends r if no ticket names it, as it reports. The caller takes it from its ring.
func (r *registration) uncache() (ended bool) {
	r.cached = false
	if r.uses.Load() != 0 {
		return false
	}
	r.ring.fabric.Deregister(r.key)
	return true
}

// letGo takes the keys from a ticket. It returns those that end with it. shared: another ticket still has a key that was revoked.
func (ks *keys) letGo(regs []*registration) (over []freed, shared bool) {
	if len(regs) == 0 {
		return nil, false
	}
	ks.mu.Lock()
	defer ks.mu.Unlock()
	for i, r := range regs {
		if r != nil {
			r.uses.Add(-1)
			switch {
			case r.cached:
			case r.uncache():
				over = append(over, freed{r.ring.fabric, r.key.ID})
			default:
				shared = true
			}
			regs[i] = nil
		}
	}
	return over, shared
}

// calm is what may still write with keys of peers that are lost. regs were acquired together, so they are of one ring.
func (ks *keys) calm(regs []*registration) quiet {
	ks.mu.Lock()
	defer ks.mu.Unlock()
	for _, r := range regs {
		if r != nil {
			return r.ring.calm
		}
	}
	return nil
}

// forget ends the keys of an allocation that is gone, when no ticket names them any more.
func (ks *keys) forget(alloc uint64) {
	ks.mu.Lock()
	defer ks.mu.Unlock()
	for _, ring := range ks.rings {
		if r := ring.all[alloc]; r != nil {
			delete(ring.all, alloc)
			r.uncache()
		}
	}
}

// revoke has nothing new use the keys of a ring any more: a peer that is lost may know all of them,
// and may write with them until calm.
func (ks *keys) revoke(ring *keyring, calm quiet) {
	ks.mu.Lock()
	defer ks.mu.Unlock()
	for _, r := range ring.all {
		r.uncache()
	}
	clear(ring.all)
	ring.era++
	ring.calm = calm
	ks.givenUp.Add(1)
}
