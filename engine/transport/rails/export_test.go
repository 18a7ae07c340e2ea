package rails

import "fserver/engine/transport"

// Live returns how many members of a Conn take frames and writes.
func Live(conn transport.Conn) int {
	c := conn.(*Conn)
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	return len(c.lives())
}
