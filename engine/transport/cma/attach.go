package cma

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// How two sides that trust each other agree on how to talk. Each sends two
// notes, the dialer the first and third; each names a word of its own memory
// and the random number in it. The other side reads that word: only if it finds
// the number, the process number means the process of the socket. Then it
// writes the complement there, for real, and the first side sees whether that
// arrived.
//
//	1  dialer:    its word; with it, the segment
//	2  acceptor:  its word; how writing into the dialer went
//	3  dialer:    how writing into the acceptor went, and whether the
//	              acceptor's writing arrived; its table if all of that is well
//	4  acceptor:  whether the dialer's writing arrived; its table if all is well
//
// Writes are direct if both directions are, and staged otherwise.

// A note is one of these messages.
type note struct {
	mode Mode
	// How it went so far: the sender of the note writing into its receiver,
	// and the other way.
	there, back verdict
	word        uint64 // address
	number      uint64
}

const noteLen = 40

func (n *note) encode() []byte {
	b := make([]byte, noteLen)
	copy(b, magic[:])
	b[4], b[5] = layoutVersion, byte(n.mode)
	b[6], b[7] = byte(n.there.kind), byte(n.back.kind)
	binary.NativeEndian.PutUint32(b[8:], uint32(n.there.errno))
	binary.NativeEndian.PutUint32(b[12:], uint32(n.back.errno))
	binary.NativeEndian.PutUint64(b[16:], n.word)
	binary.NativeEndian.PutUint64(b[24:], n.number)
	return b
}

func (n *note) decode(b []byte) error {
	if string(b[:4]) != string(magic[:]) || b[4] != layoutVersion {
		return fmt.Errorf("the peer sent % x: want version %d of shared memory (run the same version of fserver on both sides)", b[:8], layoutVersion)
	}
	*n = note{
		mode:   Mode(b[5]),
		there:  verdict{verdictKind(b[6]), unix.Errno(binary.NativeEndian.Uint32(b[8:]))},
		back:   verdict{verdictKind(b[7]), unix.Errno(binary.NativeEndian.Uint32(b[12:]))},
		word:   binary.NativeEndian.Uint64(b[16:]),
		number: binary.NativeEndian.Uint64(b[24:]),
	}
	return nil
}

// A verdict says how writing into the other process went.
type verdict struct {
	kind  verdictKind
	errno unix.Errno
}

type verdictKind uint8

const (
	tryNone  verdictKind = iota // not tried
	tryDone                     // the system call did it
	tryError                    // it gave errno
	tryOther                    // the process number means another process
	tryLost                     // it was done and did not arrive
)

// reason says what is in the way of from's writing into to.
func (v verdict) reason(from, to string) string {
	s := fmt.Sprintf("%s cannot write into %s: ", from, to)
	switch v.kind {
	case tryError:
		return s + "process_vm_writev: " + v.errno.Error()
	case tryOther:
		return s + "its process number belongs to another process here"
	case tryLost:
		return s + "the data that it wrote did not arrive"
	}
	return s + "writing was not tried"
}

// remedy says what the user can do about it.
func (v verdict) remedy() string {
	switch {
	case v.kind == tryOther || v.errno == unix.ESRCH:
		return "let both processes share a PID namespace: docker run --pid=host, hostPID or shareProcessNamespace"
	case v.errno == unix.ENOSYS:
		return "use a kernel with CONFIG_CROSS_MEMORY_ATTACH, and a sandbox that allows process_vm_writev"
	case v.errno != unix.EPERM:
		return ""
	}
	switch b, _ := os.ReadFile("/proc/sys/kernel/yama/ptrace_scope"); strings.TrimSpace(string(b)) {
	case "1":
		return "run both as the same user and leave PR_SET_PTRACER on, or set kernel.yama.ptrace_scope=0"
	case "2", "3":
		return "set kernel.yama.ptrace_scope to 0 or 1"
	}
	return "run both as the same user; in a container, allow process_vm_writev: docker run --cap-add=SYS_PTRACE"
}

// A probe is the word that a peer writes to.
type probe struct {
	word   atomic.Uint64
	number uint64
}

func newProbe() *probe {
	var b [8]byte
	rand.Read(b[:]) // never fails
	p := &probe{number: binary.NativeEndian.Uint64(b[:])}
	p.word.Store(p.number)
	return p
}

// came turns the peer's word that it wrote into what has been seen of it.
func (p *probe) came(v verdict) verdict {
	if v.kind == tryDone && p.word.Load() != ^p.number {
		v.kind = tryLost
	}
	return v
}

