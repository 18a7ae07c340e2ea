package rails_test

import (
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"fserver/engine/transport"
)

// BenchmarkAcross is BenchmarkSmall between two threads, each on a core of its own. As a push_pull does, a round trip
// ends when the answer has come and the ops of the request are done.
func BenchmarkAcross(b *testing.B) {
	for _, size := range []uint64{64, 4 << 10} {
		b.Run(fmt.Sprint(size, " bytes"), func(b *testing.B) {
			const turn = 20
			var sides [2][2]tripSide // by members, then dialer and listener
			for i := range sides {
				sides[i] = trip{members: 1 + i, size: size}.sides(b)
			}
			pinned(b, 0)
			var at atomic.Int32 // the pair that has its turn; negative: the end
			ended := make(chan error)
			go func() {
				defer close(ended)
				if err := pin(1); err != nil {
					ended <- err
					return
				}
				for i := at.Load(); i >= 0; i = at.Load() {
					if sides[i][1].poll(); sides[i][1].frames > 0 {
						sides[i][1].frames = 0
						sides[i][1].post()
					}
				}
			}()
			var took [2][]float64
			for b.Loop() {
				for i := range sides {
					at.Store(int32(i))
					sides[i][0].trip() // the first one of a turn finds cold caches
					begin := time.Now()
					for range turn {
						sides[i][0].trip()
					}
					took[i] = append(took[i], float64(time.Since(begin).Nanoseconds())/turn)
				}
			}
			at.Store(-1)
			require.NoError(b, <-ended)
			report(b, took)
		})
	}
}

// report gives the medians of one and of two members, and of their ratios.
func report(b *testing.B, took [2][]float64) {
	times := make([]float64, len(took[0]))
	for i := range times {
		times[i] = took[1][i] / took[0][i]
	}
	for i, all := range [][]float64{took[0], took[1], times} {
		slices.Sort(all)
		b.ReportMetric(all[len(all)/2], []string{"ns-over-1", "ns-over-2", "times"}[i])
	}
	b.ReportMetric(took[1][len(times)/10]/took[0][len(times)/10], "times-lowest")
	b.ReportMetric(0, "ns/op")
}

// pin ties the caller's goroutine to a core, for as long as its thread lives.
func pin(core int) error {
	runtime.LockOSThread()
	var set unix.CPUSet
	set.Set(core)
	return unix.SchedSetaffinity(0, &set)
}

// pinned ties a benchmark to a core.
func pinned(b *testing.B, core int) {
	var before unix.CPUSet
	require.NoError(b, unix.SchedGetaffinity(0, &before))
	require.NoError(b, pin(core))
	b.Cleanup(func() {
		_ = unix.SchedSetaffinity(0, &before)
		runtime.UnlockOSThread()
	})
}

// A tripSide is one end of a trip.
type tripSide struct {
	b            testing.TB
	f            transport.Fabric
	c            transport.Conn
	ops          []transport.Op
	ev           []transport.Event
	frames, done int // events that have come
}

func (s *tripSide) poll() {
	n, err := s.f.Poll(s.ev)
	if err != nil {
		s.b.Error(err)
	}
	for i := range s.ev[:n] {
		switch s.ev[i].Kind {
		case transport.EvFrame:
			s.frames++
		case transport.EvDone:
			s.done++
		}
	}
}

func (s *tripSide) post() {
	for posted := 0; ; s.poll() {
		k, err := s.c.Post(s.ops[posted:])
		if err != nil {
			s.b.Error(err)
		}
		if posted += k; posted == len(s.ops) {
			return
		}
	}
}

func (s *tripSide) trip() {
	s.post()
	for s.frames == 0 || s.done < len(s.ops) {
		s.poll()
	}
	s.frames, s.done = 0, 0
}
