//go:build !race

package cudaipc

const raceEnabled = false
