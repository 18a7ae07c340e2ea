package tcp

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"fserver/engine/transport"
	"fserver/engine/transport/transporttest"
)

// faultyGate panics at the side that takes connections.
type faultyGate struct{ transport.Gate }

func (g faultyGate) Open(dialer bool) transport.Handshake {
	if !dialer {
		panic("a faulty gate")
	}
	return g.Gate.Open(dialer)
}

// broke waits for the error of Poll after a sleep on the descriptor, and closes the Fabric.
func broke(t *testing.T, f *Fabric, where string) {
	t.Helper()
	var err error
	for end := time.Now().Add(10 * time.Second); err == nil && time.Now().Before(end); {
		_, _ = unix.Poll([]unix.PollFd{{Fd: int32(f.FD()), Events: unix.POLLIN}}, 10_000)
		_, err = f.Poll(make([]transport.Event, 4))
	}
	var e *transport.PanicError
	require.ErrorAs(t, err, &e)
	require.Contains(t, e.Stack, where)
	require.NoError(t, f.Close())
	_, err = f.Poll(make([]transport.Event, 4))
	require.ErrorIs(t, err, transport.ErrClosed)
}

// TestPanics has each goroutine of a Fabric panic. Poll says so, whoever sleeps is woken,
// and Close ends all the same.
func TestPanics(t *testing.T) {
	listening := func(o Options) *Fabric {
		o.Listen = "127.0.0.1:0"
		f, err := Open(o)
		require.NoError(t, err)
		return f
	}
	t.Run("welcome", func(t *testing.T) {
		f := listening(Options{Gate: faultyGate{transporttest.Gate{}}})
		peer, err := Open(Options{Gate: transporttest.Gate{}})
		require.NoError(t, err)
		defer peer.Close()
		_, err = peer.Connect(context.Background(), f.Addr())
		require.Error(t, err)
		broke(t, f, "(*Fabric).welcome")
	})
	t.Run("accept", func(t *testing.T) {
		f := listening(Options{Gate: transporttest.Gate{}, Refused: func(string, error) { panic("told of a refusal") }})
		require.NoError(t, f.listener.Close())
		broke(t, f, "(*Fabric).accept")
	})
	t.Run("keep", func(t *testing.T) {
		f := listening(Options{Gate: transporttest.Gate{}, Limits: transport.Limits{Stall: 8 * time.Millisecond}})
		f.owned(func() { f.conns = append(f.conns, nil) })
		require.Eventually(t, func() bool { return f.broken.Load() != nil }, 10*time.Second, time.Millisecond)
		f.owned(func() { f.conns = nil })
		broke(t, f, "(*Fabric).inspect")
	})
}

// TestPanicInPoll leaves the owner's lock free, and so Close possible.
func TestPanicInPoll(t *testing.T) {
	f, err := Open(Options{Gate: transporttest.Gate{}})
	require.NoError(t, err)
	f.owned(func() {
		f.queue.reserve(1)
		f.queue.n = 1 // of no Conn
	})
	require.Panics(t, func() { _, _ = f.Poll(make([]transport.Event, 1)) })
	require.True(t, f.owner.TryLock())
	f.owner.Unlock()
	require.NoError(t, f.Close())
}
