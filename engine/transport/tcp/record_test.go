package tcp

import (
	"encoding/hex"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/transport"
)

func TestHeaderGolden(t *testing.T) {
	for _, c := range []struct {
		name string
		h    header
		hex  string
	}{
		{
			"write",
			header{recWrite, 0x1112131415161718, 0x2122232425262728, 0x3132333435363738, 0x4142434445464748},
			"02000000" + "00000000" + "1817161514131211" + "2827262524232221" + "3837363534333231" + "4847464544434241",
		},
		{
			"frame",
			header{kind: recFrame, length: transport.MaxFrame},
			"01000000" + "00000000" + "0000100000000000" + "0000000000000000" + "0000000000000000" + "0000000000000000",
		},
		{
			"goodbye",
			header{kind: recBye},
			"03000000" + "00000000" + "0000000000000000" + "0000000000000000" + "0000000000000000" + "0000000000000000",
		},
	} {
		b := make([]byte, headerLen)
		c.h.put(b)
		require.Equal(t, c.hex, hex.EncodeToString(b), c.name)
		var h header
		require.NoError(t, h.parse(b), c.name)
		require.Equal(t, c.h, h, c.name)
	}
}

func TestHeaderOfAnyWriteComesBack(t *testing.T) {
	b := make([]byte, headerLen)
	for range 1000 {
		want := header{recWrite, rand.Uint64(), rand.Uint64(), rand.Uint64(), rand.Uint64()}
		want.put(b)
		var got header
		require.NoError(t, got.parse(b))
		require.Equal(t, want, got)
	}
}

func TestHeaderRefuses(t *testing.T) {
	for _, c := range []struct {
		h    header
		text string
	}{
		{header{kind: 0}, "not a type"},
		{header{kind: 4}, "not a type"},
		{header{kind: 'F'}, "not a type"},
		{header{kind: recFrame, length: transport.MaxFrame + 1}, "a frame of 1048577 bytes: at most 1048576"},
		{header{kind: recFrame, length: math.MaxUint64}, "at most 1048576"},
		{header{kind: recFrame, key: 1}, "region"},
		{header{kind: recFrame, token: 1}, "region"},
		{header{kind: recFrame, offset: 1}, "region"},
		{header{kind: recBye, length: 1}, "a goodbye of 1 bytes"},
	} {
		b := make([]byte, headerLen)
		c.h.put(b)
		require.ErrorContains(t, new(header).parse(b), c.text, "%+v", c.h)
	}
	for i := 1; i < 4; i++ {
		b := make([]byte, headerLen)
		(&header{kind: recFrame}).put(b)
		b[i] = 1
		require.ErrorContains(t, new(header).parse(b), "not a type", "byte %d", i)
	}
}
