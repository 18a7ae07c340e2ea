package exchange

import (
	"fmt"
	"sync"

	"fserver/engine/mem"
)

// Buffers owns the receive buffers of all nodes of a process, and what workers
// lend them. A buffer lives as long as its server uses it or somebody looks at
// it: tensors over it may outlive the server.
type Buffers struct {
	mu   sync.Mutex
	next uint64
	all  map[uint64]*buffer
	free []*buffer

	elements Elements
}

type buffer struct {
	region mem.Region // own memory,
	from   Memory     // of this kind
	view   *mem.View  // or a worker's
	used   bool       // by its server
	seen   uint64     // tensors in it that were handed out and not released
}

// Memory is where receive buffers lie. It outlives them, and is safe for concurrent
// use.
type Memory interface {
	Alloc(n uint64) (mem.Region, error) // n > 0, whole pages
	Free(mem.Region) error
}

// CPU is the memory of the host.
type CPU struct{}

// lead is where in its first page a buffer begins: copies between two addresses of the same offset in a page are some
// percent slower, and the kernel's buffers of a socket begin with a page.
const lead = 256

// Alloc implements Memory.
func (CPU) Alloc(n uint64) (mem.Region, error) {
	r, err := mem.Map(lead + n)
	if err != nil {
		return r, err
	}
	r.Addr, r.Len = r.Addr+lead, r.Len-lead
	return r, nil
}

// Free implements Memory.
func (CPU) Free(r mem.Region) error {
	r.Addr, r.Len = r.Addr-lead, r.Len+lead
	return mem.Unmap(r)
}

// NewBuffers makes an empty set.
func NewBuffers() *Buffers { return &Buffers{all: map[uint64]*buffer{}} }

// Hold says what types of tensors can be made over the buffers: servers that are made from
// now on refuse others.
func (b *Buffers) Hold(e Elements) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.elements = e
}

// Holds returns what Hold was given.
func (b *Buffers) Holds() Elements {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.elements
}

// Len is the number of buffers that are alive.
func (b *Buffers) Len() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.all)
}

// Release says that nobody looks any more at so many of the tensors that were handed out in buffer id.
func (b *Buffers) Release(id, times uint64) error {
	b.mu.Lock()
	var seen uint64
	e := b.all[id]
	if e != nil {
		seen = e.seen
	}
	if times == 0 || times > seen {
		b.mu.Unlock()
		return fmt.Errorf("exchange: buffer %d is released %d times, but %d of its tensors are handed out", id, times, seen)
	}
	e.seen -= times
	return b.collect(id, e)
}

// maxBuffer bounds one receive buffer, bytes. A request for more is a mistake,
// and an honest limit of memory comes long before.
const maxBuffer = 1 << 42

// make makes a buffer of at least n bytes.
func (b *Buffers) make(m Memory, n uint64) (uint64, mem.Region, error) {
	if n > maxBuffer {
		return 0, mem.Region{}, fmt.Errorf("exchange: a receive buffer of %d bytes is too large: want at most %d (push smaller tensors)", n, uint64(maxBuffer))
	}
	r, err := m.Alloc((n + 4095) &^ 4095)
	if err != nil {
		return 0, mem.Region{}, err
	}
	return b.add(buffer{region: r, from: m, used: true}), r, nil
}

// lend makes a buffer of what a worker lends; it takes over the hold.
func (b *Buffers) lend(v *mem.View) uint64 { return b.add(buffer{view: v, used: true}) }

func (b *Buffers) add(e buffer) uint64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	var at *buffer
	if n := len(b.free); n > 0 {
		at, b.free = b.free[n-1], b.free[:n-1]
	} else {
		at = new(buffer)
	}
	*at = e
	b.next++
	b.all[b.next] = at
	return b.next
}

// hand notes that the application is about to see the buffers of a request: from now on it owes a Release for each
// tensor. One Release when the application has dropped a buffer would not do: another of its threads may have been
// handed the same buffer and not have looked yet.
func (b *Buffers) hand(push []Received) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i := range push {
		if id := push[i].Buffer; id != 0 {
			b.all[id].seen++
		}
	}
}

// drop says that the server does not use the buffer any more.
func (b *Buffers) drop(id uint64) error {
	b.mu.Lock()
	e := b.all[id]
	e.used = false
	return b.collect(id, e)
}

// collect frees a buffer that nobody needs. It gives the lock back.
func (b *Buffers) collect(id uint64, e *buffer) error {
	if e.used || e.seen != 0 {
		b.mu.Unlock()
		return nil
	}
	delete(b.all, id)
	region, from, view := e.region, e.from, e.view
	*e = buffer{}
	b.free = append(b.free, e)
	b.mu.Unlock() // giving memory back may take long
	if view != nil {
		return view.Drop()
	}
	return from.Free(region)
}
