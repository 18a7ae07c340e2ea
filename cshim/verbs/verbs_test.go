package verbs

import (
	"bytes"
	"fmt"
	"os"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"fserver/cshim/verbs/fakeverbs"
)

// TestMain opens the fake, or the library of the system where FSERVER_TEST_RDMA is
// set: then the tests of what every device does run over its first two devices.
func TestMain(m *testing.M) {
	if !fakeverbs.Real() {
		path, err := fakeverbs.Library()
		if err == nil {
			err = Open(path)
		}
		if err != nil {
			absent = err
		}
	} else if err := Open(""); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

var absent error // why the fake cannot be used

func onHardware() bool { return fakeverbs.Real() }

// onFake skips a test of what only the fake can do.
func onFake(t *testing.T) {
	t.Helper()
	if onHardware() {
		t.Skip("verbs: only the fake library can inject this")
	}
	if absent != nil {
		t.Skip(absent)
	}
	fakeverbs.Reset()
	t.Cleanup(fakeverbs.Reset)
}

// end is one side: a device with a queue and a queue pair.
type end struct {
	t    *testing.T
	d    *Device
	cq   *CQ
	qp   *QP
	mr   Region
	mem  []byte
	base uint64
	gid  GID
	mtu  int32
	psn  uint32
}

func device(t *testing.T, i int) *Device {
	t.Helper()
	if absent != nil {
		t.Skip(absent)
	}
	d, err := OpenDevice(fakeverbs.Devices()[i])
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	return d
}

func bestGID(t *testing.T, d *Device) GID {
	gids, err := d.GIDs(1)
	require.NoError(t, err)
	require.NotEmpty(t, gids)
	best := gids[0]
	for _, g := range gids { // RoCE v2 with an IPv4 address, else another one that is not of the link
		if better := g.Type == RoCEv2 && !g.Addr().IsLinkLocalUnicast(); better && (g.Addr().Is4() || !best.Addr().Is4()) {
			best = g
		}
	}
	return best
}

const memory = 1 << 20

func newEnd(t *testing.T, i int, room Room) *end {
	e := &end{t: t, d: device(t, i), psn: uint32(0x1000 * (i + 1))}
	p, err := e.d.Port(1)
	require.NoError(t, err)
	require.True(t, p.Active)
	e.mtu, e.gid = p.MTU, bestGID(t, e.d)
	e.mem, err = unix.Mmap(-1, 0, memory, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, unix.Munmap(e.mem)) })
	e.base = uint64(uintptr(unsafe.Pointer(&e.mem[0])))
	e.mr, err = e.d.Register(e.base, memory, LocalWrite|RemoteWrite|RelaxedOrdering)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, e.mr.Deregister()) })
	e.cq, err = e.d.NewCQ(512)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, e.cq.Destroy()) })
	e.qp, err = e.d.NewQP(e.cq, room)
	require.NoError(t, err)
	t.Cleanup(func() {
		if e.qp != nil {
			require.NoError(t, e.qp.Destroy())
		}
	})
	return e
}

func (e *end) connect(to *end) {
	require.NoError(e.t, e.qp.Connect(Path{
		GID: to.gid.Raw, QP: to.qp.Number, PSN: to.psn, OwnPSN: e.psn, GIDIndex: e.gid.Index, MTU: min(e.mtu, to.mtu), Global: true, Port: 1,
		Timeout: 12, Retries: 2, NotReady: 7,
	}))
}

var small = Room{Send: 64, Recv: 64, Port: 1}

func pair(t *testing.T) (a, b *end) {
	a, b = newEnd(t, 0, small), newEnd(t, 1, small)
	a.connect(b)
	b.connect(a)
	return a, b
}

// receive posts n slots of size bytes, from the start of the memory.
func (e *end) receive(n int, size uint32) {
	e.t.Helper()
	var slots []Slot
	for i := range n {
		slots = append(slots, Slot{uint64(i), Piece{e.base + uint64(i)*uint64(size), size, e.mr.LKey}})
	}
	taken, err := e.qp.PostRecv(slots)
	require.NoError(e.t, err)
	require.Equal(e.t, n, taken)
}

// take polls until n completions have come.
func (e *end) take(n int) []Completion {
	e.t.Helper()
	var all []Completion
	var some [16]Completion
	for end := time.Now().Add(20 * time.Second); len(all) < n; {
		require.True(e.t, time.Now().Before(end), "%d of %d completions: %v", len(all), n, all)
		got, err := e.cq.Poll(some[:])
		require.NoError(e.t, err)
		all = append(all, some[:got]...)
	}
	return all
}

