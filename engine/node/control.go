package node

import (
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"fserver/engine/cluster"
	"fserver/engine/exchange"
	"fserver/engine/peers"
	"fserver/engine/trace"
	"fserver/engine/transport"
	"fserver/engine/wire"
)

// control hands an input to the state machine of the cluster.
func (n *Node) control(in cluster.Input) {
	n.outputs(n.machine.Step(trace.Now(), in))
	n.reschedule()
}

// tick tells the state machine the time, and ends what is overdue here.
func (n *Node) tick() {
	if n.failed() == nil {
		n.overdue(trace.Now())
		n.sayMissing(trace.Now())
		n.control(cluster.Input{Kind: cluster.Tick})
	}
}

// outputs does what the state machine asks for. That may step the machine again,
// which ends the validity of out, so that it is copied: to the end of todo, behind
// those of the calls that this one is inside of.
func (n *Node) outputs(out []cluster.Output) {
	first := len(n.todo)
	n.todo = append(n.todo, out...)
	defer func() {
		clear(n.todo[first:])
		n.todo = n.todo[:first]
	}()
	changed, gone := false, error(nil)
	for i := range out {
		o := n.todo[first+i]
		switch o.Kind {
		case cluster.Send:
			if l := n.controls[o.Conn]; l != nil {
				n.sendFrame(l, o.Frame)
			}
		case cluster.Close:
			if l := n.controls[o.Conn]; l != nil {
				n.unlink(l)
				l.conn.Close()
			}
		case cluster.Log:
			n.log.Info(o.Text)
		case cluster.Warn:
			n.log.Warn(o.Text)
		case cluster.Redial:
			if ctx := n.dialContext(); ctx.Err() == nil && n.failed() == nil { // else the time is up, as WaitReady says
				n.dialling(func() { n.join(ctx) })
			}
		case cluster.Roster:
			n.named()
			n.later.Store(o.Late)
			n.regroup(true, nil)
			n.introduced(o.Peers, o.Late)
		case cluster.Running:
			n.runs()
		case cluster.Released:
			if b := n.barriers[o.Seq]; b != nil {
				b.end(nil)
			}
		case cluster.Mail:
			n.mailed()
		case cluster.Sent:
			if e := n.sent[o.Seq]; e != nil {
				e.end(o.Err)
			}
		case cluster.Lost, cluster.Joined:
			changed = true
			if err := n.changed(&o); err != nil {
				gone = err
			}
		case cluster.Overdue:
			n.endBarriers(o.Seqs, o.Err)
		case cluster.Ended:
			n.over(o.Err)
		}
	}
	if changed { // once for all: the machine knows all of them already
		n.regroup(gone != nil, gone)
	}
}

// runs takes the news that the cluster runs.
func (n *Node) runs() {
	n.cancel() // the bring-up is over
	n.phase.CompareAndSwap(joining, running)
	n.stepAll(peers.Running)
	if n.server != nil {
		n.sayDone() // they may have left before it came
	}
	if n.scheduler == nil { // which has said more than that
		n.log.Info("the cluster is running")
	}
}

// maxStuck bounds the control frames that a peer does not take.
const maxStuck = 1024

// sendFrame posts a control frame, now or, under back-pressure or if mayPost says so, later. A connection that we have opened
// and that takes no more ends after downLimit, when what has arrived there has been given: its end may have been reported
// before its link was known. The end of any other is reported by itself.
func (n *Node) sendFrame(l *link, frame []byte) {
	channel := wire.FrameType(frame) == wire.TypeChannel
	if len(l.frames) == 0 {
		if !channel || n.mayPost(l, frame) {
			// A device may wait for what is said of a channel.
			n.frame[0] = transport.Op{Kind: transport.OpFrame, Frame: frame, Passes: channel}
			k, err := l.conn.Post(n.frame[:])
			if err != nil && l.kind != linkMember && n.links[l.conn] == l {
				n.ails(l, err, downLimit)
			}
			if k == 1 || err != nil {
				return
			}
		}
		n.stuck = append(n.stuck, l)
	}
	l.frames = append(l.frames, frame)
}

// mayPost reports whether a frame of a channel can go. It waits for the server's answer to the Up. One that closes a
// channel also waits for what the worker is about to send through it: the next channel of that name gets none of it.
func (n *Node) mayPost(l *link, frame []byte) bool {
	if !l.peer.Heard() || n.worker == nil {
		return l.peer.Heard()
	}
	c, err := wire.Parse[wire.Channel](frame, wire.TypeChannel)
	return err != nil || !c.Closes || !n.worker.Sends(l.peer.index, c.Name)
}

