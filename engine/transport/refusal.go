package transport

import "errors"

// ErrLooked is what Env.Refused is told of a connection that its peer has
// closed before it said anything, as who only looks whether the port is open.
var ErrLooked = errors.New("the peer closed the connection before it sent anything")

// AgainError is why an attempt of Connect failed after which another one may succeed at once: one side has changed what
// it uses for the connection.
type AgainError struct{ Err error }

func (e *AgainError) Error() string { return e.Err.Error() }

// Unwrap returns why the attempt failed.
func (e *AgainError) Unwrap() error { return e.Err }

// TLSError says why two sides do not talk. Trying again does not help.
type TLSError struct {
	Reason string
	// Sides says who has TLS: OnlyHere, OnlyThere or Both; empty: the peer, which
	// sent neither TLS nor what a node sends, is none.
	Sides string
}

func (e *TLSError) Error() string { return e.Reason }

// Who has TLS, of two sides that do not talk.
const (
	OnlyHere  = "only here"
	OnlyThere = "only there"
	Both      = "both"
)
