package rails

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"golang.org/x/sys/unix"

	"fserver/engine/transport"
)

// dead says that a member Fabric has failed. It is closed, which ends what its peers may still write, and asked for the
// events that it still owes. Keys have a hole at its place.
type dead struct {
	why  error // nil: it works
	shut bool  // its Close has returned
	over bool  // it has no more events: it is not called any more
}

func absent(m transport.Fabric) bool {
	_, ok := m.(*transport.Absent)
	return ok
}

// answers reports whether a member may be called under mu. One that has failed is not called until its Close has returned, which may
// hold its lock for long. Close ends all of its Conns and keys.
func (f *Fabric) answers(at int) bool {
	d := &f.dead[at]
	return d.why == nil || d.shut && !d.over
}

// works says why a member Fabric cannot be used, or nil.
func (f *Fabric) works(at int) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.dead[at].why
}

// broke takes an error of a member's Poll, which found n events. It returns an error of the whole: a panic in a
// goroutine of the member, or that we are closing.
func (f *Fabric) broke(at, n int, err error) error {
	if err == nil {
		return nil // each Poll comes here: without an allocation
	}
	d := &f.dead[at]
	switch panicked := (*transport.PanicError)(nil); {
	case f.closing || errors.As(err, &panicked):
		return err
	case d.why == nil:
		d.why = err
		// A forked child may hold it open after Close. Arm asks for Polls meanwhile.
		_ = unix.EpollCtl(f.FD(), unix.EPOLL_CTL_DEL, f.members[at].FD(), nil)
		for _, r := range slices.Collect(maps.Values(f.rails)) { // they do not wait until Close has returned
			if r.at == at && r.down == nil {
				r.wentDown(err)
			}
		}
		f.task(func() {
			why := f.members[at].Close()
			f.locked(func() { d.shut = true })
			if f.o.Failed != nil {
				f.o.Failed(at, errors.Join(err, why))
			}
		})
	case d.shut && n == 0:
		f.bury(at)
	}
	if !slices.ContainsFunc(f.dead, func(d dead) bool { return d.why == nil }) {
		f.lost = fmt.Errorf("rails: no fabric is left: %w", d.why)
	}
	return nil
}

// gone reports whether a member has failed as a whole. err is of a call of it, and may be the first to say so.
func (f *Fabric) gone(at int, err error) bool {
	device := (*transport.DeviceError)(nil)
	if errors.As(err, &device) {
		f.locked(func() { _ = f.broke(at, 0, err) }) // Poll will say it
	}
	return f.works(at) != nil
}

// bury takes that a member Fabric has given its last event.
func (f *Fabric) bury(at int) {
	f.dead[at].over = true
	for id := range f.keys.ending[at] {
		f.freed(at, id)
	}
}

// freed takes that a member has let go of a key.
func (f *Fabric) freed(at int, key uint64) {
	if id, ok := f.keys.freed(at, key); ok {
		f.told = append(f.told, done{user: id})
	}
}
