package cudaipc

import (
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// spaceNames are the namespaces that two processes must share to map each other's GPU
// memory: the driver finds the other process by its number, and so do we for
// descriptors. Two containers of one host do not share them.
var spaceNames = [...]string{"PID", "IPC", "mount"}

// spaces are the numbers of a process's namespaces, in the order of spaceNames; 0 is one
// that cannot be told.
type spaces [len(spaceNames)]uint64

// ownSpaces returns those of this process.
func ownSpaces() (s spaces) {
	for i, file := range [...]string{"pid", "ipc", "mnt"} {
		var stat unix.Stat_t
		if unix.Stat("/proc/self/ns/"+file, &stat) == nil {
			s[i] = stat.Ino
		}
	}
	return s
}

// apart says which namespaces differ, and what helps; empty: none.
func (s spaces) apart(other spaces) string {
	var names []string
	for i, name := range spaceNames {
		if s[i] != other[i] {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return ""
	}
	return fmt.Sprintf("the two processes are in different %s namespaces of one host (run both in one container)", strings.Join(names, " and "))
}
