package main

import (
	"runtime"
	"runtime/metrics"
	"strings"
)

// heap collects, and gives the bytes of Go's heap that are in use, and what of
// them was asked for by other code than Go's runtime: -1 unless every allocation
// is recorded, which GODEBUG=memprofilerate=1 brings about.
func heap() (all, own int64) {
	runtime.GC()
	runtime.GC() // what the first one has left to finalizers and pools
	live := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	metrics.Read(live)
	all, own = int64(live[0].Value.Uint64()), -1
	if runtime.MemProfileRate != 1 {
		return all, own
	}
	runtime.GC() // records are as of the collection before the last
	var records []runtime.MemProfileRecord
	for n, ok := runtime.MemProfile(nil, false); !ok; {
		records = make([]runtime.MemProfileRecord, n+50)
		n, ok = runtime.MemProfile(records, false)
		records = records[:min(n, len(records))]
	}
	own = 0
	for i := range records {
		if !runtimes(records[i].Stack()) {
			own += records[i].InUseBytes()
		}
	}
	return all, own
}

// runtimes says whether what a stack has allocated is the runtime's: a thread of
// its own, or a note of a goroutine or a timer that waits, which it keeps for the
// next that does.
func runtimes(stack []uintptr) bool {
	frames := runtime.CallersFrames(stack)
	for {
		frame, more := frames.Next()
		switch {
		case frame.Function == "runtime.acquireSudog", frame.Function == "runtime.(*timers).addHeap":
			return true
		case !strings.HasPrefix(frame.Function, "runtime."):
			return false
		case !more:
			return true
		}
	}
}
