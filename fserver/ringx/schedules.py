"""The order in which ranks exchange and compute. No autograd here: tensors in, tensors out.

Two things may travel: queries (the forward of X1 and X2, whose parts of an answer are then added
up at the owner) or keys and values (all else; ring.py and copies.py have other ways for them, and
heads.py exchanges heads). What travels has the sequence first, so that what
several ranks sent is one sequence without a copy: queries ``[S, B, H, D]``, keys and values
together ``[S, B, 2, Hkv, D]``.

Everything that is started is waited for on every rank, also by the owner who only sent, before
its buffer is let go of; on a GPU the stream waits, not the CPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from . import kernels
from .combine import Parts
from .kernels import Given, Pair, Triple, accumulator
from .ranks import Collective, Ranks
from .window import Window


@dataclass(frozen=True)
class Job:
    """What a schedule needs beside the tensors, the same on all ranks."""

    ranks: Ranks
    blocks: Blocks
    scale: float
    q_lengths: Sequence[int]  # local, by rank
    k_lengths: Sequence[int]
    reduce_dtype: torch.dtype
    out_dtype: torch.dtype  # of forward's out, at least: what is added up here has no other
    window: Window | None = None  # if ranks may copy from and to each other's memory
    ends: tuple[int, ...] | None = None  # of packed documents in the whole sequence, from 0 on
    span: int | None = None  # how many keys a row sees, if it does not see all before it

    def block(self, owner: int, rows: int, keys: int) -> Block | None:
        """The work of so many rows of mine with so many keys of an owner."""
        return self.blocks(self.ranks.rank, owner, rows, keys)


# Which of my rows see which of an owner's keys


class Block(NamedTuple):
    """A part of the work: these rows, these keys, and whether the mask is causal between them."""

    rows: slice
    keys: slice
    causal: bool


Blocks = Callable[[int, int, int, int], "Block | None"]  # my rank, the owner's; my rows, its keys


def full(rank: int, owner: int, rows: int, keys: int) -> Block | None:
    """No mask."""
    return Block(slice(0, rows), slice(0, keys), False)


def contiguous(rank: int, owner: int, rows: int, keys: int) -> Block | None:
    """Causal, part r of the sequence on rank r."""
    return None if owner > rank else Block(slice(0, rows), slice(0, keys), owner == rank)


def zigzag(rank: int, owner: int, rows: int, keys: int) -> Block | None:
    """Causal, chunks r and 2N-1-r on rank r: each block but the own one is half of the square."""
    if owner == rank:
        return Block(slice(0, rows), slice(0, keys), True)
    if owner < rank:
        return Block(slice(0, rows), slice(0, keys // 2), False)
    return Block(slice(rows // 2, rows), slice(0, keys), False)


# Pieces of schedules

# How many parts of an answer, or of dq, are kept apart: where keys are gathered there is memory.
LEAST, FASTEST = 2, 5


def _pack(k: Tensor, v: Tensor) -> Tensor:
    return torch.stack((k.transpose(0, 1), v.transpose(0, 1)), 2)


def _unpack(kv: Tensor) -> tuple[Tensor, Tensor]:
    return kv[:, :, 0].transpose(0, 1), kv[:, :, 1].transpose(0, 1)


def _put(dkv: Tensor, keys: slice, dk: Tensor, dv: Tensor) -> None:
    """Writes what these keys got."""
    dkv[keys, :, 0] = dk.transpose(0, 1)
    dkv[keys, :, 1] = dv.transpose(0, 1)


def _in_turn(
    job: Job, send: Callable[[int], tuple[Tensor, Collective]], ahead: int
) -> Iterator[tuple[int, Tensor]]:
    """Gives (owner, its tensor) for all owners. The first broadcast starts at once; so many more
    are under way while the caller works on one."""
    size = job.ranks.size
    coming = deque(send(owner) for owner in range(min(max(ahead, 1), size)))

    def turns() -> Iterator[tuple[int, Tensor]]:
        for owner in range(size):
            tensor, work = coming.popleft() if coming else send(owner)
            work.wait()
            if ahead and owner + ahead < size:
                coming.append(send(owner + ahead))
            yield owner, tensor
            del tensor, work

    return turns()


def _head_start(device: torch.device) -> None:
    """Lets collectives that have been started get a place on the GPU before the next block, which
    leaves them none until its own end. NCCL's begin some microseconds after what was enqueued
    before them has ended, and a block at once; so there are some small kernels before the block."""
    if device.type == "cuda":
        small = torch.empty(1, device=device)
        for _ in range(4):
            small.zero_()


# So many broadcasts are under way: one that did not get its place before a block still has the
# time of the next block.
KEYS_AHEAD = 2


def broadcast_keys(
    job: Job, k: Tensor, v: Tensor, ahead: bool = True
) -> Iterator[tuple[int, Tensor]]:
    mine = _pack(k, v)

    def send(owner: int) -> tuple[Tensor, Collective]:
        kv = mine
        if owner != job.ranks.rank:
            kv = torch.empty(
                (job.k_lengths[owner], *mine.shape[1:]), dtype=k.dtype, device=k.device
            )
        return kv, job.ranks.broadcast(kv, owner)

    return _in_turn(job, send, KEYS_AHEAD if ahead else 0)


# Queries travel: X1, X2


def queries_forward(job: Job, q: Tensor, k: Tensor, v: Tensor, *, overlap: bool) -> Pair:
    """Everybody answers the queries of each owner in turn, and the answers are added up there.

    With `overlap`, while one owner's are answered the next one's are on their way here, the
    maximum for the last one is being found and the sum for the one before it.
    """
    ranks, dim = job.ranks, q.shape[-1]
    lag = 1 if overlap else 0
    answered: deque[tuple[int, Tensor, Tensor, Tensor, Collective]] = deque()
    summed: deque[tuple[int, Tensor, Tensor, Collective]] = deque()
    result: list[Tensor] = []

    def send(owner: int) -> tuple[Tensor, Collective]:
        if owner == ranks.rank:
            rows = q.transpose(0, 1).contiguous()
        else:
            shape = (job.q_lengths[owner], q.shape[0], *q.shape[2:])
            rows = torch.empty(shape, dtype=q.dtype, device=q.device)
        return rows, ranks.broadcast(rows, owner)

    def weigh() -> None:
        """Numerators and denominators of one owner's rows, in one buffer, to the owner."""
        owner, out, lse, peak, found = answered.popleft()
        found.wait()
        weight = (lse - peak).exp_().permute(2, 0, 1)[..., None]
        flat = torch.empty(weight.numel() * (dim + 1), dtype=job.reduce_dtype, device=q.device)
        above, below = _parts(flat, weight.shape, dim)
        torch.mul(out.transpose(0, 1), weight, out=above)
        below.copy_(weight)
        summed.append((owner, flat, peak, ranks.sum_at(owner, flat)))

    def settle() -> None:
        owner, flat, peak, done = summed.popleft()
        done.wait()
        if owner == ranks.rank:
            shape = (q.shape[1], q.shape[0], q.shape[2], 1)
            above, below = (t.to(peak.dtype) for t in _parts(flat, shape, dim))
            lse = peak + below[..., 0].log().permute(1, 2, 0)
            result.extend(((above / below).transpose(0, 1), lse))

    for owner, rows in _in_turn(job, send, lag):
        block = job.blocks(owner, ranks.rank, rows.shape[0], k.shape[1])
        keys = slice(0, 0) if block is None else block.keys
        causal = block is not None and block.causal
        out, lse = kernels.forward(rows.transpose(0, 1), k[:, keys], v[:, keys], causal, job.scale)
        peak = lse.clone(memory_format=torch.contiguous_format)
        answered.append((owner, out, lse, peak, ranks.maximum(peak)))
        if len(answered) > lag:
            weigh()
        if len(summed) > lag:
            settle()
    while answered:
        weigh()
    while summed:
        settle()
    return result[0], result[1]


