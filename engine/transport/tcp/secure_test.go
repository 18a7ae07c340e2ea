package tcp

import (
	"bytes"
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/binary"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	mrand "math/rand/v2"
	"net"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
	"fserver/engine/transport/transporttest"
)

func shared(tb testing.TB, secret string) *link.Identity {
	id, err := link.SharedIdentity([]byte(secret), "default")
	require.NoError(tb, err)
	return id
}

// An authority signs certificates.
type authority struct {
	t    *testing.T
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
}

func newAuthority(t *testing.T) *authority {
	a := &authority{t: t}
	var err error
	a.key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	a.cert = &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "authority"}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
	}
	der, err := x509.CreateCertificate(rand.Reader, a.cert, a.cert, a.key.Public(), a.key)
	require.NoError(t, err)
	a.pem = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	return a
}

// issue gives a certificate that ends then, and its key.
func (a *authority) issue(then time.Time) (cert, key []byte) {
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(a.t, err)
	c := &x509.Certificate{SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "node"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: then}
	der, err := x509.CreateCertificate(rand.Reader, c, a.cert, k.Public(), a.key)
	require.NoError(a.t, err)
	p, err := x509.MarshalPKCS8PrivateKey(k)
	require.NoError(a.t, err)
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: p})
}

func (a *authority) identity(then time.Time, roots []byte) *link.Identity {
	cert, key := a.issue(then)
	id, err := link.FileIdentity(cert, key, roots)
	require.NoError(a.t, err)
	return id
}

func TestFileIdentityErrors(t *testing.T) {
	a := newAuthority(t)
	cert, _ := a.issue(time.Now().Add(time.Hour))
	_, key := a.issue(time.Now().Add(time.Hour))
	_, err := link.FileIdentity(cert, key, nil)
	require.ErrorContains(t, err, "link: TLS certificate: tls: private key does not match public key")
	cert, key = a.issue(time.Now().Add(time.Hour))
	_, err = link.FileIdentity(cert, key, key)
	require.ErrorContains(t, err, "link: TLS roots: the file contains no certificate")
}

// meet lets a dialer connect to a listener and gives what each side says of it.
func meet(t *testing.T, dialer, listener *link.Identity, gate transport.Gate) (dialled, refused error) {
	t.Helper()
	said := make(chan error, 10)
	b := open(t, Options{Listen: "127.0.0.1:0", TLS: listener, Gate: gate, Refused: func(_ string, err error) { said <- err }})
	a := open(t, Options{TLS: dialer})
	start := time.Now()
	_, dialled = a.Connect(context.Background(), b.Addr())
	require.Less(t, time.Since(start), 5*time.Second)
	if dialled != nil {
		select {
		case refused = <-said:
		case <-time.After(patience):
			require.Fail(t, "the listener does not say what it refused")
		}
		require.Empty(t, said)
	}
	return dialled, refused
}

