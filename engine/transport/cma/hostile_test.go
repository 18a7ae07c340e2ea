package cma

import (
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"net"
	"os"
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

// inject puts a record of raw bytes behind word w into the ring of e's Conn.
func (e *end) inject(w uint64, words ...uint64) {
	c := e.conn.(*Conn)
	rec, _, _ := c.tx.room(uint64(wordLen * (1 + len(words))))
	for i, v := range words {
		put64(rec, 1+i, v)
	}
	c.tx.put(w, uint64(len(rec)))
	c.tx.commit()
}

// TestBrokenRecords sends what no peer of ours sends. Each ends its own Conn
// and nothing else.
func TestBrokenRecords(t *testing.T) {
	eachMode(t, func(t *testing.T, m Mode) {
		noLeaks(t)
		evil, victim := pair(t, m, m)
		good := &end{f: open(t, Options{Mode: m})}
		join(t, good, victim)
		goodAtVictim := victim.conn
		k := victim.key
		write := func(kind, size uint64, words ...uint64) func() {
			return func() { evil.inject(makeWord(kind, size, 0), words...) }
		}
		for name, do := range map[string]func(){
			"kind 255":                  func() { evil.inject(255) },
			"all ones":                  func() { evil.inject(^uint64(0)) },
			"bits that are zero":        func() { evil.inject(makeWord(recFrame, 0, 0) | 1<<8) },
			"total of no frame":         func() { evil.inject(makeWord(recSkip, 0, 1)) },
			"skip with bytes":           func() { evil.inject(makeWord(recSkip, 8, 0)) },
			"skip at the start":         func() { word(evil.conn.(*Conn).tx.ring, 0).Store(recSkip); evil.inject(recSkip) },
			"frame too large":           func() { evil.inject(makeWord(recFrame, 8, transport.MaxFrame+1)) },
			"piece too large":           func() { evil.inject(makeWord(recFrame, framePiece+8, framePiece+16)) },
			"piece larger than frame":   func() { evil.inject(makeWord(recFrame, 16, 8)) },
			"piece of nothing":          func() { evil.inject(makeWord(recFrame, 0, 8)) },
			"other frame in a frame":    func() { evil.inject(makeWord(recFrame, 8, 16), 0); evil.inject(makeWord(recFrame, 8, 24), 0) },
			"write in a frame":          func() { evil.inject(makeWord(recFrame, 8, 16), 0); write(recStaged, 0, k.ID, k.Token, 0, 0)() },
			"past the end of the ring":  write(recStaged, maxSize, k.ID, k.Token, 0, maxSize),
			"other length than claimed": write(recStaged, 8, k.ID, k.Token, 0, 16, 0),
			"length of all ones":        write(recStaged, 0, k.ID, k.Token, 0, ^uint64(0)),
			"out of bounds":             write(recStaged, 8, k.ID, k.Token, victim.in.Len-7, 8, 0),
			"wrong token":               write(recStaged, 8, k.ID, k.Token^1, 0, 8, 0),
			"stale key":                 write(recStaged, 8, k.ID-link.SlotLimit, k.Token, 0, 8, 0),
			"key of nothing":            write(recStaged, 0, 0, 0, 0, 0),
			"told, with bytes":          write(recWritten, 8, k.ID, k.Token, 0, 8, 0),
			"told, out of bounds":       write(recWritten, 0, k.ID, k.Token, victim.in.Len, 1),
		} {
			join(t, evil, victim)
			at := victim.conn
			do()
			var err error
			until(t, func() bool { _, err = victim.poll(); return err != nil })
			require.NotErrorIs(t, err, io.EOF, name)
			require.ErrorContains(t, err, "the peer ", name)
			var bad error
			until(t, func() bool { _, bad = at.Post(nil); return bad != nil }) // it may be in use for a moment
			require.ErrorIs(t, bad, err, name)
			require.Equal(t, make([]byte, victim.in.Len), victim.in.Span().Bytes(), name)
			require.Error(t, evil.down(t), name)
		}
		victim.conn = goodAtVictim
		require.NoError(t, victim.post(0, []byte("still here")))
		f, err := good.waitFrame(true)
		require.NoError(t, err)
		require.Equal(t, "still here", string(f))
	})
}

// TestBind lets a peer write with a key that is kept to another one. What goes
// through the ring does not land; a direct write ends the Conn when it is told of.
func TestBind(t *testing.T) {
	eachMode(t, func(t *testing.T, m Mode) {
		noLeaks(t)
		evil, victim := pair(t, m, m)
		require.ErrorContains(t, victim.f.Bind(transport.Key{ID: victim.key.ID}, victim.conn), "no such key")
		good := &end{f: open(t, Options{Mode: m}), out: evil.out, remote: victim.key}
		good.ops[0] = transport.Op{Kind: transport.OpWrite, Src: good.span[:]}
		good.ops[1] = transport.Op{Kind: transport.OpFrame}
		join(t, good, victim)
		require.NoError(t, victim.f.Bind(victim.key, victim.conn))
		in, out := victim.in.Span().Bytes(), evil.out.Span().Bytes()
		copy(out, bytes.Repeat([]byte{'x'}, len(out)))
		for _, n := range []uint64{1, small, small + 1, 1 << 20} {
			join(t, evil, victim)
			require.NoError(t, evil.post(n, nil))
			var refused, down error
			until(t, func() bool {
				if refused == nil {
					_, refused = victim.poll()
				}
				if down == nil {
					_, down = evil.poll()
				}
				return refused != nil && down != nil
			})
			require.ErrorIs(t, refused, link.ErrNotIts)
			require.NotErrorIs(t, down, io.EOF)
			if m == Staged || n <= small {
				require.Equal(t, make([]byte, len(in)), in, "%d bytes", n)
			}
			clear(in)
		}
		require.NoError(t, good.post(8, []byte("its own")))
		f, err := victim.waitFrame(true)
		require.NoError(t, err)
		require.Equal(t, "its own", string(f))
		require.Equal(t, "xxxxxxxx", string(in[:8]))

		// A region that takes the place of one that was bound is good for all.
		victim.f.Deregister(victim.key)
		k, err := victim.f.Register(victim.in)
		require.NoError(t, err)
		require.Equal(t, victim.key.ID%link.SlotLimit, k.ID%link.SlotLimit)
		join(t, evil, victim)
		evil.remote = k
		require.NoError(t, evil.post(8, []byte("good for all")))
		f, err = victim.waitFrame(true)
		require.NoError(t, err)
		require.Equal(t, "good for all", string(f))
	})
}

// TestBrokenHead says that more has been read than was sent.
func TestBrokenHead(t *testing.T) {
	for _, head := range []uint64{1 << 40, ^uint64(0)} {
		evil, victim := pair(t, Direct, Direct)
		evil.conn.(*Conn).mine.head.Store(head)
		frame := make([]byte, framePiece)
		var err error
		until(t, func() bool {
			_, err = victim.conn.Post([]transport.Op{{Kind: transport.OpFrame, Frame: frame}})
			return err != nil
		})
		require.ErrorContains(t, err, "the peer reports that it has read")
	}
}

// TestPeerThatLetsNothingIn says that it has ended the Conn, and does not.
func TestPeerThatLetsNothingIn(t *testing.T) {
	start := time.Now()
	evil, victim := pair(t, Direct, Direct)
	evil.conn.(*Conn).mine.over.Store(overCut)
	require.NoError(t, victim.post(1<<20, nil))
	c := victim.conn.(*Conn)
	now := time.Now()
	before := c.stalled(now, true) // since a Poll last found nothing owed, if one has looked
	require.LessOrEqual(t, before, now.Sub(start))
	require.Equal(t, before+time.Second, c.stalled(now.Add(time.Second), true))
	evil.conn.(*Conn).mine.over.Store(0)
	until(t, func() bool {
		_, err := victim.poll()
		require.NoError(t, err)
		return !c.Unsent()
	})
	require.Zero(t, c.stalled(now.Add(2*time.Second), true))
}

// TestGarbageEverywhere fills all that is shared with random bytes while both
// sides use it.
func TestGarbageEverywhere(t *testing.T) {
	eachMode(t, func(t *testing.T, m Mode) {
		noLeaks(t)
		for seed := range byte(20) {
			evil, victim := pair(t, m, m)
			shared := evil.conn.(*Conn).seg.mem
			for i := range shared[:ringsAt+64] {
				shared[i] = byte(i)*seed + byte(i>>3)
			}
			for _, side := range []int{0, 1} {
				ring := shared[ringsAt+side*ringStaged:]
				for i := range ring[:4096] {
					ring[i] = byte(i)*seed + 3
				}
			}
			for end := time.Now().Add(50 * time.Millisecond); time.Now().Before(end); {
				if victim.post(100, []byte("hello")) != nil {
					break
				}
				if _, err := victim.poll(); err != nil {
					break
				}
				victim.f.Arm()
			}
			// What the garbage says of a copy must not hold up the end for long.
			evil.f.Owned(func() { evil.conn.(*Conn).end(transport.ErrClosed) })
			if victim.conn.(*Conn).Err == nil {
				victim.conn.(*Conn).theirs.busy.Store(0)
			}
			if last := victim.conn.(*Conn).last; last.seg != nil {
				last.at.busy.Store(0)
			}
			require.NoError(t, victim.f.Close())
			require.NoError(t, evil.f.Close())
		}
	})
}

// A stranger passed the Gate of f over a bare socket.
func stranger(t *testing.T, f *Fabric) *net.UnixConn {
	t.Helper()
	name, err := f.socketName(f.Addr())
	require.NoError(t, err)
	nc, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: name, Net: "unix"})
	require.NoError(t, err)
	t.Cleanup(func() { nc.Close() })
	require.NoError(t, nc.SetDeadline(time.Now().Add(patience)))
	hs := transporttest.Gate{Hello: "stranger"}.Open(true)
	out, _, _ := hs.Next(nil)
	require.NoError(t, link.SendMessage(nc, out))
	in, err := link.ReceiveMessage(nc)
	require.NoError(t, err)
	_, done, err := hs.Next(in)
	require.True(t, done)
	require.NoError(t, err)
	return nc
}

