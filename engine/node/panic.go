package node

import (
	"go.uber.org/zap"

	"fserver/engine/transport"
)

// A panic is a fault of the engine. It ends the node where it happened, with an error
// that carries the stack, and nothing else of the process. Whoever holds the token
// defers giveBack or disown, every goroutine starts in spawn, and every call from
// outside defers a function that calls Panicked.

// Caught is the error of a panic that no node has part in: p is what recover returned.
func Caught(p any) error { return transport.Caught(p) }

// spawn starts a goroutine of the node, which calls f and then done.
func (n *Node) spawn(f, done func()) {
	go func() {
		defer done()
		defer func() {
			if p := recover(); p != nil {
				_ = n.Panicked(p)
			}
		}()
		f()
	}()
}

// help calls f in a goroutine that Close waits for.
func (n *Node) help(f func()) {
	n.helpers.Add(1)
	n.spawn(f, func() { n.helpers.Add(-1) })
}

// Panicked closes the node because of a panic in a call or goroutine of it, which does
// not hold the token: p is what recover returned. It returns the error that all calls
// get from now on.
func (n *Node) Panicked(p any) error {
	err := transport.Caught(p)
	n.callers.Add(1) // Close waits for this
	defer n.callers.Add(-1)
	if n.own() {
		n.shut(err)
	}
	return err
}

// crashed is Panicked for whoever holds the token, which stays taken. The panic goes on
// with the error that it returns.
func (n *Node) crashed(p any) error {
	err := transport.Caught(p)
	n.shut(err)
	return err
}

// giveBack ends what its caller has done under the token. It is to be deferred.
func (n *Node) giveBack() {
	if p := recover(); p != nil {
		panic(n.crashed(p))
	}
	n.token.Store(false)
}

// under calls f while it holds the token, and reports whether it could: else the node
// is closed.
func (n *Node) under(f func()) bool {
	if !n.own() {
		return false
	}
	defer n.disown()
	f()
	return true
}

// attempt calls f, a step of the node's end that is to be followed by others whatever
// happens.
func (n *Node) attempt(f func()) (err error) {
	defer func() {
		if p := recover(); p != nil {
			e := transport.Caught(p)
			n.log.Error("panic while the node ends", zap.Error(e))
			err = e
		}
	}()
	f()
	return nil
}
