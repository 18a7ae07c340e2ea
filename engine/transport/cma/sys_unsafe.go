package cma

import (
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The system calls of Post and Poll are raw: none of them waits, so the
// scheduler need not be told. The goroutine cannot be preempted in them,
// therefore a copy is bounded in bytes.

// maxVec is how many pieces one call may gather (UIO_MAXIOV).
const maxVec = 1024

// iovec is struct iovec of our own memory. The address is a number: memory of
// the caller is not Go's.
type iovec struct {
	base uintptr
	n    uint64
}

// writeTo copies the memory of local to where the first n of remote say in
// process pid, and returns how many bytes went.
func writeTo(pid int, local []iovec, remote *[maxRemote]remoteVec, n int) (uint64, unix.Errno) {
	r, _, e := unix.RawSyscall6(unix.SYS_PROCESS_VM_WRITEV, uintptr(pid),
		uintptr(unsafe.Pointer(unsafe.SliceData(local))), uintptr(len(local)),
		uintptr(unsafe.Pointer(remote)), uintptr(n), 0)
	return uint64(r), e
}

// addressOf is where v, which the caller keeps on the heap, lies.
func addressOf(v *atomic.Uint64) uint64 { return uint64(uintptr(unsafe.Pointer(v))) }

// sendByte wakes who waits on the other end of socket fd. A full socket does
// that already.
func sendByte(fd int) {
	b := byte(0)
	unix.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(&b)), 1, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, 0, 0)
}

// passFD is sendByte with a descriptor for the peer. Here a full socket is an
// error.
func passFD(fd, passed int) error {
	_, err := unix.SendmsgN(fd, []byte{0}, unix.UnixRights(passed), nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	return err
}

// A letter is what a socket gave: bytes that woke, and perhaps a descriptor.
type letter struct {
	head    unix.Msghdr
	vec     unix.Iovec
	bytes   [256]byte
	control [24]byte // room for one descriptor
}

// receive fills b, which is not empty, with what others sent with sendByte and passFD, up to
// and with the next descriptor; 0 bytes are the end. passed is the descriptor, or -1. EPROTO
// says that something else was passed, too, or could not be taken.
func (l *letter) receive(fd int, b []byte) (n, passed int, e unix.Errno) {
	l.vec = unix.Iovec{Base: &b[0], Len: uint64(len(b))}
	l.head = unix.Msghdr{Iov: &l.vec, Iovlen: 1, Control: &l.control[0]}
	l.head.SetControllen(unix.CmsgLen(4)) // the kernel closes a second one
	n, e = result(unix.RawSyscall(unix.SYS_RECVMSG, uintptr(fd), uintptr(unsafe.Pointer(&l.head)), unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC))
	if e != 0 {
		return 0, -1, e
	}
	if l.head.Flags&unix.MSG_CTRUNC != 0 {
		e = unix.EPROTO
	}
	if l.head.Controllen == 0 {
		return n, -1, e
	}
	h := (*unix.Cmsghdr)(unsafe.Pointer(&l.control[0]))
	if h.Level != unix.SOL_SOCKET || h.Type != unix.SCM_RIGHTS || int(h.Len) != unix.CmsgLen(4) {
		return n, -1, unix.EPROTO
	}
	return n, int(*(*int32)(unsafe.Pointer(&l.control[unix.CmsgLen(0)]))), e
}

func result(r, _ uintptr, e unix.Errno) (int, unix.Errno) { return int(r), e }
