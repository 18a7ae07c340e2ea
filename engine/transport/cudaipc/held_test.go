package cudaipc

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
	"fserver/engine/transport/transporttest"
)

// text is a frame.
func text(s string, passes bool) transport.Op {
	return transport.Op{Kind: transport.OpFrame, Frame: []byte(s), Passes: passes}
}

// subset is those of list that start so.
func subset(list []string, prefix string) []string {
	return slices.DeleteFunc(slices.Clone(list), func(s string) bool { return !strings.HasPrefix(s, prefix) })
}

// polls gives both sides time to do what they should not.
func polls(t *testing.T, a, b *side) {
	for range 300 {
		a.poll(t)
		b.poll(t)
	}
}

// TestPasses: a frame or loan that passes arrives while a write before it waits for a point;
// others do not. Each sort keeps its order, and memory of the host its place before both.
func TestPasses(t *testing.T) {
	for _, c := range []struct {
		name        string
		alone, warm bool
	}{
		{"mapped", false, true},
		{"to be mapped", false, false},
		{"staged", true, true},
		{"to be staged", true, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := fakegpu.New()
			g.Alone = c.alone
			a, b := pairOf(t, g, overCMA)
			src, dst, second := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1), onGPU(t, g, 4096, 1)
			host := bytes.Repeat([]byte{7}, 4096)
			k := b.key(t, dst)
			if c.warm {
				a.post(t, write(k, src, transport.Point{}))
				until(t, a, b, func() bool { return len(b.writes) == 1 })
				require.NoError(t, fakegpu.Memory{G: g}.Store(dst.Span(), make([]byte, 4096)))
			}
			point, open := heldUp(t, g, a.f)
			shared, err := mem.NewShared(4096)
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, mem.FreeShared(shared.ID())) })
			loan := transport.Op{Kind: transport.OpLend, Src: []mem.Span{shared.Region().Span()}}
			lends := a.c.Lends(loan.Src[0])
			post := func(number uint32, passes bool) {
				a.post(t, []transport.Op{text(fmt.Sprintf("%v %d", passes, number), passes)})
				if lends {
					loan.Loan, loan.Passes = number, passes
					a.post(t, []transport.Op{loan})
				}
			}
			post(0, true)
			post(0, false)
			n, err := a.c.Post(write(k, src, point))
			require.NoError(t, err)
			require.Equal(t, 1, n)
			var waits, goes []string
			for i := range 20 {
				post(uint32(i+1), false)
				n, err := a.c.Post([]transport.Op{{Kind: transport.OpWrite, Key: b.key(t, second), Src: []mem.Span{mem.Of(host)}}})
				require.NoError(t, err)
				require.Equal(t, 1, n)
				post(uint32(i+1), true)
				waits, goes = append(waits, fmt.Sprintf("false %d", i)), append(goes, fmt.Sprintf("true %d", i))
				if i == 0 { // the write of host memory is there
					until(t, a, b, func() bool { return slices.Contains(b.frames, "true 1") })
					holds(t, g, second, 7)
				}
			}
			waits, goes = append(waits, "false 20"), append(goes, "true 20")
			until(t, a, b, func() bool { return len(subset(b.frames, "true")) == 21 })
			polls(t, a, b)
			require.Equal(t, goes, subset(b.frames, "true"))
			require.Equal(t, waits[:1], subset(b.frames, "false"))
			loans := len(subset(b.frames, "loan"))
			open()
			until(t, a, b, func() bool {
				return len(subset(b.frames, "false")) == 21 && (!lends || len(subset(b.frames, "loan")) == 2*21)
			})
			holds(t, g, dst, 5)
			require.Equal(t, waits, subset(b.frames, "false"))
			if lends {
				require.Equal(t, 1+1+20, loans)
				require.Len(t, subset(b.frames, "loan"), 2*21)
				var rest []string // each loan before the frame behind it
				for i := 1; i <= 20; i++ {
					rest = append(rest, fmt.Sprintf("false %d", i), fmt.Sprintf("loan %d", i))
				}
				require.Equal(t, rest, b.frames[len(b.frames)-40:])
			}
			until(t, a, b, func() bool { return len(a.done) == len(b.frames)+21+map[bool]int{true: 1}[c.warm] })
			runtime.KeepAlive(host)
		})
	}
}

// TestLongWait: a stream of the application's that waits for longer than a peer may leave
// bytes unseen ends no Conn, however much is posted behind it.
func TestLongWait(t *testing.T) {
	const stall = 100 * time.Millisecond
	for name, alone := range map[string]bool{"mapped": false, "staged": true} {
		t.Run(name, func(t *testing.T) {
			g := fakegpu.New()
			g.Alone = alone
			a, b := pairOf(t, g, func(o transporttest.Options) (transport.Fabric, error) {
				o.Limits.Stall = stall
				return overCMA(o)
			})
			src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1)
			k := b.key(t, dst)
			a.post(t, write(k, src, transport.Point{}))
			until(t, a, b, func() bool { return len(b.writes) == 1 })
			point, open := heldUp(t, g, a.f)
			ops := write(k, src, point)
			posted := 1
			for end := time.Now().Add(4 * stall); time.Now().Before(end); {
				n, err := a.try(ops)
				require.NoError(t, err)
				posted += n
				a.poll(t)
				b.poll(t)
			}
			require.Greater(t, posted, 100)
			require.Len(t, b.writes, 1)
			require.Equal(t, []error{nil, nil}, []error{a.down, b.down})
			open()
			until(t, a, b, func() bool { return len(b.writes) == posted && len(a.done) == posted })
		})
	}
}

// TestHeldAtTheEnd: what is held when the peer closes is given if its writes come, and
// forgotten if they do not; EvDown comes after it.
func TestHeldAtTheEnd(t *testing.T) {
	for name, come := range map[string]bool{"come": true, "do not come": false} {
		t.Run(name, func(t *testing.T) {
			g := fakegpu.New()
			a, b, dst, _, _, open := underWay(t, g)
			until(t, a, b, func() bool { return b.below().held.Len() > 0 })
			a.c.Close()
			until(t, a, b, func() bool { return b.below().over != nil })
			require.NoError(t, b.down)
			if come {
				open()
			}
			began := time.Now()
			until(t, a, b, func() bool { return b.down != nil })
			if come {
				require.Len(t, b.writes, 1)
				holds(t, g, dst, 5)
			} else {
				require.Empty(t, b.writes)
				require.GreaterOrEqual(t, time.Since(began), lastWrites/2)
			}
		})
	}
}
