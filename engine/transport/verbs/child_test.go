package verbs

import (
	"context"
	"io"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/cshim/verbs/fakeverbs"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
	"fserver/engine/transport/transporttest"
)

// TestKilledPeer kills a process whose Conn is idle, and one that is flooded with frames. The
// socket of the set-up tells of both. A new process connects afterwards.
func TestKilledPeer(t *testing.T) {
	if !onHardware() {
		t.Skip("verbs: queue pairs of the fake library do not join two processes")
	}
	if at := os.Getenv("VERBS_TEST_PARENT"); at != "" {
		idlePeer(t, transport.Addr(at))
		return
	}
	f := onDevice(t, fakeverbs.Devices()[0], "127.0.0.1:0")
	var ev [16]transport.Event
	until := func(kind transport.EventKind) transport.Event {
		for end := time.Now().Add(30 * time.Second); time.Now().Before(end); {
			_, _ = transporttest.Woken(time.Second, f)
			n, err := f.Poll(ev[:])
			require.NoError(t, err)
			for _, e := range ev[:n] {
				if e.Kind == kind {
					return e
				}
			}
		}
		require.Fail(t, "no such event")
		return transport.Event{}
	}
	for _, flooded := range []bool{false, true, false} {
		child := exec.Command(os.Args[0], "-test.run=^TestKilledPeer$")
		child.Env = append(os.Environ(), "VERBS_TEST_PARENT="+string(f.Addr()))
		require.NoError(t, child.Start())
		c := until(transport.EvAccept).Conn
		if flooded {
			frame := transport.Op{Kind: transport.OpFrame, Frame: make([]byte, 5000)}
			for taken := 1; taken > 0; {
				var err error
				taken, err = c.Post([]transport.Op{frame})
				require.NoError(t, err)
			}
		}
		start := time.Now()
		require.NoError(t, child.Process.Kill())
		_ = child.Wait() // killed
		e := until(transport.EvDown)
		t.Logf("flooded %v: known after %v: %v", flooded, time.Since(start), e.Err)
		require.Equal(t, c, e.Conn)
		require.NotErrorIs(t, e.Err, io.EOF)
	}
}

func onDevice(t *testing.T, device, listen string) *Fabric {
	f, err := Open(Options{Options: link.Options{Gate: transporttest.Gate{}, Listen: listen}, Device: device})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, f.Close()) })
	return f
}

// idlePeer connects and waits to be killed.
func idlePeer(t *testing.T, at transport.Addr) {
	f := onDevice(t, fakeverbs.Devices()[1], "")
	_, err := f.Connect(context.Background(), at)
	require.NoError(t, err)
	select {}
}
