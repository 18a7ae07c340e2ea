package node

import (
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/conf"
	"fserver/engine/exchange"
)

// same are the settings of every process of a role: nothing says which of them it is.
func (s shape) same(role, port string, extra ...string) []string {
	return s.settings(role, -1, 0, port, extra...)
}

// TestAssignedRanks starts nodes of which none has a rank, over every transport. All ranks are there
// once, push_pulls reach the servers in their order, and one that is started again takes the place
// of the one that is lost.
func TestAssignedRanks(t *testing.T) { eachWay(t, assignedRanks) }

func assignedRanks(t *testing.T, way ...string) {
	sh := shape{3, 2, 1}
	m := newCluster(t, openFabrics)
	m.scheduler = m.start(sh.settings("scheduler", 0, 0, "0", way...))
	_, port := splitPort(t, m.scheduler.Info().Address)
	for range sh.workers {
		m.workers = append(m.workers, m.start(sh.same("worker", port, way...)))
	}
	for range sh.servers {
		m.servers = append(m.servers, m.start(sh.same("server", port, way...)))
	}
	require.Equal(t, []int{-1, -1}, []int{m.workers[2].Info().Rank, m.workers[2].Info().Group})
	m.ranked()
	exchangeRanks(t, m)

	// A worker may dial a server that does not know its own rank yet.
	m.servers[0].gate.rank.Store(conf.NoRank)
	lost := m.workers[0].Info().Rank
	require.NoError(t, m.workers[0].Free())
	m.workers[0] = m.start(sh.same("worker", port, way...))
	waitReady(t, m.workers[0])
	m.servers[0].gate.rank.Store(0)
	require.Equal(t, lost, m.workers[0].Info().Rank)
	require.True(t, m.workers[0].Info().Recovery)
	require.False(t, m.workers[1].Info().Recovery)
	m.ranked()
	m.stop()
}

// ranked waits until all nodes are connected, and puts them in the order of their ranks.
func (m *mesh) ranked() {
	for _, list := range [][]*Node{m.workers, m.servers} {
		byRank := make([]*Node, len(list))
		for _, n := range list {
			waitReady(m.tb, n)
			v := n.Info()
			require.Nil(m.tb, byRank[v.Rank], "rank %d twice", v.Rank)
			require.Equal(m.tb, v.Rank, v.Group)
			byRank[v.Rank] = n
		}
		copy(list, byRank)
	}
}

// exchangeRanks has each worker push its rank, and each server answer with its own.
func exchangeRanks(t *testing.T, m *mesh) {
	var ids []uint64
	var outs [][]exchange.Tensor
	for i, w := range m.workers {
		x := tensor(t, 1, 1)
		fill(x, byte(i))
		outs = append(outs, []exchange.Tensor{tensor(t, 0, 1), tensor(t, 0, 1)})
		ids = append(ids, pushPull(t, w, []exchange.Tensor{x}, outs[i]))
	}
	for j, s := range m.servers {
		b, err := getBatch(s)
		require.NoError(t, err)
		for i, r := range b.reqs {
			require.EqualValues(t, i, r.rank)
			require.EqualValues(t, i, r.push[0].Span.Bytes()[0])
			y := tensor(t, 0, 1)
			fill(y, byte(100+j))
			respond(t, s, r.handler, y)
		}
	}
	for i, w := range m.workers {
		require.NoError(t, wait(w, ids[i]))
		for j := range m.servers {
			require.EqualValues(t, 100+j, outs[i][j].Span.Bytes()[0])
		}
	}
}

// TestAssignedAndGivenRanks mixes both in one role. Those that are given are kept, in whatever
// order the nodes come. When all are there, one more is refused.
func TestAssignedAndGivenRanks(t *testing.T) {
	sh := shape{3, 2, 1}
	m := newCluster(t, openFabrics)
	m.scheduler = m.start(sh.settings("scheduler", 0, 0, "0"))
	_, port := splitPort(t, m.scheduler.Info().Address)
	free := m.start(sh.same("worker", port))
	given := m.start(sh.settings("worker", 0, 0, port))
	m.workers = []*Node{free, given, m.start(sh.settings("worker", 2, 0, port))}
	m.servers = []*Node{m.start(sh.same("server", port)), m.start(sh.settings("server", 0, 0, port))}
	m.ranked()
	require.Same(t, given, m.workers[0])
	require.Same(t, free, m.workers[1])
	exchangeRanks(t, m)

	late := m.start(sh.settings("worker", 1, 0, port))
	err := ready(late)
	require.NoError(t, late.Close())
	require.ErrorContains(t, err, "the scheduler has assigned that rank: set DMLC_NODE_RANK for each worker, or for none")
	require.Equal(t, syscall.EINVAL, Errno(err))
	m.stop()
}
