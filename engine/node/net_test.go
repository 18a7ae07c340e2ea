package node

import (
	"net"
	"testing"

	"github.com/stretchr/testify/require"
)

func splitPort(tb testing.TB, addr string) (host, port string) {
	host, port, err := net.SplitHostPort(addr)
	require.NoError(tb, err)
	return host, port
}
