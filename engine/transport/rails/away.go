package rails

import (
	"encoding/binary"
	"fmt"
	"slices"
	"time"
)

// A Fabric is told by Options.Watch over which members nothing can travel. The dialer of a Conn closes such a
// member as soon as another one can do its work. The other side tells the dialer, in a frame of kind
// ailing, and closes nothing: if both did, each could close the member that the other relies on. The
// last member is kept: what travels over it may come through later.

// away says why nothing can travel over a member Fabric.
type away struct {
	why  error         // nil: it works
	back chan struct{} // closed when it works again
}

const ailingLen = 1 + 8 // of a frame of kind ailing: a bit for each Fabric of the sender over which nothing can travel

// report takes what Options.Watch tells.
func (f *Fabric) report(member int, why error) {
	f.locked(func() {
		a := &f.away[member]
		switch {
		case why != nil && a.why == nil:
			f.ailing |= 1 << member
			a.back = make(chan struct{})
		case why == nil && a.why != nil:
			f.ailing &^= 1 << member
			close(a.back)
		}
		a.why = why
		for _, c := range slices.Clone(f.conns) {
			c.react()
		}
	})
}

// react does what is due since members of either side went away or came back.
func (c *Conn) react() {
	switch {
	case c.order.over:
	case c.order.dialer:
		c.shed()
	default:
		c.hint()
	}
}

// hint tells the dialer which of our Fabrics are away, once on each member.
func (c *Conn) hint() {
	if c.f.ailing == 0 && !c.hinted {
		return
	}
	c.hinted = true
	for _, r := range c.lives() {
		if !r.hinted || r.hint != c.f.ailing {
			r.hinted, r.hint = true, c.f.ailing
			r.push(entry{text: binary.LittleEndian.AppendUint64([]byte{byte(ailing)}, r.hint), item: item{kind: ailing}})
			r.flush()
		}
	}
	c.wake()
}

// hears takes what hint has told.
func (c *Conn) hears(data []byte) error {
	if len(data) != ailingLen || !c.order.dialer {
		return fmt.Errorf("rails: a frame of %d bytes says which members are away: want %d, and from who has accepted", len(data), ailingLen)
	}
	c.theirs = binary.LittleEndian.Uint64(data[1:])
	c.shed()
	return nil
}

// away says why nothing can travel over a member between our Fabric and the peer's, or nil.
func (c *Conn) away(ours, theirs int) error {
	if why := c.f.away[ours].why; why != nil {
		return why
	}
	if c.theirs>>theirs&1 != 0 {
		return fmt.Errorf("rails: nothing can travel over member %d of the peer, as it says", theirs)
	}
	return nil
}

// shed closes members that are away, if one is left that is not.
func (c *Conn) shed() {
	if c.f.ailing|c.theirs == 0 || !slices.ContainsFunc(c.lives(), func(r *rail) bool { return c.away(r.at, r.theirs) == nil }) {
		return
	}
	for _, r := range slices.Clone(c.rails) {
		if why := c.away(r.at, r.theirs); why != nil && !r.shut {
			r.wentDown(why)
		}
	}
}

// absent returns what to wait for before a keeper dials; nil: nothing.
func (k *keeper) absent() <-chan struct{} {
	k.c.f.mu.Lock()
	defer k.c.f.mu.Unlock()
	if a := &k.c.f.away[k.ours]; a.why != nil {
		return a.back
	}
	if k.c.away(k.ours, k.theirs) == nil {
		return nil
	}
	soon := make(chan struct{})
	time.AfterFunc(k.c.f.o.Pause, func() { close(soon) })
	return soon
}

// wait waits until both sides say that the member works. It is false if the Conn ends before.
func (k *keeper) wait() (waited, ok bool) {
	for {
		back := k.absent()
		if back == nil {
			return waited, true
		}
		select {
		case <-back:
			waited = true
		case <-k.c.ctx.Done():
			return waited, false
		}
	}
}
