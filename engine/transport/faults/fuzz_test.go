package faults

import (
	"bytes"
	"encoding/binary"
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// script is an inner Fabric with one Conn: it gives the frames of a peer, and takes
// what is posted.
type script struct {
	transport.Fabric
	conn   scriptConn
	frames [][]byte
}

type scriptConn struct {
	transport.Conn
	posted int
	closed bool
}

func (c *scriptConn) Post(ops []transport.Op) (int, error) {
	c.posted += len(ops)
	return len(ops), nil
}

func (c *scriptConn) Close() { c.closed = true }

func (s *script) Poll(ev []transport.Event) (n int, err error) {
	for ; n < len(ev) && s.conn.posted > 0; n++ {
		ev[n] = transport.Event{Kind: transport.EvDone, Conn: &s.conn}
		s.conn.posted--
	}
	for ; n < len(ev) && len(s.frames) > 0 && !s.conn.closed; n++ {
		ev[n] = transport.Event{Kind: transport.EvFrame, Conn: &s.conn, Data: s.frames[0]}
		s.frames = s.frames[1:]
	}
	return n, nil
}

// FuzzFrames receives random frames, each behind its length, while some of ours
// wait for acknowledgements. Nothing may panic, come out of order or twice, be
// acknowledged that was not sent, or take memory without bound.
func FuzzFrames(f *testing.F) {
	frame := func(kind byte, seq uint64, payload ...byte) []byte {
		b := binary.LittleEndian.AppendUint16(nil, uint16(headerLen+len(payload)))
		b = binary.LittleEndian.AppendUint64(append(b, kind), seq)
		return append(b, payload...)
	}
	f.Add([]byte{}, uint8(0), uint8(1))
	f.Add([]byte{0, 0}, uint8(0), uint8(1))
	f.Add(bytes.Repeat([]byte{kindLast}, 300), uint8(3), uint8(4))
	f.Add(bytes.Join([][]byte{frame(kindLast, 0, 1), frame(kindLast, 2, 3), frame(kindLast, 1, 2), frame(kindLast, 1, 2)}, nil), uint8(0), uint8(1))
	f.Add(bytes.Join([][]byte{frame(kindMore, 0, 1, 2), frame(kindLast, 1, 3)}, nil), uint8(0), uint8(2))
	f.Add(bytes.Join([][]byte{frame(kindMore, 1, 1), frame(kindMore, 0, 2)}, nil), uint8(0), uint8(2))
	// Frame 1 comes too early, and once more in its turn, and so does frame 257.
	f.Add(bytes.Join([][]byte{frame(kindLast, 1, 2), frame(kindLast, 0, 1), frame(kindLast, 257, 3)}, nil), uint8(0), uint8(4))
	f.Add(bytes.Join([][]byte{frame(kindAck, 2), frame(kindAck, 1), frame(kindAck, 5)}, nil), uint8(5), uint8(2))
	f.Add(frame(kindAck, 1<<63), uint8(5), uint8(2))
	f.Add(frame(kindAck, 0, 1), uint8(5), uint8(2))
	f.Add(frame(kindLast, window), uint8(0), uint8(2))
	f.Add(frame(kindLast, 1<<64-1), uint8(0), uint8(2))

	f.Fuzz(func(t *testing.T, b []byte, posts, room uint8) {
		s := &script{}
		fab := &Fabric{Over: link.Over{Fabric: s}, o: Options{Resend: true, Timeout: time.Minute}, conns: map[transport.Conn]*Conn{}}
		c := fab.conn(&s.conn)
		for i := range uint64(posts) {
			n, err := c.Post([]transport.Op{{Kind: transport.OpFrame, User: i, Frame: []byte{1}}})
			require.NoError(t, err)
			require.Equal(t, 1, n)
		}
		var order [][]byte // frames of the peer that come in their turn
		for len(b) >= 2 {
			n := min(int(binary.LittleEndian.Uint16(b)), len(b)-2)
			x := b[2 : 2+n]
			b = b[2+n:]
			s.frames = append(s.frames, x)
			if n >= headerLen && (x[0] == kindLast || x[0] == kindMore) {
				if binary.LittleEndian.Uint64(x[1:]) == uint64(len(order)) {
					order = append(order, x)
				}
			}
		}

		ev := make([]transport.Event, 1+room%16)
		ended, next, down := uint64(0), 0, error(nil)
		// A Poll may find 64 frames, or ends of frames of ours, and have nothing to tell.
		for quiet := 0; quiet < 8 || len(s.frames) > 0 && !s.conn.closed; quiet++ {
			n, err := fab.Poll(ev)
			require.NoError(t, err)
			for _, e := range ev[:n] {
				require.True(t, down == nil || e.Kind == transport.EvDone, "after EvDown")
				switch e.Kind {
				case transport.EvDone:
					require.Equal(t, ended, e.User)
					ended++
				case transport.EvFrame:
					var want []byte
					for more := true; more; next++ {
						require.Less(t, next, len(order), "frame %d has not come", next)
						x := order[next]
						want, more = append(want, x[headerLen:]...), x[0] == kindMore
					}
					require.True(t, bytes.Equal(want, e.Data), "frame %d", next)
				case transport.EvDown:
					require.NotErrorIs(t, e.Err, io.EOF)
					down = e.Err
				}
				quiet = 0
			}
			require.LessOrEqual(t, len(c.partial), transport.MaxFrame)
			require.LessOrEqual(t, c.first, c.fresh)
			require.LessOrEqual(t, c.fresh, c.next)
		}
		require.Equal(t, s.conn.closed, down != nil)
		if down != nil {
			require.EqualValues(t, posts, ended)
		} else {
			require.Empty(t, s.frames)
			require.Equal(t, c.first, ended)
		}
	})
}
