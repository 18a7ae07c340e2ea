//go:build race

package transporttest

// RaceEnabled says whether the race detector is built in.
const RaceEnabled = true
