package node

import (
	"fmt"
	"slices"
	"time"

	"fserver/engine/channel"
	"fserver/engine/exchange"
	"fserver/engine/mem"
	"fserver/engine/progress"
	"fserver/engine/trace"
)

// proxies are those of the stream channels whose messages the engine carries. The Driver has somebody look at
// their words, as those that have not ended are Streams of it. For the owner.
type proxies struct {
	driver *progress.Driver
	all    []*channel.Proxy // those that have ended stay until nobody touches their memory
}

// Carried is what a proxy is made of.
type Carried struct {
	Words    uintptr // channel.ProxyWords of 64 bits
	Rows     uintptr // of a worker: of each tensor of Out, 64 bits
	Counts   uintptr // of a server: of each tensor of In, likewise
	Out, In  []Tensor
	Lands    bool // what a worker pushes is received in In of the servers, by keys of the channel's own
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
	n.driver.Enter() // Close waits for this
	defer n.driver.Leave()
	if err := n.mayCarry(c.In, c.Out); err != nil {
		return fmt.Errorf("node: channel %q: %w", ch.Name(), err)
	}
	kind := channel.Asks
	var by channel.Carrier
	if n.worker != nil {
		by, err = n.worker.Carry(ch.Name(), c.Out, c.In, c.Lands, channel.CountsAt(c.Rows, len(c.Out)))
	} else {
		if kind = channel.Answers; len(c.In) == 0 {
			kind = channel.Sends
		}
		by, err = n.server.Carry(ch.Queue().(*exchange.Arrivals), c.In, c.Out, c.Lands, channel.CountsAt(c.Counts, len(c.In)))
	}
	if err != nil {
		return err
	}
	p := channel.NewProxy(ch, kind, channel.ProxyWordsAt(c.Words), by, c.Patience)
	if !n.driver.Own() {
		return n.failed()
	}
	defer n.driver.Disown()
	if ch.Ended() {
		by.Forget()
		return errClosed
	}
	n.proxies.all = append(n.proxies.all, p)
	n.driver.Streams(1)
	n.driver.Stirred(trace.Now())
	n.driver.Stir()
	return nil
}

// mayCarry refuses tensors on GPUs, unless the peers read and write there. Frames of channels pass what waits for a GPU.
func (n *Node) mayCarry(lists ...[]Tensor) error {
	for _, tensors := range lists {
		for i := range tensors {
			d := tensors[i].Dev
			if err := n.takes(d); err != nil {
				return fmt.Errorf("tensor %d %w", i, err)
			}
			if d != mem.CPU && !n.table.Direct(d) {
				return badSetting("tensor %d is on %v, which some peers do not reach by themselves: give one on the CPU (fs_gpu_direct)", i, d)
			}
		}
	}
	return nil
}

// Direct reports whether each peer's path reads and writes memory of the node's GPU by itself.
func (n *Node) Direct() (bool, error) {
	if err := n.ready(n.scheduler == nil, "gpu_direct", "worker or server"); err != nil {
		return false, err
	}
	own := n.gpu.device()
	return own != mem.CPU && n.table.Direct(own), nil
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
				ps.driver.Streams(-1)
			}
		}
		ended = ended || p.Ended()
	}
	if ended {
		ps.sweep()
	}
	if found > 0 {
		ps.driver.Stirred(now)
	}
	return found
}

// sweep forgets the proxies whose memory nobody touches any more. For the owner.
func (ps *proxies) sweep() {
	ps.all = slices.DeleteFunc(ps.all, func(p *channel.Proxy) bool { return p.Over(false) })
}

// of is the proxy of a channel, or nil. For the owner.
func (ps *proxies) of(ch *channel.Channel) *channel.Proxy {
	if i := slices.IndexFunc(ps.all, func(p *channel.Proxy) bool { return p.Of(ch) }); i >= 0 {
		return ps.all[i]
	}
	return nil
}

// end ends the proxy of a channel, or all with nil. For the owner.
func (ps *proxies) end(ch *channel.Channel) {
	for _, p := range ps.all {
		if (ch == nil || p.Of(ch)) && !p.Ended() {
			p.End()
			ps.driver.Streams(-1)
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
