package wire

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// data is one frame of each kind, and how to parse it and append it again.
var data = []struct {
	name  string
	frame []byte
	again func(b []byte) (any, []byte, error)
}{
	{"plan", AppendPlan(nil, &Plan{Number: 300, Push: []PlanTensor{
		{Key: 1<<64 - 1, DType: 15, NDim: 3, Tail: []int64{7168, 1}},
		{Key: 2, DType: 6},
	}, Pull: []PlanPull{{3, 6}, {4, AnyType}}}), parsePlan},
	{"plan of a channel", AppendPlan(nil, &Plan{Number: 1, Channel: "decode 0", Pull: []PlanPull{{3, 4}}}), parsePlan},
	{"channel", AppendChannel(nil, &Channel{Name: "decode 0", Text: "{}"}), parseChannel},
	{"end of a channel", AppendChannel(nil, &Channel{Name: "decode 0", Closes: true}), parseChannel},
	{"refusal of a channel", AppendChannel(nil, &Channel{Name: "decode 0", Closes: true, Text: "no memory"}), parseChannel},
	{"plan of nothing", AppendPlan(nil, &Plan{}), parsePlan},
	{"need", AppendNeed(nil, []Need{{1, 4096, false, true}, {1<<64 - 1, 1 << 40, true, false}}), func(b []byte) (any, []byte, error) {
		v, err := ParseNeed(b, nil)
		return v, AppendNeed(nil, v), err
	}},
	{"buffers", AppendBuffers(nil, &Buffers{List: []Buffer{
		{Key: 1, Region: Key{2, 0x1122334455667788, ""}, Cap: 4096}, {Key: 3, Region: Key{4, 5, "handle"}, Cap: 1 << 40}, {Key: 6, Lend: true},
	}}), parseBuffers},
	{"no buffers", AppendBuffers(nil, &Buffers{Reason: "no memory"}), parseBuffers},
	{"request", AppendRequest(nil, &Request{
		Seq: 0x1122334455667788, Plan: 1, Push: []Pushed{{128, 1 << 20, false}, {0, 0, false}, {1, 4096, true}},
		Pull: []Target{{Bytes: 1 << 21, Changed: true, Region: Key{2, 3, ""}, Off: 512}, {Bytes: 8}},
	}), parseRequest},
	{"response", AppendResponse(nil, &Response{Seq: 0x1122334455667788, Stamps: [4]int64{1, 2, 3, 4}}), func(b []byte) (any, []byte, error) {
		var v Response
		err := ParseResponse(b, &v)
		return v, AppendResponse(nil, &v), err
	}},
	{"refused", AppendRefused(nil, &Refused{Seq: 0x1122334455667788, Text: "no room for 3 experts: später"}), parseRefused},
	{"unfit", AppendRefused(nil, &Refused{Seq: 1, Unfit: true}), parseRefused},
	{"bye", AppendBye(nil), func(b []byte) (any, []byte, error) { return nil, AppendBye(nil), nil }},
	{"recall", AppendRecall(nil, TypeRecall, []uint64{7, 1 << 40}), func(b []byte) (any, []byte, error) {
		v, err := ParseRecall(b, TypeRecall, nil)
		return v, AppendRecall(nil, TypeRecall, v), err
	}},
	{"regroup", AppendRegroup(nil, Regroup{3<<20 + 1, true}), func(b []byte) (any, []byte, error) {
		v, err := ParseRegroup(b)
		return v, AppendRegroup(nil, v), err
	}},
	{"up", AppendUp(nil, ""), parseUp},
	{"up, and why so", AppendUp(nil, "cma: worker 0 and server 0 are on different hosts"), parseUp},
}

func parseUp(b []byte) (any, []byte, error) {
	why, err := ParseUp(b)
	return why, AppendUp(nil, why), err
}

func parsePlan(b []byte) (any, []byte, error) {
	v, err := ParsePlan(b)
	return v, AppendPlan(nil, v), err
}

func parseChannel(b []byte) (any, []byte, error) {
	v, err := ParseChannel(b)
	return v, AppendChannel(nil, &v), err
}

func parseBuffers(b []byte) (any, []byte, error) {
	v, err := ParseBuffers(b)
	return v, AppendBuffers(nil, v), err
}

