package tcp

import (
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/transport"
	"fserver/engine/transport/transporttest"
)

// TestPanicInPoll leaves the owner's lock free, and so Close possible.
func TestPanicInPoll(t *testing.T) {
	f, err := Open(Options{Gate: transporttest.Gate{}})
	require.NoError(t, err)
	f.Owned(func() {
		f.queue.Push(&Conn{readable: true, tls: &secure{}})
	})
	require.Panics(t, func() { _, _ = f.Poll(make([]transport.Event, 1)) })
	require.True(t, f.Owner.TryLock())
	f.Owner.Unlock()
	require.NoError(t, f.Close())
}