func (e *end) piece(at, n int) Piece { return Piece{e.base + uint64(at), uint32(n), e.mr.LKey} }

func fill(b []byte, seed int) {
	for i := range b {
		b[i] = byte(seed + i*7 + i>>8)
	}
}

func TestLayouts(t *testing.T) {
	require.Equal(t, uintptr(40), unsafe.Sizeof(Request{}))
	require.Equal(t, uintptr(16), unsafe.Sizeof(Piece{}))
	require.Equal(t, uintptr(24), unsafe.Sizeof(Slot{}))
	require.Equal(t, uintptr(48), unsafe.Sizeof(Completion{}))
	require.Equal(t, uintptr(32), unsafe.Sizeof(Facts{}))
	require.Equal(t, uintptr(16), unsafe.Sizeof(Port{}))
	require.Equal(t, uintptr(28), unsafe.Sizeof(GID{}))
	require.Equal(t, uintptr(56), unsafe.Sizeof(Path{}))
	require.Equal(t, uintptr(53), unsafe.Offsetof(Path{}.Global))
	require.Equal(t, uintptr(20), unsafe.Sizeof(Room{}))
}

func TestOpen(t *testing.T) {
	if absent != nil {
		t.Skip(absent)
	}
	err := Open("/nowhere/libibverbs.so.1")
	require.ErrorContains(t, err, "verbs: this process already uses")
	_, err = OpenDevice("nothing9")
	require.ErrorContains(t, err, "verbs: open nothing9: no such device (the device is gone, or its name is wrong")
}

func TestDevice(t *testing.T) {
	d := device(t, 0)
	t.Logf("%+v", d)
	require.NotZero(t, d.MaxCQE)
	require.NotZero(t, d.MaxQP)
	require.Equal(t, !onHardware(), d.LockFree)
	p, err := d.Port(1)
	require.NoError(t, err)
	t.Logf("port 1: %+v", p)
	require.True(t, p.Active && p.Ethernet)
	_, err = d.Port(9)
	require.ErrorContains(t, err, "verbs: ask for port 9 of ")
	gids, err := d.GIDs(1)
	require.NoError(t, err)
	for _, g := range gids {
		t.Logf("gid %d: %v, %v", g.Index, g, g.Type)
	}
	g := bestGID(t, d)
	require.Equal(t, RoCEv2, g.Type)
	require.True(t, g.Addr().Is4())
	_, found, err := d.Async()
	require.NoError(t, err)
	_ = found                                          // a port may have changed before the test
	require.Zero(t, testing.AllocsPerRun(100, func() { // a sleeper asks each time that it wakes
		_, _, _ = d.Async()
	}))
}

// TestBatch: a chain of writes and a send go out with one doorbell and one signalled
// request, and the send comes after the writes.
func TestBatch(t *testing.T) {
	a, b := pair(t)
	b.receive(4, 4096)
	const n, size = 20, 3000
	fill(a.mem[:n*size+100], 1)
	var requests []Request
	for i := range n {
		requests = append(requests, Request{ID: uint64(i), Remote: b.base + 65536 + uint64(i*size), RKey: b.mr.RKey, Op: Write, From: a.piece(i*size, size)})
	}
	requests = append(requests, Request{ID: n, Op: Send, Flags: Signaled, From: a.piece(n*size, 100)})
	bells := 0
	if !onHardware() {
		bells = fakeverbs.Count("doorbells")
	}
	taken, err := a.qp.PostSend(requests)
	require.NoError(t, err)
	require.Equal(t, n+1, taken)
	if !onHardware() {
		require.Equal(t, bells+1, fakeverbs.Count("doorbells"))
	}
	got := clean(b.take(1)[0])
	require.Equal(t, Completion{ID: 0, Len: 100, QP: b.qp.Number}, got)
	require.Equal(t, a.mem[n*size:n*size+100], b.mem[:100])
	require.Equal(t, a.mem[:n*size], b.mem[65536:65536+n*size])
	sent := clean(a.take(1)[0])
	sent.Len = 0 // a send has none
	require.Equal(t, Completion{ID: n, QP: a.qp.Number}, sent)
}

