package faults

import (
	"encoding/binary"
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// TestHostilePeer sends what no peer of ours sends. Each ends the Conn, with the
// reason and the open operations, and nothing of it is given to the user.
func TestHostilePeer(t *testing.T) {
	frame := func(kind byte, seq uint64, n int) []byte {
		return append(binary.LittleEndian.AppendUint64([]byte{kind}, seq), make([]byte, n)...)
	}
	for name, c := range map[string]struct {
		frames [][]byte
		text   string
	}{
		"no header":                  {[][]byte{{}}, "PS_RESEND must be the same on all nodes"},
		"half a header":              {[][]byte{frame(kindLast, 0, 0)[:headerLen-1]}, "PS_RESEND must be the same"},
		"a kind before the first":    {[][]byte{frame(kindLast-1, 0, 0)}, "PS_RESEND must be the same"},
		"a kind behind the last":     {[][]byte{frame(kindAck+1, 0, 0)}, "PS_RESEND must be the same"},
		"acknowledgement with bytes": {[][]byte{frame(kindAck, 0, 1)}, "PS_RESEND must be the same"},
		"acknowledged, never sent":   {[][]byte{frame(kindAck, 3, 0)}, "acknowledged frame 3, but the last frame sent was 2"},
		"acknowledged, 2^64-1":       {[][]byte{frame(kindAck, 1<<64-1, 0)}, "but the last frame sent was 2"},
		"beyond the window":          {[][]byte{frame(kindLast, window, 0)}, "sent frame 256, want frame 0"},
		"half the numbers ahead":     {[][]byte{frame(kindLast, 1<<63-1, 0)}, "want frame 0"},
		"frame too large":            {[][]byte{frame(kindLast, 0, transport.MaxFrame+1)}, "want at most 1048576"},
		"beginning too large":        {[][]byte{frame(kindMore, 0, transport.MaxFrame+1)}, "want at most 1048576"},
		"parts too large":            {[][]byte{frame(kindMore, 0, transport.MaxFrame), frame(kindLast, 1, 1)}, "want at most 1048576"},
		"parts too large, and early": {[][]byte{frame(kindLast, 1, 1), frame(kindMore, 0, transport.MaxFrame), frame(kindLast, 1, 1)}, "want at most 1048576"},
		"beginning in a beginning":   {[][]byte{frame(kindMore, 0, 8), frame(kindMore, 1, 8)}, "a frame of at least 16 bytes"},
	} {
		s := &script{frames: c.frames}
		f := &Fabric{Over: link.Over{Fabric: s}, o: Options{Resend: true, Timeout: time.Minute}, conns: map[transport.Conn]*Conn{}}
		conn := f.conn(&s.conn)
		n, err := conn.Post([]transport.Op{{Kind: transport.OpFrame, User: 1}, {Kind: transport.OpFrame, User: 2}})
		require.NoError(t, err, name)
		require.Equal(t, 2, n, name)
		ended, down := []uint64(nil), error(nil)
		ev := make([]transport.Event, 8)
		for range 100 {
			n, err := f.Poll(ev)
			require.NoError(t, err, name)
			for _, e := range ev[:n] {
				require.True(t, down == nil || e.Kind == transport.EvDone, "%s: after EvDown", name)
				switch e.Kind {
				case transport.EvDone:
					require.Error(t, e.Err, name)
					ended = append(ended, e.User)
				case transport.EvDown:
					down = e.Err
				default:
					require.Fail(t, "an event", "%s: %v", name, e.Kind)
				}
			}
		}
		require.ErrorContains(t, down, c.text, name)
		require.NotErrorIs(t, down, io.EOF, name)
		require.Equal(t, []uint64{1, 2}, ended, name)
		require.True(t, s.conn.closed, name)
		_, err = conn.Post([]transport.Op{{Kind: transport.OpFrame}})
		require.ErrorIs(t, err, down, name)
		require.Less(t, cap(conn.partial), 2*transport.MaxFrame, name)
	}
}