// unstick posts what sendFrame could not.
func (n *Node) unstick() {
	stuck := n.stuck
	n.stuck = nil
	for _, l := range stuck {
		frames := l.frames
		l.frames = nil
		if n.links[l.conn] != l { // it has ended
			continue
		}
		if len(frames) > maxStuck {
			n.breach(l, fmt.Errorf("node: the peer does not read its messages (%d frames are queued)", len(frames)))
			continue
		}
		for _, f := range frames {
			n.sendFrame(l, f)
		}
		n.flushed(l)
	}
}

// nodeLost takes the news that a node is gone, which ends the barriers in seqs.
// What waits for a peer ends when its own connection does, or here if that is
// silent.
func (n *Node) nodeLost(err error, seqs []uint64) {
	var lost *LostError
	var p *peer
	if errors.As(err, &lost) {
		p = n.place(lost.Role, lost.Rank)
	}
	name := zap.Skip()
	if p != nil {
		name = zap.String("peer", p.Member().Name())
	}
	n.log.Warn("a node is lost", name, zap.Error(err))
	if n.scheduler != nil && n.phase.Load() == joining {
		n.fail(err) // without it the cluster cannot come to be
		return
	}
	if n.phase.Load() == leaving && n.stopErr == nil {
		n.stopErr = err
	}
	n.endBarriers(seqs, err)
	if p != nil {
		n.step(p, peers.Input{Kind: peers.Gone, Err: err})
		n.meet()
	}
}

func (n *Node) endBarriers(seqs []uint64, err error) {
	for _, seq := range seqs {
		if b := n.barriers[seq]; b != nil {
			b.end(err)
		}
	}
}

// over takes the end of the cluster.
func (n *Node) over(err error) {
	if n.phase.Load() == leaving {
		n.sayByes(true)
		if n.stopErr == nil {
			n.stopErr = err
		}
		n.phase.Store(ended)
		return
	}
	if n.scheduler != nil && err == nil {
		n.phase.Store(ended)       // all have left; stop will find it so
		for _, e := range n.sent { // an answer that comes now does not count
			e.end(&cluster.EndedError{Reason: "all members have left"})
		}
		return
	}
	if err == nil {
		err = &cluster.EndedError{Reason: "all other members have left"}
	}
	n.fail(err)
}

// ending is the end of something that a caller waits for.
type ending struct {
	done atomic.Bool
	err  error // valid when done
}

func (e *ending) end(err error) {
	if !e.done.Load() {
		e.err = err
		e.done.Store(true)
	}
}

// barrier is one call of Barrier.
type barrier struct {
	ending
	flags    wire.BarrierFlags
	deadline time.Time
	timeout  time.Duration
}

// Barrier begins a barrier; WaitBarrier waits for it. flags are wire.BarrierFlags. timeout
// bounds the whole; 0 means the setting.
func (n *Node) Barrier(flags uint32, timeout time.Duration) (uint64, error) {
	f := wire.BarrierFlags(min(flags, wire.BarrierKinds)) // a larger number is none
	if n.member == nil {
		return 0, badSetting("node: barrier: the scheduler takes part in none (call it on workers and servers)")
	}
	if !f.Valid() {
		return 0, badSetting("node: barrier: the flags %#x name neither servers nor workers, or something unknown (set include_server or include_client)", flags)
	}
	if !f.Has(wire.Role(n.cfg.Role)) {
		return 0, badSetting("node: barrier of %v called by a %v, which does not take part (include its role)", f, n.cfg.Role)
	}
	if timeout <= 0 {
		timeout = n.cfg.BarrierTimeout
	}
	if !n.driver.Own() {
		return 0, n.failed()
	}
	defer n.driver.Disown()
	if err := n.failed(); err != nil {
		return 0, err
	}
	seq, out, err := n.member.Barrier(trace.Now(), f)
	if err != nil {
		return 0, err
	}
	n.barriers[seq] = &barrier{flags: f, timeout: timeout, deadline: time.Now().Add(timeout)}
	n.outputs(out)
	return seq, nil
}

