package rails_test

import (
	"testing"

	"fserver/cshim/verbs/fakeverbs"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
	"fserver/engine/transport/rails"
	"fserver/engine/transport/transporttest"
	"fserver/engine/transport/verbs"
)

// TestContractOverVerbs: two devices with two queue pairs each.
func TestContractOverVerbs(t *testing.T) {
	lib, err := fakeverbs.Library()
	if err != nil {
		t.Skip(err)
	}
	run(t, func() transporttest.Bed {
		fakeverbs.Reset()
		fakeverbs.Set("cqe", 1<<15)
		fakeverbs.Set("patient", 1)
		all := &transporttest.Known{}
		return transporttest.Bed{Memory: all, Offloads: true, Alone: true, Open: func(w transporttest.Options) (transport.Fabric, error) {
			devices := []string{"fake1", "fake0"}
			f, err := opened(w, rails.Options{Strands: 2}, func() (transport.Fabric, error) {
				o := verbs.Options{Options: link.Options{Gate: w.Gate, Limits: w.Limits}, Library: lib, Device: devices[len(devices)-1]}
				devices = devices[:len(devices)-1]
				if w.Listen {
					o.Listen = "127.0.0.1:0"
				}
				return verbs.Open(o)
			})
			if err == nil {
				all.Add(f)
			}
			return f, err
		}}
	})
}
