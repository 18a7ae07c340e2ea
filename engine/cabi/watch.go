package main

// #include "fserver.h"
import "C"

//export fs_watch_open
func fs_watch_open(h C.fs_node, fd C.int, out *C.fs_watch) (rc C.int) {
	defer guard(&rc, h)
	nd, err := nodes.get(h)
	if err != nil {
		return fail(err)
	}
	id, err := nd.Watch(int(fd))
	if err != nil {
		return fail(err)
	}
	*out = C.fs_watch(id)
	return 0
}

//export fs_watch_arm
func fs_watch_arm(h C.fs_node, watch C.fs_watch) (rc C.int) {
	defer guard(&rc, h)
	nd, err := nodes.get(h)
	if err != nil {
		return fail(err)
	}
	return fail(nd.Arm(uint64(watch)))
}

//export fs_watch_close
func fs_watch_close(h C.fs_node, watch C.fs_watch) (rc C.int) {
	defer guard(&rc, h)
	nd, err := nodes.get(h)
	if err != nil {
		return fail(err)
	}
	nd.Unwatch(uint64(watch))
	return 0
}
