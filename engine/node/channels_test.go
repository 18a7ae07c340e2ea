package node

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/channel"
	"fserver/engine/exchange"
	"fserver/engine/mem"
)

// textOf waits for what a peer tells on a channel.
func textOf(t *testing.T, n *Node, handle uint64, peer int) string {
	t.Helper()
	return textIn(t, n, handle, peer, 1<<16)
}

// textIn is textOf with room for so many bytes.
func textIn(t *testing.T, n *Node, handle uint64, peer, room int) (text string) {
	t.Helper()
	require.NoError(t, retried(func() (err error) {
		text, err = n.ChannelText(handle, peer, room, 20*time.Second)
		return err
	}))
	return text
}

func TestChannels(t *testing.T) { eachWay(t, channelsOf) }

// channelsOf opens channels between two workers and a server, exchanges on one
// beside ordinary push_pulls, and closes it; the other ends with a worker.
func channelsOf(t *testing.T, way ...string) {
	m := newMesh(t, openFabrics, shape{2, 1, 1}, way...)
	s := m.servers[0]
	at, err := s.OpenChannel("decode")
	require.NoError(t, err)
	_, err = s.OpenChannel("decode")
	require.ErrorContains(t, err, "is open already")
	_, err = m.scheduler.OpenChannel("x")
	require.ErrorContains(t, err, "only a worker or server does that")
	require.ErrorContains(t, s.TellChannel(at, 2, ""), "2 peers, and none of number 2")
	require.NoError(t, s.ChannelState(at, 0))
	_, err = s.ChannelText(at, 0, 1<<16, time.Millisecond)
	require.Equal(t, ErrAgain, err)
	var from []uint64
	for i, w := range m.workers {
		h, err := w.OpenChannel("decode")
		require.NoError(t, err)
		from = append(from, h)
		require.NoError(t, w.TellChannel(h, 0, string(rune('a'+i))))
		require.NoError(t, s.TellChannel(at, i, "server"))
	}
	for i, w := range m.workers {
		require.Equal(t, string(rune('a'+i)), textOf(t, s, at, i))
		require.Equal(t, "server", textOf(t, w, from[i], 0))
		_, err := s.ChannelText(at, i, 1<<16, time.Millisecond)
		require.ErrorIs(t, err, ErrAgain, "it is given once")
		require.NoError(t, w.TellChannel(from[i], 0, "more"))
		require.Equal(t, "more", textIn(t, s, at, i, 3), "it does not fit")
		require.Equal(t, "more", textOf(t, s, at, i))
	}

	word, err := mem.Map(4)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, mem.Unmap(word)) })
	other, err := s.OpenChannel("other")
	require.NoError(t, err)
	require.NoError(t, s.WatchChannel(other, word.Addr))
	require.NoError(t, s.TellChannel(other, 0, ""))
	unseen, err := mem.Map(4)
	require.NoError(t, err)
	dropped, err := s.OpenChannel("dropped")
	require.NoError(t, err)
	require.NoError(t, s.WatchChannel(dropped, unseen.Addr))
	require.NoError(t, s.WatchChannel(dropped, 0))
	require.NoError(t, mem.Unmap(unseen))

	for turn := range 20 {
		x, out := tensor(t, 1, 9), tensor(t, 0, 9)
		fill(x, byte(turn))
		var ids []uint64
		for i, w := range m.workers {
			ids = append(ids, pushPull(t, w, []exchange.Tensor{tensor(t, 2, 1)}, nil))
			ticket, err := w.BeginPushPull()
			require.NoError(t, err)
			require.NoError(t, ticket.AddPush(x))
			require.NoError(t, ticket.AddPull(out))
			ids = append(ids, ticket.ID())
			require.NoError(t, w.PushPullOn(from[i], ticket))
		}
		var b batch
		require.NoError(t, retried(func() error { return s.TakeOn(at, &b, 20*time.Second, true) }))
		require.Len(t, b.reqs, 2)
		for _, r := range b.reqs {
			require.Equal(t, x.Span.Bytes(), r.push[0].Span.Bytes())
			respond(t, s, r.handler, x)
		}
		beside, err := getBatch(s)
		require.NoError(t, err)
		for _, r := range beside.reqs {
			require.EqualValues(t, 2, r.push[0].Key)
			respond(t, s, r.handler)
		}
		for i, id := range ids {
			require.NoError(t, wait(m.workers[i/2], id))
		}
		require.Equal(t, x.Span.Bytes(), out.Span.Bytes())
		require.Equal(t, ErrAgain, s.TakeOn(at, &b, 0, false))
	}

	require.Equal(t, ErrAgain, s.CloseChannel(at, "", 0))
	for i, w := range m.workers {
		require.Eventually(t, func() bool { return isOver(w.ChannelState(from[i], 0)) }, 20*time.Second, time.Millisecond)
		require.NoError(t, retried(func() error { return w.CloseChannel(from[i], "", 20*time.Second) }))
		require.NoError(t, w.CloseChannel(from[i], "", 0))
	}
	require.NoError(t, retried(func() error { return s.CloseChannel(at, "", 20*time.Second) }))
	require.ErrorIs(t, s.ChannelState(at, 0), errClosed)

	require.NoError(t, s.ChannelState(other, 0))
	require.NoError(t, m.workers[1].Close())
	var lost *LostError
	require.Eventually(t, func() bool { return word.Span().Bytes()[0] == 1 }, 20*time.Second, time.Millisecond)
	require.ErrorAs(t, s.ChannelState(other, 0), &lost)
	require.Equal(t, 1, lost.Rank)
	var b batch
	require.ErrorAs(t, retried(func() error { return s.TakeOn(other, &b, 20*time.Second, false) }), &lost)
	require.ErrorAs(t, s.TellChannel(other, 0, ""), &lost)
	require.NoError(t, s.CloseChannel(other, "", -1))
	require.ErrorIs(t, s.WatchChannel(other, word.Addr), errClosed)
	require.NoError(t, s.CloseChannel(dropped, "", -1)) // its word is gone
}