// tell sends a message of the set-up.
func tell(t *testing.T, nc *net.UnixConn, b []byte) {
	t.Helper()
	require.NoError(t, link.SendMessage(nc, append([]byte{'M'}, b...)))
}

// hear receives a note.
func hear(t *testing.T, nc *net.UnixConn) (in note) {
	t.Helper()
	b, err := link.ReceiveMessage(nc)
	require.NoError(t, err)
	require.Equal(t, byte('M'), b[0])
	require.NoError(t, in.decode(b[1:]))
	return in
}

func TestBrokenAttach(t *testing.T) {
	memory := func(t *testing.T, size, seals int) int {
		b, fd, err := mem.NewSealed("fserver-cma", size, seals)
		require.NoError(t, err)
		require.NoError(t, unix.Munmap(b))
		return fd
	}
	first := (&note{Version: layoutVersion}).encode()
	rights := func(t *testing.T, nc *net.UnixConn, b []byte, fds ...int) {
		_, _, err := nc.WriteMsgUnix(b, unix.UnixRights(fds...), nil)
		require.NoError(t, err)
		for _, fd := range fds {
			unix.Close(fd)
		}
	}
	pass := func(t *testing.T, nc *net.UnixConn, fds ...int) {
		tell(t, nc, first)
		rights(t, nc, []byte{0}, fds...)
	}
	for name, c := range map[string]struct {
		do   func(t *testing.T, nc *net.UnixConn)
		want string
	}{
		"nothing": {func(t *testing.T, nc *net.UnixConn) {
			hear(t, nc)
			nc.Close()
		}, "cut the connection"},
		"no memory, and the end": {func(t *testing.T, nc *net.UnixConn) {
			tell(t, nc, first)
			hear(t, nc)
			nc.Close()
		}, "cut the connection"},
		"part of a message": {func(t *testing.T, nc *net.UnixConn) {
			_, err := nc.Write([]byte{'F'})
			require.NoError(t, err)
			hear(t, nc)
			nc.Close()
		}, io.ErrUnexpectedEOF.Error()},
		"part of a note": {func(t *testing.T, nc *net.UnixConn) { tell(t, nc, first[:len(first)-1]) }, "same version of fserver"},
		"empty note":     {func(t *testing.T, nc *net.UnixConn) { tell(t, nc, nil) }, "same version of fserver"},
		"garbage": {func(t *testing.T, nc *net.UnixConn) {
			_, err := nc.Write(bytes.Repeat([]byte{7}, 100))
			require.NoError(t, err)
		}, "not a message of fserver"},
		"garbage of the right length": {func(t *testing.T, nc *net.UnixConn) {
			tell(t, nc, bytes.Repeat([]byte{7}, len(first)))
		}, "same version of fserver"},
		"another version": {func(t *testing.T, nc *net.UnixConn) {
			tell(t, nc, (&note{Version: layoutVersion + 1}).encode())
		}, "same version of fserver"},
		"no memory": {func(t *testing.T, nc *net.UnixConn) {
			tell(t, nc, first)
			_, err := nc.Write([]byte{0})
			require.NoError(t, err)
		}, "passed no shared memory"},
		"memory with the note": {func(t *testing.T, nc *net.UnixConn) {
			fd := memory(t, segmentSize, mem.Seals)
			b := append(binary.LittleEndian.AppendUint32([]byte("FSRV"), uint32(1+len(first))), 'M')
			rights(t, nc, append(b, first...), fd)
			_, err := nc.Write([]byte{0})
			require.NoError(t, err)
		}, "passed no shared memory"},
		"memory that can shrink": {func(t *testing.T, nc *net.UnixConn) {
			pass(t, nc, memory(t, segmentSize, unix.F_SEAL_GROW|unix.F_SEAL_SEAL))
		}, "with seals"},
		"memory that cannot be written": {func(t *testing.T, nc *net.UnixConn) {
			pass(t, nc, memory(t, segmentSize, mem.Seals|unix.F_SEAL_FUTURE_WRITE))
		}, "map "},
		"too little memory": {func(t *testing.T, nc *net.UnixConn) {
			pass(t, nc, memory(t, segmentSize-4096, mem.Seals))
		}, "bytes of shared memory"},
		"a pipe": {func(t *testing.T, nc *net.UnixConn) {
			var p [2]int
			require.NoError(t, unix.Pipe2(p[:], unix.O_CLOEXEC))
			pass(t, nc, p[0])
			unix.Close(p[1])
		}, "no valid shared memory"},
		"two descriptors": {func(t *testing.T, nc *net.UnixConn) {
			pass(t, nc, memory(t, segmentSize, mem.Seals), memory(t, segmentSize, mem.Seals))
		}, "not requested"},
		"many descriptors": {func(t *testing.T, nc *net.UnixConn) {
			var fds []int
			for range 100 {
				fds = append(fds, memory(t, 4096, mem.Seals))
			}
			pass(t, nc, fds...)
		}, "not requested"},
		"silence": {func(*testing.T, *net.UnixConn) {}, "not finished within"},
	} {
		t.Run(name, func(t *testing.T) {
			noLeaks(t)
			var refusals refusals
			limits := transport.Limits{}
			if name == "silence" {
				limits.Handshake = 50 * time.Millisecond
			}
			f := open(t, Options{Options: link.Options{Listen: here, Refused: refusals.add, Limits: limits}})
			c.do(t, stranger(t, f))
			until(t, func() bool { return refusals.count() > 0 })
			require.ErrorContains(t, refusals.all[0], c.want)
			ev := make([]transport.Event, 1)
			n, err := f.Poll(ev)
			require.NoError(t, err)
			require.Zero(t, n)
		})
	}
}

