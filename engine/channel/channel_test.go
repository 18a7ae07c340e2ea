package channel

import (
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/wire"
)

func opens(name, text string) []byte {
	return wire.Append(nil, wire.TypeChannel, &wire.Channel{Name: name, Text: text})
}

func closes(name string) []byte {
	return wire.Append(nil, wire.TypeChannel, &wire.Channel{Name: name, Closes: true})
}

func refuses(name, why string) []byte {
	return wire.Append(nil, wire.TypeChannel, &wire.Channel{Name: name, Closes: true, Text: why})
}

func told(t *testing.T, ch *Channel, i int) string {
	text, ok, err := ch.Told(i)
	require.NoError(t, err)
	require.True(t, ok)
	return text
}

func frame(cs *Channels, i int, b []byte) error {
	_, err := cs.Frame(i, b)
	return err
}

func TestChannelOpening(t *testing.T) {
	cs := NewChannels(2)
	require.NoError(t, frame(cs, 0, opens("a", "early"))) // before us
	ch, err := cs.Open("a")
	require.NoError(t, err)
	require.Equal(t, "early", told(t, ch, 0))
	_, ok, err := ch.Told(1)
	require.NoError(t, err)
	require.False(t, ok)
	require.NoError(t, frame(cs, 1, opens("a", "later")))
	require.Equal(t, "later", told(t, ch, 1))
	require.NoError(t, ch.Err())
	ch.Read(1)
	_, ok, err = ch.Told(1)
	require.NoError(t, err)
	require.False(t, ok, "it is read")
	require.NoError(t, frame(cs, 1, opens("a", "more")))
	require.Equal(t, "more", told(t, ch, 1))
	require.NoError(t, frame(cs, 1, opens("a", "for the next of that name")))
	require.Equal(t, "more", told(t, ch, 1), "it is not read yet")
	_, _, err = ch.Told(2)
	require.ErrorContains(t, err, "2 peers, and none of number 2")
	for name, text := range map[string]string{
		"": "1 to 64 bytes", strings.Repeat("x", 65): "1 to 64 bytes", "a\n": "printable", "a": "is open already",
	} {
		_, err := cs.Open(name)
		var shape *ShapeError
		require.ErrorAs(t, err, &shape)
		require.ErrorContains(t, err, text)
	}
}

func TestChannelClosing(t *testing.T) {
	cs := NewChannels(2)
	ch, err := cs.Open("a")
	require.NoError(t, err)
	word := make([]atomic.Uint32, WatchWords)
	ch.Watch(word)
	require.NoError(t, frame(cs, 0, closes("a"))) // of a side that we never saw
	require.NoError(t, frame(cs, 0, opens("a", "0")))
	require.NoError(t, frame(cs, 1, opens("a", "1")))
	require.NoError(t, ch.Err())
	require.NoError(t, frame(cs, 1, closes("a")))
	require.EqualValues(t, 2, word[0].Load())
	require.EqualValues(t, 1<<1, word[4].Load(), "peer 1")
	require.True(t, IsOver(ch.Err()))
	require.ErrorContains(t, ch.Err(), "peer 1 has closed its side")
	require.Equal(t, "1", told(t, ch, 1))

	require.NoError(t, frame(cs, 1, opens("a", "again"))) // for the next channel of that name
	require.False(t, ch.Alone())
	require.True(t, ch.End())
	require.False(t, ch.End())
	require.EqualValues(t, 1, word[0].Load())
	require.NoError(t, frame(cs, 0, closes("a")))
	require.True(t, ch.Alone())
	ch.Forget()
	next, err := cs.Open("a")
	require.NoError(t, err)
	require.Equal(t, "again", told(t, next, 1))
}