// comes waits until a request of worker i is here through a channel.
func (n *Node) comes(t *testing.T, channel uint64, i int) {
	ch, err := n.channel(channel)
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		lacks := true
		require.True(t, n.driver.Under(func() { lacks = ch.Queue().Lacks(i) }))
		return !lacks
	}, 20*time.Second, time.Millisecond)
}

// decodes is a mesh of two workers and a server with a channel between them, whose handles are at and from. push sends
// the part of worker i of a message.
func decodes(t *testing.T) (m *mesh, at uint64, from []uint64, push func(i int)) {
	m = newMesh(t, openFabrics, shape{2, 1, 1})
	at, err := m.servers[0].OpenChannel("decode")
	require.NoError(t, err)
	for i, w := range m.workers {
		h, err := w.OpenChannel("decode")
		require.NoError(t, err)
		from = append(from, h)
		require.NoError(t, w.TellChannel(h, 0, "a"))
		require.NoError(t, m.servers[0].TellChannel(at, i, "b"))
	}
	return m, at, from, func(i int) {
		p, err := m.workers[i].BeginPushPull()
		require.NoError(t, err)
		require.NoError(t, p.AddPush(tensor(t, 1, 9)))
		require.NoError(t, m.workers[i].PushPullOn(from[i], p))
	}
}

// halfClose has worker 0 of decodes send its part of a message and close its side.
func (m *mesh) halfClose(t *testing.T, at uint64, from []uint64, push func(i int)) {
	s := m.servers[0]
	push(0)
	s.comes(t, at, 0)
	require.NoError(t, m.workers[0].CloseChannel(from[0], "", -1))
	require.Eventually(t, func() bool { return isOver(s.ChannelState(at, 0)) }, 20*time.Second, time.Millisecond)
}

// TestChannelHalfClosed: one worker has sent its part of a message and closed its side, and the other one may
// still send its part. A wait for the message ends in time.
func TestChannelHalfClosed(t *testing.T) {
	m, at, from, push := decodes(t)
	s := m.servers[0]
	var b batch
	m.halfClose(t, at, from, push)
	require.Equal(t, ErrAgain, s.TakeOn(at, &b, 50*time.Millisecond, false))
	require.Equal(t, ErrAgain, s.TakeOn(at, &b, channel.Afterwards+50*time.Millisecond, false))
	push(1)
	require.NoError(t, retried(func() error { return s.TakeOn(at, &b, 20*time.Second, true) }))
	require.Len(t, b.reqs, 2)
	require.True(t, isOver(s.TakeOn(at, &b, 20*time.Second, true)))

	waits := make(chan error, 1)
	push(1)
	go func() { waits <- retried(func() error { return s.TakeOn(at, &batch{}, 20*time.Second, true) }) }()
	require.NoError(t, m.workers[1].CloseChannel(from[1], "", -1))
	require.True(t, isOver(<-waits))
	require.NoError(t, s.CloseChannel(at, "", 20*time.Second))
	m.stop()
}

// TestChannelTakenByAnother: likewise while several threads wait for the message. Those that do not get it learn that
// there is no other.
func TestChannelTakenByAnother(t *testing.T) {
	m, at, from, push := decodes(t)
	s := m.servers[0]
	m.halfClose(t, at, from, push)
	const threads = 8
	took := make(chan error, threads)
	for i := range threads {
		go func() {
			took <- retried(func() error { return s.TakeOn(at, &batch{}, 15*time.Second, i%2 == 0) })
		}()
	}
	time.Sleep(2 * channel.Afterwards) // all have seen that a side is closed
	start := time.Now()
	push(1)
	got := 0
	for range threads {
		if err := <-took; err == nil {
			got++
		} else {
			require.True(t, isOver(err), "%v", err)
		}
	}
	require.Equal(t, 1, got)
	require.Less(t, time.Since(start), 10*time.Second)
	require.NoError(t, m.workers[1].CloseChannel(from[1], "", -1))
	require.NoError(t, s.CloseChannel(at, "", 20*time.Second))
	m.stop()
}
