package topo

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// TestLinkDown also where no further descriptor can be opened, which says nothing of the interface.
func TestLinkDown(t *testing.T) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	require.NoError(t, err)
	defer unix.Close(fd)
	require.ErrorContains(t, linkDown(fd, "nosuch0"), "interface nosuch0 is gone")
	require.ErrorContains(t, linkDown(fd, "a name that is much too long"), "is gone")
	var limit unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	low := limit
	low.Cur = 1
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &low))
	why := linkDown(fd, "lo")
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit))
	require.NoError(t, why)
}

// TestWatchLinksEnds: it tells first what is down, and returns with its context.
func TestWatchLinksEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	told := map[int]error{}
	require.NoError(t, WatchLinks(ctx, []string{"lo", "", "nosuch0"}, func(i int, why error) {
		told[i] = why
		cancel()
	}))
	require.Len(t, told, 1)
	require.ErrorContains(t, told[2], "is gone")
}
