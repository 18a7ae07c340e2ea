package rails_test

import (
	"errors"
	"io"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/transport"
	"fserver/engine/transport/rails"
)

// TestRefused: members that take nothing any more give all frames that have arrived before the Conn ends, also
// if a Poll of them finds nothing in between. If they go on, the peer does not take it for a close in good order.
func TestRefused(t *testing.T) {
	const frames = 50
	wrong := errors.New("injected refusal")
	for name, closed := range map[string]bool{"the peer has closed": true, "the op was wrong": false} {
		t.Run(name, func(t *testing.T) {
			d := newDuo(t, 2, 1, false, rails.Options{Pause: 1 << 40})
			var ops []transport.Op
			for i := range uint64(frames) {
				ops = append(ops, transport.Op{Kind: transport.OpFrame, User: i, Frame: []byte("answer")})
				d.b.open[i] = slots
			}
			n, err := d.b.c.Post(ops)
			require.NoError(t, err)
			require.Equal(t, frames, n)
			if closed {
				d.b.c.Close()
			}
			rails.Refuse(d.a.c, wrong)
			for _, m := range d.all[:2] {
				m.mute = 10
			}
			_, err = d.a.c.Post(ops[:1])
			require.NoError(t, err)
			got, down := 0, error(nil)
			d.until("it ends", func() bool {
				ev := make([]transport.Event, 7)
				n, err := d.a.f.Poll(ev)
				require.NoError(t, err)
				for _, e := range ev[:n] {
					switch e.Kind {
					case transport.EvFrame:
						require.NoError(t, down)
						got++
					case transport.EvDown:
						down = e.Err
					}
				}
				return down != nil
			})
			require.Equal(t, frames, got)
			if closed {
				require.ErrorIs(t, down, io.EOF)
				return
			}
			require.ErrorIs(t, down, wrong)
			d.until("the peer hears of it", func() bool { d.b.poll(); return d.b.down != nil })
			require.NotErrorIs(t, d.b.down, io.EOF)
		})
	}
}
