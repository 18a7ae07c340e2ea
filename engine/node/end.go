package node

import (
	"errors"
	"time"

	"fserver/engine/cluster"
	"fserver/engine/trace"
)

// fail makes the node useless: everything that waits, and every later call,
// gets err. The first call counts. The next pass ends the connections of a member that has joined, so that the others take
// it for lost, and do not wait for it. While the cluster is not complete they have limits of their own, and say better who
// is missing; of a cluster that has ended nobody waits.
func (n *Node) fail(err error) {
	if !n.failure.CompareAndSwap(nil, &err) {
		return
	}
	_ = n.attempt(func() { n.table.Shut(err) })
	_ = n.attempt(func() { n.channels.Shut(err) })
	for i := range n.peers {
		_ = n.attempt(func() { n.side.Down(i, err) })
	}
	for _, b := range n.barriers {
		b.end(err)
	}
	for _, e := range n.sent {
		e.end(err)
	}
	n.ringMailbox()
	if n.scheduler == nil && n.phase.Load() != joining && !errors.As(err, new(*cluster.EndedError)) {
		for _, l := range n.links {
			n.ails(l, err, 0)
		}
	}
}

// failed is the error of fail, or nil.
func (n *Node) failed() error {
	if p := n.failure.Load(); p != nil {
		return *p
	}
	return nil
}

// finishLimit bounds how long the Close of a scheduler waits for members that are leaving.
const finishLimit = time.Second

// finish lets the members of a scheduler that is about to go leave in order, if they are
// about to.
func (n *Node) finish() {
	if n.scheduler == nil || n.phase.Load() != running || n.failed() != nil {
		return
	}
	parting := false
	n.driver.Under(func() {
		for looks := 1; looks <= 64; looks++ { // what has come counts; but it may come for ever
			if found, _ := (work{n}).Pass(trace.Now(), true); found == 0 {
				break
			}
		}
		var out []cluster.Output
		out, parting = n.scheduler.Finish(trace.Now())
		n.outputs(out)
	})
	if parting {
		n.reachesPhase(ended, finishLimit, false)
	}
}

// freeLimit bounds how long Close waits for memory of a GPU that does not end its work.
const freeLimit = 5 * time.Second

// shut ends the node: whoever waits, and every later call, gets err. The caller holds
// the token, which stays taken: nobody drives again. Each step is taken even if one
// before it panics.
func (n *Node) shut(err error) {
	n.die()
	n.phase.Store(ended)
	n.fail(err)
	var errs []error
	step := func(f func()) {
		caught := n.attempt(f) // which may append to errs
		errs = append(errs, caught)
	}
	for _, p := range n.planes {
		step(func() { errs = append(errs, p.Close()) })
	}
	step(n.side.Drain) // what was submitted meanwhile ends at once
	for _, p := range n.planes {
		step(func() { n.drain(p) })
	}
	step(n.table.Over)
	step(n.proxies.forget)
	if n.server != nil {
		step(func() { errs = append(errs, n.server.Close()) })
	}
	n.closeErr = errors.Join(errs...)
}

// Close ends the node at once; a scheduler whose members are leaving lets them do so
// first, for up to a second. Whoever waits gets ErrClosed. When it has
// returned, no goroutine, descriptor or foreign memory is in use any more, but for what
// gpu.Later puts off.
func (n *Node) Close() error {
	n.closeOnce.Do(func() {
		_ = n.attempt(n.finish)
		n.driver.Shut(ErrClosed) // unless a panic has
		if n.gpu != nil {
			n.unwatch()
			n.gpu.Later.Wait(freeLimit)
		}
		n.dials.Wait()
		n.driver.Join(func() { _ = n.attempt(n.side.Drain) }) // what ended behind shut
		n.driver.Close()
		_ = n.log.Sync()
	})
	return n.closeErr
}

// Free is Close, and gives back the words of the tickets too.
func (n *Node) Free() error {
	err := n.Close()
	n.freeOnce.Do(func() {
		n.driver.UnwatchAll()
		err = errors.Join(err, n.freeWords())
	})
	return err
}

func (n *Node) freeWords() error {
	if n.gpu != nil {
		n.gpu.close()
	}
	if n.table == nil { // it could not be opened
		return nil
	}
	return n.table.Free()
}
