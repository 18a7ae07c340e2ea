package main

// #include "fserver.h"
import "C"

import (
	"fmt"
	"syscall"
	"time"
	"unsafe"

	"fserver/engine/node"
)

//export fs_send
func fs_send(h C.fs_node, to C.uint32_t, rank C.int32_t, run C.uint64_t, data unsafe.Pointer, n C.size_t, token *C.uint64_t, slice C.int64_t) C.int {
	return on(h, func(nd *node.Node) error {
		if *token == 0 {
			if n > C.FS_MAX_MESSAGE {
				return fmt.Errorf("engine: %w: fs_send: bytes is %d, want at most %d (push tensors for more)", syscall.EINVAL, uint64(n), C.FS_MAX_MESSAGE)
			}
			d := node.Destination{Roles: node.Roles(min(to, 255)), Rank: int(rank), Run: uint64(run)}
			id, err := nd.Send(d, array[byte]((*C.char)(data), n))
			if err != nil {
				return err
			}
			*token = C.uint64_t(id)
		}
		return nd.WaitSent(uint64(*token), time.Duration(slice))
	})
}

//export fs_send_drop
func fs_send_drop(h C.fs_node, token C.uint64_t) C.int {
	return on(h, func(nd *node.Node) error {
		nd.DropSent(uint64(token))
		return nil
	})
}

//export fs_receive
func fs_receive(h C.fs_node, from *C.fs_mail, buf unsafe.Pointer, room C.size_t, need *C.size_t, slice C.int64_t) C.int {
	return on(h, func(nd *node.Node) error {
		take := func(m *node.Message) error {
			*from = C.fs_mail{role: C.int32_t(m.Role), rank: C.int32_t(m.Rank), run: C.uint64_t(m.Run)}
			return space{(*C.char)(buf), room, need}.put(m.Data, nil)
		}
		return nd.Receive(take, time.Duration(slice))
	})
}

//export fs_members
func fs_members(h C.fs_node, out *C.fs_member, room C.size_t, need *C.size_t) C.int {
	return on(h, func(nd *node.Node) error {
		all, err := nd.Statuses()
		if err != nil {
			return err
		}
		*need = C.size_t(len(all))
		if *need > room {
			return syscall.ENOBUFS
		}
		list := unsafe.Slice(out, room)
		for i, s := range all {
			list[i] = C.fs_member{
				role: C.int32_t(s.Role), rank: C.int32_t(s.Rank), state: C.int32_t(s.State),
				run: C.uint64_t(s.Run), silent_ns: C.int64_t(s.Silent),
			}
		}
		return nil
	})
}
