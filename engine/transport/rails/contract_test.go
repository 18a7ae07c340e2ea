package rails_test

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fserver/engine/transport"
	"fserver/engine/transport/faults"
	"fserver/engine/transport/inproc"
	"fserver/engine/transport/rails"
	"fserver/engine/transport/tcp"
	"fserver/engine/transport/transporttest"
)

// opened makes a Fabric of two, and closes them if that fails.
func opened(w transporttest.Options, o rails.Options, open func() (transport.Fabric, error)) (transport.Fabric, error) {
	var members []transport.Fabric
	for range 2 {
		f, err := open()
		if err != nil {
			return nil, err
		}
		members = append(members, f)
	}
	o.Stall = w.Limits.Stall
	return rails.New(members, o)
}

// whole is a Fabric whose Connect waits for the other members, which come a moment later: that is no
// time in which nothing happens. It needs Polls.
type whole struct{ transport.Fabric }

func (f whole) Connect(ctx context.Context, peer transport.Addr) (transport.Conn, error) {
	c, err := f.Fabric.Connect(ctx, peer)
	for end := time.Now().Add(10 * time.Second); err == nil && rails.Live(c) < len(c.Peer().Members) && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	return c, err
}

// armed is a Fabric whose user sleeps after each Poll, because it may be the last one. It polls again as long as Arm
// says so, or the descriptor within a moment, in which a frame that was lost is sent again. A user that stops to
// poll without Arm leaves its peer without the last acknowledgement, and so without the last EvDone.
type armed struct{ transport.Fabric }

func (f armed) Poll(ev []transport.Event) (n int, err error) {
	for again := true; again && n < len(ev) && err == nil; again = n > 0 && f.more() {
		var k int
		k, err = f.Fabric.Poll(ev[n:])
		for i := range ev[n : n+k] {
			ev[n+i].Data = bytes.Clone(ev[n+i].Data)
		}
		n += k
	}
	return n, err
}

func (f armed) more() bool {
	if f.Arm() {
		return true
	}
	ready, err := transporttest.Sleep([]unix.PollFd{{Fd: int32(f.FD()), Events: unix.POLLIN}}, lost)
	return err == nil && ready != 0
}

// run runs the contract suite.
func run(t *testing.T, bed func() transporttest.Bed) {
	transporttest.Run(t, func(tb testing.TB) transporttest.Bed {
		b := bed()
		open := b.Open
		b.Open = func(w transporttest.Options) (transport.Fabric, error) {
			f, err := open(w)
			switch {
			case err != nil:
			case strings.HasSuffix(tb.Name(), "/FDIsQuietWhenIdle"), strings.HasSuffix(tb.Name(), "/ArmForAnotherSleeper"):
				f = whole{f}
			case strings.HasSuffix(tb.Name(), "/EachFabricInItsOwnGoroutine"):
				f = armed{f}
			}
			return f, err
		}
		return b
	})
}

// lost is more than a frame of TestContractUnderLoss waits until it is sent again.
const lost = 4 * time.Millisecond

// bed has a Network of its own for each test, over which all members reach each other.
func bed(o rails.Options, worse *faults.Options) func() transporttest.Bed {
	return func() transporttest.Bed {
		net := inproc.New()
		names := map[transport.Fabric][]string{}
		b := transporttest.Bed{Offloads: true, Allocates: "inproc copies each frame"}
		if worse != nil && worse.Resend {
			b.Lost = lost
		}
		b.Open = func(w transporttest.Options) (transport.Fabric, error) {
			var mine []string
			f, err := opened(w, o, func() (transport.Fabric, error) {
				f, err := net.Open(inproc.Options{Listen: w.Listen, Gate: w.Gate, Limits: w.Limits})
				if err != nil {
					return nil, err
				}
				mine = append(mine, strings.TrimPrefix(f.Name(), "inproc/"))
				if worse == nil {
					return f, nil
				}
				worse.Seed++
				return faults.Wrap(f, *worse)
			})
			names[f] = mine
			return f, err
		}
		b.Kill = func(f transport.Fabric) {
			for _, n := range names[f] {
				net.Kill(n)
			}
		}
		return b
	}
}

func TestContract(t *testing.T) { run(t, bed(rails.Options{}, nil)) }

// TestContractOfSmallParts cuts each write above a page.
func TestContractOfSmallParts(t *testing.T) {
	if transporttest.Quick() {
		t.Skip("TestContractOfNICs cuts writes, too")
	}
	run(t, bed(rails.Options{Split: 1}, nil))
}

// TestContractOfNICs has members behave like NICs, with fixed seeds and with one of the time, which the names
// of the tests tell. The race detector has the last one alone.
func TestContractOfNICs(t *testing.T) {
	seeds := []uint64{1 << 10, 1 << 20, uint64(time.Now().UnixNano())}
	if testing.Short() {
		seeds = seeds[:1]
	} else if transporttest.Quick() {
		seeds = seeds[2:]
	}
	for _, seed := range seeds {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			worse := faults.NIC(seed)
			run(t, bed(rails.Options{Split: 1 << 14}, &worse))
		})
	}
}

func TestContractUnderLoss(t *testing.T) {
	if testing.Short() {
		t.Skip("it runs under the race detector")
	}
	worse := faults.NIC(1)
	worse.Resend, worse.Drop, worse.Timeout = true, 0.1, 200*time.Microsecond
	run(t, bed(rails.Options{}, &worse))
}

func TestContractOverTCP(t *testing.T) {
	run(t, func() transporttest.Bed {
		return transporttest.Bed{Open: func(w transporttest.Options) (transport.Fabric, error) {
			return opened(w, rails.Options{}, func() (transport.Fabric, error) {
				o := tcp.Options{Gate: w.Gate, Limits: w.Limits}
				if w.Listen {
					o.Listen = "127.0.0.1:0"
				}
				return tcp.Open(o)
			})
		}}
	})
}
