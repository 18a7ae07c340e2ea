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

	"fserver/engine/gpu"
)

//export fs_gpu_hold
func fs_gpu_hold(index C.int32_t) (rc C.int) {
	defer guard(&rc, 0)
	gpu.LaterOf(int(index)).Hold()
	return 0
}

//export fs_gpu_release
func fs_gpu_release(index C.int32_t, wait C.int64_t) (rc C.int) {
	defer guard(&rc, 0)
	if !gpu.LaterOf(int(index)).Release(time.Duration(wait)) {
		return fail(fmt.Errorf("engine: %w: fs_gpu_release: gpu %d is not held", syscall.EINVAL, int(index)))
	}
	return 0
}

//export fs_gpu_reclaim
func fs_gpu_reclaim(index, what C.int32_t, wait C.int64_t) (rc C.int) {
	defer guard(&rc, 0)
	if err := known("fs_gpu_reclaim", what); err != nil {
		return fail(err)
	}
	if gpu.LaterOf(int(index)).Reclaim(gpu.Kind(what), time.Duration(wait)) {
		return 1
	}
	return 0
}

//export fs_gpu_free
func fs_gpu_free(index, what C.int32_t, address, bytes C.uint64_t) (rc C.int) {
	defer guard(&rc, 0)
	if err := known("fs_gpu_free", what); err != nil {
		return fail(err)
	}
	return fail(gpu.FreeLater(int(index), gpu.Kind(what), uint64(address), uint64(bytes)))
}

func known(call string, what C.int32_t) error {
	if what < C.FS_GPU_MEMORY || what > C.FS_GPU_CONTEXT {
		return fmt.Errorf("engine: %w: %s: what is %d, want 0 to %d", syscall.EINVAL, call, int(what), C.FS_GPU_CONTEXT)
	}
	return nil
}
