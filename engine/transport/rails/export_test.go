package rails

import (
	"time"

	"fserver/engine/transport"
)

// AskBusy is in how many Polls that find something a quiet member is asked once.
const AskBusy = askBusy

// Refuse has each member of a Conn take no op from now on, for err.
func Refuse(conn transport.Conn, err error) {
	c := conn.(*Conn)
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	for _, r := range c.rails {
		r.conn = refusing{r.conn, err}
	}
}

type refusing struct {
	transport.Conn
	err error
}

func (c refusing) Post([]transport.Op) (int, error) { return 0, c.err }

// Live returns how many members of a Conn take frames and writes.
func Live(conn transport.Conn) int { return count(conn, live) }

// LiveOver reports whether the member over Fabric at is one of them.
func LiveOver(conn transport.Conn, at int) bool {
	c := conn.(*Conn)
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	for _, r := range c.lives() {
		if r.at == at {
			return true
		}
	}
	return false
}

// ProbeNext has the next cut write measure all members.
func ProbeNext(conn transport.Conn) {
	c := conn.(*Conn)
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	c.cuts = probeCuts - 1
}

// SetClock sets the clock that rates are measured with.
func SetClock(fabric transport.Fabric, now func() time.Duration) { fabric.(*Fabric).now = now }

// ForgetRates makes the rates of all members unknown.
func ForgetRates(conn transport.Conn) {
	c := conn.(*Conn)
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	for _, r := range c.rails {
		r.meter.rate = 0
	}
}

// Half returns how many have come, on which the peer was not heard.
func Half(conn transport.Conn) int { return count(conn, half) }

// Dialing returns how many the dialer waits for.
func Dialing(conn transport.Conn) int { return count(conn, dialing) }

// Unsettled returns how many have ended here, of which the peer has not said so.
func Unsettled(conn transport.Conn) int { return count(conn, down) + count(conn, closed) }

func count(conn transport.Conn, p phase) (n int) {
	c := conn.(*Conn)
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	for _, m := range c.order.members {
		if m.phase == p {
			n++
		}
	}
	return n
}

// Greeting returns what a member of the same Conn begins with.
func Greeting(conn transport.Conn, member uint32) []byte { return GreetingOf(conn.(*Conn).id, member) }

// GreetingOf returns the same for a Conn of that identity, and a dialer of two Fabrics.
func GreetingOf(id [16]byte, member uint32) []byte {
	return greet{Conn: id, Member: member, Count: 2, Strands: 1}.bytes()
}

// Rails returns how many members a Fabric knows.
func Rails(fabric transport.Fabric) int {
	f := fabric.(*Fabric)
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.rails)
}

// Queued returns how many entries wait for members.
func Queued(fabric transport.Fabric) (n int) {
	f := fabric.(*Fabric)
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, r := range f.rails {
		n += len(r.queue)
	}
	return n
}

// Item returns what travels as an item.
func Item(of byte, num, first, second uint64) []byte {
	b := make([]byte, headerLen)
	it := item{kind: kind(of), num: num, ack: first, got: second}
	if it.kind == stating {
		it.statement = statement{uint32(second), first}
	}
	putItem(b, &it)
	return b
}

// KeyOf returns a key of rails that has these keys of its members.
func KeyOf(members []transport.Key) transport.Key {
	k := transport.Key{ID: 1, Token: 2}
	k.Blob = blob(&k, members)
	return k
}

// Stating returns how many statements the peer has not confirmed.
func Stating(conn transport.Conn) int {
	c := conn.(*Conn)
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	return len(c.order.log)
}

// Placed returns the members that frames without an acknowledgement were posted on last, by the numbers of the frames.
// A negative one means that the frame waits for a member, or has come though its member is gone.
func Placed(conn transport.Conn) map[uint64]int {
	c := conn.(*Conn)
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	at := map[uint64]int{}
	for num := c.order.acked; num < c.order.sealed; num++ {
		at[num] = c.order.at(num).at
	}
	return at
}
