package overtest

import (
	"bytes"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/gpu/fakegpu"
	"fserver/engine/mem"
	"fserver/engine/transport"
)

// subset is those of list that start so.
func subset(list []string, prefix string) []string {
	return slices.DeleteFunc(slices.Clone(list), func(s string) bool { return !strings.HasPrefix(s, prefix) })
}

// Passes: a frame or loan that passes arrives while a write before it waits for a point;
// others do not. Each sort keeps its order, and memory of the host its place before both. If warm, a write has
// been made before.
func Passes[F Fabric](t *testing.T, g *fakegpu.GPU, a, b *Side[F], warm bool) {
	src, dst, second := OnGPU(t, g, 4096, 5), OnGPU(t, g, 4096, 1), OnGPU(t, g, 4096, 1)
	host := bytes.Repeat([]byte{7}, 4096)
	k := b.Key(t, dst)
	if warm {
		a.Post(t, Write(k, src, transport.Point{}))
		Until(t, a, b, func() bool { return len(b.Writes) == 1 })
		require.NoError(t, fakegpu.Memory{G: g}.Store(dst.Span(), make([]byte, 4096)))
	}
	point, open := HeldUp(t, g, a.F)
	shared, err := mem.NewShared(4096)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, mem.FreeShared(shared.ID())) })
	loan := transport.Op{Kind: transport.OpLend, Src: []mem.Span{shared.Region().Span()}}
	lends := a.C.Lends(loan.Src[0])
	post := func(number uint32, passes bool) {
		a.Post(t, []transport.Op{Text(fmt.Sprintf("%v %d", passes, number), passes)})
		if lends {
			loan.Loan, loan.Passes = number, passes
			a.Post(t, []transport.Op{loan})
		}
	}
	post(0, true)
	post(0, false)
	bare := func(op transport.Op) { // without a mark
		n, err := a.C.Post([]transport.Op{op})
		require.NoError(t, err)
		require.Equal(t, 1, n)
	}
	bare(Write(k, src, point)[0])
	var waits, goes []string
	for i := range 20 {
		post(uint32(i+1), false)
		bare(transport.Op{Kind: transport.OpWrite, Key: b.Key(t, second), Src: []mem.Span{mem.Of(host)}})
		post(uint32(i+1), true)
		waits, goes = append(waits, fmt.Sprintf("false %d", i)), append(goes, fmt.Sprintf("true %d", i))
		if i == 0 { // the write of host memory is there
			Until(t, a, b, func() bool { return slices.Contains(b.Frames, "true 1") })
			Holds(t, g, second, 7)
		}
	}
	waits, goes = append(waits, "false 20"), append(goes, "true 20")
	Until(t, a, b, func() bool { return len(subset(b.Frames, "true")) == 21 })
	Polls(t, a, b)
	require.Equal(t, goes, subset(b.Frames, "true"))
	require.Equal(t, waits[:1], subset(b.Frames, "false"))
	loans := len(subset(b.Frames, "loan"))
	open()
	Until(t, a, b, func() bool {
		return len(subset(b.Frames, "false")) == 21 && (!lends || len(subset(b.Frames, "loan")) == 2*21)
	})
	Holds(t, g, dst, 5)
	require.Equal(t, waits, subset(b.Frames, "false"))
	if lends {
		require.Equal(t, 1+1+20, loans)
		require.Equal(t, withLoans(waits[1:]), b.Frames[len(b.Frames)-40:])
	}
	Until(t, a, b, func() bool { return len(a.Done) == len(b.Frames)+21+map[bool]int{true: 1}[warm] })
	runtime.KeepAlive(host)
}

// withLoans is each frame with the loan of the same number behind it.
func withLoans(frames []string) (all []string) {
	for _, frame := range frames {
		all = append(all, frame, strings.Replace(frame, "false", "loan", 1))
	}
	return all
}

// LongWait: a stream of the application's that waits for longer than a peer may leave
// bytes unseen, stall, ends no Conn, however much is posted behind it.
func LongWait[F Fabric](t *testing.T, g *fakegpu.GPU, a, b *Side[F], stall time.Duration) {
	src, dst := OnGPU(t, g, 4096, 5), OnGPU(t, g, 4096, 1)
	k := b.Key(t, dst)
	a.Post(t, Write(k, src, transport.Point{}))
	Until(t, a, b, func() bool { return len(b.Writes) == 1 })
	point, open := HeldUp(t, g, a.F)
	ops := Write(k, src, point)
	posted := 1
	for end := time.Now().Add(4 * stall); time.Now().Before(end) || posted <= 100; {
		n, err := a.Try(ops)
		require.NoError(t, err)
		posted += n
		a.Poll(t)
		b.Poll(t)
	}
	require.Greater(t, posted, 100)
	require.Len(t, b.Writes, 1)
	require.Equal(t, []error{nil, nil}, []error{a.Down, b.Down})
	open()
	Until(t, a, b, func() bool { return len(b.Writes) == posted && len(a.Done) == posted })
}
