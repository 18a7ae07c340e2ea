package exchange

import "fmt"

// PendingState is why a push_pull has not been answered by a server.
type PendingState int

// The states, with the numbers of FS_PENDING_* in fserver.h.
const (
	PendingAnswer  PendingState = iota + 1 // the server has it and has not answered
	PendingKey                             // Head pushes Key again, and the server has not answered Holder, which pushed it before
	PendingBuffer                          // the server has not said yet where it receives Key of Head
	PendingPeer                            // there is no connection to the server
	PendingSending                         // Head is being sent
)

// Pending is what a push_pull waits for at a server.
type Pending struct {
	State  PendingState
	Rank   int    // of the server
	Key    uint64 // of PendingAnswer: the first key that it pushes, or pulls if it pushes none
	Head   uint64 // the first push_pull that has not been sent to the server; the others wait behind it
	Holder uint64 // of PendingKey
}

// Waits returns what a push_pull that is under way waits for, at the first server that has
// not answered it.
func (w *Worker) Waits(id uint64) (Pending, error) {
	if t := w.ticket(id); t != nil {
		for i, s := range w.servers {
			if t.legs[i].state != legEnded {
				return s.waits(t), nil
			}
		}
	}
	return Pending{}, fmt.Errorf("%w: %d has ended, or was never issued", ErrNoTicket, id)
}

func (s *server) waits(t *Ticket) Pending {
	p := Pending{State: PendingSending, Rank: s.rank}
	if t.legs[s.index].state == legPosted {
		p.State, p.Head = PendingAnswer, t.id
		p.Key = t.firstKey(s.index)
		return p
	}
	head := s.queue(t).at(0)
	p.Head = head.id
	l := &head.legs[s.index]
	switch {
	case s.down != nil:
		p.State = PendingPeer
	case s.asked != nil:
		p.State, p.Key = PendingBuffer, s.needs[0].Key
	case s.empty():
		for i, k := range l.keys {
			if k.holder != 0 && !(i < len(l.lends) && l.lends[i] && k.lend) {
				p.State, p.Key, p.Holder = PendingKey, head.push[i].Key, k.holder
				break
			}
		}
	}
	return p
}

// firstKey returns the first key that t pushes, or, if it pushes none, pulls.
func (t *Ticket) firstKey(server int) uint64 {
	if len(t.push) != 0 {
		return t.push[0].Key
	}
	return t.pull[server*len(t.pull)/len(t.legs)].Key
}
