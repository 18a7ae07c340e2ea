package exchange

import (
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/mem"
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

// counted is memory that says how often it was used.
type counted struct {
	CPU
	n *int
}

func (c counted) Alloc(n uint64) (mem.Region, error) {
	*c.n++
	return c.CPU.Alloc(n)
}

// TestChannelRequests sends push_pulls through a channel and beside it. Those
// through it are received in memory of the CPU, whatever the others are.
func TestChannelRequests(t *testing.T) {
	p := newPair(t, 1)
	s := p.servers[0]
	elsewhere := 0
	s.ReceiveIn(counted{n: &elsewhere})
	at, err := NewChannels(1).Open("a")
	require.NoError(t, err)
	from, err := NewChannels(1).Open("a")
	require.NoError(t, err)
	s.Attach(at)
	push := func(ch *Channel, key uint64, fill byte) (uint64, Tensor) { return p.through(ch, key, 100, fill) }
	for turn := range 3 {
		on, y := push(from, 1, 7)
		beside, z := push(nil, 2, 9)
		require.NoError(t, p.settle())
		require.True(t, at.Taken())
		r := s.Take(at)[0]
		require.EqualValues(t, 7, r.Push()[0].Span.Bytes()[99])
		s.Deliver()
		require.False(t, at.Taken())
		require.Nil(t, s.Take(at))
		q := p.take(0)
		require.Len(t, q, 1)
		require.EqualValues(t, 9, q[0].Push()[0].Span.Bytes()[0])
		require.NoError(t, p.respond(0, q[0], bytesOf(t, 0, 100, 3)))
		require.NoError(t, p.respond(0, r, bytesOf(t, 0, 100, 4)))
		require.NoError(t, p.settle())
		require.Equal(t, StateDone, p.state(on), turn)
		require.Equal(t, StateDone, p.state(beside), turn)
		require.EqualValues(t, 4, y.Span.Bytes()[50])
		require.EqualValues(t, 3, z.Span.Bytes()[50])
		require.Equal(t, 1, elsewhere)
	}
	// What a closed channel has not answered, taken or not, goes back to its worker and does
	// not hold its key, whoever closes first.
	for turn := range 4 {
		on, _ := push(from, 1, 7)
		require.NoError(t, p.settle())
		if turn%2 == 0 {
			require.Len(t, s.Take(at), 1)
			s.Deliver()
		}
		if turn < 2 {
			s.Detach(at)
			p.w.ChannelOver(0, "a")
		} else {
			p.w.ChannelOver(0, "a")
			require.NoError(t, p.settle())
			s.Detach(at)
		}
		require.NoError(t, p.settle())
		require.Equal(t, StateFailed, p.state(on), turn)
		require.True(t, IsOver(p.w.Result(on)), turn)
		require.Zero(t, s.clients[0].count)
		beside, _ := push(nil, 1, 9) // with the same key
		require.NoError(t, p.settle())
		q := p.take(0)
		require.Len(t, q, 1)
		require.NoError(t, p.respond(0, q[0], bytesOf(t, 0, 100, 3)))
		require.NoError(t, p.settle())
		require.Equal(t, StateDone, p.state(beside), turn)
		s.Attach(at)
	}
	// What comes for a channel that is closed is refused at once. The loss of a worker that has not
	// read that frees it.
	s.Detach(at)
	require.False(t, at.Taken())
	on, _ := push(from, 1, 1)
	require.NoError(t, p.settle())
	require.Equal(t, StateFailed, p.state(on))
	require.ErrorContains(t, p.w.Result(on), `channel "a": peer 0 has closed its side`)
	require.True(t, IsOver(p.w.Result(on)))
	p.from[0].room = 0
	for range 3 {
		_, _ = push(from, 1, 1)
		require.NoError(t, p.settle())
	}
	s.Lose(0, errGone)
	require.Zero(t, s.clients[0].count)
	require.Len(t, s.requests.free, len(s.requests.all))
}

// TestChannelWaitsForNobody sends messages of a channel while push_pulls beside it wait: a
// stream that they are behind may be waiting for the message.
func TestChannelWaitsForNobody(t *testing.T) {
	p := newPair(t, 1)
	s := p.servers[0]
	at, err := NewChannels(1).Open("a")
	require.NoError(t, err)
	from, err := NewChannels(1).Open("a")
	require.NoError(t, err)
	s.Attach(at)
	message := func(key uint64, fill byte) {
		on, y := p.through(from, key, 100, fill)
		require.NoError(t, p.settle())
		require.True(t, at.Taken())
		r := s.Take(at)[0]
		require.Equal(t, fill, r.Push()[0].Span.Bytes()[99])
		s.Deliver()
		require.NoError(t, p.respond(0, r, bytesOf(t, 0, 100, fill+1)))
		require.NoError(t, p.settle())
		require.Equal(t, StateDone, p.state(on))
		require.Equal(t, fill+1, y.Span.Bytes()[50])
	}

	p.to[0].held = p.w.next // its request is out, and its bytes are not
	first, _ := p.through(nil, 2, 100, 9)
	require.NoError(t, p.settle())
	message(1, 3)
	second, _ := p.through(nil, 2, 100, 10) // behind it for the key
	third, _ := p.through(nil, 5, 100, 11)  // behind that
	require.NoError(t, p.settle())
	message(1, 4)
	message(6, 5) // new keys and buffers are asked for in between
	p.to[0].held = 0
	for i, id := range []uint64{first, second, third} { // in the order of the calls
		require.NoError(t, p.settle())
		q := p.take(0)
		require.Len(t, q, 1, i)
		require.EqualValues(t, 9+i, q[0].Push()[0].Span.Bytes()[0])
		require.NoError(t, p.respond(0, q[0], bytesOf(t, 0, 100, 3)))
		require.NoError(t, p.settle())
		require.Equal(t, StateDone, p.state(id), i)
	}

	// A message that waits itself, for its key, keeps nobody.
	p.to[0].held = p.w.next
	first, _ = p.through(nil, 1, 100, 9)
	require.NoError(t, p.settle())
	on, _ := p.through(from, 1, 100, 7)
	beside, _ := p.through(nil, 2, 100, 8)
	require.NoError(t, p.settle())
	require.Empty(t, p.take(0))
	p.to[0].held = 0
	for i, id := range []uint64{first, beside} {
		require.NoError(t, p.settle())
		q := p.take(0)
		require.Len(t, q, 1, i)
		require.NoError(t, p.respond(0, q[0], bytesOf(t, 0, 100, 3)))
		require.NoError(t, p.settle())
		require.Equal(t, StateDone, p.state(id))
	}
	require.True(t, at.Taken())
	r := s.Take(at)[0]
	s.Deliver()
	require.NoError(t, p.respond(0, r, bytesOf(t, 0, 100, 1)))
	require.NoError(t, p.settle())
	require.Equal(t, StateDone, p.state(on))
}

// TestChannelAnswerPasses answers messages of a channel while an answer to a push_pull waits for a
// stream, which may be waiting for the next of those messages.
func TestChannelAnswerPasses(t *testing.T) {
	p := newPair(t, 1)
	s := p.servers[0]
	at, err := NewChannels(1).Open("a")
	require.NoError(t, err)
	from, err := NewChannels(1).Open("a")
	require.NoError(t, err)
	s.Attach(at)
	beside, _ := p.through(nil, 2, 100, 9)
	require.NoError(t, p.settle())
	q := p.take(0)
	require.Len(t, q, 1)
	p.from[0].held = s.next // the answer is out, and its bytes are not
	require.NoError(t, p.respond(0, q[0], bytesOf(t, 0, 100, 3)))
	for _, refuse := range []bool{false, true} {
		on, y := p.through(from, 1, 100, 4)
		require.NoError(t, p.settle())
		require.True(t, at.Taken())
		r := s.Take(at)[0]
		s.Deliver()
		want := StateDone
		if refuse {
			tk, err := s.Begin()
			require.NoError(t, err)
			require.NoError(t, s.Fail(r.Handler(), tk, "no"))
			want = StateFailed
		} else {
			require.NoError(t, p.respond(0, r, bytesOf(t, 0, 100, 5)))
		}
		require.NoError(t, p.settle())
		require.Equal(t, want, p.state(on))
		require.Equal(t, !refuse, y.Span.Bytes()[50] == 5)
	}
	require.Equal(t, StateOpen, p.state(beside))
	p.from[0].held = 0
	require.NoError(t, p.settle())
	require.Equal(t, StateDone, p.state(beside))
}

// TestChannelBesideARefusal has the server refuse a buffer to a push_pull while a message of
// a channel is queued behind its question, and loses the server while both are queued.
func TestChannelBesideARefusal(t *testing.T) {
	p := newPair(t, 1)
	s := p.servers[0]
	require.NoError(t, s.Fix([]Own{{Key: 2, Region: bytesOf(t, 0, 10, 0).Base}}))
	at, err := NewChannels(1).Open("a")
	require.NoError(t, err)
	from, err := NewChannels(1).Open("a")
	require.NoError(t, err)
	s.Attach(at)
	bad, _ := p.through(nil, 2, 5000, 9)
	p.w.Drain() // it asks for a buffer
	on, _ := p.through(from, 1, 100, 7)
	require.NoError(t, p.settle())
	require.Equal(t, StateFailed, p.state(bad))
	require.True(t, at.Taken())
	r := s.Take(at)[0]
	s.Deliver()
	require.NoError(t, p.respond(0, r, bytesOf(t, 0, 100, 1)))
	require.NoError(t, p.settle())
	require.Equal(t, StateDone, p.state(on))

	p.to[0].room = 0
	beside, _ := p.through(nil, 3, 100, 9)
	on, _ = p.through(from, 1, 100, 7)
	p.w.Drain()
	p.w.Lose(0, errors.New("gone"))
	p.w.Drain()
	require.Equal(t, StateFailed, p.state(beside))
	require.Equal(t, StateFailed, p.state(on))
}
