package node

import (
	"errors"
	"fmt"
	"io"
	"syscall"

	"fserver/cshim/cuda"
	"fserver/engine/cluster"
	"fserver/engine/exchange"
	"fserver/engine/transport"
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
type settingError struct{ text string }

func (e *settingError) Error() string { return e.text }

func badSetting(format string, args ...any) error {
	return &settingError{fmt.Sprintf(format, args...)}
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

// Errno is the code that fserver.h gives an error.
func Errno(err error) syscall.Errno {
	var (
		shape   *exchange.ShapeError
		types   *exchange.TypeError
		denied  *RefusedError
		lost    *LostError
		refused *cluster.RefusedError
		over    *cluster.EndedError
		timeout *TimeoutError
		setting *settingError
		errno   syscall.Errno
	)
	switch {
	case errors.As(err, &lost):
		return syscall.ECONNRESET
	case errors.As(err, &shape), errors.As(err, &types):
		return syscall.EMSGSIZE
	case errors.Is(err, exchange.ErrFull):
		return syscall.EXFULL
	case errors.As(err, &denied):
		return syscall.EREMOTEIO
	case errors.As(err, &timeout):
		return syscall.ETIMEDOUT
	case errors.As(err, &setting), errors.As(err, &refused), refusal(err):
		return syscall.EINVAL
	case errors.Is(err, errClosed), errors.Is(err, exchange.ErrLeft), exchange.IsOver(err), errors.As(err, &over), errors.Is(err, cluster.ErrNotRunning):
		return syscall.ESHUTDOWN
	case errors.Is(err, exchange.ErrNoTicket):
		return syscall.EBADF
	case errors.As(err, &errno):
		return errno
	}
	return syscall.EIO
}
