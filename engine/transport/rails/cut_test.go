package rails

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestDivide(t *testing.T) {
	const kib, mib = 1 << 10, 1 << 20
	for name, c := range map[string]struct {
		size  uint64
		to    []portion
		probe bool
		want  []uint64
	}{
		"equal rates":                {16 * mib, []portion{{rate: 1e9}, {rate: 1e9}}, false, []uint64{8 * mib, 8 * mib}},
		"no rate is known":           {16 * mib, []portion{{}, {}}, false, []uint64{8 * mib, 8 * mib}},
		"3 to 1":                     {16 * mib, []portion{{rate: 3e8}, {rate: 1e8}}, false, []uint64{12 * mib, 4 * mib}},
		"hardly different":           {16 * mib, []portion{{rate: 1e9}, {rate: 1.25e9}}, false, []uint64{8 * mib, 8 * mib}},
		"a little different":         {16 * mib, []portion{{rate: 3e9}, {rate: 5e9}}, false, []uint64{6 * mib, 10 * mib}},
		"one is not known":           {12 * mib, []portion{{rate: 1e9}, {}, {rate: 3e9}}, false, []uint64{2 * mib, 4 * mib, 6 * mib}},
		"only one is left":           {5 * mib, []portion{{rate: 1e9}}, false, []uint64{5 * mib}},
		"far slower":                 {16 * mib, []portion{{rate: 1e9}, {rate: 1e7}}, false, []uint64{16 * mib, 0}},
		"far slower, probed":         {16 * mib, []portion{{rate: 1e9}, {rate: 1e7}}, true, []uint64{12 * mib, 4 * mib}},
		"too small for a sample":     {7 * mib, []portion{{rate: 1e9}, {rate: 1e7}}, true, []uint64{7 * mib, 0}},
		"a small part, probed":       {16 * mib, []portion{{rate: 7e9}, {rate: 1e9}}, true, []uint64{12 * mib, 4 * mib}},
		"far slower, busy, probed":   {16 * mib, []portion{{rate: 1e9}, {rate: 1e7, load: 1}}, true, []uint64{16 * mib, 0}},
		"none is out, probed":        {16 * mib, []portion{{rate: 1e9}, {rate: 1e9}}, true, []uint64{8 * mib, 8 * mib}},
		"one has much to send":       {8 * mib, []portion{{rate: 1e9, load: 8 * mib}, {rate: 1e9}}, false, []uint64{0, 8 * mib}},
		"one has something to send":  {8 * mib, []portion{{rate: 1e9, load: 4 * mib}, {rate: 1e9}}, false, []uint64{2 * mib, 6 * mib}},
		"the slow one is not missed": {8 * mib, []portion{{rate: 1e6}, {rate: 1e9}, {rate: 1e9}}, false, []uint64{0, 4 * mib, 4 * mib}},
		"odd size":                   {16*mib + 1, []portion{{rate: 1e9}, {rate: 1e9}}, false, []uint64{8 * mib, 8*mib + 1}},
		"odd rates":                  {1 * mib, []portion{{rate: 1e9}, {rate: 2e9}}, false, []uint64{340 * kib, 684 * kib}},
		"hardly two grains":          {5000, []portion{{rate: 1e9}, {rate: 1e9}}, false, []uint64{4096, 904}},
		"one grain":                  {4096, []portion{{rate: 1e9}, {rate: 1e9}}, false, []uint64{4096, 0}},
		"one byte":                   {1, []portion{{rate: 1e9}, {rate: 1e9}}, true, []uint64{0, 1}},
	} {
		t.Run(name, func(t *testing.T) {
			divide(c.size, c.to, c.probe)
			got := []uint64{}
			for _, p := range c.to {
				got = append(got, p.size)
			}
			require.Equal(t, c.want, got)
		})
	}
}

// TestDivideIsExact draws rates, loads and sizes.
func TestDivideIsExact(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 20000 {
		size, to := 1+rng.Uint64N(1<<(1+rng.IntN(40))), make([]portion, 1+rng.IntN(8))
		for i := range to {
			if rng.IntN(4) > 0 {
				to[i].rate = 1 / (rng.Float64() + 1e-9)
			}
			if rng.IntN(2) > 0 {
				to[i].load = rng.Uint64N(1 << (1 + rng.IntN(40)))
			}
		}
		divide(size, to, rng.IntN(2) > 0)
		sum, odd := uint64(0), 0
		for i := range to {
			require.LessOrEqual(t, to[i].size, size, "%d bytes: %+v", size, to)
			sum += to[i].size
			if to[i].size%grain != 0 {
				odd++
			}
		}
		require.Equal(t, size, sum, "%+v", to)
		require.LessOrEqual(t, odd, 1, "%d bytes: %+v", size, to)
	}
}

func TestMeter(t *testing.T) {
	var m meter
	now := time.Duration(0)
	measure := func(bytes uint64, takes time.Duration) {
		m.start(now)
		now += takes
		m.took += bytes
		m.stop(now, true)
		now += time.Hour // idle time does not count
	}
	const bytes = 10e6
	measure(sampleBytes-1, time.Microsecond)
	require.Zero(t, m.rate, "a socket may have buffered it")
	measure(bytes, 10*time.Millisecond)
	require.InDelta(t, 1e9, m.rate, 1, "the first sample counts as it is")
	measure(bytes, 10*time.Second)
	require.InDelta(t, 0.5e9, m.rate, 1e6, "half of the difference")
	measure(sampleBytes-1, time.Microsecond)
	measure(0, time.Second)
	require.InDelta(t, 0.5e9, m.rate, 1e6, "too little")
	for range 40 {
		measure(bytes, 100*time.Millisecond)
	}
	require.InDelta(t, 1e8, m.rate, 1e3)

	m.start(now) // two parts, one behind the other
	m.took += bytes
	m.stop(now+100*time.Millisecond, false)
	m.start(now + 150*time.Millisecond) // it runs already
	m.took += bytes
	m.stop(now+200*time.Millisecond, true)
	require.InDelta(t, 1e8, m.rate, 1e3)
}
