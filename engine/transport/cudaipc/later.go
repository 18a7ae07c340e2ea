package cudaipc

import (
	"sync"
	"time"
)

// A Later frees, unmaps and unpins memory of one GPU for all of this process. Before it
// does any of these, the driver waits for all that the GPU has to do, and meanwhile
// keeps everyone else of the process from that GPU, launches and copies included. A kernel
// that waits for a message could then wait for ever: what it waits for may have to pass this
// GPU. So nothing is given back while somebody holds, up to a limit; else at once, aside.
// Its zero value is ready.
type Later struct {
	mu      sync.Mutex
	holds   int
	left    []chore
	bytes   uint64 // of those
	forced  bool
	running bool
}

type chore struct {
	bytes uint64
	do    func()
}

// putOffMost is how many bytes are kept for who holds: peers that come and go for days
// are not to fill the GPU.
const putOffMost = 1 << 30

// Hold has nothing given back until Release, which every Hold needs: kernels may wait for
// messages meanwhile.
func (l *Later) Hold() {
	l.mu.Lock()
	l.holds++
	l.mu.Unlock()
}

// Release ends a Hold. After the last one all goes back that was put off.
func (l *Later) Release() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.holds--
	l.start()
}

// Held says whether somebody holds.
func (l *Later) Held() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.holds > 0
}

// Do calls what gives back so many bytes, in a goroutine of its own.
func (l *Later) Do(bytes uint64, do func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.left = append(l.left, chore{bytes, do})
	l.bytes += bytes
	l.start()
}

// Force gives back what is put off, also for who holds: memory is short. It says whether
// there is anything.
func (l *Later) Force() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.forced = len(l.left) > 0
	l.start()
	return l.running
}

// Wait waits until all is given back that is not put off, at most for so long.
func (l *Later) Wait(limit time.Duration) {
	for end := time.Now().Add(limit); l.works() && time.Now().Before(end); {
		time.Sleep(100 * time.Microsecond)
	}
}

func (l *Later) works() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.running
}

// due says whether something is to be given back now.
func (l *Later) due() bool {
	return len(l.left) > 0 && (l.holds == 0 || l.forced || l.bytes > putOffMost)
}

func (l *Later) start() {
	if l.due() && !l.running {
		l.running = true
		go l.run()
	}
}

func (l *Later) run() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.due() {
		next := l.left[0]
		l.left = l.left[1:]
		l.bytes -= next.bytes
		l.mu.Unlock()
		next.do()
		l.mu.Lock()
	}
	l.forced, l.running = false, false
}
