package topo

import (
	"strings"

	"golang.org/x/sys/unix"
)

// Limits are those of this process. -1 is no limit, or, of PtraceScope, that
// the kernel has none.
type Limits struct {
	LockedMemory int64 `json:"locked_memory_bytes"`
	OpenFiles    int64 `json:"open_files"`
	MaxOpenFiles int64 `json:"open_files_hard"`
	Processes    int64 `json:"user_processes"`
	SharedMemory int64 `json:"dev_shm_bytes"` // size of /dev/shm
	SharedFree   int64 `json:"dev_shm_free_bytes"`
	PtraceScope  int   `json:"ptrace_scope"`
}

// Clock is what time stamps are taken from.
type Clock struct {
	Source     string `json:"source"` // "tsc": read without a system call
	Resolution int64  `json:"resolution_ns"`
}

// Limits reads the limits of this process.
func (s System) Limits() Limits {
	r := s.reader()
	l := Limits{PtraceScope: r.number("/proc/sys/kernel/yama/ptrace_scope", -1)}
	l.LockedMemory, _ = rlimit(unix.RLIMIT_MEMLOCK)
	l.OpenFiles, l.MaxOpenFiles = rlimit(unix.RLIMIT_NOFILE)
	l.Processes, _ = rlimit(unix.RLIMIT_NPROC)
	var shm unix.Statfs_t
	if unix.Statfs(r.root+"/dev/shm", &shm) == nil {
		l.SharedMemory = int64(shm.Blocks) * shm.Bsize
		l.SharedFree = int64(shm.Bavail) * shm.Bsize
	}
	return l
}

func rlimit(which int) (soft, hard int64) {
	var l unix.Rlimit
	if unix.Getrlimit(which, &l) != nil {
		return -1, -1
	}
	return int64(l.Cur), int64(l.Max) // RLIM_INFINITY is all ones
}

// Clock reads what CLOCK_MONOTONIC is made of.
func (s System) Clock() Clock {
	r := s.reader()
	c := Clock{}
	c.Source, _ = r.text("/sys/devices/system/clocksource/clocksource0/current_clocksource")
	var t unix.Timespec
	if unix.ClockGetres(unix.CLOCK_MONOTONIC, &t) == nil {
		c.Resolution = t.Nano()
	}
	return c
}

// Kernel is the name and release of the kernel: "Linux 6.1.0".
func Kernel() string {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return ""
	}
	text := func(b []byte) string { s, _, _ := strings.Cut(string(b), "\x00"); return s }
	return text(u.Sysname[:]) + " " + text(u.Release[:])
}

// Modules are the versions of drivers that have one, by name.
func (s System) Modules() map[string]string {
	r := s.reader()
	found := map[string]string{}
	for _, name := range []string{"nvidia", "nvidia_peermem", "gdrdrv", "mlx5_core", "mlx5_ib", "ib_core", "irdma", "efa", "rdma_rxe", "siw"} {
		if dir := "/sys/module/" + name; r.exists(dir) {
			found[name], _ = r.text(dir + "/version")
		}
	}
	return found
}
