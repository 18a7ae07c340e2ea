package wire

import (
	"bytes"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
)

// The messages of the handshake, which comes before the first frame:
//
//	dialer                     listener
//	HELLO                ->
//	                     <-    WELCOME, proof
//	PROOF, proof         ->
//	                     <-    ACCEPT
//
// Either side may send REJECT instead and close. Proofs are empty where there
// is no secret.
//
// These numbers, the layout of HELLO and WELCOME up to the build, and the
// layout of REJECT are the same in every version of the wire, so that any two
// builds can tell each other that they differ.
const (
	TypeHello   Type = 240 // dialer: who I am
	TypeWelcome Type = 241 // listener: who I am, and my proof
	TypeProof   Type = 242 // dialer: my proof
	TypeAccept  Type = 243 // listener: the connection is open
	TypeReject  Type = 244 // either: why it is not
)

const (
	magic   = "fsrv"
	maxName = 255 // build and cluster id, bytes
)

// CapGPU is the capability bit of a node which may have tensors on a GPU: a peer that writes to it says
// what has to be copied there.
const CapGPU uint64 = 1 << 9

// Hello is what one side says about itself.
type Hello struct {
	Version uint32 // of the wire
	Build   string // for people, at most 255 bytes
	Caps    uint64 // capabilities, one bit each
	Cluster string // printable, at most 255 bytes
	Role    Role
	Rank    int32 // -1: not known
	Epoch   uint64
	Secret  bool // it has a secret, gives proof of it and wants one
	Nonce   [32]byte
}

// who names a side for people.
func (h *Hello) who() string {
	switch {
	case h.Role == RoleScheduler:
		return "the scheduler"
	case h.Rank < 0:
		return "a " + h.Role.String()
	}
	return fmt.Sprintf("%v %d", h.Role, h.Rank)
}

func (h *Hello) walk(c *codec) {
	if !c.parses {
		c.out = append(c.out, magic...)
	} else if left, ok := bytes.CutPrefix(c.b, []byte(magic)); ok {
		c.b = left
	} else {
		c.fail(errors.New("wire: magic number is missing"))
	}
	half(c, &h.Version)
	if c.words("bytes of a build", &h.Build, maxName); h.Version != Version {
		c.fail(errVersion)
	}
	c.word(&h.Caps)
	c.label("bytes of a cluster id", &h.Cluster, maxName)
	octet(c, "role", &h.Role, RoleServer)
	half(c, &h.Rank)
	c.word(&h.Epoch)
	c.flag(&h.Secret)
	if !c.parses {
		c.out = append(c.out, h.Nonce[:]...)
	} else if n := copy(h.Nonce[:], c.b); n < len(h.Nonce) {
		c.fail(ErrShort)
	} else {
		c.b = c.b[n:]
	}
}

// half takes a number of 32 bits.
func half[T ~int32 | ~uint32](c *codec, v *T) {
	if !c.parses {
		c.out = binary.LittleEndian.AppendUint32(c.out, uint32(*v))
	} else if len(c.b) < 4 {
		c.fail(ErrShort)
	} else {
		*v, c.b = T(binary.LittleEndian.Uint32(c.b)), c.b[4:]
	}
}

// errVersion says that a hello is of another version of the wire. Only Version
// and Build of what was parsed are set.
var errVersion = errors.New("wire: the peer uses another wire version")

// parseHello takes a hello of type t off b; rest is what follows it.
func parseHello(b []byte, t Type) (h Hello, rest []byte, err error) {
	if got := FrameType(b); len(b) != 0 && got != t {
		return h, nil, fmt.Errorf("wire: message of type %d, want %d", got, t)
	}
	c := codec{reader: reader{b: b[min(1, len(b)):]}, parses: true}
	h.walk(&c)
	return h, c.b, c.err
}

// ParseHello parses what Handshake.Hello gives.
func ParseHello(b []byte) (Hello, error) {
	t := TypeHello
	if FrameType(b) == TypeWelcome {
		t = TypeWelcome
	}
	h, rest, err := parseHello(b, t)
	if err == nil && len(rest) != 0 {
		err = fmt.Errorf("wire: the message has %d bytes too many", len(rest))
	}
	return h, err
}

