package cudaipc

import (
	"fmt"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/cshim/cuda"
	"fserver/engine/gpu/fakegpu"
	"fserver/engine/transport"
)

// importing counts the tries to map memory of other processes.
type importing struct {
	*fakegpu.GPU
	tries int
}

func (g *importing) ImportIPC(h cuda.IPCHandle) (uint64, error) {
	g.tries++
	return g.GPU.ImportIPC(h)
}

func (g *importing) MapFDs(fds []int32, lens []uint64) (uint64, error) {
	g.tries++
	return g.GPU.MapFDs(fds, lens)
}

// TestContainers: GPU memory of a peer in another PID, IPC or mount namespace is staged,
// and nobody tries to map it; both sides say why.
func TestContainers(t *testing.T) {
	for _, c := range []struct {
		name   string
		spaces spaces // added to those of one side
		pieces bool
		why    string
	}{
		{"pid", spaces{1, 0, 0}, false, "different PID namespaces"},
		{"ipc", spaces{0, 1, 0}, false, "different IPC namespaces"},
		{"mount", spaces{0, 0, 1}, false, "different mount namespaces"},
		{"all, pieces", spaces{1, 1, 1}, true, "different PID and IPC and mount namespaces"},
		{"none", spaces{}, false, ""},
		{"none, pieces", spaces{}, true, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := fakegpu.New()
			g.Pieces = c.pieces
			a, b := pairOf(t, g, overCMA)
			da, db := &importing{GPU: g}, &importing{GPU: g}
			a.F.Calls.Dev, b.F.Calls.Dev = da, db
			for i, d := range c.spaces {
				require.NotZero(t, b.F.spaces[i])
				b.F.spaces[i] += d
			}
			one, other := onGPU(t, g, 3<<20, 5), onGPU(t, g, 3<<20, 1)
			to, back := b.Key(t, other), a.Key(t, one)
			for fill := byte(6); fill < 9; fill++ {
				src := onGPU(t, g, 3<<20, fill)
				a.Done, b.Done, a.Writes, b.Writes = nil, nil, nil, nil
				a.Post(t, write(to, src, transport.Point{}))
				b.Post(t, write(back, src, transport.Point{}))
				until(t, a, b, func() bool { return len(a.Writes) == 1 && len(b.Writes) == 1 && len(a.Done) == 1 && len(b.Done) == 1 })
				holds(t, g, one, fill)
				holds(t, g, other, fill)
			}
			for _, s := range []*side{a, b} {
				l := s.C.Peer()
				if c.why == "" {
					require.Equal(t, []string{"cudaipc", ""}, []string{l.Via, l.Why})
					continue
				}
				require.Equal(t, "cma", l.Via)
				require.Contains(t, l.Why, "cudaipc: the two processes are in "+c.why)
			}
			require.Equal(t, c.why != "", da.tries+db.tries == 0)
			b.Free(t, to)
			a.Free(t, back)
		})
	}
}

// TestWhyStaged: where memory of a peer in the same namespaces is not mapped, the writer
// says why.
func TestWhyStaged(t *testing.T) {
	for _, c := range []struct {
		call, why string
		alone     bool
	}{
		{"ImportIPC", "cudaipc: ImportIPC: cuda: injected failure", false},
		{"ExportIPC", "cudaipc: the driver shares no such memory", false},
		{"", "cudaipc: the driver shares no such memory", true},
	} {
		g := fakegpu.New()
		g.Alone = c.alone
		a, b := pairOf(t, g, overCMA)
		src, dst := onGPU(t, g, 3<<20, 5), onGPU(t, g, 3<<20, 1)
		if c.call != "" {
			g.Fail(c.call, 1)
		}
		require.Empty(t, a.C.Peer().Why)
		k := b.Key(t, dst)
		a.Post(t, write(k, src, transport.Point{}))
		until(t, a, b, func() bool { return len(b.Writes) == 1 && len(a.Done) == 1 })
		holds(t, g, dst, 5)
		require.Equal(t, "cma", a.C.Peer().Via)
		require.Contains(t, a.C.Peer().Why, c.why)
		b.Free(t, k)
	}
}

// TestOwnSpaces: they are those of the kernel, which differ in a container.
func TestOwnSpaces(t *testing.T) {
	here := ownSpaces()
	require.Empty(t, here.apart(ownSpaces()))
	out, err := exec.Command("unshare", "--pid", "--ipc", "--mount", "--fork", "--mount-proc",
		"stat", "-L", "-c", "%i", "/proc/self/ns/pid", "/proc/self/ns/ipc", "/proc/self/ns/mnt").Output()
	if err != nil {
		t.Skipf("no namespaces: %v", err)
	}
	var there spaces
	_, err = fmt.Sscan(string(out), &there[0], &there[1], &there[2])
	require.NoError(t, err)
	require.Contains(t, here.apart(there), "different PID and IPC and mount namespaces of one host")
}
