package transport

import (
	"fmt"
	"path"
	"runtime"
	"strings"
)

// PanicError is a panic that was caught, with the functions that were running.
type PanicError struct {
	Value any    // what panic was given
	Stack string // a line for each function, the one that panicked first
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
	return &PanicError{p, stack()}
}

// stack is the functions below the panic that is being caught.
func stack() string {
	var pcs [64]uintptr
	frames := runtime.CallersFrames(pcs[:runtime.Callers(0, pcs[:])])
	var b strings.Builder
	panicked := false
	for more := true; more; {
		var f runtime.Frame
		f, more = frames.Next()
		switch {
		case f.Function == "runtime.gopanic":
			panicked = true
			b.Reset() // of two panics the first counts
		case !panicked || b.Len() == 0 && strings.HasPrefix(f.Function, "runtime."):
		default:
			fmt.Fprintf(&b, "\tat %s (%s:%d)\n", strings.TrimPrefix(f.Function, "fserver/engine/"), path.Base(f.File), f.Line)
		}
	}
	return b.String()
}
