package cudaipc

import "fserver/engine/transport"

// wraps reports whether this Fabric wraps a Conn of inner. A Fabric with a Device wraps all.
// One without wraps those to peers that may have a GPU.
func (f *Fabric) wraps(in transport.Conn) bool {
	return f.dev != nil || f.o.HasGPU != nil && f.o.HasGPU(in.Hello())
}

// first reports whether e may be the first event of its Conn. It takes no look at the Conn, so
// that events of Conns which are not wrapped cost nothing.
func (f *Fabric) first(e *transport.Event) bool {
	return f.dev != nil || e.Kind == transport.EvAccept || int(f.tracked.Load()) > len(f.conns)
}

// pollBare is Poll for a Fabric without a Device that wraps no Conn yet. It hands on what
// inner gives, until an event is of a Conn that has to be wrapped.
func (f *Fabric) pollBare(ev []transport.Event) (int, error) {
	ev = ev[:min(len(ev), len(f.ev))]
	n, err := f.inner.Poll(ev)
	for i := range ev[:n] {
		if ev[i].Kind == transport.EvAccept && f.wraps(ev[i].Conn) || f.tracked.Load() != 0 {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.at, f.got = 0, copy(f.ev[:], ev[i:n])
			p := poll{ev: ev, n: i}
			f.take(&p)
			return p.n, err
		}
	}
	return n, err
}
