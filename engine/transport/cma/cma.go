// Package cma is the transport between processes of one host (and between
// Fabrics of one process). A write is one copy: the sender's process_vm_writev
// ("cross memory attach") puts it straight into the peer's region. Frames, and
// the news of writes, go through a ring in memory that both map.
//
// # Parts
//
// Connections are set up over an abstract Unix socket, which leaves nothing on
// disk. What passed the Gate exchanges a segment of shared memory (memfd),
// tries in both directions whether each side can write into the other
// (attach.go), and passes the table of its regions if so. From then on the
// socket carries only the byte that wakes a sleeper, now and then with the
// descriptor of shared memory, and tells of the peer's death. layout_unsafe.go has the layout of what is shared, ring.go the rings,
// copy.go the one-copy writes, settle.go the end of a region, lend.go shared memory.
//
// Small writes go through the ring as well: two copies cost less than a system
// call there. Where one side cannot write into the other (Yama, another user, seccomp, a
// PID namespace), both stage: the sender copies into the ring, the receiver
// copies to the region. Conn.Peer has the reason.
//
// A Conn takes about 60 KiB of memory, and of the segment what its rings have
// touched: up to 512 KiB, or 4 MiB if it is staged. Large frames take up to
// 2 MiB more while they travel.
//
// # Waiting
//
// Poll looks at one word of each Conn and makes no system call, but for a look
// at the sockets now and then. Arm, which is called before each sleep, tells all
// peers to ring; who finds that said rings once, with one byte on the socket. So
// a pair that spins makes no system calls but the copies, and an idle one none
// at all.
//
// # Whom we trust
//
// Nothing that a peer sends or stores in shared memory is trusted. A word is
// loaded once and then checked, frames are copied out of the ring before they
// are parsed, lengths are bounded by the ring, and a broken record ends its
// Conn alone. Memory that a peer passes cannot shrink under us (seals). No
// descriptor of a peer is ever written to or waited on. Shared memory that it
// lends (lend.go) is mapped for reading alone, and no more than a bound of it.
//
// Keys are checked before a byte lands: by the receiver if writes are staged,
// and by the sender if they are direct. A peer that may write into a process
// directly is, to the kernel, one that may do anything to it; that it goes by
// the table of regions guards against mistakes, not against malice. The table
// is given to no other peer. So whoever must not have that power has to be
// another user, or kept out by the Gate. A key that is kept to one Conn (Bind) is
// so by the receiver alone: it refuses what comes through the ring, staged or
// small. Of another peer's direct write it hears, if at all, when the bytes have
// landed, and ends that peer's Conn then.
//
// Two limits are the kernel's. It knows the target of a copy by its process
// number: a peer that dies, and whose number is used again before its socket is
// looked at (within 1024 Polls), leaves a moment in which a copy meets another
// process of the same user, and fails there unless the same addresses are
// mapped. And a sender can be starved for seconds in the middle of a copy;
// EvFreed and EvClosed then wait for it, and Close fails and says so.
package cma

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// Mode says how writes travel.
type Mode uint8

const (
	Auto   Mode = iota // direct where both sides can, else staged
	Direct             // one copy, or ErrUnavailable
	Staged             // two copies
)

// Options say what Open opens. A Fabric listens on a Unix socket if Listen is not empty, whatever that
// says; Bind and TLS are not used.
type Options struct {
	link.Options
	// Mode is the zero value, Auto, but for those who know.
	Mode Mode
	// NoPtracer keeps Open from calling prctl(PR_SET_PTRACER_ANY), which lets
	// processes of the same user write into this one where Yama
	// (kernel.yama.ptrace_scope=1) would let only its parents.
	NoPtracer bool
}

// Fabric is the transport of one process. See transport.Fabric.
type Fabric struct {
	link.Fabric
	link.Regions // Shared is what peers see of it
	mode         Mode
	host         string // identity of what Unix sockets and processes can be seen

	// The owner guards all below.
	slept   bool // Arm was called, and no Poll since
	tableFD int  // of Regions.Shared
	conns   link.Conns[*Conn]
	next    int   // in conns: where the next Poll begins
	ended   error // of Close
	arena   []byte
	vec     vec
	letter  letter
	freed   uint64 // mem.SharedFreed when it was last looked at
}

