package cma

import (
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/transport"
	"fserver/engine/transport/link"
	"fserver/engine/transport/transporttest"
)

// TestPanicInPoll leaves the owner's lock free, and so Close possible.
func TestPanicInPoll(t *testing.T) {
	f, err := Open(Options{Options: link.Options{Gate: transporttest.Gate{}}})
	require.NoError(t, err)
	f.Owned(func() { f.conns.All = append(f.conns.All, nil) })
	require.Panics(t, func() { _, _ = f.Poll(make([]transport.Event, 1)) })
	require.True(t, f.Owner.TryLock())
	f.conns = link.Conns[*Conn]{}
	f.Owner.Unlock()
	require.NoError(t, f.Close())
}
