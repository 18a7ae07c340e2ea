package node

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"fserver/cshim/cuda"
	"fserver/engine/exchange"
	"fserver/engine/gpu"
	"fserver/engine/mem"
)

// points are the points in streams that operations of a node wait for.
type points struct {
	events  bool       // the CPU stores the words, when events have passed; else streams do
	memory  mem.Region // of the words
	seen    uint64     // its address for the GPU
	unused  cuda.Event // of which nothing but an error of the device can be learned
	words   []atomic.Uint64
	under   atomic.Int32 // words in use
	looking atomic.Bool  // somebody looks; what follows is his
	scan    []mark
	asked   int64 // when the device was asked whether it still works

	mu    sync.Mutex // guards what follows; no call of the driver is made under it
	free  []cuda.Event
	all   []cuda.Event
	spare []uint32         // words that are not in use
	last  []uint64         // by word, the value of its newest point
	marks []mark           // words that the CPU is to store
	late  []exchange.Point // that nobody waits for, and whose words a stream may still store
}

// A mark is a word that the CPU is to store when an event has passed.
type mark struct {
	id    uint32
	own   bool // the event goes back with the mark; else with the point
	event cuda.Event
	value uint64
}

// A word serves one point at a time, and goes back when the stream has stored the point's value: if it were
// a stream's, the next stream with the same handle could store a later value before the value of an
// earlier one. pointsMost is twice the number of tickets.
const (
	pointsMost = 2 * exchange.Window
	lineWords  = 8 // of a cache line
	askEvery   = int64(time.Second)
)

func newCard(d gpu.Device, later *gpu.Later, flags bool, log *zap.Logger) (*card, error) {
	g := &card{GPU: gpu.GPU{Device: d, Later: later}, log: log}
	g.events = !flags
	var err error
	if g.memory, err = mem.Map(pointsMost * 8); err != nil {
		return nil, err
	}
	g.words = exchange.WordsIn(g.memory, pointsMost)
	g.last = make([]uint64, pointsMost)
	for i := range pointsMost { // those that are used first are in lines of their own
		i = pointsMost - 1 - i
		g.spare = append(g.spare, uint32(i%(pointsMost/lineWords)*lineWords+i/(pointsMost/lineWords)))
	}
	if g.seen, err = d.Pin(uint64(g.memory.Addr), g.memory.Len); err == nil {
		if g.unused, err = g.event(); err == nil {
			return g, nil
		}
		_ = d.Unpin(uint64(g.memory.Addr))
	}
	_ = mem.Unmap(g.memory)
	return nil, fmt.Errorf("node: %v: memory where streams say how far they are: %w (raise ulimit -l and the memory limit of the container)", g.device(), err)
}

// point is what is queued on a stream so far, as an event, a word or both. Whether anything is left of it
// is not asked: that takes the driver longer (1.4 µs on an H200) than the event and the wait for it
// together. It waits while the stream is full. It implements exchange.Host.Point.
func (g *card) point(stream uint64, event, word bool) (p exchange.Point, err error) {
	defer func() {
		if err != nil {
			g.passed(p)
			p = exchange.Point{}
		}
	}()
	p.Dev = g.device()
	var e cuda.Event
	if event || g.events {
		if e, err = g.event(); err != nil {
			return p, err
		}
		p.Event = uint64(e) // it goes back with p, unless it does with a mark
		if err = g.Device.Record(e, cuda.Stream(stream)); err != nil {
			return p, err
		}
	}
	if !word {
		return p, nil
	}
	if g.take(&p); p.Word == nil {
		return p, fmt.Errorf("node: %d operations wait for streams that have not come to them, which is the limit (wait for one of them first)", pointsMost)
	}
	if g.events {
		g.mark(&p, e, !event)
		if !event {
			p.Event = 0
		}
		return p, nil
	}
	if err = g.Device.Enqueue(cuda.Stream(stream), 0, nil, g.seen+uint64(p.ID)*8, p.Value); err != nil {
		p.Word.Store(p.Value) // nothing was enqueued
	}
	return p, err
}

// take gives p a word, if there is one.
func (g *card) take(p *exchange.Point) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.spare) == 0 {
		g.sweep()
	}
	n := len(g.spare) - 1
	if n < 0 {
		return
	}
	p.ID, g.spare = g.spare[n], g.spare[:n]
	g.last[p.ID]++
	p.Word, p.Value = &g.words[p.ID], g.last[p.ID]
	g.under.Add(1)
}

