package rails

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"

	"fserver/engine/mem"
	"fserver/engine/transport"
)

// A key of rails has an ID and a Token of its own, and in its Blob the keys of the members: their number, then of
// each its ID less the key's, its Token xor the key's, and its Blob behind its length. So a change of ID or Token is a
// change of all of them.
const (
	maxBlob  = 4096 // as in package wire
	keyBytes = 8 + 8 + 2
)

// keys are the regions that are registered. The Fabric's mu guards them.
type keys struct {
	last   uint64
	open   map[uint64]*region
	ending []map[uint64]*region // of each member, by the IDs of its keys
}

type region struct {
	transport.Key
	members []transport.Key // zero, which no member knows: it has failed
	left    int             // members that have not freed it
	only    *Conn           // that it is bound to
}

// find returns the region of a key, or nil.
func (k *keys) find(key *transport.Key) *region {
	if r := k.open[key.ID]; r != nil && r.Token == key.Token {
		return r
	}
	return nil
}

// freed takes EvFreed of a member. It reports whether that was the last one.
func (k *keys) freed(at int, id uint64) (of uint64, ok bool) {
	r := k.ending[at][id]
	if r == nil {
		return 0, false
	}
	delete(k.ending[at], id)
	r.left--
	return r.ID, r.left == 0
}

// blob returns what a peer has to know of the members' keys.
func blob(key *transport.Key, members []transport.Key) string {
	b := []byte{byte(len(members))}
	for i := range members {
		m := &members[i]
		b = binary.LittleEndian.AppendUint64(b, m.ID-key.ID)
		b = binary.LittleEndian.AppendUint64(b, m.Token^key.Token)
		b = binary.LittleEndian.AppendUint16(b, uint16(len(m.Blob)))
		b = append(b, m.Blob...)
	}
	return string(b)
}

// memberKey returns the key of the owner's Fabric number at, or an error if k has not those of as many as it
// says, or of less than least. It is on the way of each write, so it allocates nothing.
func memberKey(k *transport.Key, at, least int) (m transport.Key, err error) {
	b, count := k.Blob, 0
	if len(b) > 0 {
		b, count = b[1:], int(b[0])
	}
	for i := range count {
		n := 0
		if len(b) >= keyBytes {
			n = int(b[16]) | int(b[17])<<8
		}
		if len(b) < keyBytes+n {
			return m, fmt.Errorf("rails: post: key %d of %d fabrics ends within that of number %d", k.ID, count, i)
		}
		if i == at {
			m = transport.Key{ID: number(b) + k.ID, Token: number(b[8:]) ^ k.Token, Blob: b[keyBytes : keyBytes+n]}
		}
		b = b[keyBytes+n:]
	}
	switch {
	case len(b) != 0:
		return m, fmt.Errorf("rails: post: key %d of %d fabrics has %d bytes behind them", k.ID, count, len(b))
	case count < least:
		return m, fmt.Errorf("rails: post: key %d is for %d fabrics: the peer has at least %d", k.ID, count, least)
	}
	return m, nil
}

func number(b string) uint64 { return binary.LittleEndian.Uint64([]byte(b[:8])) }

// Register implements transport.Fabric.
func (f *Fabric) Register(m mem.Region) (transport.Key, error) {
	r := &region{}
	err := error(nil)
	for i := 0; i < len(f.members) && err == nil; i++ {
		var k transport.Key
		if f.works(i) == nil {
			k, err = f.members[i].Register(m)
		}
		if f.gone(i, err) {
			err = nil
		}
		r.members = append(r.members, k)
	}
	var token [8]byte
	rand.Read(token[:]) // never fails
	f.mu.Lock()
	f.keys.last++
	r.Key = transport.Key{ID: f.keys.last, Token: binary.NativeEndian.Uint64(token[:])}
	r.Blob = blob(&r.Key, r.members)
	if err == nil && len(r.Blob) > maxBlob {
		err = fmt.Errorf("rails: register %d bytes: a key of %d fabrics takes %d bytes: at most %d", m.Len, len(f.members), len(r.Blob), maxBlob)
	}
	if err == nil {
		f.keys.open[r.ID] = r
	}
	f.mu.Unlock()
	if err != nil {
		f.endMembers(r)
		return transport.Key{}, err
	}
	return r.Key, nil
}

// endMembers begins the end of what the members' keys allow. The Close of a member that has failed ends all of its keys.
func (f *Fabric) endMembers(r *region) {
	for i, k := range r.members {
		if k.ID != 0 && f.works(i) == nil {
			f.members[i].Deregister(k)
		}
	}
}

// Deregister implements transport.Fabric.
func (f *Fabric) Deregister(k transport.Key) {
	f.mu.Lock()
	r := f.keys.find(&k)
	if r == nil || f.closing {
		f.mu.Unlock()
		return
	}
	delete(f.keys.open, r.ID)
	if r.only != nil {
		delete(r.only.bound, r.ID)
	}
	for i, k := range r.members {
		if k.ID != 0 && !f.dead[i].over {
			f.keys.ending[i][k.ID] = r
			r.left++
		}
	}
	if r.left == 0 {
		f.told = append(f.told, done{user: r.ID})
		f.ring()
	}
	f.mu.Unlock()
	f.endMembers(r)
}

// Bind implements transport.Fabric. On a Fabric over which c has no member yet, nothing refuses the key until
// c has one.
func (f *Fabric) Bind(k transport.Key, conn transport.Conn) error {
	c, ok := conn.(*Conn)
	if !ok || c.f != f {
		return fmt.Errorf("rails: bind key %d: the connection belongs to another fabric", k.ID)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	r := f.keys.find(&k)
	if r == nil {
		return fmt.Errorf("rails: bind key %d to %s: no such key", k.ID, c.about.Remote)
	}
	if r.only != nil {
		delete(r.only.bound, r.ID)
	}
	r.only = c
	c.bound[r.ID] = r
	for _, m := range c.rails {
		if !m.over {
			if err := m.bind(r); err != nil {
				return err
			}
		}
	}
	return nil
}

// bind keeps the key of m's Fabric to m.
func (m *rail) bind(r *region) error {
	if r.members[m.at].ID == 0 {
		return nil
	}
	if err := m.f.members[m.at].Bind(r.members[m.at], m.conn); err != nil {
		return fmt.Errorf("rails: %w", err)
	}
	return nil
}
