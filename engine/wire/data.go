package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"unicode/utf8"
)

// Bounds of the frames of push-pull.
const (
	MaxTensors = 4096    // push or pull tensors of one request
	MaxDims    = 64      // rank of a tensor
	MaxSize    = 1 << 62 // a dimension, or bytes
	maxBlob    = 4096    // what a key needs once, bytes
	maxReason  = 1024    // text of an error, bytes
	MaxRefusal = 500     // text of a Refused, bytes
)

// Key is transport.Key as it travels.
type Key struct {
	ID    uint64
	Token uint64
	Blob  string
}

func appendKey(dst []byte, k Key) []byte {
	dst = binary.LittleEndian.AppendUint64(dst, k.ID)
	dst = binary.LittleEndian.AppendUint64(dst, k.Token)
	return appendBytes(dst, k.Blob)
}

func (r *reader) key() Key {
	k := Key{ID: r.u64(), Token: r.u64()}
	if b := r.bytes("bytes of a key", maxBlob); len(b) != 0 {
		k.Blob = string(b)
	}
	return k
}

// PlanTensor is what stays the same of one pushed tensor: its key, type and
// shape but for the number of rows. A tensor of rank 0 has no rows and no tail.
type PlanTensor struct {
	Key   uint64
	DType uint8
	NDim  int
	Tail  []int64 // the dimensions after the first
}

// MaxPlans bounds the plans that are known at a time.
const MaxPlans = 1024

// Plan describes the push-pulls that will name Number, which is below
// MaxPlans. A plan under a known number takes its place.
type Plan struct {
	Number  uint64
	Channel string // that its requests go through; empty: none
	Push    []PlanTensor
	Pull    []PlanPull
}

// PlanPull is what stays the same of one pulled tensor.
type PlanPull struct {
	Key   uint64
	DType uint8 // AnyType: of none that the answer must have
}

// AnyType is no type.
const AnyType = 255

// AppendPlan appends p as a frame.
func AppendPlan(dst []byte, p *Plan) []byte {
	dst = append(dst, byte(TypePlan))
	dst = binary.AppendUvarint(dst, p.Number)
	dst = appendBytes(dst, p.Channel)
	dst = binary.AppendUvarint(dst, uint64(len(p.Push)))
	for i := range p.Push {
		t := &p.Push[i]
		dst = binary.LittleEndian.AppendUint64(dst, t.Key)
		dst = append(dst, t.DType)
		dst = binary.AppendUvarint(dst, uint64(t.NDim))
		for _, d := range t.Tail {
			dst = binary.AppendUvarint(dst, uint64(d))
		}
	}
	dst = binary.AppendUvarint(dst, uint64(len(p.Pull)))
	for _, t := range p.Pull {
		dst = binary.LittleEndian.AppendUint64(dst, t.Key)
		dst = append(dst, t.DType)
	}
	return dst
}

// ParsePlan parses a frame; the result does not alias it.
func ParsePlan(b []byte) (*Plan, error) {
	r := reader{b: b}
	r.kind(TypePlan)
	p := &Plan{Number: r.uvarint(), Channel: r.text("bytes of a channel's name", MaxChannelName)}
	p.Push = make([]PlanTensor, r.count("pushed tensors", MaxTensors, 10))
	for i := range p.Push {
		t := &p.Push[i]
		t.Key = r.u64()
		t.DType = r.u8()
		if t.NDim = r.count("dimensions", MaxDims, 1); t.NDim > 1 {
			t.Tail = make([]int64, t.NDim-1)
		}
		for j := range t.Tail {
			t.Tail[j] = r.size("dimension")
		}
	}
	p.Pull = make([]PlanPull, r.count("pulled tensors", MaxTensors, 9))
	for i := range p.Pull {
		p.Pull[i] = PlanPull{r.u64(), r.u8()}
	}
	return p, r.end()
}

// Need asks for receive buffers of at least Bytes each, or, with Lend, whether
// tensors of the key may be lent instead. With Host they are to be memory of the
// CPU, wherever the server has others.
type Need struct {
	Key   uint64
	Bytes uint64
	Lend  bool
	Host  bool
}

// AppendNeed appends a frame that asks for ns.
func AppendNeed(dst []byte, ns []Need) []byte {
	dst = append(dst, byte(TypeNeed))
	dst = binary.AppendUvarint(dst, uint64(len(ns)))
	for _, n := range ns {
		dst = binary.LittleEndian.AppendUint64(dst, n.Key)
		dst = binary.AppendUvarint(dst, n.Bytes)
		dst = appendBool(dst, n.Lend)
		dst = appendBool(dst, n.Host)
	}
	return dst
}

// ParseNeed appends what a frame asks for to dst.
func ParseNeed(b []byte, dst []Need) ([]Need, error) {
	r := reader{b: b}
	r.kind(TypeNeed)
	for range r.count("needs", MaxTensors, 11) {
		dst = append(dst, Need{r.u64(), uint64(r.size("bytes of a buffer")), r.bool(), r.bool()})
	}
	return dst, r.end()
}

