package progress

import (
	"math"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"fserver/engine/trace"
)

// streams are what CUDA streams do that write a word and tell nobody. As long as some run, somebody looks at
// the words: the owner in each pass, and whoever sleeps, ever more seldom.
type streams struct {
	running atomic.Int32
	stirred atomic.Int64 // when one of them has done something; nanoseconds
}

// After a stream has done something, somebody looks all the time for as long as a caller would poll. Then a
// sleeper sleeps between looks for a sixteenth of the time since, and at most so long.
const lookAtLast = time.Millisecond

// Streams adds to the number of streams whose words Pass looks at.
func (s *streams) Streams(more int32) { s.running.Add(more) }

// Stirred says that such a stream has done something.
func (s *streams) Stirred(now int64) { s.stirred.Store(now) }

// idle is for how long no stream has done anything.
func (s *streams) idle() time.Duration { return time.Duration(trace.Now() - s.stirred.Load()) }

// lull is how long a sleeper may sleep before somebody looks at the words; 0: not at all. spin is how long a
// caller polls.
func (s *streams) lull(spin time.Duration) time.Duration {
	if s.running.Load() == 0 {
		return math.MaxInt64
	}
	idle := s.idle()
	if idle < spin {
		return 0
	}
	return min(idle/16, lookAtLast)
}

// heldEvery is how often a sleeper looks whether a stream has come to what waits for it: a stream rings no bell.
const heldEvery = 50 * time.Microsecond

// lull is how long a sleeper may sleep before he looks at the words of streams.
func (d *Driver) lull() time.Duration {
	lull := min(d.longest, d.streams.lull(d.settings.Spin))
	if d.work.Held() {
		lull = min(lull, heldEvery)
	}
	return lull
}

// doze waits on the descriptors for less than a millisecond.
func (d *Driver) doze(limit time.Duration) error {
	fds := [...]unix.PollFd{{Fd: int32(d.epoll), Events: unix.POLLIN}}
	t := unix.NsecToTimespec(int64(max(0, limit)))
	_, err := unix.Ppoll(fds[:], &t, nil)
	return err
}
