package rails_test

import (
	"bytes"
	"context"
	"io"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/transport"
	"fserver/engine/transport/inproc"
	"fserver/engine/transport/rails"
	"fserver/engine/transport/transporttest"
)

// A stranger is a member that speaks by itself.
type stranger struct {
	d    *duo
	f    transport.Fabric
	c    transport.Conn
	got  [][]byte
	down error
}

// stranger dials b over member 1.
func (d *duo) stranger(hello string) *stranger {
	f, err := d.nets[1].Open(inproc.Options{Gate: transporttest.Gate{Hello: hello}})
	require.NoError(d.t, err)
	d.t.Cleanup(func() { f.Close() })
	s := &stranger{d: d, f: f}
	s.c, err = f.Connect(context.Background(), "inproc:b1")
	require.NoError(d.t, err)
	return s
}

func (s *stranger) send(frames ...[]byte) {
	for _, b := range frames {
		s.d.wait("the frame is taken", func() bool {
			s.poll()
			k, err := s.c.Post([]transport.Op{{Kind: transport.OpFrame, Frame: b}})
			return k == 1 || err != nil
		})
	}
}

func (s *stranger) poll() {
	ev := make([]transport.Event, 8)
	n, _ := s.f.Poll(ev)
	for _, e := range ev[:n] {
		switch e.Kind {
		case transport.EvFrame:
			s.got = append(s.got, append([]byte{}, e.Data...))
		case transport.EvDown:
			s.down = e.Err
		}
	}
}

func (s *stranger) isClosed() {
	s.d.t.Helper()
	s.d.wait("the stranger is closed", func() bool { s.poll(); return s.down != nil })
}

// TestStrangers: a member that belongs to no Conn is closed, and nobody else notices.
func TestStrangers(t *testing.T) {
	d := newDuo(t, 2, 1, false, rails.Options{})
	newer := rails.GreetingOf([16]byte{1}, 0)
	newer[1]++
	for _, c := range []struct {
		name, hello string
		first       []byte
		want        string // what it is told
	}{
		{"of another peer", "evil", rails.Greeting(d.a.c, 2), ""},
		{"for an unknown Conn", "a", rails.GreetingOf([16]byte{1}, 1), ""},
		{"that begins the same Conn", "a", rails.Greeting(d.a.c, 0), ""},
		{"whose number was used", "a", rails.Greeting(d.a.c, 1), ""},
		{"far ahead", "a", rails.Greeting(d.a.c, 1000), ""},
		{"without a greeting", "a", []byte("good morning"), ""},
		{"without a word", "a", nil, ""},
		{"with another count of fabrics", "a", append(rails.Greeting(d.a.c, 2)[:24], 3, 0, 0, 0, 1, 0), ""},
		{"of a fabric that it has not", "a", append(rails.Greeting(d.a.c, 2)[:22], 2, 0, 2, 0, 0, 0, 1, 0), "rails: a greeting of fabric 2 of 2"},
		{"of a strand that it has not", "a", append(rails.Greeting(d.a.c, 2)[:22], 0, 0, 2, 0, 1, 0, 1, 0), "strand 1 of 1"},
		{"of a strand that we have not", "a", append(rails.Greeting(d.a.c, 2)[:22], 0, 0, 2, 0, 1, 0, 2, 0), ""},
		{"of another version", "a", newer, "want a greeting of version 2"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := d.stranger(c.hello)
			s.send(c.first)
			s.isClosed()
			require.Contains(t, string(bytes.Join(s.got, nil)), c.want)
			require.Equal(t, c.want == "", len(s.got) == 0)
			require.Equal(t, 2, rails.Live(d.a.c))
			require.Equal(t, 2, rails.Live(d.b.c))
			d.wait("the stranger is forgotten", func() bool { return rails.Rails(d.b.f) == 2 })
			d.traffic(10, func() {})
		})
	}
}

