package main

// #include "fserver.h"
import "C"

import (
	"sync"
	"syscall"
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

func words(p *C.uint64_t, n C.size_t) []uint64 {
	return unsafe.Slice((*uint64)(unsafe.Pointer(p)), n)
}

func ticketsOf(p *C.fs_ticket, n C.size_t) []uint64 {
	return unsafe.Slice((*uint64)(unsafe.Pointer(p)), n)
}

func sizes(p *C.size_t, n C.size_t) []C.size_t { return unsafe.Slice(p, n) }

func int64s(p *C.int64_t, n int) []int64 { return unsafe.Slice((*int64)(unsafe.Pointer(p)), n) }

func int32s(p *C.int32_t, n C.size_t) []int32 {
	return unsafe.Slice((*int32)(unsafe.Pointer(p)), n)
}

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

func addTensors(t *node.Ticket, push *C.fs_tensor, np C.size_t, pull *C.fs_tensor, nq C.size_t) error {
	for i := range unsafe.Slice(push, np) {
		if err := t.AddPush(tensor(&unsafe.Slice(push, np)[i])); err != nil {
			return err
		}
	}
	for i := range unsafe.Slice(pull, nq) {
		if err := t.AddPull(tensor(&unsafe.Slice(pull, nq)[i])); err != nil {
			return err
		}
	}
	return nil
}

// respond answers one request after the other; answered counts them.
func respond(nd *node.Node, stream *C.uint64_t, handlers []uint64, counts []C.size_t, all *C.fs_tensor, tickets []uint64, answered *C.size_t) error {
	total := C.size_t(0)
	for _, n := range counts {
		total += n
	}
	list := unsafe.Slice(all, total)
	for i, h := range handlers {
		t, err := nd.BeginAnswer()
		if err != nil {
			return err
		}
		for j := range list[:counts[i]] {
			if err := t.AddPush(tensor(&list[j])); err != nil {
				nd.Abandon(t)
				return err
			}
		}
		if stream != nil {
			if err := nd.After(t, uint64(*stream)); err != nil {
				nd.Abandon(t)
				return err
			}
		}
		list = list[counts[i]:]
		tickets[i] = t.ID()
		if err := nd.Respond(h, t); err != nil {
			return err
		}
		*answered++
	}
	return nil
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

// goBytes copies n bytes of C's; nil for none.
func goBytes(p *C.uint8_t, n C.size_t) []byte {
	return append([]byte(nil), unsafe.Slice((*byte)(unsafe.Pointer(p)), n)...)
}

// goText copies n bytes of C's.
func goText(p *C.char, n C.size_t) string { return C.GoStringN(p, C.int(n)) }

func addressOf(p *C.uint32_t) uintptr { return uintptr(unsafe.Pointer(p)) }

// text gives b to C.
func text(b []byte, buf *C.char, room C.size_t, need *C.size_t) C.int {
	*need = C.size_t(len(b))
	if C.size_t(len(b)) > room {
		return -C.int(syscall.ENOBUFS)
	}
	copy(unsafe.Slice((*byte)(unsafe.Pointer(buf)), room), b)
	return 0
}

func fillInfo(out *C.fs_info, v node.Info) {
	*out = C.fs_info{
		role: C.int32_t(v.Role), rank: C.int32_t(v.Rank), group: C.int32_t(v.Group),
		instance: C.int32_t(v.Instance), workers: C.int32_t(v.Workers), servers: C.int32_t(v.Servers),
		device: C.int32_t(v.Device.Index()),
	}
	if v.Words.Len != 0 {
		out.words = (*C.uint64_t)(unsafe.Pointer(v.Words.Span().Ptr()))
		out.mask = C.uint64_t(v.Words.Len/8 - 1)
	}
	put(out.address[:], v.Address)
}
