package node

import (
	"cmp"
	"fmt"

	"fserver/engine/progress"
)

// work is a node as its Driver sees it.
type work struct{ *Node }

var _ progress.Work = work{}

// Look implements progress.Work. It looks at the events of the GPU, and at whether that still works.
func (n work) Look(now int64) {
	if n.gpu == nil || n.failure.Load() != nil {
		return
	}
	if err := n.gpu.look(now); err != nil {
		n.driver.Under(func() { n.fail(fmt.Errorf("node: %v does not work any more: %w", n.gpu.device(), err)) })
	}
}

// Pass implements progress.Work.
func (n work) Pass(now int64, all bool) (found int, ended bool) {
	n.Drain()
	found = n.poll(all)
	carried := n.attend(now)
	if found == 0 || carried > 0 { // else there is another pass; a Poll that ends back-pressure may find nothing
		n.Drain()
	}
	found += carried
	if now >= n.nextAiling() {
		n.endAiling(now)
	}
	due := n.driver.Due(now)
	if due {
		n.tick()
		n.reschedule()
	}
	return found, found > 0 || due || n.table.News()
}

// Next implements progress.Work: when tick must be called. Of a node that has failed, tick does nothing.
func (n work) Next() int64 {
	if n.failed() != nil {
		return n.nextAiling()
	}
	return min(n.sayAt, n.machine.Next(), n.nextOfPeers(), n.nextAiling())
}

// reschedule is to be called when what Next returns may have changed. For the owner.
func (n *Node) reschedule() { n.driver.Schedule(work{n}.Next()) }

// Drain implements progress.Work.
func (n work) Drain() {
	n.side.Drain()
	if n.byes {
		n.sayByes(false)
	}
	n.unstick()
}

// News implements progress.Work.
func (n work) News() bool { return n.table.News() }

// Unsent implements progress.Work.
func (n work) Unsent() bool {
	if n.side.Backlog() {
		return true
	}
	for _, p := range n.peers {
		if p.link != nil && p.link.conn.Unsent() {
			return true
		}
	}
	return false
}

// Shut implements progress.Work.
func (n work) Shut(err error) { n.shut(err) }

// Pending implements progress.Work.
func (n work) Pending() bool { return n.table.Pending() }

// Held implements progress.Work.
func (n work) Held() bool { return n.table.Held() }

// Arm implements progress.Work.
func (n work) Arm() (again bool) {
	for _, p := range n.planes {
		again = !p.lost.Load() && p.Arm() || again
	}
	return again
}

// Watch opens a watch that writes to fd, an eventfd of the caller's: how an event loop waits, which sleeps on
// descriptors of its own.
func (n *Node) Watch(fd int) (uint64, error) { return n.driver.Watch(fd) }

// Arm has a watch written to when something may have ended next. It is to be called before the
// caller looks, so that nothing is missed. The node is driven until then.
func (n *Node) Arm(id uint64) error {
	switch {
	case !n.driver.Arm(id):
		return badSetting("node: watch %d is not open", id)
	case n.driver.Stopped():
		return cmp.Or(n.failed(), ErrClosed)
	}
	return nil
}

// Unwatch closes a watch. Its eventfd is not written to any more when it has returned.
func (n *Node) Unwatch(id uint64) { n.driver.Unwatch(id) }
