package rails

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// joined returns the two sides of a Conn, the dialer first, with live members 0 to n-1.
func joined(t testing.TB, n, window, most int) (a, b *order) {
	a, b = newOrder(true, window, most), newOrder(false, window, most)
	for range n {
		id, ok := a.dial()
		require.True(t, ok)
		require.True(t, a.come(id))
		require.True(t, b.come(id))
		carry(t, a, b)
		carry(t, b, a)
		carry(t, a, b)
	}
	return a, b
}

// carry brings what a has to send to b. What is sent on a member that is closed there is lost.
func carry(t testing.TB, a, b *order) {
	for _, p := range a.out {
		if m := b.find(p.to); m == nil || m.phase == closed {
			continue
		}
		if err := b.recv(p.to, p.item); err != nil {
			require.NoError(t, err)
		}
	}
	a.out = a.out[:0]
}

func taken(o *order) (nums []uint64) {
	for {
		num, ok := o.take()
		if !ok {
			return nums
		}
		nums = append(nums, num)
	}
}

func TestSmallMessageIsOneItem(t *testing.T) {
	a, b := joined(t, 2, 8, 100)
	num := a.write(1)
	require.Equal(t, num, a.write(1))
	require.Equal(t, num, a.frame(1, 10))
	require.Len(t, a.out, 1)
	carry(t, a, b)
	require.Equal(t, []uint64{num}, taken(b))
}

func TestFencesComeBeforeTheirFrame(t *testing.T) {
	a, b := joined(t, 3, 8, 100)
	a.write(1)
	a.write(2)
	num := a.frame(0, 10)
	kinds := []kind{}
	for _, p := range a.out {
		kinds = append(kinds, p.kind)
	}
	require.Equal(t, []kind{fence, fence, frame}, kinds)
	slices.Reverse(a.out)
	for i, p := range a.out {
		require.NoError(t, b.recv(p.to, p.item))
		if i < 2 {
			require.Empty(t, taken(b))
		}
	}
	require.Equal(t, []uint64{num}, taken(b))
}

func TestRoom(t *testing.T) {
	a, b := joined(t, 1, 4, 100)
	require.True(t, a.room(1, 1000), "the first frame may be of any size")
	num := a.write(0)
	a.frame(0, 90)
	require.True(t, a.room(1, 10))
	require.False(t, a.room(1, 11))
	for range 3 {
		a.frame(0, 0)
	}
	require.False(t, a.room(0, 0))
	carry(t, a, b)
	require.Len(t, taken(b), 4)
	require.EqualValues(t, 4, b.owes())
	b.acknowledge()
	require.Zero(t, b.owes())
	carry(t, b, a)
	require.Equal(t, []uint64{1, 2, 3}, a.done)
	require.False(t, a.room(0, 0), "a member has not let go of the oldest")
	a.let(num)
	require.Equal(t, []uint64{1, 2, 3, 0}, a.done)
	require.True(t, a.room(1, 100))
}

// Back-pressure lasts while a late member is on its way, and there is no other.
func TestNoMember(t *testing.T) {
	a, b := joined(t, 1, 8, 100)
	id, ok := a.dial()
	require.True(t, ok)
	a.down(0)
	require.False(t, a.room(0, 0))
	require.False(t, a.over)
	require.True(t, a.come(id))
	require.True(t, b.come(id))
	carry(t, a, b)
	carry(t, b, a)
	require.True(t, a.room(0, 0))
	a.down(id)
	require.True(t, a.over)
	require.False(t, a.room(0, 0))
	_, ok = a.dial()
	require.False(t, ok)
	a.closed(0)
	a.closed(id)
	require.Empty(t, a.members)
}

// Numbers of members are never used again, also when both sides have forgotten them.
func TestMemberNumbers(t *testing.T) {
	a, b := joined(t, 1, 8, 100)
	for range 1000 {
		id, ok := a.dial()
		require.True(t, ok)
		if id%3 == 0 {
			a.failed(id)
			carry(t, a, b)
			require.False(t, b.come(id), "its end was stated")
		} else {
			require.True(t, a.come(id))
			require.True(t, b.come(id))
			a.down(id)
			a.closed(id)
			carry(t, a, b)
			b.closed(id)
		}
		carry(t, b, a)
		a.acknowledge()
		carry(t, a, b)
		b.acknowledge()
		carry(t, b, a)
		require.Len(t, a.members, 1)
		require.Len(t, b.members, 1)
		require.Empty(t, a.log)
		require.Empty(t, b.log)
	}
	a, _ = joined(t, 0, 8, 100)
	for range dialAhead {
		_, ok := a.dial()
		require.True(t, ok)
	}
	_, ok := a.dial()
	require.False(t, ok, "none of them has come")
}

