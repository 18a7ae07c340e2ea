package wire

import (
	"encoding/binary"
	"errors"
	"math"
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
	Unicast bool   // they are sent to this server alone, and are in no batch
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

func (p *Plan) walk(c *codec) {
	number(c, "plan", &p.Number, math.MaxUint64)
	c.words("bytes of a channel's name", &p.Channel, MaxChannelName)
	c.flag(&p.Unicast)
	list(c, "pushed tensors", &p.Push, MaxTensors, 10, func(t *PlanTensor) {
		c.word(&t.Key)
		octet(c, "type", &t.DType, math.MaxUint8)
		if t.NDim = c.length("dimensions", t.NDim, MaxDims, 1); c.parses && t.NDim > 1 {
			t.Tail = make([]int64, t.NDim-1)
		}
		for i := range t.Tail {
			number(c, "dimension", &t.Tail[i], MaxSize)
		}
	})
	list(c, "pulled tensors", &p.Pull, MaxTensors, 9, func(t *PlanPull) {
		c.word(&t.Key)
		octet(c, "type", &t.DType, math.MaxUint8)
	})
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

// Needs are those of one frame.
type Needs []Need

func (v *Needs) walk(c *codec) {
	list(c, "needs", (*[]Need)(v), MaxTensors, 11, func(n *Need) {
		c.word(&n.Key)
		number(c, "bytes of a buffer", &n.Bytes, MaxSize)
		c.flag(&n.Lend)
		c.flag(&n.Host)
	})
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

func (v *Buffers) walk(c *codec) {
	c.reason("bytes of a reason", &v.Reason, maxReason)
	list(c, "buffers", &v.List, MaxTensors, 9, func(b *Buffer) {
		c.word(&b.Key)
		if c.flag(&b.Lend); b.Lend {
			return
		}
		if c.parses {
			b.Region = c.key()
		} else {
			c.out = appendKey(c.out, b.Region)
		}
		number(c, "capacity", &b.Cap, math.MaxUint64)
	})
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
		q.Push = append(q.Push, Pushed{int64(r.number("rows", MaxSize)), r.number("bytes of a tensor", MaxSize), r.bool()})
	}
	q.Pull = q.Pull[:0]
	for range r.count("pulled tensors", MaxTensors, 2) {
		t := Target{Bytes: r.number("bytes of an answer", MaxSize), Changed: r.bool()}
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

// Refused ends the request Seq without an answer.
type Refused struct {
	Seq  uint64
	Why  uint8
	Text string // for people; at most MaxRefusal bytes travel
}

// The values of Refused.Why.
const (
	RefusedByApp  = iota // the application of the server has refused it
	RefusedUnfit         // the server cannot take its tensors
	RefusedClosed        // it is for a channel that is closed at the server
)

func (p *Refused) walk(c *codec) {
	c.word(&p.Seq)
	octet(c, "cause of a refusal", &p.Why, RefusedClosed)
	c.reason("bytes of a refusal", &p.Text, MaxRefusal)
}

// MaxRecalls bounds the push_pulls of one Recall or Recalled.
const MaxRecalls = 4096

// Seqs are the push_pulls of a Recall or Recalled.
type Seqs []uint64

func (v *Seqs) walk(c *codec) { list(c, "push_pulls", (*[]uint64)(v), MaxRecalls, 8, c.word) }

// Regroup says which runs of the members of the rail a worker knows, or is a server's answer.
type Regroup struct {
	Runs uint64 // a number for these runs; from a server 0 if it pairs nothing
	Back bool   // the server gives back what it has not delivered
}

func (v *Regroup) walk(c *codec) {
	c.word(&v.Runs)
	c.flag(&v.Back)
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

func (v *Channel) walk(c *codec) {
	c.words("bytes of a channel's name", &v.Name, MaxChannelName)
	c.flag(&v.Closes)
	c.words("bytes of a channel's text", &v.Text, MaxChannelText)
	if v.Name == "" {
		c.fail(errors.New("wire: a channel has no name"))
	}
}