// TestInline: what a request carries by itself needs no key, and may change once it is posted.
func TestInline(t *testing.T) {
	room := small
	room.Inline = 100
	a, b := newEnd(t, 0, room), newEnd(t, 1, small)
	a.connect(b)
	b.connect(a)
	require.GreaterOrEqual(t, a.qp.Room.Inline, int32(100))
	b.receive(1, 64)
	fill(a.mem[:164], 1)
	want := bytes.Clone(a.mem[:164])
	taken, err := a.qp.PostSend([]Request{
		{Remote: b.base + 4096, RKey: b.mr.RKey, Op: Write, Flags: Inline, From: Piece{Address: a.base, Len: 100}},
		{Op: Send, Flags: Inline | Signaled, From: Piece{Address: a.base + 100, Len: 64}},
	})
	require.NoError(t, err)
	require.Equal(t, 2, taken)
	clear(a.mem[:164])
	require.Equal(t, Completion{Len: 64, QP: b.qp.Number}, clean(b.take(1)[0]))
	require.Equal(t, Success, a.take(1)[0].Status)
	require.Equal(t, want[:100], b.mem[4096:4196])
	require.Equal(t, want[100:], b.mem[:64])
}

// clean drops what a completion has without a name.
func clean(c Completion) Completion {
	return Completion{ID: c.ID, Status: c.Status, Len: c.Len, QP: c.QP}
}

// TestNoBytes: a send without bytes takes a slot, and a write without bytes needs neither key nor
// address.
func TestNoBytes(t *testing.T) {
	a, b := pair(t)
	b.receive(1, 64)
	for _, op := range []Op{Write, Send} {
		_, err := a.qp.PostSend([]Request{{ID: uint64(op), Op: op, Flags: Signaled}})
		require.NoError(t, err)
		c := a.take(1)[0]
		require.Equal(t, uint64(op), c.ID)
		require.Equal(t, Success, c.Status)
	}
	require.Equal(t, Completion{QP: b.qp.Number}, clean(b.take(1)[0]))
}

// TestQueueFull: a queue takes what it has room for, and a completion that is polled
// makes room for all requests before it. Soft-RoCE makes room as it sends, so there the
// queue is never seen full.
func TestQueueFull(t *testing.T) {
	onFake(t)
	a, b := pair(t)
	b.receive(1, 64)
	room := int(a.qp.Room.Send)
	var requests []Request
	for i := range room + 10 {
		r := Request{ID: uint64(i), Remote: b.base, RKey: b.mr.RKey, Op: Write, From: a.piece(0, 8)}
		if i == room-1 {
			r.Flags = Signaled
		}
		requests = append(requests, r)
	}
	taken, err := a.qp.PostSend(requests[:10])
	require.NoError(t, err)
	require.Equal(t, 10, taken)
	taken, err = a.qp.PostSend(requests[10:])
	require.ErrorIs(t, err, ErrFull)
	require.Equal(t, room-10, taken)
	require.Equal(t, uint64(room-1), a.take(1)[0].ID)
	taken, err = a.qp.PostSend(requests[room:])
	require.NoError(t, err)
	require.Equal(t, 10, taken)
	slots := make([]Slot, int(b.qp.Room.Recv)+1)
	for i := range slots {
		slots[i] = Slot{To: b.piece(0, 64)}
	}
	taken, err = b.qp.PostRecv(slots[:1])
	require.NoError(t, err)
	require.Equal(t, 1, taken)
	taken, err = b.qp.PostRecv(slots[1:])
	require.ErrorIs(t, err, ErrFull)
	require.Equal(t, int(b.qp.Room.Recv)-2, taken)
}

// TestCounts: a call takes at least one request and at most Chain.
func TestCounts(t *testing.T) {
	a, _ := pair(t)
	for _, n := range []int{0, Chain + 1} {
		taken, err := a.qp.PostSend(make([]Request, n))
		require.ErrorIs(t, err, unix.EINVAL)
		require.Zero(t, taken)
		taken, err = a.qp.PostRecv(make([]Slot, n))
		require.ErrorIs(t, err, unix.EINVAL)
		require.Zero(t, taken)
	}
}

// TestSleep: FD becomes readable with the first completion after Arm, and only then.
func TestSleep(t *testing.T) {
	a, b := pair(t)
	b.receive(2, 64)
	ready := func(ms int) bool {
		for {
			p := []unix.PollFd{{Fd: int32(b.cq.FD), Events: unix.POLLIN}}
			n, err := unix.Poll(p, ms)
			if err == unix.EINTR {
				continue
			}
			require.NoError(t, err)
			return n > 0
		}
	}
	send := func() {
		_, err := a.qp.PostSend([]Request{{Op: Send, Flags: Signaled, From: a.piece(0, 8)}})
		require.NoError(t, err)
	}
	require.NoError(t, b.cq.Arm())
	require.False(t, ready(0))
	send()
	require.True(t, ready(10000))
	n, err := b.cq.Quiet()
	require.NoError(t, err)
	require.Equal(t, 1, n)
	require.False(t, ready(0))
	b.take(1)
	send()
	b.take(1)
	require.False(t, ready(20), "it is not armed")
}