func parseRefused(b []byte) (any, []byte, error) {
	v, err := ParseRefused(b)
	return v, AppendRefused(nil, &v), err
}

func parseRequest(b []byte) (any, []byte, error) {
	var v Request
	err := ParseRequest(b, &v)
	return v, AppendRequest(nil, &v), err
}

func TestDataGolden(t *testing.T) {
	var g golden
	for _, c := range data {
		g.add(c.name, c.frame)
		_, again, err := c.again(c.frame)
		require.NoError(t, err, c.name)
		require.Equal(t, c.frame, again, c.name)
	}
	g.compare(t, "testdata/data_golden.txt")
}

// TestDataCut cuts each frame everywhere, and adds a byte: no parser takes
// either.
func TestDataCut(t *testing.T) {
	for _, c := range data {
		if c.name == "bye" {
			continue // only its type says anything
		}
		for n := range c.frame {
			_, _, err := c.again(c.frame[:n])
			require.Error(t, err, "%s cut to %d bytes", c.name, n)
		}
		_, _, err := c.again(append(c.frame[:len(c.frame):len(c.frame)], 0))
		require.Error(t, err, "%s and a byte", c.name)
	}
}

func TestDataBounds(t *testing.T) {
	_, err := ParsePlan(AppendPlan(nil, &Plan{Push: []PlanTensor{{NDim: MaxDims + 1, Tail: make([]int64, MaxDims)}}}))
	require.ErrorContains(t, err, "65 dimensions")
	_, err = ParseNeed(AppendNeed(nil, []Need{{1, 1 << 63, false, false}}), nil)
	require.ErrorContains(t, err, "out of range")
	_, err = ParsePlan(AppendPlan(nil, &Plan{Push: make([]PlanTensor, MaxTensors+1)}))
	require.ErrorContains(t, err, "4097 pushed tensors")
	_, err = ParseChannel(AppendChannel(nil, &Channel{Name: strings.Repeat("x", MaxChannelName+1)}))
	require.ErrorContains(t, err, "65 bytes of a channel's name")
	_, err = ParseChannel(AppendChannel(nil, &Channel{Name: "x", Text: strings.Repeat("x", MaxChannelText+1)}))
	require.ErrorContains(t, err, "262145 bytes of a channel's text")
	_, err = ParseChannel(AppendChannel(nil, &Channel{}))
	require.ErrorContains(t, err, "has no name")
	v, err := ParseBuffers(AppendBuffers(nil, &Buffers{Reason: strings.Repeat("x", 5000)}))
	require.NoError(t, err)
	require.Len(t, v.Reason, maxReason)
	p, err := ParseRefused(AppendRefused(nil, &Refused{Text: strings.Repeat("ä", 300)}))
	require.NoError(t, err)
	require.Equal(t, strings.Repeat("ä", MaxRefusal/2), p.Text)
	_, err = ParseRefused(append(AppendRefused(nil, &Refused{})[:10], append([]byte{0xf5, 3}, make([]byte, MaxRefusal+1)...)...))
	require.ErrorContains(t, err, "501 bytes of a refusal")
	require.Equal(t, "", clip("ä", 1))
	require.Equal(t, "aä", clip("aäb", 3))
}

func TestDataAllocations(t *testing.T) {
	q := Request{Seq: 1, Push: make([]Pushed, 4), Pull: []Target{{Bytes: 8, Changed: true, Region: Key{ID: 1, Token: 2}}, {}}}
	p := Response{Seq: 1}
	var got Request
	buf := make([]byte, 0, 4096)
	require.Zero(t, testing.AllocsPerRun(100, func() {
		if ParseRequest(AppendRequest(buf, &q), &got) != nil || ParseResponse(AppendResponse(buf, &p), &p) != nil {
			t.Fatal("refused")
		}
	}))
}

// FuzzData gives any bytes to every parser. What one takes means the same when
// it is appended and parsed again.
func FuzzData(f *testing.F) {
	for _, c := range data {
		f.Add(c.frame)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, c := range data {
			v, again, err := c.again(b)
			if err != nil || c.name == "bye" {
				continue
			}
			w, _, err := c.again(again)
			require.NoError(t, err)
			require.Equal(t, v, w)
		}
	})
}
