package stage

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"fserver/engine/gpu/fakegpu"
	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/transporttest"
	"fserver/engine/transport/transporttest/overtest"
)

// locker is a Fabric that reads sources by their registrations, and locks the memory of so many.
type locker struct {
	transport.Fabric
	mu    sync.Mutex
	most  int
	known map[uint64]mem.Region
}

func (l *locker) Caps() transport.Caps {
	c := l.Fabric.Caps()
	c.LocalKeys = true
	return c
}

func (l *locker) Register(r mem.Region) (transport.Key, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.known) >= l.most {
		return transport.Key{}, fmt.Errorf("fake: register: %w", unix.ENOMEM)
	}
	k, err := l.Fabric.Register(r)
	if err == nil {
		l.known[k.ID] = r
	}
	return k, err
}

func (l *locker) Deregister(k transport.Key) {
	l.Fabric.Deregister(k)
	time.AfterFunc(3*time.Millisecond, func() { // as a NIC does, in a while
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.known, k.ID)
	})
}

// TestLockedBuffers: where no more memory can be locked, that of the buffers that no Conn has is given up, and they are still
// good. The next Conn has inner know them again.
func TestLockedBuffers(t *testing.T) {
	g := fakegpu.New()
	t.Cleanup(func() { g.Empty(t) })
	l := &locker{most: 3, known: map[uint64]mem.Region{}}
	a := overtest.Open(t, "a", wraps(func(o transporttest.Options) (in transport.Fabric, err error) {
		l.Fabric, err = overTCP(o)
		return l, err
	}, Options{Device: g}))
	b := overtest.Open(t, "b", wraps(overTCP, Options{Device: g}))
	src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1)
	k := b.Key(t, dst)
	host, err := mem.Map(4096)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, mem.Unmap(host)) })
	send := func() {
		connect(t, a, b)
		a.Done, b.Writes = nil, nil
		a.Post(t, write(k, src, transport.Point{}))
		until(t, a, b, func() bool { return len(b.Writes) == 1 && len(a.Done) == 1 })
		require.NoError(t, a.Done[0])
		a.C.Close()
		b.C.Close()
		until(t, a, b, func() bool { return len(a.F.Conns) == 0 })
		require.Len(t, a.F.pools, 1)
	}
	send()
	require.True(t, a.F.pools[0].known)
	keys := []transport.Key{a.Key(t, host), a.Key(t, host)}
	keys = append(keys, a.Key(t, host)) // no more than three can be locked
	require.False(t, a.F.pools[0].known)
	_, err = a.F.Register(host)
	require.ErrorIs(t, err, unix.ENOMEM, "there is nothing to give up")
	until(t, a, b, func() bool { return a.F.Ending() == 0 })
	require.Empty(t, a.Freed, "the user knows of no such key")
	send()
	require.False(t, a.F.pools[0].known, "there is no room")
	a.Free(t, keys[0])
	until(t, a, b, func() bool { l.mu.Lock(); defer l.mu.Unlock(); return len(l.known) == 2 })
	send()
	require.True(t, a.F.pools[0].known)
	shadow := a.Key(t, onGPU(t, g, 4096, 1)) // of a shadow, likewise
	require.False(t, a.F.pools[0].known)
	a.Free(t, shadow)
}
