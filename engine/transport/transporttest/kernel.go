package transporttest

import (
	"encoding/binary"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"fserver/engine/mem"
)

// Refused runs do on a thread of its own, for which the kernel answers system
// call nr, if its first argument is this one, with e.
func Refused(t testing.TB, nr, first uint32, e unix.Errno, do func()) {
	t.Helper()
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and end the thread with the goroutine
		_, err := filter(nr, first, unix.SECCOMP_RET_ERRNO|uint32(e), 0)
		if err == nil {
			do()
		}
		done <- err
	}()
	filtered(t, <-done)
}

// Calls runs do on a thread of its own, and says whether it made system call nr
// with this first argument. If so, that has failed.
func Calls(t testing.TB, nr, first uint32, do func()) bool {
	t.Helper()
	var listener int
	set, done := make(chan error), make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and end the thread with the goroutine
		var err error
		listener, err = filter(nr, first, unix.SECCOMP_RET_USER_NOTIF, unix.SECCOMP_FILTER_FLAG_NEW_LISTENER)
		if set <- err; err == nil {
			do()
		}
	}()
	filtered(t, <-set)
	p := []unix.PollFd{{Fd: int32(listener), Events: unix.POLLIN}}
	called := false
	for over := false; !called && !over; {
		select {
		case <-done:
			over = true
		default:
		}
		_, err := unix.Poll(p, 10)
		require.True(t, err == nil || err == unix.EINTR, "%v", err)
		called = p[0].Revents&unix.POLLIN != 0 // a call waits
	}
	require.NoError(t, unix.Close(listener)) // ends it
	<-done
	return called
}

// filter has the kernel look at the system calls of this thread.
func filter(nr, first, action, flags uint32) (listener int, err error) {
	r, err := mem.Map(4096) // a struct sock_fprog, and what it points to
	if err != nil {
		return -1, err
	}
	defer mem.Unmap(r)
	program := []unix.SockFilter{ // over a struct seccomp_data
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 0},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jf: 3, K: nr},
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 16},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jf: 1, K: first},
		{Code: unix.BPF_RET | unix.BPF_K, K: action},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	b := r.Span().Bytes()
	binary.NativeEndian.PutUint16(b, uint16(len(program)))
	binary.NativeEndian.PutUint64(b[8:], uint64(r.Addr)+16)
	if _, err = binary.Encode(b[16:], binary.NativeEndian, program); err != nil {
		return -1, err
	}
	if err = unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return -1, err
	}
	fd, _, e := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, uintptr(flags), r.Addr)
	if e != 0 {
		return -1, e
	}
	return int(fd), nil
}

func filtered(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Skipf("the kernel takes no filter of system calls: %v", err)
	}
}
