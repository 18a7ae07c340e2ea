// Package verbs is the transport over an RDMA NIC, for host memory, and for memory of a GPU
// that the NIC reaches (gpu.go). A Conn is one
// reliable connected queue pair: a write is an RDMA WRITE, a frame is a SEND into
// one of the slots that the peer has posted, and the NIC keeps the order of both, so a
// frame comes after the writes before it. The receiver sees a frame by its completion
// alone; it never looks at memory.
//
// Package link sets the Conns up over TCP: it dials and listens, and runs the Gate and
// TLS. The numbers of the queue pairs travel over that connection (setup.go), which stays open
// for as long as the Conn. Its end is the end of the Conn: a queue pair that is idle does not
// notice that its peer was killed. TLS does not protect the data, which the NIC sends in the clear.
//
// # Memory
//
// A region is registered with the NIC by Register, and its key carries what the NIC
// calls it. The source of a write is registered in the same way, before it is posted. The
// Fabric finds its registration by its address. A source that has none is copied, in pieces, into
// slots, which are registered. A source on a GPU must have one.
//
// The receiving NIC is not told that a write is for a GPU, so the sender marks the next frame. The receiver
// gives such a frame when the GPU sees the bytes (readback.go).
//
// # The end
//
// A queue pair that ends goes into its error state, and everything that was posted on it
// comes back. When the last of that has come, no byte of the peer can arrive any more.
// The frames that had come are given first.
package verbs

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	rdma "fserver/cshim/verbs"
	"fserver/engine/gpu"
	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// Options say what Open opens.
type Options struct {
	link.Options
	// Library is the file of libibverbs; empty means the system's.
	Library string
	// Device is the name of the device, or several, separated by commas, of which the first with a port that is up is used;
	// see among. Empty means all.
	Device string
	// Near is an address of this host; of several devices one that has it is taken. With Only, no other one is.
	Near string
	Only bool
	// Own has connections set up over the network of the device itself, where its port has an IP address, instead of
	// that of Listen and Bind. So they share its fate.
	Own bool
	// Order, if set, puts the names of devices into the order in which they are tried; it may take seconds.
	Order func(names []string) []string
	// Hardware leaves out devices without hardware, unless Device names them.
	Hardware bool
	// Common has Reaches refuse peers that have no network in common with the device.
	Common bool
	// Lock is how many bytes it must be possible to lock, at least those of one Conn.
	Lock uint64
	// Lag says which port of a bonded NIC queue pairs send over.
	Lag Lag
	// Path says how packets travel.
	Path Path
	// GPU is the GPU of the node, nil: none. GPUDirect says how the NIC may be shown its memory, and Later gives
	// memory of it back; nil: nobody else does.
	GPU       gpu.Device
	GPUDirect Ways
	Later     *gpu.Later
}

// Fabric is one port of an RDMA device. See transport.Fabric.
type Fabric struct {
	link.Fabric
	dev    *rdma.Device
	cq     *rdma.CQ
	most   int // Conns
	path   Path
	nearTo netip.Addr // that the GID has to have, if it is valid
	subnet string     // of an InfiniBand port, the first half of its GIDs; empty: it is an Ethernet port
	common *networks  // what Reaches looks for; nil: nothing
	direct direct

	leaving sync.Once  // Close
	looking sync.Mutex // refresh

	// The owner guards the rest, and calls nothing that may block.
	at      address
	probes  int      // GIDs that the device has refused
	stale   bool     // something has happened to the port
	made    int      // queue pairs that exist or are being made
	regions []region // by start
	last    uint64   // the newest key
	conns   link.Conns[*Conn]
	lag     lag
	byQP    map[uint32]*Conn  // by the number of the queue pair, also while they are set up
	queue   link.Queue[*Conn] // what the next Poll visits
	slept   bool              // Arm was called, and no Poll since
	found   [64]rdma.Completion
	batch   [rdma.Chain]rdma.Request // what goes to the NIC at once
	frames  []byte                   // what events of the last Poll point to
	back    *readback                // nil: none is needed
	left    bool                     // the device is called no more
	lost    bool                     // the kernel says that it is gone
	counts  Counts
}

