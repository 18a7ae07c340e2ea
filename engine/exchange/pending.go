package exchange

import "fmt"

// Pending is what a push_pull waits for at a server.
type Pending struct {
	Rank   int    // of the server
	Key    uint64 // the first key that it pushes, or pulls if it pushes none
	Sent   bool   // the server has it and has not answered
	Behind uint64 // else, the one before it that it waits for: the first that was not sent, of unicasts the first with one of its keys, or the one that pushed such a key; 0: none
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
	l := &t.legs[s.index]
	p := Pending{Rank: s.rank, Key: t.firstKey(s.index), Sent: l.state == legPosted}
	if p.Sent {
		return p
	}
	if head := s.ahead(t); head != t {
		p.Behind = head.id
		return p
	}
	for i, k := range l.keys {
		if k.holder != 0 && k.holder != t.id && !(i < len(l.lends) && l.lends[i] && k.lend) {
			p.Behind = k.holder
			break
		}
	}
	return p
}

// firstKey returns the first key that t pushes, or, if it pushes none, pulls.
func (t *Ticket) firstKey(server int) uint64 {
	if len(t.push) != 0 {
		return t.push[0].Key
	}
	if t.only != nowhere {
		return t.pull[0].Key
	}
	return t.pull[server*len(t.pull)/len(t.legs)].Key
}
