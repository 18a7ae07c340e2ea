package faults

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"fserver/engine/mem"
	"fserver/engine/transport"
)

// lender gives loans of a peer.
type lender struct {
	transport.Fabric
	conn  lenderConn
	fd    int
	loans []*mem.View
}

type lenderConn struct{ transport.Conn }

func (c *lenderConn) Close() {}

func (l *lender) Poll(ev []transport.Event) (n int, err error) {
	for ; n < len(ev) && len(l.loans) > 0; n++ {
		ev[n] = transport.Event{Kind: transport.EvLent, Conn: &l.conn, View: l.loans[0]}
		l.loans = l.loans[1:]
	}
	return n, nil
}

func (l *lender) FD() int { return l.fd }
func (l *lender) Close() error {
	if l.fd >= 0 {
		_ = unix.Close(l.fd)
	}
	l.fd = -1
	return nil
}

// TestLoansOfTheClosed: loans that the user is not handed are dropped, where its Conn was
// closed, where we have ended it, and where the Fabric is closed.
func TestLoansOfTheClosed(t *testing.T) {
	m, err := mem.NewShared(4096)
	require.NoError(t, err)
	defer func() { require.NoError(t, mem.FreeShared(m.ID())) }()
	for name, end := range map[string]func(f *Fabric, c *Conn) error{
		"conn closed":   func(_ *Fabric, c *Conn) error { c.Close(); return nil },
		"conn broken":   func(_ *Fabric, c *Conn) error { c.fail(errors.New("broken")); return nil },
		"fabric closed": func(f *Fabric, _ *Conn) error { return f.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			var tally mem.Tally // of what was dropped
			fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
			require.NoError(t, err)
			inner := &lender{fd: fd}
			for range 3 {
				v, err := mem.NewView(m.FD(), 4096, &tally)
				require.NoError(t, err)
				inner.loans = append(inner.loans, v)
			}
			w, err := Wrap(inner, Options{})
			require.NoError(t, err)
			f := w.(*Fabric)
			c := f.conn(&inner.conn)
			var ev [1]transport.Event
			n, err := f.Poll(ev[:])
			require.NoError(t, err)
			require.Equal(t, 1, n)
			require.Empty(t, inner.loans, "inner has given all")
			require.NoError(t, end(f, c))
			if name == "fabric closed" {
				require.EqualValues(t, 2, tally.Views.Load(), "nobody need poll any more")
			}
			mine := ev[0].View
			for range 4 {
				n, err = f.Poll(ev[:])
				require.NoError(t, err)
				require.True(t, n == 0 || ev[0].Kind == transport.EvDown)
			}
			require.EqualValues(t, 2, tally.Views.Load())
			require.NoError(t, mine.Drop())
			require.NoError(t, f.Close())
		})
	}
}
