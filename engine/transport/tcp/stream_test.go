package tcp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// A recorder receives a stream without a socket, and keeps what came of it.
type recorder struct {
	tb     testing.TB
	x      rx
	ev     []transport.Event
	seq    uint64
	vec    vec
	frames [][]byte
	err    error
}

func newRecorder(tb testing.TB, room int, r ...mem.Region) (*recorder, []transport.Key) {
	t := new(link.Regions)
	t.Init(new(link.Fabric))
	rec := &recorder{tb: tb, ev: make([]transport.Event, room)}
	rec.x.init(t)
	var keys []transport.Key
	for i := range r {
		k, err := t.Register(r[i])
		require.NoError(tb, err)
		keys = append(keys, k)
	}
	return rec, keys
}

// feed gives the receiver b, of which one read brings at most chunk() bytes
// and one Poll does at most two reads. It checks that frames stay as they are
// until the next Poll.
func (r *recorder) feed(b []byte, chunk func() int) {
	for r.err == nil && (len(b) > 0 || r.x.more) {
		r.seq++
		var held, was [][]byte
		keep := func(n int) {
			for _, e := range r.ev[:n] {
				held, was = append(held, e.Data), append(was, bytes.Clone(e.Data))
			}
		}
		n := 0
		if r.x.more {
			n, r.err = r.x.parse(nil, r.ev, r.seq)
			keep(n)
		}
		for reads := 0; reads < 2 && len(b) > 0 && r.err == nil && !r.x.more && n < len(r.ev); reads++ {
			r.x.want(&r.vec, r.seq, 100000)
			if r.vec.n == 0 {
				break
			}
			k := min(len(b), chunk(), int(r.vec.sum))
			require.NotZero(r.tb, k)
			r.x.take(uint64(k))
			for _, p := range r.vec.iov[:r.vec.n] {
				d := copy(mem.Span{Addr: p.base, Len: min(p.n, uint64(k))}.Bytes(), b)
				b, k = b[d:], k-d
			}
			var m int
			m, r.err = r.x.parse(nil, r.ev[n:], r.seq)
			copy(r.ev, r.ev[n:n+m])
			keep(m)
			n += m
		}
		for i := range held {
			require.True(r.tb, bytes.Equal(was[i], held[i]), "a frame changed before the next Poll")
		}
		r.frames = append(r.frames, was...)
		require.LessOrEqual(r.tb, cap(r.x.big), transport.MaxFrame)
	}
}

// drain takes the stream that t sends, in pieces of at most chunk() bytes.
func drain(t *tx, v *vec, limit uint64, chunk func() int) []byte {
	var out []byte
	for t.unsent() {
		t.gather(v, limit)
		n := chunk()
		t.advance(uint64(min(n, int(v.sum))))
		for _, p := range v.iov[:v.n] {
			k := min(n, int(p.n))
			out = append(out, mem.Span{Addr: p.base, Len: uint64(k)}.Bytes()...)
			n -= k
		}
	}
	return out
}

// hold is memory outside the Go heap, for as long as the test runs.
func hold(tb testing.TB, n uint64) mem.Region {
	r, err := mem.Map(n)
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, mem.Unmap(r)) })
	return r
}