// TestLiarAboutItself names a word that is not there, and one that holds
// something else: nothing is written, and the Conn is a staged one. That holds also for a peer that can
// write into us, and claims that we can write into it.
func TestLiarAboutItself(t *testing.T) {
	f := open(t, Options{Options: link.Options{Listen: here}})
	p := newProbe()
	for _, n := range []note{{Word: 8, Number: 1}, {Word: addressOf(&p.word), Number: p.number + 1}} {
		for _, writes := range []bool{false, true} {
			nc := stranger(t, f)
			b, fd, err := mem.NewSealed("fserver-cma", segmentSize, mem.Seals)
			require.NoError(t, err)
			n.Version = layoutVersion
			tell(t, nc, n.encode())
			require.NoError(t, passMemory(nc, fd))
			unix.Close(fd)
			in := hear(t, nc)
			if writes {
				require.Equal(t, tryDone, tryWord(os.Getpid(), in.Word, in.Number).Kind)
			}
			n.There.Kind, n.Back.Kind = tryDone, tryDone
			tell(t, nc, n.encode())
			require.Equal(t, tryOther, hear(t, nc).There.Kind)
			tell(t, nc, n.encode())
			require.Equal(t, writes, hear(t, nc).Back.Kind == tryDone)
			var c *Conn
			until(t, func() bool {
				ev := make([]transport.Event, 1)
				if n, _ := f.Poll(ev); n > 0 && ev[0].Kind == transport.EvAccept {
					c = ev[0].Conn.(*Conn)
				}
				return c != nil
			})
			require.Equal(t, "cma/staged", c.Peer().Via)
			require.NoError(t, unix.Munmap(b))
		}
	}
	require.Equal(t, p.number, p.word.Load())
}