// Buffer says where the tensor of a key is received: at the start of Region, or,
// with Lend, where it lies at the worker; then there is no Region.
type Buffer struct {
	Key    uint64 // of the tensor
	Lend   bool
	Region Key
	Cap    uint64 // bytes
}

// Buffers answers a Need: either every buffer that was asked for, or
// Reason, why there is none.
type Buffers struct {
	Reason string
	List   []Buffer
}

// AppendBuffers appends b as a frame.
func AppendBuffers(dst []byte, b *Buffers) []byte {
	dst = append(dst, byte(TypeBuffers))
	dst = appendBytes(dst, clip(b.Reason, maxReason))
	dst = binary.AppendUvarint(dst, uint64(len(b.List)))
	for i := range b.List {
		e := &b.List[i]
		dst = binary.LittleEndian.AppendUint64(dst, e.Key)
		if dst = appendBool(dst, e.Lend); e.Lend {
			continue
		}
		dst = appendKey(dst, e.Region)
		dst = binary.AppendUvarint(dst, e.Cap)
	}
	return dst
}

// ParseBuffers parses a frame; the result does not alias it.
func ParseBuffers(b []byte) (*Buffers, error) {
	r := reader{b: b}
	r.kind(TypeBuffers)
	v := &Buffers{Reason: r.text("bytes of a reason", maxReason)}
	v.List = make([]Buffer, r.count("buffers", MaxTensors, 9))
	for i := range v.List {
		e := &v.List[i]
		if e.Key, e.Lend = r.u64(), r.bool(); !e.Lend {
			e.Region, e.Cap = r.key(), r.uvarint()
		}
	}
	return v, r.end()
}

// Pushed is what one request changes about a pushed tensor of its plan.
type Pushed struct {
	Rows  int64 // the first dimension; 1 where the tensor has none
	Bytes uint64
	Lent  bool // not written, but lent before the request
}

// Target is where an answer goes. Region and Off are sent only when they
// differ from the last request of the plan (Changed).
type Target struct {
	Bytes   uint64
	Changed bool
	Region  Key
	Off     uint64
}

// Request completes a push-pull at the server: its writes have landed. There is a loan,
// whose number is the low 32 bits of Seq, for each Push that says so, in this order.
type Request struct {
	Seq  uint64
	Plan uint64
	Push []Pushed
	Pull []Target
}

// AppendRequest appends q as a frame.
func AppendRequest(dst []byte, q *Request) []byte {
	dst = append(dst, byte(TypeRequest))
	dst = binary.LittleEndian.AppendUint64(dst, q.Seq)
	dst = binary.AppendUvarint(dst, q.Plan)
	dst = binary.AppendUvarint(dst, uint64(len(q.Push)))
	for _, p := range q.Push {
		dst = binary.AppendUvarint(dst, uint64(p.Rows))
		dst = binary.AppendUvarint(dst, p.Bytes)
		dst = appendBool(dst, p.Lent)
	}
	dst = binary.AppendUvarint(dst, uint64(len(q.Pull)))
	for i := range q.Pull {
		p := &q.Pull[i]
		dst = binary.AppendUvarint(dst, p.Bytes)
		if dst = appendBool(dst, p.Changed); !p.Changed {
			continue
		}
		dst = appendKey(dst, p.Region)
		dst = binary.AppendUvarint(dst, p.Off)
	}
	return dst
}

// ParseRequest parses a frame into q and reuses q's slices. It allocates only
// when they are too small or a key has a blob.
func ParseRequest(b []byte, q *Request) error {
	r := reader{b: b}
	r.kind(TypeRequest)
	q.Seq, q.Plan = r.u64(), r.uvarint()
	q.Push = q.Push[:0]
	for range r.count("pushed tensors", MaxTensors, 3) {
		q.Push = append(q.Push, Pushed{r.size("rows"), uint64(r.size("bytes of a tensor")), r.bool()})
	}
	q.Pull = q.Pull[:0]
	for range r.count("pulled tensors", MaxTensors, 2) {
		t := Target{Bytes: uint64(r.size("bytes of an answer")), Changed: r.bool()}
		if t.Changed {
			t.Region, t.Off = r.key(), r.uvarint()
		}
		q.Pull = append(q.Pull, t)
	}
	return r.end()
}

// Response completes the answer to the request Seq: its writes have landed. Stamps are the server's four of the trace, in nanoseconds of
// its own clock: request received, handed to the application, response
// started, response posted.
type Response struct {
	Seq    uint64
	Stamps [4]int64
}

// AppendResponse appends p as a frame.
func AppendResponse(dst []byte, p *Response) []byte {
	dst = append(dst, byte(TypeResponse))
	dst = binary.LittleEndian.AppendUint64(dst, p.Seq)
	for _, s := range p.Stamps {
		dst = binary.LittleEndian.AppendUint64(dst, uint64(s))
	}
	return dst
}

// ParseResponse parses a frame into p without allocating.
func ParseResponse(b []byte, p *Response) error {
	r := reader{b: b}
	r.kind(TypeResponse)
	p.Seq = r.u64()
	for i := range p.Stamps {
		p.Stamps[i] = int64(r.u64())
	}
	return r.end()
}

