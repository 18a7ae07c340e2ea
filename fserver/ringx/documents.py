"""Packed documents under the causal mask: X3, in which a row sees the keys of its document alone.

A rank has two chunks of each document (zigzag), so all ranks have the same rows and the same work,
however long documents are. All keys are gathered at once. There are three calls of `segments`, each
for all documents: the own rows with the own keys; all rows with the first chunks of the owners
before; and second chunks with both chunks of the owners behind. An index picks the keys of a call,
document after document, and puts their gradients back.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from . import segments
from .combine import Parts
from .kernels import Given, Pair, Triple, accumulator
from .layout import ranges
from .schedules import FASTEST, Job, _answer, _head_start, _pack, _unpack
from .segments import Segments, on_device

Call = tuple[Tensor | None, Tensor, Segments]
"""Which of the local rows (None: all) and of all keys, in the order of the gather."""


def forward(job: Job, q: Tensor, k: Tensor, v: Tensor) -> Pair:
    """Works on the own keys while all keys travel, then on the others."""
    answers = Parts(q.shape[1], accumulator(q.dtype), FASTEST)
    for (rows, _keys, of_call), kv in _turns(job, k, v):
        some = q if rows is None else q[:, rows]
        out, lse = segments.forward(some, *kv, of_call, job.scale)
        if rows is not None:
            none = lse.new_full((*lse.shape[:2], q.shape[1]), -torch.inf)
            out, lse = _spread(out, rows, q), none.index_copy_(2, rows, lse)
        answers.add(slice(0, q.shape[1]), out, lse)
    return _answer(job, answers)


def backward(job: Job, given: Given) -> Triple:
    """dk and dv of all keys are written into one buffer, whose sum over the ranks is scattered."""
    dout, q, k, v, out, lse = given
    length, size = k.shape[1], job.ranks.size
    dq = Parts(q.shape[1], accumulator(q.dtype), FASTEST)
    shape = (size * length, k.shape[0], 2, *k.shape[2:])
    dkv = torch.zeros(shape, dtype=job.reduce_dtype, device=k.device)
    for (rows, keys, of_call), kv in _turns(job, k, v):
        some = Given(dout, q, *kv, out, lse)
        if rows is not None:
            some = Given(dout[:, rows], q[:, rows], *kv, out[:, rows], lse[:, :, rows])
        part, *got = segments.backward(some, of_call, job.scale)
        dq.add(slice(0, q.shape[1]), part if rows is None else _spread(part, rows, q))
        dkv.index_copy_(0, keys, _pack(*got).to(dkv.dtype))
    mine = dkv.new_empty((length, *shape[1:]))
    job.ranks.scatter_sum(mine, dkv).wait()
    return dq.result(q.dtype)[0], *_unpack(mine)


def _spread(part: Tensor, rows: Tensor, q: Tensor) -> Tensor:
    """Returns what all rows get, if these get the part and the others nothing."""
    return torch.zeros_like(q, dtype=part.dtype).index_copy_(1, rows, part)


def _turns(job: Job, k: Tensor, v: Tensor) -> Iterator[tuple[Call, Pair]]:
    """Gives the calls with their keys and values, the own ones while the others travel."""
    mine, device = _pack(k, v), k.device
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    assert job.ends is not None
    own, *calls = _planned(job.ends, job.ranks.rank, job.ranks.size, device, stream)
    everybody = mine.new_empty((job.ranks.size * len(mine), *mine.shape[1:]))
    here = job.ranks.gather(everybody, mine)
    _head_start(device)
    yield own, (k, v)
    here.wait()
    for call in calls:
        yield call, _unpack(everybody[call[1]])


@lru_cache(maxsize=16)
def _planned(
    ends: tuple[int, ...], rank: int, size: int, device: torch.device, stream: int
) -> list[Call]:
    """Kept for the layers of a model: on each stream, behind what has made it there."""
    local, halves = (tuple(end // parts for end in ends) for parts in (size, 2 * size))
    starts = on_device([*local], device)
    chunks = starts.diff() // 2
    first, second = (
        ranges(begin, chunks, halves[-1]) for begin in (starts[:-1], starts[:-1] + chunks)
    )
    by_owner = torch.arange(ends[-1], device=device).view(size, -1)
    calls: list[Call] = [(None, by_owner[rank], Segments(local, local, True))]
    if rank:
        before = tuple(rank * end for end in halves)
        calls.append((None, by_owner[:rank, first].T.flatten(), Segments(local, before, False)))
    if rank < size - 1:
        behind = tuple((size - 1 - rank) * end for end in local)
        keys = by_owner[rank + 1 :].T.flatten()
        calls.append((second, keys, Segments(halves, behind, False)))
    return calls