// TestEnd: after Fail everything that is posted comes back flushed, the frames that
// had come first do not get lost, and the peer's request fails.
func TestEnd(t *testing.T) {
	a, b := pair(t)
	b.receive(4, 64)
	fill(a.mem[:64], 3)
	_, err := a.qp.PostSend([]Request{{ID: 7, Op: Send, Flags: Signaled, From: a.piece(0, 64)}})
	require.NoError(t, err)
	a.take(1)
	require.NoError(t, b.qp.Fail())
	all := b.take(4)
	require.Equal(t, Success, all[0].Status)
	require.Equal(t, a.mem[:64], b.mem[:64])
	for i, c := range all[1:] {
		require.Equal(t, Flushed, c.Status)
		require.Equal(t, uint64(i+1), c.ID)
	}
	if !onHardware() { // Soft-RoCE takes a receive after the end, and never flushes it
		b.receive(1, 64)
		require.Equal(t, Flushed, b.take(1)[0].Status)
	}
	_, err = a.qp.PostSend([]Request{{ID: 8, Op: Send, From: a.piece(0, 64)}})
	require.NoError(t, err)
	require.Equal(t, retryExceeded, a.take(1)[0].Status)
}

// TestWrongKey: a wrong key, and an address out of bounds, end both queue pairs.
func TestWrongKey(t *testing.T) {
	for _, wrong := range []string{"key", "address", "length"} {
		t.Run(wrong, func(t *testing.T) {
			a, b := pair(t)
			b.receive(2, 64)
			r := Request{ID: 1, Remote: b.base, RKey: b.mr.RKey, Op: Write, From: a.piece(0, 8)}
			switch wrong {
			case "key":
				r.RKey ^= 0xff00
			case "address":
				r.Remote += memory - 4
			case "length":
				r.Remote -= 4
			}
			_, err := a.qp.PostSend([]Request{r, {ID: 2, Op: Send, From: a.piece(0, 8)}})
			require.NoError(t, err)
			all := a.take(2)
			require.Equal(t, remoteAccess, all[0].Status)
			require.Equal(t, Flushed, all[1].Status)
			require.Equal(t, byte(0), b.mem[0])
		})
	}
}

// TestTooLong: a message longer than the slot ends both sides. Soft-RoCE gives other
// statuses than the specification.
func TestTooLong(t *testing.T) {
	a, b := pair(t)
	b.receive(1, 64)
	_, err := a.qp.PostSend([]Request{{Op: Send, From: a.piece(0, 65)}})
	require.NoError(t, err)
	require.Contains(t, []Status{remoteInvalid, remoteOperation}, a.take(1)[0].Status)
	require.Contains(t, []Status{localLength, localOperation}, b.take(1)[0].Status)
}

// TestUnregistered: a source that is not registered ends the sender.
func TestUnregistered(t *testing.T) {
	a, b := pair(t)
	_, err := a.qp.PostSend([]Request{{Remote: b.base, RKey: b.mr.RKey, Op: Write, From: a.piece(memory, 8)}})
	if err == nil {
		require.Equal(t, localProtection, a.take(1)[0].Status)
	} else {
		require.ErrorContains(t, err, "post a request to send") // the driver looks by itself
	}
}

func TestPostDoesNotAllocate(t *testing.T) {
	a, b := pair(t)
	requests := []Request{
		{Remote: b.base, RKey: b.mr.RKey, Op: Write, From: a.piece(0, 8)},
		{Remote: b.base, RKey: b.mr.RKey, Op: Write, Flags: Signaled, From: a.piece(8, 8)},
	}
	some := make([]Completion, 16)
	require.Zero(t, testing.AllocsPerRun(100, func() {
		if n, err := a.qp.PostSend(requests); n != 2 || err != nil {
			t.Fatal(n, err)
		}
		for n := 0; n == 0; {
			var err error
			if n, err = a.cq.Poll(some); err != nil || n > 0 && some[0].Status != Success {
				t.Fatal(err, some[0])
			}
			if _, err = a.cq.Quiet(); err != nil || a.cq.Arm() != nil {
				t.Fatal(err)
			}
		}
	}))
}
