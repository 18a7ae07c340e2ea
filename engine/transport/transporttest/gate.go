package transporttest

import (
	"bytes"
	"errors"
	"fmt"

	"fserver/engine/transport"
)

// Gate is a transport.Gate for tests. Its zero value lets everybody in and
// carries an empty hello. Its messages are one byte that says what follows,
// and a hello or a reason.
type Gate struct {
	Hello  string // what the peer's Conn.Hello gives
	Refuse string // the reason for which peers are turned away; empty lets them in
	Only   string // the hello of the peers that Refuse is for; empty means all
	Mute   bool   // a listener with it never answers
	Trips  int    // messages from the dialer, each with an answer, and the same at the peer; 0 means 1
}

// The first byte of a message.
const (
	gateHello  = '+'
	gateRefuse = '-'
	gateMore   = '.' // filler between the hellos and the last messages
)

// Open implements transport.Gate.
func (g Gate) Open(dialer bool) transport.Handshake {
	return &handshake{g: g, dialer: dialer, left: max(g.Trips, 1)}
}

type handshake struct {
	g      Gate
	dialer bool
	left   int // messages still to take by the listener, or to send by the dialer
	peer   []byte
	known  bool
}

// Next implements transport.Handshake.
func (h *handshake) Next(in []byte) (out []byte, done bool, err error) {
	if !h.dialer && h.g.Mute {
		return nil, false, nil
	}
	if h.dialer && in == nil {
		h.left--
		return h.hello(), false, nil
	}
	if err := h.take(in); err != nil {
		return nil, false, err
	}
	if h.g.Refuse != "" && (h.g.Only == "" || h.g.Only == string(h.peer)) {
		err := fmt.Errorf("gate: refused %q: %s", h.peer, h.g.Refuse)
		return append([]byte{gateRefuse}, h.g.Refuse...), false, err
	}
	if h.dialer {
		if h.left == 0 {
			return nil, true, nil
		}
		h.left--
		return []byte{gateMore}, false, nil
	}
	h.left--
	if in[0] == gateHello {
		return h.hello(), h.left == 0, nil
	}
	return []byte{gateMore}, h.left == 0, nil
}

func (h *handshake) hello() []byte { return append([]byte{gateHello}, h.g.Hello...) }

// take reads one message of the peer.
func (h *handshake) take(in []byte) error {
	if len(in) == 0 {
		return errors.New("gate: empty message")
	}
	switch in[0] {
	case gateHello:
		h.peer, h.known = bytes.Clone(in[1:]), true
	case gateRefuse:
		return fmt.Errorf("gate: refused by the peer: %s", in[1:])
	case gateMore:
	default:
		return fmt.Errorf("gate: message of unknown kind %#x", in[0])
	}
	if !h.known {
		return errors.New("gate: no hello in the first message")
	}
	return nil
}

// Hello implements transport.Handshake.
func (h *handshake) Hello() []byte { return h.peer }
