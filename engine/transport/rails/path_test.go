package rails_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"fserver/engine/transport"
)

// BenchmarkPath is BenchmarkSmall without the time that two processes would not wait for: of each way, only the Post and
// the Poll that finds the frame are timed, behind one that finds nothing.
func BenchmarkPath(b *testing.B) {
	for _, size := range []uint64{64, 4 << 10} {
		b.Run(fmt.Sprint(size, " bytes"), func(b *testing.B) {
			const turn = 20
			var sides [2][2]end
			var took [2][]float64
			for i := range sides {
				sides[i] = trip{members: 1 + i, size: size}.ends(b)
			}
			for b.Loop() {
				for i := range sides {
					sum := time.Duration(0)
					for range turn {
						sum += sides[i][0].way(&sides[i][1]) + sides[i][1].way(&sides[i][0])
					}
					took[i] = append(took[i], float64(sum.Nanoseconds())/turn)
				}
			}
			for i := range took {
				slices.Sort(took[i])
				b.ReportMetric(took[i][len(took[i])/2], fmt.Sprintf("ns-over-%d", i+1))
			}
			b.ReportMetric(took[1][len(took[1])/2]-took[0][len(took[0])/2], "ns-more")
			b.ReportMetric(took[1][len(took[1])/2]/took[0][len(took[0])/2], "times")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// way makes half a round trip.
func (s *end) way(to *end) (took time.Duration) {
	to.poll()
	begin := time.Now()
	n, err := s.c.Post(s.ops)
	took = time.Since(begin)
	if n != len(s.ops) || err != nil {
		s.b.Fatal(n, err)
	}
	s.poll() // the ends of its ops
	begin = time.Now()
	for arrived := false; !arrived; {
		arrived = to.poll()
	}
	return took + time.Since(begin)
}

// An end is one side of a trip.
type end struct {
	b   testing.TB
	f   transport.Fabric
	c   transport.Conn
	ops []transport.Op
	ev  []transport.Event
}

// ends returns both ends of a trip.
func (t trip) ends(b testing.TB) (s [2]end) {
	f, c, ops := t.open(b)
	for i := range s {
		s[i] = end{f: f[i], c: c[i], ops: ops[i], b: b, ev: make([]transport.Event, 16)}
	}
	return s
}

// poll reports whether a frame has come.
func (s *end) poll() (arrived bool) {
	n, err := s.f.Poll(s.ev)
	if err != nil {
		s.b.Fatal(err)
	}
	for i := range s.ev[:n] {
		arrived = arrived || s.ev[i].Kind == transport.EvFrame
	}
	return arrived
}
