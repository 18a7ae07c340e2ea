package cma

import (
	"bytes"
	"context"
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/transport"
	"fserver/engine/transport/link"
	"fserver/engine/transport/transporttest"
)

// BenchmarkEcho bounces a write and a frame of 64 bytes between this process
// and a child, each on a processor of its own, both spinning: direct, staged,
// and in turns with them the bare system call with a flag. On a machine with
// other work, compare the medians of one run.
func BenchmarkEcho(b *testing.B) {
	if runtime.NumCPU() < 2 {
		b.Skip("needs two processors")
	}
	fam := newFamily(b, "12", "1")
	out, in := fam.bare.out.Span().Bytes(), fam.bare.in.Span().Bytes()
	turn := func(e *end) { require.NoError(b, e.post(0, command('s', 0, 0))) }
	for _, n := range []uint64{64, 4 << 10, 16 << 10, 64 << 10, 1 << 20, 64 << 20} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			// The thread ends with the goroutine, and its binding with it.
			require.NoError(b, pin(0))
			times := map[string][]time.Duration{}
			count := int(max(2, min(2000, (64<<20)/n)))
			measure := func(kind string, echo func() error) {
				for j := range count {
					start := time.Now()
					require.NoError(b, echo())
					if j > 0 { // the first waits for the command
						times[kind] = append(times[kind], time.Since(start))
					}
				}
				require.True(b, bytes.Equal(in[:n], out[:n]), "%s: other bytes came back", kind)
				clear(in[:n])
			}
			frame := command('e', 0, n)
			for range b.N {
				require.NoError(b, fam.ends[0].post(0, command('r', uint32(count), n)))
				measure("bare", func() error {
					err := fam.bare.send(n)
					if err == nil {
						fam.bare.wait()
					}
					return err
				})
				for i, kind := range []string{"direct", "staged"} {
					e := fam.ends[i]
					measure(kind, func() error {
						err := e.post(n, frame)
						if err == nil {
							_, err = e.waitFrame(false)
						}
						return err
					})
					turn(e)
				}
			}
			at := func(kind string, percent int) float64 {
				slices.Sort(times[kind])
				return float64(times[kind][len(times[kind])*percent/100].Nanoseconds()) / 1e3
			}
			b.ReportMetric(0, "ns/op")
			for _, kind := range []string{"bare", "direct", "staged"} {
				b.ReportMetric(at(kind, 50), kind+"-p50-µs")
				b.ReportMetric(at(kind, 99), kind+"-p99-µs")
			}
			b.ReportMetric(at("direct", 50)/at("bare", 50), "ratio")
		})
	}
}

// BenchmarkIdlePoll is what a spinning receiver pays for Conns on which nothing
// comes.
func BenchmarkIdlePoll(b *testing.B) {
	for _, conns := range []int{1, 40} {
		b.Run(fmt.Sprint(conns), func(b *testing.B) {
			f, err := Open(Options{Options: link.Options{Gate: transporttest.Gate{}, Listen: here}})
			require.NoError(b, err)
			defer f.Close()
			g, err := Open(Options{Options: link.Options{Gate: transporttest.Gate{}}})
			require.NoError(b, err)
			defer g.Close()
			ev := make([]transport.Event, 64)
			for range conns {
				_, err := g.Connect(context.Background(), f.Addr())
				require.NoError(b, err)
			}
			for accepted := 0; accepted < conns; {
				n, err := f.Poll(ev)
				require.NoError(b, err)
				accepted += n
			}
			for b.Loop() {
				if n, err := f.Poll(ev); n != 0 || err != nil {
					b.Fatal(n, err)
				}
			}
		})
	}
}
