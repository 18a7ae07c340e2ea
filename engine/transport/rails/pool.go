package rails

import "math/bits"

// pool keeps buffers that are free, by the logarithm of their size, up to poolBytes.
type pool struct {
	free  [32][][]byte
	bytes int
}

const poolBytes = 16 << 20

func (p *pool) get(n int) []byte {
	class := bits.Len(uint(max(n, 64) - 1))
	if last := len(p.free[class]) - 1; last >= 0 {
		b := p.free[class][last]
		p.free[class] = p.free[class][:last]
		p.bytes -= cap(b)
		return b[:n]
	}
	return make([]byte, n, 1<<class)
}

func (p *pool) put(b []byte) {
	if b == nil || p.bytes+cap(b) > poolBytes {
		return
	}
	class := bits.Len(uint(cap(b) - 1))
	p.free[class] = append(p.free[class], b)
	p.bytes += cap(b)
}
