package transport

import (
	"fmt"
	"runtime/debug"
)

// PanicError is a panic that was caught, with the functions that were running.
type PanicError struct {
	Value any    // what panic was given
	Stack string // of the goroutine, as package debug prints it
}

func (e *PanicError) Error() string {
	return fmt.Sprintf("engine: panic: %v\n%s", e.Value, e.Stack)
}

// Caught is the error of a panic: p is what recover returned, in a deferred function
// that calls Caught. It returns nil for nil, and p itself where a *PanicError was
// raised again.
func Caught(p any) *PanicError {
	switch e := p.(type) {
	case nil:
		return nil
	case *PanicError:
		return e
	}
	return &PanicError{p, string(debug.Stack())}
}