func TestTLSMeets(t *testing.T) {
	ours, theirs := newAuthority(t), newAuthority(t)
	later, before := time.Now().Add(time.Hour), time.Now().Add(-time.Minute)
	selfCert, selfKey := ours.issue(later)
	self, err := link.FileIdentity(selfCert, selfKey, nil)
	require.NoError(t, err)
	const (
		ok        = ""
		notShared = "the peer's certificate does not come from our secret"
		refused   = "the peer refuses our certificate"
		unknown   = "signed by unknown authority"
		expired   = "certificate has expired"
		noTLS     = "the peer does not speak TLS (FSERVER_TLS=on here"
		hasTLS    = "the peer speaks TLS (set FSERVER_TLS=on"
	)
	for _, c := range []struct {
		name             string
		dialer, listener *link.Identity
		dials, refuses   string
	}{
		{"same secret", shared(t, "one"), shared(t, "one"), ok, ok},
		{"other secret", shared(t, "one"), shared(t, "two"), notShared, refused},
		{"same authority", ours.identity(later, ours.pem), ours.identity(later, ours.pem), ok, ok},
		{"the same certificate", self, self, ok, ok},
		{"another certificate", ours.identity(later, nil), self, unknown, refused},
		{"dialer of another authority", theirs.identity(later, append(ours.pem, theirs.pem...)), ours.identity(later, ours.pem), refused, unknown},
		{"listener of another authority", ours.identity(later, ours.pem), theirs.identity(later, append(ours.pem, theirs.pem...)), unknown, refused},
		{"dialer has expired", ours.identity(before, ours.pem), ours.identity(later, ours.pem), refused, expired},
		{"listener has expired", ours.identity(later, ours.pem), ours.identity(before, ours.pem), expired, refused},
		{"secret and files", shared(t, "one"), ours.identity(later, ours.pem), notShared, refused},
		{"files and secret", ours.identity(later, ours.pem), shared(t, "one"), unknown, refused},
		{"TLS dials plain", shared(t, "one"), nil, noTLS, hasTLS},
		{"plain dials TLS", nil, shared(t, "one"), hasTLS, noTLS},
	} {
		t.Run(c.name, func(t *testing.T) {
			noLeaks(t)
			dialled, refused := meet(t, c.dialer, c.listener, nil)
			if c.dials == ok {
				require.NoError(t, dialled)
				return
			}
			for _, side := range []struct {
				err  error
				text string
			}{{dialled, c.dials}, {refused, c.refuses}} {
				var mismatch *transport.TLSError
				require.ErrorAs(t, side.err, &mismatch)
				require.ErrorContains(t, side.err, side.text)
				sides := transport.Both
				switch side.text {
				case noTLS:
					sides = transport.OnlyHere
				case hasTLS:
					sides = transport.OnlyThere
				}
				require.Equal(t, sides, mismatch.Sides)
			}
		})
	}
}

// TestGateOverTLS refuses in the Gate what TLS has let through.
func TestGateOverTLS(t *testing.T) {
	noLeaks(t)
	dialled, refused := meet(t, shared(t, "one"), shared(t, "one"), transporttest.Gate{Refuse: "no room"})
	require.ErrorContains(t, dialled, "no room")
	require.ErrorContains(t, refused, "no room")
	require.False(t, errors.As(dialled, new(*transport.TLSError)))
}

// held is a socket whose writes can be kept instead of sent.
type held struct {
	net.Conn
	hold   bool
	kept   bytes.Buffer
	writes int
}

func (h *held) Write(b []byte) (int, error) {
	h.writes++
	if h.hold {
		return h.kept.Write(b)
	}
	return h.Conn.Write(b)
}

// dialTLS opens a connection over TLS that passes the Gate. The log of its keys
// goes to keys, if that is not nil.
func dialTLS(t *testing.T, f *Fabric, id *link.Identity, keys io.Writer) (*tls.Conn, *held) {
	t.Helper()
	nc, err := net.Dial("tcp", strings.TrimPrefix(string(f.Addr()), scheme))
	require.NoError(t, err)
	t.Cleanup(func() { nc.Close() })
	require.NoError(t, nc.SetDeadline(time.Now().Add(patience)))
	config := id.Config()
	config.KeyLogWriter = keys
	h := &held{Conn: nc}
	c := tls.Client(h, config)
	require.NoError(t, c.Handshake())
	h.writes = 0
	shakeBare(t, c)
	return c, h
}

// TestTamperedCiphertext changes one byte of a record at each of several places.
// The connection ends, and no other.
func TestTamperedCiphertext(t *testing.T) {
	noLeaks(t)
	id := shared(t, "one")
	u := newUser(t, open(t, Options{Listen: "127.0.0.1:0", TLS: id}))
	other, _ := dialTLS(t, u.f, id, nil)
	u.until(func() bool { return len(u.conns) == 1 })
	dst := hold(t, 64)
	key, err := u.f.Register(dst)
	require.NoError(t, err)
	message := record(header{kind: recWrite, length: 64, key: key.ID, token: key.Token}, strings.Repeat("x", 64))
	for i, at := range []int{0, 1, 3, 4, 5, 44, 45, 60, 109, 110, 125} {
		c, h := dialTLS(t, u.f, id, nil)
		u.until(func() bool { return len(u.conns) == i+2 })
		h.hold = true
		_, err := c.Write(message)
		require.NoError(t, err)
		b := h.kept.Bytes()
		require.Len(t, b, 126)
		b[at] ^= 0x10
		_, err = h.Conn.Write(b)
		require.NoError(t, err)
		// Where the length grew, the record is cut; it makes no difference elsewhere.
		require.NoError(t, h.Conn.(*net.TCPConn).CloseWrite())
		u.until(func() bool { return len(u.down) == i+1 })
		require.NotErrorIs(t, u.down[u.conns[i+1]], io.EOF)
		require.Empty(t, u.frames)
		require.Equal(t, make([]byte, 64), dst.Span().Bytes())
	}
	_, err = other.Write(append(message, record(header{kind: recFrame}, "")...))
	require.NoError(t, err)
	u.until(func() bool { return len(u.frames) == 1 })
	require.NotContains(t, u.down, u.conns[0])
}