func TestStreamComesOutAsPosted(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	src, dst := hold(t, 1<<20), hold(t, 1<<20)
	for i := range src.Span().Bytes() {
		src.Span().Bytes()[i] = byte(r.Uint32())
	}
	for round := range 30 {
		rec, keys := newRecorder(t, 1+round%5, dst)
		var out tx
		out.init()
		v := new(vec)
		chunk := func() int { return 1 + r.IntN(1<<(1+r.IntN(18))) }
		var frames [][]byte
		for range 20 {
			clear(dst.Span().Bytes())
			want := make([]byte, dst.Len)
			at := uint64(0)
			for range r.IntN(40) {
				op := transport.Op{Kind: transport.OpFrame}
				if r.IntN(2) == 0 {
					op.Frame = src.Span().Bytes()[:r.IntN(1<<r.IntN(20))]
				} else {
					op = transport.Op{Kind: transport.OpWrite, Key: keys[0], Off: at}
					for range r.IntN(5) {
						s, err := src.Slice(r.Uint64N(1000), r.Uint64N(1<<r.IntN(15)))
						require.NoError(t, err)
						op.Src = append(op.Src, s)
					}
				}
				taken, err := out.push(&op)
				require.NoError(t, err)
				if !taken {
					break
				}
				if op.Kind == transport.OpFrame {
					frames = append(frames, bytes.Clone(op.Frame))
				}
				for _, s := range op.Src {
					at += uint64(copy(want[at:], s.Bytes()))
				}
			}
			rec.feed(drain(&out, v, 200000, chunk), chunk)
			require.NoError(t, rec.err)
			require.False(t, rec.x.inside())
			require.True(t, bytes.Equal(want, dst.Span().Bytes()))
			var ended [1]transport.Event
			for out.Complete(nil, nil, ended[:]) == 1 {
				require.NoError(t, ended[0].Err)
			}
			require.Equal(t, out.Done, out.End)
		}
		require.Equal(t, len(frames), len(rec.frames))
		for i := range frames {
			require.True(t, bytes.Equal(frames[i], rec.frames[i]), "frame %d", i)
		}
	}
}

// TestMoreThanFourGigabytes moves the counters of both halves over a write
// that no test could send. The addresses are never used.
func TestMoreThanFourGigabytes(t *testing.T) {
	const size, step = 5<<30 + 7, 1<<30 + 3
	far := mem.Region{Addr: 1 << 44, Len: size + 100, Dev: mem.CPU}
	rec, keys := newRecorder(t, 1, far)
	var out tx
	out.init()
	v := new(vec)
	taken, err := out.push(&transport.Op{
		Kind: transport.OpWrite, Key: keys[0], Off: 100,
		Src: []mem.Span{{Addr: 1 << 45, Len: 3 << 30}, {Addr: 1 << 46, Len: size - 3<<30}},
	})
	require.True(t, taken)
	require.NoError(t, err)

	out.gather(v, 1<<40)
	require.Equal(t, uint64(headerLen+size), v.sum)
	rec.x.want(&rec.vec, 1, 1<<40)
	copy(rec.x.stage, out.heads[:headerLen])
	out.advance(headerLen)
	rec.x.take(headerLen)
	n, err := rec.x.parse(nil, rec.ev, 1)
	require.NoError(t, err)
	require.Zero(t, n)

	for sent := uint64(0); sent < size; {
		out.gather(v, step)
		rec.x.want(&rec.vec, 2, step)
		k := min(step, size-sent)
		require.Equal(t, k, v.sum)
		require.Equal(t, far.Addr+100+uintptr(sent), rec.vec.iov[0].base)
		require.Equal(t, k, rec.vec.iov[0].n)
		from := uintptr(1<<45) + uintptr(sent)
		if sent >= 3<<30 {
			from = 1<<46 + uintptr(sent-3<<30)
		}
		require.Equal(t, from, v.iov[0].base)
		out.advance(k)
		rec.x.take(k)
		sent += k
	}
	require.False(t, out.unsent())
	n, err = rec.x.parse(nil, rec.ev, 3)
	require.NoError(t, err)
	require.Zero(t, n)
	require.False(t, rec.x.inside())
}

func TestPostRefuses(t *testing.T) {
	var out tx
	out.init()
	for text, op := range map[string]transport.Op{
		"kind 7":           {Kind: 7},
		"at most 1048576":  {Kind: transport.OpFrame, Frame: make([]byte, transport.MaxFrame+1)},
		"more than 2^64":   {Kind: transport.OpWrite, Src: []mem.Span{{Len: 1 << 63}, {Len: 1 << 63}}},
		"a point on gpu 2": {Kind: transport.OpWrite, After: transport.Point{Dev: mem.GPU(2), Event: 1}},
	} {
		taken, err := out.push(&op)
		require.False(t, taken)
		require.ErrorContains(t, err, text)
	}
	require.False(t, out.unsent())
}

