package inproc

import "math/bits"

// buffers are free byte slices, by the power of two of their size. A slice goes
// from the Conn that posts through the receiver's event back to the list, so a
// steady flow allocates nothing.
type buffers struct {
	free [maxClass + 1][][]byte
	size int // bytes in free
}

const (
	minClass = 6        // 64 bytes
	maxClass = 20       // transport.MaxFrame
	keep     = 16 << 20 // bound on size
)

func class(n int) int { return max(bits.Len(uint(max(n, 1)-1)), minClass) }

// get gives n bytes of any content; n is at most 1<<maxClass.
func (b *buffers) get(n int) []byte {
	c := class(n)
	list := b.free[c]
	if len(list) == 0 {
		return make([]byte, n, 1<<c)
	}
	buf := list[len(list)-1]
	b.free[c] = list[:len(list)-1]
	b.size -= 1 << c
	return buf[:n]
}

// put takes back what get gave, or nil.
func (b *buffers) put(buf []byte) {
	if buf == nil || b.size+cap(buf) > keep {
		return
	}
	c := class(cap(buf))
	b.free[c] = append(b.free[c], buf)
	b.size += 1 << c
}