// TestBrokenTable: a peer that passes no table where each can write into the other is refused, and so
// is one that passes other memory.
func TestBrokenTable(t *testing.T) {
	for want, pass := range map[string]func(nc *net.UnixConn) error{
		"passed no shared memory": func(nc *net.UnixConn) error { _, err := nc.Write([]byte{0}); return err },
		"bytes of shared memory": func(nc *net.UnixConn) error {
			b, fd, err := mem.NewSealed("fserver-cma", tableSize+4096, mem.Seals)
			require.NoError(t, err)
			defer unix.Close(fd)
			require.NoError(t, unix.Munmap(b))
			return passMemory(nc, fd)
		},
	} {
		t.Run(want, func(t *testing.T) {
			noLeaks(t)
			var refusals refusals
			f := open(t, Options{Options: link.Options{Listen: here, Refused: refusals.add}})
			nc := stranger(t, f)
			p := newProbe()
			n := note{Version: layoutVersion, Word: addressOf(&p.word), Number: p.number}
			tell(t, nc, n.encode())
			b, fd, err := mem.NewSealed("fserver-cma", segmentSize, mem.Seals)
			require.NoError(t, err)
			require.NoError(t, passMemory(nc, fd))
			unix.Close(fd)
			in := hear(t, nc)
			n.There = tryWord(os.Getpid(), in.Word, in.Number)
			tell(t, nc, n.encode())
			n.Back = p.came(hear(t, nc).There)
			require.Equal(t, tryDone, n.Back.Kind)
			tell(t, nc, n.encode())
			require.Equal(t, tryDone, hear(t, nc).Back.Kind)
			require.NoError(t, pass(nc))
			until(t, func() bool { return refusals.count() > 0 })
			require.ErrorContains(t, refusals.all[0], want)
			require.NoError(t, unix.Munmap(b))
		})
	}
}

