package node

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"fserver/engine/cluster"
	"fserver/engine/exchange"
	"fserver/engine/trace"
	"fserver/engine/wire"
)

type (
	// Destination is whom a message is for.
	Destination = wire.Destination
	// Roles is a set of roles.
	Roles = wire.Roles
	// Message is what another node has sent.
	Message = wire.Message
	// Status is what is known of a node.
	Status = cluster.Status
)

// maxAsked bounds the messages whose outcome nobody has asked for.
const maxAsked = 4096

// Send sends a message, of at most wire.MaxMessage bytes, which are copied. WaitSent says what has
// become of it. The cluster must be complete: before that, and when this node leaves, nothing is sent.
func (n *Node) Send(to Destination, data []byte) (uint64, error) {
	if !n.driver.Own() {
		return 0, n.failed()
	}
	defer n.driver.Disown()
	if err := n.failed(); err != nil {
		return 0, err
	}
	if n.phase.Load() == joining {
		return 0, badSetting("node: send before the cluster is complete (wait for init)")
	}
	if len(n.sent) >= maxAsked {
		return 0, &cluster.FullError{Text: fmt.Sprintf("node: the outcome of %d messages has not been asked for: wait for them, or drop them", maxAsked)}
	}
	seq, out, err := n.machine.Send(trace.Now(), to, data)
	switch {
	case err == nil:
	case is[*LostError](err), is[*cluster.FullError](err), errors.Is(err, cluster.ErrNotRunning):
		return 0, err
	default:
		return 0, &settingError{err.Error(), err}
	}
	n.sent[seq] = new(ending)
	n.outputs(out)
	n.reschedule()
	return seq, nil
}

// WaitSent waits until all whom a message is for have taken it, or one of them will not, at most limit;
// then ErrAgain.
func (n *Node) WaitSent(seq uint64, limit time.Duration) error {
	var e *ending
	if !n.driver.Under(func() { e = n.sent[seq] }) {
		return n.failed()
	}
	if e == nil {
		return fmt.Errorf("node: %w: no message %d is under way", exchange.ErrNoTicket, seq)
	}
	if !n.driver.Await(e.done.Load, limit, true) {
		return ErrAgain
	}
	n.DropSent(seq)
	return e.err
}

// DropSent says that nobody will ask what has become of a message. It is sent all the same.
func (n *Node) DropSent(seq uint64) { n.driver.Under(func() { delete(n.sent, seq) }) }

// Receive gives the oldest message to take, which keeps it with an error. It waits for one, at
// most limit; then ErrAgain. It does not drive the node.
func (n *Node) Receive(take func(*Message) error, limit time.Duration) error {
	timer := time.NewTimer(max(0, min(limit, forever)))
	defer timer.Stop()
	for {
		if err := n.failed(); err != nil {
			n.ringMailbox() // others may wait
			return err
		}
		if n.phase.Load() == joining {
			return badSetting("node: receive before the cluster is complete (wait for init)")
		}
		if n.mails.Load() > 0 {
			if taken, err := n.takeMail(take); taken || err != nil {
				return err
			}
			continue
		}
		select {
		case <-n.mailbox:
		case <-timer.C:
			return ErrAgain
		}
	}
}

// takeMail gives a message to take, and reports whether there was one.
func (n *Node) takeMail(take func(*Message) error) (taken bool, err error) {
	if !n.driver.Own() {
		return false, n.failed()
	}
	defer n.driver.Disown()
	count, first := n.machine.Mail()
	if first == nil {
		return false, nil
	}
	if err := take(first); err != nil {
		n.ringMailbox()
		return false, err
	}
	n.machine.Received()
	n.mails.Store(int64(count - 1))
	if count > 1 {
		n.ringMailbox()
	}
	return true, nil
}

// mailed notes that a message has come.
func (n *Node) mailed() {
	count, _ := n.machine.Mail()
	n.mails.Store(int64(count))
	n.ringMailbox()
}

// ringMailbox wakes one call of Receive.
func (n *Node) ringMailbox() {
	select {
	case n.mailbox <- struct{}{}:
	default: // one is about to wake
	}
}

// Statuses returns what this node knows of the scheduler and of all workers and servers.
func (n *Node) Statuses() (all []Status, err error) {
	if err := n.failed(); err != nil {
		return nil, err
	}
	n.driver.Under(func() {
		all = slices.Clone(n.machine.Statuses(trace.Now()))
		if l := n.controls[0]; n.member != nil && l != nil && len(all) > 0 {
			all[0].Run = l.hello.Epoch
		}
	})
	if all == nil {
		return nil, badSetting("node: members before the cluster is complete (wait for init)")
	}
	return all, nil
}
