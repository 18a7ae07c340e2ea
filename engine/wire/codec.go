// Package wire is the codec of everything that travels: the handshake, the
// control frames of the cluster and the frames of push-pull. Append functions
// never fail and never allocate when dst has room; Parse functions trust
// nothing: every length is bounded before it is used. Most frames are a type with a
// walk, which does both. Request and Response, which each push_pull has, are
// written by hand, and faster. docs/wire.md is the description for people,
// testdata/ holds golden frames.
//
// Integers are little-endian and of fixed width, except counts and sizes that
// are mostly small, which are unsigned varints (LEB128, as encoding/binary).
package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Version of the wire format. It changes with every change that an older
// build would not understand.
const Version = 11

// Type is the first byte of every frame.
type Type uint8

// The frames. Those below 32 belong to the cluster, those from 32 to
// push-pull, and those from 240, in hello.go, to the handshake. No frame is of type 255:
// a transport may start messages of its own with it.
const (
	TypeRegister  Type = 1  // member -> scheduler: I am here
	TypeRoster    Type = 2  // scheduler -> member: these are all members
	TypeReady     Type = 3  // member -> scheduler: I am connected
	TypeGo        Type = 4  // scheduler -> member: all are connected
	TypeBarrier   Type = 5  // member -> scheduler: I have reached the barrier
	TypeRelease   Type = 6  // scheduler -> member: the barrier is open
	TypeLeave     Type = 7  // member -> scheduler: I want to leave
	TypeLeft      Type = 8  // scheduler -> member: all leave now
	TypeLost      Type = 9  // scheduler -> member: a member is gone
	TypeRefuse    Type = 10 // scheduler -> member: you cannot take part, and why
	TypeHeartbeat Type = 11 // both ways: I am alive
	TypeJoined    Type = 12 // scheduler -> member: a member has come back
	TypePing      Type = 13 // scheduler -> member, and back at once: are you alive
	TypeWaiting   Type = 14 // scheduler -> member: what the cluster waits for before it runs
	TypeDone      Type = 15 // server -> scheduler: my workers have left, so my end is no loss
	TypeSend      Type = 16 // member -> scheduler: a message for other nodes
	TypeMessage   Type = 17 // scheduler -> member: a message of another node
	TypeTaken     Type = 18 // member -> scheduler: I have that message, or no room for it
	TypeSent      Type = 19 // scheduler -> member: what has become of your message
	TypeParted    Type = 20 // scheduler -> member: a member has left, and the others go on

	TypePlan     Type = 32 // worker -> server: the shape of a push-pull, under a number
	TypeNeed     Type = 33 // worker -> server: receive buffers must grow
	TypeBuffers  Type = 34 // server -> worker: where keys are received
	TypeRequest  Type = 35 // worker -> server: a push-pull of a plan is complete
	TypeResponse Type = 36 // server -> worker: an answer is complete
	TypeBye      Type = 37 // either: I close this connection in good order
	TypeUp       Type = 38 // worker -> server, and back: I use this connection
	TypeRecall   Type = 39 // worker -> server: push_pulls that have failed, not to be delivered
	TypeRecalled Type = 40 // server -> worker: those of them that are not
	TypeChannel  Type = 41 // either: I open, or close, my side of a stream channel
	TypeRefused  Type = 42 // server -> worker: a push_pull that is not answered, and why
	TypeRegroup  Type = 43 // worker -> server, and back: the members of the rail have changed
)

// ErrShort says that a frame ends too early.
var ErrShort = errors.New("wire: the frame is too short")

// FrameType is the type of a frame, or 0 if it is empty.
func FrameType(b []byte) Type {
	if len(b) == 0 {
		return 0
	}
	return Type(b[0])
}

// reader takes values off a frame; after the first error it gives zeros.
type reader struct {
	b   []byte
	err error
}

func (r *reader) fail(err error) {
	if r.err == nil {
		r.err = err
	}
	r.b = nil
}

func (r *reader) u8() uint8 {
	if len(r.b) < 1 {
		r.fail(ErrShort)
		return 0
	}
	v := r.b[0]
	r.b = r.b[1:]
	return v
}

func (r *reader) bool() bool {
	v := r.u8()
	if v > 1 {
		r.fail(fmt.Errorf("wire: a boolean is %d, want 0 or 1", v))
	}
	return v == 1
}

func (r *reader) u64() uint64 {
	if len(r.b) < 8 {
		r.fail(ErrShort)
		return 0
	}
	v := binary.LittleEndian.Uint64(r.b)
	r.b = r.b[8:]
	return v
}

func (r *reader) uvarint() uint64 {
	v, n := binary.Uvarint(r.b)
	if n <= 0 {
		r.fail(ErrShort)
		return 0
	}
	r.b = r.b[n:]
	return v
}

// count reads a number of things of which each takes at least size bytes, so
// that what a peer announces can never make us allocate more than it sent.
func (r *reader) count(what string, limit, size int) int {
	n := r.uvarint()
	if r.err != nil {
		return 0
	}
	if n > uint64(limit) || n > uint64(len(r.b)/size) {
		r.fail(fmt.Errorf("wire: the frame announces %d %s: more than %d, or more than it holds", n, what, limit))
		return 0
	}
	return int(n)
}

// bytes reads a counted byte string of at most limit bytes. It aliases the
// frame.
func (r *reader) bytes(what string, limit int) []byte {
	n := r.count(what, limit, 1)
	v := r.b[:n]
	r.b = r.b[n:]
	return v
}

// text reads a text for people: what cannot be printed is replaced, so that it
// can go into a message as it is.
func (r *reader) text(what string, limit int) string {
	return strings.Map(func(c rune) rune {
		if c == utf8.RuneError || !unicode.IsPrint(c) {
			return '?'
		}
		return c
	}, string(r.bytes(what, limit)))
}

// name reads a text that is compared or used, and refuses it where text would
// change it.
func (r *reader) name(what string, limit int) string {
	raw := *r
	s := r.text(what, limit)
	if r.err == nil && s != string(raw.bytes(what, limit)) {
		r.fail(fmt.Errorf("wire: %s: not printable", what))
		return ""
	}
	return s
}

// number reads a number that is at most limit.
func (r *reader) number(what string, limit uint64) uint64 {
	v := r.uvarint()
	if v > limit {
		r.fail(fmt.Errorf("wire: %s %d: want at most %d", what, v, limit))
		return 0
	}
	return v
}

// kind takes the type byte.
func (r *reader) kind(want Type) {
	if got := Type(r.u8()); r.err == nil && got != want {
		r.fail(fmt.Errorf("wire: frame of type %d, want %d", got, want))
	}
}

// end is the error so far, or one if bytes are left over.
func (r *reader) end() error {
	if r.err == nil && len(r.b) != 0 {
		return fmt.Errorf("wire: the frame has %d bytes too many", len(r.b))
	}
	return r.err
}

func appendBool(dst []byte, v bool) []byte {
	if v {
		return append(dst, 1)
	}
	return append(dst, 0)
}

func appendBytes[T ~[]byte | ~string](dst []byte, v T) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(v)))
	return append(dst, v...)
}

// clip returns the first limit bytes of s, or fewer: no rune is cut.
func clip(s string, limit int) string {
	if len(s) <= limit {
		return s
	}
	for limit > 0 && !utf8.RuneStart(s[limit]) {
		limit--
	}
	return s[:limit]
}
