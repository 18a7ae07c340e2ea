package transporttest

import (
	"encoding/binary"

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
	owed     []transport.Op // the mark of the last write that was taken, if it was not
	loans    []loan         // the test owes each a Drop
	isDown   bool
	down     error
	isOver   bool // EvClosed has come

	onDone    func(user uint64, err error)
	onFrame   func(data []byte)
	onWritten func(number uint32, n uint64)
}

type doneOp struct {
	user uint64
	err  error
}

// written is a write that the peer has told of: each is followed by a mark, a frame of the
// suite's own.
type written struct {
	number uint32
	n      uint64
}

type loan struct {
	number uint32
	span   mem.Span
	view   *mem.View
	frames int // that came before
}

// A mark starts with this, which no frame of a test does. The number and length of the write
// follow.
const markMagic = 0x1e9d_35c2_77a0_f14b

// aMark is what the User of a mark has in common.
const aMark = 1 << 61

func markOf(op *transport.Op) transport.Op {
	n := uint64(0)
	for _, s := range op.Src {
		n += s.Len
	}
	b := binary.LittleEndian.AppendUint64(nil, markMagic)
	b = binary.LittleEndian.AppendUint32(b, op.Loan)
	b = binary.LittleEndian.AppendUint64(b, n)
	return transport.Op{Kind: transport.OpFrame, Frame: b, User: op.User | aMark}
}

func parseMark(b []byte) (m written, ok bool) {
	if len(b) != 20 || binary.LittleEndian.Uint64(b) != markMagic {
		return written{}, false
	}
	return written{binary.LittleEndian.Uint32(b[8:]), binary.LittleEndian.Uint64(b[12:])}, true
}

// try posts ops in one call, numbers them, and returns how many were taken. It posts a mark
// behind each write, at once or later.
func (l *link) try(ops ...transport.Op) (int, error) {
	all := l.owed
	l.forgive()
	for i := range ops {
		l.n.user++
		ops[i].User = l.n.user
		all = append(all, ops[i])
		if ops[i].Kind == transport.OpWrite {
			all = append(all, markOf(&ops[i]))
		}
	}
	k, err := l.c.Post(all)
	if k < 0 || k > len(all) {
		l.n.w.Fatalf("%s: post took %d of %d ops", l.n.name, k, len(all))
	}
	taken := 0
	for i := range all[:k] {
		l.open[all[i].User] = true
		if all[i].User&aMark == 0 {
			taken++
		}
	}
	if k < len(all) && all[k].User&aMark != 0 && err == nil {
		l.owed = all[k : k+1 : k+1]
		l.open[all[k].User] = true // for idle: its write has not arrived
	}
	return taken, err
}

// pay posts the mark that is owed.
func (l *link) pay() {
	if len(l.owed) == 0 || l.closed || l.n.closed {
		return
	}
	switch k, err := l.c.Post(l.owed); {
	case err != nil:
		l.forgive()
	case k != 0:
		l.owed = nil
	}
}

// post posts all of ops and polls while there is back-pressure.
func (l *link) post(ops ...transport.Op) {
	l.n.w.Helper()
	l.n.w.until("post takes the ops", func() bool {
		k, err := l.try(ops[:min(len(ops), 100)]...)
		require.NoError(l.n.w, err)
		ops = ops[k:]
		return len(ops) == 0
	})
}

// forgive forgets the mark that is owed: the Conn has ended.
func (l *link) forgive() {
	for _, op := range l.owed {
		delete(l.open, op.User)
	}
	l.owed = nil
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

func (l *link) close() {
	l.n.w.Helper()
	l.closed = true
	l.forgive()
	l.c.Close()
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
