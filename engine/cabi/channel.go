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

	// The extension calls the GPU's driver through the table that this links in:
	// one for the engine and the extension.
	_ "fserver/cshim/cuda"
)

//export fs_channel_open
func fs_channel_open(h C.fs_node, name *C.char, out *C.fs_channel) (rc C.int) {
	defer guard(&rc, h)
	nd, err := nodes.get(h)
	if err != nil {
		return fail(err)
	}
	id, err := nd.OpenChannel(C.GoString(name))
	if err != nil {
		return fail(err)
	}
	*out = C.fs_channel(id)
	return 0
}

//export fs_channel_watch
func fs_channel_watch(h C.fs_node, channel C.fs_channel, word *C.uint32_t) (rc C.int) {
	defer guard(&rc, h)
	nd, err := nodes.get(h)
	if err != nil {
		return fail(err)
	}
	return fail(nd.WatchChannel(uint64(channel), addressOf(word)))
}

//export fs_channel_tell
func fs_channel_tell(h C.fs_node, channel C.fs_channel, peer C.uint32_t, text *C.char, bytes C.size_t) (rc C.int) {
	defer guard(&rc, h)
	nd, err := nodes.get(h)
	if err != nil {
		return fail(err)
	}
	return fail(nd.TellChannel(uint64(channel), int(peer), goText(text, bytes)))
}

//export fs_channel_text
func fs_channel_text(h C.fs_node, channel C.fs_channel, peer C.uint32_t, buf *C.char, room C.size_t, need *C.size_t, slice C.int64_t) (rc C.int) {
	defer guard(&rc, h)
	nd, err := nodes.get(h)
	if err != nil {
		return fail(err)
	}
	s, err := nd.ChannelText(uint64(channel), int(peer), time.Duration(slice))
	if err != nil {
		return fail(err)
	}
	return text([]byte(s), buf, room, need)
}

//export fs_channel_state
func fs_channel_state(h C.fs_node, channel C.fs_channel) (rc C.int) {
	defer guard(&rc, h)
	nd, err := nodes.get(h)
	if err != nil {
		return fail(err)
	}
	return fail(nd.ChannelState(uint64(channel)))
}

//export fs_channel_push_pull
func fs_channel_push_pull(h C.fs_node, channel C.fs_channel, push *C.fs_tensor, np C.size_t, pull *C.fs_tensor, nq C.size_t, out *C.fs_ticket) (rc C.int) {
	defer guard(&rc, h)
	nd, err := nodes.get(h)
	if err != nil {
		return fail(err)
	}
	t, err := nd.BeginPushPull()
	if err != nil {
		return fail(err)
	}
	if err := addTensors(t, push, np, pull, nq); err != nil {
		nd.Abandon(t)
		return fail(err)
	}
	id := t.ID()
	if err := nd.PushPullOn(uint64(channel), t); err != nil {
		return fail(err)
	}
	*out = C.fs_ticket(id)
	return 0
}

//export fs_channel_take
func fs_channel_take(h C.fs_node, channel C.fs_channel, buf *C.uint64_t, room C.size_t, need *C.size_t, slice C.int64_t, flags C.uint32_t) (rc C.int) {
	defer guard(&rc, h)
	nd, err := nodes.get(h)
	if err != nil {
		return fail(err)
	}
	s := sinks.Get().(*sink)
	defer sinks.Put(s)
	s.buf, s.need = words(buf, room), 0
	err = nd.TakeOn(uint64(channel), s, time.Duration(slice), flags&C.FS_NOSPIN == 0)
	*need = C.size_t(s.need)
	return fail(err)
}

//export fs_channel_close
func fs_channel_close(h C.fs_node, channel C.fs_channel, why *C.char, bytes C.size_t, slice C.int64_t) (rc C.int) {
	defer guard(&rc, h)
	nd, err := nodes.get(h)
	if err != nil {
		return fail(err)
	}
	return fail(nd.CloseChannel(uint64(channel), goText(why, bytes), time.Duration(slice)))
}
