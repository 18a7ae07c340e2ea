package transporttest

import (
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/transport"
)

var allocCases = []testCase{
	{"PostAndPollAllocateNothing", testAllocs},
}

// testAllocs goes around the node's book-keeping, which allocates.
func testAllocs(w *world) {
	if RaceEnabled {
		w.Skip("the race detector allocates")
	}
	if w.bed.Allocates != "" {
		w.Skip(w.bed.Allocates)
	}
	a, b := w.pair()
	dst, src := b.n.target(4096), w.source(1, 4096)
	ops := []transport.Op{dst.write(0, 1, src), frame(make([]byte, 64))}
	ev := make([]transport.Event, 16)
	var ended, arrived int
	poll := func(n *node) {
		k, err := n.f.Poll(ev)
		if err != nil {
			w.Fatalf("poll: %v", err)
		}
		for _, e := range ev[:k] {
			switch e.Kind {
			case transport.EvDone:
				ended++
			case transport.EvFrame:
				arrived++
			default:
				w.Fatalf("unexpected event %+v", e)
			}
		}
	}
	round := func() {
		ended, arrived = 0, 0
		for posted := 0; ended < len(ops) || arrived == 0; {
			if posted < len(ops) {
				k, err := a.c.Post(ops[posted:])
				if err != nil {
					w.Fatalf("post: %v", err)
				}
				posted += k
			}
			poll(a.n)
			poll(b.n)
		}
	}
	for range 1000 {
		round()
	}
	require.Zero(w, testing.AllocsPerRun(1000, round))
}
