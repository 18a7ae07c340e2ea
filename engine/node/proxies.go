package node

import (
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"fserver/engine/channel"
	"fserver/engine/exchange"
	"fserver/engine/trace"
)

// proxies are those of the stream channels whose messages the engine carries. A stream writes a word
// and tells nobody, so as long as there is one somebody looks at the words: who drives, in each pass,
// and who sleeps, ever more seldom.
type proxies struct {
	running atomic.Int32     // those that have not ended
	stirred atomic.Int64     // when one of them has done something; nanoseconds
	all     []*channel.Proxy // of the owner; those that have ended stay until nobody touches their memory
}

// How long after a proxy has done something somebody looks all the time, and how long he sleeps
// between looks at most after that: a sixteenth of the time since.
const (
	lookAllTheTime = 100 * time.Microsecond
	lookAtLast     = time.Millisecond
)

// Carried is what a proxy is made of.
type Carried struct {
	Words    uintptr // channel.ProxyWords of 64 bits
	Rows     uintptr // of a worker: of each tensor of Out, 64 bits
	Counts   uintptr // of a server: of each tensor of In, likewise
	Out, In  []Tensor
	Patience time.Duration
}

// CarryChannel has the engine exchange the messages of a channel for device streams. It may take
// milliseconds. The memory of c, and its words, must stay valid until WordOver is set, or for ever if
// there is an error after the channel had ended; no other messages may use the channel.
func (n *Node) CarryChannel(h uint64, c Carried) error {
	ch, err := n.channel(h)
	if err != nil {
		return err
	}
	n.helpers.Add(1) // Close waits for this
	defer n.helpers.Add(-1)
	kind := channel.Asks
	var by channel.Carrier
	if n.worker != nil {
		by, err = n.worker.Carry(ch.Name(), c.Out, c.In, channel.CountsAt(c.Rows, len(c.Out)))
	} else {
		if kind = channel.Answers; len(c.In) == 0 {
			kind = channel.Sends
		}
		by, err = n.server.Carry(ch.Queue().(*exchange.Lane), c.In, c.Out, channel.CountsAt(c.Counts, len(c.In)))
	}
	if err != nil {
		return err
	}
	p := channel.NewProxy(ch, kind, channel.ProxyWordsAt(c.Words), by, c.Patience)
	if !n.own() {
		return n.failed()
	}
	defer n.disown()
	if ch.Ended() {
		return errClosed
	}
	n.proxies.all = append(n.proxies.all, p)
	n.proxies.running.Add(1)
	n.proxies.stirred.Store(trace.Now())
	n.stir()
	return nil
}

// attend has the proxies do what can be done now, and returns how much that was. For the owner.
func (n *Node) attend(now int64) (found int) {
	ps := &n.proxies
	if len(ps.all) == 0 {
		return 0
	}
	ended := false
	for _, p := range ps.all {
		if !p.Ended() {
			if found += p.Step(now); p.Ended() {
				ps.running.Add(-1)
			}
		}
		ended = ended || p.Ended()
	}
	if ended {
		ps.sweep()
	}
	if found > 0 {
		ps.stirred.Store(now)
	}
	return found
}

// sweep forgets the proxies whose memory nobody touches any more. For the owner.
func (ps *proxies) sweep() {
	ps.all = slices.DeleteFunc(ps.all, func(p *channel.Proxy) bool { return p.Over(false) })
}

// end ends the proxy of a channel, or all with nil. For the owner.
func (ps *proxies) end(ch *channel.Channel) {
	for _, p := range ps.all {
		if (ch == nil || p.Of(ch)) && !p.Ended() {
			p.End()
			ps.running.Add(-1)
		}
	}
}

// forget ends all proxies for good: nobody touches memory any more.
func (ps *proxies) forget() {
	ps.end(nil)
	for _, p := range ps.all {
		p.Over(true)
	}
	ps.all = nil
}

// lull is how long a sleeper may sleep before he looks at the words; 0: not at all. Without proxies it
// is longSleep.
func (ps *proxies) lull() time.Duration {
	if ps.running.Load() == 0 {
		return longSleep
	}
	idle := time.Duration(trace.Now() - ps.stirred.Load())
	if idle < lookAllTheTime {
		return 0
	}
	return min(idle/16, lookAtLast)
}

// doze waits on the descriptors for less than a millisecond.
func (n *Node) doze(d time.Duration) error {
	fds := [...]unix.PollFd{{Fd: int32(n.epoll), Events: unix.POLLIN}}
	t := unix.NsecToTimespec(int64(max(0, d)))
	_, err := unix.Ppoll(fds[:], &t, nil)
	return err
}
