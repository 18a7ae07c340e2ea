package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// maxHandshake is transport.MaxHandshake.
const maxHandshake = 4096

func worker() Hello {
	return Hello{Build: "v1.2.3", Caps: 5, Cluster: "blue", Role: RoleWorker, Rank: 3, Epoch: 9}
}

func server() Hello {
	return Hello{Build: "v1.2.3", Caps: 7, Cluster: "blue", Role: RoleServer, Rank: 1, Epoch: 2}
}

// shake runs a dialer and a listener against each other and returns how each
// ended.
func shake(t *testing.T, d, l *Handshake) (dialer, listener error) {
	t.Helper()
	var in []byte
	side, other := d, l
	var done, otherDone bool
	for range 8 {
		out, ok, err := side.Next(in)
		require.LessOrEqual(t, len(out), maxHandshake)
		if err != nil {
			require.False(t, ok)
			require.Nil(t, side.Hello())
			otherErr := errors.New("the connection was closed")
			if out != nil {
				_, ok, otherErr = other.Next(out)
				require.False(t, ok)
				require.Error(t, otherErr)
			}
			if side == d {
				return err, otherErr
			}
			return otherErr, err
		}
		if done = done || ok; done && otherDone {
			return nil, nil
		}
		in = out
		side, other, done, otherDone = other, side, otherDone, done
	}
	t.Fatal("no end")
	return nil, nil
}

func TestHelloHandshake(t *testing.T) {
	for _, secret := range []string{"", "s", strings.Repeat("long", 100)} {
		d := NewHandshake(worker(), []byte(secret), true)
		l := NewHandshake(server(), []byte(secret), false)
		require.Nil(t, d.Hello())
		de, le := shake(t, d, l)
		require.NoError(t, de)
		require.NoError(t, le)

		got, err := ParseHello(l.Hello())
		require.NoError(t, err)
		want := worker()
		want.Version, want.Secret, want.Nonce = Version, secret != "", got.Nonce
		require.Equal(t, want, got)

		got, err = ParseHello(d.Hello())
		require.NoError(t, err)
		want = server()
		want.Version, want.Secret, want.Nonce = Version, secret != "", got.Nonce
		require.Equal(t, want, got)

		// It is over: whatever comes now is refused.
		for _, h := range []*Handshake{d, l} {
			_, done, err := h.Next([]byte{byte(TypeAccept)})
			require.False(t, done)
			require.ErrorContains(t, err, "none was expected")
		}
	}
}

