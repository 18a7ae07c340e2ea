package cudaipc

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/gpu/fakegpu"
	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/transporttest"
)

// BenchmarkBesideGPU sends there and back between two nodes with GPUs: a frame, memory of the host with a frame behind it, and
// memory of the GPU, by mapping and staged, with a frame behind it. The copies of this GPU take no time of their own. Host
// memory goes over Conns of which nothing was mapped.
func BenchmarkBesideGPU(b *testing.B) {
	for _, kind := range []string{"poll", "frame", "host", "mapped", "staged"} {
		b.Run(kind, func(b *testing.B) {
			g := fakegpu.New()
			g.Instant, g.Alone = true, kind == "staged"
			open := benchOpener(b, g)
			from, to := open(), open()
			here, err := from.Connect(context.Background(), to.Addr())
			require.NoError(b, err)
			fabrics := [2]transport.Fabric{from, to}
			ev := make([]transport.Event, 16)
			get := func(at int, kind transport.EventKind) (c transport.Conn) {
				for {
					n, err := fabrics[at].Poll(ev)
					require.NoError(b, err)
					for _, e := range ev[:n] {
						if e.Kind == kind {
							c = e.Conn
						}
					}
					if c != nil {
						return c
					}
					_, _ = fabrics[1-at].Poll(ev)
				}
			}
			ends := [2]transport.Conn{here, get(1, transport.EvAccept)}
			var ops [2][]transport.Op
			for i := range ops {
				if kind != "frame" && kind != "poll" {
					ops[i] = append(ops[i], benchWrite(b, g, fabrics[1-i], kind))
				}
				ops[i] = append(ops[i], transport.Op{Kind: transport.OpFrame, Frame: make([]byte, 64)})
			}
			for b.Loop() {
				if kind == "poll" {
					_, _ = from.Poll(ev)
					continue
				}
				for i := range ops {
					for left := ops[i]; ; {
						n, err := ends[i].Post(left)
						require.NoError(b, err)
						if left = left[n:]; len(left) == 0 {
							break
						}
						_, _ = fabrics[i].Poll(ev)
					}
					get(1-i, transport.EvFrame)
				}
			}
		})
	}
}

// benchWrite is a write of 4 KiB to memory of f.
func benchWrite(b *testing.B, g *fakegpu.GPU, f transport.Fabric, kind string) transport.Op {
	alloc := func(uint64) (mem.Region, error) { return mem.Map(4096) }
	if kind == "mapped" || kind == "staged" {
		alloc = fakegpu.Memory{G: g}.Alloc
	}
	src, err := alloc(4096)
	require.NoError(b, err)
	dst, err := alloc(4096)
	require.NoError(b, err)
	k, err := f.Register(dst)
	require.NoError(b, err)
	return transport.Op{Kind: transport.OpWrite, Key: k, Src: []mem.Span{src.Span()}, Dev: src.Dev}
}

// benchOpener opens Fabrics, each as if it were of a process of its own.
func benchOpener(b *testing.B, g *fakegpu.GPU) func() transport.Fabric {
	return func() transport.Fabric {
		f, err := opens(g, overCMA, true, true)(transporttest.Options{Listen: true, Gate: transporttest.Gate{Hello: "gpu"}})
		require.NoError(b, err)
		b.Cleanup(func() { require.NoError(b, f.Close()) })
		return f
	}
}
