package main

/*
#include <stdint.h>
#include "fserver.h"
*/
import "C"

import (
	"fmt"
	"syscall"
	"time"

	"fserver/engine/node"
)

//export fs_gpu_hold
func fs_gpu_hold(gpu C.int32_t) (rc C.int) {
	defer guard(&rc)
	node.LaterOf(int(gpu)).Hold()
	return 0
}

//export fs_gpu_release
func fs_gpu_release(gpu C.int32_t, wait C.int64_t) (rc C.int) {
	defer guard(&rc)
	l := node.LaterOf(int(gpu))
	if !l.Held() {
		return fail(fmt.Errorf("engine: %w: fs_gpu_release: nobody holds gpu %d", syscall.EINVAL, int(gpu)))
	}
	l.Release()
	if wait > 0 && !l.Held() {
		l.Wait(time.Duration(wait))
	}
	return 0
}

//export fs_gpu_reclaim
func fs_gpu_reclaim(gpu C.int32_t, wait C.int64_t) (rc C.int) {
	defer guard(&rc)
	l := node.LaterOf(int(gpu))
	if !l.Force() {
		return 0
	}
	l.Wait(time.Duration(wait))
	return 1
}

//export fs_gpu_free
func fs_gpu_free(gpu, what C.int32_t, address, bytes C.uint64_t) (rc C.int) {
	defer guard(&rc)
	if what < C.FS_GPU_MEMORY || what > C.FS_GPU_MODULE {
		return fail(fmt.Errorf("engine: %w: fs_gpu_free: what is %d, want 0 to %d", syscall.EINVAL, int(what), C.FS_GPU_MODULE))
	}
	return fail(node.FreeLater(int(gpu), node.Thing(what), uint64(address), uint64(bytes)))
}
