package wire

import (
	"encoding/binary"
	"fmt"
	"sync"
)

// Fields are those of a frame. The order in which walk names them is that of the frame.
type Fields interface{ walk(c *codec) }

// Frame is a T that has some.
type Frame[T any] interface {
	*T
	Fields
}

// codec takes fields off a frame, or appends them to one.
type codec struct {
	reader        // what is parsed
	out    []byte // what is appended to
	parses bool
}

var codecs = sync.Pool{New: func() any { return new(codec) }}

// Append appends v as a frame of type t.
func Append(dst []byte, t Type, v Fields) []byte {
	c := codecs.Get().(*codec)
	defer codecs.Put(c)
	*c = codec{out: append(dst, byte(t))}
	v.walk(c)
	dst, c.out = c.out, nil
	return dst
}

// Parse parses a frame of type t; the result does not alias it.
func Parse[T any, P Frame[T]](b []byte, t Type) (P, error) {
	c, v := codec{reader: reader{b: b}, parses: true}, P(new(T))
	c.kind(t)
	v.walk(&c)
	return v, c.end()
}

func number[T ~int | ~int64 | ~uint32 | ~uint64](c *codec, what string, v *T, limit uint64) {
	if c.parses {
		*v = T(c.number(what, limit))
	} else {
		c.out = binary.AppendUvarint(c.out, uint64(*v))
	}
}

func octet[T ~uint8](c *codec, what string, v *T, limit T) {
	if !c.parses {
		c.out = append(c.out, byte(*v))
	} else if *v = T(c.u8()); *v > limit {
		c.fail(fmt.Errorf("wire: %s %d: want at most %d", what, *v, limit))
	}
}

func (c *codec) word(v *uint64) {
	if c.parses {
		*v = c.u64()
	} else {
		c.out = binary.LittleEndian.AppendUint64(c.out, *v)
	}
}

func (c *codec) flag(v *bool) {
	if c.parses {
		*v = c.bool()
	} else {
		c.out = appendBool(c.out, *v)
	}
}

// words are a text for people.
func (c *codec) words(what string, v *string, limit int) {
	if c.parses {
		*v = c.text(what, limit)
	} else {
		c.out = appendBytes(c.out, *v)
	}
}

// reason is words that are cut if they are too long.
func (c *codec) reason(what string, v *string, limit int) {
	if !c.parses {
		cut := clip(*v, limit)
		v = &cut
	}
	c.words(what, v, limit)
}

// label is a text that is compared or used.
func (c *codec) label(what string, v *string, limit int) {
	if c.parses {
		*v = c.name(what, limit)
	} else {
		c.out = appendBytes(c.out, *v)
	}
}

// length is the number n of things of which each takes at least size bytes.
func (c *codec) length(what string, n, limit, size int) int {
	if c.parses {
		return c.count(what, limit, size)
	}
	c.out = binary.AppendUvarint(c.out, uint64(n))
	return n
}

func list[T any](c *codec, what string, v *[]T, limit, size int, each func(*T)) {
	if n := c.length(what, len(*v), limit, size); c.parses && n != 0 {
		*v = make([]T, n)
	}
	for i := range *v {
		each(&(*v)[i])
	}
}