def _parts(flat: Tensor, shape: Sequence[int], dim: int) -> Pair:
    """Numerators [S, B, H, D] and denominators [S, B, H, 1] in their common buffer."""
    count = flat.numel() // (dim + 1) * dim
    return flat[:count].view(*shape[:-1], dim), flat[count:].view(shape)


# Keys and values travel, from one owner after the other: X4, and backward of X1 and X2


Arrivals = Callable[[Job, Tensor, Tensor], Iterator[tuple[int, Tensor]]]
"""Gives (owner, its keys and values) for all owners. The first keys are on their way at once."""


def owners_forward(
    job: Job, q: Tensor, k: Tensor, v: Tensor, *, arrive: Arrivals, most: int = LEAST
) -> Pair:
    """Works on the own block while the first keys travel, then on each owner's."""
    arrivals = arrive(job, k, v)
    answers = Parts(q.shape[1], accumulator(q.dtype), most)
    _head_start(q.device)
    _own_forward(job, answers, q, k, v)
    for owner, kv in arrivals:
        block = job.block(owner, q.shape[1], kv.shape[0])
        if owner != job.ranks.rank and block is not None:
            _head_start(q.device)
            _attend(job, answers, q, *_unpack(kv), block)
        del kv  # before the next one has to have a place
    return _answer(job, answers)


