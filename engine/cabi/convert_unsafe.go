package main

// #include "fserver.h"
import "C"

import (
	"sync"
	"syscall"
	"time"
	"unsafe"

	"fserver/engine/mem"
	"fserver/engine/node"
)

func goStrings(p **C.char, n C.size_t) []string {
	out := make([]string, 0, n)
	for _, s := range unsafe.Slice(p, n) {
		out = append(out, C.GoString(s))
	}
	return out
}

// array is n values of C's where they are, as Go's type of the same size.
func array[G, T any](p *T, n C.size_t) []G { return unsafe.Slice((*G)(unsafe.Pointer(p)), n) }

func tensors(p *C.fs_tensor, n C.size_t) []C.fs_tensor { return unsafe.Slice(p, n) }

// tensor translates; the dims alias C's.
func tensor(c *C.fs_tensor) node.Tensor {
	return node.Tensor{
		Span:  mem.Span{Addr: uintptr(c.data), Len: uint64(c.bytes)},
		Dev:   mem.GPU(int(c.device)),
		Key:   uint64(c.key),
		Base:  mem.Region{Addr: uintptr(c.base), Len: uint64(c.base_bytes), Dev: mem.GPU(int(c.device))},
		Alloc: uint64(c.alloc),
		DType: uint8(c.dtype),
		Dims:  unsafe.Slice((*int64)(unsafe.Pointer(c.dims)), int(c.ndim)),
	}
}

// add gives tensors to a ticket.
func add(list []C.fs_tensor, to func(node.Tensor) error) error {
	for i := range list {
		if err := to(tensor(&list[i])); err != nil {
			return err
		}
	}
	return nil
}

// issue begins a ticket for tensors, behind what is queued on a stream (nil: on none), and submits it.
func issue(nd *node.Node, begin func() (*node.Ticket, error), stream *C.uint64_t, push, pull []C.fs_tensor, out *C.fs_ticket, submit func(*node.Ticket) error) error {
	t, err := begin()
	if err != nil {
		return err
	}
	if err = add(push, t.AddPush); err == nil {
		err = add(pull, t.AddPull)
	}
	if err == nil && stream != nil {
		err = nd.After(t, uint64(*stream))
	}
	if err != nil {
		nd.Abandon(t)
		return err
	}
	id := t.ID() // with an error of submit, t is gone
	if err = submit(t); err == nil {
		*out = C.fs_ticket(id)
	}
	return err
}

// respond answers one request after the other; answered counts them.
func respond(nd *node.Node, stream, handlers *C.uint64_t, counts *C.size_t, n C.size_t, all *C.fs_tensor, tickets *C.fs_ticket, answered *C.size_t) (err error) {
	total, out := C.size_t(0), unsafe.Slice(tickets, n)
	for i, count := range unsafe.Slice(counts, n) {
		list := tensors(all, total+count)[total:]
		handler := array[uint64](handlers, n)[i]
		err = issue(nd, nd.BeginAnswer, stream, list, nil, &out[i], func(t *node.Ticket) error { return nd.Respond(handler, t) })
		if err != nil {
			break
		}
		total += count
		*answered++
	}
	nd.Flush()
	return err
}

// take has a batch written into the words of buf.
func take(buf *C.uint64_t, room C.size_t, need *C.size_t, from func(*sink) error) error {
	s := sinks.Get().(*sink)
	defer sinks.Put(s)
	s.buf, s.need = array[uint64](buf, room), 0
	err := from(s)
	*need = C.size_t(s.need)
	return err
}

// sink writes a batch into the caller's words.
type sink struct {
	buf  []uint64
	need int
}

var sinks = sync.Pool{New: func() any { return new(sink) }}

// Batch implements node.BatchSink.
func (s *sink) Batch(reqs []*node.Request) error {
	s.need = 1
	for _, r := range reqs {
		s.need += 4 + r.Pulls()
		for i := range r.Push() {
			s.need += 8 + r.Push()[i].NDim
		}
	}
	if s.need > len(s.buf) {
		return syscall.ENOBUFS
	}
	b := append(s.buf[:0], uint64(len(reqs)))
	for _, r := range reqs {
		b = append(b, r.Handler(), uint64(r.Rank()), uint64(len(r.Push())), uint64(r.Pulls()))
		for i := range r.Push() {
			p := &r.Push()[i]
			slot := p.Slot
			if p.Lent {
				slot = C.FS_LENT
			}
			b = append(b, p.Key, slot, p.Buffer, uint64(p.Span.Addr), p.Span.Len, uint64(p.DType), uint64(p.Dev.Index()), uint64(p.NDim))
			if p.NDim > 0 {
				b = append(b, uint64(p.Rows))
				for _, d := range p.Tail {
					b = append(b, uint64(d))
				}
			}
		}
		for i := range r.Pulls() {
			b = append(b, r.PullBytes(i))
		}
	}
	return nil
}

// goText copies a text of C's, at most 1 MiB of it. No function that takes a text accepts as much.
func goText(p *C.char, n C.size_t) string { return C.GoStringN(p, C.int(min(n, 1<<20))) }

func addressOf(p *C.uint32_t) uintptr { return uintptr(unsafe.Pointer(p)) }

// carried translates; the dims alias C's.
func carried(c *C.fs_carried) node.Carried {
	list := func(p *C.fs_tensor, n C.size_t) (all []node.Tensor) {
		for i := range tensors(p, n) {
			all = append(all, tensor(&tensors(p, n)[i]))
		}
		return all
	}
	return node.Carried{
		Words: uintptr(unsafe.Pointer(c.words)), Rows: uintptr(unsafe.Pointer(c.rows)), Counts: uintptr(unsafe.Pointer(c.counts)),
		Out: list(c.out, c.nout), In: list(c.in, c.nin), Lands: c.lands != 0, Patience: time.Duration(c.timeout_ns),
	}
}

// space is where C wants a text.
type space struct {
	buf  *C.char
	room C.size_t
	need *C.size_t
}

// put gives b to C, unless there is an error.
func (s space) put(b []byte, err error) error {
	if err != nil {
		return err
	}
	*s.need = C.size_t(len(b))
	if C.size_t(len(b)) > s.room {
		return syscall.ENOBUFS
	}
	copy(array[byte](s.buf, s.room), b)
	return nil
}

func fillInfo(out *C.fs_info, v node.Info) {
	*out = C.fs_info{
		role: C.int32_t(v.Role), rank: C.int32_t(v.Rank), group: C.int32_t(v.Group),
		instance: C.int32_t(v.Instance), workers: C.int32_t(v.Workers), servers: C.int32_t(v.Servers),
		device: C.int32_t(v.Device.Index()),
	}
	if v.Registers {
		out.registers = 1
	}
	if v.Recovery {
		out.recovery = 1
	}
	if v.Words.Len != 0 {
		out.words = (*C.uint64_t)(unsafe.Pointer(v.Words.Span().Ptr()))
		out.mask = C.uint64_t(v.Words.Len/8 - 2) // the last word is no ticket's
	}
	put(out.address[:], v.Address)
}
