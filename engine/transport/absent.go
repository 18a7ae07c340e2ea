package transport

import (
	"context"

	"fserver/engine/mem"
)

// Absent keeps the place of a device that cannot be used, so that those behind it keep their numbers. It reaches
// nobody, and it is not polled.
type Absent struct {
	Device string
	Why    error
}

var _ Fabric = (*Absent)(nil)

// Name implements transport.Fabric.
func (a *Absent) Name() string { return a.Device }

// Addr implements transport.Fabric: it takes no connections.
func (a *Absent) Addr() Addr { return "" }

// Caps implements transport.Fabric.
func (a *Absent) Caps() Caps { return Caps{} }

// Reaches implements transport.Fabric.
func (a *Absent) Reaches(Addr) error { return a.Why }

// Register implements transport.Fabric.
func (a *Absent) Register(mem.Region) (Key, error) { return Key{}, a.Why }

// Deregister implements transport.Fabric.
func (a *Absent) Deregister(Key) {}

// Bind implements transport.Fabric.
func (a *Absent) Bind(Key, Conn) error { return a.Why }

// Connect implements transport.Fabric.
func (a *Absent) Connect(context.Context, Addr) (Conn, error) { return nil, a.Why }

// Poll implements transport.Fabric.
func (a *Absent) Poll([]Event) (int, error) { return 0, a.Why }

// FD implements transport.Fabric: there is none.
func (a *Absent) FD() int { return -1 }

// Arm implements transport.Fabric.
func (a *Absent) Arm() bool { return false }

// Close implements transport.Fabric.
func (a *Absent) Close() error { return nil }
