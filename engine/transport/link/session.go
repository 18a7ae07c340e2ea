package link

import (
	"bytes"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"syscall"
	"time"
	"unicode"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"fserver/engine/transport"
)

// A Session is a connection while it is set up, and after that where a Conn keeps it as its life.
// What travels on it are messages: the Gate's, the transport's, and why it ends.
type Session struct {
	f       *Fabric
	Dialer  bool // we are
	Remote  string
	Hello   []byte   // what the Gate verified about the peer
	Socket  net.Conn // of the kind's network
	TLS     *tls.Conn
	Carrier net.Conn // that TLS is on
	stream  net.Conn // Socket or TLS
	heard   func()   // called when the peer has said something

	mu   sync.Mutex
	kept bool // a Conn has it, and nothing else ends it or sets its deadline
	cut  bool // its set-up is to end
}

// interrupt ends what waits for the socket while it is set up.
func (s *Session) interrupt() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.kept {
		s.cut = true
		s.Socket.SetDeadline(time.Unix(1, 0))
	}
}

// Interrupted reports whether the set-up is to end, for who waits for something else than the socket.
func (s *Session) Interrupted() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cut
}

// Descriptor is one of nc's socket that the runtime's poller does not know. It stays
// non-blocking, and is the caller's.
func Descriptor(nc net.Conn) (fd int, err error) {
	raw, err := nc.(syscall.Conn).SyscallConn()
	if err == nil {
		if e := raw.Control(func(s uintptr) { fd, err = unix.FcntlInt(s, unix.F_DUPFD_CLOEXEC, 0) }); err == nil {
			err = e
		}
	}
	if err != nil {
		return -1, fmt.Errorf("take over the socket: %w", err)
	}
	return fd, nil
}

// passGate runs the Gate.
func (s *Session) passGate() error {
	hs := s.f.Gate.Open(s.Dialer)
	var in []byte
	var err error
	for first := s.Dialer; ; first = false {
		if !first {
			if in, err = ReceiveMessage(s.stream); err != nil {
				break
			}
			s.heard()
		}
		out, done, bad := hs.Next(in)
		if out != nil {
			err = SendMessage(s.stream, out)
		}
		if bad != nil {
			return bad
		}
		if err != nil {
			break
		}
		if done {
			s.Hello = hs.Hello()
			return nil
		}
	}
	return fmt.Errorf("handshake: %w", Cause(explain(err)))
}

// The messages of a transport start with tellMore, and the last one with tellEnd, behind
// which is the reason; none is a close in good order. With tellAgain in place of tellEnd, the reason is a
// transport.AgainError.
const (
	tellMore  = 'M'
	tellEnd   = 'E'
	tellAgain = 'A'
)

// Tell sends a message of the transport.
func (s *Session) Tell(m []byte) error {
	return SendMessage(s.stream, append([]byte{tellMore}, m...))
}

// Hear receives a message of the transport. When the peer has ended the session, the error has
// its reason, or io.EOF inside it for a close in good order.
func (s *Session) Hear() ([]byte, error) {
	m, err := ReceiveMessage(s.stream)
	switch {
	case errors.Is(err, io.EOF):
		return nil, fmt.Errorf("the peer's process has ended, or cut the connection: %w", io.ErrUnexpectedEOF)
	case err != nil:
		return nil, Cause(explain(err))
	case len(m) > 0 && m[0] == tellMore:
		return m[1:], nil
	case len(m) > 1 && m[0] == tellEnd:
		return nil, said(m[1:])
	case len(m) > 1 && m[0] == tellAgain:
		return nil, &transport.AgainError{Err: said(m[1:])}
	case len(m) == 1 && m[0] == tellEnd:
		return nil, fmt.Errorf("the peer closed the connection: %w", io.EOF)
	}
	return nil, fmt.Errorf("the peer sent a message of %d bytes out of turn", len(m))
}

// maxSaid is how many bytes of a peer's reason are taken.
const maxSaid = 1000

// said makes an error of the reason that a peer has given. The peer may not have proved the secret yet, so what cannot be printed
// is replaced.
func said(reason []byte) error {
	return fmt.Errorf("the peer: %s", strings.Map(func(c rune) rune {
		if c == utf8.RuneError || !unicode.IsPrint(c) {
			return '?'
		}
		return c
	}, string(reason[:min(len(reason), maxSaid)])))
}

// End tells the peer why, with nil for a close in good order, and closes the socket.
func (s *Session) End(why error) {
	m := []byte{tellEnd}
	if again := (*transport.AgainError)(nil); errors.As(why, &again) {
		m[0] = tellAgain
	}
	if why != nil {
		m = append(m, why.Error()...)
	}
	s.Socket.SetWriteDeadline(time.Now().Add(100 * time.Millisecond)) // it has room for what little is said
	_ = SendMessage(s.stream, m[:min(len(m), 1000)])                  // the socket's end says most of it
	s.Socket.Close()
}

// Keep makes the session the life of its Conn, which has to End it: the owner calls ended when the
// peer has ended it, with the reason. Keep is for Adopt, as the owner.
func (s *Session) Keep(ended func(why error)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.kept = true
	s.Socket.SetDeadline(time.Time{})
	s.f.Task(func() {
		_, err := s.Hear()
		if err == nil {
			err = errors.New("the peer sent a message out of turn")
		}
		s.f.Owned(func() { ended(err) })
	})
}

// Each message is behind a preamble of the 4 bytes of magic and its u32 length, which
// is at most transport.MaxHandshake. What is no fserver is refused after its first 8
// bytes at the latest.
const preambleLen = 8

var magic = [4]byte{'F', 'S', 'R', 'V'}

// SendMessage sends one message.
func SendMessage(w io.Writer, m []byte) error {
	if len(m) > transport.MaxHandshake {
		return fmt.Errorf("message of %d bytes to the peer: at most %d", len(m), transport.MaxHandshake)
	}
	b := append(make([]byte, 0, preambleLen+len(m)), magic[:]...)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(m)))
	_, err := w.Write(append(b, m...))
	return err
}

// ReceiveMessage receives one message.
func ReceiveMessage(r io.Reader) ([]byte, error) {
	var p [preambleLen]byte
	n, err := io.ReadFull(r, p[:])
	if speaksTLS(p[:n]) {
		return nil, &transport.TLSError{Reason: "the peer speaks TLS (set FSERVER_TLS=on, which must be the same on all nodes)", Sides: transport.OnlyThere}
	}
	if err != nil {
		if err == io.EOF {
			return nil, fmt.Errorf("the peer closed the connection: %w", err)
		}
		return nil, err
	}
	if !bytes.Equal(p[:len(magic)], magic[:]) {
		return nil, fmt.Errorf("the peer sent % x: not a message of fserver", p)
	}
	length := binary.LittleEndian.Uint32(p[len(magic):])
	if length > transport.MaxHandshake {
		return nil, fmt.Errorf("the peer announced a message of %d bytes: at most %d", length, transport.MaxHandshake)
	}
	m := make([]byte, length)
	if _, err := io.ReadFull(r, m); err != nil {
		return nil, fmt.Errorf("the peer announced a message of %d bytes: %w", length, err)
	}
	return m, nil
}
