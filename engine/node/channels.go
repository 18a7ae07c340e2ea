package node

import (
	"fmt"
	"sync"
	"time"

	"fserver/engine/exchange"
	"fserver/engine/trace"
	"fserver/engine/wire"
)

// channels are the stream channels of a node by their handles.
type channels struct {
	*exchange.Channels
	mu   sync.Mutex
	next uint64
	all  map[uint64]*exchange.Channel
}

func newChannels(peers int) *channels {
	return &channels{Channels: exchange.NewChannels(peers), all: map[uint64]*exchange.Channel{}}
}

// get is the channel of a handle.
func (c *channels) get(h uint64) (*exchange.Channel, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if ch := c.all[h]; ch != nil {
		return ch, nil
	}
	return nil, fmt.Errorf("node: channel %d: %w", h, errClosed)
}

// OpenChannel opens a stream channel with all peers of the rail, which are to be
// told of this side by TellChannel.
func (n *Node) OpenChannel(name string) (uint64, error) {
	if err := n.ready(n.scheduler == nil, "channel", "worker or server"); err != nil {
		return 0, err
	}
	if !n.own() {
		return 0, n.failed()
	}
	defer n.disown()
	ch, err := n.channels.Open(name)
	if err != nil {
		return 0, err
	}
	if n.server != nil {
		n.server.Attach(ch)
	}
	c := n.channels
	c.mu.Lock()
	defer c.mu.Unlock()
	c.next++
	c.all[c.next] = ch
	return c.next, nil
}

// WatchChannel has the 32-bit word at address become 1 when the channel ends and 2
// when a peer has closed its side. It must stay valid until CloseChannel has
// returned nil, or WatchChannel has with another address, or with 0 for none.
func (n *Node) WatchChannel(h uint64, address uintptr) error {
	ch, err := n.channels.get(h)
	if err != nil {
		return err
	}
	ch.Watch(exchange.WordAt(address))
	return nil
}

// TellChannel tells peer i about this side.
func (n *Node) TellChannel(h uint64, i int, text string) error {
	ch, err := n.channels.get(h)
	if err != nil {
		return err
	}
	if len(text) > wire.MaxChannelText {
		return exchange.Shapef("node: channel %q: its description has %d bytes, and there is room for %d: use fewer tensors", ch.Name(), len(text), wire.MaxChannelText)
	}
	if i < 0 || i >= len(n.peers) {
		return exchange.Shapef("node: channel %q: %d peers, and none of number %d", ch.Name(), len(n.peers), i)
	}
	if !n.own() {
		return n.failed()
	}
	defer n.disown()
	if err := ch.ErrOf(i); err != nil {
		return err
	}
	l := n.peers[i]
	if !n.up(l) {
		return &LostError{Role: n.rail[i].Role, Rank: n.rail[i].Rank, Reason: "not connected"}
	}
	n.sendFrame(l, wire.AppendChannel(nil, &wire.Channel{Name: ch.Name(), Text: text}))
	return nil
}

// channelTold is met when peer i has told of its side of a channel, or will not.
type channelTold struct {
	ch *exchange.Channel
	i  int
}

func (c channelTold) met() bool {
	_, ok, err := c.ch.Told(c.i)
	return ok || err != nil
}

// ChannelText waits for what peer i tells of its side of a channel, at most limit;
// then ErrAgain.
func (n *Node) ChannelText(h uint64, i int, limit time.Duration) (string, error) {
	ch, err := n.channels.get(h)
	if err != nil {
		return "", err
	}
	if !await(n, channelTold{ch, i}, limit, false) {
		return "", ErrAgain
	}
	text, _, err := ch.Told(i)
	return text, err
}

// ChannelState is nil as long as all peers have their sides of a channel open.
func (n *Node) ChannelState(h uint64) error {
	ch, err := n.channels.get(h)
	if err != nil {
		return err
	}
	return ch.Err()
}

