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

// How two sides that trust each other agree on how to talk. Each sends three notes, and hears the
// peer's after each:
//
//  1. It names a word of its own memory, and the random number in it. Behind it the dialer passes
//     the segment.
//  2. How writing into the peer went: it reads the peer's word. Only if it finds the number, the
//     process number means the process of the socket. Then it writes the complement there, for real.
//  3. Whether the peer's writing arrived.
//
// Now both know how it went in both directions. Writes are direct if all is well, and each side
// passes its table then. Otherwise they are staged.

// A note is one of these messages.
type note struct {
	Version uint8 // of the layout
	Mode    Mode
	// How it went so far: the sender of the note writing into its receiver,
	// and the other way.
	There, Back verdict
	Word        uint64 // address
	Number      uint64
}

func (n *note) encode() []byte {
	b, _ := binary.Append(nil, binary.NativeEndian, n) // its size is fixed
	return b
}

func (n *note) decode(b []byte) error {
	if len(b) != binary.Size(n) || b[0] != layoutVersion {
		return fmt.Errorf("the peer sent % x: want version %d of shared memory (run the same version of fserver on both sides)", b[:min(len(b), 8)], layoutVersion)
	}
	_, err := binary.Decode(b, binary.NativeEndian, n)
	return err
}

// swap sends our note and returns the peer's.
func swap(s *link.Session, ours *note) (in note, err error) {
	if err = s.Tell(ours.encode()); err != nil {
		return in, err
	}
	b, err := s.Hear()
	if err == nil {
		err = in.decode(b)
	}
	return in, err
}

// A verdict says how writing into the other process went.
type verdict struct {
	Kind  verdictKind
	Errno uint32
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
	switch v.Kind {
	case tryError:
		return s + "process_vm_writev: " + unix.Errno(v.Errno).Error()
	case tryOther:
		return s + "its process number belongs to another process here"
	case tryLost:
		return s + "the data that it wrote did not arrive"
	}
	return s + "writing was not tried"
}

// remedy says what the user can do about it.
func (v verdict) remedy() string {
	switch errno := unix.Errno(v.Errno); {
	case v.Kind == tryOther || errno == unix.ESRCH:
		return "let both processes share a PID namespace: docker run --pid=host, hostPID or shareProcessNamespace"
	case errno == unix.ENOSYS:
		return "use a kernel with CONFIG_CROSS_MEMORY_ATTACH, and a sandbox that allows process_vm_writev"
	case errno != unix.EPERM:
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
	if v.Kind == tryDone && p.word.Load() != ^p.number {
		v.Kind = tryLost
	}
	return v
}

// tryPeer writes to the word that a peer named.
func tryPeer(pid int, p *probe) verdict {
	return tryWord(pid, addressOf(&p.word), p.number)
}

func tryWord(pid int, addr, number uint64) verdict {
	if pid <= 0 { // the process is in a PID namespace that is not ours
		return verdict{tryError, uint32(unix.ESRCH)}
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
		return verdict{Kind: tryDone}
	case errors.As(err, &e) && e == unix.EFAULT: // the word is not there
		return verdict{Kind: tryOther}
	}
	return verdict{tryError, uint32(e)}
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
	c.About.Process = who.pid
	err = f.agree(nc, c, s, who.uid)
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

// agree exchanges the notes, and what is passed with them, with a peer of user uid.
func (f *Fabric) agree(nc *net.UnixConn, c *Conn, s *link.Session, uid int) error {
	p := newProbe()
	ours := note{Version: layoutVersion, Mode: f.mode, Word: addressOf(&p.word), Number: p.number}
	in, err := swap(s, &ours)
	if err != nil {
		return err
	}
	mode := in.Mode
	if s.Dialer {
		err = c.share(nc, ours.Number)
	} else {
		c.start = startOf(in.Number)
		var b []byte
		if b, err = receiveMemory(nc, segmentSize, unix.PROT_READ|unix.PROT_WRITE); err == nil {
			c.seg = &segment{mem: b, refs: 1}
		}
	}
	if err != nil {
		return err
	}
	switch {
	case f.mode == Staged || mode == Staged:
	case uid != os.Geteuid(): // root could: the pid may be that of a process that is not the peer
		ours.There = verdict{tryError, uint32(unix.EPERM)}
	default:
		ours.There = tryWord(c.peer.pid, in.Word, in.Number)
	}
	if in, err = swap(s, &ours); err != nil {
		return err
	}
	ours.Back = p.came(in.There)
	if in, err = swap(s, &ours); err != nil {
		return err
	}
	if ours.There.Kind == tryDone { // what we have seen to fail is no matter of the peer's word
		ours.There = in.Back
	}
	if ours.There.Kind == tryDone && ours.Back.Kind == tryDone {
		if err = passMemory(nc, f.tableFD); err != nil {
			return err
		}
		b, err := receiveMemory(nc, tableSize, unix.PROT_READ)
		if err != nil {
			return err
		}
		c.table = asTable(b)
	}
	return f.decide(c, mode, ours.There, ours.Back)
}

// share makes the segment of c, and passes it.
func (c *Conn) share(nc *net.UnixConn, number uint64) error {
	b, fd, err := mem.NewSealed("fserver-cma", segmentSize, mem.Seals)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	c.seg = &segment{mem: b, refs: 1}
	c.start = startOf(number)
	c.seg.control(0).head.Store(c.start)
	c.seg.control(1).head.Store(c.start)
	return passMemory(nc, fd)
}

// decide takes the verdicts that both sides know: here is how writing into the
// peer went, back the other way.
func (f *Fabric) decide(c *Conn, peer Mode, here, back verdict) error {
	no := &transport.ErrUnavailable{Transport: "cma"}
	switch {
	case c.table != nil:
		c.tx.direct, c.rx.direct = true, true
		return nil
	case f.mode == Staged:
		no.Reason = "this process is set to staging"
	case peer == Staged:
		no.Reason = "the peer is set to staging"
	case here.Kind == tryError || here.Kind == tryOther || here.Kind == tryLost:
		no.Reason, no.Remedy = here.reason("this process", c.About.Remote), here.remedy()
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

// passMemory passes a descriptor, with one byte.
func passMemory(nc *net.UnixConn, fd int) error {
	_, _, err := nc.WriteMsgUnix([]byte{0}, unix.UnixRights(fd), nil)
	return err
}

// receiveMemory maps the memory that the peer passes.
func receiveMemory(nc *net.UnixConn, size, prot int) ([]byte, error) {
	raw, err := nc.SyscallConn()
	if err != nil {
		return nil, err
	}
	var l letter
	n, fd, e := 0, -1, unix.Errno(0)
	err = raw.Read(func(s uintptr) bool { n, fd, e = l.receive(int(s), l.bytes[:1]); return e != unix.EAGAIN })
	if fd >= 0 {
		defer unix.Close(fd)
	}
	switch {
	case err != nil:
		return nil, err
	case e == unix.EPROTO:
		return nil, errors.New("the peer passed descriptors that were not requested, or this process has no free one (raise ulimit -n)")
	case e != 0:
		return nil, e
	case n == 0:
		return nil, fmt.Errorf("the peer's process has ended, or cut the connection: %w", io.ErrUnexpectedEOF)
	case fd < 0:
		return nil, errors.New("the peer passed no shared memory")
	}
	return mapMemory(fd, size, prot)
}
