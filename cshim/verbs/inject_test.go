package verbs

import (
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"fserver/cshim/verbs/fakeverbs"
)

// Statuses and events that only tests tell apart.
const (
	localLength     Status = 1
	localOperation  Status = 2
	localProtection Status = 4
	remoteInvalid   Status = 9
	remoteAccess    Status = 10
	remoteOperation Status = 11
	retryExceeded   Status = 12

	portActive EventType = 9
	portError  EventType = 10
	gidChange  EventType = 18
)

// TestEveryStatus: each status that a completion can have arrives, has words, and is
// followed by flushes.
func TestEveryStatus(t *testing.T) {
	onFake(t)
	for s := localLength; s <= 23; s++ {
		a, b := pair(t)
		fakeverbs.Status(fakeverbs.Write, 1, uint32(s))
		write := Request{Remote: b.base, RKey: b.mr.RKey, Op: Write, From: a.piece(0, 8)}
		requests := []Request{write, write, write}
		for i := range requests {
			requests[i].ID = uint64(i)
		}
		_, err := a.qp.PostSend(requests)
		require.NoError(t, err)
		all := a.take(2)
		require.Equal(t, s, all[0].Status)
		require.Equal(t, uint64(1), all[0].ID)
		require.Equal(t, Flushed, all[1].Status)
		require.NotEmpty(t, s.String())
	}
	require.Equal(t, "completion status 3", Status(3).String())
	require.Equal(t, "completion status 99", Status(99).String())
	require.Equal(t, "asynchronous event 99", EventType(99).String())
}

// TestReceiverFails: a status of the receiver ends its queue pair, and the sender hears
// of it.
func TestReceiverFails(t *testing.T) {
	onFake(t)
	a, b := pair(t)
	b.receive(2, 64)
	fakeverbs.Status(fakeverbs.Recv, 0, uint32(localProtection))
	_, err := a.qp.PostSend([]Request{{Op: Send, From: a.piece(0, 8)}})
	require.NoError(t, err)
	all := b.take(2)
	require.Equal(t, localProtection, all[0].Status)
	require.Equal(t, Flushed, all[1].Status)
	require.Equal(t, remoteOperation, a.take(1)[0].Status)
}

// TestWantOfMemory: each call that makes something can fail, says which one it was, and
// leaves nothing behind.
func TestWantOfMemory(t *testing.T) {
	onFake(t)
	making := func() error {
		d, err := OpenDevice("fake0")
		if err != nil {
			return err
		}
		defer func() { require.NoError(t, d.Close()) }()
		cq, err := d.NewCQ(16)
		if err != nil {
			return err
		}
		defer func() { require.NoError(t, cq.Destroy()) }()
		qp, err := d.NewQP(cq, small)
		if err != nil {
			return err
		}
		return qp.Destroy()
	}
	require.NoError(t, making())
	for call, text := range map[string]string{
		"ibv_get_device_list":     "verbs: open fake0: cannot allocate memory",
		"ibv_open_device":         "verbs: open fake0: cannot allocate memory",
		"ibv_alloc_pd":            "verbs: open fake0: cannot allocate memory",
		"ibv_create_comp_channel": "verbs: create a completion queue of 16 entries on fake0: cannot allocate memory",
		"ibv_create_cq":           "verbs: create a completion queue of 16 entries on fake0: cannot allocate memory",
		"ibv_create_qp":           "verbs: create a queue pair of 64 and 64 requests on fake0: cannot allocate memory",
		"INIT":                    "verbs: create a queue pair of 64 and 64 requests on fake0: cannot allocate memory",
		"ibv_query_device":        "verbs: open fake0: cannot allocate memory",
	} {
		fakeverbs.Fail(call, syscall.ENOMEM, 0, 1)
		require.EqualError(t, making(), text)
	}
	for _, call := range []string{"ibv_alloc_td", "ibv_alloc_parent_domain"} {
		fakeverbs.Fail(call, syscall.ENOMEM, 0, 1)
		require.NoError(t, making(), "without a thread domain the library takes locks")
	}
	for _, what := range []string{"contexts", "queues", "pairs"} {
		require.Zero(t, fakeverbs.Count(what), what)
	}
}

// TestPostFails: a request that is refused in the middle of a batch leaves those before
// it.
func TestPostFails(t *testing.T) {
	onFake(t)
	a, b := pair(t)
	fakeverbs.Fail("ibv_post_send", syscall.EIO, 0, 1)
	n, err := a.qp.PostSend([]Request{{Remote: b.base, RKey: b.mr.RKey, Op: Write, From: a.piece(0, 8)}})
	require.Zero(t, n)
	require.ErrorContains(t, err, "input/output error (the device has failed; dmesg says why)")
	fakeverbs.Fail("ibv_post_recv", syscall.ENOMEM, 0, 1)
	_, err = a.qp.PostRecv([]Slot{{To: a.piece(0, 8)}})
	require.ErrorIs(t, err, ErrFull)
	fakeverbs.Fail("ibv_poll_cq", syscall.EIO, 0, 1)
	_, err = a.cq.Poll(make([]Completion, 1))
	require.ErrorContains(t, err, "verbs: poll a completion queue: input/output error")
	fakeverbs.Fail("ibv_req_notify_cq", syscall.EIO, 0, 1)
	require.ErrorContains(t, a.cq.Arm(), "verbs: arm a completion queue")
	require.ErrorContains(t, a.qp.Connect(Path{GIDIndex: 4, Global: true}), "invalid argument")
}

