// Package all is the list of transports. A new one adds its line here, and nothing else
// outside of its own package names it.
package all

import (
	"fserver/engine/conf"
	"fserver/engine/transport"
	"fserver/engine/transport/cma"
	"fserver/engine/transport/cudaipc"
	"fserver/engine/transport/tcp"
	"fserver/engine/transport/verbs"
)

// Drivers are the transports of this build. Of those that reach a peer the first one is taken, and the
// last one reaches everybody. Those that wrap others do so in this order.
func Drivers() []transport.Driver {
	return []transport.Driver{cudaipc.Driver(cma.Driver.Name), cma.Driver, verbs.Driver, tcp.Driver}
}

// Ways are the transports as settings know them.
func Ways() []conf.Way {
	var ways []conf.Way
	for _, d := range Drivers() {
		ways = append(ways, d.Way)
	}
	return ways
}
