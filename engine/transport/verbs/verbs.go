// Package verbs is the transport over an RDMA NIC, for host memory. A Conn is one
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
// slots, which are registered.
//
// # The end
//
// A queue pair that ends goes into its error state, and everything that was posted on it
// comes back. When the last of that has come, no byte of the peer can arrive any more.
// The frames that had come are given first.
package verbs

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	rdma "fserver/cshim/verbs"
	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// Options say what Open opens.
type Options struct {
	link.Options
	// Library is the file of libibverbs; empty means the system's.
	Library string
	// Device is the name of the device, of which port 1 is used; empty means the first
	// one whose port is up.
	Device string
	// Near is an address of this host; of several devices one that has it is taken. With Only, no other one is.
	Near string
	Only bool
	// Own has connections set up over the network of the device itself, where its port has an IP address, instead of
	// that of Listen and Bind. So they share its fate.
	Own bool
	// Lag says which port of a bonded NIC queue pairs send over.
	Lag Lag
}

// Fabric is one port of an RDMA device. See transport.Fabric.
type Fabric struct {
	link.Fabric
	dev  *rdma.Device
	cq   *rdma.CQ
	port rdma.Port
	gid  rdma.GID
	most int // Conns

	// The owner guards the rest, and calls nothing that may block.
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
	counts  Counts
}

// Open opens a Fabric.
func Open(o Options) (*Fabric, error) {
	f := &Fabric{byQP: map[uint32]*Conn{}, frames: make([]byte, 0, frameRoom), lag: lag{how: o.Lag, used: map[string]*[2]int{}}}
	if err := f.openDevice(o); err != nil {
		return nil, err
	}
	if o.Name == "" {
		o.Name = fmt.Sprintf("verbs/%s:1", f.dev.Name)
	}
	kind := link.TCP("verbs", f.adopt)
	kind.Caps.LocalKeys = true
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
	f.Start(f.inspect)
	return f, nil
}

// near says where connections are set up.
func (f *Fabric) near(o Options) link.Options {
	if at := f.gid.Addr(); o.Own && f.port.Ethernet && (at.Is4() || at.IsGlobalUnicast()) {
		o.Bind = at.String()
		if o.Listen != "" {
			o.Listen = net.JoinHostPort(o.Bind, "0")
		}
	}
	return o.Options
}

// Interface returns the name of the network interface of the device, or "" if it has none.
func (f *Fabric) Interface() string {
	if i, err := net.InterfaceByIndex(int(f.gid.Link)); err == nil {
		return i.Name
	}
	return ""
}

// open acquires what release gives back, but for the device.
func (f *Fabric) open() (err error) {
	if f.cq, err = f.dev.NewCQ(int(min(f.dev.MaxCQE, 1<<15))); err != nil {
		return err
	}
	if f.most = min(f.cq.Entries/(sendRoom+slots+spare), int(f.dev.MaxQP)); f.most == 0 {
		return fmt.Errorf("verbs: %s: room for %d completions and %d queue pairs, which is too little for one connection", f.Name(), f.cq.Entries, f.dev.MaxQP)
	}
	for _, fd := range []int{f.cq.FD, int(f.dev.FD)} {
		if err = f.Watch(fd, unix.EPOLLIN); err != nil {
			return err
		}
	}
	return nil
}

// openDevice opens the library and the device.
func (f *Fabric) openDevice(o Options) error {
	unavailable := func(reason, remedy string) error {
		return &transport.ErrUnavailable{Transport: "verbs", Reason: reason, Remedy: remedy}
	}
	if err := rdma.Open(o.Library); err != nil {
		return unavailable(strings.TrimPrefix(err.Error(), "verbs: "), "")
	}
	names, err := rdma.Names()
	if err != nil {
		return unavailable(strings.TrimPrefix(err.Error(), "verbs: "), "load the kernel's modules: modprobe ib_uverbs")
	}
	why := noDevice
	at, _ := netip.ParseAddr(o.Near)
	for _, at := range []netip.Addr{at.Unmap(), {}} { // the device with that address, else any
		for _, n := range names {
			if o.Only && !at.IsValid() {
				break
			}
			if o.Device != "" && n != o.Device {
				continue
			}
			if err = f.tryDevice(n, at); err == nil {
				return nil
			}
			why = strings.TrimPrefix(err.Error(), "verbs: ")
		}
	}
	if o.Device != "" && err == nil && len(names) > 0 {
		why = fmt.Sprintf("no RDMA device %s", o.Device)
	}
	return unavailable(why, "ibv_devinfo shows the devices and their ports")
}

// tryDevice opens a device whose port is up and, if at is valid, has that address.
func (f *Fabric) tryDevice(name string, at netip.Addr) error {
	dev, err := rdma.OpenDevice(name)
	if err != nil {
		return err
	}
	port, gids, err := usable(dev)
	best := 0
	for i, g := range gids {
		if port.Ethernet && g.Better(gids[best]) {
			best = i
		}
	}
	if err == nil && at.IsValid() {
		is := func(g rdma.GID) bool { return g.Addr() == at && g.Type == gids[best].Type }
		if best = slices.IndexFunc(gids, is); best < 0 {
			err = fmt.Errorf("port 1 of %s does not have the address %s", name, at)
		}
	}
	if err == nil {
		err = lock(dev)
	}
	if err != nil {
		_ = dev.Close() // nothing was made of it
		return err
	}
	f.dev, f.port, f.gid = dev, port, gids[best]
	return nil
}

// lock says whether the memory of a Conn can be locked, which would else be noticed by the first
// peer alone.
func lock(dev *rdma.Device) error {
	buf, err := mem.Map(bufBytes)
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
	f.Shut(f.conns.Leave, func() {
		for _, c := range f.conns.All {
			c.destroy()
			f.queue.Push(c)
		}
		for i := range f.regions {
			_ = f.regions[i].deregister()
		}
		f.regions = nil
		f.release()
	})
	return nil
}

// inspect ends what stalls. See link.Fabric.
func (f *Fabric) inspect(now time.Time, polled bool) {
	for _, c := range f.conns.All {
		c.inspect(now, polled)
	}
}