// Refused ends the request Seq without an answer. Unfit says that the server cannot
// take its tensors; else its application has refused it.
type Refused struct {
	Seq   uint64
	Unfit bool
	Text  string // why; at most MaxRefusal bytes travel
}

// AppendRefused appends p as a frame.
func AppendRefused(dst []byte, p *Refused) []byte {
	dst = append(dst, byte(TypeRefused))
	dst = binary.LittleEndian.AppendUint64(dst, p.Seq)
	dst = appendBool(dst, p.Unfit)
	return appendBytes(dst, clip(p.Text, MaxRefusal))
}

// ParseRefused parses a frame; the result does not alias it.
func ParseRefused(b []byte) (Refused, error) {
	r := reader{b: b}
	r.kind(TypeRefused)
	p := Refused{Seq: r.u64(), Unfit: r.bool(), Text: r.text("bytes of a refusal", MaxRefusal)}
	return p, r.end()
}

// AppendBye appends the frame that announces the end of a connection.
func AppendBye(dst []byte) []byte { return append(dst, byte(TypeBye)) }

// AppendUp appends the frame that says that its sender uses the connection, and,
// in a worker's, why it has taken no better way. A text that is too long is cut.
func AppendUp(dst []byte, why string) []byte {
	return appendBytes(append(dst, byte(TypeUp)), clip(why, maxReason))
}

// ParseUp parses a frame.
func ParseUp(b []byte) (why string, err error) {
	r := reader{b: b}
	r.kind(TypeUp)
	why = r.text("bytes of a reason", maxReason)
	return why, r.end()
}

// kind takes the type byte.
func (r *reader) kind(want Type) {
	if got := Type(r.u8()); r.err == nil && got != want {
		r.fail(fmt.Errorf("wire: frame of type %d, want %d", got, want))
	}
}

// size takes a number that must fit an int64: sizes are added and multiplied
// later, and torch counts in int64.
func (r *reader) size(what string) int64 {
	v := r.uvarint()
	if v > MaxSize {
		r.fail(fmt.Errorf("wire: %s %d is out of range", what, v))
		return 0
	}
	return int64(v)
}

// clip returns the first limit bytes of s, or fewer: no rune is cut.
func clip(s string, limit int) string {
	if len(s) <= limit {
		return s
	}
	for limit > 0 && !utf8.RuneStart(s[limit]) {
		limit--
	}
	return s[:limit]
}

// MaxRecalls bounds the push_pulls of one Recall or Recalled.
const MaxRecalls = 4096

// AppendRecall appends a Recall or Recalled of the push_pulls seqs as a frame.
func AppendRecall(dst []byte, t Type, seqs []uint64) []byte {
	dst = append(dst, byte(t))
	dst = binary.AppendUvarint(dst, uint64(len(seqs)))
	for _, s := range seqs {
		dst = binary.LittleEndian.AppendUint64(dst, s)
	}
	return dst
}

// ParseRecall parses a Recall or Recalled, and appends what is in it to dst.
func ParseRecall(b []byte, t Type, dst []uint64) ([]uint64, error) {
	r := reader{b: b}
	r.kind(t)
	for range r.count("push_pulls", MaxRecalls, 8) {
		dst = append(dst, r.u64())
	}
	return dst, r.end()
}

// Regroup says which runs of the members of the rail a worker knows, or is a server's answer.
type Regroup struct {
	Runs uint64 // a number for these runs; from a server 0 if it pairs nothing
	Back bool   // the server gives back what it has not delivered
}

// AppendRegroup appends v as a frame.
func AppendRegroup(dst []byte, v Regroup) []byte {
	return appendBool(binary.LittleEndian.AppendUint64(append(dst, byte(TypeRegroup)), v.Runs), v.Back)
}

// ParseRegroup parses a frame.
func ParseRegroup(b []byte) (v Regroup, err error) {
	r := reader{b: b}
	r.kind(TypeRegroup)
	v = Regroup{Runs: r.u64(), Back: r.bool()}
	return v, r.end()
}

// Bounds of a Channel.
const (
	MaxChannelName = 64
	MaxChannelText = 256 << 10
)

// Channel opens its sender's side of a stream channel, which Text describes, or
// closes it, and Text says why. What Text means is the sides' own matter.
type Channel struct {
	Name   string
	Closes bool
	Text   string // if it closes, empty: in good order
}

// AppendChannel appends c as a frame.
func AppendChannel(dst []byte, c *Channel) []byte {
	dst = append(dst, byte(TypeChannel))
	dst = appendBytes(dst, c.Name)
	dst = appendBool(dst, c.Closes)
	return appendBytes(dst, c.Text)
}

// ParseChannel parses a frame; the result does not alias it.
func ParseChannel(b []byte) (Channel, error) {
	r := reader{b: b}
	r.kind(TypeChannel)
	c := Channel{
		Name:   r.text("bytes of a channel's name", MaxChannelName),
		Closes: r.bool(),
		Text:   r.text("bytes of a channel's text", MaxChannelText),
	}
	if c.Name == "" {
		r.fail(errors.New("wire: a channel has no name"))
	}
	return c, r.end()
}
