// Package transporttest is the contract of package transport as a test suite.
// Every transport runs it from its own tests:
//
//	func TestContract(t *testing.T) {
//		transporttest.Run(t, func(testing.TB) transporttest.Bed {
//			return transporttest.Bed{Open: func(o transporttest.Options) (transport.Fabric, error) {
//				return tcp.Open(tcp.Options{Listen: o.Listen, Gate: o.Gate, Limits: o.Limits})
//			}}
//		})
//	}
//
// The suite opens all its Fabrics in the test's own process and drives them
// from one goroutine, in turn, until what it waits for has happened; a few
// tests give each Fabric a goroutine of its own. It knows nothing of a
// transport but the interfaces. Every event of every test passes the same
// checks: an Op ends exactly once, EvAccept is the first event of a Conn and
// EvClosed the last, which comes once, nothing is left when all is closed.
package transporttest

import (
	"slices"
	"testing"
	"time"

	"fserver/engine/transport"
)

// Options say what Fabric a test wants.
type Options struct {
	// Gate guards the Fabric's connections, those it takes and those it opens.
	Gate transport.Gate
	// Limits are the bounds to keep; the zero value asks for the defaults.
	Limits transport.Limits
	// Listen asks for a Fabric that takes connections, at an address that the
	// transport picks. Without it Addr is empty.
	Listen bool
}

// A Bed is what a transport brings to one test. All Fabrics of a Bed can reach
// each other. The test closes what it opened.
type Bed struct {
	// Open makes a Fabric. When it gives an ErrUnavailable the test is skipped
	// with its reason.
	Open func(Options) (transport.Fabric, error)
	// Memory is where regions and sources lie; nil means host memory.
	Memory Memory
	// Allocates says why Post and Poll allocate; empty means that they must not.
	Allocates string
	// Offloads says that something else than the CPU makes the writes, so that no
	// Poll of either side shares its time with them.
	Offloads bool
	// Alone says that a peer's device writes here without anybody's help, once it has been
	// shown the memory: nobody can refuse it a key that is bound to another peer.
	Alone bool
	// Pause is for how long Post may take nothing and go on by itself; 0: 100 ms.
	Pause time.Duration
	// Lost is for how long a frame that was lost may wait until it is sent again; 0: none is lost.
	Lost time.Duration
	// Kill ends a Fabric as the death of its process would: its peers are not
	// told, they find out. The test still calls Close. nil skips the tests
	// that need it.
	Kill func(transport.Fabric)
}

// Run runs the suite. It calls bed once for each test, with that test's tb.
// With -short it leaves out what moves much or goes on for long.
func Run(t *testing.T, bed func(tb testing.TB) Bed) {
	t.Helper()
	cases := shortCases
	if !testing.Short() {
		cases = slices.Concat(cases, longCases)
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			c.run(newWorld(t, bed(t)))
		})
	}
}

var (
	shortCases = slices.Concat(connectCases, gateCases, peerCases, frameCases, writeCases, boundsCases, closingCases, endCases,
		lendCases, sleepCases, allocCases)
	longCases = slices.Concat(pressureCases, parallelCases, soakCases)
)

type testCase struct {
	name string
	run  func(*world)
}
