package channel

import (
	"fmt"
	"math"
	"sync/atomic"
	"time"
)

// The words by which a device stream and the proxy of a channel count messages. The stream writes
// the first two and the proxy the others, which are in another cache line. All only grow.
const (
	WordRung   = 0  // the stream has filled, or emptied, the memory of so many messages
	WordAsked  = 1  // it waits until so many are done
	WordDone   = 8  // the exchange is through with so many; never: the channel has ended
	WordSent   = 9  // so many have been handed to exchange
	WordOver   = 10 // 1: nothing of the side's memory, nor its words, is touched any more
	ProxyWords = 16
)

// never is the number of no message: whoever waits for one goes on.
const never = math.MaxInt64

// Carrier moves the messages of one side between its memory and all peers. It is for the owner.
type Carrier interface {
	// Send hands the next message to the peers, or to exchange until they take it; false: there is
	// no room now.
	Send() (bool, error)
	// Arrived reports whether the next message of all peers is in the memory of this side. It copies
	// at most so much in one call that others do not wait for long; more: call again soon.
	Arrived() (here, more bool, err error)
	// Lacks reports whether nothing of the next message of peer i is here.
	Lacks(i int) bool
	// Over reports whether nobody reads or writes the memory, until the next Send or Arrived.
	Over() bool
	// Forget drops what is kept for the side. The proxy has ended, and Over reports true, or no peer was told of
	// the side.
	Forget()
}

// Kind says in which order the sides of a channel do what a message needs.
type Kind int

const (
	Asks    Kind = iota // a worker: what comes is the answer to what it sends
	Answers             // a server: what it sends is the answer to what comes
	Sends               // a server to which nothing comes but the permission to send
)

// The steps of a message.
const (
	ringing  = iota // until the stream has reached the message
	sending         // until it is handed on
	arriving        // until that of all peers is here
	leaving         // until the memory of what was handed on is not read any more
	telling         // the stream that
)

// Only Sends has to wait for what leaves. In the other orders the peers' next part comes after they have what was sent.
var orders = [...][]uint8{
	Asks:    {ringing, sending, arriving, telling},
	Answers: {arriving, telling, ringing, sending},
	Sends:   {ringing, arriving, sending, leaving, telling},
}

const (
	lookEvery = int64(time.Millisecond) // between looks at what ends a wait
	// Afterwards is how long a message may take that was sent before its peer closed.
	Afterwards = 200 * time.Millisecond
)

// TimeoutError says that a stream has waited for a message for too long.
type TimeoutError struct{ text string }

func (e *TimeoutError) Error() string { return e.text }

// Proxy exchanges the messages of one side of a channel for device streams that cannot reach the
// peers' memory. The streams write words; whoever drives looks at them in each pass. All is for the
// owner.
type Proxy struct {
	ch       *Channel
	words    []atomic.Int64
	carrier  Carrier
	order    []uint8
	patience time.Duration
	at       int   // in order
	number   int64 // of the message
	looked   int64 // when, at what ends a wait; nanoseconds, as below
	asked    int64 // since when the stream was seen to wait for the message; 0: it does not
	parted   int64 // since when a peer of which it lacks has closed its side; 0: none has
	ended    bool
	over     atomic.Bool
}

// NewProxy makes the proxy of ch. words are ProxyWords zeros; patience is how long a stream waits
// for one message.
func NewProxy(ch *Channel, k Kind, words []atomic.Int64, c Carrier, patience time.Duration) *Proxy {
	return &Proxy{ch: ch, words: words, carrier: c, order: orders[k], patience: patience, number: 1}
}

// Of reports whether p is the proxy of ch.
func (p *Proxy) Of(ch *Channel) bool { return p.ch == ch }

// Ended reports whether p exchanges nothing any more.
func (p *Proxy) Ended() bool { return p.ended }

// Step does what can be done now, and returns how much that was.
func (p *Proxy) Step(now int64) (found int) {
	for !p.ended {
		moved, more, err := p.next(now)
		if err != nil {
			p.ch.fail(err)
			p.End()
			return found + 1
		}
		if moved || more {
			found++
		}
		if !moved {
			return found
		}
		if p.at++; p.at == len(p.order) {
			p.at = 0
			p.number++
		}
	}
	return found
}

// next does the step that is due, and reports whether it is over, or there is more to do now.
func (p *Proxy) next(now int64) (over, more bool, err error) {
	switch p.order[p.at] {
	case ringing:
		if p.words[WordRung].Load() >= p.number {
			return true, false, nil
		}
		if !p.due(now) {
			return false, false, nil
		}
		return false, false, p.broken()
	case sending:
		sent, err := p.carrier.Send()
		if sent {
			p.asked = 0
			p.words[WordSent].Store(p.number)
		}
		if sent || err != nil || !p.due(now) {
			return sent, false, err
		}
		if err := p.broken(); err != nil {
			return false, false, err
		}
		return false, false, p.overdue(now, "a message has not been sent")
	case arriving:
		here, more, err := p.carrier.Arrived()
		if here || more || err != nil {
			p.asked, p.parted = 0, 0
			return here, more, err
		}
		if !p.due(now) {
			return false, false, nil
		}
		return false, false, p.late(now)
	case leaving:
		if p.carrier.Over() {
			p.asked = 0
			return true, false, nil
		}
		if !p.due(now) {
			return false, false, nil
		}
		if err := p.broken(); err != nil {
			return false, false, err
		}
		return false, false, p.overdue(now, "a message has not left")
	default: // the data is there before the word: the store is a release
		p.words[WordDone].Store(p.number)
		return true, false, nil
	}
}

// due reports whether to look at what ends a wait.
func (p *Proxy) due(now int64) bool {
	due := now-p.looked >= lookEvery
	if due {
		p.looked = now
	}
	return due
}

// late is why the message is not waited for any more, or nil.
func (p *Proxy) late(now int64) error {
	err := p.ch.Missing(p.carrier.Lacks)
	switch {
	case err == nil:
		p.parted = 0
	case !IsOver(err):
		return err
	case p.parted == 0:
		p.parted = now
	case now-p.parted > int64(Afterwards):
		return err
	}
	return p.overdue(now, "no message came")
}

// broken is why the channel has ended, or nil. That a peer has closed its side is for the next step that waits for
// peers.
func (p *Proxy) broken() error {
	if err := p.ch.Err(); !IsOver(err) {
		return err
	}
	return nil
}

// overdue is that the stream has waited for too long, or nil.
func (p *Proxy) overdue(now int64, what string) error {
	switch {
	case p.words[WordAsked].Load() < p.number:
	case p.asked == 0:
		p.asked = now
	case now-p.asked > int64(p.patience):
		return &TimeoutError{fmt.Sprintf("channel: %s within timeout_ms=%g, so the channel has ended (call close() on this channel, then open a new one on both sides)", what, float64(p.patience)/1e6)}
	}
	return nil
}

// End has the proxy exchange nothing any more, and lets streams go on that wait for it.
func (p *Proxy) End() {
	if !p.ended {
		p.ended = true
		p.words[WordDone].Store(never)
	}
}

// Over reports whether p has ended and nobody touches the side's memory any more. Then it says so
// and is to be forgotten. forced: all Fabrics are closed.
func (p *Proxy) Over(forced bool) bool {
	if !p.ended || !forced && !p.carrier.Over() {
		return false
	}
	if !forced {
		p.carrier.Forget()
	}
	p.words[WordOver].Store(1)
	p.over.Store(true)
	return true
}

// IsOver reports whether Over has been true. Safe from any goroutine.
func (p *Proxy) IsOver() bool { return p.over.Load() }
