package tcp

import (
	"context"
	"errors"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/transport"
	"fserver/engine/transport/link"
	"fserver/engine/transport/transporttest"
)

// forEachLink runs a test with and without TLS. dial opens a connection that
// passes the Gate.
func forEachLink(t *testing.T, run func(t *testing.T, id *link.Identity, dial func(*user) (io.Writer, transport.Conn))) {
	for _, id := range []*link.Identity{nil, shared(t, "the secret of both")} {
		name := "plain"
		if id != nil {
			name = "TLS"
		}
		t.Run(name, func(t *testing.T) {
			run(t, id, func(u *user) (io.Writer, transport.Conn) {
				u.t.Helper()
				n := len(u.conns)
				var w io.Writer
				if id == nil {
					w = dialBare(u.t, u.f)
				} else {
					w, _ = dialTLS(u.t, u.f, id, nil)
				}
				u.until(func() bool { return len(u.conns) > n })
				return w, u.conns[n]
			})
		})
	}
}

// TestHostilePeer lets a peer that passed the Gate do what no node of ours does.
// Each attempt ends its connection, is told once, and touches nothing else: not
// the memory around and beyond the region, not another connection.
func TestHostilePeer(t *testing.T) {
	const size = 4096
	const top = uint64(1) << 63
	forEachLink(t, func(t *testing.T, id *link.Identity, dial func(*user) (io.Writer, transport.Conn)) {
		noLeaks(t)
		const stall = 300 * time.Millisecond
		u := newUser(t, open(t, Options{
			Listen: "127.0.0.1:0", TLS: id, Limits: transport.Limits{Stall: stall},
			Refused: func(remote string, err error) { t.Errorf("refused %s: %v", remote, err) },
		}))
		foreign := open(t, Options{})

		// The region is the middle of what is mapped.
		all := hold(t, 3*size)
		region := all
		region.Addr, region.Len = all.Addr+size, size
		key, err := u.f.Register(region)
		require.NoError(t, err)
		stale, err := u.f.Register(region)
		require.NoError(t, err)
		u.f.Deregister(stale)
		elsewhere, err := foreign.Register(region)
		require.NoError(t, err)

		good, goodConn := dial(u)
		granted, err := u.f.Register(region)
		require.NoError(t, err)
		require.NoError(t, u.f.Bind(granted, goodConn))
		write := func(k transport.Key, off, n uint64) []byte {
			return record(header{kind: recWrite, key: k.ID, token: k.Token, offset: off, length: n}, strings.Repeat("x", int(min(n, 64))))
		}
		with := func(change func(k *transport.Key)) transport.Key {
			k := key
			change(&k)
			return k
		}
		noise := make([]byte, 4096)
		for i := range noise {
			noise[i] = byte(rand.Uint32())
		}
		noise[0] |= 0x80 // not the type of a record by chance
		for round, c := range []struct {
			name string
			send []byte
			text string
		}{
			{"one byte past the end", write(key, size-7, 8), "out of bounds of key"},
			{"at the end", write(key, size, 1), "out of bounds of key"},
			{"behind the region", write(key, size+8, 8), "out of bounds of key"},
			{"before the region", write(key, math.MaxUint64-7, 8), "out of bounds of key"},
			{"before the region and into it", write(key, math.MaxUint64-7, 16), "out of bounds of key"},
			{"offset of 2^63", write(key, top, 8), "out of bounds of key"},
			{"length of 2^63", write(key, 0, top), "out of bounds of key"},
			{"offset and length of 2^63", write(key, top, top), "out of bounds of key"},
			{"largest length", write(key, 1, math.MaxUint64), "out of bounds of key"},
			{"no bytes behind the end", write(key, size+1, 0), "out of bounds of key"},
			{"stale key", write(stale, 0, 8), "no such key"},
			{"key of another Fabric", write(elsewhere, 0, 8), "no such key, or a wrong token"},
			{"token by one bit", write(with(func(k *transport.Key) { k.Token ^= 1 << 40 }), 0, 8), "a wrong token"},
			{"no token", write(with(func(k *transport.Key) { k.Token = 0 }), 0, 8), "a wrong token"},
			{"token of the stale key", write(with(func(k *transport.Key) { k.Token = stale.Token }), 0, 8), "a wrong token"},
			{"number that is to come", write(with(func(k *transport.Key) { k.ID += 100 }), 0, 8), "no such key"},
			{"another peer's key", write(granted, 0, 8), "the key was given to another peer"},
			{"frame too large", record(header{kind: recFrame, length: transport.MaxFrame + 1}, "x"), "at most 1048576"},
			{"frame of 2^63", record(header{kind: recFrame, length: top}, "x"), "at most 1048576"},
			{"goodbye with a body", record(header{kind: recBye, length: 8}, "goodbye!"), "a goodbye of 8 bytes"},
			{"garbage", noise, "not a type of this version"},
			{"zeros", make([]byte, 4096), "not a type of this version"},
			{"the handshake again", append(magic[:], make([]byte, 100)...), "not a type of this version"},
			{"half a header", write(key, 0, 8)[:headerLen/2], "no progress in the middle of a record"},
			{"half a write", write(key, 0, 64)[:headerLen+8], "no progress in the middle of a record"},
			{"half a large frame", record(header{kind: recFrame, length: 1 << 20}, "x"), "no progress in the middle of a record"},
		} {
			nc, conn := dial(u)
			clear(all.Span().Bytes())
			_, err := nc.Write(c.send)
			require.NoError(t, err, c.name)
			u.until(func() bool { return u.down[conn] != nil })
			require.ErrorContains(t, u.down[conn], c.text, c.name)
			require.NotErrorIs(t, u.down[conn], io.EOF, c.name)
			require.Len(t, u.down, round+1, "%s: another connection has ended", c.name)
			require.Len(t, u.frames, round, c.name)

			b := all.Span().Bytes()
			allowed := 0
			if c.name == "half a write" {
				allowed = 8 // what had come went to its place
			}
			clear(b[size : size+allowed])
			require.Equal(t, make([]byte, 3*size), b, c.name)

			_, err = good.Write(append(write(granted, 16, 8), record(header{kind: recFrame}, "")...))
			require.NoError(t, err)
			u.until(func() bool { return len(u.frames) == round+1 })
			require.Equal(t, "xxxxxxxx", string(b[size+16:size+24]))
		}
		require.NotContains(t, u.down, goodConn)
	})
}

