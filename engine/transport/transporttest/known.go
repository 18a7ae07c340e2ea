package transporttest

import (
	"fserver/engine/mem"
	"fserver/engine/transport"
)

// Known is host memory that all Fabrics of a test have registered, as those with Caps.LocalKeys must for what they send.
type Known struct {
	fabrics []transport.Fabric
	regions []mem.Region
}

// Add has a Fabric know the memory that there is and that will be.
func (k *Known) Add(f transport.Fabric) {
	k.fabrics = append(k.fabrics, f)
	for _, r := range k.regions {
		_, _ = f.Register(r)
	}
}

// Alloc implements Memory.
func (k *Known) Alloc(n uint64) (mem.Region, error) {
	r, err := mem.Map(n)
	if err == nil {
		k.regions = append(k.regions, r)
		for _, f := range k.fabrics {
			_, _ = f.Register(r) // of one that is closed
		}
	}
	return r, err
}

// Free implements Memory. It is called when the Fabrics are closed.
func (k *Known) Free(r mem.Region) error { return mem.Unmap(r) }

// Load implements Memory.
func (k *Known) Load(dst []byte, s mem.Span) error {
	copy(dst, s.Bytes())
	return nil
}

// Store implements Memory.
func (k *Known) Store(s mem.Span, src []byte) error {
	copy(s.Bytes(), src)
	return nil
}