// WaitBarrier waits for a barrier, at most limit; then ErrAgain.
func (n *Node) WaitBarrier(seq uint64, limit time.Duration) error {
	var b *barrier
	if !n.driver.Under(func() { b = n.barriers[seq] }) {
		return n.failed()
	}
	if b == nil {
		return fmt.Errorf("node: %w: no barrier %d is under way", exchange.ErrNoTicket, seq)
	}
	done := n.driver.Await(b.done.Load, min(limit, time.Until(b.deadline)), true)
	if !done && time.Now().Before(b.deadline) {
		return ErrAgain
	}
	if !n.driver.Own() {
		return n.failed()
	}
	defer n.driver.Disown()
	delete(n.barriers, seq)
	if !b.done.Load() {
		n.member.GiveUp(seq)
		return &TimeoutError{fmt.Sprintf("node: %v was not reached by all within %v", b.flags, b.timeout)}
	}
	return b.err
}

// DropBarrier says that nobody waits for a barrier any more. This node has
// reached it all the same: its next barrier of the same kind goes on with it.
func (n *Node) DropBarrier(seq uint64) {
	if !n.driver.Own() {
		return
	}
	defer n.driver.Disown()
	if n.barriers[seq] != nil {
		delete(n.barriers, seq)
		n.member.GiveUp(seq)
	}
}

// reachesPhase waits, driving, until the node has come to a phase or failed, or until limit has passed:
// then it returns false.
func (n *Node) reachesPhase(phase int32, limit time.Duration, spin bool) bool {
	return n.driver.Await(func() bool { return n.phase.Load() >= phase || n.failure.Load() != nil }, limit, spin)
}

// WaitReady waits until the cluster is complete, at most limit; then ErrAgain.
// When the time of the whole bring-up is over it says what was missing.
func (n *Node) WaitReady(limit time.Duration) error {
	done := n.reachesPhase(running, min(limit, time.Until(n.deadline)), true)
	if err := n.failed(); err != nil {
		return err
	}
	if done {
		return nil
	}
	if time.Now().Before(n.deadline) {
		return ErrAgain
	}
	return n.late()
}

// late fails the node because the cluster did not come to be in time.
func (n *Node) late() error {
	n.dials.Wait() // its goroutines end with the deadline and know more
	n.driver.Under(func() {
		if n.failed() != nil || n.phase.Load() != joining {
			return
		}
		n.fail(&TimeoutError{fmt.Sprintf("node: the cluster is not complete after %v: %s (start the missing nodes, or raise FSERVER_INIT_TIMEOUT)", n.cfg.InitTimeout, n.missing())})
	})
	return n.failed()
}

// Stop leaves the cluster together with the others, waiting at most limit;
// then ErrAgain. With any other result the node is closed: the error says who
// was lost meanwhile, or that not all left in time.
func (n *Node) Stop(limit time.Duration) error {
	open := n.driver.Under(func() {
		if n.failed() == nil && n.phase.Load() <= running {
			n.leave()
		}
	})
	if !open {
		return n.Close() // closed before, or ended by a panic
	}
	if !n.reachesPhase(ended, limit, true) {
		return ErrAgain
	}
	n.sendLast(min(limit, lastLimit))
	var err error
	n.owned(func() { err = n.stopErr }) // a node that has failed may still be told of losses
	if e := (*transport.PanicError)(nil); errors.As(n.failed(), &e) {
		err = e
	}
	if over := (*cluster.EndedError)(nil); errors.As(err, &over) {
		err = &TimeoutError{fmt.Sprintf("node: stop: %s (FSERVER_STOP_TIMEOUT); this node has left alone", over.Reason)}
	}
	if cerr := n.Close(); err == nil {
		err = cerr
	}
	return err
}

// lastLimit bounds how long Stop waits for what is not sent yet.
const lastLimit = 200 * time.Millisecond

// sendLast drives until all is sent to the peers, at most for limit: a Bye may be behind an answer that waits for the GPU.
func (n *Node) sendLast(limit time.Duration) {
	held := func(p *peer) bool { return p.link != nil && len(p.link.frames) != 0 }
	for end := time.Now().Add(limit); n.failed() == nil && time.Now().Before(end); {
		unsent := false
		n.driver.Under(func() { unsent = work{n}.Unsent() || slices.ContainsFunc(n.peers, held) })
		if !unsent {
			return
		}
		n.driver.Await(func() bool { return false }, time.Millisecond, true)
	}
}

// leave says goodbye. The scheduler stays for as long as others do.
func (n *Node) leave() {
	was := n.phase.Swap(leaving)
	if n.scheduler != nil {
		if was == joining {
			n.phase.Store(ended)
		}
		return
	}
	n.side.Drain() // a thread that has answered may not have come to it
	n.stepAll(peers.Leaving)
	n.outputs(n.member.Leave(trace.Now()))
}
