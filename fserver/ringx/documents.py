"""Packed documents under the causal mask: X3, in which a row sees the keys of its document alone.

A rank has two chunks of each document (zigzag), so that all ranks have the same rows and the same
work, however long the documents are. As in X3, all keys are gathered at once. There are three calls
of `segments`, each for all documents: the own rows with the own keys; all rows with the first
chunks of the owners before; and second chunks with both chunks of the owners behind. An index
picks the keys of a call, document after document, and puts their gradients back.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from . import segments
from .combine import Parts
from .kernels import Given, Pair, Triple, accumulator
from .layout import ranges
from .ranks import Collective
from .schedules import FASTEST, Blocks, Job, _answer, _head_start, _pack, _put, _unpack
from .segments import Segments, on_device


class Call(NamedTuple):
    """What the same rows see of several owners."""

    rows: Tensor | None  # which of the local rows; None: all
    keys: Tensor  # which of all keys, in the order in which they are gathered
    segments: Segments


def forward(job: Job, q: Tensor, k: Tensor, v: Tensor, **_: Blocks) -> Pair:
    """Works on the own keys while all keys travel, then on the others."""
    own, calls = _calls(job, q.device)
    everybody, here = _gather(job, k, v)
    every = slice(0, q.shape[1])
    answers = Parts(q.shape[1], accumulator(q.dtype), FASTEST)
    _head_start(q.device)
    answers.add(every, *segments.forward(q, k, v, own, job.scale))
    here.wait()
    for rows, keys, of_call in calls:
        kv = _unpack(everybody[keys])
        some = q if rows is None else q[:, rows]
        out, lse = segments.forward(some, *kv, of_call, job.scale)
        if rows is not None:  # the others see none of these keys
            out = torch.zeros_like(q).index_copy_(1, rows, out)
            none = lse.new_full((*lse.shape[:2], q.shape[1]), -torch.inf)
            lse = none.index_copy_(2, rows, lse)
        answers.add(every, out, lse)
    return _answer(job, answers)


def backward(job: Job, given: Given, **_: Blocks) -> Triple:
    """dk and dv of all keys are written into one buffer, whose sum over the ranks is scattered."""
    dout, q, k, v, out, lse = given
    own, calls = _calls(job, q.device)
    everybody, here = _gather(job, k, v)
    every = slice(0, q.shape[1])
    dq = Parts(q.shape[1], accumulator(q.dtype), FASTEST)
    dkv = torch.zeros(everybody.shape, dtype=job.reduce_dtype, device=k.device)
    _head_start(q.device)
    part, dk, dv = segments.backward(given, own, job.scale)
    dq.add(every, part)
    start = job.ranks.rank * k.shape[1]
    _put(dkv, slice(start, start + k.shape[1]), dk, dv)
    here.wait()
    for rows, keys, of_call in calls:
        kv = _unpack(everybody[keys])
        some = Given(dout, q, *kv, out, lse)
        if rows is not None:
            some = Given(dout[:, rows], q[:, rows], *kv, out[:, rows], lse[:, :, rows])
        part, dk, dv = segments.backward(some, of_call, job.scale)
        if rows is not None:
            part = torch.zeros_like(q, dtype=part.dtype).index_copy_(1, rows, part)
        dq.add(every, part)
        dkv.index_copy_(0, keys, _pack(dk, dv).to(dkv.dtype))
    mine = dkv.new_empty((k.shape[1], *dkv.shape[1:]))
    job.ranks.scatter_sum(mine, dkv).wait()
    return dq.result(q.dtype)[0], *_unpack(mine)


def _gather(job: Job, k: Tensor, v: Tensor) -> tuple[Tensor, Collective]:
    mine = _pack(k, v)
    everybody = mine.new_empty((job.ranks.size * mine.shape[0], *mine.shape[1:]))
    return everybody, job.ranks.gather(everybody, mine)


def _calls(job: Job, device: torch.device) -> tuple[Segments, list[Call]]:
    """Gives the documents of the own block, and the calls beside it."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    assert job.ends is not None
    return _planned(job.ends, job.ranks.rank, job.ranks.size, device, stream)


@lru_cache(maxsize=16)
def _planned(
    ends: tuple[int, ...], rank: int, size: int, device: torch.device, stream: int
) -> tuple[Segments, list[Call]]:
    """The plan is kept for the layers of a model, for each stream: what made it is before them."""
    local = tuple(end // size for end in ends)
    halves = tuple(end // 2 for end in local)
    starts = on_device(torch.tensor(local), device)
    chunks = starts.diff() // 2
    first = ranges(starts[:-1], chunks, halves[-1])
    second = ranges(starts[:-1] + chunks, chunks, halves[-1])
    by_owner = torch.arange(ends[-1], device=device).view(size, -1)
    calls = []
    if rank > 0:
        keys = by_owner[:rank, first].T.flatten()
        calls.append(Call(None, keys, Segments(local, _times(halves, rank), False)))
    if behind := size - 1 - rank:
        keys = by_owner[rank + 1 :].T.flatten()
        calls.append(Call(second, keys, Segments(halves, _times(local, behind), False)))
    return Segments(local, local, causal=True), calls


def _times(ends: tuple[int, ...], factor: int) -> tuple[int, ...]:
    return tuple(end * factor for end in ends)