// Open opens a Fabric. With Mode Direct it is an ErrUnavailable if this process
// cannot even copy into itself.
func Open(o Options) (*Fabric, error) {
	if o.Mode > Staged {
		return nil, fmt.Errorf("cma: open: mode %d is unknown", o.Mode)
	}
	host, err := identity()
	if err != nil {
		return nil, &transport.ErrUnavailable{Transport: "cma", Reason: err.Error(), Remedy: "mount /proc"}
	}
	if o.Mode == Direct {
		if v := tryPeer(unix.Getpid(), newProbe()); v.Kind != tryDone {
			return nil, &transport.ErrUnavailable{Transport: "cma", Reason: v.reason("this process", "itself"), Remedy: v.remedy()}
		}
	}
	f := &Fabric{mode: o.Mode, host: host, arena: make([]byte, 0, arenaSize), tableFD: -1}
	f.Regions.Init(&f.Fabric)
	kept := o.Options
	kept.Listen, kept.Bind, kept.TLS = "", "", nil // they are of TCP
	err = f.Fabric.Open(link.Kind{
		Name: "cma", Network: "unix", Gone: "the peer has ended, or closed its node",
		Caps: transport.Caps{Lends: true}, Target: f.socketName, Remote: remote, Adopt: f.adopt,
	}, kept)
	if err != nil {
		return nil, err
	}
	if err := f.open(&o); err != nil {
		f.release()
		f.Release()
		return nil, fmt.Errorf("cma: open: %w", err)
	}
	f.Start(f.inspect)
	return f, nil
}

// open acquires what release gives back.
func (f *Fabric) open(o *Options) (err error) {
	if !o.NoPtracer && o.Mode != Staged {
		// Yama takes one process or all, and there are many peers. With all,
		// what may attach is what could without Yama: processes of the same
		// user, and root. Without Yama this fails, which is as well.
		_ = unix.Prctl(unix.PR_SET_PTRACER, unix.PR_SET_PTRACER_ANY, 0, 0, 0)
	}
	var b []byte
	if b, f.tableFD, err = mem.NewSealed("fserver-cma", tableSize, mem.Seals|unix.F_SEAL_FUTURE_WRITE); err != nil {
		return fmt.Errorf("create the table of regions: %w", err)
	}
	f.Shared = asTable(b)
	if o.Listen != "" {
		return f.listen()
	}
	return nil
}

// release gives back what open acquired.
func (f *Fabric) release() {
	if f.tableFD >= 0 {
		unix.Close(f.tableFD)
	}
	table(f.Shared).unmap()
	f.Shared = nil
}

// Arm implements transport.Fabric. It tells the peers to ring.
func (f *Fabric) Arm() (again bool) {
	f.Owner.Lock()
	defer f.Owner.Unlock()
	if !f.Closed {
		f.slept = true
		again = f.Missed.Swap(false)
		for _, c := range f.conns.All {
			again = c.rest() || again
		}
	}
	return again
}

// Deregister implements transport.Fabric. A peer that goes on writing to the
// key loses its Conn. EvFreed waits for the peers that are in the middle of a copy,
// whatever that goes to: well below a millisecond, as a rule.
func (f *Fabric) Deregister(k transport.Key) {
	f.Owned(func() {
		if !f.Remove(k) {
			return
		}
		var busy []writer
		for _, c := range f.conns.All {
			if w, found := c.writer(); found {
				w.seg.refs++
				busy = append(busy, w)
			}
		}
		f.settle(busy, func() { f.Free(k.ID) })
	})
}

// Close implements transport.Fabric.
func (f *Fabric) Close() error {
	f.Shut(f.conns.Leave, f.release)
	return f.ended
}

// inspect ends what stalls and frees what is idle. See link.Fabric.
func (f *Fabric) inspect(now time.Time, polled bool) {
	limit := f.Limits.Stall
	for _, c := range f.conns.All {
		if c.Err != nil {
			continue
		}
		if c.stalled(now, polled) >= limit {
			c.end(fmt.Errorf("the peer has read nothing for %v: %w", limit, unix.ETIMEDOUT))
			continue
		}
		c.rx.trim()
		c.tx.held.Trim(txHeld)
	}
}
