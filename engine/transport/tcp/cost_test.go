package tcp

import (
	"context"
	"fmt"
	"net"
	"runtime"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/transporttest"
)

func cpuTime() int64 {
	var ts unix.Timespec
	unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts)
	return ts.Nano()
}

func BenchmarkCost(b *testing.B) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	fa, err := Open(Options{Gate: transporttest.Gate{}})
	require.NoError(b, err)
	fb, err := Open(Options{Gate: transporttest.Gate{}, Listen: "127.0.0.1:0"})
	require.NoError(b, err)
	defer fa.Close()
	defer fb.Close()
	ca, err := fa.Connect(context.Background(), fb.Addr())
	require.NoError(b, err)
	ev := make([]transport.Event, 16)
	var cb transport.Conn
	for cb == nil {
		n, _ := fb.Poll(ev)
		if n > 0 {
			cb = ev[0].Conn
		}
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(b, err)
	na, err := net.Dial("tcp", l.Addr().String())
	require.NoError(b, err)
	nb, err := l.Accept()
	require.NoError(b, err)
	ra, err := fa.detach(na.(*net.TCPConn))
	require.NoError(b, err)
	rb, err := fa.detach(nb.(*net.TCPConn))
	require.NoError(b, err)
	src, err := mem.Map(benchMax + benchExtra)
	require.NoError(b, err)
	dst, err := mem.Map(benchMax + benchExtra)
	require.NoError(b, err)
	clear(src.Span().Bytes())
	clear(dst.Span().Bytes())
	kb, err := fb.Register(dst)
	require.NoError(b, err)
	ka, err := fa.Register(dst)
	require.NoError(b, err)
	_ = ka

	span := []mem.Span{{}}
	ops := []transport.Op{{Kind: transport.OpWrite, Src: span}, {Kind: transport.OpFrame, Frame: make([]byte, benchFrame)}}
	// one way from (f,c) to g
	oneway := func(f, g *Fabric, c transport.Conn, k transport.Key, n uint64) {
		span[0] = mem.Span{Addr: src.Addr, Len: n}
		ops[0].Key = k
		if p, err := c.Post(ops); p != 2 || err != nil {
			b.Fatal(p, err)
		}
		got, done := 0, 0
		for got < 2 || done < 2 {
			if done < 2 {
				n, _ := f.Poll(ev)
				done += n
			}
			n, _ := g.Poll(ev)
			got += n
		}
	}
	var v vec
	bare := func(s, r int, n uint64) {
		n += benchExtra
		for sent, got := uint64(0), uint64(0); got < n; {
			if sent < n {
				v.reset()
				v.add(src.Addr+uintptr(sent), min(n-sent, quantum))
				if k, e := v.send(s); e == 0 {
					sent += uint64(k)
				}
			}
			v.reset()
			v.add(dst.Addr+uintptr(got), min(n-got, quantum))
			if k, e := v.recv(r); e == 0 {
				got += uint64(k)
			}
		}
	}
	for _, n := range []uint64{64, 4 << 10, 64 << 10, 1 << 20, 64 << 20} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			var tb, tc []int64
			count := max(1, int(min(1000, (4<<20)/n)))
			for i := 0; i < b.N; i++ {
				t0 := cpuTime()
				for range count {
					bare(ra, rb, n)
				}
				t1 := cpuTime()
				for range count {
					oneway(fa, fb, ca, kb, n)
				}
				t2 := cpuTime()
				tb = append(tb, (t1-t0)/int64(count))
				tc = append(tc, (t2-t1)/int64(count))
			}
			slices.Sort(tb)
			slices.Sort(tc)
			mb, mc := float64(tb[len(tb)/4])/1e3, float64(tc[len(tc)/4])/1e3
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(mb, "bare-µs")
			b.ReportMetric(mc, "conn-µs")
			b.ReportMetric(mc/mb, "ratio")
		})
	}
}