def broadcast_backward(job: Job, given: Given, *, ahead: bool, behind: bool) -> Triple:
    """dq stays; dk and dv of each owner are added up there, with `behind` while the next owner's
    are computed, and the last one's while the rank does half of its own block. That has its turn
    among the others: who had nothing to do in his turn would wait for the sum."""
    ranks = job.ranks
    arrivals = broadcast_keys(job, given.k, given.v, ahead)
    rows = given.q.shape[1]
    dq = Parts(rows, accumulator(given.q.dtype), LEAST)
    under_way: deque[tuple[Tensor, Collective]] = deque()
    rest: Block | None = None
    for owner, kv in arrivals:
        dkv = torch.empty(kv.shape, dtype=job.reduce_dtype, device=kv.device)
        block = job.block(owner, rows, kv.shape[0])
        if block is not None:
            _head_start(kv.device)
            if owner == ranks.rank and behind:
                dk, dv, rest = _own_backward(job, dq, given)
            else:
                dk, dv = _more_grads(job, dq, given, kv, block)
            _put(dkv, block.keys, dk, dv)
        if owner == ranks.rank:
            mine = dkv
        _zero_between(dkv, [] if block is None else [block.keys])
        under_way.append((dkv, ranks.sum_at(owner, dkv)))
        del kv, dkv
        while len(under_way) > behind:
            under_way.popleft()[1].wait()
    _finish(job, dq, given, rest, [work for _, work in under_way], mine)
    return dq.result(given.q.dtype)[0], *_unpack(mine)


# Keys and values travel, all at once: X3


class Call(NamedTuple):
    """One call of a kernel: of my rows, with these of the keys that were gathered."""

    rows: slice
    keys: list[slice]


def planned(job: Job, rows: int, keys: int) -> list[Call]:
    """The calls beside the own block: one for what the same rows see of all owners before me, and
    one of all behind. So there are three, however many ranks there are."""
    rank, calls = job.ranks.rank, list[Call]()
    for owner in range(job.ranks.size):
        block = job.block(owner, rows, keys)
        if owner == rank or block is None:
            continue
        seen = slice(owner * keys + block.keys.start, owner * keys + block.keys.stop)
        if owner in (0, rank + 1):  # the first before me, the first behind
            calls.append(Call(block.rows, [seen]))
        elif calls[-1].keys[-1].stop == seen.start:
            calls[-1].keys[-1] = slice(calls[-1].keys[-1].start, seen.stop)
        else:
            calls[-1].keys.append(seen)
    return calls


def _gather_keys(job: Job, k: Tensor, v: Tensor) -> tuple[Tensor, Collective]:
    mine = _pack(k, v)
    shape = job.ranks.size * mine.shape[0], *mine.shape[1:]
    everybody = torch.empty(shape, dtype=k.dtype, device=k.device)
    return everybody, job.ranks.gather(everybody, mine)


EVERY = slice(None)


def _pick(kv: Tensor, call: Call) -> Tensor:
    """The keys of a call as one sequence."""
    picked = [kv[keys] for keys in call.keys]
    return picked[0] if len(picked) == 1 else torch.cat(picked)


def gather_forward(job: Job, q: Tensor, k: Tensor, v: Tensor) -> Pair:
    """Works on the own block while all keys travel, then on the others."""
    kv, here = _gather_keys(job, k, v)
    answers = Parts(q.shape[1], accumulator(q.dtype), FASTEST)
    _head_start(q.device)
    _own_forward(job, answers, q, k, v)
    here.wait()
    for call in planned(job, q.shape[1], k.shape[1]):
        _attend(job, answers, q, *_unpack(_pick(kv, call)), Block(call.rows, EVERY, False))
    return _answer(job, answers)