func TestBadInput(t *testing.T) {
	const window = 8
	stated := func(num uint64, id uint32, n uint64) item {
		return item{kind: stating, num: num, statement: statement{id, n}}
	}
	numbered := func(num uint64) item { return item{kind: frame, num: num} }
	for _, c := range []struct {
		name  string
		on    uint32
		items []item
		want  string
	}{
		{"member", 7, []item{{kind: bare}}, "rails: an item on member 7, which is not open here"},
		{"kind", 0, []item{{kind: 9}}, "rails: an item of unknown kind 9 on member 0"},
		{"no kind", 0, []item{{}}, "rails: an item of unknown kind 0 on member 0"},
		{"twice, before it is given", 0, []item{numbered(1), numbered(1)}, "rails: frame 1 on member 0 has come before"},
		{"twice, after it was given", 1, []item{numbered(0), numbered(0)}, "rails: frame 0 on member 1 has come before"},
		{"far ahead", 0, []item{numbered(window)}, "rails: frame 8 on member 0: only 0 to 7 may come"},
		{"very far ahead", 0, []item{numbered(^uint64(0))}, "rails: frame 18446744073709551615 on member 0: only 0 to 7 may come"},
		{"acknowledgement runs backwards", 0, []item{{kind: bare, ack: 1}, {kind: bare}}, "rails: member 0 acknowledges 0 frames, after 1"},
		{"acknowledgement ahead", 0, []item{{kind: bare, ack: 4}}, "rails: member 0 acknowledges 4 frames, of 3"},
		{"acknowledgement of what waits", 0, []item{stated(0, 1, 0), {kind: bare, ack: 3}}, ""},
		{"confirmation ahead", 0, []item{{kind: bare, got: 1}}, "rails: member 0 confirms 1 statements, of 0"},
		{"confirmation runs backwards", 0, []item{stated(0, 4, 0), {kind: bare, got: 1}, {kind: bare}}, "rails: member 0 confirms 0 statements, after 1"},
		{"statement about no member", 0, []item{stated(0, dialAhead+5, 0)}, "rails: member 69, but 3 has not come yet: at most 63 ahead"},
		{"statement with frames of no member", 0, []item{stated(0, 3, 1)}, "rails: 1 frames of member 3 have come, of 0"},
		{"statement ahead", 0, []item{stated(0, 1, 3)}, "rails: 3 frames of member 1 have come, of 2"},
		{"statement left out", 0, []item{stated(1, 1, 0)}, "rails: statement 1, about member 1: only 0 may come"},
		{"two statements", 0, []item{stated(0, 1, 0), stated(1, 1, 1)}, "rails: member 1, whose end was stated before"},
		{"two statements about none", 0, []item{stated(0, 3, 0), stated(1, 3, 0)}, "rails: member 3, whose end was stated before"},
		{"the same again", 0, []item{stated(0, 1, 2), stated(0, 1, 2), {kind: bare, ack: 3}}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, o := joined(t, 3, window, 100)
			o.frame(0, 1)
			o.frame(1, 1)
			o.frame(1, 1)
			var err error
			for i, it := range c.items {
				require.NoError(t, err, i)
				err = o.recv(c.on, it)
				taken(o)
			}
			if c.want == "" {
				require.NoError(t, err)
			} else {
				require.EqualError(t, err, c.want)
			}
		})
	}
}

// What the dialer alone can tell, or a side on which members have closed.
func TestBadInputAfterALoss(t *testing.T) {
	a, _ := joined(t, 2, 8, 100)
	require.EqualError(t, a.recv(0, item{kind: stating, statement: statement{2, 0}}), "rails: member 2 has closed, which there never was")

	a, _ = joined(t, 2, 8, 100)
	a.down(1)
	a.write(0)
	a.closed(1)
	require.EqualError(t, a.recv(1, item{kind: bare}), "rails: an item on member 1, which is not open here")

	a, b := joined(t, 2, 8, 100)
	a.write(1)
	a.down(1)
	a.frame(0, 1) // its fence waits
	require.EqualError(t, a.recv(0, item{kind: bare, ack: 1}), "rails: member 0 acknowledges frame 0, which was not sent")

	b.log = make([]statement, mostKept)
	b.stated = mostKept
	require.False(t, b.come(2))
	require.EqualError(t, b.recv(0, item{kind: stating, statement: statement{3, 0}}), "rails: member 3 has closed, and 256 statements are not confirmed")
}

func TestSteadyStateAllocatesNothing(t *testing.T) {
	a, b := joined(t, 2, 64, 1<<20)
	round := func() {
		first, second := a.write(0), a.write(1)
		a.frame(1, 100)
		b.frame(0, 100)
		carry(t, a, b)
		carry(t, b, a)
		for _, o := range []*order{a, b} {
			for {
				if _, ok := o.take(); !ok {
					break
				}
			}
			o.acknowledge()
		}
		carry(t, a, b)
		carry(t, b, a)
		a.let(first)
		a.let(second)
		if len(a.done) != 2 || len(b.done) != 1 {
			t.Fatalf("done: %v, %v", a.done, b.done)
		}
		a.done, b.done = a.done[:0], b.done[:0]
	}
	for range 100 {
		round()
	}
	require.Zero(t, testing.AllocsPerRun(1000, round))
}
