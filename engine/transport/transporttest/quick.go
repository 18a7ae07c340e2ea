package transporttest

import "os"

// Quick reports whether tests take few seeds, and leave out variants that differ little from what runs: with the race
// detector, and in `make test`, which sets QUICK. `make check-long PARTS=engine` runs all.
func Quick() bool { return RaceEnabled || os.Getenv("QUICK") != "" }