// Open opens a Fabric.
func Open(o Options) (*Fabric, error) {
	f := &Fabric{byQP: map[uint32]*Conn{}, frames: make([]byte, 0, frameRoom), lag: lag{how: o.Lag, used: map[string]*[2]int{}}, path: o.Path}
	f.path.Timeout, f.path.Retries = cmp.Or(o.Path.Timeout, 16), cmp.Or(o.Path.Retries, 6)
	if err := f.openDevice(o); err != nil {
		return nil, err
	}
	if o.Name == "" {
		o.Name = fmt.Sprintf("verbs/%s:%d", f.dev.Name, f.at.number)
	}
	facts := f.openGPU(o.GPU, o.GPUDirect)
	kind := link.TCP("verbs", f.adopt)
	kind.Caps.LocalKeys, kind.Target = true, target(kind.Target)
	f.locate(o.Common)
	err := f.Fabric.Open(kind, f.near(o))
	if err != nil {
		f.release()
		return nil, err
	}
	if err = f.open(); err != nil {
		f.release()
		f.Release()
		return nil, err
	}
	f.openGPUReads(o, facts)
	f.Start(f.inspect)
	return f, nil
}

// near says where connections are set up.
func (f *Fabric) near(o Options) link.Options {
	if at := f.at.gid().Addr(); o.Own && f.at.port.Ethernet && (at.Is4() || at.IsGlobalUnicast()) {
		o.Bind = at.String()
		if o.Listen != "" {
			o.Listen = net.JoinHostPort(o.Bind, "0")
		}
	}
	return o.Options
}

// Interface returns the name of the network interface of the device, or "" if it has none.
func (f *Fabric) Interface() (name string) {
	f.Owned(func() {
		if i, err := net.InterfaceByIndex(int(f.at.gid().Link)); err == nil {
			name = i.Name
		}
	})
	return name
}

// open acquires what release gives back, but for the device.
func (f *Fabric) open() (err error) {
	if f.cq, err = f.dev.NewCQ(int(min(f.dev.MaxCQE, 1<<15))); err != nil {
		return err
	}
	entries, pairs := f.cq.Entries, int(f.dev.MaxQP)
	if f.direct.at != mem.CPU { // for the reads
		entries, pairs = entries-readRoom-1, pairs-1
	}
	if f.most = min(entries/(sendRoom+slots+spare), pairs); f.most <= 0 {
		return fmt.Errorf("verbs: %s: room for %d completions and %d queue pairs, which is too little for one connection", f.Name(), f.cq.Entries, f.dev.MaxQP)
	}
	for _, fd := range []int{f.cq.FD, int(f.dev.FD)} {
		if err = f.Watch(fd, unix.EPOLLIN); err != nil {
			return err
		}
	}
	return nil
}

// lock says whether so many bytes can be locked, at least those of a Conn, which would else be noticed by the first
// peer alone.
func lock(dev *rdma.Device, bytes uint64) error {
	buf, err := mem.Map(max(bufBytes, bytes))
	if err != nil {
		return err
	}
	defer mem.Unmap(buf)
	r, err := dev.Register(uint64(buf.Addr), buf.Len, rdma.LocalWrite)
	if err == nil {
		err = r.Deregister()
	}
	return err
}

// release gives back what open acquired.
func (f *Fabric) release() {
	f.back.close()
	if f.cq != nil {
		_ = f.cq.Destroy()
	}
	if f.dev != nil {
		_ = f.dev.Close()
	}
}

// Bind implements transport.Fabric. The NIC takes a key from every peer.
func (f *Fabric) Bind(transport.Key, transport.Conn) error { return nil }

// Close implements transport.Fabric.
func (f *Fabric) Close() error {
	f.Shut(f.conns.Leave, func() {})
	f.leaving.Do(f.leave)
	return nil
}

// leave makes the last calls of the device. They may take long, so the owner is not held: after Shut nobody else calls the
// device.
func (f *Fabric) leave() {
	var conns []*Conn
	var regions []region
	f.Owned(func() {
		conns = slices.DeleteFunc(slices.Clone(f.conns.All), func(c *Conn) bool { return c.gone })
		regions, f.regions = f.regions, nil
	})
	for _, c := range conns {
		c.destroy()
	}
	f.Owned(func() { // before memory is unpinned: peers may wait for the end of their Conns
		for _, c := range conns {
			c.leave()
		}
		for _, c := range f.conns.All {
			f.queue.Push(c)
		}
	})
	for i := range regions {
		_ = regions[i].deregister()
	}
	f.release()
	f.Owned(func() { f.left = true })
	f.back.wait()
}

// inspect ends what stalls. See link.Fabric.
func (f *Fabric) inspect(now time.Time, polled bool) {
	for _, c := range f.conns.All {
		c.inspect(now, polled)
	}
}
