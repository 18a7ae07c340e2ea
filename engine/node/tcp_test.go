package node

import (
	"os"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"fserver/engine/exchange"
)

// segments is how many TCP segments with data the sockets of this process have sent. A system call that sends little is
// one segment, because the sockets do not wait for more to send.
func segments(tb testing.TB) (n int) {
	names, err := os.ReadDir("/proc/self/fd")
	require.NoError(tb, err)
	for _, name := range names {
		fd, err := strconv.Atoi(name.Name())
		require.NoError(tb, err)
		if info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			n += int(info.Data_segs_out)
		}
	}
	return n
}

// TestSmallPushPullIsOneSend: whatever the number of its tensors, a small push_pull is sent by one system call, and so
// is its answer.
func TestSmallPushPullIsOneSend(t *testing.T) {
	m := newMesh(t, openFabrics, shape{1, 1, 1}, "FSERVER_TRANSPORT=tcp", "PS_HEARTBEAT_INTERVAL=30", "PS_HEARTBEAT_TIMEOUT=90")
	w, s := m.workers[0], m.servers[0]
	const rounds = 100
	for _, tensors := range []int{1, 8} {
		var push, pull []exchange.Tensor
		for i := range tensors {
			push, pull = append(push, tensor(t, uint64(100*tensors+i), 64)), append(pull, tensor(t, 0, 64))
		}
		once := func() {
			id := pushPull(t, w, push, pull)
			b, err := getBatch(s)
			require.NoError(t, err)
			respond(t, s, b.reqs[0].handler, push...)
			require.NoError(t, wait(w, id))
		}
		once() // buffers and plans
		before := segments(t)
		for range rounds {
			once()
		}
		sent := segments(t) - before
		t.Logf("%d tensors each way, %d push_pulls: %d segments with data", tensors, rounds, sent)
		require.GreaterOrEqual(t, sent, 2*rounds)
		require.LessOrEqual(t, sent, 2*rounds+rounds/10)
	}
	m.stop()
}
