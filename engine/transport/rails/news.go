package rails

import "fserver/engine/transport"

// news is what happened to a member.
type news struct {
	c      *Conn
	member transport.Member
}

// noted has News told that r is used, or why it is not any more.
func (c *Conn) noted(r *rail, why error) {
	r.said = why == nil
	f := c.f
	if f.o.News == nil {
		return
	}
	m := c.place(r.at, r.strand)
	about := r.conn.Peer()
	if m.Remote, m.Via, m.Path, m.Why = about.Remote, about.Via, about.Path, ""; why != nil {
		m.Why = why.Error()
	}
	f.news = append(f.news, news{c, m})
	select {
	case f.untold <- struct{}{}:
	default:
	}
}

// tellNews is a goroutine of the Fabric: who is told may wait for a terminal.
func (f *Fabric) tellNews() {
	for {
		select {
		case <-f.ctx.Done():
			return
		case <-f.untold:
		}
		f.mu.Lock()
		list := f.news
		f.news = nil
		f.mu.Unlock()
		for i := range list {
			f.o.News(list[i].c.about, list[i].member)
		}
	}
}
