package mem

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// Seals keep memory that a peer passed from shrinking or growing under whoever
// has it mapped, so that no access can fail.
const Seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

// NewSealed maps size bytes of zeros that can be passed to a peer by their
// descriptor; /proc shows the name. The seals are set when the memory is mapped:
// F_SEAL_FUTURE_WRITE leaves this mapping alone writable. The pages are there at once where the kernel is strict.
func NewSealed(name string, size, seals int) (b []byte, fd int, err error) {
	fd, err = unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_NOEXEC_SEAL)
	if err == unix.EINVAL { // Linux before 6.3
		fd, err = unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	}
	if err != nil {
		return nil, -1, fmt.Errorf("make a memfd: %w (each takes a descriptor: ulimit -n)", err)
	}
	if err = unix.Ftruncate(fd, int64(size)); err == nil && strict() {
		err = claim(fd, uint64(size))
	}
	if err == nil {
		if b, err = unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err == nil {
			if _, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err == nil {
				return b, fd, nil
			}
			unix.Munmap(b)
		}
	}
	unix.Close(fd)
	return nil, -1, fmt.Errorf("make %d bytes of shared memory: %w", size, err)
}

// CheckSealed says whether fd is what NewSealed makes, with these seals at
// least, and gives its size.
func CheckSealed(fd, seals int) (uint64, error) {
	var st unix.Stat_t
	var fs unix.Statfs_t
	have, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err == nil {
		err = unix.Fstat(fd, &st)
	}
	if err == nil {
		err = unix.Fstatfs(fd, &fs)
	}
	switch {
	case err != nil:
		return 0, fmt.Errorf("mem: not shared memory: %w", err)
	case have&seals != seals:
		return 0, fmt.Errorf("mem: shared memory with seals %#x, which could shrink: want %#x", have, seals)
	case fs.Type != unix.TMPFS_MAGIC: // pages of other kinds may be missing
		return 0, fmt.Errorf("mem: shared memory of kind %#x: want %#x", fs.Type, unix.TMPFS_MAGIC)
	case st.Size <= 0 || st.Size > maxMap:
		return 0, fmt.Errorf("mem: shared memory of %d bytes: want 1 to 2^46", st.Size)
	}
	return uint64(st.Size), nil
}
