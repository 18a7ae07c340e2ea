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
func fs_host(settings **C.char, n C.size_t, buf *C.char, room C.size_t, need *C.size_t) (rc C.int) {
	defer guard(&rc, 0)
	b, err := node.DescribeHost(goStrings(settings, n))
	if err != nil {
		return fail(err)
	}
	return text(b, buf, room, need)
}

//export fs_probe
func fs_probe(settings **C.char, n C.size_t, timeout C.int64_t, buf *C.char, room C.size_t, need *C.size_t) (rc C.int) {
	defer guard(&rc, 0)
	b, err := node.Probe(goStrings(settings, n), time.Duration(timeout))
	if err != nil {
		return fail(err)
	}
	return text(b, buf, room, need)
}