// tryPeer writes to the word that a peer named.
func tryPeer(pid int, p *probe) verdict {
	return tryWord(pid, addressOf(&p.word), p.number)
}

func tryWord(pid int, addr, number uint64) verdict {
	if pid <= 0 { // the process is in a PID namespace that is not ours
		return verdict{kind: tryError, errno: unix.ESRCH}
	}
	b := binary.NativeEndian.AppendUint64(nil, 0)
	local := []unix.Iovec{{Base: &b[0], Len: 8}}
	remote := []unix.RemoteIovec{{Base: uintptr(addr), Len: 8}}
	_, err := unix.ProcessVMReadv(pid, local, remote, 0)
	if err == nil && binary.NativeEndian.Uint64(b) == number {
		binary.NativeEndian.PutUint64(b, ^number)
		_, err = unix.ProcessVMWritev(pid, local, remote, 0)
	} else if err == nil {
		err = unix.EFAULT
	}
	var e unix.Errno
	switch {
	case err == nil:
		return verdict{kind: tryDone}
	case errors.As(err, &e) && e == unix.EFAULT: // the word is not there
		return verdict{kind: tryOther}
	}
	return verdict{kind: tryError, errno: e}
}

// user is who is at the other end of a socket.
type user struct{ pid, uid int }

func (u user) String() string { return fmt.Sprintf("process %d of user %d", u.pid, u.uid) }

