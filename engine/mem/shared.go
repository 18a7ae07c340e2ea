package mem

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Shared is memory of this process that another one can map too: a memfd whose
// size is sealed, so that nobody's access to it can fail. It leaves no file
// behind, however the process ends.
type Shared struct {
	id     uint64
	region Region
	fd     int
	freed  atomic.Bool
}

// The shared memory of the process: there is one address space, and whoever is
// handed a span of it must find out what it lies in.
var shares struct {
	mu     sync.Mutex // held for a few instructions, never while waiting
	next   uint64
	sorted []*Shared // by address
	count  atomic.Int64
	freed  atomic.Uint64
}

const maxMap = 1 << 46

// NewShared makes n bytes (n > 0) of zeroed shared memory. FreeShared ends it.
func NewShared(n uint64) (*Shared, error) { return NewNamed("fserver-shared", n) }

// NewNamed is NewShared under another name, which /proc/PID/maps shows.
func NewNamed(name string, n uint64) (*Shared, error) {
	if n == 0 || n > maxMap {
		return nil, fmt.Errorf("mem: share %d bytes: want 1 to 2^46", n)
	}
	b, fd, err := NewSealed(name, int((n+4095)&^4095), Seals)
	if err != nil {
		return nil, fmt.Errorf("mem: share %d bytes: %w", n, err)
	}
	s := &Shared{region: Region{Addr: Of(b).Addr, Len: uint64(len(b))}, fd: fd}
	shares.mu.Lock()
	defer shares.mu.Unlock()
	shares.next++
	s.id = shares.next
	at, _ := find(s.region.Addr)
	shares.sorted = slices.Insert(shares.sorted, at, s)
	shares.count.Add(1)
	return s, nil
}

// strict reports whether the kernel promises no more memory than there is (vm.overcommit_memory=2). It promises none for
// pages of a memfd that nobody has touched, and to touch one that it does not have is SIGBUS. So all pages are taken
// at once then, and an error says that there are too few. Otherwise they are taken when they are touched, near whoever does.
var strict = func() bool {
	b, _ := os.ReadFile("/proc/sys/vm/overcommit_memory")
	return len(b) > 0 && b[0] == '2'
}

// claimPiece is how much claim takes in one call: a signal ends a call, which then gives its pages back.
const claimPiece = 16 << 20

// claim takes the first n bytes of pages of a memfd, as far as the file system can.
func claim(fd int, n uint64) error {
	for at := uint64(0); at < n; {
		k := min(claimPiece, n-at)
		switch err := unix.Fallocate(fd, 0, int64(at), int64(k)); err {
		case nil:
			at += k
		case unix.EINTR:
		case unix.EOPNOTSUPP, unix.ENOSYS:
			return nil
		default:
			return fmt.Errorf("take its pages: %w (vm.overcommit_memory is 2)", err)
		}
	}
	return nil
}

// find is where the memory that begins at addr is in the list, or belongs.
func find(addr uintptr) (int, bool) {
	return slices.BinarySearchFunc(shares.sorted, addr, func(s *Shared, a uintptr) int { return cmp.Compare(s.region.Addr, a) })
}

// SharedAt is the shared memory that s lies in wholly, or nil. Whoever asks
// keeps it from being freed meanwhile.
func SharedAt(s Span) *Shared {
	if shares.count.Load() == 0 || s.Len == 0 {
		return nil
	}
	shares.mu.Lock()
	defer shares.mu.Unlock()
	at, exact := find(s.Addr)
	if !exact {
		at--
	}
	if at < 0 || !shares.sorted[at].region.Contains(s) {
		return nil
	}
	return shares.sorted[at]
}

// FreeShared frees the shared memory with a number.
func FreeShared(id uint64) error {
	shares.mu.Lock()
	at := slices.IndexFunc(shares.sorted, func(s *Shared) bool { return s.id == id })
	if at < 0 {
		shares.mu.Unlock()
		return fmt.Errorf("mem: free shared memory %d: no such memory", id)
	}
	s := shares.sorted[at]
	shares.sorted = slices.Delete(shares.sorted, at, at+1)
	shares.count.Add(-1)
	shares.mu.Unlock()
	s.freed.Store(true)
	shares.freed.Add(1)
	unix.Close(s.fd)
	return Unmap(s.region)
}

// SharedFreed counts what has been freed ever: whoever keeps something for
// shared memory looks whether this has changed.
func SharedFreed() uint64 { return shares.freed.Load() }

// ID is the number of s; none is used twice.
func (s *Shared) ID() uint64 { return s.id }

// Region is where s lies, whole pages.
func (s *Shared) Region() Region { return s.region }

// FD is the memfd; it stays s's.
func (s *Shared) FD() int { return s.fd }

// Freed says whether s is gone.
func (s *Shared) Freed() bool { return s.freed.Load() }

// View is another process's shared memory, mapped for reading alone. It stays
// mapped as long as somebody holds it. Safe for concurrent use.
type View struct {
	region Region
	refs   atomic.Int64
	tally  *Tally
}

// Tally counts Views that have been unmapped, and then their bytes.
type Tally struct{ Views, Bytes atomic.Uint64 }

// NewView maps the first n bytes of fd, which has that many. fd stays the
// caller's, and the View is held once, by the caller.
func NewView(fd int, n uint64, tally *Tally) (*View, error) {
	b, err := unix.Mmap(fd, 0, int(n), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("mem: map %d bytes of shared memory: %w", n, err)
	}
	v := &View{region: Region{Addr: Of(b).Addr, Len: n}, tally: tally}
	v.refs.Store(1)
	return v, nil
}

// Region is where v lies in this process. It must not be written to.
func (v *View) Region() Region { return v.region }

// Hold holds v once more.
func (v *View) Hold() { v.refs.Add(1) }

// Drop ends one Hold, or that of NewView; the last one unmaps.
func (v *View) Drop() error {
	if v.refs.Add(-1) != 0 {
		return nil
	}
	err := Unmap(v.region)
	v.tally.Views.Add(1)
	v.tally.Bytes.Add(v.region.Len)
	return err
}
