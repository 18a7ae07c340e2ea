package gpu

import (
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/cshim/cuda"
	"fserver/engine/transport"
)

// passing is a Device whose events pass one after the other, each between two questions.
type passing struct {
	Device
	asked int
}

func (p *passing) Passed(e cuda.Event) (bool, error) {
	p.asked++
	return p.asked > int(e), nil // the first is asked too early
}

// TestLook: a mark that was asked too early goes with the next one of its word: when the last number is there, the
// memory of the word may go.
func TestLook(t *testing.T) {
	var mu sync.Mutex
	var words [2]atomic.Uint64
	mu.Lock()
	defer mu.Unlock()
	c := Calls{Mu: &mu, Dev: &passing{}}
	for i, event := range []cuda.Event{1, 1, 9, 9} {
		c.marks = append(c.marks, mark{event, &words[i/2], uint64(i + 1)})
	}
	c.Look()
	require.EqualValues(t, 2, words[0].Load())
	require.Zero(t, words[1].Load())
	require.Len(t, c.marks, 2)
	require.ElementsMatch(t, []cuda.Event{1, 1}, c.spare)
	c.Look()
	require.Len(t, c.marks, 2)
	for range 5 {
		c.Look()
	}
	require.False(t, c.Marked())
	require.EqualValues(t, 4, words[1].Load())
	require.Len(t, c.spare, 4)
}

// TestNoGPU: a GPU that is not there is refused before anything is kept for it.
func TestNoGPU(t *testing.T) {
	var no *transport.ErrUnavailable
	require.ErrorAs(t, FreeLater(1000, Memory, 0, 0), &no)
	require.ErrorAs(t, &IndexError{&transport.ErrUnavailable{Transport: "gpu"}}, &no)
}
