package tcp

import (
	"bufio"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"

	"golang.org/x/sys/unix"

	"fserver/engine/transport/link"
)

const (
	// sealQuantum is how many bytes of plaintext one visit seals. What comes of
	// them stays in a buffer until the kernel has taken it.
	sealQuantum = 256 << 10
	// cipherStage is how many bytes of ciphertext one system call receives.
	cipherStage = 64 << 10
	maxRecord   = 16 << 10 // plaintext of a TLS record
	// outMost is how many bytes of ciphertext wait for the kernel at most: those of one visit, and the answers
	// that crypto/tls gives by itself, as to key updates, which a peer may send without end.
	outMost = 2 * sealQuantum
)

// secure is the TLS of a Conn: crypto/tls over a cipherLink. It takes the place
// of the two system calls that move bytes (vec.send and vec.recv), and behaves
// like them. The price is what crypto/tls costs: encryption, two copies on each
// side and two small allocations for each record received.
type secure struct {
	conn *tls.Conn
	link *cipherLink
	more bool          // plaintext may be here that no system call announces
	bad  error         // why crypto/tls gave up, when a call gives EPROTO
	out  *bufio.Writer // gathers small pieces into one record; large ones pass it by
}

// newSecure makes conn, which was set up over l, go on with fd and without blocking.
func newSecure(conn *tls.Conn, l *cipherLink, fd int) *secure {
	l.Conn, l.fd, l.in = nil, fd, make([]byte, cipherStage)
	return &secure{conn: conn, link: l, more: true, out: bufio.NewWriterSize(conn, maxRecord)}
}

// unsent says whether the kernel has not taken all ciphertext.
func (s *secure) unsent() bool { return s.link.left > 0 }

// inside says whether the peer's stream stands in the middle of a TLS record.
func (s *secure) inside() bool { return s.link.at.inside() }

// send seals what is in v once the kernel has taken all that was sealed before,
// and returns how many bytes it sealed. EAGAIN says that none were.
func (s *secure) send(v *vec) (int, unix.Errno) {
	if e := s.link.flush(); e != 0 {
		return 0, e
	}
	for i := range v.n {
		_, _ = s.out.Write(v.piece(i)) // seal gives its error
	}
	if !s.seal() {
		return 0, unix.EPROTO
	}
	if e := s.link.flush(); e != unix.EAGAIN {
		return int(v.sum), e
	}
	return int(v.sum), 0
}

// seal does not block, for the link takes everything. It fails only after
// crypto/tls has told the peer that it gave up.
func (s *secure) seal() bool {
	if err := s.out.Flush(); err != nil {
		s.bad = err
		return false
	}
	return true
}

// recv fills the memory of v with plaintext and returns how many bytes came.
// Fewer than v has room for means that no more are here, unless more is set; 0
// is the end of the stream.
func (s *secure) recv(v *vec) (n int, e unix.Errno) {
	l := s.link
	l.dry = false
	if !s.more && l.r == l.w {
		// Most visits find nothing, and crypto/tls would allocate to say so.
		if e := l.fill(); e != 0 {
			return 0, e
		}
	}
	s.more = false
	for i := range v.n {
		for b := v.piece(i); len(b) > 0; {
			k, err := s.conn.Read(b)
			n += k
			b = b[k:]
			switch {
			case err == nil:
				if len(b) > 0 && l.dry && l.r == l.w {
					return n, 0 // the plaintext of all that has come
				}
				continue
			case n > 0:
				s.more = err != unix.EAGAIN // crypto/tls says it again
				return n, 0
			case err == io.EOF || err == io.ErrUnexpectedEOF:
				return 0, 0
			}
			if e, ok := err.(unix.Errno); ok {
				return 0, e
			}
			s.bad = fmt.Errorf("TLS: %w", link.Cause(err))
			return 0, unix.EPROTO
		}
	}
	s.more = true
	return n, 0
}

// bye sends b if the kernel has room for it.
func (s *secure) bye(b []byte) {
	_, _ = s.out.Write(b)
	if s.seal() {
		s.link.flush()
	}
}

// trim frees the buffer for ciphertext if it is idle.
func (s *secure) trim() {
	if !s.unsent() {
		s.link.out = nil
	}
}

// cipherLink carries ciphertext between crypto/tls and the socket. During
// set-up it is the net.Conn. After that Write keeps what it is given for flush,
// and Read gives what has come or EAGAIN, which is a temporary net.Error and
// therefore does not end a tls.Conn.
//
// Read never goes beyond the end of a TLS record, so that what crypto/tls has
// not returned as plaintext is still here, but for the rest of one record.
type cipherLink struct {
	net.Conn // nil after set-up

	fd    int
	in    []byte // in[r:w] has come
	r, w  int
	dry   bool      // the kernel has no more, as far as this visit knows
	eof   bool      // nor will have
	out   []byte    // ciphertext; the kernel has not taken its last bytes
	left  int       // how many bytes these are
	moved [2]uint64 // bytes in and out, ever
	at    recordMark
}

func (l *cipherLink) Read(b []byte) (n int, err error) {
	b = b[:min(len(b), l.at.next())]
	if l.Conn != nil {
		n, err = l.Conn.Read(b)
	} else {
		if l.r == l.w {
			if !l.dry {
				if e := l.fill(); e != 0 {
					return 0, e
				}
			}
			if l.r == l.w && l.eof {
				return 0, io.EOF
			}
			if l.r == l.w {
				return 0, unix.EAGAIN
			}
		}
		n = copy(b, l.in[l.r:l.w])
		l.r += n
	}
	l.at.pass(b[:n])
	return n, err
}

var errUnread = errors.New("the peer keeps sending TLS key updates and does not read the answers")

func (l *cipherLink) Write(b []byte) (int, error) {
	if l.Conn != nil {
		return l.Conn.Write(b)
	}
	if len(l.out) > outMost {
		return 0, errUnread
	}
	l.out = append(l.out, b...)
	l.left += len(b)
	return len(b), nil
}

// fill receives ciphertext into in, which is empty. It stays so at the end of
// the stream.
func (l *cipherLink) fill() unix.Errno {
	l.r, l.w = 0, 0
	n, e := of(l.in).recv(l.fd)
	l.dry = n < len(l.in)
	if e == 0 {
		l.w, l.eof = n, n == 0
		l.moved[0] += uint64(n)
	}
	return e
}

// flush gives the kernel what it takes of out; EAGAIN says that some is left.
func (l *cipherLink) flush() unix.Errno {
	if l.left == 0 {
		return 0
	}
	n, e := of(l.out[len(l.out)-l.left:]).send(l.fd)
	if e != 0 {
		return e
	}
	l.left -= n
	l.moved[1] += uint64(n)
	if l.left > 0 {
		return unix.EAGAIN
	}
	l.out = l.out[:0]
	return 0
}

// recordMark follows a stream of TLS records: 5 bytes of header, of which the
// last two are the length of the body.
type recordMark struct {
	header [5]byte
	got    int // bytes of the header
	body   int // bytes of the body to come
}

// next is how many bytes there are to the end of the header or of the body.
func (m *recordMark) next() int {
	if m.body > 0 {
		return m.body
	}
	return len(m.header) - m.got
}

// pass notes b, which is at most next bytes.
func (m *recordMark) pass(b []byte) {
	if m.body > 0 {
		m.body -= len(b)
		return
	}
	m.got += copy(m.header[m.got:], b)
	if m.got == len(m.header) {
		m.got, m.body = 0, int(binary.BigEndian.Uint16(m.header[3:]))
	}
}

func (m *recordMark) inside() bool { return m.got > 0 || m.body > 0 }