// PushPullOn is PushPull through a channel: at the servers TakeOn gives it.
func (n *Node) PushPullOn(h uint64, t *Ticket) error {
	ch, err := n.channels.get(h)
	if err == nil {
		err = ch.Err()
	}
	if err != nil {
		n.Abandon(t)
		return err
	}
	t.Through(ch)
	return n.PushPull(t)
}

// afterwards is how long a peer's last messages may take that were sent before it
// closed its side.
const afterwards = 200 * time.Millisecond

// requestsOn is met when a channel has a request of each worker, or has ended.
type requestsOn struct {
	ch   *exchange.Channel
	ends bool // it is over when a peer has closed its side
}

func (c requestsOn) met() bool { return c.ch.Taken() || c.ends && c.ch.Err() != nil }

// TakeOn gives one request of each worker on a channel to s. It waits for at most
// limit; then ErrAgain.
func (n *Node) TakeOn(h uint64, s BatchSink, limit time.Duration, spin bool) error {
	if err := n.ready(n.server != nil, "recv on a channel", "server"); err != nil {
		return err
	}
	ch, err := n.channels.get(h)
	if err != nil {
		return err
	}
	for end := trace.Now() + int64(min(limit, forever)); ; limit = time.Duration(end - trace.Now()) {
		if !await(n, requestsOn{ch, true}, limit, spin) {
			return ErrAgain
		}
		if err := ch.Err(); err != nil && !ch.Taken() {
			if !exchange.IsOver(err) || !await(n, requestsOn{ch, false}, min(limit, afterwards), false) {
				return err
			}
		}
		if taken, err := n.takeOn(ch, s); taken || err != nil {
			return err
		}
	}
}

func (n *Node) takeOn(ch *exchange.Channel, s BatchSink) (taken bool, err error) {
	if !n.own() {
		return false, n.failed()
	}
	defer n.submit()
	defer n.giveBack()
	reqs := n.server.Take(ch)
	if reqs == nil {
		return false, nil
	}
	if err := s.Batch(reqs); err != nil {
		return false, err
	}
	n.server.Hand(ch)
	return true, nil
}

// alone is met when all peers have closed their sides of a channel.
type alone struct {
	n  *Node
	ch *exchange.Channel
}

func (c alone) met() bool { return c.ch.Alone() || c.n.failed() != nil }

// CloseChannel closes this side, tells the peers why if that is not empty (nor longer
// than a text of TellChannel), and waits until they have closed theirs, at most limit;
// then ErrAgain, and the next call goes on waiting. A limit below 0 does not wait for
// them. Whatever it returns but ErrAgain, the handle is gone.
func (n *Node) CloseChannel(h uint64, why string, limit time.Duration) error {
	ch, err := n.channels.get(h)
	if err != nil {
		return nil
	}
	if len(why) > wire.MaxChannelText {
		why = ""
	}
	if n.under(func() { n.endChannel(ch, why) }) {
		if limit >= 0 && !await(n, alone{n, ch}, limit, false) {
			return ErrAgain
		}
		n.under(func() { n.leaveChannel(ch) })
	}
	ch.Forget()
	c := n.channels
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.all, h)
	return nil
}

// endChannel ends this side of a channel and tells the peers, once.
func (n *Node) endChannel(ch *exchange.Channel, why string) {
	if !ch.End() {
		return
	}
	for _, l := range n.peers {
		if n.up(l) {
			n.sendFrame(l, wire.AppendChannel(nil, &wire.Channel{Name: ch.Name(), Closes: true, Text: why}))
		}
	}
}

// leaveChannel drops what a channel that is closed on this side still has to do.
func (n *Node) leaveChannel(ch *exchange.Channel) {
	if n.server != nil {
		n.server.Detach(ch)
	}
	for i := range n.peers {
		if n.worker != nil && ch.Parted(i) {
			n.worker.Leave(i, ch.Name())
		}
	}
}
