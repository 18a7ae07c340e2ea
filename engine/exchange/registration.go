package exchange

import (
	"fserver/engine/mem"
	"fserver/engine/transport"
)

// registration is the key of an allocation at one Fabric.
type registration struct {
	fabric transport.Fabric
	key    transport.Key
	region mem.Region
	cached bool
}

func (w *Worker) register(f transport.Fabric, x *Tensor) (registration, error) {
	if x.Alloc != 0 {
		list := w.regs[x.Alloc]
		for i := range list {
			if list[i].fabric != f {
				continue
			}
			if list[i].region == x.Base {
				return list[i], nil
			}
			// The allocation has been resized in place.
			if err := f.Deregister(list[i].key); err != nil {
				return registration{}, err
			}
			w.regs[x.Alloc] = append(list[:i], list[i+1:]...)
			break
		}
	}
	k, err := f.Register(x.Base)
	if err != nil {
		return registration{}, err
	}
	r := registration{f, k, x.Base, x.Alloc != 0}
	if r.cached {
		w.regs[x.Alloc] = append(w.regs[x.Alloc], r)
	}
	return r, nil
}

// unregister lets go of the registrations of t.
func (w *Worker) unregister(t *Ticket) {
	for i := range t.regs {
		w.letGo(&t.regs[i])
	}
}

// letGo ends a registration of a ticket for it. One that is cached stays, unless it is stale
// and no other ticket names it.
func (w *Worker) letGo(r *registration) {
	switch {
	case r.fabric == nil:
	case !r.cached:
		_ = r.fabric.Deregister(r.key) // the Fabric is closed: nothing is left to drop
	case len(w.stale) != 0:
		if n := w.stale[*r]; n > 1 {
			w.stale[*r] = n - 1
		} else if n == 1 {
			w.endRegistration(*r)
		}
	}
	*r = registration{}
}

func (w *Worker) forget(alloc uint64) {
	for _, r := range w.regs[alloc] {
		_ = r.fabric.Deregister(r.key)
	}
	delete(w.regs, alloc)
}

// retain keeps the registrations that tickets name until the last of these lets go: other
// servers may still be writing with them. The others end.
func (w *Worker) retain(list []registration) {
	named := make(map[registration]int, len(list))
	for _, r := range list {
		named[r] = 0
	}
	for _, t := range w.active {
		if t == nil {
			continue
		}
		for _, r := range t.regs {
			if n, ok := named[r]; ok {
				named[r] = n + 1
			}
		}
	}
	for r, n := range named {
		if w.stale[r] = n; n == 0 {
			w.endRegistration(r)
		}
	}
}

// endRegistration ends the key of a stale registration.
func (w *Worker) endRegistration(r registration) {
	delete(w.stale, r)
	_ = r.fabric.Deregister(r.key) // the Fabric is closed: nothing is left to drop
}
