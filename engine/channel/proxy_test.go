package channel

import (
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// scripted is a Carrier that does what the test says, and notes what was done when.
type scripted struct {
	words  []atomic.Int64
	full   bool // there is no room to send
	here   bool // the next message of all peers is
	pieces int  // that are still to be copied then
	used   bool // the memory is
	gone   bool // it is forgotten
	err    error
	log    strings.Builder
}

func (s *scripted) Send() (bool, error) {
	if s.full || s.err != nil {
		return false, s.err
	}
	s.log.WriteString("s")
	return true, nil
}

func (s *scripted) Arrived() (here, more bool, err error) {
	if !s.here || s.pieces > 0 {
		more = s.here
		s.pieces = max(0, s.pieces-1)
		return false, more, nil
	}
	s.here = false
	if s.words[WordDone].Load() > int64(strings.Count(s.log.String(), "a")) {
		s.log.WriteString("!") // the word came before the data
	}
	s.log.WriteString("a")
	return true, false, nil
}

func (s *scripted) Lacks(int) bool { return true }

func (s *scripted) Forget() { s.gone = true }

func (s *scripted) Over() bool { return !s.used }

func newScripted(t *testing.T, k Kind, patience time.Duration) (*Proxy, *scripted, *Channels, []atomic.Int64) {
	cs := NewChannels(1)
	ch, err := cs.Open("a")
	require.NoError(t, err)
	words := make([]atomic.Int64, ProxyWords)
	s := &scripted{words: words}
	return NewProxy(ch, k, words, s, patience), s, cs, words
}

// TestProxySteps goes through messages of each kind of side, one thing at a time.
func TestProxySteps(t *testing.T) {
	for k, want := range map[Kind]string{Asks: "sasasa", Answers: "asasas", Sends: "asasas"} {
		p, s, _, words := newScripted(t, k, time.Second)
		for i := range int64(3) {
			if k == Answers {
				s.here, s.pieces = true, 2
				require.Equal(t, 1, p.Step(0), "a piece")
				require.Equal(t, 1, p.Step(0), "a piece")
				require.Equal(t, 2, p.Step(0), "the message, and its word")
				require.Equal(t, i+1, words[WordDone].Load())
				require.Zero(t, p.Step(0))
				s.full = true
				words[WordRung].Store(i + 1)
				require.Equal(t, 1, p.Step(0))
				require.Zero(t, p.Step(0))
				require.Equal(t, i, words[WordSent].Load())
				s.full = false
				require.Equal(t, 1, p.Step(0))
				require.Equal(t, i+1, words[WordSent].Load())
				continue
			}
			s.here = k == Sends // what comes before the stream has rung waits for it
			require.Zero(t, p.Step(0))
			words[WordRung].Store(i + 1)
			if k == Asks {
				require.Equal(t, 2, p.Step(0))
				require.Equal(t, i+1, words[WordSent].Load())
				require.Zero(t, p.Step(0))
				require.Equal(t, i, words[WordDone].Load())
				s.here = true
				require.Equal(t, 2, p.Step(0))
			} else {
				s.used = true
				require.Equal(t, 3, p.Step(0))
				require.Zero(t, p.Step(0), "the memory is read")
				require.Equal(t, i+1, words[WordSent].Load())
				require.Equal(t, i, words[WordDone].Load())
				s.used = false
				require.Equal(t, 2, p.Step(0))
			}
			require.Equal(t, i+1, words[WordDone].Load())
			require.Equal(t, i+1, words[WordSent].Load())
			require.Zero(t, p.Step(0))
		}
		require.Equal(t, want, s.log.String())
	}
}

// TestProxyEnds: an error ends the channel, with the word that all streams pass, and the last word comes
// when the memory is not in use.
func TestProxyEnds(t *testing.T) {
	gone := errors.New("gone")
	p, s, _, words := newScripted(t, Asks, time.Second)
	s.err, s.used = gone, true
	words[WordRung].Store(1)
	require.False(t, p.Over(false))
	p.Step(0)
	require.True(t, p.Ended())
	require.EqualValues(t, never, words[WordDone].Load())
	require.ErrorIs(t, p.ch.Err(), gone)
	require.False(t, p.Over(false))
	require.Zero(t, words[WordOver].Load())
	require.Zero(t, p.Step(0), "it does nothing more")
	require.False(t, s.gone)
	s.used = false
	require.True(t, p.Over(false))
	require.True(t, s.gone)
	require.EqualValues(t, 1, words[WordOver].Load())
}

// TestProxyWaits: what ends a wait for a message, and what does not.
func TestProxyWaits(t *testing.T) {
	const ms = int64(time.Millisecond)
	p, _, _, words := newScripted(t, Answers, 300*time.Millisecond)
	now := ms
	step := func(d int64) error {
		now += d
		p.Step(now)
		return p.ch.Err()
	}
	require.NoError(t, step(1000*ms), "nobody asks")
	words[WordAsked].Store(1)
	require.NoError(t, step(1000*ms), "the time counts from here")
	require.NoError(t, step(299*ms))
	var late *TimeoutError
	require.ErrorAs(t, step(2*ms), &late)
	require.True(t, p.Ended())

	p, s, cs, words := newScripted(t, Answers, time.Hour)
	require.NoError(t, frame(cs, 0, opens("a", "")))
	require.NoError(t, frame(cs, 0, closes("a")))
	step(ms)
	step(199 * ms)
	require.False(t, p.Ended(), "what was sent before may come")
	s.here = true
	require.NoError(t, frame(cs, 0, opens("b", ""))) // something else
	step(ms)
	require.EqualValues(t, 1, words[WordDone].Load())
	words[WordRung].Store(1)
	step(ms)
	step(200 * ms)
	require.False(t, p.Ended(), "from when it was seen")
	step(2 * ms)
	require.True(t, p.Ended())
	require.True(t, IsOver(p.ch.Err()))

	p, s, _, words = newScripted(t, Sends, 300*time.Millisecond)
	s.here, s.used = true, true
	words[WordRung].Store(1)
	words[WordAsked].Store(1)
	require.NoError(t, step(ms))
	require.NoError(t, step(299*ms))
	require.ErrorAs(t, step(2*ms), &late)
	require.ErrorContains(t, late, "a message has not left within timeout_ms=300")

	p, s, _, words = newScripted(t, Asks, 300*time.Millisecond)
	s.full = true
	words[WordRung].Store(1)
	words[WordAsked].Store(1)
	require.NoError(t, step(ms))
	require.NoError(t, step(299*ms))
	require.ErrorAs(t, step(2*ms), &late)
	require.ErrorContains(t, late, "a message has not been sent within timeout_ms=300")

	gone := errors.New("gone")
	// One waits for its stream, one for room to send, one for its peer, one for its memory.
	for i, k := range []Kind{Asks, Asks, Answers, Sends} {
		p, s, cs, words = newScripted(t, k, time.Hour)
		if i == 1 {
			s.full = true
			words[WordRung].Store(1)
		}
		if k == Sends {
			s.here, s.used = true, true
			words[WordRung].Store(1)
		}
		step(ms)
		cs.Lose(0, gone)
		step(ms)
		require.True(t, p.Ended())
		require.ErrorIs(t, p.ch.Err(), gone)
		require.EqualValues(t, never, words[WordDone].Load())
	}
}
