"""How a rank computes: on its own block while keys and values travel, then on those that have come.

An exchange brings the keys and calls `work` with each block. In backward `work` returns the
gradients of the keys, and the exchange takes them to the owners. No autograd: tensors in, tensors
out.

What travels has the sequence first, so that the keys that several ranks sent are one sequence
without a copy: queries ``[S, B, H, D]``, keys and values together ``[S, B, 2, Hkv, D]``.

Every transfer that is started is waited for on every rank, also by the owner, which only sent,
before its buffer is freed; on a GPU the stream waits, not the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import kernels
from .combine import Parts
from .kernels import HALVES, Given, Pair, Triple, accumulator
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

    def block(self, rank: int, owner: int) -> Block | None:
        """The work of a rank's rows with an owner's keys."""
        return self.blocks(rank, owner, self.q_lengths[rank], self.k_lengths[owner])

    def own(self, in_two: bool, device: torch.device) -> tuple[Block, Block | None]:
        """Returns the own block and None. With `in_two`, a long block is divided: the first half,
        and the second one for the time in which the last gradients travel."""
        rank = self.ranks.rank
        block, rows = self.block(rank, rank), self.q_lengths[rank]
        assert block is not None
        enough = device.type == "cpu" or rows >= ROWS_IN_TWO
        if not (in_two and self.ranks.size > 1 and enough and rows % 2 == 0):
            return block, None
        first, second = slice(0, rows // 2), slice(rows // 2, rows)
        if block.mask:  # first both halves with their own keys
            return block._replace(mask=HALVES), Block(second, first)
        return block._replace(rows=first), block._replace(rows=second)


ROWS_IN_TWO = 4096
"""From so many rows on, half of the own block takes longer than one more call of a kernel costs."""


# Which rows of a rank see which of an owner's keys


class Block(NamedTuple):
    """A part of the work, one call of a kernel: these of my rows and these keys."""

    rows: slice | Tensor
    keys: Any  # a slice of an owner's, or in the terms of an exchange
    mask: Any = False  # as kernels have it


Blocks = Callable[[int, int, int, int], "Block | None"]  # my rank, the owner's; my rows, its keys


def full(rank: int, owner: int, rows: int, keys: int) -> Block | None:
    """No mask."""
    return Block(slice(0, rows), slice(0, keys))


def contiguous(rank: int, owner: int, rows: int, keys: int) -> Block | None:
    """Causal, part r of the sequence on rank r."""
    return None if owner > rank else Block(slice(0, rows), slice(0, keys), owner == rank)


def zigzag(rank: int, owner: int, rows: int, keys: int) -> Block | None:
    """Causal, chunks r and 2N-1-r on rank r: each block but the own one is half of the square."""
    if owner == rank:
        return Block(slice(0, rows), slice(0, keys), True)
    if owner < rank:
        return Block(slice(0, rows), slice(0, keys // 2))
    return Block(slice(rows // 2, rows), slice(0, keys))


# The work of a rank

Work = Callable[[Block, Tensor, Tensor], Any]
"""Computes a block with these k and v. In backward it returns their dk and dv. The exchange lets go
of all these before it takes memory for more."""

Exchange = Callable[[Job, Tensor, Tensor, Work, bool], Any]
"""A function of job, k, v, work, and whether this is a backward. A backward returns dk and dv of
the own keys. Calls of `work` are the work of this rank, one block after the other."""

LEAST, FASTEST = 2, 5
"""Parts of out, or of dq, that are kept apart: two for the least memory, five where all keys are in
memory anyhow."""


def forward(
    job: Job, q: Tensor, k: Tensor, v: Tensor, exchange: Exchange, most: int = FASTEST
) -> Pair:
    answers = Parts(q.shape[1], accumulator(q.dtype), most)

    def work(block: Block, k: Tensor, v: Tensor) -> None:
        answers.add(block.rows, *kernels.forward(q[:, block.rows], k, v, block.mask, job.scale))

    exchange(job, k, v, work, False)
    out, lse = answers.result(job.out_dtype)
    assert lse is not None
    return out, lse


def backward(job: Job, given: Given, exchange: Exchange, most: int = FASTEST) -> Triple:
    """out and lse are the global ones."""
    dout, q, k, v, out, lse = given
    dq = Parts(q.shape[1], accumulator(q.dtype), most)

    def work(block: Block, k: Tensor, v: Tensor) -> Pair:
        rows, mask = block.rows, block.mask
        some = Given(dout[:, rows], q[:, rows], k, v, out[:, rows], lse[:, :, rows])
        own, dk, dv = kernels.backward(some, mask, job.scale)
        dq.add(rows, own)
        return dk, dv

    dk, dv = exchange(job, k, v, work, True)
    return dq.result(q.dtype)[0], dk, dv


def finish(
    work: Work, half: Block | None, k: Tensor, v: Tensor, sums: Iterable[Collective], mine: Tensor
) -> Pair:
    """Works on the half of the own block that was left, if there is one, while the last sums
    travel. Returns dk and dv of the own keys, whose sums arrive in `mine`."""
    if half:
        head_start(k.device)
        got = work(half, k[:, half.keys], v[:, half.keys])
    for each in sums:
        each.wait()
    if half:
        add(mine, half.keys, *got)
    return unpack(mine)


HEAD_START = 10_000
"""Cycles of the GPU, some 6 us."""


def head_start(device: torch.device) -> None:
    """Lets collectives that have been started get a place on the GPU before the next block, which
    leaves them none until its own end. NCCL's begin some microseconds after what was enqueued
    before them has ended, and a block at once; so the stream waits a little before the block."""
    if device.type == "cuda":
        torch.cuda._sleep(HEAD_START)


# Keys and values, and their gradients, as they travel


def pack(k: Tensor, v: Tensor) -> Tensor:
    return torch.stack((k.transpose(0, 1), v.transpose(0, 1)), 2)


def unpack(kv: Tensor) -> Pair:
    return kv[:, :, 0].transpose(0, 1), kv[:, :, 1].transpose(0, 1)


def put(dkv: Tensor, keys: slice, dk: Tensor, dv: Tensor) -> None:
    """Writes what these keys got."""
    dkv[keys, :, 0] = dk.transpose(0, 1)
    dkv[keys, :, 1] = dv.transpose(0, 1)


def add(dkv: Tensor, keys: slice, dk: Tensor, dv: Tensor) -> None:
    """Adds what else these keys got."""
    dkv[keys, :, 0] += dk.transpose(0, 1)
    dkv[keys, :, 1] += dv.transpose(0, 1)


def zero_between(dkv: Tensor, written: list[slice]) -> None:
    """Of keys that nobody here sees, zero is what they get."""
    end = 0
    for keys in [*sorted(written, key=lambda keys: keys.start), slice(len(dkv), None)]:
        if end < keys.start:
            dkv[end : keys.start].zero_()
        end = keys.stop
