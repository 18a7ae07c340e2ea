package node

import (
	"fmt"
	"time"

	"fserver/engine/channel"
	"fserver/engine/exchange"
	"fserver/engine/trace"
	"fserver/engine/wire"
)

// channel is that of a handle.
func (n *Node) channel(h uint64) (*channel.Channel, error) {
	if ch := n.channels.Get(h); ch != nil {
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
	if !n.driver.Own() {
		return 0, n.failed()
	}
	defer n.driver.Disown()
	ch, err := n.channels.Open(name)
	if err != nil {
		return 0, err
	}
	if n.server != nil {
		at := n.server.Attach(ch.Name())
		at.Heard = ch.Heard
		ch.Attach(at)
	}
	return ch.Handle(), nil
}

// WatchChannel has channel.WatchWords words of 32 bits at address say what has become of the
// channel (see channel.Channel.Watch). They must stay valid until CloseChannel has returned
// nil, or WatchChannel has with another address, or with 0 for none.
func (n *Node) WatchChannel(h uint64, address uintptr) error {
	ch, err := n.channel(h)
	if err != nil {
		return err
	}
	ch.Watch(channel.WordsAt(address))
	return nil
}

// TellChannel tells peer i about this side.
func (n *Node) TellChannel(h uint64, i int, text string) error {
	ch, err := n.channel(h)
	if err != nil {
		return err
	}
	if len(text) > wire.MaxChannelText {
		return exchange.Shapef("node: channel %q: its description has %d bytes, and there is room for %d: use fewer tensors", ch.Name(), len(text), wire.MaxChannelText)
	}
	if !n.driver.Own() {
		return n.failed()
	}
	defer n.driver.Disown()
	if err := ch.ErrOf(i); err != nil {
		return err
	}
	p := n.peers[i]
	if p.link == nil {
		return p.lostError("not connected")
	}
	n.sendFrame(p.link, wire.Append(nil, wire.TypeChannel, &wire.Channel{Name: ch.Name(), Text: text}))
	return nil
}

// ChannelText waits for what peer i tells of its side of a channel, at most limit;
// then ErrAgain. With take, it gives no text that fits into so many bytes again.
func (n *Node) ChannelText(h uint64, i int, take int, limit time.Duration) (string, error) {
	ch, err := n.channel(h)
	if err != nil {
		return "", err
	}
	told := func() bool {
		_, ok, err := ch.Told(i)
		return ok || err != nil
	}
	if !n.driver.Await(told, limit, false) {
		return "", ErrAgain
	}
	text, ok, err := ch.Told(i)
	switch {
	case ok && take > 0 && len(text) <= take:
		ch.Read(i)
	case err == nil && !ok: // another caller has taken it
		err = ErrAgain
	}
	return text, err
}

// ChannelState is nil as long as all peers have their sides of a channel open. With the number
// of a push_pull on it, only the servers count that have not answered it.
func (n *Node) ChannelState(h, id uint64) error {
	ch, err := n.channel(h)
	if err != nil {
		return err
	}
	err = ch.Err()
	if id != 0 && n.worker != nil && isOver(err) {
		n.driver.Under(func() { err = ch.Missing(func(i int) bool { return n.worker.Awaits(id, i) }) })
	}
	return err
}

// PushPullOn is PushPull through a channel: at the servers TakeOn gives it.
func (n *Node) PushPullOn(h uint64, t *Ticket) error {
	ch, err := n.channel(h)
	if err == nil {
		err = ch.Err()
	}
	if err != nil {
		n.Abandon(t)
		return err
	}
	t.Through(ch.Name())
	return n.PushPull(t)
}

// TakeOn gives one request of each worker on a channel to s. It waits for at most
// limit; then ErrAgain.
func (n *Node) TakeOn(h uint64, s BatchSink, limit time.Duration, spin bool) error {
	if err := n.ready(n.server != nil, "recv on a channel", "server"); err != nil {
		return err
	}
	ch, err := n.channel(h)
	if err != nil {
		return err
	}
	q := ch.Queue()
	closed := 0            // peers that have closed their sides and whose parts of the message are here,
	emptied := q.Emptied() // until another thread takes it
	for end := trace.Now() + int64(min(limit, forever)); ; limit = time.Duration(end - trace.Now()) {
		news := func() bool { return q.Full() || ch.Closed() > closed || q.Emptied() != emptied }
		if !n.driver.Await(news, limit, spin) {
			return ErrAgain
		}
		closed, emptied = ch.Closed(), q.Emptied()
		if err := ch.Err(); err != nil && !q.Full() {
			switch {
			case !isOver(err):
			case n.driver.Await(q.Full, min(limit, channel.Afterwards), false):
				err = nil
			default:
				n.driver.Under(func() { err = ch.Missing(q.Lacks) })
			}
			if err != nil && !q.Full() {
				return err
			}
		}
		if taken, err := n.take(s, func() ([]*Request, error) { return n.server.Take(ch.Name()), nil }); taken || err != nil {
			return err
		}
	}
}

// CloseChannel closes this side, tells the peers why if that is not empty (nor longer
// than a text of TellChannel), and waits until they have closed theirs, at most limit;
// then ErrAgain, and the next call goes on waiting. A limit below 0 does not wait for
// them. Whatever it returns but ErrAgain, the handle is gone.
func (n *Node) CloseChannel(h uint64, why string, limit time.Duration) error {
	ch, err := n.channel(h)
	if err != nil {
		return nil
	}
	if len(why) > wire.MaxChannelText {
		why = ""
	}
	if n.driver.Under(func() { n.endChannel(ch, why) }) {
		alone := func() bool { return ch.Alone() || n.failed() != nil }
		if limit >= 0 && !n.driver.Await(alone, limit, false) {
			return ErrAgain
		}
		var p *channel.Proxy
		n.driver.Under(func() {
			n.leaveChannel(ch)
			p = n.proxies.of(ch)
		})
		if p != nil && ch.Alone() { // its memory is the caller's as soon as the Fabrics have let go of it
			n.driver.Await(p.IsOver, partingLimit, false)
		}
	}
	ch.Forget()
	return nil
}

// partingLimit bounds how long CloseChannel waits for what takes a few passes.
const partingLimit = 100 * time.Millisecond

// endChannel ends this side of a channel and tells the peers, once.
func (n *Node) endChannel(ch *channel.Channel, why string) {
	if !ch.End() {
		return
	}
	n.proxies.end(ch)
	n.side.Drain() // what was sent through it goes first
	for _, p := range n.peers {
		if l := p.link; l != nil {
			n.sendFrame(l, wire.Append(nil, wire.TypeChannel, &wire.Channel{Name: ch.Name(), Closes: true, Text: why}))
		}
	}
}

// leaveChannel drops what a channel that is closed on this side still has to do.
func (n *Node) leaveChannel(ch *channel.Channel) {
	defer n.proxies.sweep()
	if ch.Leave() && n.server != nil {
		n.server.Detach(ch.Name())
	}
	for i := range n.peers {
		if ch.Parted(i) {
			n.channelOver(i, ch.Name())
		}
	}
}

// channelOver takes note that this side and peer i have closed theirs of a channel.
func (n *Node) channelOver(i int, name string) {
	if n.worker != nil {
		n.worker.ChannelOver(i, name)
		n.unstick() // nothing of it is written any more
	} else {
		n.server.ChannelOver(i, name)
	}
}
