package cudaipc

import (
	"encoding/binary"
	"math/bits"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/gpu/fakegpu"
	"fserver/engine/mem"
	"fserver/engine/transport"
)

// TestDescriptorsEnd: memory that cannot be shared wholly keeps no descriptor.
func TestDescriptorsEnd(t *testing.T) {
	g := fakegpu.New()
	g.Pieces = true
	_, b := pairOf(t, g, overCMA)
	dst := onGPU(t, g, 4*64<<10, 1)
	for call := range 8 { // Describe, and a pair of calls for each piece
		g.FailAt(call + 1)
		r := &region{Region: dst}
		v := b.F.share(r)
		require.NotEmpty(t, g.Failed())
		require.Zero(t, v.reach)
		require.Empty(t, r.fds)
	}
	k := b.Key(t, dst)
	require.Len(t, b.F.regions[k.ID].fds, 4)
}

// TestBlob refuses what is no description of a key, and keeps what is before it.
func TestBlob(t *testing.T) {
	v := remote{reach: reachIPC, key: transport.Key{ID: 3, Token: 4}, n: 10,
		addr: 100, base: 90, size: 50, slot: 7, handle: string(make([]byte, 64))}
	of := func(blob string) transport.Key { return transport.Key{ID: 3, Token: 4, Blob: blob} }
	var r remote
	for _, inner := range []string{"", "inner's", string(make([]byte, 300))} {
		k := of(v.encode(inner))
		require.Equal(t, inner, k.Blob[:len(inner)])
		require.True(t, r.decode(k))
		require.Equal(t, v, r)
		for i := range k.Blob {
			require.False(t, r.decode(of(k.Blob[:i])), "%d bytes", i)
		}
		for i := len(inner) + 1; i <= len(k.Blob); i++ {
			require.False(t, r.decode(of(k.Blob[i:])), "%d bytes", i)
		}
	}
	require.False(t, r.decode(transport.Key{ID: 3, Token: 5, Blob: v.encode("")}))
	v.base = 101
	require.False(t, r.decode(of(v.encode(""))))
	v.base, v.slot = 90, maxRegions
	require.False(t, r.decode(of(v.encode(""))))

	v.slot, v.reach, v.handle, v.fdsAndPieces = 7, reachFDs, "", pieces(32, 18)
	require.True(t, r.decode(of(v.encode(""))))
	require.Equal(t, v, r)
	for _, lens := range [][]uint64{{32}, {32, 19}, {1 << 63, 1 << 63, 50}} {
		v.fdsAndPieces = pieces(lens...)
		require.False(t, r.decode(of(v.encode(""))), "%v of %d bytes", lens, v.size)
	}
	require.True(t, r.decode(of((&remote{key: v.key}).encode("inner's"))))
	require.Equal(t, remote{key: v.key}, r)
}

// TestForgedKey: who has seen a key of ours cannot make another that is taken for
// one of this process, whose addresses are used as they are.
func TestForgedKey(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overCMA)
	at, err := g.Alloc(1 << 20)
	require.NoError(t, err)
	k := a.Key(t, mem.Region{Addr: uintptr(at), Len: 4096, Dev: a.F.Calls.Name()})
	var r remote
	require.True(t, r.decode(k))
	require.Equal(t, uint8(reachIPC), r.reach)
	_, ours := a.F.ours(&r)
	require.True(t, ours)
	_, ours = b.F.ours(&r)
	require.False(t, ours, "of another process")
	for _, forge := range []func(r *remote){
		func(r *remote) { r.addr += 8 },
		func(r *remote) { r.n += 8 },
		func(r *remote) { r.n -= 8 },
		func(r *remote) { r.key.Token++ },
		func(r *remote) { r.key.ID++ },
		func(r *remote) { r.fabric++ },
	} {
		forged := r
		forge(&forged)
		_, ours = a.F.ours(&forged)
		require.False(t, ours)
	}
	a.Free(t, k)
	_, ours = a.F.ours(&r)
	require.False(t, ours, "it is gone")
	require.NoError(t, g.Free(at))
}

