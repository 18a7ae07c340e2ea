package gpu

import (
	"sync"

	"fserver/cshim/cuda"
)

var laters sync.Map // *Later by the index of a GPU

// LaterOf is what gives back memory of a GPU of this process.
func LaterOf(index int) *Later {
	l, _ := laters.LoadOrStore(index, new(Later))
	return l.(*Later)
}

// frees gives back one thing of each Kind, by its address or handle. That of a context is the
// address of a pointer to it.
var frees = [kinds]func(*cuda.Device, uint64) error{
	Memory:  (*cuda.Device).Free,
	Mapping: (*cuda.Device).CloseIPC,
	Host:    (*cuda.Device).FreeHost,
	Module:  (*cuda.Device).Unload,
	Rest:    (*cuda.Device).Destroy,
}

// FreeLater gives back what the driver knows by an address or handle, when LaterOf does.
func FreeLater(index int, kind Kind, address, bytes uint64) error {
	d, err := Open(index)
	if err != nil {
		return err
	}
	LaterOf(index).Do(kind, bytes, func() {
		_ = frees[kind](d.(*cuda.Device), address) // who had it has gone on
	})
	return nil
}
