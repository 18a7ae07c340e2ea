package overtest

import (
	"bytes"
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/gpu/fakegpu"
	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/transporttest"
)

// A Den is a victim with GPU and host memory that hostile peers know all keys of.
type Den[F Fabric] struct {
	G                       *fakegpu.GPU
	Victim                  *Side[F]
	good                    *Side[F]
	goodAt                  transport.Conn // the victim's end of good's Conn
	all                     mem.Region     // on the GPU; Key is of the middle third
	Size                    uint64
	Key, Host, Stale, Goods transport.Key
	hostMemory              mem.Region
}

// NewDen makes a Den of a Conn from good to victim.
func NewDen[F Fabric](t *testing.T, g *fakegpu.GPU, good, victim *Side[F]) *Den[F] {
	d := &Den[F]{G: g, Size: 4096, good: good, Victim: victim, goodAt: victim.C}
	d.all = OnGPU(t, d.G, 3*d.Size, 1)
	middle := mem.Region{Addr: d.all.Addr + uintptr(d.Size), Len: d.Size, Dev: d.all.Dev}
	var err error
	d.hostMemory, err = mem.Map(d.Size)
	require.NoError(t, err)
	d.Key = victim.Key(t, middle)
	d.Host = victim.Key(t, d.hostMemory)
	d.Stale = victim.Key(t, middle)
	victim.F.Deregister(d.Stale)
	d.Goods = victim.Key(t, middle)
	require.NoError(t, victim.F.Bind(d.Goods, d.goodAt))
	t.Cleanup(func() { require.NoError(t, mem.Unmap(d.hostMemory)) })
	return d
}

// Join is a new hostile peer of the victim's, which is not polled: what it does by
// itself is up to the test.
func (d *Den[F]) Join(t *testing.T, open func(transporttest.Options) (F, error)) *Side[F] {
	f, err := open(transporttest.Options{Gate: transporttest.Gate{Hello: "evil"}})
	require.NoError(t, err)
	evil := &Side[F]{F: f}
	d.Victim.Down = nil
	Connect(t, evil, d.Victim)
	return evil
}

// Unharmed checks that the peer has lost its Conn, that nothing has landed, and that
// good still gets in. It closes evil.
func (d *Den[F]) Unharmed(t *testing.T, evil *Side[F], name, text string) {
	t.Helper()
	Until(t, evil, d.Victim, func() bool { return d.Victim.Down != nil })
	require.ErrorContains(t, d.Victim.Down, text, name)
	require.NotErrorIs(t, d.Victim.Down, io.EOF, name)
	require.Empty(t, d.Victim.Writes, name)
	require.Empty(t, d.Victim.Frames, name)
	Holds(t, d.G, d.all, 1)
	require.Equal(t, make([]byte, d.Size), d.hostMemory.Span().Bytes(), name)

	src := OnGPU(t, d.G, d.Size, 5)
	d.good.Done = nil
	d.good.Post(t, Write(d.Goods, src, transport.Point{}))
	Until(t, d.good, d.Victim, func() bool { return len(d.Victim.Writes) == 1 && len(d.good.Done) == 1 })
	require.NoError(t, d.good.Done[0])
	d.Victim.Writes = nil
	require.NoError(t, fakegpu.Memory{G: d.G}.Store(d.all.Span(), bytes.Repeat([]byte{1}, int(d.all.Len))))
	require.NoError(t, evil.F.Close())
}

// PlainFrames: what starts as messages of the Fabric's do, with escape, and frames of other lengths, or as large as a frame can
// be, arrive as they were, with and without writes in front of them.
func PlainFrames[F Fabric](t *testing.T, g *fakegpu.GPU, a, b *Side[F], escape string, frames ...string) {
	src, dst := OnGPU(t, g, 4096, 5), OnGPU(t, g, 4096, 1)
	k := b.Key(t, dst)
	large := strings.Repeat(escape, transport.MaxFrame)
	frames = append(frames, "", escape, "\xfe", "\xff", large, "\x00"+large[1:], "\xff"+large[1:])
	for i := range 3 {
		for _, f := range frames {
			for _, passes := range []bool{false, true} {
				b.Frames = nil
				if i > 0 {
					a.Post(t, Write(k, src, transport.Point{}))
				}
				Until(t, a, b, func() bool { n, _ := a.Try([]transport.Op{Text(f, passes)}); return n == 1 })
				Until(t, a, b, func() bool { return len(b.Frames) == 1 })
				require.True(t, f == b.Frames[0], "a frame of %d bytes", len(f))
				Until(t, a, b, func() bool { return i == 0 || len(b.Writes) == 1 })
				b.Writes = nil
			}
		}
	}
	_, err := a.Try([]transport.Op{Text(large+"1", false)})
	require.ErrorContains(t, err, "at most")
}
