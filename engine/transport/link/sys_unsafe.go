package link

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// epollNow is epoll_wait without waiting, and therefore raw: the scheduler need not be
// told. (arm64 has only the call with a signal mask.)
func epollNow(fd int, ev []unix.EpollEvent) (int, unix.Errno) {
	n, _, e := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(fd), uintptr(unsafe.Pointer(&ev[0])), uintptr(len(ev)), 0, 0, 0)
	return int(n), e
}
