//go:build !race

package rails

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"fserver/engine/transport/transporttest"
)

var models = []model{
	{name: "one way", script: [2][]step{cut, nil}, deaths: 1, slow: true},
	{name: "the other way", script: [2][]step{nil, cut}, deaths: 1, slow: true},
	{name: "on the late member", script: [2][]step{newer, newer}, deaths: 1, slow: true},
	{name: "two deaths", script: [2][]step{once, nil}, deaths: 2, slow: true},
	{name: "on the late member of the dialer, two deaths", script: [2][]step{newer, nil}, deaths: 2, slow: true, long: true},
	{name: "on the late member of the acceptor, two deaths", script: [2][]step{nil, newer}, deaths: 2, slow: true, long: true},
	{name: "three deaths", script: [2][]step{once, nil}, deaths: 3, slow: true, long: true},
	{name: "both ways", script: [2][]step{once, once}, deaths: 1, slow: true},
	{name: "fences without a frame", script: [2][]step{sealed, nil}, deaths: 1, slow: true},
	{name: "fences without a frame, the other way", script: [2][]step{nil, sealed}, deaths: 1, slow: true, long: true},
	{name: "both ways, one cut", script: [2][]step{cut, once}, deaths: 1, slow: true, long: true},
}

func TestModel(t *testing.T) {
	for _, m := range models {
		t.Run(m.name, func(t *testing.T) {
			if m.long && transporttest.Quick() {
				t.Skip("left to check-long: it takes longer than those that run")
			}
			begin := time.Now()
			states, bad, _ := m.run(false)
			if bad != "" {
				_, bad, trace := m.run(true)
				t.Fatalf("%s\n%v", bad, trace)
			}
			t.Logf("%d states in %v", states, time.Since(begin).Round(time.Millisecond))
		})
	}
}

// Each variant fails as it should, so the model would notice.
func TestModelFindsWrongVariants(t *testing.T) {
	one := func(script []step) [2][]step { return [2][]step{script, nil} }
	for _, m := range []model{
		{name: "a statement before our own Closed", wrong: statesEarly, script: one(cut), deaths: 1, want: "^late write"},
		{name: "counted at Down", wrong: countsAtDown, script: one(plain), deaths: 1, want: "has come before"},
		{name: "posted again before the peer's statement", wrong: resendsEarly, script: one(cut), deaths: 1, want: "^late write"},
		{name: "let go of on acknowledgement alone", wrong: freesOnAck, slow: true, script: one(cut), want: "^source"},
		{name: "a statement on one member only", wrong: statesOnce, script: one(once), deaths: 2, eager: true, want: "^stuck"},
		{name: "a frame overtakes unfenced writes", wrong: overtakes, script: one(cut), deaths: 1, want: "^torn"},
		{name: "no acknowledgement owed after a Down", wrong: owesNothing, script: one(once), deaths: 1, want: "^stuck"},
		{name: "a half-open member dropped without a word", wrong: dropsSilently, script: one(once), deaths: 1, want: "^stuck"},
		{name: "the acceptor uses a late member at once", wrong: acceptorEarly, script: [2][]step{nil, newer}, deaths: 1, want: "^late write"},
		{name: "the dialer uses a late member at once", wrong: dialerEarly, script: one(newer), deaths: 1, want: "^late write"},
	} {
		t.Run(m.name, func(t *testing.T) {
			begin := time.Now()
			states, bad, trace := m.run(true)
			require.Regexp(t, m.want, bad)
			t.Logf("%d states in %v: %s\n%v", states, time.Since(begin).Round(time.Millisecond), bad, trace)
		})
	}
}
