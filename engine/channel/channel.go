// Package channel is the stream channels of a node, as far as the engine takes part: how they are
// opened, described and ended. What travels through one is the affair of its two sides: of GPUs that
// reach each other, or of requests of package exchange that name the channel.
package channel

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"unicode"
	"unicode/utf8"

	"fserver/engine/wire"
)

// maxEarly bounds the channels that one peer has opened and we have not.
const maxEarly = 256

// errOver is why a channel that a side has closed is of no use.
var errOver = errors.New("channel: closed")

// WatchWords is how many words Watch takes: there are bits for wire.MaxMembers peers.
const WatchWords = 4096

// The values of a channel's first word, which a device looks at that waits for a peer, and
// where the bits of the peers begin that have closed their sides.
const (
	wordEnded  = 1 // give up now
	wordParted = 2 // some peer has closed its side: what is not here of it by now does not come
	wordBits   = 4
)

// Channels are the stream channels of a node, as far as the engine takes part: it
// carries what each side tells of its tensors, and says when a side is gone. A
// channel has all peers of the rail. All is safe from any goroutine; the lock is
// held for a few instructions.
type Channels struct {
	mu    sync.Mutex
	open  map[string]*Channel
	all   map[uint64]*Channel      // by handle; those that are closed stay until Forget
	last  uint64                   // handle
	early []map[string]counterpart // by peer: channels that we have not opened
	over  error                    // the node has failed
}

// NewChannels is for a node with n peers.
func NewChannels(n int) *Channels {
	cs := &Channels{open: map[string]*Channel{}, all: map[uint64]*Channel{}, early: make([]map[string]counterpart, n)}
	for i := range cs.early {
		cs.early[i] = map[string]counterpart{}
	}
	return cs
}

// Queue has the requests that have come through a channel.
type Queue interface {
	// Full reports whether there is one of each peer. Safe from any goroutine.
	Full() bool
	// Lacks reports whether there is none of peer i. For the owner.
	Lacks(i int) bool
	// Emptied changes when Lacks becomes true of a peer. Safe from any goroutine.
	Emptied() uint32
}

// ShapeError says that a name or a number of a call is of no use.
type ShapeError struct{ text string }

func (e *ShapeError) Error() string { return e.text }

func shapef(format string, args ...any) error { return &ShapeError{fmt.Sprintf(format, args...)} }

// Channel is this side of one channel.
type Channel struct {
	of     *Channels
	handle uint64
	name   string
	words  []atomic.Uint32 // nil: nobody looks
	peers  []counterpart
	err    error // why it has ended
	ended  bool  // by this side
	left   bool
	queue  Queue // of a server: requests that come through the CPU; else nil
}

// counterpart is a peer's side.
type counterpart struct {
	text   string // of what it told last
	told   bool   // text is valid
	read   bool   // text has been taken
	final  bool   // text is why it has closed its side
	parted bool   // it has closed its side, or is gone
}

// Open opens a channel under a name that both sides use.
func (cs *Channels) Open(name string) (*Channel, error) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	switch {
	case cs.over != nil:
		return nil, cs.over
	case name == "" || len(name) > wire.MaxChannelName || strings.ContainsFunc(name, unprintable):
		return nil, shapef("channel: channel name %q: give 1 to %d bytes of printable text", name, wire.MaxChannelName)
	case cs.open[name] != nil:
		return nil, shapef("channel: channel %q is open already: close it first, or give this one another name", name)
	}
	ch := &Channel{of: cs, name: name, peers: make([]counterpart, len(cs.early))}
	for i, m := range cs.early {
		ch.peers[i] = m[name]
		delete(m, name)
	}
	cs.last++
	ch.handle = cs.last
	cs.open[name], cs.all[ch.handle] = ch, ch
	return ch, nil
}

// Get is the channel of a handle, or nil.
func (cs *Channels) Get(handle uint64) *Channel {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	return cs.all[handle]
}

func unprintable(c rune) bool { return c == utf8.RuneError || !unicode.IsPrint(c) }

