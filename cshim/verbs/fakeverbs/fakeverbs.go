// Package fakeverbs is a libibverbs for tests: a shared object that is compiled when
// a test asks for it, and whose devices join queue pairs of this process by memory
// copies. It can be told what a software NIC cannot do: every completion status, want
// of memory, a device that vanishes, asynchronous events.
package fakeverbs

/*
#cgo LDFLAGS: -ldl
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>

static int call_set(void *f, const char *name, long value) { return ((int (*)(const char *, long))f)(name, value); }
static void call_reset(void *f) { ((void (*)(void))f)(); }
static int call_fail(void *f, const char *call, int error, int after, int times) {
  return ((int (*)(const char *, int, int, int))f)(call, error, after, times);
}
static void call_status(void *f, int op, int after, int status) { ((void (*)(int, int, int))f)(op, after, status); }
static void call_event(void *f, int device, int type, int port, uint32_t number) {
  ((void (*)(int, int, int, uint32_t))f)(device, type, port, number);
}
static void call_vanish(void *f, int device) { ((void (*)(int))f)(device); }
static int call_peer(void *f, uint64_t start, uint64_t alias, uint64_t n) {
  return ((int (*)(uint64_t, uint64_t, uint64_t))f)(start, alias, n);
}
static long call_count(void *f, const char *name) { return ((long (*)(const char *))f)(name); }
*/
import "C"

import (
	"cmp"
	"embed"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"unsafe"
)

//go:embed testdata
var sources embed.FS

var build = sync.OnceValues(compile)

// Library compiles the fake, once for the process, and gives its path. It is an error where libibverbs-dev is missing.
func Library() (string, error) { return build() }

// Real reports whether tests are to run over devices of this host, which FSERVER_TEST_RDMA=DEVICE,DEVICE names.
func Real() bool { return os.Getenv("FSERVER_TEST_RDMA") != "" }

// Devices are two that reach each other, of the fake or of this host. They may be one and the same.
func Devices() [2]string {
	if !Real() {
		return [2]string{"fake0", "fake1"}
	}
	one, other, _ := strings.Cut(os.Getenv("FSERVER_TEST_RDMA"), ",")
	return [2]string{one, cmp.Or(other, one)}
}

func compile() (string, error) {
	const header = "/usr/include/infiniband/verbs.h"
	if _, err := os.Stat(header); err != nil {
		return "", fmt.Errorf("no fake libibverbs without libibverbs-dev: %w", err)
	}
	dir, err := os.MkdirTemp("", "fakeverbs")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(dir) // what is loaded stays
	for _, name := range []string{"fake.c", "gpu.c", "move.c", "pair.c", "fake.h"} {
		text, err := sources.ReadFile("testdata/" + name)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), text, 0o600)
		}
		if err != nil {
			return "", err
		}
	}
	path := filepath.Join(dir, "libibverbs.so.1")
	cc := exec.Command(cmp.Or(os.Getenv("CC"), "cc"), "-O1", "-g", "-shared", "-fPIC", "-o", path,
		filepath.Join(dir, "fake.c"), filepath.Join(dir, "gpu.c"), filepath.Join(dir, "move.c"),
		filepath.Join(dir, "pair.c"))
	if out, err := cc.CombinedOutput(); err != nil {
		panic(fmt.Sprintf("fakeverbs: compile the fake libibverbs: %v\n%s", err, out))
	}
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	if library = C.dlopen(name, C.RTLD_NOW|C.RTLD_LOCAL); library == nil {
		return "", fmt.Errorf("open the fake libibverbs: %s", C.GoString(C.dlerror()))
	}
	return path, nil
}

var library unsafe.Pointer

func function(name string) unsafe.Pointer {
	s := C.CString(name)
	defer C.free(unsafe.Pointer(s))
	f := C.dlsym(library, s)
	if f == nil {
		panic("fakeverbs: Library was not called, or has no " + name)
	}
	return f
}

