package transporttest

import (
	"fmt"
	"io"
	"slices"

	"github.com/stretchr/testify/require"
)

var peerCases = []testCase{
	{"TwoConnsBetweenTwoFabrics", testTwoConns},
	{"FortyPeers", testFortyPeers},
	{"Mesh", testMesh},
}

func testTwoConns(w *world) {
	a, b := w.open("a"), w.open("b")
	la1, lb1 := w.connect(a, b)
	la2, lb2 := w.connect(a, b)
	lb3, la3 := w.connect(b, a)
	for i, p := range [][2]*link{{la1, lb1}, {la2, lb2}, {la3, lb3}} {
		p[0].post(frame(fmt.Appendf(nil, "conn %d", i)))
		w.until("the frame arrives", func() bool { return len(p[1].frames) > 0 })
		require.Equal(w, fmt.Sprintf("conn %d", i), string(p[1].frames[0]))
	}
	la1.close()
	w.until("the peer hears", func() bool { return lb1.isDown })
	w.echo(la2, lb2)
	w.echo(la3, lb3)
	require.False(w, la2.isDown || lb2.isDown || la3.isDown || lb3.isDown)
}

func testFortyPeers(w *world) {
	const peers, frames, size = 40, 10, 5000
	s := w.open("server")
	all := s.target(peers * size)
	var from, to []*link
	for i := range peers {
		a, b := w.connect(w.openWith(Options{Gate: Gate{Hello: fmt.Sprint("peer ", i)}}), s)
		require.Equal(w, fmt.Sprint("peer ", i), string(b.c.Peer().Hello))
		from, to = append(from, a), append(to, b)
	}
	for i, l := range from {
		l.post(all.write(uint64(i*size), uint32(i), w.source(uint64(i), size)))
		for j := range frames {
			l.post(frame(fmt.Appendf(nil, "%d/%d", i, j)))
		}
	}
	w.until("all that 40 peers sent arrives", func() bool {
		for i := range peers {
			if len(to[i].frames) < frames || len(to[i].writes) < 1 || !from[i].idle() {
				return false
			}
		}
		return true
	})
	for i := range peers {
		require.Equal(w, []written{{uint32(i), size}}, to[i].writes)
		w.holds("target", slice(all.Span(), uint64(i*size), size), uint64(i))
		for j, f := range to[i].frames {
			require.Equal(w, fmt.Sprintf("%d/%d", i, j), string(f))
		}
	}
	s.close()
	w.until("all peers hear of the end", func() bool {
		return !slices.ContainsFunc(from, func(l *link) bool { return !l.isDown })
	})
	for _, l := range from {
		require.ErrorIs(w, l.down, io.EOF)
	}
}

func testMesh(w *world) {
	nodes := []*node{w.open("0"), w.open("1"), w.open("2"), w.open("3")}
	for i, a := range nodes {
		for _, b := range nodes[:i] {
			la, lb := w.connect(a, b)
			w.echo(la, lb)
			w.transfer(la, lb)
		}
	}
}
