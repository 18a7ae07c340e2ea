package gpu

import (
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/transport"
)

// TestLater: who holds is left alone up to a limit, and what is put off is done once, in
// its order.
func TestLater(t *testing.T) {
	var l Later
	var mu sync.Mutex
	var list []int
	put := func(number int, kind Kind, bytes uint64) *Chore {
		return l.Do(kind, bytes, func() {
			mu.Lock()
			list = append(list, number)
			mu.Unlock()
		})
	}
	did := func() []int {
		require.True(t, l.Wait(20*time.Second))
		time.Sleep(time.Millisecond)
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(list)
	}
	l.Hold()
	l.Hold()
	require.False(t, l.Force(Memory), "there is nothing")
	put(0, Memory, putOffMost)
	put(1, Memory, 0)
	host := put(2, Host, putOffMost)
	require.True(t, l.Release(0))
	require.Equal(t, 1, l.holds)
	require.Empty(t, did())

	put(3, Memory, 1) // the first, and then there is room
	require.Equal(t, []int{0}, did())

	require.True(t, l.Force(Memory))
	require.Equal(t, []int{0, 1, 3}, did())
	put(4, Memory, 1) // a Force is for what there was
	require.Len(t, did(), 3)

	require.True(t, l.Cancel(host))
	require.False(t, l.Cancel(host))
	for range putOffChores + 1 {
		put(5, Host, 0)
	}
	require.Equal(t, []int{0, 1, 3, 5}, did())

	require.True(t, l.Release(0))
	require.Len(t, did(), 4+1+putOffChores)
	require.Zero(t, l.holds)
	require.False(t, l.Release(0))
	put(6, Mapping, 1)
	require.Len(t, did(), 4+2+putOffChores)
}

// TestLaterHold: who begins to hold waits for what is being given back.
func TestLaterHold(t *testing.T) {
	var l Later
	now, began := make(chan struct{}), make(chan struct{})
	l.Do(Host, 0, func() {
		close(began)
		<-now
	})
	<-began
	require.False(t, l.Wait(time.Millisecond))
	time.AfterFunc(10*time.Millisecond, func() { close(now) })
	l.Hold()
	require.True(t, l.Wait(0))
	l.Release(0)
}

// TestLaterRelease: the last to release waits for what is given back, and nobody else does.
func TestLaterRelease(t *testing.T) {
	var l Later
	now := make(chan struct{})
	l.Hold()
	l.Hold()
	l.Do(Host, 0, func() { <-now })
	require.True(t, l.Force(Host))
	require.True(t, l.Release(time.Hour))
	require.False(t, l.Wait(0))
	require.False(t, l.Reclaim(Host, time.Millisecond))
	time.AfterFunc(10*time.Millisecond, func() { close(now) })
	require.True(t, l.Release(time.Hour))
	require.True(t, l.Wait(0))
	require.False(t, l.Reclaim(Host, time.Hour), "there is nothing")
}

// TestLaterPanics: a chore that panics keeps nothing back, and who watches is told once.
func TestLaterPanics(t *testing.T) {
	var l Later
	told := make(chan error, 4)
	stop := l.OnPanic(func(err error) { told <- err })
	ends := l.OnPanic(func(error) { t.Error("who has stopped watching is told") })
	ends()
	done := make(chan struct{})
	l.Hold()
	l.Do(Memory, 1, func() { panic("the first chore") })
	l.Do(Memory, 1, func() { panic("the second chore") })
	l.Do(Memory, 1, func() { close(done) })
	require.True(t, l.Release(0))
	<-done
	var e *transport.PanicError
	require.ErrorAs(t, <-told, &e)
	require.Equal(t, "the first chore", e.Value)
	require.Contains(t, e.Stack, "TestLaterPanics")
	require.True(t, l.Wait(20*time.Second))
	stop()
	l.Do(Memory, 1, func() { panic("nobody watches") })
	require.True(t, l.Wait(20*time.Second))
	require.Empty(t, told)
}
