package node

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"fserver/engine/conf"
	"fserver/engine/exchange"
	"fserver/engine/trace"
	"fserver/engine/transport"
	"fserver/engine/transport/faults"
	"fserver/engine/transport/inproc"
)

// overFaults, if set, are the faults of the Fabrics that over opens.
var overFaults *faults.Options

// TestOverNICs runs the tests of a mesh in a Network anew, with memory that behaves like a NIC:
// with fixed seeds, and with one of the time, which the names of the tests tell. The longest
// run with the last one alone.
func TestOverNICs(t *testing.T) {
	seeds := []uint64{1 << 10, 2 << 10, uint64(time.Now().UnixNano())}
	if testing.Short() {
		seeds = seeds[:1]
	}
	for i, seed := range seeds {
		for _, test := range []struct {
			name string
			run  func(*testing.T)
			long bool
		}{
			{"Kill", TestKill, false},
			{"FailedOp", TestFailedOp, false},
			{"ServerRestarts", TestServerRestarts, true},
			{"WorkerRestarts", TestWorkerRestarts, false},
			{"PatientWorker", TestPatientWorker, false},
			{"PatientServer", TestPatientServer, false},
			{"PatienceEnds", TestPatienceEnds, false},
			{"Poison", TestPoison, false},
			{"BothAreGone", TestBothAreGone, false},
			{"Cut", TestCut, false},
			{"OldEpoch", TestOldEpoch, false},
			{"StopWithoutTheLost", TestStopWithoutTheLost, false},
			{"WaitingIsBounded", TestWaitingIsBounded, false},
			{"PairsAfterALoss", TestPairsAfterALoss, true},
			{"PairsAfterAServerIsLost", TestPairsAfterAServerIsLost, false},
		} {
			if test.long && i < len(seeds)-1 {
				continue
			}
			t.Run(fmt.Sprintf("seed %d/%s", seed, test.name), func(t *testing.T) {
				o := faults.NIC(seed)
				overFaults = &o
				defer func() { overFaults = nil }()
				test.run(t)
			})
		}
	}
}

// TestCreditBringsNoEvent: what Post has not taken is posted after the Poll that ends
// back-pressure, also if that Poll finds no event. It was posted before the next Poll, and nobody
// was woken for that, so a call went on only when its sleep had ended.
func TestCreditBringsNoEvent(t *testing.T) {
	calls := ""
	m := newMesh(t, orderly(under(faults.Options{Starve: 0.5}, over(inproc.New())), &calls), shape{1, 1, 1})
	require.NoError(t, echo(t, m.workers[0], m.servers, 500, closed()))
	n, empty, seen := m.workers[0], false, ""
	require.True(t, n.driver.Under(func() {
		side := n.side
		defer func() { n.side = side }()
		n.side = &orderlySide{side, &calls}
		for i := 0; i < 10 && !empty; i++ {
			calls = ""
			found, _ := work{n}.Pass(trace.Now(), false)
			empty = found == 0
		}
		seen = calls
	}))
	require.True(t, empty)
	require.Equal(t, "drain poll drain ", seen)
	m.stop()
}

// orderlySide and orderlyFabric write down what a pass calls.
type orderlySide struct {
	exchange.Party
	calls *string
}

func (o *orderlySide) Drain() {
	*o.calls += "drain "
	o.Party.Drain()
}

// orderly wraps the Fabrics of a worker so.
func orderly(fabrics Fabrics, calls *string) Fabrics {
	return func(cfg *conf.Config, g transport.Gate, log *zap.Logger) ([]transport.Fabric, error) {
		list, err := fabrics(cfg, g, log)
		if err == nil && cfg.Role == conf.Worker {
			list[0] = &orderlyFabric{list[0], calls}
		}
		return list, err
	}
}

type orderlyFabric struct {
	transport.Fabric
	calls *string
}

func (f *orderlyFabric) Poll(ev []transport.Event) (int, error) {
	*f.calls = (*f.calls)[:min(len(*f.calls), 64)] + "poll " // whoever drives outside of the test calls it often
	return f.Fabric.Poll(ev)
}