// Frame takes a Channel frame of peer i. over is a channel that the peer has closed
// and this side too, or that it has not opened: then it stays if the peer says why, for
// Open. An error means that the peer does not keep to the protocol.
func (cs *Channels) Frame(i int, b []byte) (over string, err error) {
	v, err := wire.Parse[wire.Channel](b, wire.TypeChannel)
	if err != nil {
		return "", err
	}
	cs.mu.Lock()
	defer cs.mu.Unlock()
	ch, early := cs.open[v.Name], cs.early[i]
	p, waits := early[v.Name]
	if v.Closes {
		if ch != nil && ch.peers[i].told && !ch.peers[i].parted {
			if v.Text != "" {
				ch.peers[i].text, ch.peers[i].final = v.Text, true
			}
			ch.part(i)
			return "", nil
		}
		delete(early, v.Name)
		if waits && v.Text != "" {
			early[v.Name] = counterpart{text: v.Text, told: true, parted: true, final: true}
		}
		return v.Name, nil
	}
	if ch != nil && (!ch.peers[i].told || ch.peers[i].read) && !ch.peers[i].parted {
		ch.peers[i] = counterpart{text: v.Text, told: true}
		return "", nil
	}
	if waits && !p.parted || !waits && !cs.room(i) {
		return "", fmt.Errorf("channel: peer %d opened channel %q twice, or opened more than %d channels that are not open here", i, v.Name, maxEarly)
	}
	early[v.Name] = counterpart{text: v.Text, told: true}
	return "", nil
}

// room has room for another channel that peer i has opened and we have not, in place of
// one that it has closed since if need be. False: there is none.
func (cs *Channels) room(i int) bool {
	early := cs.early[i]
	for name, p := range early {
		if len(early) < maxEarly {
			break
		}
		if p.parted {
			delete(early, name)
		}
	}
	return len(early) < maxEarly
}

// part notes that peer i has closed its side.
func (ch *Channel) part(i int) {
	ch.peers[i].parted = true
	ch.mark(i)
}

// mark tells the device that peer i has closed its side.
func (ch *Channel) mark(i int) {
	if at := wordBits + i/32; at < len(ch.words) {
		ch.words[at].Or(1 << (i % 32))
		ch.words[0].CompareAndSwap(0, wordParted)
	}
}

func (ch *Channel) end(err error) {
	if ch.err == nil {
		ch.err = err
	}
	if ch.words != nil {
		ch.words[0].Store(wordEnded)
	}
}

// fail ends the channel, on this side alone.
func (ch *Channel) fail(err error) {
	ch.of.mu.Lock()
	defer ch.of.mu.Unlock()
	ch.end(err)
}

// Left notes that peer i has left in good order.
func (cs *Channels) Left(i int) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	for _, ch := range cs.open {
		ch.part(i)
	}
	clear(cs.early[i])
}

// Lose ends all channels, because peer i is gone; its successor has to open them
// anew.
func (cs *Channels) Lose(i int, err error) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	for _, ch := range cs.open {
		if !ch.peers[i].parted {
			ch.peers[i].parted = true
			ch.end(err)
		}
	}
	clear(cs.early[i])
}

// Shut ends all channels, and refuses new ones.
func (cs *Channels) Shut(err error) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	cs.over = err
	for _, ch := range cs.open {
		for i := range ch.peers {
			ch.peers[i].parted = true
		}
		ch.end(err)
	}
}

// Watch has WatchWords words say what has become of the channel: the first has one of the
// values above, and bit i%32 of word 4+i/32 is set when peer i has closed its side. They must
// stay valid until Forget, or until Watch has been given others, or nil.
func (ch *Channel) Watch(words []atomic.Uint32) {
	ch.of.mu.Lock()
	defer ch.of.mu.Unlock()
	ch.words = words
	for i := range ch.peers {
		if ch.peers[i].parted {
			ch.mark(i)
		}
	}
	if ch.err != nil {
		ch.end(ch.err)
	}
}

// Handle is a number that no other channel of the node gets.
func (ch *Channel) Handle() uint64 { return ch.handle }

// Name is what both sides call the channel.
func (ch *Channel) Name() string { return ch.name }

// Told is what peer i has told last of its side, unless that is read, or why it has closed it.
func (ch *Channel) Told(i int) (text string, ok bool, err error) {
	ch.of.mu.Lock()
	defer ch.of.mu.Unlock()
	if i >= 0 && i < len(ch.peers) && ch.peers[i].told && (!ch.peers[i].read || ch.peers[i].final) {
		return ch.peers[i].text, true, nil
	}
	return "", false, ch.why(i)
}

