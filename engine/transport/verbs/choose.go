package verbs

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	rdma "fserver/cshim/verbs"
	"fserver/engine/conf"
	"fserver/engine/transport"
)

// sysClass is where the kernel shows its RDMA devices. Tests put another folder in its place.
var sysClass = "/sys/class/infiniband"

// SetClass puts another folder in the place of /sys/class/infiniband, for tests.
func SetClass(folder string) { sysClass = folder }

// kernelDevices are those that the kernel shows, whether or not the library can open them.
func kernelDevices() (names []string) {
	found, _ := filepath.Glob(sysClass + "/*") // the pattern is good
	for _, at := range found {
		names = append(names, filepath.Base(at))
	}
	return names
}

// software says whether a device has no hardware below it: it is slower than TCP.
func software(name string) bool {
	at, err := os.Readlink(filepath.Join(sysClass, name))
	return err == nil && strings.Contains(at, "/virtual/")
}

// absent says whether this host has neither hardware nor a software device that is named.
func absent(c *conf.Config) bool {
	names := conf.Get[[]string](c, device)
	return !slices.ContainsFunc(kernelDevices(), func(name string) bool { return !software(name) || spelled(names, name) })
}

// spelled says whether names has the device itself, and not only a pattern that it fits.
func spelled(names []string, device string) bool {
	_, is := among(names, device)
	return is && len(names) > 0 && several(names)
}

// auto are the options where the user has not asked for RDMA; named says whether devices are named.
func (o Options) auto(e *transport.Env, named bool) Options {
	o.Hardware, o.Common = true, !named
	o.Lock = lockable()
	o.Own = !conf.Loopback(e.Host) // else the set-up would open this host to others
	if e.Nearest != nil {
		o.Near, o.Order = "", e.Nearest
	}
	return o
}

// lockable is how many bytes auto wants to lock. With the limits that are usual where nobody has raised them, tensors
// would be refused that TCP takes. Where there is no limit nothing has to be tried.
func lockable() uint64 {
	var l unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_MEMLOCK, &l) == nil && l.Cur == unix.RLIM_INFINITY {
		return 0
	}
	return 64 << 20
}

// unavailable takes the remedy that is at the end of a reason, in brackets, or else the one that is given.
func unavailable(reason, remedy string) error {
	reason = strings.TrimPrefix(reason, "verbs: ")
	if text, own, _ := strings.Cut(reason, " ("); strings.HasSuffix(own, ")") && !strings.Contains(own, " (") {
		reason, remedy = text, strings.TrimSuffix(own, ")")
	}
	return &transport.ErrUnavailable{Transport: "verbs", Reason: reason, Remedy: remedy}
}

const (
	installLibrary = "install libibverbs1 and ibverbs-providers"
	loadModules    = "load the kernel's modules: modprobe ib_uverbs; in a container, on the host"
	giveFiles      = "let this user read and write /dev/infiniband/uverbs*; in a container, add --device /dev/infiniband"
	showPorts      = "ibv_devinfo shows the devices and their ports"
)

// listDevices opens the library and lists the devices that it can open. The error is an ErrUnavailable.
func listDevices(library string) ([]string, error) {
	if err := rdma.Open(library); err != nil {
		return nil, unavailable(err.Error(), installLibrary)
	}
	names, err := rdma.Names()
	if err != nil {
		return nil, unavailable(err.Error(), loadModules)
	}
	seen := strings.Join(kernelDevices(), ", ")
	switch {
	case len(names) > 0:
		return names, nil
	case seen == "":
		return nil, unavailable("no RDMA device ("+sysClass+" is empty)", "load the driver of the NIC, such as mlx5_ib; without one, use TCP")
	}
	if _, err := os.Stat(filepath.Join(filepath.Dir(sysClass), "infiniband_verbs")); err != nil {
		return nil, unavailable("the kernel has "+seen+", but not the module ib_uverbs", loadModules)
	}
	return nil, unavailable("libibverbs has no driver for "+seen, "install ibverbs-providers; in a container, of the version of the host's driver")
}

// openDevice opens the library and the device.
func (f *Fabric) openDevice(o Options) error {
	names, err := listDevices(o.Library)
	if err != nil {
		return err
	}
	var wanted []string
	if o.Device != "" {
		wanted = strings.Split(o.Device, ",")
	}
	if err = checkNames(wanted); err != nil {
		return unavailable(err.Error(), "")
	}
	names = slices.DeleteFunc(names, func(n string) bool {
		_, is := among(wanted, n)
		return !is || o.Hardware && software(n) && !spelled(wanted, n)
	})
	if len(names) == 0 {
		return unavailable("no RDMA device "+cmp.Or(o.Device, "with hardware"), showPorts)
	}
	if o.Order != nil && len(names) > 1 {
		names = o.Order(names)
	}
	return f.firstDevice(o, names, wanted)
}

// firstDevice opens the first device that works: one with the address that is wanted, else any.
func (f *Fabric) firstDevice(o Options, names, wanted []string) error {
	var whys []string
	near, _ := netip.ParseAddr(o.Near)
	for _, at := range []netip.Addr{near.Unmap(), {}} {
		if !at.IsValid() {
			if o.Only {
				break
			}
			whys = nil // they said that it has another address
		}
		for _, n := range names {
			port, _ := among(wanted, n)
			err := f.tryDevice(n, port, at, o.Lock)
			if err == nil {
				return nil
			}
			if why := strings.TrimPrefix(err.Error(), "verbs: "); !slices.Contains(whys, why) {
				whys = append(whys, why)
			}
		}
	}
	return unavailable(strings.Join(whys, "; "), showPorts)
}

// tryDevice opens a device with a port that is up and, if at is valid, has that address: the one with a number, or
// the first. So many bytes can be locked.
func (f *Fabric) tryDevice(name string, number int32, at netip.Addr, locked uint64) error {
	dev, err := open(name)
	if err != nil {
		return err
	}
	first, last := number, number
	if number == 0 {
		first, last = 1, max(dev.Ports, 1)
	}
	var where address
	for n := first; n <= last; n++ {
		a, bad := addressOf(dev, n, f.path, at)
		if bad == nil {
			where, err = a, nil
			break
		}
		err = cmp.Or(err, bad)
	}
	if err == nil {
		err = lock(dev, locked)
	}
	if err != nil {
		_ = dev.Close() // nothing was made of it
		return err
	}
	f.dev, f.at, f.nearTo = dev, where, at
	return nil
}

// open opens a device. The error ends with a remedy.
func open(name string) (*rdma.Device, error) {
	dev, err := rdma.OpenDevice(name)
	if why := (unix.Errno)(0); errors.As(err, &why) && slices.Contains([]unix.Errno{unix.EACCES, unix.EPERM, unix.ENOENT, unix.ENXIO}, why) {
		return nil, fmt.Errorf("verbs: open %s: %w (%s)", name, why, giveFiles)
	}
	return dev, err
}
