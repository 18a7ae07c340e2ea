package main

/*
#include <stddef.h>
#include <stdint.h>
#define const
#include "fserver.h"
#undef const
*/
import "C"

import (
	"time"

	"fserver/engine/node"
)

//export fs_host
func fs_host(settings **C.char, n C.size_t, buf *C.char, room C.size_t, need *C.size_t) C.int {
	return call(func() error { return space{buf, room, need}.put(node.DescribeHost(goStrings(settings, n))) })
}

//export fs_probe
func fs_probe(settings **C.char, n C.size_t, timeout C.int64_t, buf *C.char, room C.size_t, need *C.size_t) C.int {
	return call(func() error {
		return space{buf, room, need}.put(node.Probe(goStrings(settings, n), time.Duration(timeout)))
	})
}