func credentials(nc *net.UnixConn) (u user, err error) {
	raw, err := nc.SyscallConn()
	if err != nil {
		return u, err
	}
	var got *unix.Ucred
	if e := raw.Control(func(fd uintptr) { got, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err == nil {
		err = e
	}
	if err != nil {
		return u, fmt.Errorf("read the credentials of the peer: %w", err)
	}
	return user{int(got.Pid), int(got.Uid)}, nil
}

// attach makes a Conn that is not open yet: it has its memory, and no socket.
func (f *Fabric) attach(nc *net.UnixConn, s *link.Session) (*Conn, error) {
	who, err := credentials(nc)
	if err != nil {
		return nil, err
	}
	c := &Conn{f: f, peer: process{pid: who.pid}}
	c.Open(s, c.end)
	err = f.agree(nc, c, s.Dialer)
	if err == nil && who.pid > 0 { // it is in a PID namespace that is ours
		p, e := findProcess(who.pid)
		if e == nil {
			c.peer, c.About.Dead = p, p.dead
		} else if c.tx.direct {
			err = fmt.Errorf("look up the peer: %w", e)
		}
	}
	if err != nil {
		c.discard()
		return nil, err
	}
	c.arrange(s.Dialer)
	return c, nil
}

// discard gives back the memory of a Conn that is not open.
func (c *Conn) discard() {
	if c.seg != nil {
		c.seg.drop()
	}
	c.table.unmap()
}

// agree exchanges the notes.
func (f *Fabric) agree(nc *net.UnixConn, c *Conn, dialer bool) (err error) {
	p := newProbe()
	ours, in := note{mode: f.mode, word: addressOf(&p.word), number: p.number}, note{}
	var none *Conn // nothing is to be passed to the dialer yet
	if dialer {
		err = f.share(nc, c, &ours)
	} else {
		none = c
	}
	if err == nil {
		err = receiveNote(nc, &in, none)
	}
	if err != nil {
		return err
	}
	if c.seg == nil {
		return errors.New("the peer passed no shared memory")
	}
	mode := in.mode
	if f.mode != Staged && mode != Staged {
		ours.there = tryWord(c.peer.pid, in.word, in.number)
	}
	if !dialer {
		c.start = startOf(in.number)
		if err = sendNote(nc, &ours, -1); err == nil {
			err = receiveNote(nc, &in, c)
		}
		if err != nil {
			return err
		}
		ours.there = in.back
	}
	ours.back = p.came(in.there)
	fd := -1
	if ours.there.kind == tryDone && ours.back.kind == tryDone {
		fd = f.tableFD
	}
	if err = sendNote(nc, &ours, fd); err != nil {
		return err
	}
	if dialer {
		if err = receiveNote(nc, &in, c); err != nil {
			return err
		}
		ours.there = in.back
	}
	return f.decide(c, mode, ours.there, ours.back)
}

// share makes the segment of c, and sends it with n.
func (f *Fabric) share(nc *net.UnixConn, c *Conn, n *note) error {
	b, fd, err := mem.NewSealed("fserver-cma", segmentSize, mem.Seals)
	if err != nil {
		return err
	}
	c.seg = &segment{mem: b, refs: 1}
	c.start = startOf(n.number)
	c.seg.control(0).head.Store(c.start)
	c.seg.control(1).head.Store(c.start)
	defer unix.Close(fd)
	return sendNote(nc, n, fd)
}

// decide takes the verdicts that both sides know: here is how writing into the
// peer went, back the other way.
func (f *Fabric) decide(c *Conn, peer Mode, here, back verdict) error {
	no := &transport.ErrUnavailable{Transport: "cma"}
	switch {
	case here.kind == tryDone && back.kind == tryDone && c.table != nil:
		c.tx.direct, c.rx.direct = true, true
		return nil
	case f.mode == Staged:
		no.Reason = "this process is set to staging"
	case peer == Staged:
		no.Reason = "the peer is set to staging"
	case here.kind == tryError || here.kind == tryOther || here.kind == tryLost:
		no.Reason, no.Remedy = here.reason("this process", c.About.Remote), here.remedy()
	case back.kind == tryDone:
		no.Reason = "the peer passed no table of its regions"
	default:
		no.Reason, no.Remedy = back.reason(c.About.Remote, "this process"), back.remedy()
	}
	if f.mode == Direct || peer == Direct {
		return no
	}
	c.About.Via, c.About.Why = "cma/staged", no.Reason
	if no.Remedy != "" {
		c.About.Why += " (" + no.Remedy + ")"
	}
	c.table.unmap()
	c.table = nil
	return nil
}

// startOf is where the rings of a Conn begin, by the dialer's random number: the
// words that a Poll looks at would share one set of its cache if all Conns began
// alike.
func startOf(number uint64) uint64 { return number % 64 * 64 }

// arrange gives c its halves of the segment.
func (c *Conn) arrange(dialer bool) {
	me, size := 1, ringStaged
	if dialer {
		me = 0
	}
	if c.tx.direct {
		size = ringDirect
	}
	c.mine, c.theirs = c.seg.control(me), c.seg.control(1-me)
	c.tx.producer = producer{ring: c.seg.ring(me, size), peer: c.theirs, tail: c.start, head: c.start}
	c.rx.consumer = consumer{ring: c.seg.ring(1-me, size), pos: c.start}
	c.rx.regions = &c.f.Regions
	c.tx.Init(txDepth)
	c.tx.held.Trim(txHeld)
}

// sendNote sends n, and descriptor fd with it if there is one.
func sendNote(nc *net.UnixConn, n *note, fd int) error {
	var rights []byte
	if fd >= 0 {
		rights = unix.UnixRights(fd)
	}
	_, _, err := nc.WriteMsgUnix(n.encode(), rights, nil)
	return err
}

// receiveNote receives n. Memory that comes with it becomes c's segment if that
// has none, and the peer's table otherwise; without a c there must be none.
func receiveNote(nc *net.UnixConn, n *note, c *Conn) error {
	raw, err := nc.SyscallConn()
	if err != nil {
		return err
	}
	var b [noteLen]byte
	var l letter
	for k := 0; k < len(b); {
		m, fd, e := 0, -1, unix.Errno(0)
		err = raw.Read(func(s uintptr) bool { m, fd, e = l.receive(int(s), b[k:]); return e != unix.EAGAIN })
		if fd >= 0 {
			if err == nil && e == 0 {
				err = c.keep(fd)
			}
			unix.Close(fd)
		}
		switch {
		case err != nil:
			return err
		case e == unix.EPROTO:
			return errors.New("the peer passed descriptors that were not requested, or this process has no free one (raise ulimit -n)")
		case e != 0 && e != unix.EINTR:
			return e
		case m == 0 && k == 0 && e == 0:
			return fmt.Errorf("the peer closed the connection: %w", io.EOF)
		case m == 0 && e == 0:
			return fmt.Errorf("the peer sent an incomplete message: %w", io.ErrUnexpectedEOF)
		}
		k += m
	}
	return n.decode(b[:])
}

// keep maps memory that the peer passed.
func (c *Conn) keep(fd int) error {
	switch {
	case c == nil || c.table != nil:
		return errors.New("the peer passed a descriptor that was not requested")
	case c.seg == nil:
		b, err := mapMemory(fd, segmentSize, unix.PROT_READ|unix.PROT_WRITE)
		if err == nil {
			c.seg = &segment{mem: b, refs: 1}
		}
		return err
	}
	b, err := mapMemory(fd, tableSize, unix.PROT_READ)
	if err == nil {
		c.table = asTable(b)
	}
	return err
}