// TestStrangersThatSayNothing: only so many are kept.
func TestStrangersThatSayNothing(t *testing.T) {
	d := newDuo(t, 2, 1, false, rails.Options{})
	first := d.stranger("quiet")
	var rest []*stranger
	for range 256 {
		rest = append(rest, d.stranger("quiet"))
	}
	first.isClosed()
	rest[255].poll()
	require.NoError(t, rest[255].down)
	d.traffic(10, func() {})
}

// TestBrokenPeer: what is no item, or an item that may not come, ends that Conn alone.
func TestBrokenPeer(t *testing.T) {
	item := func(kind byte, num, first, second byte) []byte {
		b := make([]byte, 25)
		b[0], b[1], b[9], b[17] = kind, num, first, second
		return b
	}
	long := func(b []byte) []byte { return append(b, make([]byte, transport.MaxFrame-len(b))...) }
	for i, c := range []struct {
		name string
		say  [][]byte
		want string
	}{
		{"nothing", [][]byte{{}}, "rails: an item of 0 bytes: at least 25"},
		{"a short item", [][]byte{item(3, 0, 0, 0)[:24]}, "rails: an item of 24 bytes: at least 25"},
		{"a long acknowledgement", [][]byte{append(item(3, 0, 0, 0), 1)}, "rails: an item of kind 3 and 26 bytes: want 25"},
		{"an unknown kind", [][]byte{item(9, 0, 0, 0)}, "rails: an item of unknown kind 9 on member 0"},
		{"a greeting again", [][]byte{rails.GreetingOf([16]byte{}, 0)}, "rails: an item of kind 16 and 30 bytes: want 25"},
		{"an acknowledgement of nothing", [][]byte{item(3, 0, 1, 0)}, "rails: member 0 acknowledges 1 frames, of 0"},
		{"a frame twice", [][]byte{item(1, 0, 0, 0), item(1, 0, 0, 0)}, "rails: frame 0 on member 0 has come before"},
		{"a number far ahead", [][]byte{append([]byte{1, 0, 1}, make([]byte, 22)...)}, "rails: frame 256 on member 0: only 0 to 255 may come"},
		{"a statement about none", [][]byte{item(4, 0, 0, 200)}, "rails: member 200, but 1 has not come yet: at most 63 ahead"},
		{"a statement about a large number", [][]byte{append(item(4, 0, 0, 0)[:21], 1, 0, 0, 0)}, "rails: a statement about member 4294967296, which is no number of a member"},
		{"an empty piece", [][]byte{{17}}, "rails: a piece of 0 bytes, behind one of 0: want one of 1 to 25"},
		{"a long piece", [][]byte{long([]byte{17})}, "rails: a piece of 1048575 bytes, behind one of 0: want one of 1 to 25"},
		{"two pieces", [][]byte{{17, 1}, {17, 2}}, "rails: a piece of 1 bytes, behind one of 1: want one of 1 to 25"},
		{"a piece before a short frame", [][]byte{{17, 1}, item(1, 0, 0, 0)}, "rails: an item of kind 1 and 25 bytes behind a piece"},
		{"a reason", [][]byte{append([]byte{18}, "no \x00 more"...)}, `rails: the peer has ended the connection: "no \x00 more"`},
		{"too much ahead of what is missing", func() (all [][]byte) {
			for n := range byte(8) {
				all = append(all, long(item(1, n+1, 0, 0)))
			}
			return all
		}(), "bytes of frames have come ahead of frame 0"},
		{"what is away, though it has dialed", [][]byte{append([]byte{19}, make([]byte, 8)...)}, "which members are away"},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := newDuo(t, 2, 1, false, rails.Options{})
			d.b.others = map[transport.Conn]error{}
			s := d.stranger("a")
			s.send(rails.GreetingOf([16]byte{byte(i)}, 0))
			s.send(c.say...)
			d.wait("the conn has ended", func() bool {
				for _, err := range d.b.others {
					if err != nil {
						require.ErrorContains(t, err, c.want)
						require.NotErrorIs(t, err, io.EOF)
						return true
					}
				}
				return false
			})
			s.isClosed()
			if c.name != "a reason" {
				require.Contains(t, string(bytes.Join(s.got, nil)), c.want)
			}
			d.traffic(10, func() {})
		})
	}
}
