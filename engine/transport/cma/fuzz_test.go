package cma

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// FuzzRecords reads random rings. Nothing may panic, write beside a region, or give
// more than the ring has.
func FuzzRecords(f *testing.F) {
	const size, guard, ringLen = 1 << 10, 64, 1 << 13
	memory := make([]byte, guard+size+guard)
	known := new(link.Regions)
	known.Init(new(link.Fabric))
	key, err := known.Register(mem.Region{Addr: mem.Of(memory[guard : guard+size]).Addr, Len: size, Dev: mem.CPU})
	require.NoError(f, err)
	record := func(w uint64, words ...uint64) []byte {
		b := make([]byte, wordLen*(1+len(words)))
		put64(b, 0, w)
		for i, v := range words {
			put64(b, 1+i, v)
		}
		return b
	}
	write := func(kind uint8, n, off, claimed uint64) []byte {
		b := record(makeWord(uint64(kind), n, 0), key.ID, key.Token, off, claimed)
		return append(b, make([]byte, n)...)
	}
	frame := record(makeWord(recFrame, 8, 8), 1)
	f.Add([]byte{}, false)
	f.Add(frame, false)
	f.Add(append(frame, record(makeWord(recSkip, 0, 0))...), true)
	f.Add(append(record(makeWord(recFrame, 8, 16), 1), record(makeWord(recFrame, 8, 16), 2)...), false)
	f.Add(record(makeWord(recFrame, 8, transport.MaxFrame), 1), false)
	f.Add(append(write(recStaged, 16, 0, 16), write(recStaged, 8, 16, 8)...), false)
	f.Add(write(recStaged, 8, size-7, 8), true)
	f.Add(write(recWritten, 0, 8, size-8), true)
	f.Add(write(recWritten, 0, 8, 1<<63), true)

	f.Fuzz(func(t *testing.T, b []byte, direct bool) {
		for i := range memory {
			memory[i] = 0xA5
		}
		ring := make([]byte, ringLen)
		copy(ring, b)
		fab := &Fabric{arena: make([]byte, 0, arenaSize)}
		x := &rx{consumer: consumer{ring: ring}, regions: known, direct: direct}
		for x.pos < 2*ringLen { // twice, as after a skip
			w := x.peek()
			if w == 0 {
				break
			}
			before := x.pos
			var ev transport.Event
			made, taken, err := x.take(&Conn{f: fab}, w, &ev)
			if err != nil {
				break
			}
			if !taken { // until the next Poll
				require.False(t, made)
				fab.arena = fab.arena[:0]
				fab.Seq++
				continue
			}
			require.Greater(t, x.pos, before)
			require.LessOrEqual(t, len(ev.Data), transport.MaxFrame)
		}
		require.Equal(t, guard, bytes.Count(memory[:guard], []byte{0xA5}))
		require.Equal(t, guard, bytes.Count(memory[guard+size:], []byte{0xA5}))
	})
}

// FuzzNote takes random messages of the set-up: what one says is the same when it is
// sent again, and can be told to people.
func FuzzNote(f *testing.F) {
	f.Add((&note{Version: layoutVersion, Mode: Direct, There: verdict{tryError, 1}, Word: 1, Number: 2}).encode())
	f.Add(bytes.Repeat([]byte{0xFF}, len((&note{}).encode())))
	f.Fuzz(func(t *testing.T, b []byte) {
		var n, again note
		if n.decode(b) != nil {
			return
		}
		for _, v := range []verdict{n.There, n.Back} {
			_ = v.reason("here", "there") + v.remedy()
		}
		require.NoError(t, again.decode(n.encode()))
		require.Equal(t, n, again)
	})
}
