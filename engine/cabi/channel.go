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

	// The extension calls the GPU's driver through the table that this links in:
	// one for the engine and the extension.
	_ "fserver/cshim/cuda"
)

//export fs_channel_open
func fs_channel_open(h C.fs_node, name *C.char, out *C.fs_channel) C.int {
	return on(h, func(nd *node.Node) error {
		id, err := nd.OpenChannel(C.GoString(name))
		if err == nil {
			*out = C.fs_channel(id)
		}
		return err
	})
}

//export fs_channel_watch
func fs_channel_watch(h C.fs_node, channel C.fs_channel, word *C.uint32_t) C.int {
	return on(h, func(nd *node.Node) error { return nd.WatchChannel(uint64(channel), addressOf(word)) })
}

//export fs_channel_carry
func fs_channel_carry(h C.fs_node, channel C.fs_channel, what *C.fs_carried) C.int {
	return on(h, func(nd *node.Node) error { return nd.CarryChannel(uint64(channel), carried(what)) })
}

//export fs_gpu_direct
func fs_gpu_direct(h C.fs_node, direct *C.int) C.int {
	return on(h, func(nd *node.Node) error {
		yes, err := nd.Direct()
		if *direct = 0; yes {
			*direct = 1
		}
		return err
	})
}

//export fs_channel_tell
func fs_channel_tell(h C.fs_node, channel C.fs_channel, peer C.uint32_t, text *C.char, bytes C.size_t) C.int {
	return on(h, func(nd *node.Node) error { return nd.TellChannel(uint64(channel), int(peer), goText(text, bytes)) })
}

//export fs_channel_text
func fs_channel_text(h C.fs_node, channel C.fs_channel, peer C.uint32_t, buf *C.char, room C.size_t, need *C.size_t, slice C.int64_t) C.int {
	return on(h, func(nd *node.Node) error {
		s, err := nd.ChannelText(uint64(channel), int(peer), int(room), time.Duration(slice))
		return space{buf, room, need}.put([]byte(s), err)
	})
}

//export fs_channel_state
func fs_channel_state(h C.fs_node, channel C.fs_channel, ticket C.fs_ticket) C.int {
	return on(h, func(nd *node.Node) error { return nd.ChannelState(uint64(channel), uint64(ticket)) })
}

//export fs_channel_close
func fs_channel_close(h C.fs_node, channel C.fs_channel, why *C.char, bytes C.size_t, slice C.int64_t) C.int {
	return on(h, func(nd *node.Node) error {
		return nd.CloseChannel(uint64(channel), goText(why, bytes), time.Duration(slice))
	})
}
