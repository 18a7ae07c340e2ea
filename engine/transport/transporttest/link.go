package transporttest

import (
	"github.com/stretchr/testify/require"

	"fserver/engine/mem"
	"fserver/engine/transport"
)

// A link is one end of a Conn and all that its node saw on it.
type link struct {
	n        *node
	c        transport.Conn
	accepted bool            // came with EvAccept
	dialed   bool            // Connect returned it
	closed   bool            // closed by the test
	open     map[uint64]bool // Users of the ops that were taken and have not ended
	done     []doneOp
	frames   [][]byte
	writes   []written
	order    []seen // frames and writes as they came
	loans    []loan // the test owes each a Drop
	isDown   bool
	down     error

	onDone    func(user uint64, err error)
	onFrame   func(data []byte)
	onWritten func(imm uint32, n uint64)
}

type doneOp struct {
	user uint64
	err  error
}

type written struct {
	imm uint32
	n   uint64
}

type loan struct {
	imm    uint32
	span   mem.Span
	view   *mem.View
	frames int // that came before
}

// seen is an entry of frames or of writes.
type seen struct {
	frame bool
	n     int
}

// try posts ops in one call, numbers them, and returns how many were taken.
func (l *link) try(ops ...transport.Op) (int, error) {
	first := l.n.user + 1
	for i := range ops {
		l.n.user++
		ops[i].User = l.n.user
	}
	k, err := l.c.Post(ops)
	if k < 0 || k > len(ops) {
		l.n.w.Fatalf("%s: post took %d of %d ops", l.n.name, k, len(ops))
	}
	for i := range k {
		l.open[first+uint64(i)] = true
	}
	return k, err
}

// post posts all of ops and polls while there is back-pressure.
func (l *link) post(ops ...transport.Op) {
	l.n.w.Helper()
	l.n.w.until("post takes the ops", func() bool {
		k, err := l.try(ops...)
		require.NoError(l.n.w, err)
		ops = ops[k:]
		return len(ops) == 0
	})
}

// idle says whether every op that was taken has ended.
func (l *link) idle() bool { return len(l.open) == 0 }

// failed is the number of ops that ended with an error.
func (l *link) failed() int {
	k := 0
	for _, d := range l.done {
		if d.err != nil {
			k++
		}
	}
	return k
}

// ordered says whether the Conn keeps writes and frames in order.
func (l *link) ordered() bool {
	o, ok := l.c.(transport.Orderer)
	return ok && o.Ordered()
}

func (l *link) close() {
	l.n.w.Helper()
	l.closed = true
	require.NoError(l.n.w, l.c.Close())
}

// frame is an op that sends b.
func frame(b []byte) transport.Op { return transport.Op{Kind: transport.OpFrame, Frame: b} }

// echo sends a frame each way and checks that both arrive.
func (w *world) echo(a, b *link) {
	w.Helper()
	na, nb := len(a.frames), len(b.frames)
	a.post(frame([]byte("there")))
	b.post(frame([]byte("and back")))
	w.until("a frame arrives each way", func() bool { return len(a.frames) > na && len(b.frames) > nb })
	require.Equal(w, "there", string(b.frames[nb]))
	require.Equal(w, "and back", string(a.frames[na]))
}

// transfer writes a few bytes each way and checks them.
func (w *world) transfer(a, b *link) {
	w.Helper()
	for _, p := range [][2]*link{{a, b}, {b, a}} {
		from, to := p[0], p[1]
		dst, k := to.n.target(1000), len(to.writes)
		from.post(dst.write(0, 7, w.source(1, 1000)))
		w.until("a write arrives", func() bool { return len(to.writes) > k })
		require.Equal(w, written{7, 1000}, to.writes[k])
		w.holds("target", dst.Span(), 1)
	}
	w.until("the writes end", func() bool { return a.idle() && b.idle() })
	require.Zero(w, a.failed()+b.failed())
}
