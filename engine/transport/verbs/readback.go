package verbs

import (
	"errors"
	"fmt"
	"slices"
	"time"

	rdma "fserver/cshim/verbs"
	"fserver/engine/gpu"
	"fserver/engine/mem"
)

// readback has the GPU see what NICs of peers have written to it before a frame tells of it. The write and
// the completion of the frame behind it take different ways, to the GPU and to the CPU. A read of the GPU's memory by the
// same NIC takes the way of the writes and cannot overtake them: when it completes they are there. It is over a queue
// pair that is joined to itself, of a page that is kept for it, because what is read does not matter. So memory of tensors
// can be read by no peer. One read stands for all frames that came before it.
//
// The owner of the Fabric guards it after open.
type readback struct {
	dev     gpu.Device
	later   *gpu.Later
	qp      *rdma.QP
	page    uint64 // of the GPU
	from    region // of it
	buf     mem.Region
	to      rdma.Region // of buf
	pinned  bool        // to is registered
	begun   uint64      // reads that were posted
	done    uint64      // those that have completed
	wanted  bool        // another one is
	waits   []waiting
	broken  error // nothing can be read, until mend
	mending bool
}

// waiting is a Conn with a frame that waits for a read.
type waiting struct {
	c    *Conn
	read uint64
}

const (
	readRoom = 16   // reads under way
	pageLen  = 4096 // of the GPU; it gives more
	readLen  = 8

	pageLimit = 5 * time.Second
)

// openReadback makes it, at the opening of the Fabric.
func (f *Fabric) openReadback(d gpu.Device, later *gpu.Later) (err error) {
	b := &readback{dev: d, later: later}
	f.back = b
	if b.page, err = d.Alloc(pageLen); err != nil {
		return err
	}
	b.from = region{start: b.page, end: b.page + pageLen, cut: pageLen}
	r := mem.Region{Addr: uintptr(b.page), Len: pageLen, Dev: f.direct.at}
	if err = f.registerGPU(&b.from, r, rdma.LocalWrite|rdma.RemoteRead); err != nil {
		return err
	}
	if b.buf, err = mem.Map(pageLen); err != nil {
		return err
	}
	if b.to, err = f.dev.Register(uint64(b.buf.Addr), b.buf.Len, rdma.LocalWrite); err != nil {
		return err
	}
	b.pinned = true
	b.qp, err = f.loop(f.at)
	return err
}

// loop makes a queue pair of a port that is joined to itself.
func (f *Fabric) loop(at address) (*rdma.QP, error) {
	qp, err := f.dev.NewQP(f.cq, rdma.Room{Send: readRoom, Recv: 1, Port: at.number, Readable: true})
	if err != nil {
		return nil, err
	}
	own := at.gid()
	err = qp.Connect(rdma.Path{
		GID: own.Raw, QP: qp.Number, LID: at.port.LID, GIDIndex: own.Index, MTU: at.port.MTU,
		Global: at.across(own.Raw), Port: at.number, Timeout: f.path.Timeout, Retries: f.path.Retries,
		ServiceLevel: f.path.ServiceLevel, TrafficClass: f.path.TrafficClass, NotReady: 7,
	})
	if err != nil {
		_ = qp.Destroy()
		return nil, err
	}
	return qp, nil
}

// mend makes the queue pair anew when a read has failed: the addresses of the port may be others. A Conn that is set up
// calls it. It may block. If it fails too, the next Conn tries again.
func (f *Fabric) mend() {
	b := f.back
	if b == nil {
		return
	}
	var at address
	begun := false
	f.Owned(func() {
		if begun = b.broken != nil && !b.mending; begun {
			b.mending, at = true, f.at
		}
	})
	if !begun {
		return
	}
	qp, err := f.loop(at)
	f.Owned(func() {
		if b.mending = false; err == nil {
			b.qp, qp = qp, b.qp
			b.broken, b.wanted, b.done = nil, false, b.begun // nobody waits for a read of the other one
		}
	})
	if qp != nil {
		_ = qp.Destroy()
	}
}

// close gives back what openReadback took, also after an error. The page goes back when that makes nobody wait.
func (b *readback) close() {
	if b == nil {
		return
	}
	if b.qp != nil {
		_ = b.qp.Destroy()
	}
	if b.pinned {
		_ = b.to.Deregister()
	}
	_ = b.from.deregister()
	if b.buf.Len != 0 {
		_ = mem.Unmap(b.buf)
	}
	if page := b.page; page != 0 {
		b.later.Do(gpu.Memory, pageLen, func() { _ = b.dev.Free(page) })
	}
}

// wait waits until the page has gone back, for a while: a kernel may keep it from going.
func (b *readback) wait() {
	if b != nil {
		b.later.Wait(pageLimit)
	}
}

// after returns the number of the read that a frame of c waits for which has just come; 0: none, because c has ended
// with that.
func (b *readback) after(c *Conn) uint64 {
	if b.broken != nil {
		c.end(b.broken)
		return 0
	}
	b.wanted = true
	w := waiting{c, b.begun + 1}
	if !slices.Contains(b.waits, w) {
		b.waits = append(b.waits, w)
	}
	return w.read
}

// passed reports whether a read has completed; 0 is none.
func (b *readback) passed(read uint64) bool { return read == 0 || read <= b.done }

// post posts a read if one is wanted and there is room.
func (b *readback) post(f *Fabric) {
	if b == nil || !b.wanted || b.broken != nil || b.begun-b.done == readRoom {
		return
	}
	b.wanted = false
	f.batch[0] = rdma.Request{
		ID: b.begun + 1, Remote: b.page, RKey: b.from.mrs[0].RKey, Op: rdma.Read, Flags: rdma.Signaled,
		From: rdma.Piece{Address: uint64(b.buf.Addr), Len: readLen, LKey: b.to.LKey},
	}
	if _, err := b.qp.PostSend(f.batch[:1]); err != nil {
		b.fail(err)
		return
	}
	b.begun++
	f.counts.Readbacks++
}

// completed takes the completion of a read.
func (b *readback) completed(f *Fabric, w *rdma.Completion) {
	if w.Status != rdma.Success {
		b.fail(errors.New(w.Status.String()))
		return
	}
	b.done = w.ID
	b.waits = slices.DeleteFunc(b.waits, func(w waiting) bool {
		if w.read <= b.done {
			f.push(w.c)
		}
		return w.read <= b.done
	})
}

// fail ends the Conns whose frames can never be given, and, until mend, all that a marked frame comes on.
func (b *readback) fail(err error) {
	if b.broken != nil {
		return
	}
	b.broken = fmt.Errorf("read back what was written to %v by GPUDirect: %w (check the GPU with nvidia-smi; %s=0 does without GPUDirect)", mem.GPU(b.dev.Ordinal()), err, gpuDirect)
	for _, w := range b.waits {
		w.c.rx.n, w.c.rx.deaf = 0, true
		w.c.end(b.broken)
	}
	b.waits = nil
}
