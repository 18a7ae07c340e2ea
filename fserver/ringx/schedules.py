"""How a rank computes: on its own block while keys and values travel, then on those that have come.

An `Exchange` brings the keys, and takes their gradients to the owners. Here is the work between. No
autograd: tensors in, tensors out.

What travels has the sequence first, so that the keys that several ranks sent are one sequence
without a copy: queries ``[S, B, H, D]``, keys and values together ``[S, B, 2, Hkv, D]``.

Every transfer that is started is waited for on every rank, also by the owner, which only sent,
before its buffer is freed; on a GPU the stream waits, not the CPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import kernels
from .combine import Parts
from .kernels import Given, Pair, Segments, Triple, accumulator
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

    def own_block(self, in_two: bool) -> Block:
        block = self.block(self.ranks.rank, self.ranks.rank)
        assert block is not None
        return block._replace(in_two=in_two)


# Which rows of a rank see which of an owner's keys


class Block(NamedTuple):
    """A part of the work, one call of a kernel: these of my rows and these keys."""

    rows: slice | Tensor
    keys: Any  # a slice of an owner's, or in the terms of an exchange
    mask: bool | Segments = False  # whether it is causal, or the documents
    in_two: bool = False  # the own block, of which backward may leave a half until the end


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


# How keys and values get here


Arrivals = Iterator[tuple[Block, Tensor, Tensor]]


Rest = tuple[slice, Pair] | None
"""Some of the own keys, and what else is to be added to their dk and dv."""

LEAST, FASTEST = 2, 5
"""Parts that are kept apart: two for the least memory, five where all keys are in memory anyhow."""


class Exchange(ABC):
    """Brings keys and values here, and takes their gradients to the owners. To make one starts the
    first transfer."""

    most = FASTEST  # so many parts of out, or of dq, are kept apart
    mine: Tensor  # dk and dv of the own keys, as they travel

    def __init__(self, job: Job, k: Tensor, v: Tensor, *, backward: bool):
        self.job, self.k, self.v, self.backward = job, k, v, backward
        self.sums = deque[Collective]()  # of gradients, under way

    @abstractmethod
    def arrivals(self) -> Arrivals:
        """Gives the blocks of this rank, each with its k and v. The caller lets go of them before
        it asks for more."""

    @abstractmethod
    def give(self, block: Block, dk: Tensor, dv: Tensor) -> None:
        """Takes the gradients of a block's keys."""

    def end(self, rest: Rest) -> Pair:
        """Returns dk and dv of the own keys, after all blocks."""
        for work in self.sums:
            work.wait()
        if rest:
            add(self.mine, rest[0], *rest[1])
        return unpack(self.mine)


def forward(job: Job, q: Tensor, k: Tensor, v: Tensor, exchange: Callable[..., Exchange]) -> Pair:
    travelling = exchange(job, k, v, backward=False)
    answers = Parts(q.shape[1], accumulator(q.dtype), travelling.most)
    for block, k, v in travelling.arrivals():
        answers.add(block.rows, *kernels.forward(q[:, block.rows], k, v, block.mask, job.scale))
        del k, v
    out, lse = answers.result(job.out_dtype)
    assert lse is not None
    return out, lse


def backward(job: Job, given: Given, exchange: Callable[..., Exchange]) -> Triple:
    """Half of the own block comes last, while the last gradients travel, if the exchange has it."""
    travelling = exchange(job, given.k, given.v, backward=True)
    dq = Parts(given.q.shape[1], accumulator(given.q.dtype), travelling.most)
    half: Block | None = None
    for block, k, v in travelling.arrivals():
        here = given._replace(k=k, v=v)
        if block.in_two and _worth_two(job, given.q):
            dk, dv, half = _first_half(job, dq, here, block)
        else:
            dk, dv = _grads(job, dq, here, block)
        travelling.give(block, dk, dv)
        del k, v, here, dk, dv
    rest: Rest = None
    if half:
        head_start(given.q.device)
        here = given._replace(k=given.k[:, half.keys], v=given.v[:, half.keys])
        rest = half.keys, _grads(job, dq, here, half)
    dk, dv = travelling.end(rest)
    return dq.result(given.q.dtype)[0], dk, dv


# One call of a kernel


def _grads(job: Job, dq: Parts, given: Given, block: Block) -> Pair:
    """Gives dk and dv of a block's keys. out and lse are the global ones."""
    (dout, q, k, v, out, lse), rows, mask = given, block.rows, block.mask
    some = Given(dout[:, rows], q[:, rows], k, v, out[:, rows], lse[:, :, rows])
    own, dk, dv = kernels.backward(some, mask, job.scale)
    dq.add(rows, own)
    return dk, dv


ROWS_IN_TWO = 4096
"""From so many rows on, half of the own block takes longer than one more call of a kernel costs."""


def _worth_two(job: Job, q: Tensor) -> bool:
    rows = q.shape[1]
    enough = q.device.type == "cpu" or rows >= ROWS_IN_TWO
    return job.ranks.size > 1 and enough and rows % 2 == 0


def _first_half(job: Job, dq: Parts, given: Given, own: Block) -> tuple[Tensor, Tensor, Block]:
    """Gives dk and dv of half of the own block, and what is left of it."""
    half, keys = given.q.shape[1] // 2, given.k.shape[1]
    second = slice(half, 2 * half)
    if not own.mask:
        dk, dv = _grads(job, dq, given, Block(slice(0, half), own.keys))
        return dk, dv, Block(second, slice(0, keys))
    # Both halves with their own keys, which is causal for each, as if they were a batch.
    dout, q, k, v, out, lse = given
    pairs = [t.unflatten(1, (2, half)).flatten(0, 1) for t in (dout, q, k, v, out)]
    pairs.append(lse.unflatten(2, (2, half)).transpose(1, 2).flatten(0, 1))
    found = kernels.backward(Given(*pairs), True, job.scale)
    of_rows, dk, dv = (t.unflatten(0, (-1, 2)).flatten(1, 2) for t in found)
    dq.add(slice(0, 2 * half), of_rows)
    return dk, dv, Block(second, slice(0, half))


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
