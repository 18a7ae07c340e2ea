package topo

import (
	"math"
	"path"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Cores is what the process may use of the host's cores (hardware threads).
type Cores struct {
	Online  int     `json:"online"`
	Allowed []int   `json:"allowed"` // online and in the affinity mask
	Quota   float64 `json:"quota"`   // cores' worth of time that the cgroups grant; 0: no limit
	Limit   string  `json:"limit"`   // the file that says so
	Free    int     `json:"free"`    // what can run at once, at least 1
}

// FreeCores is how many threads of this process can run at once: those that
// are online, in the affinity mask and inside the quota of the cgroups. It
// reads a dozen small files.
func FreeCores() Cores {
	s := Local()
	return s.cores(s.reader())
}

func (s System) cores(r *reader) Cores {
	const file = "/sys/devices/system/cpu/online"
	list, _ := r.text(file)
	online := r.cpus(file, list)
	allowed, err := s.Affinity()
	if err != nil {
		r.note("affinity mask: %v", err)
		allowed = online
	}
	c := Cores{Online: len(online), Allowed: []int{}}
	for _, core := range allowed {
		if len(online) == 0 || slices.Contains(online, core) {
			c.Allowed = append(c.Allowed, core)
		}
	}
	c.Online = max(c.Online, len(c.Allowed))
	c.Quota, c.Limit = r.quota()
	c.Free = len(c.Allowed)
	if c.Quota > 0 {
		c.Free = min(c.Free, int(c.Quota))
	}
	c.Free = max(c.Free, 1)
	return c
}

func affinity() ([]int, error) {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return nil, err
	}
	var cores []int
	for i := range len(set) * 64 {
		if set.IsSet(i) {
			cores = append(cores, i)
		}
	}
	return cores, nil
}

const maxCore = 1 << 16

// cpus reads a list like "0-3,8".
func (r *reader) cpus(name, list string) []int {
	var cores []int
	for _, item := range strings.Split(list, ",") {
		if item == "" {
			continue
		}
		lo, hi, isRange := strings.Cut(item, "-")
		if !isRange {
			hi = lo
		}
		first, err1 := strconv.Atoi(lo)
		last, err2 := strconv.Atoi(hi)
		if err1 != nil || err2 != nil || first < 0 || last < first || last >= maxCore {
			r.note("%s holds %.40q, not a list of cores", name, list)
			return cores
		}
		for i := first; i <= last; i++ {
			cores = append(cores, i)
		}
	}
	return cores
}

// quota is the least that the process' cgroup and those above it grant, in
// cores, and the file that says so. 0 is no limit.
func (r *reader) quota() (least float64, limit string) {
	mounts, _ := r.text("/proc/self/mountinfo")
	groups, _ := r.text("/proc/self/cgroup")
	for _, line := range strings.Split(groups, "\n") {
		// "4:cpu,cpuacct:/a/b", and of version 2 "0::/a/b".
		f := strings.SplitN(line, ":", 3)
		if len(f) != 3 {
			continue
		}
		v2 := f[1] == ""
		if !v2 && !slices.Contains(strings.Split(f[1], ","), "cpu") {
			continue
		}
		mount, root := cgroupMount(mounts, v2)
		if mount == "" {
			continue
		}
		// Without a namespace of its own a container sees paths of the host,
		// of which the mount shows the part below root.
		below, inside := strings.CutPrefix(f[2], strings.TrimSuffix(root, "/"))
		if !inside || below != "" && below[0] != '/' {
			below = ""
		}
		for at := path.Clean("/" + below); ; at = path.Dir(at) {
			dir := strings.TrimSuffix(mount+at, "/")
			if q, file := r.quotaIn(dir, v2); q > 0 && (least == 0 || q < least) {
				least, limit = q, file
			}
			if at == "/" {
				break
			}
		}
	}
	return least, limit
}

// quotaIn is what one cgroup grants; 0 is no limit.
func (r *reader) quotaIn(dir string, v2 bool) (float64, string) {
	file := dir + "/cpu.max"
	text, _ := r.text(file) // "150000 100000" or "max 100000"
	if !v2 {
		file = dir + "/cpu.cfs_quota_us" // -1: no limit
		text, _ = r.text(file)
		period, _ := r.text(dir + "/cpu.cfs_period_us")
		text += " " + period
	}
	f := strings.Fields(text)
	if len(f) == 0 || f[0] == "max" || f[0] == "-1" {
		return 0, ""
	}
	if len(f) == 2 {
		quota, err1 := strconv.ParseFloat(f[0], 64)
		period, err2 := strconv.ParseFloat(f[1], 64)
		if q := quota / period; err1 == nil && err2 == nil && q > 0 && !math.IsInf(q, 0) {
			return q, file
		}
	}
	r.note("%s holds %.40q, not a quota", file, text)
	return 0, ""
}

// cgroupMount is where the hierarchy with the cores is mounted, and which of
// its folders is there.
func cgroupMount(mounts string, v2 bool) (mount, root string) {
	for _, line := range strings.Split(mounts, "\n") {
		// "31 23 0:29 ROOT MOUNT options - cgroup source superoptions"
		front, back, ok := strings.Cut(line, " - ")
		f, b := strings.Fields(front), strings.Fields(back)
		if !ok || len(f) < 5 || len(b) < 3 {
			continue
		}
		if v2 && b[0] == "cgroup2" || !v2 && b[0] == "cgroup" && slices.Contains(strings.Split(b[2], ","), "cpu") {
			return f[4], f[3]
		}
	}
	return "", ""
}

func atoi(s string) int {
	n, err := strconv.Atoi(strings.TrimSpace(s))
	if err != nil {
		return 0
	}
	return n
}