def gather_backward(job: Job, given: Given) -> Triple:
    """dk and dv of all keys are written into one buffer, whose sum over the ranks is scattered.
    Half of the own block comes first, while the keys travel, and half last, while the sum does."""
    keys = given.k.shape[1]
    kv, here = _gather_keys(job, given.k, given.v)
    dq = Parts(given.q.shape[1], accumulator(given.q.dtype), FASTEST)
    _head_start(kv.device)
    dk, dv, rest = _own_backward(job, dq, given)
    dkv = torch.empty(kv.shape, dtype=job.reduce_dtype, device=kv.device)
    written = [slice(job.ranks.rank * keys, (job.ranks.rank + 1) * keys)]
    _put(dkv, written[0], dk, dv)
    here.wait()
    for call in planned(job, given.q.shape[1], keys):
        dk, dv = _more_grads(job, dq, given, _pick(kv, call), Block(call.rows, EVERY, False))
        lengths = [part.stop - part.start for part in call.keys]
        for part, *got in zip(call.keys, dk.split(lengths, 1), dv.split(lengths, 1), strict=True):
            _put(dkv, part, *got)
        written += call.keys
    _zero_between(dkv, written)
    mine = dkv.new_empty(keys, *dkv.shape[1:])
    _finish(job, dq, given, rest, [job.ranks.scatter_sum(mine, dkv)], mine)
    return dq.result(given.q.dtype)[0], *_unpack(mine)


def _finish(
    job: Job, dq: Parts, given: Given, rest: Block | None, sums: list[Collective], mine: Tensor
) -> None:
    """Does what is left of the own block while the last sums are under way, and adds it to mine."""
    if rest:
        _head_start(mine.device)
        own = _grads(job, dq, given, rest)
    for work in sums:
        work.wait()
    if rest:
        for i, got in enumerate(own):
            mine[rest.keys, :, i] += got.transpose(0, 1)


def _zero_between(dkv: Tensor, written: list[slice]) -> None:
    """Of keys that nobody here sees, zero is what they get."""
    end = 0
    for keys in sorted(written, key=lambda keys: keys.start):
        dkv[end : keys.start].zero_()
        end = keys.stop
    dkv[end:].zero_()


# One block


def _answer(job: Job, answers: Parts) -> Pair:
    out, lse = answers.result(job.out_dtype)
    assert lse is not None
    return out, lse


def _own_forward(job: Job, answers: Parts, q: Tensor, k: Tensor, v: Tensor) -> None:
    block = job.block(job.ranks.rank, q.shape[1], k.shape[1])
    assert block is not None
    _attend(job, answers, q, k, v, block)


# From so many rows on, half of the own block takes longer than it costs to call a kernel once more.
ROWS_IN_TWO = 4096


def _own_backward(job: Job, dq: Parts, given: Given) -> tuple[Tensor, Tensor, Block | None]:
    """Gives dk and dv of the own block, or of half of it, and what is left of it then."""
    rows, keys = given.q.shape[1], given.k.shape[1]
    block = job.block(job.ranks.rank, rows, keys)
    assert block is not None
    half = rows // 2
    enough = given.q.device.type == "cpu" or rows >= ROWS_IN_TWO
    if job.ranks.size == 1 or not enough or rows % 2:
        return *_grads(job, dq, given, block), None
    second = slice(half, rows)
    if not block.causal:
        first = Block(slice(0, half), block.keys, False)
        return *_grads(job, dq, given, first), Block(second, block.keys, False)
    # Both halves with their own keys, which is causal for each, as if they were a batch.
    dout, q, k, v, out, lse = given
    pairs = [t.unflatten(1, (2, half)).flatten(0, 1) for t in (dout, q, k, v, out)]
    pairs.append(lse.unflatten(2, (2, half)).transpose(1, 2).flatten(0, 1))
    found = kernels.backward(Given(*pairs), True, job.scale)
    own, dk, dv = (t.unflatten(0, (-1, 2)).flatten(1, 2) for t in found)
    dq.add(block.rows, own)
    return dk, dv, Block(second, slice(0, half), False)


def _attend(job: Job, answers: Parts, q: Tensor, k: Tensor, v: Tensor, block: Block) -> None:
    """Takes in what the keys of a block give."""
    rows, keys, causal = block
    answers.add(rows, *kernels.forward(q[:, rows], k[:, keys], v[:, keys], causal, job.scale))


def _grads(job: Job, dq: Parts, given: Given, block: Block) -> Pair:
    """Gives dk and dv of a block. out and lse are the global ones."""
    rows, keys, causal = block
    dout, q, k, v, out, lse = given
    some = (dout[:, rows], q[:, rows], k[:, keys], v[:, keys], out[:, rows], lse[:, :, rows])
    own, dk, dv = kernels.backward(Given(*some), causal, job.scale)
    dq.add(rows, own)
    return dk, dv


def _more_grads(job: Job, dq: Parts, given: Given, kv: Tensor, block: Block) -> Pair:
    """The same for keys that have come."""
    k, v = _unpack(kv)
    return _grads(job, dq, given._replace(k=k, v=v), block)