// TestFloodOfHalfOpenConnections opens 10^4 connections that never say a word, 256
// of them at a time, eight times as many as may be inside the Gate. Good peers get
// in meanwhile, as the silent ones give way, and descriptors and goroutines stay
// bounded, and come back.
func TestFloodOfHalfOpenConnections(t *testing.T) {
	noLeaks(t)
	const total, atOnce, pending, friends = 10_000, 256, 32, 20
	var refusals refusals
	f := open(t, Options{Options: link.Options{Listen: here, Refused: refusals.add, Limits: transport.Limits{Pending: pending}}})
	dialer := open(t, Options{})
	name, err := f.socketName(f.Addr())
	require.NoError(t, err)
	files := func() int {
		e, err := os.ReadDir("/proc/self/fd")
		require.NoError(t, err)
		return len(e)
	}
	descriptors, routines := files(), runtime.NumGoroutine()
	ev := make([]transport.Event, 8)
	accepted := 0
	poll := func() {
		for _, f := range []*Fabric{f, dialer} {
			n, err := f.Poll(ev)
			require.NoError(t, err)
			for _, e := range ev[:n] {
				if e.Kind == transport.EvAccept {
					accepted++
				}
			}
		}
	}

	var silent []net.Conn
	tries := 0
	for i := range total {
		nc, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: name, Net: "unix"})
		require.NoError(t, err)
		if silent = append(silent, nc); len(silent) > atOnce {
			require.NoError(t, silent[0].Close())
			silent = silent[1:]
		}
		if (i+1)%(total/friends) != 0 {
			continue
		}
		require.Less(t, files()-descriptors, atOnce+2*pending)
		require.LessOrEqual(t, runtime.NumGoroutine()-routines, 2*pending)
		var c transport.Conn
		until(t, func() bool { // as a node does, it tries again where the machine was too slow for it
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			tries++
			c, err = dialer.Connect(ctx, f.Addr())
			return err == nil
		})
		c.Close()
		poll()
	}
	for _, nc := range silent {
		require.NoError(t, nc.Close())
	}
	until(t, func() bool {
		poll()
		return refusals.count()+accepted >= total+tries && files() <= descriptors && runtime.NumGoroutine() <= routines
	})
	require.Equal(t, total+tries, refusals.count()+accepted, "each is told once")
	require.GreaterOrEqual(t, accepted, friends)
}

// TestNothingOnDisk looks for what a crash would leave.
func TestNothingOnDisk(t *testing.T) {
	a, _ := pair(t, Direct, Direct)
	require.NotNil(t, a.conn)
	links, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	for _, l := range links {
		if target, err := os.Readlink("/proc/self/fd/" + l.Name()); err == nil && strings.Contains(target, "fserver") {
			require.True(t, strings.HasPrefix(target, "/memfd:"), target)
		}
	}
}