// A sealer makes records of TLS_AES_128_GCM_SHA256 by hand: crypto/tls has no
// call for a key update.
type sealer struct {
	t      *testing.T
	secret []byte
	seq    uint64
}

func (s *sealer) expand(label string, n int) []byte {
	label = "tls13 " + label
	info := append([]byte{0, byte(n), byte(len(label))}, label...)
	b, err := hkdf.Expand(sha256.New, s.secret, string(append(info, 0)), n)
	require.NoError(s.t, err)
	return b
}

func (s *sealer) seal(kind byte, b []byte) []byte {
	block, err := aes.NewCipher(s.expand("key", 16))
	require.NoError(s.t, err)
	gcm, err := cipher.NewGCM(block)
	require.NoError(s.t, err)
	nonce := s.expand("iv", 12)
	for i := range 8 {
		nonce[4+i] ^= byte(s.seq >> (56 - 8*i))
	}
	s.seq++
	inner := append(bytes.Clone(b), kind)
	head := []byte{23, 3, 3, 0, byte(len(inner) + 16)}
	return gcm.Seal(bytes.Clone(head), nonce, inner, head)
}

func (s *sealer) update() { s.secret, s.seq = s.expand("traffic upd", 32), 0 }

// TestKeyUpdate lets a peer change its key, and ask for ours to be changed, in
// the middle of a frame.
func TestKeyUpdate(t *testing.T) {
	noLeaks(t)
	id := shared(t, "one")
	u := newUser(t, open(t, Options{Listen: "127.0.0.1:0", TLS: id}))
	var keys bytes.Buffer
	c, h := dialTLS(t, u.f, id, &keys)
	if c.ConnectionState().CipherSuite != tls.TLS_AES_128_GCM_SHA256 {
		t.Skip("the processor has no instructions for AES, and so another cipher was chosen")
	}
	s := &sealer{t: t, seq: uint64(h.writes)}
	for line := range strings.Lines(keys.String()) {
		if f := strings.Fields(line); f[0] == "CLIENT_TRAFFIC_SECRET_0" {
			var err error
			s.secret, err = hex.DecodeString(f[2])
			require.NoError(t, err)
		}
	}
	u.until(func() bool { return len(u.conns) == 1 })
	frame := record(header{kind: recFrame, length: 5}, "hello")
	const handshake, data = 22, 23
	for round := range 20 {
		var b []byte
		b = append(b, s.seal(data, frame[:20])...)
		b = append(b, s.seal(handshake, []byte{24, 0, 0, 1, 1})...)
		s.update()
		b = append(b, s.seal(data, frame[20:])...)
		_, err := h.Conn.Write(b)
		require.NoError(t, err)
		u.until(func() bool { return len(u.frames) == round+1 })
		require.Equal(t, "hello", u.frames[round])

		post(t, u.conns[0], transport.Op{Kind: transport.OpFrame, Frame: []byte("answer"), User: uint64(round)})
		u.until(func() bool { return len(u.done) == round+1 })
		got := make([]byte, headerLen+6)
		_, err = io.ReadFull(c, got)
		require.NoError(t, err)
		require.Equal(t, "answer", string(got[headerLen:]))
	}
	require.Empty(t, u.down)
}

