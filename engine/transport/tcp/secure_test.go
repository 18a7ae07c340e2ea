package tcp

import (
	"context"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/transporttest"
)

func shared(tb testing.TB, secret string) *Identity {
	id, err := SharedIdentity([]byte(secret), "default")
	require.NoError(tb, err)
	return id
}

// BenchmarkMove drives both ends from one goroutine, with and without TLS in
// turns, and gives the time that this thread was on a processor, which other
// work on the machine does not add to.
func BenchmarkMove(b *testing.B) {
	for _, n := range []uint64{4 << 10, 64 << 10, 1 << 20, 16 << 20} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			ids := map[string]*Identity{"plain": nil, "tls": shared(b, "the secret of the benchmark")}
			spent := map[string]time.Duration{}
			bytes := 0.0
			moves := map[string]func(){}
			for kind, id := range ids {
				moves[kind] = mover(b, id, n)
			}
			for range b.N {
				for kind := range ids {
					start := onProcessor(b)
					for range max(1, (16<<20)/n) {
						moves[kind]()
					}
					spent[kind] += onProcessor(b) - start
				}
				bytes += float64(n * max(1, (16<<20)/n))
			}
			b.ReportMetric(0, "ns/op")
			for kind, d := range spent {
				b.ReportMetric(bytes/float64(d.Nanoseconds()), kind+"-GB/s")
				b.ReportMetric(float64(d.Nanoseconds())/1e3*float64(n)/bytes, kind+"-µs")
			}
		})
	}
}

// mover gives a function that writes n bytes from one Fabric to another.
func mover(b *testing.B, id *Identity, n uint64) func() {
	var f [2]*Fabric
	for i, listen := range []string{"127.0.0.1:0", ""} {
		var err error
		f[i], err = Open(Options{Listen: listen, Gate: transporttest.Gate{}, TLS: id})
		require.NoError(b, err)
		b.Cleanup(func() { require.NoError(b, f[i].Close()) })
	}
	key, err := f[0].Register(hold(b, n))
	require.NoError(b, err)
	conn, err := f[1].Connect(context.Background(), f[0].Addr())
	require.NoError(b, err)
	ops := []transport.Op{{Kind: transport.OpWrite, Key: key, Src: []mem.Span{hold(b, n).Span()}}}
	ev := make([]transport.Event, 16)
	return func() {
		_, err := conn.Post(ops)
		require.NoError(b, err)
		for done := 0; done < 2; {
			for i := range f {
				k, err := f[i].Poll(ev)
				require.NoError(b, err)
				for _, e := range ev[:k] {
					if e.Kind == transport.EvDone || e.Kind == transport.EvWritten {
						done++
					}
				}
			}
		}
	}
}

// onProcessor is for how long this thread has run.
func onProcessor(b *testing.B) time.Duration {
	var t unix.Timespec
	require.NoError(b, unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t))
	return time.Duration(t.Nano())
}
