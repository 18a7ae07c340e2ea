package node

import (
	"errors"
	"fmt"
	"io"
	"syscall"

	"fserver/cshim/cuda"
	"fserver/engine/channel"
	"fserver/engine/cluster"
	"fserver/engine/exchange"
	"fserver/engine/transport"
	"fserver/engine/wire"
)

type (
	// LostError says that a node is gone.
	LostError = cluster.LostError
	// TypeError says that an answer is of the wrong type.
	TypeError = exchange.TypeError
)

// RefusedError says that a server has refused a request.
type RefusedError = exchange.RefusedError

var (
	// ErrClosed says that the node has been closed.
	ErrClosed = fmt.Errorf("node: %w", errClosed)
	// ErrAgain says that the slice of a waiting call is over.
	ErrAgain = syscall.EAGAIN

	errClosed = errors.New("closed")
)

// TimeoutError says that the time of a whole operation is up.
type TimeoutError struct{ text string }

func (e *TimeoutError) Error() string { return e.text }

// settingError says that a setting or argument is wrong.
type settingError struct {
	text  string
	cause error // or nil
}

func (e *settingError) Error() string { return e.text }

func (e *settingError) Unwrap() error { return e.cause }

func badSetting(format string, args ...any) error {
	return &settingError{text: fmt.Sprintf(format, args...)}
}

// closedError turns what a transport says of its own end into ErrClosed.
func closedError(err error) error {
	if errors.Is(err, transport.ErrClosed) {
		return ErrClosed
	}
	return err
}

// reason is why a connection has ended, for people.
func reason(err error) string {
	switch {
	case err == nil:
		return "the connection ended"
	case errors.Is(err, io.ErrUnexpectedEOF):
		return "the connection was cut: its process has died"
	case errors.Is(err, io.EOF):
		return "it closed the connection"
	}
	return err.Error()
}

// scarce says whether err is that this process lacks memory or descriptors.
func scarce(err error) bool {
	return cuda.Is(err, cuda.OutOfMemory) ||
		errors.Is(err, syscall.ENOMEM) || errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE)
}

// isOver reports whether err is that a side has closed the channel.
func isOver(err error) bool { return channel.IsOver(err) || exchange.IsOver(err) }

// is reports whether err is, or wraps, a T.
func is[T error](err error) bool {
	var e T
	return errors.As(err, &e)
}

// Errno is the code that fserver.h gives an error.
func Errno(err error) syscall.Errno {
	var errno syscall.Errno
	switch {
	case is[*LostError](err):
		return syscall.ECONNRESET
	case is[*exchange.ShapeError](err), is[*channel.ShapeError](err), is[*TypeError](err):
		return syscall.EMSGSIZE
	case errors.Is(err, exchange.ErrFull), is[*cluster.FullError](err):
		return syscall.EXFULL
	case is[*RefusedError](err):
		return syscall.EREMOTEIO
	case is[*TimeoutError](err), is[*channel.TimeoutError](err):
		return syscall.ETIMEDOUT
	case is[*settingError](err), is[*cluster.RefusedError](err), refusal(err):
		return syscall.EINVAL
	case errors.Is(err, errClosed), errors.Is(err, exchange.ErrLeft), isOver(err), is[*cluster.EndedError](err), errors.Is(err, cluster.ErrNotRunning):
		return syscall.ESHUTDOWN
	case errors.Is(err, exchange.ErrNoTicket):
		return syscall.EBADF
	case errors.As(err, &errno):
		return errno
	}
	return syscall.EIO
}

// refusal says whether err comes from settings that do not fit each other, so
// that trying again does not help.
func refusal(err error) bool { return is[*wire.HandshakeError](err) || is[*transport.TLSError](err) }
