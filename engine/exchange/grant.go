package exchange

import (
	"fmt"
	"slices"

	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/wire"
)

// maxKeys bounds the keys that one run of a worker pushes: each has a receive buffer, which is a mapping
// of its own.
const maxKeys = 1 << 15

// receiver is where the tensors of one (worker, key) are received.
type receiver struct {
	key     uint64
	channel string // of a landing: no other may use it
	slot    uint64
	run     uint32 // client.life when the key was pushed last
	region  mem.Region
	cap     uint64
	id      uint64 // in Buffers; 0: memory of the application's own
	token   transport.Key
	granted bool // token is valid
	waits   int  // tensors in it of requests that have not been delivered
	buffers *Buffers
	in      Memory // of one that is to be made: where its buffer is to lie; nil: it has one
}

// fixed reports whether the buffer is the application's own.
func (k *receiver) fixed() bool { return k.id == 0 && k.cap != 0 }

// look returns the receiver of a key, or what it would be: without a buffer of ours.
func (s *Server) look(c *client, key uint64) *receiver {
	if k := c.keys[key]; k != nil {
		return k
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.fixed[fixedKey{c.rank, key}].region
	return &receiver{key: key, region: r, cap: r.Len, buffers: s.buffers}
}

// receiver finds or makes the receiver of a key that c pushes.
func (s *Server) receiver(c *client, key uint64) *receiver {
	k := s.look(c, key)
	fresh := c.fresh(key)
	if c.keys[key] == nil {
		s.mu.Lock()
		at := fixedKey{c.rank, key}
		k.region = s.fixed[at].region
		s.fixed[at] = fixed{region: k.region, used: true}
		s.mu.Unlock()
		k.cap, k.slot = k.region.Len, s.slot(c)
		c.keys[key] = k
	}
	if fresh {
		k.run = c.life.Load()
		c.pushed++
	}
	return k
}

// slot gives a new key of c its slot. If there are too many, it is that of a key that only earlier runs of the
// worker have pushed, which is forgotten: the application lets go of the old buffer when it sees the new one.
func (s *Server) slot(c *client) uint64 {
	if len(c.keys) >= maxKeys {
		for key, old := range c.keys {
			if c.fresh(key) && !old.fixed() {
				delete(c.keys, key)
				s.mu.Lock()
				delete(s.fixed, fixedKey{c.rank, key})
				s.mu.Unlock()
				return old.slot
			}
		}
	}
	s.slots++
	return s.slots - 1
}

// fresh reports whether this run of the worker has not pushed a key.
func (c *client) fresh(key uint64) bool {
	k := c.keys[key]
	return k == nil || k.run != c.life.Load()
}

// tooMany returns why c may not have so many fresh keys.
func (c *client) tooMany(fresh int) error {
	if c.pushed+fresh <= maxKeys {
		return nil
	}
	return fmt.Errorf("worker %d pushes more than %d keys (use fewer keys)", c.rank, maxKeys)
}

// provision is what a Need is given: all that it asks for, or nothing. A helper makes what is not
// there, and only the answer to this Need waits for it.
type provision struct {
	client *client
	life   uint32 // of the client
	fabric transport.Fabric
	needs  []wire.Need
	made   []*receiver // by need: what the key is to become; nil: it has what it needs
	err    error       // why the Need is refused
}

// need makes or enlarges receive buffers and tells the worker where they are. An error means
// that the worker does not keep to the protocol.
func (s *Server) need(c *client, b []byte) error {
	needs, err := wire.Parse[wire.Needs](b, wire.TypeNeed)
	if err != nil {
		return err
	}
	if c.needing {
		return fmt.Errorf("exchange: worker %d requested buffers again before the answer", c.rank)
	}
	return s.provide(&provision{client: c, life: c.life.Load(), fabric: c.fabric, needs: *needs})
}

// provide answers a Need, now or when a helper has made what there is to be made.
func (s *Server) provide(p *provision) error {
	c := p.client
	if err := s.inUse(p); err != nil {
		return err
	}
	if p.err = s.lack(p); p.err != nil || !slices.ContainsFunc(p.made, func(k *receiver) bool { return k != nil }) {
		return s.answer(p)
	}
	c.needing = true
	calm := c.calm
	s.later(func() { s.make(p, calm) }, func() { s.provided(p) })
	return nil
}

// inUse returns an error if a buffer that is to be replaced holds a request that has not been
// delivered: it would lose its memory.
func (s *Server) inUse(p *provision) error {
	for i := range p.needs {
		n := &p.needs[i]
		if k := p.client.keys[n.Key]; k != nil && k.id != 0 && n.Bytes > k.cap && !s.lends(k, n) && k.waits != 0 {
			return fmt.Errorf("exchange: worker %d requested a larger buffer for key %d before its last push of the key was answered", p.client.rank, k.key)
		}
	}
	return nil
}

// lends reports whether the tensors of a key may be lent, where that is asked.
func (s *Server) lends(k *receiver, n *wire.Need) bool { return n.Lend && !k.fixed() && !s.noLoans }

// lack works out what is to be made. An error refuses the Need.
func (s *Server) lack(p *provision) error {
	c := p.client
	seen, fresh := make(map[uint64]bool, len(p.needs)), 0
	p.made = make([]*receiver, len(p.needs))
	for i := range p.needs {
		n := &p.needs[i]
		k := s.look(c, n.Key)
		if seen[n.Key] {
			return fmt.Errorf("worker %d requested the buffer of key %d twice in one message", c.rank, k.key)
		}
		seen[n.Key] = true
		if c.fresh(n.Key) {
			fresh++
		}
		made := &receiver{key: n.Key, region: k.region, buffers: s.buffers}
		switch {
		case s.lends(k, n), k.granted && n.Bytes <= k.cap:
			continue
		case n.Bytes > k.cap && k.channel != "":
			return fmt.Errorf("a push of %d bytes for key %d of worker %d exceeds the %d bytes of its tensor in channel %q (run the same version of fserver on both sides)", n.Bytes, k.key, c.rank, k.cap, k.channel)
		case n.Bytes > k.cap && k.fixed():
			return fmt.Errorf("a push of %d bytes for key %d of worker %d exceeds its buffer of %d bytes (register a larger one with register_recv_buffer)", n.Bytes, k.key, c.rank, k.cap)
		case n.Bytes > k.cap:
			made.cap, made.in = max(n.Bytes, k.cap+k.cap/2), s.memory
			if n.Host {
				made.in = CPU{}
			}
		}
		p.made[i] = made
	}
	return c.tooMany(fresh)
}

// make makes what a Need lacks, or nothing. It may block. Memory of the application's own is
// registered when a lost worker writes there no more.
func (s *Server) make(p *provision, calm quiet) {
	for _, k := range p.made {
		if k == nil {
			continue
		}
		if k.in == nil {
			p.err = calm.wait()
		} else {
			k.id, k.region, p.err = s.buffers.make(k.in, k.cap)
		}
		if p.err == nil {
			k.token, p.err = s.keys.register(p.fabric, k.region)
		}
		if p.err != nil {
			return
		}
		k.cap, k.granted = k.region.Len, true
	}
}

// waste ends what was made for nothing.
func (s *Server) waste(p *provision) {
	for _, k := range p.made {
		if k != nil {
			s.retire(p.fabric, k)
		}
	}
	p.made = nil
}

// provided goes on with a Need when a helper has done its part.
func (s *Server) provided(p *provision) {
	c := p.client
	if c.life.Load() != p.life { // it is another run's, or nobody's
		s.waste(p)
		return
	}
	c.needing = false
	again := false
	for i, made := range p.made { // the application may have given memory for a key meanwhile
		k := s.look(c, p.needs[i].Key)
		again = again || k.fixed() && !k.granted && (made == nil || made.in != nil)
	}
	err := s.inUse(p) // a worker may have pushed meanwhile that should have waited
	if again || err != nil {
		s.waste(p)
	}
	if again && err == nil {
		err = s.provide(p)
	} else if err == nil {
		err = s.answer(p)
	}
	if err != nil {
		s.Breach(c.index, err)
	}
}

// answer tells the worker what it is given, or why it is refused.
func (s *Server) answer(p *provision) error {
	c := p.client
	var reply []byte
	if p.err == nil {
		reply, p.err = s.offer(p)
	}
	if p.err == nil {
		s.commit(p)
	} else {
		s.waste(p)
		reply = wire.Append(nil, wire.TypeBuffers, &wire.Buffers{Reason: p.err.Error()})
	}
	return s.reply(c, reply)
}

// offer makes the answer to a Need, and keeps the tokens in it to the worker's Conn.
func (s *Server) offer(p *provision) ([]byte, error) {
	c := p.client
	var v wire.Buffers
	for i := range p.needs {
		n := &p.needs[i]
		k := s.look(c, n.Key)
		if p.made[i] != nil {
			k = p.made[i]
			if err := c.fabric.Bind(k.token, c.conn); err != nil { // no other worker may use what this one is told
				return nil, err
			}
		}
		e := wire.Buffer{Key: n.Key, Lend: s.lends(k, n)}
		if !e.Lend {
			e.Region, e.Cap = wireKey(k.token), k.cap
		}
		v.List = append(v.List, e)
	}
	reply := wire.Append(nil, wire.TypeBuffers, &v)
	if len(reply) > transport.MaxFrame {
		return nil, fmt.Errorf("%d receive buffers need %d bytes of keys, but a frame has at most %d (push fewer tensors in one call)", len(v.List), len(reply), transport.MaxFrame)
	}
	return reply, nil
}

// commit gives the keys what was made, in the place of what they had.
func (s *Server) commit(p *provision) {
	c := p.client
	for i := range p.needs {
		k, made := s.receiver(c, p.needs[i].Key), p.made[i]
		if made == nil {
			continue
		}
		if made.id != 0 {
			s.retire(c.fabric, k)
			k.id = made.id
		}
		k.region, k.cap, k.token, k.granted = made.region, made.cap, made.token, true
	}
}

// retire takes the token at f and the buffer from k, and ends them. A helper gives the memory of
// the buffer back.
func (s *Server) retire(f transport.Fabric, k *receiver) {
	buffer := k.id
	drop := func() {
		if buffer != 0 {
			s.later(func() { _ = s.buffers.drop(buffer) }, nil) // our own mapping
		}
	}
	if k.granted {
		f.Deregister(k.token)
		s.afterFreed(freed{f, k.token.ID}, drop)
	} else {
		drop()
	}
	k.granted = false
	if k.id != 0 {
		k.id, k.cap, k.region = 0, 0, mem.Region{}
	}
}
