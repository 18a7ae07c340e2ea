package exchange

import (
	"fmt"

	"fserver/engine/mem"
)

// landing is memory of a channel in which a server receives what one worker pushes through the channel: receive buffers
// whose keys are the channel's own. A worker may write there until it has closed its side or is lost. All but land is for
// the owner.
type landing struct {
	client   *client
	channel  string
	ring     *keyring
	keys     []*receiver // by tensor; nil: it has no bytes
	opened   bool        // its keys are the client's
	closed   bool        // this side of the channel is closed: it ends when the worker's is
	released bool
	waits    int // keys whose EvFreed is to come
}

// over reports whether nobody writes to the memory any more.
func (l *landing) over() bool { return l.released && l.waits == 0 }

// has reports whether a request has tensor j in the memory of the landing, if there is one.
func (l *landing) has(r *Request, j int) bool {
	return l != nil && r.keys[j] != nil && r.keys[j] == l.keys[j]
}

// land registers the memory of tensors that worker i is to write to. It may block. If it returns a landing with an error, that
// has registered some of them, and is to be released.
func (s *Server) land(i int, channel string, into []Tensor) (*landing, error) {
	l := &landing{client: s.clients[i], channel: channel, keys: make([]*receiver, len(into))}
	s.keys.mu.Lock()
	l.ring = s.keys.paths[i]
	s.keys.mu.Unlock()
	if l.ring == nil {
		return nil, fmt.Errorf("exchange: channel %q: worker %d (by group) is not connected", channel, i)
	}
	for j := range into {
		x := &into[j]
		if x.Span.Len == 0 {
			continue
		}
		r := mem.Region{Addr: x.Span.Addr, Len: x.Span.Len, Dev: x.Dev}
		token, err := s.keys.register(l.ring.fabric, r)
		if err != nil {
			return l, fmt.Errorf("exchange: channel %q: tensor %d from worker %d: %w", channel, j, i, err)
		}
		l.keys[j] = &receiver{key: x.Key, channel: channel, region: r, cap: r.Len, token: token, granted: true, buffers: s.buffers}
	}
	return l, nil
}

// open has the worker's pushes received in l.
func (s *Server) open(l *landing) error {
	c := l.client
	if c.conn == nil && c.lost != nil {
		return c.lost
	}
	if c.conn == nil || c.fabric != l.ring.fabric {
		return fmt.Errorf("exchange: channel %q: worker %d has another path meanwhile (open the channel again)", l.channel, c.rank)
	}
	if err := c.tooMany(len(l.keys)); err != nil {
		return err
	}
	for _, k := range l.keys {
		if k == nil {
			continue
		}
		if c.keys[k.key] != nil {
			return Shapef("exchange: channel %q: worker %d has pushed tensors with key %d already: give the channel keys of its own", l.channel, c.rank, k.key)
		}
		if err := c.fabric.Bind(k.token, c.conn); err != nil {
			return err
		}
	}
	for _, k := range l.keys {
		if k != nil {
			k.run = c.life.Load()
			c.keys[k.key] = k
			c.pushed++
		}
	}
	l.opened = true
	s.landings = append(s.landings, l)
	return nil
}

// release ends the keys of l, to which its worker does not write any more.
func (s *Server) release(l *landing) {
	if l.released {
		return
	}
	l.released = true
	c := l.client
	for _, k := range l.keys {
		if k == nil {
			continue
		}
		if l.opened {
			delete(c.keys, k.key)
			if k.run == c.life.Load() {
				c.pushed--
			}
		}
		l.waits++
		l.ring.fabric.Deregister(k.token)
		s.afterFreed(freed{l.ring.fabric, k.token.ID}, func() { l.waits-- })
		k.granted, k.cap, k.region = false, 0, mem.Region{} // a plan may still name it
	}
}

// ChannelOver takes note that worker i has closed its side of a channel, whose frame came behind all its
// writes to the memory of the channel; see Worker.Lands.
func (s *Server) ChannelOver(i int, channel string) {
	for _, l := range s.landings {
		if l.closed && l.client == s.clients[i] && l.channel == channel {
			s.release(l)
		}
	}
	s.sweepLandings()
}

// sweepLandings forgets those that are released.
func (s *Server) sweepLandings() {
	kept := s.landings[:0]
	for _, l := range s.landings {
		if !l.released {
			kept = append(kept, l)
		}
	}
	clear(s.landings[len(kept):])
	s.landings = kept
}
