// Package trace keeps the time stamps of push-pulls and counts what moved. All
// memory is allocated once; writing a stamp is one store.
package trace

import (
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// The stamps of a push-pull. Those from Received to Answered are of the
// server's clock, the others of the worker's.
const (
	Start     = iota // push_pull was called
	Posted           // its operations went to the transport
	Received         // the server had all of it
	Delivered        // get_batch returned it
	Respond          // respond was called
	Answered         // its operations went to the transport
	Arrived          // the worker had all of the answer
	Completed        // the ticket was done
	NumStamps
)

// Stamps of one push-pull, nanoseconds.
type Stamps [NumStamps]int64

// Counters of a node. They grow for ever and are read at any time.
type Counters struct {
	PushPulls, Requests, Responses atomic.Uint64
	BytesOut, BytesIn              atomic.Uint64 // tensors, not frames; none of a loan
	Loans                          atomic.Uint64 // tensors that were lent, and not sent
}

var (
	epoch = time.Now()
	base  = monotonic() - int64(time.Since(epoch))
)

func monotonic() int64 {
	var ts unix.Timespec
	// The clock exists on every Linux; without it all stamps count from 0.
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
	return ts.Nano()
}

// Now is CLOCK_MONOTONIC in nanoseconds.
func Now() int64 { return base + int64(time.Since(epoch)) }