// TestTLSStalls leaves a part of a TLS record, while none of our own records is
// begun.
func TestTLSStalls(t *testing.T) {
	noLeaks(t)
	id := shared(t, "one")
	const stall = 200 * time.Millisecond
	u := newUser(t, open(t, Options{Listen: "127.0.0.1:0", TLS: id, Limits: transport.Limits{Stall: stall}}))
	for i, b := range [][]byte{{23}, {23, 3, 3, 1, 0}, {23, 3, 3, 1, 0, 7, 7}} {
		_, h := dialTLS(t, u.f, id, nil)
		u.until(func() bool { return len(u.conns) == i+1 })
		_, err := h.Conn.Write(b)
		require.NoError(t, err)
		u.until(func() bool { return len(u.down) == i+1 })
		require.ErrorIs(t, u.down[u.conns[i]], unix.ETIMEDOUT)
	}
}

// TestTLSTransfers sends writes and frames of many sizes, and compares what
// came.
func TestTLSTransfers(t *testing.T) {
	noLeaks(t)
	id := shared(t, "one")
	a := newUser(t, open(t, Options{TLS: id}))
	b := newUser(t, open(t, Options{Listen: "127.0.0.1:0", TLS: id}))
	conn, err := a.f.Connect(context.Background(), b.f.Addr())
	require.NoError(t, err)
	b.until(func() bool { return len(b.conns) == 1 })
	for _, c := range []transport.Conn{conn, b.conns[0]} {
		require.Equal(t, "tcp/tls", c.Peer().Via)
		require.Empty(t, c.Peer().Why)
	}
	const size = 24 << 20
	sizes := []uint64{1, 40, 4096, 16<<10 - 40, 16 << 10, 16<<10 + 1, 100_000, 3 << 20}
	r := mrand.New(mrand.NewPCG(3, 4))
	for _, way := range []struct {
		from, to *user
		conn     transport.Conn
	}{{a, b, conn}, {b, a, b.conns[0]}} {
		src, dst := hold(t, size), hold(t, size)
		for i := 0; i < size; i += 8 {
			binary.LittleEndian.PutUint64(src.Span().Bytes()[i:], r.Uint64())
		}
		key, err := way.to.f.Register(dst)
		require.NoError(t, err)
		var ops []transport.Op
		var frames []string
		for off := uint64(0); off < size; {
			n := min(size-off, sizes[r.IntN(len(sizes))])
			half := r.Uint64N(n + 1)
			frames = append(frames, strings.Repeat("f", r.IntN(3)*r.IntN(20_000)))
			ops = append(ops,
				transport.Op{Kind: transport.OpWrite, Key: key, Off: off, Src: []mem.Span{
					{Addr: src.Addr + uintptr(off), Len: half}, {Addr: src.Addr + uintptr(off+half), Len: n - half}}},
				transport.Op{Kind: transport.OpFrame, Frame: []byte(frames[len(frames)-1])})
			off += n
		}
		for len(ops) > 0 {
			n, err := way.conn.Post(ops)
			require.NoError(t, err)
			ops = ops[n:]
			a.poll()
			b.poll()
		}
		way.to.until(func() bool { way.from.poll(); return len(way.to.frames) == len(frames) })
		require.Equal(t, frames, way.to.frames)
		require.True(t, bytes.Equal(src.Span().Bytes(), dst.Span().Bytes()))
	}
	conn.Close()
	b.until(func() bool { return len(b.down) == 1 })
	require.ErrorIs(t, b.down[b.conns[0]], io.EOF, "a goodbye goes over TLS too")
}

// slow is a connection on which nothing comes before it is let go on.
type slow struct {
	net.Conn
	on chan struct{}
}

func (s slow) Read(b []byte) (int, error) {
	<-s.on
	return s.Conn.Read(b)
}

