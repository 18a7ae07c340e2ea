package node

import (
	"go.uber.org/zap"

	"fserver/engine/transport"
)

// A panic is a fault of the engine. It ends the node where it happened, with an error
// that carries the stack, and nothing else of the process. The Driver catches what happens under
// the token and in its goroutines, and every call from outside defers a function that calls Panicked.

// Caught is the error of a panic that no node has part in: p is what recover returned.
func Caught(p any) error { return transport.Caught(p) }

// Panicked closes the node because of a panic in a call of it: p is what recover returned. It returns
// the error that all calls get from now on.
func (n *Node) Panicked(p any) error { return n.driver.Panicked(p) }

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
