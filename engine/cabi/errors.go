package main

// #include "fserver.h"
import "C"

import (
	"errors"
	"fmt"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"fserver/engine/node"
)

// lastErrors holds the last error of each thread that has not asked for it. A
// goroutine that C called stays on its thread, so the thread is the key.
var lastErrors struct {
	sync.Mutex
	m map[int]error
}

// maxErrors bounds the errors that nobody asks for, of threads that are gone.
const maxErrors = 1024

func errHandle(h C.fs_node) error {
	return fmt.Errorf("engine: %w: no node has handle %d", syscall.EBADF, uint64(h))
}

// fail keeps err for fs_errmsg and gives its code; 0 for nil.
func fail(err error) C.int {
	if err == nil {
		return 0
	}
	code := node.Errno(err)
	if code == syscall.EAGAIN || code == syscall.ENOBUFS {
		return -C.int(code) // part of normal use: no text
	}
	lastErrors.Lock()
	defer lastErrors.Unlock()
	if lastErrors.m == nil || len(lastErrors.m) >= maxErrors {
		lastErrors.m = map[int]error{}
	}
	lastErrors.m[unix.Gettid()] = err
	return -C.int(code)
}

func lastError(out *C.fs_error) C.int {
	tid := unix.Gettid()
	lastErrors.Lock()
	err := lastErrors.m[tid]
	delete(lastErrors.m, tid)
	lastErrors.Unlock()
	if err == nil {
		return -C.int(syscall.ENOENT)
	}
	*out = C.fs_error{code: -C.int32_t(node.Errno(err)), role: -1, rank: -1, got: C.FS_ANY, want: C.FS_ANY}
	put(out.text[:], err.Error())
	var lost *node.LostError
	if errors.As(err, &lost) {
		out.role, out.rank = C.int32_t(lost.Role), C.int32_t(lost.Rank)
		put(out.address[:], lost.Address)
		put(out.reason[:], lost.Reason)
	}
	var types *node.TypeError
	if errors.As(err, &types) {
		out.got, out.want = C.uint8_t(types.Got), C.uint8_t(types.Want)
	}
	var refused *node.RefusedError
	if errors.As(err, &refused) {
		out.role, out.rank = C.FS_ROLE_SERVER, C.int32_t(refused.Rank)
		put(out.reason[:], refused.Text)
	}
	return 0
}

// put copies s into dst and ends it with a zero.
func put(dst []C.char, s string) {
	n := min(len(s), len(dst)-1)
	for i := range n {
		dst[i] = C.char(s[i])
	}
	dst[n] = 0
}
