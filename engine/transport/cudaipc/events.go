package cudaipc

import (
	"errors"
	"slices"

	"fserver/cshim/cuda"
	"fserver/engine/mem"
)

// byEvents is a Device whose flags the CPU stores, when it finds that an event
// behind the copies has passed: for a driver or machine where the stores of streams
// to host memory are not to be relied on. Its user calls settle in each Poll, and
// all with f.mu held.
type byEvents struct {
	Device
	pins  []pinned
	marks []mark // by the order of their Enqueue in each stream
	spare []cuda.Event
}

type pinned struct {
	host mem.Region
	seen uint64
}

// mark is a flag that is to be stored.
type mark struct {
	stream cuda.Stream
	event  cuda.Event
	flag   mem.Region
	value  uint64
}

func (b *byEvents) Pin(address, n uint64) (uint64, error) {
	seen, err := b.Device.Pin(address, n)
	if err == nil {
		b.pins = append(b.pins, pinned{mem.Region{Addr: uintptr(address), Len: n}, seen})
	}
	return seen, err
}

// forget is to come before Unpin.
func (b *byEvents) forget(address uint64) {
	b.pins = slices.DeleteFunc(b.pins, func(p pinned) bool { return uint64(p.host.Addr) == address })
}

func (b *byEvents) Enqueue(s cuda.Stream, e cuda.Event, copies []cuda.Copy, flag, value uint64) error {
	if len(b.spare) == 0 {
		made, err := b.NewEvent()
		if err != nil {
			return err
		}
		b.spare = append(b.spare, made)
	}
	if err := b.Device.Enqueue(s, e, copies, 0, 0); err != nil {
		return err
	}
	own := b.spare[len(b.spare)-1]
	if err := b.Record(own, s); err != nil {
		return err
	}
	for _, p := range b.pins {
		if off := flag - p.seen; off < p.host.Len {
			at := mem.Region{Addr: p.host.Addr + uintptr(off), Len: 8}
			b.marks = append(b.marks, mark{s, own, at, value})
			b.spare = b.spare[:len(b.spare)-1]
			return nil
		}
	}
	return errors.New("cudaipc: enqueue: the flag is not in pinned memory")
}

// settle stores the flags whose events have passed, in each stream in order.
func (b *byEvents) settle() {
	left := b.marks[:0]
	for _, m := range b.marks {
		held := false
		for i := range left {
			held = held || left[i].stream == m.stream
		}
		if passed, err := b.Passed(m.event); held || err != nil || !passed {
			left = append(left, m)
			continue
		}
		wordIn(m.flag).Store(m.value)
		b.spare = append(b.spare, m.event)
	}
	b.marks = left
}

// close gives back the events.
func (b *byEvents) close() {
	for _, m := range b.marks {
		b.spare = append(b.spare, m.event)
	}
	for _, e := range b.spare {
		_ = b.FreeEvent(e)
	}
	b.marks, b.spare = nil, nil
}
