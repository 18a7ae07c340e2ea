package verbs

import (
	"errors"
	"fmt"
	"net"
	"strings"

	rdma "fserver/cshim/verbs"
)

// Lag says which port of a bonded NIC queue pairs send over.
type Lag uint8

// The ways to choose it: the NIC does; those of a peer are spread over both; one port.
const (
	LagNIC Lag = iota
	LagSpread
	LagPort1
	LagPort2
)

// bondPorts is how many ports are bonded.
const bondPorts = 2

// lag spreads queue pairs over the ports of a bond. The Fabric's owner guards used.
type lag struct {
	how  Lag
	used map[string]*[bondPorts]int // queue pairs of each peer on each port
}

// choose returns the port, from 1, for one more queue pair of a peer: the one that its dialer uses, or the one with the
// fewest.
func (l *lag) choose(peer string, dialers int) int {
	switch l.how {
	case LagNIC:
		return 0
	case LagPort1, LagPort2:
		return int(l.how-LagPort1) + 1
	}
	n := l.used[peer]
	if n == nil {
		n = new([bondPorts]int)
		l.used[peer] = n
	}
	if dialers == 0 {
		dialers = 1
		if n[1] < n[0] {
			dialers = 2
		}
	}
	n[dialers-1]++
	return dialers
}

// leave takes that the queue pair of c is gone, or that there will be none.
func (l *lag) leave(c *Conn) {
	if n := l.used[c.lagOf]; n != nil && c.lag != 0 {
		n[c.lag-1]--
		if *n == [bondPorts]int{} {
			delete(l.used, c.lagOf)
		}
	}
	c.lag = 0
}

// choosePort chooses the port that c sends over; dialers is that of the other side if that has chosen first, or 0. A
// dialer knows the peer by where that listens, and the other side by its host.
func (c *Conn) choosePort(remote string, dialers int) {
	if host, _, err := net.SplitHostPort(remote); err == nil && !c.session.Dialer {
		remote = host
	}
	c.f.Owned(func() { c.lagOf, c.lag = remote, c.f.lag.choose(remote, dialers) })
}

// keepTo has the queue pair send over the port that was chosen, if one was. Where it cannot be chosen, the NIC chooses.
func (c *Conn) keepTo() error {
	if c.lag == 0 {
		return nil
	}
	err := c.qp.LagPort(c.lag)
	switch {
	case err == nil:
		c.About.Via += fmt.Sprintf("/port%d", c.lag)
	case errors.Is(err, rdma.ErrNoLag):
		c.About.Why = also(c.About.Why, fmt.Sprintf("STEPMESH_SPLIT_QP_LAG: %s is not a bonded mlx5 NIC, so its port cannot be chosen", c.f.dev.Name))
		err = nil
	}
	return err
}

// also joins two reasons, of which either may be empty.
func also(a, b string) string { return strings.TrimPrefix(a+"; "+b, "; ") }

// flow gives the queue pair a UDP source port of its own if queue pairs are to be spread. Switches, and bonds of NICs
// whose port cannot be chosen, spread packets by that port.
func (c *Conn) flow() uint32 {
	if c.f.lag.how != LagSpread {
		return 0
	}
	return c.number*0x9e3779b1>>12 | 1 // 20 bits
}
