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
	{"plan", Append(nil, TypePlan, &Plan{Number: 300, Push: []PlanTensor{
		{Key: 1<<64 - 1, DType: 15, NDim: 3, Tail: []int64{7168, 1}},
		{Key: 2, DType: 6},
	}, Pull: []PlanPull{{3, 6}, {4, AnyType}}}), again[Plan](TypePlan)},
	{"plan of a channel", Append(nil, TypePlan, &Plan{Number: 1, Channel: "decode 0", Pull: []PlanPull{{3, 4}}}), again[Plan](TypePlan)},
	{"channel", Append(nil, TypeChannel, &Channel{Name: "decode 0", Text: "{}"}), again[Channel](TypeChannel)},
	{"end of a channel", Append(nil, TypeChannel, &Channel{Name: "decode 0", Closes: true}), again[Channel](TypeChannel)},
	{"refusal of a channel", Append(nil, TypeChannel, &Channel{Name: "decode 0", Closes: true, Text: "no memory"}), again[Channel](TypeChannel)},
	{"plan of unicasts", Append(nil, TypePlan, &Plan{Number: 2, Unicast: true, Pull: []PlanPull{{3, 4}}}), again[Plan](TypePlan)},
	{"plan of nothing", Append(nil, TypePlan, &Plan{}), again[Plan](TypePlan)},
	{"need", Append(nil, TypeNeed, &Needs{{1, 4096, false, true}, {1<<64 - 1, 1 << 40, true, false}}), again[Needs](TypeNeed)},
	{"buffers", Append(nil, TypeBuffers, &Buffers{List: []Buffer{
		{Key: 1, Region: Key{2, 0x1122334455667788, ""}, Cap: 4096}, {Key: 3, Region: Key{4, 5, "handle"}, Cap: 1 << 40}, {Key: 6, Lend: true},
	}}), again[Buffers](TypeBuffers)},
	{"no buffers", Append(nil, TypeBuffers, &Buffers{Reason: "no memory"}), again[Buffers](TypeBuffers)},
	{"request", AppendRequest(nil, &Request{
		Seq: 0x1122334455667788, Plan: 1, Push: []Pushed{{128, 1 << 20, false}, {0, 0, false}, {1, 4096, true}},
		Pull: []Target{{Bytes: 1 << 21, Changed: true, Region: Key{2, 3, ""}, Off: 512}, {Bytes: 8}},
	}), parseRequest},
	{"response", AppendResponse(nil, &Response{Seq: 0x1122334455667788, Stamps: [4]int64{1, 2, 3, 4}}), func(b []byte) (any, []byte, error) {
		var v Response
		err := ParseResponse(b, &v)
		return v, AppendResponse(nil, &v), err
	}},
	{"refused", Append(nil, TypeRefused, &Refused{Seq: 0x1122334455667788, Text: "no room for 3 experts: später"}), again[Refused](TypeRefused)},
	{"unfit", Append(nil, TypeRefused, &Refused{Seq: 1, Why: RefusedUnfit}), again[Refused](TypeRefused)},
	{"refused, the channel is closed", Append(nil, TypeRefused, &Refused{Seq: 2, Why: RefusedClosed}), again[Refused](TypeRefused)},
	{"bye", AppendSignal(nil, TypeBye), func(b []byte) (any, []byte, error) { return nil, AppendSignal(nil, TypeBye), nil }},
	{"recall", Append(nil, TypeRecall, &Seqs{7, 1 << 40}), again[Seqs](TypeRecall)},
	{"regroup", Append(nil, TypeRegroup, &Regroup{3<<20 + 1, true}), again[Regroup](TypeRegroup)},
	{"up", Append(nil, TypeUp, &Text{""}), again[Text](TypeUp)},
	{"up, and why so", Append(nil, TypeUp, &Text{"cma: worker 0 and server 0 are on different hosts"}), again[Text](TypeUp)},
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
	_, err := Parse[Plan](Append(nil, TypePlan, &Plan{Push: []PlanTensor{{NDim: MaxDims + 1, Tail: make([]int64, MaxDims)}}}), TypePlan)
	require.ErrorContains(t, err, "65 dimensions")
	_, err = Parse[Needs](Append(nil, TypeNeed, &Needs{{1, 1 << 63, false, false}}), TypeNeed)
	require.ErrorContains(t, err, "bytes of a buffer 9223372036854775808: want at most 4611686018427387904")
	_, err = Parse[Plan](Append(nil, TypePlan, &Plan{Push: make([]PlanTensor, MaxTensors+1)}), TypePlan)
	require.ErrorContains(t, err, "4097 pushed tensors")
	_, err = Parse[Channel](Append(nil, TypeChannel, &Channel{Name: strings.Repeat("x", MaxChannelName+1)}), TypeChannel)
	require.ErrorContains(t, err, "65 bytes of a channel's name")
	_, err = Parse[Channel](Append(nil, TypeChannel, &Channel{Name: "x", Text: strings.Repeat("x", MaxChannelText+1)}), TypeChannel)
	require.ErrorContains(t, err, "262145 bytes of a channel's text")
	_, err = Parse[Channel](Append(nil, TypeChannel, &Channel{}), TypeChannel)
	require.ErrorContains(t, err, "has no name")
	v, err := Parse[Buffers](Append(nil, TypeBuffers, &Buffers{Reason: strings.Repeat("x", 5000)}), TypeBuffers)
	require.NoError(t, err)
	require.Len(t, v.Reason, maxReason)
	p, err := Parse[Refused](Append(nil, TypeRefused, &Refused{Text: strings.Repeat("ä", 300)}), TypeRefused)
	require.NoError(t, err)
	require.Equal(t, strings.Repeat("ä", MaxRefusal/2), p.Text)
	_, err = Parse[Refused](append(Append(nil, TypeRefused, &Refused{})[:10], append([]byte{0xf5, 3}, make([]byte, MaxRefusal+1)...)...), TypeRefused)
	require.ErrorContains(t, err, "501 bytes of a refusal")
	_, err = Parse[Refused](Append(nil, TypeRefused, &Refused{Why: 3}), TypeRefused)
	require.ErrorContains(t, err, "cause of a refusal 3: want at most 2")
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