// SamePeer reports whether two handshakes were with one process: what Handshake.Hello gave is equal but
// for the nonce, and for a rank that the process did not know yet.
func SamePeer(a, b []byte) bool {
	x, err := ParseHello(a)
	y, bad := ParseHello(b)
	x.Nonce, y.Nonce = [32]byte{}, [32]byte{}
	if x.Rank < 0 || y.Rank < 0 {
		x.Rank, y.Rank = 0, 0
	}
	return err == nil && bad == nil && x == y
}

// HandshakeError says why two sides do not talk. Trying again does not help.
type HandshakeError struct {
	Reason string // in words that fit both ends
	Remote bool   // the peer refused us
	Secret string // SecretDiffers, SecretOnlyHere or SecretOnlyThere; empty: another reason
}

// How the secrets of two sides that do not talk compare.
const (
	SecretDiffers   = "differs"
	SecretOnlyHere  = "only here"
	SecretOnlyThere = "only there"
)

// sameSecret ends each reason that is about the secret.
const sameSecret = "FSERVER_SECRET must be the same on all nodes (or the text in FSERVER_SECRET_FILE)"

func (e *HandshakeError) Error() string {
	if e.Remote {
		return "wire: handshake: refused by the peer: " + e.Reason
	}
	return "wire: handshake: " + e.Reason
}

// Handshake is one run of the handshake on one side. It does no I/O: Next
// turns a message of the peer into the message to it. When it is done without
// an error, both sides have the same version of the wire and the same cluster
// id, their roles have something to say to each other, and, with a secret,
// each has proved to know it to the other: HMAC-SHA-256 over the side, both
// hellos and so both nonces. What was proved is who opened the connection; the
// bytes that follow are not protected. Whoever connects is given the listener's
// proof, and may guess secrets against it: a secret is long and random.
type Handshake struct {
	secret   []byte
	dialer   bool
	me, peer Hello
	mine     []byte // our hello as sent
	theirs   []byte // the peer's hello as received
	start    bool   // the dialer has not begun
	next     Type   // what we wait for; 0: nothing
	done     bool
}

// NewHandshake begins a handshake. It sets Version, Secret and Nonce of me
// itself. An empty secret is none. The secret is not changed and must not be.
func NewHandshake(me Hello, secret []byte, dialer bool) *Handshake {
	me.Version = Version
	return newHandshake(me, secret, dialer)
}

func newHandshake(me Hello, secret []byte, dialer bool) *Handshake {
	me.Secret = len(secret) != 0
	rand.Read(me.Nonce[:])
	h := &Handshake{secret: secret, dialer: dialer, me: me, start: dialer}
	if dialer {
		h.mine = Append(nil, TypeHello, &me)
	} else {
		h.mine = Append(nil, TypeWelcome, &me)
		h.next = TypeHello
	}
	return h
}

// Hello is the peer's hello, for ParseHello; nil until the handshake is done.
func (h *Handshake) Hello() []byte {
	if !h.done {
		return nil
	}
	return h.theirs
}

// Next takes the peer's next message (nil at the dialer's start) and returns
// the message to send, if any. When done is true the peer is trusted once out
// has been sent. With an error, out (if any) tells the peer why, and the
// connection is to be closed. in is not kept.
func (h *Handshake) Next(in []byte) (out []byte, done bool, err error) {
	if h.start {
		h.start, h.next = false, TypeWelcome
		return h.mine, false, nil
	}
	want := h.next
	h.next = 0
	switch {
	case want == 0:
		return h.reject("a message came when none was expected")
	case FrameType(in) == TypeReject:
		reason := rejection(in)
		return nil, false, &HandshakeError{reason, true, h.secrets(reason)}
	}
	switch want {
	case TypeHello:
		rest, reason := h.greet(in, TypeHello)
		if reason == "" && len(rest) != 0 {
			reason = "bytes follow the hello"
		}
		if reason != "" {
			return h.reject(reason)
		}
		h.next = TypeProof
		return h.prove(bytes.Clone(h.mine), "listener"), false, nil
	case TypeWelcome:
		rest, reason := h.greet(in, TypeWelcome)
		if reason == "" {
			reason = h.verify(rest, "listener")
		}
		if reason != "" {
			return h.reject(reason)
		}
		h.next = TypeAccept
		return h.prove([]byte{byte(TypeProof)}, "dialer"), false, nil
	case TypeProof:
		if FrameType(in) != TypeProof {
			return h.reject(fmt.Sprintf("the peer sent a message of type %d instead of its proof", FrameType(in)))
		}
		if reason := h.verify(in[1:], "dialer"); reason != "" {
			return h.reject(reason)
		}
		h.done = true
		return []byte{byte(TypeAccept)}, true, nil
	default: // TypeAccept
		if len(in) != 1 || FrameType(in) != TypeAccept {
			return h.reject(fmt.Sprintf("the peer sent a message of type %d and %d bytes instead of the end of the handshake", FrameType(in), len(in)))
		}
		h.done = true
		return nil, true, nil
	}
}