func TestHeadRingNeverOverlaps(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	var out tx
	out.init()
	v := new(vec)
	for range 20000 {
		if r.IntN(3) > 0 {
			frame := bytes.Repeat([]byte{byte(r.Uint32())}, r.IntN(1<<r.IntN(15)))
			_, err := out.push(&transport.Op{Kind: transport.OpFrame, Frame: frame})
			require.NoError(t, err)
		} else if out.unsent() {
			out.gather(v, 1+r.Uint64N(40000))
			out.advance(r.Uint64N(v.sum + 1))
		}
		for i := out.Sent; i != out.End; i++ {
			op := out.At(i)
			var h header
			require.NoError(t, h.parse(out.heads[op.at:]))
			require.Equal(t, uint64(op.n), headerLen+h.length)
			if body := out.heads[op.at+headerLen : op.at+op.n]; len(body) > 0 {
				require.Equal(t, len(body), bytes.Count(body, body[:1]))
			}
		}
		for ok := true; ok; {
			ok = out.Complete(nil, nil, make([]transport.Event, 1)) > 0
		}
	}
}

// FuzzStream receives random bytes, and random bytes behind headers that are
// good enough to be followed. Nothing may panic, write beside a region or take
// memory without bound.
func FuzzStream(f *testing.F) {
	const size, guard = 1 << 12, 1 << 10
	head := func(h header, payload ...byte) []byte {
		b := make([]byte, headerLen)
		h.put(b)
		return append(b, payload...)
	}
	f.Add([]byte{}, uint64(0))
	f.Add(bytes.Repeat([]byte{1}, 200), uint64(1))
	f.Add(head(header{kind: recFrame, length: 3}, 1, 2, 3), uint64(2))
	f.Add(head(header{kind: recFrame, length: transport.MaxFrame}, 1, 2, 3), uint64(3))
	f.Add(head(header{kind: recFrame, length: rxStage}, make([]byte, 2*rxStage)...), uint64(3))
	f.Add(head(header{kind: recWrite, length: 3, key: 1}, 1, 2, 3), uint64(4))
	f.Add(head(header{kind: recWrite, length: size, key: 1}, make([]byte, size)...), uint64(5))
	f.Add(head(header{kind: recWrite, length: size, key: 1, offset: 1}, make([]byte, size)...), uint64(6))
	f.Add(head(header{kind: recWrite, length: 16, key: 1, offset: 1<<64 - 8}, make([]byte, 16)...), uint64(7))
	f.Add(head(header{kind: recWrite, length: 1 << 63, key: 1, offset: 1 << 63}), uint64(8))
	f.Add(append(head(header{kind: recBye}), 1, 2, 3), uint64(9))
	memory := hold(f, guard+size+guard)
	inner, err := memory.Slice(guard, size)
	require.NoError(f, err)

	f.Fuzz(func(t *testing.T, b []byte, seed uint64) {
		r := rand.New(rand.NewPCG(seed, 0))
		all := memory.Span().Bytes()
		for i := range all {
			all[i] = 0xA5
		}
		rec, keys := newRecorder(t, 1+r.IntN(8), mem.Region{Addr: inner.Addr, Len: inner.Len, Dev: mem.CPU})
		// A fuzzer cannot guess the token: it gets it wherever it named the key.
		for at := 0; at+headerLen <= len(b); at++ {
			if b[at] == recWrite && binary.LittleEndian.Uint64(b[at+16:]) == keys[0].ID && seed%4 != 0 {
				binary.LittleEndian.PutUint64(b[at+24:], keys[0].Token)
			}
		}
		rec.feed(b, func() int { return 1 + r.IntN(1<<r.IntN(15)) })
		require.Equal(t, guard, bytes.Count(all[:guard], []byte{0xA5}))
		require.Equal(t, guard, bytes.Count(all[guard+size:], []byte{0xA5}))
		if rec.err != nil {
			require.False(t, errors.Is(rec.err, io.ErrUnexpectedEOF))
		}
	})
}