// Set changes what the devices are like: "devices" (2 of at most 4), "td" (1: they
// have thread domains), "cqe", "qps", "wr", "mr_size" (limits), "inline" (220 bytes), "mute" (1: no errno says why a queue pair is refused),
// "gids" (3: all, IPv4 in 127.0.77; 2: all; 1: no IPv4; 0: none), "down" (1: ports are down; else bit 1+N is that of
// device N), "locked" (bytes that may be registered in all; -1: any), "hold" (1: requests wait until it is 0; 2: reads alone do), "late" (1: writes
// to memory of a GPU reach it with the next read of one), "dmabuf" (0: devices take no dma-buf), "lag"
// (1: the devices are bonded mlx5 NICs), "infiniband" (1: ports are InfiniBand, in one subnet; 2: each device is in
// one of its own), "away" (an entry of the GID table that is of another namespace; -1: none), "ports" (of a device; of two
// the second is up), "patient" (1: a queue pair waits for a peer that is gone for as long as a
// test takes; else it gives it up at once).
func Set(name string, value int) {
	s := C.CString(name)
	defer C.free(unsafe.Pointer(s))
	if C.call_set(function("fake_set"), s, C.long(value)) != 0 {
		panic("fakeverbs: no option " + name)
	}
}

// Reset undoes all but what exists.
func Reset() { C.call_reset(function("fake_reset")) }

// Fail makes a function of the library fail so many times, after some calls that do
// not. It has its C name, or is "INIT", "RTR" or "RTS", ways of ibv_modify_qp.
func Fail(call string, e syscall.Errno, after, times int) {
	s := C.CString(call)
	defer C.free(unsafe.Pointer(s))
	if C.call_fail(function("fake_fail"), s, C.int(e), C.int(after), C.int(times)) != 0 {
		panic("fakeverbs: too many faults at a time")
	}
}

// An Op is what a Status is for.
type Op int

// Requests, and what takes one at the peer.
const (
	Send Op = 1 + iota
	Write
	Recv
	Read
)

// Status makes the next request of a kind, after some that are done, end with an
// IBV_WC status; its queue pair then ends. For Recv it is the receiver's.
func Status(op Op, after int, status uint32) {
	C.call_status(function("fake_status"), C.int(op), C.int(after), C.int(status))
}

// Event reports an IBV_EVENT of a port, or of a queue pair if port is 0.
func Event(device, kind, port int, number uint32) {
	C.call_event(function("fake_event"), C.int(device), C.int(kind), C.int(port), C.uint32_t(number))
}

// Vanish takes a device away, until Reset: everything but destroying fails.
func Vanish(device int) { C.call_vanish(function("fake_vanish"), C.int(device)) }

// Peer has peer memory know n bytes of a GPU, which the CPU sees at alias.
func Peer(start, alias, n uint64) {
	if C.call_peer(function("fake_peer"), C.uint64_t(start), C.uint64_t(alias), C.uint64_t(n)) != 0 {
		panic("fakeverbs: too much peer memory")
	}
}

// Unpeer frees what Peer was told of. Registrations of it are void from then on.
func Unpeer(start, n uint64) {
	if C.call_peer(function("fake_peer"), C.uint64_t(start), 0, C.uint64_t(n)) != 0 {
		panic("fakeverbs: no such peer memory")
	}
}

// Count is how many there are or have been: "contexts", "queues", "pairs", "regions", pairs that
// send over "port1" and "port2" of a bond, and different "flows" of pairs, that exist; "tc", "sl", "mtu", "timeout" and "retries" of the
// pair that was joined last; "registered", "dmabufs" and "relaxed" (of those), "reads", "doorbells", "requests", "inlined" (of those), "receives", "polls" and
// "completions" so far.
func Count(name string) int {
	s := C.CString(name)
	defer C.free(unsafe.Pointer(s))
	return int(C.call_count(function("fake_count"), s))
}
