package node

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/exchange"
	"fserver/engine/wire"
)

// TestRefusal: a push_pull that is refused because of one of its keys leaves the others as
// they were.
func TestRefusal(t *testing.T) { eachWay(t, refusedAndGood) }

func refusedAndGood(t *testing.T, way ...string) {
	m := newMesh(t, openFabrics, shape{1, 1, 1}, way...)
	w, s := m.workers[0], m.servers[0]
	require.NoError(t, s.RegisterRecv(tensor(t, 0, 2), []int32{0}, []uint64{2}))
	round := func(rows ...int) {
		t.Helper()
		var push []exchange.Tensor
		for i, n := range rows {
			push = append(push, tensor(t, uint64(i+1), n))
			fill(push[i], byte(n))
		}
		id := pushPull(t, w, push, nil)
		b, err := getBatch(s)
		require.NoError(t, err)
		for i := range push {
			require.Equal(t, push[i].Span.Bytes(), b.reqs[0].push[i].Span.Bytes())
		}
		respond(t, s, b.reqs[0].handler)
		require.NoError(t, wait(w, id))
	}
	round(512)
	for range 2 {
		err := wait(w, pushPull(t, w, []exchange.Tensor{tensor(t, 1, 1024), tensor(t, 2, 3)}, nil))
		var shape *exchange.ShapeError
		require.ErrorAs(t, err, &shape)
		require.ErrorContains(t, err, "24 bytes for key 2")
		round(512)
	}
	round(1024, 2)
	m.stop()
}

// TestTooLargeForAFrame: a push_pull whose description no frame holds is refused at once, and
// the connection is as it was.
func TestTooLargeForAFrame(t *testing.T) { eachWay(t, tooLarge) }

func tooLarge(t *testing.T, way ...string) {
	m := newMesh(t, openFabrics, shape{1, 1, 1}, append(way, "FSERVER_ON_PEER_LOST=wait")...)
	w, s := m.workers[0], m.servers[0]
	dims := append([]int64{0}, slices.Repeat([]int64{wire.MaxSize}, wire.MaxDims-1)...)
	x := tensor(t, 0, 0)
	x.Dims = dims
	large, err := w.BeginPushPull()
	require.NoError(t, err)
	for i := range wire.MaxTensors {
		x.Key = uint64(i)
		require.NoError(t, large.AddPush(x))
	}
	err = w.PushPull(large)
	var shape *exchange.ShapeError
	require.ErrorAs(t, err, &shape)
	require.ErrorContains(t, err, "a frame has at most 1048576")
	id := pushPull(t, w, []exchange.Tensor{tensor(t, 1, 4)}, nil)
	b, err := getBatch(s)
	require.NoError(t, err)
	respond(t, s, b.reqs[0].handler)
	require.NoError(t, wait(w, id))
	m.stop()
}
