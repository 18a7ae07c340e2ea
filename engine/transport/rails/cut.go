package rails

import (
	"math"
	"time"
)

const (
	grain = 4 << 10 // parts of a write begin at multiples of it
	// fewest is the share of a write that is not worth a part of its own, in parts of an equal share.
	fewest = 8
	// noise is the ratio up to which rates count as equal, since they are only measured.
	noise = 1.25
	// sampleBytes is what a member has to take at a time for a sample of its rate. A socket buffers so much by itself
	// (net.ipv4.tcp_wmem), and takes what fits there as fast as memory is.
	sampleBytes = 4 << 20
	// probeCuts is the number of cut writes after which one gives each member at least sampleBytes, so that all rates
	// are measured again.
	probeCuts = 128
)

// portion is one member's part of a write.
type portion struct {
	rate float64 // bytes a second of the member; 0: not known
	load uint64  // bytes that it has still to send
	size uint64  // of its part; 0: it gets none
	out  bool    // it is too slow or too busy for a part
}

// divide cuts a write over members so that their parts end at the same time, as far as their rates are known: it fills
// in size. The sizes add up to that of the write. A member whose rate is not known counts as the mean of the others. A
// member that would get less than an eighth of an equal share gets nothing. With probe, each gets enough to measure its rate.
func divide(size uint64, to []portion, probe bool) {
	guess(to)
	rate, load := 0.0, 0.0
	for i := range to {
		to[i].size, to[i].out = 0, false
		rate += to[i].rate
		load += float64(to[i].load)
	}
	least := float64(size) / float64(fewest*len(to))
	ends := (float64(size) + load) / rate // seconds from now
	for left := len(to); left > 1; left-- {
		worst, gets := 0, float64(size)
		for i := range to {
			if g := to[i].rate*ends - float64(to[i].load); !to[i].out && g < gets {
				worst, gets = i, g
			}
		}
		if gets >= least {
			break
		}
		p := &to[worst]
		p.out = true
		rate -= p.rate
		load -= float64(p.load)
		ends = (float64(size) + load) / rate
	}
	share(size, ends, to)
	if probe {
		probes(to)
	}
}

// guess gives members whose rate is not known the mean of the others, and all of them if their rates hardly differ.
func guess(to []portion) {
	known, sum, low, high := 0, 0.0, math.Inf(1), 0.0
	for i := range to {
		if r := to[i].rate; r > 0 {
			known++
			sum += r
			low, high = min(low, r), max(high, r)
		}
	}
	mean := 1.0
	if known > 0 {
		mean = sum / float64(known)
	}
	for i := range to {
		if to[i].rate <= 0 || high <= noise*low {
			to[i].rate = mean
		}
	}
}

// share gives each member that is not out what it can send until the time at which all are to end. The last one gets
// the rest, and no other ends between two grains.
func share(size uint64, ends float64, to []portion) {
	last := 0
	for i := range to {
		if !to[i].out {
			last = i
		}
	}
	begin, exact := uint64(0), 0.0
	for i := range to {
		if to[i].out {
			continue
		}
		exact += to[i].rate*ends - float64(to[i].load)
		end := size
		if i != last {
			end = min(uint64(exact+grain/2)&^(grain-1), size)
		}
		to[i].size = end - begin
		begin = end
	}
}

// probes gives each idle member at least sampleBytes, from the largest part, as far as that stays as large.
func probes(to []portion) {
	for i := range to {
		most := 0
		for j := range to {
			if to[j].size > to[most].size {
				most = j
			}
		}
		if more := sampleBytes - min(to[i].size, sampleBytes); to[i].load == 0 && to[most].size >= sampleBytes+more {
			to[i].size += more
			to[most].size -= more
		}
	}
}

// A meter estimates the rate of a member: what it lets go of, by the time that it needs. It runs while a part of a cut
// write is on its way. So small writes cost no look at the clock.
type meter struct {
	rate  float64       // bytes a second; 0: not known
	on    bool          // it runs,
	since time.Duration // since then
	took  uint64        // bytes that were let go of since then
}

// start starts a meter that does not run.
func (m *meter) start(now time.Duration) {
	if !m.on {
		m.on, m.since, m.took = true, now, 0
	}
}

// stop takes what was let go of until now, if that is enough for a sample, and stops if the member has nothing more to
// send. The estimate moves by half of the difference.
func (m *meter) stop(now time.Duration, idle bool) {
	if took := (now - m.since).Seconds(); m.took >= sampleBytes && took > 0 {
		rate := float64(m.took) / took
		if m.rate > 0 {
			rate = (rate + m.rate) / 2
		}
		m.rate, m.since, m.took = rate, now, 0
	}
	m.on = m.on && !idle
}