// TestUseEnds: a write that is under way when its memory is not in use any more goes no further.
func TestUseEnds(t *testing.T) {
	noLeaks(t)
	u := newUser(t, open(t, Options{Listen: "127.0.0.1:0"}))
	nc, conn := u.bare()
	const size = 64 << 10
	var uses atomic.Int32
	uses.Store(1)
	r := hold(t, size)
	r.InUse = &uses
	key, err := u.f.Register(r)
	require.NoError(t, err)
	w := record(header{kind: recWrite, key: key.ID, token: key.Token, length: size}, strings.Repeat("x", size))
	_, err = nc.Write(w[:len(w)/2])
	require.NoError(t, err)
	half := len(w)/2 - headerLen
	b := r.Span().Bytes()
	u.until(func() bool { return b[half-1] == 'x' })
	uses.Store(0)
	_, err = nc.Write(w[len(w)/2:])
	require.NoError(t, err)
	u.until(func() bool { return u.down[conn] != nil })
	require.ErrorIs(t, u.down[conn], link.ErrNotInUse)
	require.Equal(t, make([]byte, size-half), b[half:])
}

// TestBind moves a key from one peer to another.
func TestBind(t *testing.T) {
	noLeaks(t)
	u := newUser(t, open(t, Options{Listen: "127.0.0.1:0"}))
	first, a := u.bare()
	second, b := u.bare()
	key, err := u.f.Register(hold(t, 64))
	require.NoError(t, err)
	require.ErrorContains(t, u.f.Bind(transport.Key{ID: key.ID}, a), "no such key")
	w := record(header{kind: recWrite, key: key.ID, token: key.Token, length: 1}, "x")
	w = append(w, record(header{kind: recFrame}, "")...)
	for i, nc := range []*net.TCPConn{first, second} { // good everywhere until it is bound
		_, err := nc.Write(w)
		require.NoError(t, err)
		u.until(func() bool { return len(u.frames) == i+1 })
	}
	require.NoError(t, u.f.Bind(key, a))
	require.NoError(t, u.f.Bind(key, b))
	_, err = second.Write(w)
	require.NoError(t, err)
	u.until(func() bool { return len(u.frames) == 3 })
	_, err = first.Write(w)
	require.NoError(t, err)
	u.until(func() bool { return len(u.down) == 1 })
	require.ErrorIs(t, u.down[a], link.ErrNotIts)
}