// Read notes that the text of Told has been taken. Only then may the peer tell more.
func (ch *Channel) Read(i int) {
	ch.of.mu.Lock()
	defer ch.of.mu.Unlock()
	ch.peers[i].read = true
}

// parting says that peer i has closed its side of a channel.
func parting(channel string, i int) error {
	return fmt.Errorf("channel: channel %q: peer %d has closed its side (close this side and open a new channel): %w", channel, i, errOver)
}

// Err is why the next message cannot come through the channel, or nil: it has ended, or
// a peer has closed its side.
func (ch *Channel) Err() error { return ch.Missing(func(int) bool { return true }) }

// Heard reports whether peer i has told of its side. Safe from any goroutine.
func (ch *Channel) Heard(i int) bool {
	ch.of.mu.Lock()
	defer ch.of.mu.Unlock()
	return ch.peers[i].told
}

// Closed returns how many peers have closed their sides, and one more if the channel has ended. Safe from
// any goroutine.
func (ch *Channel) Closed() (n int) {
	ch.of.mu.Lock()
	defer ch.of.mu.Unlock()
	for i := range ch.peers {
		if ch.peers[i].parted {
			n++
		}
	}
	if ch.err != nil {
		n++
	}
	return n
}

// Attach has the requests of the channel come to q. To be called before others know the channel.
func (ch *Channel) Attach(q Queue) { ch.queue = q }

// Queue is what Attach was given; nil for a worker.
func (ch *Channel) Queue() Queue { return ch.queue }

// Missing is why a message cannot become whole of which the parts of the peers that lacks
// says are not here, or nil.
func (ch *Channel) Missing(lacks func(i int) bool) error {
	ch.of.mu.Lock()
	defer ch.of.mu.Unlock()
	for i := range ch.peers {
		if ch.peers[i].parted && lacks(i) {
			return ch.why(i)
		}
	}
	return ch.err
}

// why is the error of the channel, or else that peer i has closed its side, if it has, or does not
// exist.
func (ch *Channel) why(i int) error {
	if i < 0 || i >= len(ch.peers) {
		return shapef("channel: channel %q has %d peers, and none of number %d", ch.name, len(ch.peers), i)
	}
	if ch.err == nil && ch.peers[i].parted {
		return parting(ch.name, i)
	}
	return ch.err
}

// ErrOf is why peer i is to be told nothing more, or nil.
func (ch *Channel) ErrOf(i int) error {
	ch.of.mu.Lock()
	defer ch.of.mu.Unlock()
	return ch.why(i)
}

// End ends this side: calls on it fail from now on. False if it was called before.
func (ch *Channel) End() bool {
	ch.of.mu.Lock()
	defer ch.of.mu.Unlock()
	first := !ch.ended
	ch.ended = true
	ch.end(errOver)
	return first
}

// Leave reports whether it is the first call: what the channel has of others is to be dropped once.
func (ch *Channel) Leave() bool {
	ch.of.mu.Lock()
	defer ch.of.mu.Unlock()
	first := !ch.left
	ch.left = true
	return first
}

// Ended reports whether this side has ended the channel.
func (ch *Channel) Ended() bool {
	ch.of.mu.Lock()
	defer ch.of.mu.Unlock()
	return ch.ended
}

// Parted says whether peer i has closed its side, or is gone.
func (ch *Channel) Parted(i int) bool {
	ch.of.mu.Lock()
	defer ch.of.mu.Unlock()
	return ch.peers[i].parted
}

// Alone says whether all peers have closed their sides, or are gone.
func (ch *Channel) Alone() bool {
	ch.of.mu.Lock()
	defer ch.of.mu.Unlock()
	return !slices.ContainsFunc(ch.peers, func(p counterpart) bool { return !p.parted })
}

// Forget drops the channel. Its words are not touched any more.
func (ch *Channel) Forget() {
	ch.of.mu.Lock()
	defer ch.of.mu.Unlock()
	ch.words = nil
	delete(ch.of.all, ch.handle)
	if ch.of.open[ch.name] == ch {
		delete(ch.of.open, ch.name)
	}
}

// IsOver says whether err is that a side has closed the channel.
func IsOver(err error) bool { return errors.Is(err, errOver) }