// TestSlowTLSHandshake: of those in the Gate, one whose TLS handshake has begun stays, and one that is silent gives way.
func TestSlowTLSHandshake(t *testing.T) {
	noLeaks(t)
	id := shared(t, "one")
	f := open(t, Options{Listen: "127.0.0.1:0", TLS: id, Limits: transport.Limits{Pending: 2}})
	dial := func() net.Conn {
		nc, err := net.Dial("tcp", strings.TrimPrefix(string(f.Addr()), scheme))
		require.NoError(t, err)
		require.NoError(t, nc.SetDeadline(time.Now().Add(patience)))
		t.Cleanup(func() { nc.Close() })
		return nc
	}
	first := dial()
	on, met := make(chan struct{}), make(chan error, 1)
	c := tls.Client(slow{first, on}, id.Config())
	go func() { met <- c.Handshake() }()
	// The answer to its hello is there.
	raw, err := first.(*net.TCPConn).SyscallConn()
	require.NoError(t, err)
	require.NoError(t, raw.Read(func(fd uintptr) bool {
		n, _, err := unix.Recvfrom(int(fd), make([]byte, 1), unix.MSG_PEEK|unix.MSG_DONTWAIT)
		return n > 0 || err != unix.EAGAIN
	}))
	dial() // and says nothing
	_, err = open(t, Options{TLS: id}).Connect(context.Background(), f.Addr())
	require.NoError(t, err)
	close(on)
	require.NoError(t, <-met)
	shakeBare(t, c)
}

// TestCipherOfNobody: a peer that has our side answer by itself, as to a change of keys, and reads none of it, takes no
// memory without bound.
func TestCipherOfNobody(t *testing.T) {
	l := &cipherLink{}
	for written := 0; ; {
		n, err := l.Write(make([]byte, 100))
		if err != nil {
			require.Greater(t, written, sealQuantum*5/4, "what one visit seals has room")
			return
		}
		written += n
		require.Less(t, written, 4<<20)
	}
}

// BenchmarkMove drives both ends from one goroutine, with and without TLS in
// turns, and gives the time that this thread was on a processor, which other
// work on the machine does not add to.
func BenchmarkMove(b *testing.B) {
	for _, n := range []uint64{4 << 10, 64 << 10, 1 << 20, 16 << 20} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			ids := map[string]*link.Identity{"plain": nil, "tls": shared(b, "the secret of the benchmark")}
			spent := map[string]time.Duration{}
			bytes := 0.0
			moves := map[string]func(){}
			for kind, id := range ids {
				moves[kind] = mover(b, id, n)
			}
			for range b.N {
				for kind := range ids {
					start := onProcessor(b)
					for range max(1, (16<<20)/n) {
						moves[kind]()
					}
					spent[kind] += onProcessor(b) - start
				}
				bytes += float64(n * max(1, (16<<20)/n))
			}
			b.ReportMetric(0, "ns/op")
			for kind, d := range spent {
				b.ReportMetric(bytes/float64(d.Nanoseconds()), kind+"-GB/s")
				b.ReportMetric(float64(d.Nanoseconds())/1e3*float64(n)/bytes, kind+"-µs")
			}
		})
	}
}

// mover gives a function that writes n bytes from one Fabric to another.
func mover(b *testing.B, id *link.Identity, n uint64) func() {
	var f [2]*Fabric
	for i, listen := range []string{"127.0.0.1:0", ""} {
		var err error
		f[i], err = Open(Options{Listen: listen, Gate: transporttest.Gate{}, TLS: id})
		require.NoError(b, err)
		b.Cleanup(func() { require.NoError(b, f[i].Close()) })
	}
	key, err := f[0].Register(hold(b, n))
	require.NoError(b, err)
	conn, err := f[1].Connect(context.Background(), f[0].Addr())
	require.NoError(b, err)
	ops := []transport.Op{{Kind: transport.OpWrite, Key: key, Src: []mem.Span{hold(b, n).Span()}}, {Kind: transport.OpFrame}}
	ev := make([]transport.Event, 16)
	return func() {
		_, err := conn.Post(ops)
		require.NoError(b, err)
		for done := 0; done < 3; {
			for i := range f {
				k, err := f[i].Poll(ev)
				require.NoError(b, err)
				for _, e := range ev[:k] {
					if e.Kind == transport.EvDone || e.Kind == transport.EvFrame {
						done++
					}
				}
			}
		}
	}
}

// onProcessor is for how long this thread has run.
func onProcessor(b *testing.B) time.Duration {
	var t unix.Timespec
	require.NoError(b, unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t))
	return time.Duration(t.Nano())
}
