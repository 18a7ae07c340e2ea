package exchange

import (
	"errors"
	"fmt"
	"sync/atomic"

	"fserver/engine/wire"
)

// errOver is why a request through a channel that a side has closed is not answered.
var errOver = errors.New("exchange: the channel is closed")

// IsOver says whether err is that a side has closed the channel of a request.
func IsOver(err error) bool { return errors.Is(err, errOver) }

// parting says that server i has closed its side of a channel.
func parting(channel string, i int) error {
	return fmt.Errorf("exchange: channel %q: peer %d has closed its side (close this side and open a new channel): %w", channel, i, errOver)
}

// Arrivals is the requests of a channel at a server that are not delivered, those for batches, or
// unicasts.
type Arrivals struct {
	name    string           // of the channel; empty: batches; onUnicasts
	queues  []ring[*Request] // by client
	ready   atomic.Int32     // clients with a request
	emptied atomic.Uint32    // see Emptied
	// Heard reports whether client i has told of its side of the channel. What it sends before that is of an
	// earlier channel of this name, and refused. Nil: all have.
	Heard func(i int) bool
}

func (s *Server) newArrivals(name string) *Arrivals {
	return &Arrivals{name: name, queues: make([]ring[*Request], len(s.clients))}
}

func (l *Arrivals) publish() {
	ready := int32(0)
	for i := range l.queues {
		if l.queues[i].len() != 0 {
			ready++
		}
	}
	if ready < l.ready.Load() {
		l.emptied.Add(1)
	}
	l.ready.Store(ready)
}

// Lacks reports whether there is no request of client i. For the owner.
func (l *Arrivals) Lacks(i int) bool { return l.queues[i].len() == 0 }

// Full reports whether there is a request of each client. Safe from any goroutine.
func (l *Arrivals) Full() bool { return int(l.ready.Load()) == len(l.queues) }

// Emptied changes when there is no request of a client any more of which there was one. Safe from any goroutine.
func (l *Arrivals) Emptied() uint32 { return l.emptied.Load() }

// Attach makes requests that name a channel wait for Take. For the owner, as all below.
func (s *Server) Attach(channel string) *Arrivals {
	l := s.newArrivals(channel)
	s.arrivals[channel] = l
	return l
}

// Detach undoes Attach. Requests that were not answered are refused, and those of lost workers freed.
// Memory that messages land in is the channel's until ChannelOver.
func (s *Server) Detach(channel string) {
	l := s.arrivals[channel]
	delete(s.arrivals, channel)
	for _, l := range s.landings {
		l.closed = l.closed || l.channel == channel
	}
	for i := range l.queues {
		for l.queues[i].len() != 0 {
			s.turnAway(l.queues[i].pop())
		}
	}
	l.publish()
	for _, r := range s.requests.strand(channel) {
		if r.life != r.client.life.Load() {
			s.put(r)
		} else {
			s.turnAway(r)
		}
	}
}

// turnAway has the worker told that the channel of a request is closed.
func (s *Server) turnAway(r *Request) {
	c := r.client
	if err := s.refuse(c, r, wire.RefusedClosed, ""); err != nil {
		s.Breach(c.index, err)
	}
}

// Take gives one request of each worker on a channel, or nil; they stay until
// Deliver. The slice is valid until the next call.
func (s *Server) Take(channel string) []*Request {
	l := s.arrivals[channel]
	if l == nil || !l.Full() {
		return nil
	}
	return s.heads(l)
}

// heads gives the first request of each client that has one.
func (s *Server) heads(l *Arrivals) []*Request {
	s.batch = s.batch[:0]
	for i := range l.queues {
		if l.queues[i].len() != 0 {
			s.batch = append(s.batch, l.queues[i].at(0))
		}
	}
	return s.batch
}

// route puts a complete request where its caller looks for it.
func (s *Server) route(c *client, r *Request) {
	l := s.arrivals[r.channel]
	if l == nil || l.Heard != nil && !l.Heard(c.index) {
		s.turnAway(r)
		return
	}
	l.queues[c.index].push(r)
	s.publish(l)
}

// unlane frees the requests of a client that is gone and that were not delivered.
func (s *Server) unlane(c *client) {
	for _, l := range s.arrivals {
		for l.queues[c.index].len() != 0 {
			s.put(l.queues[c.index].pop())
		}
		s.publish(l)
	}
}