// TestHelloDisagree lets sides meet that cannot talk. Both must learn why.
func TestHelloDisagree(t *testing.T) {
	with := func(h Hello, change func(*Hello)) Hello {
		change(&h)
		return h
	}
	for _, c := range []struct {
		name             string
		dialer, listener Hello
		versions         [2]uint32
		secrets          [2]string
		apart            [2]string // HandshakeError.Secret of dialer and listener
		want             string
	}{
		{
			name: "version", dialer: worker(), listener: with(server(), func(h *Hello) { h.Build = "v2" }),
			versions: [2]uint32{Version, Version + 1},
			want:     fmt.Sprintf(`the node that connects has wire version %d (build "v1.2.3"), the node that accepts has wire version %d (build "v2"): install the same version of fserver on all nodes (fserver --version prints it)`, Version, Version+1),
		}, {
			name: "version of the dialer", dialer: worker(), listener: server(), versions: [2]uint32{Version + 1, Version},
			want: fmt.Sprintf(`the node that connects has wire version %d (build "v1.2.3"), the node that accepts has wire version %d (build "v1.2.3"): install the same version of fserver on all nodes (fserver --version prints it)`, Version+1, Version),
		}, {
			name: "cluster", dialer: worker(), listener: with(server(), func(h *Hello) { h.Cluster = "green" }),
			want: `worker 3 is of cluster "blue", server 1 of cluster "green": FSERVER_CLUSTER must be the same on all nodes`,
		}, {
			name: "secret against none", dialer: worker(), listener: server(), secrets: [2]string{"a", ""}, apart: [2]string{SecretOnlyHere, SecretOnlyThere},
			want: "worker 3 has a secret, server 1 has none: FSERVER_SECRET must be the same on all nodes (or the text in FSERVER_SECRET_FILE)",
		}, {
			name: "none against a secret", dialer: worker(), listener: with(server(), func(h *Hello) { h.Rank = -1 }), secrets: [2]string{"", "a"}, apart: [2]string{SecretOnlyThere, SecretOnlyHere},
			want: "a server has a secret, worker 3 has none: FSERVER_SECRET must be the same on all nodes (or the text in FSERVER_SECRET_FILE)",
		}, {
			name: "other secret", dialer: worker(), listener: server(), secrets: [2]string{"a", "b"}, apart: [2]string{SecretDiffers, SecretDiffers},
			want: "the proof of server 1 (the listener) is wrong: FSERVER_SECRET must be the same on all nodes (or the text in FSERVER_SECRET_FILE)",
		}, {
			name: "workers", dialer: worker(), listener: worker(),
			want: "worker 3 connects to worker 3: only members to the scheduler, and workers to servers (is one of the addresses wrong?)",
		}, {
			name: "servers", dialer: server(), listener: server(),
			want: "server 1 connects to server 1: only members to the scheduler, and workers to servers (is one of the addresses wrong?)",
		}, {
			name: "server to worker", dialer: server(), listener: worker(),
			want: "server 1 connects to worker 3: only members to the scheduler, and workers to servers (is one of the addresses wrong?)",
		}, {
			name: "scheduler", dialer: Hello{Cluster: "blue"}, listener: server(),
			want: "the scheduler connects to server 1: only members to the scheduler, and workers to servers (is one of the addresses wrong?)",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.dialer.Version, c.listener.Version = Version, Version
			if c.versions[0] != 0 {
				c.dialer.Version, c.listener.Version = c.versions[0], c.versions[1]
			}
			d := newHandshake(c.dialer, []byte(c.secrets[0]), true)
			l := newHandshake(c.listener, []byte(c.secrets[1]), false)
			hello, _, err := d.Next(nil)
			require.NoError(t, err)
			if c.listener.Version == Version {
				de, le := pass(t, l, d, hello)
				agree(t, de, le, c.want)
				for i, err := range []error{de, le} {
					var e *HandshakeError
					require.ErrorAs(t, err, &e)
					require.Equal(t, c.apart[i], e.Secret)
				}
				return
			}
			// What a listener of another version makes of the hello is its affair.
			out, done, err := d.Next(l.mine)
			require.False(t, done)
			agree(t, err, &HandshakeError{Reason: rejection(out), Remote: true}, c.want)
		})
	}
	for _, role := range []Role{RoleWorker, RoleServer} {
		h := worker()
		h.Role = role
		de, le := shake(t, NewHandshake(h, nil, true), NewHandshake(Hello{Cluster: "blue", Rank: -1}, nil, false))
		require.NoError(t, de)
		require.NoError(t, le)
	}
}

// pass hands a message to side, its answer to other, and so on to the end.
func pass(t *testing.T, side, other *Handshake, in []byte) (otherErr, sideErr error) {
	t.Helper()
	out, done, err := side.Next(in)
	require.False(t, done)
	if err != nil {
		_, _, otherErr = other.Next(out)
		return otherErr, err
	}
	sideErr, otherErr = pass(t, other, side, out)
	return otherErr, sideErr
}

// agree checks that one side found what is wrong, and the other was told.
func agree(t *testing.T, a, b error, want string) {
	t.Helper()
	var ha, hb *HandshakeError
	require.ErrorAs(t, a, &ha)
	require.ErrorAs(t, b, &hb)
	if ha.Remote {
		ha, hb = hb, ha
	}
	require.EqualError(t, ha, "wire: handshake: "+want)
	require.EqualError(t, hb, "wire: handshake: refused by the peer: "+want)
}

