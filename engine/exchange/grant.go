package exchange

import (
	"fmt"

	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/wire"
)

// maxKeys bounds the keys of one worker: each has a receive buffer, which is a
// mapping of its own.
const maxKeys = 1 << 15

// maxReplies bounds the answers to Needs that a worker has not taken. One that
// keeps to the protocol asks again only after the answer.
const maxReplies = 4

// receiver is where the tensors of one (worker, key) are received.
type receiver struct {
	key     uint64
	slot    uint64
	region  mem.Region
	cap     uint64
	id      uint64 // in Buffers; 0: memory of the application's own
	token   transport.Key
	granted bool // token is valid
	handed  bool // the application has seen buffer id
	asked   bool // the Need at hand has named the key
	buffers *Buffers
}

// fixed reports whether the buffer is the application's own.
func (k *receiver) fixed() bool { return k.id == 0 && k.cap != 0 }

// hand notes that the application is about to see the buffer: from now on it owes a
// Release.
func (k *receiver) hand() {
	if !k.handed && k.id != 0 {
		k.buffers.hand(k.id)
	}
	k.handed = true
}

// grant is what a Need is to be given for one key: a token, and a buffer if that of
// the key is too small. The key has it when commit has been called.
type grant struct {
	k      *receiver
	region mem.Region
	id     uint64 // of a new buffer; 0: the key keeps its own
	token  transport.Key
	valid  bool // token is registered
}

// receiver finds or makes the receiver of a key; it has no buffer yet. Those that are
// new are in s.made.
func (s *Server) receiver(c *client, key uint64) (*receiver, error) {
	if k := c.keys[key]; k != nil {
		return k, nil
	}
	if len(c.keys) == maxKeys {
		return nil, fmt.Errorf("worker %d pushes more than %d keys (use fewer keys)", c.rank, maxKeys)
	}
	k := &receiver{key: key, slot: s.slots, buffers: s.buffers}
	s.mu.Lock()
	f := s.fixed[fixedKey{c.rank, key}]
	f.used = true
	s.fixed[fixedKey{c.rank, key}] = f
	s.mu.Unlock()
	k.region, k.cap = f.region, f.region.Len
	s.slots++
	c.keys[key] = k
	s.made = append(s.made, k)
	return k, nil
}

// unmake forgets the keys in s.made, the last that were made: their frame is refused.
func (s *Server) unmake(c *client) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, k := range s.made {
		at := fixedKey{c.rank, k.key}
		if f := s.fixed[at]; f.region.Len != 0 {
			f.used = false
			s.fixed[at] = f
		} else {
			delete(s.fixed, at)
		}
		delete(c.keys, k.key)
	}
	s.slots -= uint64(len(s.made))
	s.made = s.made[:0]
}

// need makes or enlarges receive buffers and tells the worker where they are: all
// that it asks for, or none. An error means that the worker does not keep to the
// protocol.
func (s *Server) need(c *client, b []byte) error {
	var err error
	if s.needs, err = wire.ParseNeed(b, s.needs[:0]); err != nil {
		return err
	}
	if c.replies.len() == maxReplies {
		return fmt.Errorf("exchange: worker %d requests buffers but does not read the answers", c.rank)
	}
	for i := range s.needs {
		n := &s.needs[i]
		if k := c.keys[n.Key]; k != nil && k.id != 0 && n.Bytes > k.cap && !s.lends(k, n) && s.requests.waits(c, k.id) { // it would lose its memory
			return fmt.Errorf("exchange: worker %d requested a larger buffer for key %d before its last push of the key was answered", c.rank, k.key)
		}
	}
	s.grants, s.made = s.grants[:0], s.made[:0]
	var v wire.Buffers
	for i := range s.needs {
		var e wire.Buffer
		if e, err = s.grant(c, &s.needs[i]); err != nil {
			break
		}
		v.List = append(v.List, e)
	}
	for i := range s.needs {
		if k := c.keys[s.needs[i].Key]; k != nil {
			k.asked = false
		}
	}
	reply := wire.AppendBuffers(nil, &v)
	if err == nil && len(reply) > transport.MaxFrame {
		err = fmt.Errorf("%d receive buffers need %d bytes of keys, but a frame has at most %d (push fewer tensors in one call)", len(v.List), len(reply), transport.MaxFrame)
	}
	if err == nil {
		s.commit(c)
	} else {
		s.revert(c)
		reply = wire.AppendBuffers(nil, &wire.Buffers{Reason: err.Error()})
	}
	c.replies.push(reply)
	s.advance(c)
	return nil
}

