package tcp

import (
	"unsafe"

	"golang.org/x/sys/unix"

	"fserver/engine/mem"
)

// The system calls of Post and Poll are raw: the sockets never block, so the
// scheduler need not be told (that costs as much as a tenth of the call). The
// goroutine cannot be preempted in them, therefore each is bounded in bytes.

// maxVec is how many pieces one call may gather or scatter (UIO_MAXIOV).
const maxVec = 1024

// iovec is struct iovec. The address is a number: memory of the caller is not
// Go's, and what is Go's is on the heap, where it does not move, and is held
// by the Conn.
type iovec struct {
	base uintptr
	n    uint64
}

// A vec is the argument of one call that gathers or scatters. It lives in a
// Fabric and is used by its owner.
type vec struct {
	hdr  unix.Msghdr
	iov  [maxVec]iovec
	n    int
	sum  uint64 // bytes of all pieces
	flat [flatMost]byte
}

// flatMost is how many bytes send copies into one piece at most. A round trip over loopback takes 0.25 µs less with
// 64 bytes each way, and 0.1 µs less with 4 KiB.
const flatMost = 8 << 10

func (v *vec) reset() { v.n, v.sum = 0, 0 }

// add appends n bytes at base; a piece that follows its predecessor in memory
// lengthens that.
func (v *vec) add(base uintptr, n uint64) {
	v.sum += n
	if v.n > 0 {
		if last := &v.iov[v.n-1]; last.base+uintptr(last.n) == base {
			last.n += n
			return
		}
	}
	v.iov[v.n] = iovec{base, n}
	v.n++
}

// full says whether add may find no room.
func (v *vec) full() bool { return v.n == maxVec }

// send gives the bytes of v to the kernel and returns how many it took. One
// piece goes by the cheaper call; few bytes are copied into one.
func (v *vec) send(fd int) (int, unix.Errno) {
	if v.n == 1 {
		return v.iov[0].send(fd)
	}
	if v.sum <= flatMost {
		b := v.flat[:0]
		for i := range v.n {
			b = append(b, v.piece(i)...)
		}
		return of(b).send(fd)
	}
	v.point()
	return result(unix.RawSyscall(unix.SYS_SENDMSG, uintptr(fd), uintptr(unsafe.Pointer(&v.hdr)), sendFlags))
}

// recv fills the memory of v in its order and returns how many bytes came; 0
// is the end of the stream. One piece goes by the cheaper call (-0.15 µs).
func (v *vec) recv(fd int) (int, unix.Errno) {
	if v.n == 1 {
		return v.iov[0].recv(fd)
	}
	v.point()
	return result(unix.RawSyscall(unix.SYS_RECVMSG, uintptr(fd), uintptr(unsafe.Pointer(&v.hdr)), unix.MSG_DONTWAIT))
}

func (v *vec) point() {
	v.hdr.Iov = (*unix.Iovec)(unsafe.Pointer(&v.iov[0]))
	v.hdr.SetIovlen(v.n)
}

// piece is the memory of the ith piece.
func (v *vec) piece(i int) []byte {
	return mem.Span{Addr: v.iov[i].base, Len: v.iov[i].n}.Bytes()
}

// send gives the memory of p, which is not empty, to the kernel and returns how many bytes it took.
func (p iovec) send(fd int) (int, unix.Errno) {
	return result(unix.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), p.base, uintptr(p.n), sendFlags, 0, 0))
}

// recv fills the memory of p, which is not empty, and returns how many bytes came; 0 is the end of
// the stream.
func (p iovec) recv(fd int) (int, unix.Errno) {
	return result(unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(fd), p.base, uintptr(p.n), unix.MSG_DONTWAIT, 0, 0))
}

func of(b []byte) iovec { return iovec{mem.Of(b).Addr, uint64(len(b))} }

const sendFlags = unix.MSG_DONTWAIT | unix.MSG_NOSIGNAL

// discard drops up to n received bytes without copying them.
func discard(fd int, n uint64) {
	unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(fd), 0, uintptr(n), unix.MSG_DONTWAIT|unix.MSG_TRUNC, 0, 0)
}

// reset ends the connection of fd so that the peer sees a reset, also when
// another process holds the socket.
func reset(fd int) {
	var unspecified unix.RawSockaddrAny
	unix.RawSyscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&unspecified)), unix.SizeofSockaddrAny)
}

func result(r, _ uintptr, e unix.Errno) (int, unix.Errno) { return int(r), e }