// TestHelloReplay gives a listener what another run has recorded.
func TestHelloReplay(t *testing.T) {
	secret := []byte("secret")
	d, l := NewHandshake(worker(), secret, true), NewHandshake(server(), secret, false)
	hello, _, err := d.Next(nil)
	require.NoError(t, err)
	welcome, _, err := l.Next(hello)
	require.NoError(t, err)
	proof, _, err := d.Next(welcome)
	require.NoError(t, err)

	l = NewHandshake(server(), secret, false)
	_, _, err = l.Next(hello)
	require.NoError(t, err)
	_, done, err := l.Next(proof)
	require.False(t, done)
	require.ErrorContains(t, err, "the proof of worker 3 (the dialer) is wrong")

	d = NewHandshake(worker(), secret, true)
	_, _, err = d.Next(nil)
	require.NoError(t, err)
	_, done, err = d.Next(welcome)
	require.False(t, done)
	require.ErrorContains(t, err, "the proof of server 1 (the listener) is wrong")
}

// TestHelloReflection gives each side its own messages, or what its own other
// side says.
func TestHelloReflection(t *testing.T) {
	secret := []byte("secret")
	d := NewHandshake(worker(), secret, true)
	hello, _, err := d.Next(nil)
	require.NoError(t, err)
	_, _, err = d.Next(hello)
	require.ErrorContains(t, err, "message of type 240, want 241")

	// The hello made to look like a listener's: the proof is missing.
	d = NewHandshake(worker(), secret, true)
	hello, _, err = d.Next(nil)
	require.NoError(t, err)
	h, _, err := parseHello(hello, TypeHello)
	require.NoError(t, err)
	h.Role = RoleServer
	_, _, err = d.Next(Append(nil, TypeWelcome, &h))
	require.ErrorContains(t, err, "proof")

	// A listener's proof given back to it as the dialer's.
	l := NewHandshake(server(), secret, false)
	welcome, _, err := l.Next(hello)
	require.NoError(t, err)
	mac := welcome[len(welcome)-32:]
	_, _, err = l.Next(append([]byte{byte(TypeProof)}, mac...))
	require.ErrorContains(t, err, "proof")

	// A worker's own listener cannot stand for a server.
	d = NewHandshake(worker(), secret, true)
	hello, _, err = d.Next(nil)
	require.NoError(t, err)
	own := NewHandshake(worker(), secret, false)
	_, _, err = own.Next(hello)
	require.ErrorContains(t, err, "worker 3 connects to worker 3")
}

// TestHelloTampered changes each byte of each message in turn: with a secret,
// no handshake in which a byte was changed on the way is completed by both.
func TestHelloTampered(t *testing.T) {
	for step := range 4 {
		for i := 0; ; i++ {
			d, l := NewHandshake(worker(), []byte("secret"), true), NewHandshake(server(), []byte("secret"), false)
			side, other := d, l
			var in []byte
			var err error
			var done bool
			changed := false
			for s := range 5 {
				var out []byte
				if out, done, err = side.Next(in); err != nil {
					break
				}
				if s == step && i < len(out) {
					out = bytes.Clone(out)
					out[i] ^= 0x20
					changed = true
				}
				in = out
				side, other = other, side
			}
			if !changed {
				require.NoError(t, err)
				require.True(t, done)
				break
			}
			require.Error(t, err, "message %d, byte %d", step, i)
		}
	}
}

// TestHelloStrangers gives a listener and a dialer what no node of ours says.
func TestHelloStrangers(t *testing.T) {
	reject := string(appendBytes([]byte{byte(TypeReject)}, "no \x1b[31mway\n\xff"))
	for _, c := range []struct {
		listener, dialer string // what each gets
		want             string
	}{
		{"", "", "the first message is not a hello: magic number is missing (does fserver listen on this port?)"},
		{"GET / HTTP/1.1\r\n", "GET / HTTP/1.1\r\n", "the first message is not a hello: message of type 71"},
		{"\xf0", "\xf1", "magic number is missing"},
		{"\xf0fsr0\x01\x00\x00\x00", "\xf1fsr0\x01\x00\x00\x00", "magic number is missing"},
		{"\xf0fsrv", "\xf1fsrv", "the frame is too short"},
		{"\xf0fsrv\x01\x00\x00\x00\xff\xff\xff\xff\x7f", "\xf1fsrv\x01\x00\x00\x00\xff\xff\xff\xff\x7f", "more than 255, or more than it holds"},
		{"\xf2", "\xf2", "message of type 242"},
		{"\xf4", "\xf4", "refused by the peer: it gives no reason"},
		{"\xf4\xff\xff\xff\xff\x7f", "\xf4\xff\xff\xff\xff\x7f", "refused by the peer: it gives no reason"},
		{reject, reject, "refused by the peer: no ?[31mway??"},
	} {
		d, l := NewHandshake(worker(), nil, true), NewHandshake(server(), nil, false)
		_, _, err := d.Next(nil)
		require.NoError(t, err)
		for h, in := range map[*Handshake]string{d: c.dialer, l: c.listener} {
			out, done, err := h.Next([]byte(in))
			require.False(t, done)
			require.ErrorContains(t, err, c.want)
			var e *HandshakeError
			require.ErrorAs(t, err, &e)
			require.Equal(t, e.Remote, out == nil, "a refusal is not answered")
			_, _, err = h.Next(nil)
			require.Error(t, err, "it does not begin again")
		}
	}
}

