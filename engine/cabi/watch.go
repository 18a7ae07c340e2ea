package main

// #include "fserver.h"
import "C"

import "fserver/engine/node"

//export fs_watch_open
func fs_watch_open(h C.fs_node, fd C.int, out *C.fs_watch) C.int {
	return on(h, func(nd *node.Node) error {
		id, err := nd.Watch(int(fd))
		if err == nil {
			*out = C.fs_watch(id)
		}
		return err
	})
}

//export fs_watch_arm
func fs_watch_arm(h C.fs_node, watch C.fs_watch) C.int {
	return on(h, func(nd *node.Node) error { return nd.Arm(uint64(watch)) })
}

//export fs_watch_close
func fs_watch_close(h C.fs_node, watch C.fs_watch) C.int {
	return on(h, func(nd *node.Node) error {
		nd.Unwatch(uint64(watch))
		return nil
	})
}