// TestLockedMemory: where memory cannot be pinned the error names the limit.
func TestLockedMemory(t *testing.T) {
	onFake(t)
	a := newEnd(t, 0, small)
	fakeverbs.Set("locked", memory+4096)
	r, err := a.d.Register(a.base, 4096, LocalWrite)
	require.NoError(t, err)
	_, err = a.d.Register(a.base, 4096, LocalWrite)
	require.ErrorContains(t, err, "verbs: register 4096 bytes at ")
	require.ErrorContains(t, err, "cannot allocate memory (")
	require.ErrorContains(t, err, "ulimit -l")
	require.ErrorIs(t, err, unix.ENOMEM)
	require.NoError(t, r.Deregister())
	_, err = a.d.Register(4096, 4096, LocalWrite)
	require.ErrorContains(t, err, "bad address")
	require.NotContains(t, err.Error(), "ulimit")
	fakeverbs.Set("mr_size", 1000)
	_, err = a.d.Register(a.base, 4096, LocalWrite)
	require.ErrorIs(t, err, unix.EINVAL)
}

// TestVanish: a device that is taken away says so, flushes, and refuses everything but
// destroying.
func TestVanish(t *testing.T) {
	onFake(t)
	a, _ := pair(t)
	a.receive(1, 64)
	fakeverbs.Vanish(0)
	e, found, err := a.d.Async()
	require.NoError(t, err)
	require.True(t, found)
	require.Equal(t, DeviceFatal, e.Type)
	require.Equal(t, "the device failed, or was taken away", e.Type.String())
	require.Equal(t, Flushed, a.take(1)[0].Status)
	_, err = a.d.Port(1)
	require.ErrorIs(t, err, unix.EIO)
	_, err = OpenDevice("fake0")
	require.ErrorIs(t, err, unix.ENODEV)
}

// TestEvents: asynchronous events that end a queue pair name it, also beside others.
func TestEvents(t *testing.T) {
	onFake(t)
	a, _ := pair(t)
	take := func() Event {
		e, found, err := a.d.Async()
		require.NoError(t, err)
		require.True(t, found)
		return e
	}
	_, found, err := a.d.Async()
	require.NoError(t, err)
	require.False(t, found)
	for _, kind := range []EventType{portError, portActive, gidChange} {
		fakeverbs.Event(0, int(kind), 1, 0)
		require.Equal(t, Event{kind, 0}, take())
	}
	for _, kind := range []EventType{QPFatal, QPRequest, QPAccess} {
		fakeverbs.Event(0, int(kind), 0, a.qp.Number)
		require.Equal(t, Event{kind, a.qp.Number}, take())
	}
	fakeverbs.Event(0, int(QPAccess), 0, a.qp.Number)
	fakeverbs.Event(0, int(portError), 1, 0)
	require.NoError(t, a.qp.Destroy())
	a.qp = nil
	require.Equal(t, Event{portError, 0}, take(), "the event of a queue pair that is gone")
}

// TestOverrun: a queue with too few entries is lost, with its queue pairs, and says so.
func TestOverrun(t *testing.T) {
	onFake(t)
	a, b := newEnd(t, 0, small), newEnd(t, 1, small)
	cq, err := a.d.NewCQ(4)
	require.NoError(t, err)
	qp, err := a.d.NewQP(cq, small)
	require.NoError(t, err)
	require.NoError(t, a.qp.Destroy())
	require.NoError(t, a.cq.Destroy())
	a.qp, a.cq = qp, cq
	a.connect(b)
	b.connect(a)
	write := Request{Remote: b.base, RKey: b.mr.RKey, Op: Write, Flags: Signaled, From: a.piece(0, 8)}
	_, err = a.qp.PostSend([]Request{write, write, write, write, write})
	require.NoError(t, err)
	for _, kind := range []EventType{CQError, QPFatal} {
		e, found, err := a.d.Async()
		require.NoError(t, err)
		require.True(t, found)
		require.Equal(t, kind, e.Type)
	}
}

// TestAddresses: IPv4 with RoCE v2 is preferred, then a global IPv6 address.
func TestAddresses(t *testing.T) {
	onFake(t)
	d := device(t, 1)
	require.Equal(t, "10.77.0.2", bestGID(t, d).String())
	fakeverbs.Set("gids", 1)
	require.Equal(t, "fd00:77::2", bestGID(t, d).String())
	a, b := pair(t) // over IPv6
	b.receive(1, 64)
	_, err := a.qp.PostSend([]Request{{Op: Send, Flags: Signaled, From: a.piece(0, 8)}})
	require.NoError(t, err)
	require.Equal(t, Success, a.take(1)[0].Status)
	fakeverbs.Set("gids", 0)
	gids, err := d.GIDs(1)
	require.NoError(t, err)
	require.Empty(t, gids)
	fakeverbs.Set("down", 1)
	p, err := d.Port(1)
	require.NoError(t, err)
	require.False(t, p.Active)
}