// TestHelloBounds checks what a hello may hold, and that the longest messages
// keep to the bound.
func TestHelloBounds(t *testing.T) {
	long := worker()
	long.Build, long.Cluster = strings.Repeat("b", maxName), strings.Repeat("c", maxName)
	other := server()
	other.Build, other.Cluster = long.Build, long.Cluster
	de, le := shake(t, NewHandshake(long, []byte("s"), true), NewHandshake(other, []byte("s"), false))
	require.NoError(t, de)
	require.NoError(t, le)

	// The longest reasons.
	other.Cluster = strings.Repeat("ü", maxName/2)
	de, le = shake(t, NewHandshake(long, nil, true), NewHandshake(other, nil, false))
	require.ErrorContains(t, de, "refused by the peer")
	require.ErrorContains(t, le, "FSERVER_CLUSTER")
	h := NewHandshake(long, nil, true)
	out, _, _ := h.reject(strings.Repeat("x", 1<<20))
	require.LessOrEqual(t, len(out), maxHandshake)

	for _, c := range []struct {
		change func(*Hello)
		want   string
	}{
		{func(h *Hello) { h.Build += "b" }, "256 bytes of a build"},
		{func(h *Hello) { h.Cluster += "c" }, "256 bytes of a cluster id"},
		{func(h *Hello) { h.Cluster = "a\nb" }, "not printable"},
		{func(h *Hello) { h.Cluster = "\xff" }, "not printable"},
		{func(h *Hello) { h.Role = 3 }, "role 3: want at most 2"},
	} {
		bad := long
		bad.Version = Version
		c.change(&bad)
		_, err := ParseHello(Append(nil, TypeHello, &bad))
		require.ErrorContains(t, err, c.want)
	}

	// A build may be any text, and is made printable.
	odd := worker()
	odd.Version, odd.Build = Version, "v1\x1b[0m\xfe"
	got, err := ParseHello(Append(nil, TypeWelcome, &odd))
	require.NoError(t, err)
	require.Equal(t, "v1?[0m?", got.Build)

	good := Append(nil, TypeHello, &odd)
	for n := range good {
		_, err := ParseHello(good[:n])
		require.Error(t, err)
	}
	_, err = ParseHello(append(good, 0))
	require.ErrorContains(t, err, "the message has 1 bytes too many")
}

// TestHelloPrefix pins what every version of the wire must keep, so that this
// build and any other can tell each other that they differ.
func TestHelloPrefix(t *testing.T) {
	h := worker()
	h.Version = 0x04030201
	want := "fsrv\x01\x02\x03\x04\x06v1.2.3"
	for _, typ := range []Type{240, 241} {
		b := Append(nil, typ, &h)
		require.EqualValues(t, typ, b[0])
		require.Equal(t, want, string(b[1:1+len(want)]))
		// A later version may have anything after it.
		got, _, err := parseHello(append(b[:1+len(want):1+len(want)], 0xff, 0xff), typ)
		require.ErrorIs(t, err, errVersion)
		require.Equal(t, Hello{Version: h.Version, Build: h.Build}, got)
	}
	out, _, _ := NewHandshake(h, nil, true).reject("why")
	require.Equal(t, "\xf4\x03why", string(out))
}

func TestHelloNonce(t *testing.T) {
	seen := make(map[[32]byte]bool)
	for range 100 {
		seen[NewHandshake(worker(), nil, true).me.Nonce] = true
	}
	require.Len(t, seen, 100)
}

