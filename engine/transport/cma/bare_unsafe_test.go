package cma

import (
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"fserver/engine/mem"
)

// bare is one side of what the benchmark compares with: process_vm_writev and
// a flag in memory that both map, and nothing else.
type bare struct {
	mem          []byte
	mine, theirs *bareSide
	in, out      mem.Region
	sent, heard  uint64
	local        [1]iovec
	remote       [maxRemote]remoteVec
}

type bareSide struct {
	flag      atomic.Uint64
	_         [120]byte
	pid, addr atomic.Uint64
	_         [112]byte
}

const bareSize = 4096

func newBare(fd, side int, in, out mem.Region) (*bare, error) {
	b, err := unix.Mmap(fd, 0, bareSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, err
	}
	sides := (*[2]bareSide)(unsafe.Pointer(&b[0]))
	r := &bare{mem: b, mine: &sides[side], theirs: &sides[1-side], in: in, out: out}
	r.mine.addr.Store(uint64(in.Addr))
	r.mine.pid.Store(uint64(unix.Getpid()))
	return r, nil
}

func (r *bare) send(n uint64) error {
	r.local[0] = iovec{r.out.Addr, n}
	r.remote[0].base.Store(r.theirs.addr.Load())
	r.remote[0].n.Store(n)
	if _, e := writeTo(int(r.theirs.pid.Load()), r.local[:], &r.remote, 1); e != 0 {
		return e
	}
	r.sent++
	r.mine.flag.Store(r.sent)
	return nil
}

func (r *bare) wait() {
	r.heard++
	for r.theirs.flag.Load() != r.heard {
	}
}
