package tcp

import (
	"fmt"
	"net"
	"strings"

	"fserver/engine/conf"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// Driver opens sockets. They reach everybody.
var Driver = transport.Driver{
	Way:   conf.Way{Name: "tcp", Aliases: []string{"zmq", "0"}, About: "sockets, between all hosts"},
	Probe: probe,
	Open: func(e *transport.Env) ([]transport.Fabric, error) {
		o, err := link.From(e)
		if err != nil {
			return nil, err
		}
		f, err := Open(o)
		if err != nil {
			return nil, err
		}
		return []transport.Fabric{f}, nil
	},
}

// probe connects over the loopback addresses.
func probe(*conf.Config) []transport.Finding {
	var families []string
	var why error
	for _, family := range []struct{ name, at string }{{"IPv4", "127.0.0.1:0"}, {"IPv6", "[::1]:0"}} {
		if err := loop(family.at); err == nil {
			families = append(families, family.name)
		} else {
			why = link.Cause(err)
		}
	}
	if families == nil {
		return []transport.Finding{{
			State: transport.No, Text: fmt.Sprintf("a connection to the loopback address fails: %v", why),
			Remedy: "enable the loopback interface: ip link set lo up",
		}}
	}
	return []transport.Finding{{State: transport.Yes, Text: strings.Join(families, " and ")}}
}

func loop(at string) error {
	l, err := net.Listen("tcp", at)
	if err != nil {
		return err
	}
	defer l.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		return err
	}
	return c.Close()
}