// lends reports whether the tensors of a key may be lent, where that is asked.
func (s *Server) lends(k *receiver, n *wire.Need) bool { return n.Lend && !k.fixed() && !s.noLoans }

// grant prepares what is asked for one key. With an error, revert gives up what there
// is of it.
func (s *Server) grant(c *client, n *wire.Need) (wire.Buffer, error) {
	k, err := s.receiver(c, n.Key)
	switch {
	case err != nil:
		return wire.Buffer{}, err
	case k.asked:
		return wire.Buffer{}, fmt.Errorf("worker %d requested the buffer of key %d twice in one message", c.rank, k.key)
	}
	k.asked = true
	switch {
	case s.lends(k, n):
		return wire.Buffer{Key: k.key, Lend: true}, nil
	case k.granted && n.Bytes <= k.cap:
		return wire.Buffer{Key: k.key, Region: wireKey(k.token), Cap: k.cap}, nil
	case n.Bytes > k.cap && k.fixed():
		return wire.Buffer{}, fmt.Errorf("a push of %d bytes for key %d of worker %d exceeds its buffer of %d bytes (register a larger one with register_recv_buffer)", n.Bytes, k.key, c.rank, k.cap)
	}
	s.grants = append(s.grants, grant{k: k, region: k.region})
	g := &s.grants[len(s.grants)-1]
	if n.Bytes > k.cap {
		in := s.memory
		if n.Host {
			in = Host{}
		}
		if g.id, g.region, err = s.buffers.make(in, max(n.Bytes, k.cap+k.cap/2)); err != nil {
			return wire.Buffer{}, err
		}
	}
	if g.token, err = c.fabric.Register(g.region); err != nil {
		return wire.Buffer{}, err
	}
	g.valid = true
	if b, ok := c.fabric.(transport.Binder); ok { // no other worker may use what this one is told
		if err = b.Bind(g.token, c.conn); err != nil {
			return wire.Buffer{}, err
		}
	}
	return wire.Buffer{Key: k.key, Region: wireKey(g.token), Cap: g.region.Len}, nil
}

// commit gives the keys what was prepared, in the place of what they had.
func (s *Server) commit(c *client) {
	for i := range s.grants {
		g := &s.grants[i]
		k := g.k
		if g.id != 0 {
			_ = s.retire(c, k) // what may still be written to stays until Close
			k.id, k.handed = g.id, false
		}
		k.region, k.cap, k.token, k.granted = g.region, g.region.Len, g.token, true
	}
}

// revert gives up what was prepared, and the keys that are new.
func (s *Server) revert(c *client) {
	for i := range s.grants {
		g := &s.grants[i]
		var err error
		if g.valid {
			err = c.fabric.Deregister(g.token)
		}
		switch {
		case g.id == 0:
		case err != nil:
			s.kept = append(s.kept, g.id)
		default:
			_ = s.buffers.drop(g.id) // our own mapping: nobody has been told of it
		}
	}
	s.unmake(c)
}

// retire gives up the buffer of k. With an error, somebody may still write there: it
// stays until Close.
func (s *Server) retire(c *client, k *receiver) (err error) {
	if k.granted {
		k.granted = false
		err = c.fabric.Deregister(k.token)
	}
	if k.id == 0 {
		return err
	}
	id := k.id
	k.id, k.cap, k.region = 0, 0, mem.Region{}
	if err != nil {
		s.kept = append(s.kept, id)
		return err
	}
	return s.buffers.drop(id)
}