// TestChannelRefused closes sides that we have not opened yet, and says why: the next
// channel of that name is told so, unless the peer has opened its side again.
func TestChannelRefused(t *testing.T) {
	cs := NewChannels(2)
	refused := func(i int, name, why string) {
		require.NoError(t, frame(cs, i, opens(name, "described")))
		over, err := cs.Frame(i, refuses(name, why))
		require.NoError(t, err)
		require.Equal(t, name, over)
	}
	refused(0, "a", "no memory")
	a, err := cs.Open("a")
	require.NoError(t, err)
	require.Equal(t, "no memory", told(t, a, 0))
	require.True(t, a.Parted(0))
	require.True(t, IsOver(a.ErrOf(0)))
	require.NoError(t, a.ErrOf(1), "it is to learn that too")
	_, ok, err := a.Told(1)
	require.NoError(t, err)
	require.False(t, ok)
	require.NoError(t, frame(cs, 0, opens("a", "again"))) // while ours is open
	a.End()
	a.Forget()
	a, err = cs.Open("a")
	require.NoError(t, err)
	require.Equal(t, "again", told(t, a, 0))
	require.NoError(t, a.Err())

	// It is over for us too: nothing stays of that for the next.
	a.End()
	require.NoError(t, frame(cs, 1, opens("a", "1")))
	require.NoError(t, frame(cs, 1, refuses("a", "a send failed")))
	require.Equal(t, "a send failed", told(t, a, 1))
	a.Forget()
	require.NoError(t, frame(cs, 0, refuses("a", "the other one has refused")))
	a, err = cs.Open("a")
	require.NoError(t, err)
	require.NoError(t, frame(cs, 0, refuses("a", "that was of an older one")))
	_, ok, err = a.Told(0)
	require.NoError(t, err)
	require.False(t, ok)

	refused(0, "b", "no memory")
	require.NoError(t, frame(cs, 0, opens("b", "better")))
	require.ErrorContains(t, frame(cs, 0, opens("b", "twice")), "twice, or opened more than")
	b, err := cs.Open("b")
	require.NoError(t, err)
	require.Equal(t, "better", told(t, b, 0))
	require.NoError(t, b.Err())

	refused(0, "c", "no memory")
	refused(1, "c", "no memory")
	require.NoError(t, frame(cs, 0, opens("c", "")))
	require.NoError(t, frame(cs, 0, closes("c"))) // as who waits no longer: it may come again
	cs.Lose(1, errors.New("gone"))
	c, err := cs.Open("c")
	require.NoError(t, err)
	for i := range 2 {
		_, ok, err := c.Told(i)
		require.NoError(t, err)
		require.False(t, ok, i)
	}
}

func TestChannelLoss(t *testing.T) {
	cs := NewChannels(2)
	a, err := cs.Open("a")
	require.NoError(t, err)
	b, err := cs.Open("b")
	require.NoError(t, err)
	word := make([]atomic.Uint32, WatchWords)
	a.Watch(word)
	require.NoError(t, frame(cs, 0, opens("c", "")))
	gone := errors.New("gone")
	cs.Lose(0, gone)
	require.EqualValues(t, 1, word[0].Load())
	_, _, err = b.Told(1)
	require.ErrorIs(t, err, gone)
	require.ErrorIs(t, a.Err(), gone)
	c, err := cs.Open("c")
	require.NoError(t, err, "its successor has to open it anew")
	_, ok, err := c.Told(0)
	require.NoError(t, err)
	require.False(t, ok)
	late := make([]atomic.Uint32, WatchWords)
	b.Watch(late)
	require.EqualValues(t, 1, late[0].Load())
	cs.Left(1)
	require.True(t, a.Alone())
	cs.Shut(gone)
	require.ErrorIs(t, c.Err(), gone)
	_, err = cs.Open("d")
	require.ErrorIs(t, err, gone)
	a.Forget()
	word[0].Store(0)
	cs.Shut(gone)
	require.Zero(t, word[0].Load())
}

func TestChannelBounds(t *testing.T) {
	cs := NewChannels(1)
	for i := range maxEarly {
		require.NoError(t, frame(cs, 0, opens(fmt.Sprint(i), "")))
	}
	require.ErrorContains(t, frame(cs, 0, opens("more", "")), "more than 256")
	require.NoError(t, frame(cs, 0, closes("0")))
	require.NoError(t, frame(cs, 0, opens("more", "")))
	require.ErrorContains(t, frame(cs, 0, opens("more", "")), "twice, or opened more than")
	require.Error(t, frame(cs, 0, []byte{byte(wire.TypeChannel)}))
	for i := range 2 * maxEarly { // refusals give way
		name := fmt.Sprint("refused ", i)
		require.NoError(t, frame(cs, 0, refuses("more", "")))
		require.NoError(t, frame(cs, 0, opens(name, "")))
		require.NoError(t, frame(cs, 0, refuses(name, "no memory")))
		require.Len(t, cs.early[0], maxEarly)
	}
	ch, err := cs.Open(fmt.Sprint("refused ", 2*maxEarly-1))
	require.NoError(t, err)
	require.Equal(t, "no memory", told(t, ch, 0))
}