// TestFloodOfHalfOpenConnections opens 10^4 connections that never say a word,
// at most 400 at a time: both ends are in this process, and a limit of 1,024
// descriptors is common. Good peers get in meanwhile, each within a second or so,
// and memory and descriptors stay bounded.
func TestFloodOfHalfOpenConnections(t *testing.T) {
	const total, atOnce, pending, friends = 10_000, 400, 32, 20
	forEachLink(t, func(t *testing.T, id *link.Identity, _ func(*user) (io.Writer, transport.Conn)) {
		noLeaks(t)
		var refused atomic.Int64
		u := newUser(t, open(t, Options{
			Listen: "127.0.0.1:0", TLS: id, Limits: transport.Limits{Pending: pending},
			Refused: func(string, error) { refused.Add(1) },
		}))
		heap := func() uint64 {
			var m runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&m)
			return m.HeapAlloc
		}
		files := func() int {
			e, err := os.ReadDir("/proc/self/fd")
			require.NoError(t, err)
			return len(e)
		}
		before, descriptors, routines := heap(), files(), runtime.NumGoroutine()

		var good atomic.Int64
		var tries, count int64
		over, turn := make(chan struct{}), make(chan struct{})
		finish := sync.OnceFunc(func() { close(over) })
		var friend sync.WaitGroup
		defer friend.Wait()
		defer finish()
		dialer := open(t, Options{TLS: id})
		friend.Go(func() {
			ev := make([]transport.Event, 8)
			for {
				select {
				case <-over:
					return
				case <-turn:
				}
				start := time.Now()
				for { // as a node does, it tries again when it was pushed out
					ctx, cancel := context.WithTimeout(context.Background(), patience)
					c, err := dialer.Connect(ctx, u.f.Addr())
					cancel()
					tries++
					if err == nil {
						c.Close()
						dialer.Poll(ev)
						break
					}
					if time.Since(start) > patience {
						t.Errorf("no way in: %v", err)
						return
					}
				}
				good.Add(1)
			}
		})

		address := strings.TrimPrefix(string(u.f.Addr()), scheme)
		open := make([]net.Conn, 0, atOnce)
		// It goes on until some good peers have got in, however slow they are.
		for start := time.Now(); count < total || good.Load() < friends; count++ {
			require.Less(t, time.Since(start), patience, "%d good peers got in", good.Load())
			i := int(count)
			nc, err := net.Dial("tcp", address)
			require.NoError(t, err)
			if len(open) == atOnce {
				open[i%atOnce].Close()
				open[i%atOnce] = nc
			} else {
				open = append(open, nc)
			}
			if i%20 == 0 { // no more than this user can end
				select {
				case turn <- struct{}{}:
				default:
				}
			}
			u.poll()
			u.conns, u.down = nil, map[transport.Conn]error{}
			if i%1000 == 999 {
				require.Less(t, files()-descriptors, atOnce+2*pending+64)
				require.Eventually(t, func() bool { return runtime.NumGoroutine()-routines < 3*pending }, 20*time.Second, time.Millisecond)
				require.Less(t, int64(heap())-int64(before), int64(32<<20))
			}
		}
		finish()
		friend.Wait()
		for _, nc := range open {
			nc.Close()
		}
		told := count + tries - good.Load()
		u.until(func() bool { return refused.Load() >= told })
		t.Logf("%d good peers got in with %d attempts among %d connections", good.Load(), tries, count)
		require.EqualValues(t, told, refused.Load(), "each is told once")
	})
}

// TestFloodOfTalkers fills all places with peers that say hello and then
// nothing: they may stay for an eighth of the limit.
func TestFloodOfTalkers(t *testing.T) {
	noLeaks(t)
	twice := transporttest.Gate{Trips: 2}
	u := newUser(t, open(t, Options{Listen: "127.0.0.1:0", Gate: twice,
		Limits: transport.Limits{Handshake: 8 * time.Second, Pending: 4}}))
	for range 4 {
		nc, err := net.Dial("tcp", strings.TrimPrefix(string(u.f.Addr()), scheme))
		require.NoError(t, err)
		defer nc.Close()
		out, _, _ := twice.Open(true).Next(nil)
		require.NoError(t, link.SendMessage(nc, out))
		_, err = link.ReceiveMessage(nc) // it has been heard
		require.NoError(t, err)
	}
	a := open(t, Options{Gate: twice})
	start := time.Now()
	_, err := a.Connect(context.Background(), u.f.Addr())
	require.NoError(t, err)
	require.Less(t, time.Since(start), 6*time.Second)
}

// TestRefusedWritesTakeNoMemory announces writes to keys that are no keys, again and
// again, on new connections.
func TestRefusedWritesTakeNoMemory(t *testing.T) {
	u := newUser(t, open(t, Options{Listen: "127.0.0.1:0"}))
	attempt := func() {
		nc, conn := u.bare()
		_, err := nc.Write(record(header{kind: recWrite, key: 1, length: 1 << 62}, ""))
		require.NoError(t, err)
		u.until(func() bool { return u.down[conn] != nil })
		_, err = io.Copy(io.Discard, nc)
		require.True(t, errors.Is(err, syscall.ECONNRESET) || err == nil)
		nc.Close()
		u.conns, u.down = nil, map[transport.Conn]error{}
	}
	attempt()
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for range 100 {
		attempt()
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	require.Less(t, int64(after.HeapAlloc)-int64(before.HeapAlloc), int64(4<<20))
	u.until(func() (none bool) {
		u.f.Owned(func() { none = len(u.f.conns.All) == 0 })
		return none
	})
}