// TestShortAllocation: a key that says more of an allocation than there is of it is
// not mapped, so that nothing is copied behind its end.
func TestShortAllocation(t *testing.T) {
	g := fakegpu.New()
	a, b := pairOf(t, g, overCMA)
	src, dst := onGPU(t, g, 4096, 5), onGPU(t, g, 4096, 1)
	k := b.Key(t, dst)
	var r remote
	require.True(t, r.decode(k))
	for _, more := range []uint64{1, 0} {
		v := r
		v.size += more
		m := &mapping{id: v.id, base: v.base, size: v.size, reach: v.reach}
		err := m.open(g, &v, 0, func() bool { return true })
		if more > 0 {
			require.ErrorIs(t, err, errOther)
		} else {
			require.NoError(t, err)
		}
		a.F.unmap(m)
	}
	a.Done, b.Writes = nil, nil
	r.size, r.n = 1<<20, 1<<20
	k.Blob = r.encode(k.Blob)
	a.Post(t, write(k, src, transport.Point{}))
	until(t, a, b, func() bool { return len(b.Writes) == 1 && len(a.Done) == 1 })
	holds(t, g, dst, 5) // by way of the host
	until(t, a, b, func() bool { return g.Imports() == 0 })
}

// pieces describes pieces of mapped memory.
func pieces(lens ...uint64) string {
	var b []byte
	for i, n := range lens {
		b = binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint32(b, uint32(i)), n)
	}
	return string(b)
}

// FuzzBlob reads random descriptions of keys. What is taken lies inside its
// allocation, all of which can be mapped, and says the same when it is sent again.
func FuzzBlob(f *testing.F) {
	v := remote{reach: reachIPC, key: transport.Key{ID: 3, Token: 4}, n: 10,
		addr: 100, base: 90, size: 50, slot: 7, handle: string(make([]byte, 64))}
	f.Add(v.encode(""))
	v.reach, v.handle, v.fdsAndPieces = reachFDs, "", pieces(32, 18)
	f.Add(v.encode(""))
	v.size = 60
	f.Add(v.encode(""))
	v.addr, v.n = 1<<64-8, 16
	f.Add(v.encode(""))
	for v.reach = range uint8(reachIPC) {
		f.Add(v.encode(""))
	}
	f.Add(string(make([]byte, blobShort)))
	f.Add("")
	f.Fuzz(func(t *testing.T, b string) {
		k := transport.Key{Blob: b}
		if end := len(b) - blobEnd; end >= 0 { // a fuzzer cannot guess the key
			if at := end - int(b[end]) - int(b[end+1])<<8; at >= 0 && at+blobShort <= len(b) {
				k.ID, k.Token = u64(b, at+1), u64(b, at+9)
			}
		}
		var r, again remote
		if !r.decode(k) {
			return
		}
		require.Equal(t, transport.Key{ID: k.ID, Token: k.Token}, r.key)
		require.True(t, again.decode(transport.Key{ID: k.ID, Token: k.Token, Blob: r.encode("inner")}))
		require.Equal(t, r, again)
		require.False(t, again.decode(transport.Key{ID: k.ID, Token: k.Token + 1, Blob: b}))
		if r.reach == reachNone {
			return
		}
		require.Less(t, r.slot, uint64(maxRegions))
		_, err := (mem.Region{Len: r.size}).Slice(r.addr-r.base, r.n)
		require.NoError(t, err)
		if r.reach == reachIPC {
			require.Len(t, r.handle, 64)
			return
		}
		require.LessOrEqual(t, len(r.fdsAndPieces), pieceMost*pieceLen)
		var size, carry uint64
		for p := r.fdsAndPieces; p != ""; p = p[pieceLen:] {
			size, carry = bits.Add64(size, u64(p, 4), 0)
			require.Zero(t, carry)
		}
		require.Equal(t, r.size, size)
	})
}
