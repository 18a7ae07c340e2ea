package cma

import "fmt"

// A producer fills a ring. What it stores becomes visible with commit, in one
// step.
type producer struct {
	ring []byte
	peer *control // whose head says how far the ring has been read
	tail uint64   // bytes that were filled since the start
	head uint64   // bytes of them that are known to have been read

	// The first record since the last commit, and its word, which commit
	// stores.
	first uint64
	held  uint64
}

// place says where a record of n bytes goes, and how many bytes are left out
// before it; ok is false if there is no room for it now. n is below half of
// the ring, so that an empty ring has room wherever it stands.
func (p *producer) place(n uint64) (at, skip uint64, ok bool, err error) {
	size := uint64(len(p.ring))
	n = (n + 7) &^ 7
	at = p.tail & (size - 1)
	if at+n > size {
		at, skip = 0, size-at
	}
	n += skip + wordLen
	if p.tail-p.head+n > size {
		head := p.peer.head.Load()
		if head-p.head > p.tail-p.head {
			return 0, 0, false, fmt.Errorf("the peer reports that it has read %d bytes, but %d were written", head, p.tail)
		}
		p.head = head
	}
	return at, skip, p.tail-p.head+n <= size, nil
}

// room gives the n bytes of a record that put will end.
func (p *producer) room(n uint64) (rec []byte, ok bool, err error) {
	at, skip, ok, err := p.place(n)
	if !ok {
		return nil, false, err
	}
	if skip > 0 {
		p.put(makeWord(recSkip, 0, 0), skip)
	}
	return p.ring[at : at+n], true, nil
}

// put ends the record of n bytes that room gave. w goes to its first 8 bytes,
// which nobody else stores to.
func (p *producer) put(w, n uint64) {
	mask := uint64(len(p.ring)) - 1
	at := p.tail & mask
	p.tail += (n + 7) &^ 7
	put64(p.ring[p.tail&mask:], 0, 0)
	if p.held == 0 {
		p.first, p.held = at, w
	} else {
		put64(p.ring[at:], 0, w)
	}
}

// commit shows the reader what was put, and says whether that is anything.
func (p *producer) commit() bool {
	if p.held == 0 {
		return false
	}
	word(p.ring, p.first).Store(p.held)
	p.held = 0
	return true
}

// A consumer reads a ring. What it finds there is the peer's to change at any
// time, so each word is loaded once.
type consumer struct {
	ring []byte
	pos  uint64 // bytes that were read since the start
}

// peek is the word of the next record, 0 if there is none.
func (q *consumer) peek() uint64 { return word(q.ring, q.pos&uint64(len(q.ring)-1)).Load() }

// record is the n bytes of the next record, if the ring has so many before its
// end.
func (q *consumer) record(n uint64) ([]byte, error) {
	at := q.pos & uint64(len(q.ring)-1)
	if left := uint64(len(q.ring)) - at; n > left {
		return nil, fmt.Errorf("the peer announced a record of %d bytes, but only %d are left to the end of the ring", n, left)
	}
	return q.ring[at : at+n], nil
}

// next goes on behind a record of n bytes.
func (q *consumer) next(n uint64) { q.pos += (n + 7) &^ 7 }

// skip goes on at the start of the ring.
func (q *consumer) skip() error {
	at := q.pos & uint64(len(q.ring)-1)
	if at == 0 {
		return fmt.Errorf("the peer skipped the whole ring")
	}
	q.pos += uint64(len(q.ring)) - at
	return nil
}