func (h *Handshake) reject(reason string) ([]byte, bool, error) {
	return appendBytes([]byte{byte(TypeReject)}, clip(reason, maxReason)), false, &HandshakeError{Reason: reason, Secret: h.secrets(reason)}
}

// secrets returns HandshakeError.Secret for a reason. The sides compare proofs only when both have
// a secret, and only then is the peer's hello kept.
func (h *Handshake) secrets(reason string) string {
	switch {
	case !strings.HasSuffix(reason, sameSecret):
		return ""
	case h.theirs != nil:
		return SecretDiffers
	case h.me.Secret:
		return SecretOnlyHere
	}
	return SecretOnlyThere
}

// rejection is the peer's reason in a REJECT.
func rejection(in []byte) string {
	r := reader{b: in[1:]}
	reason := r.text("bytes of a reason", maxReason)
	if r.end() != nil || reason == "" {
		return "it gives no reason"
	}
	return reason
}

// greet takes the peer's hello of type t off in and judges it; rest is what
// follows it, reason why the two cannot talk.
func (h *Handshake) greet(in []byte, t Type) (rest []byte, reason string) {
	peer, rest, err := parseHello(in, t)
	if err != nil && err != errVersion {
		return nil, "the first message is not a hello: " + strings.TrimPrefix(err.Error(), "wire: ") + " (does fserver listen on this port?)"
	}
	d, l := &h.me, &peer
	if !h.dialer {
		d, l = l, d
	}
	switch {
	case err == errVersion:
		return nil, fmt.Sprintf("the node that connects has wire version %d (build %q), the node that accepts has wire version %d (build %q): "+
			"install the same version of fserver on all nodes (fserver --version prints it)", d.Version, d.Build, l.Version, l.Build)
	case d.Cluster != l.Cluster:
		return nil, fmt.Sprintf("%s is of cluster %q, %s of cluster %q: FSERVER_CLUSTER must be the same on all nodes",
			d.who(), d.Cluster, l.who(), l.Cluster)
	case d.Secret != l.Secret:
		if l.Secret {
			d, l = l, d
		}
		return nil, fmt.Sprintf("%s has a secret, %s has none: %s", d.who(), l.who(), sameSecret)
	case d.Role == RoleScheduler || l.Role == RoleWorker || d.Role == RoleServer && l.Role == RoleServer:
		return nil, fmt.Sprintf("%s connects to %s: only members to the scheduler, and workers to servers (is one of the addresses wrong?)",
			d.who(), l.who())
	}
	h.peer = peer
	h.theirs = bytes.Clone(in[:len(in)-len(rest)])
	return rest, ""
}

// prove appends our proof, that of the named side, to dst.
func (h *Handshake) prove(dst []byte, side string) []byte {
	if !h.me.Secret {
		return dst
	}
	return append(dst, h.proof(side)...)
}

// verify checks the peer's proof, that of the named side.
func (h *Handshake) verify(got []byte, side string) (reason string) {
	if !h.me.Secret && len(got) == 0 || h.me.Secret && hmac.Equal(got, h.proof(side)) {
		return ""
	}
	return fmt.Sprintf("the proof of %s (the %s) is wrong: %s", h.peer.who(), side, sameSecret)
}

// proof is over the side as well, so that no side's can be given back to it as
// the other's.
func (h *Handshake) proof(side string) []byte {
	dialer, listener := h.mine, h.theirs
	if !h.dialer {
		dialer, listener = listener, dialer
	}
	m := hmac.New(sha256.New, h.secret)
	var b []byte
	b = appendBytes(b, "fserver handshake proof of the "+side)
	b = appendBytes(b, dialer)
	b = appendBytes(b, listener)
	m.Write(b)
	return m.Sum(nil)
}
