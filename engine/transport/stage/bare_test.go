package stage

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/transport"
	"fserver/engine/transport/transporttest"
)

// BenchmarkWithoutGPU sends a frame there and back: over cma as it is, and wrapped between two
// nodes of which none has a GPU.
func BenchmarkWithoutGPU(b *testing.B) {
	for _, wrap := range []bool{false, true} {
		b.Run(map[bool]string{false: "bare cma", true: "wrapped"}[wrap], func(b *testing.B) {
			open := func() transport.Fabric {
				f, err := overCMA(transporttest.Options{Listen: true, Gate: transporttest.Gate{Hello: "cpu"}})
				require.NoError(b, err)
				if wrap {
					f, err = Wrap(f, Options{HasGPU: func(hello []byte) bool { return string(hello) == "gpu" }})
					require.NoError(b, err)
				}
				b.Cleanup(func() { require.NoError(b, f.Close()) })
				return f
			}
			from, to := open(), open()
			here, err := from.Connect(context.Background(), to.Addr())
			require.NoError(b, err)
			var there transport.Conn
			ev := make([]transport.Event, 16)
			get := func(f transport.Fabric) {
				for {
					n, err := f.Poll(ev)
					require.NoError(b, err)
					for _, e := range ev[:n] {
						if e.Kind == transport.EvAccept || e.Kind == transport.EvFrame {
							there = e.Conn
							return
						}
					}
				}
			}
			get(to)
			back := there
			ops := []transport.Op{{Kind: transport.OpFrame, Frame: make([]byte, 64), Passes: true}}
			for b.Loop() {
				_, _ = here.Post(ops)
				get(to)
				_, _ = back.Post(ops)
				get(from)
			}
		})
	}
}