// FuzzHello gives a handshake any three messages. Without the secret nobody
// gets through, and nothing but errors comes of it.
func FuzzHello(f *testing.F) {
	h := worker()
	h.Version = Version
	f.Add(true, []byte("\xf1fsrv"), []byte("\xf3"), []byte{})
	f.Add(false, Append(nil, TypeHello, &h), []byte("\xf2"), []byte("\xf4\x02no"))
	h.Secret = true
	f.Add(false, Append(nil, TypeHello, &h), append([]byte{byte(TypeProof)}, make([]byte, 32)...), []byte{})
	h.Role = RoleServer
	f.Add(true, append(Append(nil, TypeWelcome, &h), make([]byte, 32)...), []byte{byte(TypeAccept)}, []byte{})
	h.Version = 9
	f.Add(true, Append(nil, TypeWelcome, &h), []byte{}, []byte{})
	f.Fuzz(func(t *testing.T, dialer bool, a, b, c []byte) {
		me := server()
		if dialer {
			me = worker()
		}
		s := NewHandshake(me, []byte("secret"), dialer)
		if dialer {
			_, _, err := s.Next(nil)
			require.NoError(t, err)
		}
		for _, in := range [][]byte{a, b, c} {
			out, done, err := s.Next(in)
			require.False(t, done)
			require.LessOrEqual(t, len(out), maxHandshake)
			if err != nil {
				require.LessOrEqual(t, len(err.Error()), 4*maxHandshake)
				require.NotContains(t, err.Error(), "\n")
			}
		}
		if h, err := ParseHello(a); err == nil {
			again, err := ParseHello(Append(nil, FrameType(a), &h))
			require.NoError(t, err)
			require.Equal(t, h, again)
		}
	})
}

// TestHelloGolden pins the messages, with known nonces.
func TestHelloGolden(t *testing.T) {
	d, l := worker(), server()
	d.Version, l.Version = Version, Version
	d.Secret, l.Secret = true, true
	for i := range d.Nonce {
		d.Nonce[i], l.Nonce[i] = byte(i), byte(0xff-i)
	}
	hd := &Handshake{secret: []byte("a secret"), dialer: true, me: d, mine: Append(nil, TypeHello, &d), start: true}
	hl := &Handshake{secret: []byte("a secret"), me: l, mine: Append(nil, TypeWelcome, &l), next: TypeHello}
	var g golden
	var in []byte
	for i, side := range []*Handshake{hd, hl, hd, hl} {
		out, _, err := side.Next(in)
		require.NoError(t, err)
		g.add(fmt.Sprintf("%d %s", i+1, []string{"hello", "welcome", "proof", "accept"}[i]), out)
		in = out
	}
	_, done, err := hd.Next(in)
	require.NoError(t, err)
	require.True(t, done)
	out, _, _ := hd.reject("no")
	g.add("reject", out)
	g.compare(t, "testdata/hello_golden.txt")
	require.EqualValues(t, Version, binary.LittleEndian.Uint32(hd.mine[5:]))
}

// TestSamePeer: a process is the same after it has learned its rank, and no other has its epoch.
func TestSamePeer(t *testing.T) {
	hello := func(change func(*Hello)) []byte {
		me := worker()
		me.Rank, me.Epoch = 3, 7
		change(&me)
		out, _, err := NewHandshake(me, nil, true).Next(nil)
		require.NoError(t, err)
		return out
	}
	known := hello(func(*Hello) {})
	require.True(t, SamePeer(known, hello(func(*Hello) {})))
	require.True(t, SamePeer(known, hello(func(h *Hello) { h.Rank = -1 })))
	require.True(t, SamePeer(hello(func(h *Hello) { h.Rank = -1 }), known))
	require.False(t, SamePeer(known, hello(func(h *Hello) { h.Rank = 4 })))
	require.False(t, SamePeer(known, hello(func(h *Hello) { h.Epoch = 8 })))
	require.False(t, SamePeer(known, hello(func(h *Hello) { h.Rank, h.Role = -1, RoleServer })))
	require.False(t, SamePeer(known, known[:9]))
}