// word gives a point that has an event a word that the CPU stores. It implements exchange.Host.Word.
func (g *card) word(p *exchange.Point) {
	if g.take(p); p.Word != nil {
		g.mark(p, cuda.Event(p.Event), false)
	}
}

// mark has the CPU store the word of p when an event has passed.
func (g *card) mark(p *exchange.Point, e cuda.Event, own bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.marks = append(g.marks, mark{p.ID, own, e, p.Value})
}

// unmark takes a mark out, and stores its word. It holds g.mu.
func (g *card) unmark(i int) {
	m := g.marks[i]
	g.words[m.id].Store(m.value)
	g.marks = slices.Delete(g.marks, i, i+1)
	if m.own {
		g.free = append(g.free, m.event)
	}
}

// event takes an event that nobody uses, or makes one.
func (g *card) event() (cuda.Event, error) {
	g.mu.Lock()
	if i := len(g.free) - 1; i >= 0 {
		e := g.free[i]
		g.free = g.free[:i]
		g.mu.Unlock()
		return e, nil
	}
	g.mu.Unlock()
	e, err := g.Device.NewEvent()
	if err != nil {
		return 0, err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.all = append(g.all, e)
	return e, nil
}

// passed takes back a point that nobody waits for any more. A word that a stream is still to store is kept
// for that.
func (g *card) passed(p exchange.Point) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if p.Event != 0 {
		g.free = append(g.free, cuda.Event(p.Event))
	}
	if p.Word == nil {
		return
	}
	g.late = append(g.late, p)
	if i := slices.IndexFunc(g.marks, func(m mark) bool { return m.id == p.ID }); i >= 0 { // no stream stores it
		g.unmark(i)
	}
	g.sweep()
}

// sweep takes back the words of g.late that have been stored. It holds g.mu.
func (g *card) sweep() {
	left := g.late[:0]
	for _, p := range g.late {
		if p.Word.Load() < p.Value {
			left = append(left, p)
			continue
		}
		g.spare = append(g.spare, p.ID)
		g.under.Add(-1)
	}
	g.late = left
}

// look stores the words whose events have passed, and asks once a second whether the device still works,
// without which no word is stored. It is called without the token, and does nothing while another
// goroutine looks.
func (g *card) look(now int64) error {
	if g.under.Load() == 0 || !g.looking.CompareAndSwap(false, true) {
		return nil
	}
	defer g.looking.Store(false)
	g.mu.Lock()
	g.scan = append(g.scan[:0], g.marks...)
	g.mu.Unlock()
	for _, m := range g.scan {
		switch passed, err := g.Device.Passed(m.event); {
		case err != nil:
			return err
		case passed:
			g.store(m)
		}
	}
	if now-g.asked < askEvery {
		return nil
	}
	g.asked = now
	_, err := g.Device.Passed(g.unused)
	return err
}

// store stores a word, if its point is still waited for.
func (g *card) store(m mark) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if i := slices.Index(g.marks, m); i >= 0 {
		g.unmark(i)
	}
}

// close gives back events and words. Nothing waits for any. If a stream does not end, the words that it
// is to store stay pinned.
func (g *card) close() {
	for end := time.Now().Add(freeLimit); g.storing(); time.Sleep(time.Millisecond) {
		if _, err := g.Device.Passed(g.unused); err != nil { // nothing will be stored any more
			break
		}
		if time.Now().After(end) {
			g.log.Warn("a stream has not come to what was to wait for it, so 64 KiB of memory stay pinned", zap.Stringer("device", g.device()), zap.Duration("after", freeLimit))
			g.memory = mem.Region{}
			break
		}
	}
	g.mu.Lock()
	all := g.all
	g.all, g.free = nil, nil
	g.mu.Unlock()
	for _, e := range all {
		_ = g.Device.FreeEvent(e)
	}
	if r := g.memory; r.Len != 0 {
		g.memory = mem.Region{}
		g.Later.Do(gpu.Host, r.Len, func() {
			_ = g.Device.Unpin(uint64(r.Addr))
			_ = mem.Unmap(r)
		})
	}
}

// storing reports whether a stream may still store a word.
func (g *card) storing() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.sweep()
	return len(g.late) > 0
}
